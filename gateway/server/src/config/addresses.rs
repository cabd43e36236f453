//! Where the gateway listens and where it finds workers, checked.

use std::net::IpAddr;
use std::path::{Component, PathBuf};

use super::ConfigError;
use super::raw::GatewayKeys;

/// A way to find workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerSource {
    /// One worker: `http://host:port` or `https://host:port`.
    Fixed(String),
    /// All addresses of a name.
    Dns {
        /// The name.
        host: String,
        /// Port of every worker.
        port: u16,
        /// `http` or `https`.
        scheme: &'static str,
    },
    /// All ready endpoints of a Kubernetes service.
    Kubernetes {
        /// Where the service is.
        namespace: String,
        /// Its name.
        service: String,
        /// Number or name of the port.
        port: String,
        /// `http` or `https`.
        scheme: &'static str,
    },
    /// A file with one worker a line.
    File(PathBuf),
}

/// What was given, as workers' URIs or ways to find them.
pub(super) fn worker_sources(keys: &GatewayKeys) -> Result<Vec<WorkerSource>, ConfigError> {
    let default = || vec!["127.0.0.1:50051".to_owned()];
    let given = keys.workers.clone().unwrap_or_else(default);
    let has_tls = keys.worker_tls_dir.is_some();
    let sources = given
        .iter()
        .map(|text| {
            worker_source(text.trim(), has_tls).map_err(|message| invalid("workers", message))
        })
        .collect::<Result<Vec<_>, _>>()?;
    if sources.is_empty() {
        return Err(invalid("workers", "at least one worker is needed".into()));
    }
    Ok(sources)
}

fn worker_source(text: &str, has_tls: bool) -> Result<WorkerSource, String> {
    // what is discovered is spoken to by TLS if there is something to check it with
    let scheme = if has_tls { "https" } else { "http" };
    match text.split_once("://") {
        Some(("dns", rest)) => {
            let (host, port) = host_and_port(rest, text)?;
            Ok(WorkerSource::Dns { host: host.to_owned(), port, scheme })
        }
        Some(("k8s", rest)) => {
            let parts = rest.split_once('/').and_then(|(namespace, service)| {
                service.rsplit_once(':').map(|(service, port)| [namespace, service, port])
            });
            match parts {
                Some(parts) if parts.iter().all(|part| is_dns_label(part)) => {
                    let [namespace, service, port] = parts.map(str::to_owned);
                    Ok(WorkerSource::Kubernetes { namespace, service, port, scheme })
                }
                _ => Err(format!("expected k8s://namespace/service:port, got {text:?}")),
            }
        }
        Some(("file", path)) if path.starts_with('/') => Ok(WorkerSource::File(path.into())),
        Some(("file", _)) => Err(format!("expected file:///path, got {text:?}")),
        _ => worker_uri(text, has_tls).map(WorkerSource::Fixed),
    }
}

/// `http://host:port` or `https://host:port` of a worker as people write it.
///
/// # Errors
/// What is wrong, with the text.
pub fn worker_uri(text: &str, has_tls: bool) -> Result<String, String> {
    match text.split_once("://") {
        Some(("https", _)) if !has_tls => {
            Err(format!("{text:?} needs --worker-tls-dir: who has signed its certificate?"))
        }
        Some((scheme @ ("http" | "https"), rest)) => {
            host_and_port(rest, text).map(|_| format!("{scheme}://{rest}"))
        }
        Some((scheme, _)) => Err(format!(
            "{scheme}:// is not known; expected http://, https://, dns://, k8s:// or file://, \
             got {text:?}"
        )),
        None => host_and_port(text, text).map(|_| format!("http://{text}")),
    }
}

fn host_and_port<'a>(text: &'a str, whole: &str) -> Result<(&'a str, u16), String> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    parts
        .filter(|(host, _)| !host.is_empty() && !host.contains('/'))
        .ok_or_else(|| format!("expected host:port, got {whole:?}"))
}

/// Source: RFC 1123, which Kubernetes names and port names keep.
fn is_dns_label(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 253
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.')
}

/// The address to serve on. One that others can reach needs keys, or the word that it does not.
pub(super) fn listen_address(keys: &GatewayKeys) -> Result<String, ConfigError> {
    let listen = keys.listen.clone().unwrap_or_else(|| "127.0.0.1:8000".into());
    let host = bind_address("listen", &listen)?;
    let is_open = keys.api_keys.is_none() && !keys.allow_anonymous.unwrap_or(false);
    if is_open && !is_loopback(host) {
        return Err(invalid(
            "listen",
            format!(
                "{listen} can be reached by others, and everyone who does could use the gateway: \
                 name a file of keys with --api-keys, or say --allow-anonymous"
            ),
        ));
    }
    Ok(listen)
}

pub(super) fn admin_address(given: Option<&str>) -> Result<Option<String>, ConfigError> {
    match given {
        None | Some("off") => Ok(None),
        Some(listen) => bind_address("admin_listen", listen).map(|_| Some(listen.to_owned())),
    }
}

fn bind_address<'a>(key: &'static str, listen: &'a str) -> Result<&'a str, ConfigError> {
    host_and_port(listen, listen).map(|(host, _)| host).map_err(|_| {
        invalid(key, format!("expected host:port, for example 0.0.0.0:8000, got {listen:?}"))
    })
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

pub(super) fn otlp_endpoint(given: Option<&str>) -> Result<Option<String>, ConfigError> {
    let Some(text) = given else { return Ok(None) };
    let url = url::Url::parse(text)
        .ok()
        .filter(|url| matches!(url.scheme(), "http" | "https") && url.host().is_some());
    match url {
        Some(_) => Ok(Some(text.trim_end_matches('/').to_owned())),
        None => {
            let got = without_user(text);
            Err(invalid("otlp_endpoint", format!("expected http://host:port, got {got:?}")))
        }
    }
}

fn invalid(key: &'static str, message: String) -> ConfigError {
    ConfigError::Invalid { key, message }
}

/// A URL that may hold a password, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ProxyUrl(url::Url);

impl std::ops::Deref for ProxyUrl {
    type Target = url::Url;

    fn deref(&self) -> &url::Url {
        &self.0
    }
}

impl std::fmt::Debug for ProxyUrl {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ProxyUrl").field(&without_user(self.0.as_str())).finish()
    }
}

/// What stands in a URL, or what was meant to be one, behind user name and password.
fn without_user(text: &str) -> &str {
    text.rsplit_once('@').map_or(text, |(_, rest)| rest)
}

/// # Errors
/// For what is no address of an HTTP proxy.
pub(super) fn media_proxy(text: &str) -> Result<ProxyUrl, ConfigError> {
    let parsed = url::Url::parse(text).ok();
    let is_proxy = |url: &url::Url| {
        matches!(url.scheme(), "http" | "https") && url.has_host() && url.path() == "/"
    };
    parsed.filter(is_proxy).map(ProxyUrl).ok_or_else(|| {
        let got = without_user(text);
        invalid("media_proxy", format!("expected http://host:port, got {got:?}"))
    })
}

/// # Errors
/// For what is no absolute path of a directory, or is one that no URL can name.
pub(super) fn media_root(path: PathBuf) -> Result<PathBuf, ConfigError> {
    // paths of URLs are put in order before they are compared
    let goes_back = path.components().any(|part| part == Component::ParentDir);
    if path.is_absolute() && path.is_dir() && !goes_back {
        return Ok(path);
    }
    let path = path.display();
    let message = format!("expected the absolute path of a directory, without .., got {path}");
    Err(invalid("media_root", message))
}
