//! Media from the network: few hops, each re-checked; bounded in bytes and time.

use std::error::Error as StdError;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::header::{ACCEPT_ENCODING, LOCATION};
use reqwest::{Client, Response, StatusCode, dns};
use tokio::time::Instant;
use url::Url;

use super::address::AddressPolicy;
use super::cache::ByteCache;
use super::data_url::too_large;
use super::fetch_cache::Stored;
use crate::admission::{Admission, ByteLease};
use crate::error::{ErrorKind, GatewayError};

const MAX_REDIRECTS: usize = 3;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_CONNECTIONS: usize = 4;

/// Fetches media over HTTP.
pub struct Fetcher {
    policy: Arc<AddressPolicy>,
    proxy: Option<Url>,
    bounds: Bounds,
    /// Bodies by the URL that gave them (redirects are followed anew each time).
    stored: ByteCache<String, Stored>,
    /// Made on first use: reading the system's certificates takes time and memory.
    client: OnceLock<Result<Client, String>>,
}

/// Of one fetch.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of the body.
    pub max_bytes: u64,
    /// From the question to the last byte.
    pub timeout: Duration,
}

/// What one URL says.
enum Answer {
    Body(Bytes),
    Elsewhere(Url),
}

impl Fetcher {
    /// A fetcher under that policy. What goes through a proxy is resolved by the proxy: literal
    /// addresses are judged here all the same, and so are names; those that cannot be resolved here
    /// must be allowed by name.
    pub fn new(
        policy: AddressPolicy,
        proxy: Option<Url>,
        stored: ByteCache<String, Stored>,
        bounds: Bounds,
    ) -> Self {
        Self { policy: Arc::new(policy), proxy, bounds, stored, client: OnceLock::new() }
    }

    /// The bytes behind an `http:` or `https:` URL, held under `lease`.
    ///
    /// # Errors
    /// `InvalidRequest` for a URL the policy refuses, `MediaOriginFailed`, `MediaOriginTimeout`,
    /// `TooLarge`, `Overloaded` when the byte budget is spent.
    pub async fn fetch(
        &self,
        url: &str,
        admission: &Admission,
        lease: &mut ByteLease,
    ) -> Result<Bytes, GatewayError> {
        let deadline = Instant::now() + self.bounds.timeout;
        let work = self.follow(url, admission, lease);
        let late = |_| too_late(self.bounds.timeout);
        tokio::time::timeout_at(deadline, work).await.map_err(late)?
    }

    /// Requests the URL and at most three redirects.
    async fn follow(
        &self,
        url: &str,
        admission: &Admission,
        lease: &mut ByteLease,
    ) -> Result<Bytes, GatewayError> {
        let mut url = Url::parse(url).map_err(|error| {
            url_refusal(format!("the media URL is not data:, http: or https: ({error})"))
        })?;
        for _ in 0..=MAX_REDIRECTS {
            self.policy.check_url(&url)?;
            self.check_name(&url).await?;
            match self.request(&url, admission, lease).await? {
                Answer::Body(bytes) => return Ok(bytes),
                Answer::Elsewhere(next) => url = next,
            }
        }
        Err(GatewayError::new(
            ErrorKind::MediaOriginFailed,
            format!("the media URL redirects more than {MAX_REDIRECTS} times"),
        ))
    }

    /// Judges a name that a proxy will resolve.
    async fn check_name(&self, url: &Url) -> Result<(), GatewayError> {
        let Some(host) = url.domain().filter(|_| self.proxy.is_some()) else { return Ok(()) };
        match resolved(&self.policy, host).await {
            Ok(_) => Ok(()),
            Err(error) => match error.downcast::<ForbiddenName>() {
                Ok(forbidden) => Err(forbidden.refusal()),
                Err(_) if self.policy.knows(url) => Ok(()),
                Err(error) => Err(url_refusal(format!(
                    "media may not be fetched from {host}: the name does not resolve here, so that \
                     nobody knows where the proxy would go; it would have to be an allowed host"
                ))
                .because(error.to_string())),
            },
        }
    }

    /// Asks one URL, or takes what an earlier answer allows to be used again.
    async fn request(
        &self,
        url: &Url,
        admission: &Admission,
        lease: &mut ByteLease,
    ) -> Result<Answer, GatewayError> {
        let key = url.as_str().to_owned();
        let stored = self.stored.get(&key);
        let mut request = self.client()?.get(url.clone()).header(ACCEPT_ENCODING, "identity");
        if let Some(stored) = &stored {
            if stored.is_fresh(Instant::now()) {
                admission.grow(lease, stored.bytes.len() as u64)?;
                return Ok(Answer::Body(stored.bytes.clone()));
            }
            for (name, value) in stored.question() {
                request = request.header(name, value);
            }
        }
        let response = request.send().await.map_err(|error| send_failure(&error))?;
        if let Some(stored) = stored
            && response.status() == StatusCode::NOT_MODIFIED
        {
            admission.grow(lease, stored.bytes.len() as u64)?;
            match stored.renewed(response.headers(), Instant::now()) {
                Some(renewed) => self.keep(key, renewed),
                None => self.stored.remove(&key),
            }
            return Ok(Answer::Body(stored.bytes));
        }
        if response.status().is_redirection() {
            return redirect_target(url, &response).map(Answer::Elsewhere);
        }
        let response = check_status(response)?;
        let is_plain = response.status() == StatusCode::OK;
        let (headers, received) = (response.headers().clone(), Instant::now());
        let bytes = self.read(response, admission, lease).await?;
        match Stored::of(&headers, bytes.clone(), received).filter(|_| is_plain) {
            Some(fresh) => self.keep(key, fresh),
            None => self.stored.remove(&key),
        }
        Ok(Answer::Body(bytes))
    }

    fn keep(&self, key: String, stored: Stored) {
        let bytes = (key.len() + stored.bytes.len()) as u64;
        self.stored.put(key, stored, bytes);
    }

    async fn read(
        &self,
        mut response: Response,
        admission: &Admission,
        lease: &mut ByteLease,
    ) -> Result<Bytes, GatewayError> {
        let declared = response.content_length().unwrap_or(0);
        let max_bytes = self.bounds.max_bytes;
        if declared > max_bytes {
            return Err(too_large(declared, max_bytes));
        }
        admission.grow(lease, declared)?;
        let mut body = BytesMut::with_capacity(usize::try_from(declared).unwrap_or(0));
        while let Some(piece) = response.chunk().await.map_err(|error| read_failure(&error))? {
            let bytes = (body.len() + piece.len()) as u64;
            if bytes > max_bytes {
                return Err(too_large(bytes, max_bytes));
            }
            admission.grow(lease, bytes)?;
            body.extend_from_slice(&piece);
        }
        Ok(body.freeze())
    }

    fn client(&self) -> Result<&Client, GatewayError> {
        let made = self.client.get_or_init(|| build_client(&self.policy, self.proxy.as_ref()));
        made.as_ref().map_err(|reason| {
            GatewayError::internal(format!("the http client for media cannot be made: {reason}"))
        })
    }
}

fn build_client(policy: &Arc<AddressPolicy>, proxy: Option<&Url>) -> Result<Client, String> {
    // an embedding program may have installed a provider of its own
    let _ = rustls::crypto::ring::default_provider().install_default();
    let way = proxy.map(|proxy| reqwest::Proxy::all(proxy.clone())).transpose();
    let way = way.map_err(|error| innermost(&error))?;
    let proxy_host = proxy.and_then(Url::domain).map(str::to_owned);
    let builder = || {
        // that of the environment is not asked
        let builder = Client::builder().no_proxy();
        let builder = match &way {
            Some(way) => builder.proxy(way.clone()),
            None => builder,
        };
        builder
            .user_agent(concat!("m3stack/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .dns_resolver(CheckedResolver {
                policy: Arc::clone(policy),
                proxy_host: proxy_host.clone(),
            })
    };
    builder().build().or_else(|error| {
        tracing::warn!(reason = %innermost(&error), "no system certificates: media from https will fail");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        builder().tls_backend_preconfigured(tls).build().map_err(|error| innermost(&error))
    })
}

/// Resolves a name once, judges all of its addresses, and hands exactly these to the connector:
/// what was judged is what is dialled. (Literal addresses never come here; `check_url` sees them.)
struct CheckedResolver {
    policy: Arc<AddressPolicy>,
    /// The operator's own choice; with it no other name is dialled.
    proxy_host: Option<String>,
}

/// A name that leads to an address the policy refuses.
#[derive(Debug, thiserror::Error)]
#[error("media may not be fetched from {host}: it resolves to an address that is not public")]
struct ForbiddenName {
    host: String,
}

impl ForbiddenName {
    fn refusal(&self) -> GatewayError {
        url_refusal(self.to_string())
    }
}

impl dns::Resolve for CheckedResolver {
    fn resolve(&self, name: dns::Name) -> dns::Resolving {
        let policy = Arc::clone(&self.policy);
        let is_proxy = self.proxy_host.as_deref() == Some(name.as_str());
        Box::pin(async move {
            let found = match is_proxy {
                true => tokio::net::lookup_host((name.as_str(), 0)).await?.collect(),
                false => resolved(&policy, name.as_str()).await?,
            };
            Ok(Box::new(found.into_iter()) as dns::Addrs)
        })
    }
}

/// All addresses of a name, if every one of them may be dialled.
async fn resolved(
    policy: &AddressPolicy,
    host: &str,
) -> Result<Vec<SocketAddr>, Box<dyn StdError + Send + Sync>> {
    let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
    if found.iter().any(|address| !policy.allows(address.ip())) {
        return Err(Box::new(ForbiddenName { host: host.to_owned() }));
    }
    Ok(found)
}

/// Of media that took longer than they may.
pub fn too_late(limit: Duration) -> GatewayError {
    let message = format!("the media did not arrive within {} s", limit.as_secs());
    GatewayError::new(ErrorKind::MediaOriginTimeout, message)
}

fn url_refusal(message: String) -> GatewayError {
    let mut refusal = GatewayError::new(ErrorKind::InvalidRequest, message);
    refusal.code = "media_url_refused";
    refusal
}

fn check_status(response: Response) -> Result<Response, GatewayError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    Err(GatewayError::new(
        ErrorKind::MediaOriginFailed,
        format!("the server that holds the media answered {}", status.as_u16()),
    ))
}

fn redirect_target(from: &Url, response: &Response) -> Result<Url, GatewayError> {
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    location.and_then(|location| from.join(location).ok()).ok_or_else(|| {
        GatewayError::new(
            ErrorKind::MediaOriginFailed,
            "the server that holds the media redirects to nowhere",
        )
    })
}

fn send_failure(error: &reqwest::Error) -> GatewayError {
    let mut cause: Option<&dyn StdError> = Some(error);
    while let Some(inner) = cause {
        if let Some(forbidden) = inner.downcast_ref::<ForbiddenName>() {
            return forbidden.refusal();
        }
        cause = inner.source();
    }
    let kind = if error.is_timeout() {
        ErrorKind::MediaOriginTimeout
    } else {
        ErrorKind::MediaOriginFailed
    };
    GatewayError::new(kind, "the server that holds the media cannot be reached")
        .because(innermost(error))
}

fn read_failure(error: &reqwest::Error) -> GatewayError {
    GatewayError::new(
        ErrorKind::MediaOriginFailed,
        "the server that holds the media broke off in the middle",
    )
    .because(innermost(error))
}

/// The last cause of a chain: the one that says what happened.
fn innermost(error: &dyn StdError) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
