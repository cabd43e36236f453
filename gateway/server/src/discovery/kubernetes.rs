//! Workers from Kubernetes: the ready endpoints of a service, listed once and then watched.
//!
//! Needs `get`, `list` and `watch` on `endpointslices` of its namespace and nothing else.
//! Source: the discovery.k8s.io/v1 and watch parts of the Kubernetes API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use bytes::BytesMut;
use serde::Deserialize;

use crate::workers::WorkerAddress;

const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The server ends a watch after this; it is then listed anew, so that nothing missed is missed
/// for long.
const WATCH_S: u64 = 240;
/// A watch that says nothing for longer is dead: the server would have ended it.
const MAX_SILENCE: Duration = Duration::from_secs(WATCH_S + 20);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// One event holds one slice: at most 1000 endpoints.
const MAX_EVENT_BYTES: usize = 8 << 20;

/// The Kubernetes API and how to be let in.
#[derive(Clone, Debug)]
pub struct ApiServer {
    /// `https://host:port`.
    pub url: String,
    /// File of the bearer token; it changes, so it is read for every call. `None` sends none.
    pub token: Option<PathBuf>,
    /// File of the certificates that have signed the server's.
    pub ca: Option<PathBuf>,
}

/// A service whose endpoints are workers.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where it is.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Number or name of the port.
    pub port: String,
    /// `http` or `https`.
    pub scheme: &'static str,
}

impl ApiServer {
    /// The server of the cluster this process runs in, by the account of its pod.
    ///
    /// # Errors
    /// This is no pod.
    pub fn in_cluster() -> Result<Self, String> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                format!("workers by k8s:// are found from inside a cluster only: {name} is not set")
            })
        };
        let (host, port) =
            (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let account = PathBuf::from(ACCOUNT);
        Ok(Self {
            url: format!("https://{host}:{port}"),
            token: Some(account.join("token")),
            ca: Some(account.join("ca.crt")),
        })
    }

    fn client(&self) -> Result<reqwest::Client, String> {
        let builder = reqwest::Client::builder().no_proxy().connect_timeout(ANSWER_TIMEOUT);
        let builder = match &self.ca {
            None => builder,
            Some(path) => {
                let shown = path.display();
                let text = std::fs::read(path).map_err(|error| format!("{shown}: {error}"))?;
                let certificates = reqwest::Certificate::from_pem_bundle(&text)
                    .map_err(|error| format!("{shown}: {error}"))?;
                builder.tls_certs_only(certificates)
            }
        };
        builder.build().map_err(|error| error.to_string())
    }
}

/// Publishes the service's workers for ever. While the API cannot be reached the last list stays.
pub async fn follow(
    server: ApiServer,
    service: Service,
    publish: impl Fn(Vec<WorkerAddress>) + Send,
) {
    let mut pause = BACKOFF.0;
    loop {
        let outcome = list_and_watch(&server, &service, &publish, &mut pause).await;
        match outcome {
            // the ordinary end of a watch
            Ok(()) => continue,
            Err(error) => {
                tracing::warn!(service = %service.name, namespace = %service.namespace, %error,
                    "endpoints cannot be watched");
            }
        }
        let jitter = rand::Rng::random_range(&mut rand::rng(), 0.5..1.0);
        tokio::time::sleep(pause.mul_f64(jitter)).await;
        pause = (pause * 2).min(BACKOFF.1);
    }
}

async fn list_and_watch(
    server: &ApiServer,
    service: &Service,
    publish: &(impl Fn(Vec<WorkerAddress>) + Send),
    pause: &mut Duration,
) -> Result<(), String> {
    let client = server.client()?;
    let listing = ask(server, service, &client, &[]);
    let listing = tokio::time::timeout(ANSWER_TIMEOUT, async {
        listing.await?.bytes().await.map_err(|error| error.to_string())
    });
    let bytes = listing.await.map_err(|_| "the API does not answer".to_owned())??;
    let list: SliceList = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let mut slices: BTreeMap<String, Slice> =
        list.items.into_iter().map(|slice| (slice.metadata.name.clone(), slice)).collect();
    publish(addresses(&slices, service));
    let query = [
        ("watch", "1"),
        ("allowWatchBookmarks", "true"),
        ("resourceVersion", &list.metadata.resource_version),
        ("timeoutSeconds", &WATCH_S.to_string()),
    ];
    let opening = tokio::time::timeout(ANSWER_TIMEOUT, ask(server, service, &client, &query));
    let mut stream = opening.await.map_err(|_| "the API does not answer".to_owned())??;
    let mut buffer = BytesMut::new();
    loop {
        let piece = tokio::time::timeout(MAX_SILENCE, stream.chunk()).await;
        let piece = piece.map_err(|_| "the watch has fallen silent".to_owned())?;
        let Some(piece) = piece.map_err(|error| error.to_string())? else { return Ok(()) };
        *pause = BACKOFF.0;
        buffer.extend_from_slice(&piece);
        if buffer.len() > MAX_EVENT_BYTES {
            return Err(format!("an event is larger than {MAX_EVENT_BYTES} bytes"));
        }
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line = buffer.split_to(end + 1);
            let event: Event = serde_json::from_slice(&line).map_err(|error| error.to_string())?;
            if apply(event, &mut slices)? {
                publish(addresses(&slices, service));
            }
        }
    }
}

async fn ask(
    server: &ApiServer,
    service: &Service,
    client: &reqwest::Client,
    query: &[(&str, &str)],
) -> Result<reqwest::Response, String> {
    let path = format!(
        "{}/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
        server.url, service.namespace
    );
    let selector = format!("kubernetes.io/service-name={}", service.name);
    let mut url = url::Url::parse(&path).map_err(|error| error.to_string())?;
    url.query_pairs_mut().append_pair("labelSelector", &selector).extend_pairs(query);
    let mut request = client.get(url);
    if let Some(path) = &server.token {
        let token = tokio::fs::read_to_string(path).await;
        let token = token.map_err(|error| format!("{}: {error}", path.display()))?;
        request = request.bearer_auth(token.trim());
    }
    let response = request.send().await.map_err(|error| innermost(&error))?;
    match response.status().as_u16() {
        200 => Ok(response),
        403 => Err(format!(
            "the API forbids it: this pod's account needs get, list and watch on endpointslices \
             in {}",
            service.namespace
        )),
        status => Err(format!("the API answers {status}")),
    }
}

fn innermost(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Whether the event changes anything.
fn apply(event: Event, slices: &mut BTreeMap<String, Slice>) -> Result<bool, String> {
    let slice = |value| serde_json::from_value::<Slice>(value).map_err(|error| error.to_string());
    match event.kind.as_str() {
        "ADDED" | "MODIFIED" => {
            let slice = slice(event.object)?;
            slices.insert(slice.metadata.name.clone(), slice);
            Ok(true)
        }
        "DELETED" => {
            slices.remove(&slice(event.object)?.metadata.name);
            Ok(true)
        }
        "BOOKMARK" => Ok(false),
        // above all 410: what was listed is too old to be watched from
        _ => Err(format!("the watch ended with {} {}", event.kind, event.object)),
    }
}

fn addresses(slices: &BTreeMap<String, Slice>, service: &Service) -> Vec<WorkerAddress> {
    let is_tls = service.scheme == "https";
    let tls_name = is_tls.then(|| format!("{}.{}.svc", service.name, service.namespace));
    let mut found = Vec::new();
    for slice in slices.values() {
        let port = service.port.parse().ok().or_else(|| {
            let named = |port: &&Port| port.name.as_deref() == Some(&*service.port);
            slice.ports.iter().flatten().find(named).and_then(|port| port.port)
        });
        let Some(port): Option<u16> = port else { continue };
        let host = |address: &String| match slice.address_type.as_str() {
            "IPv4" => Some(address.clone()),
            "IPv6" => Some(format!("[{address}]")),
            _ => None,
        };
        for endpoint in slice.endpoints.iter().flatten().filter(|endpoint| endpoint.is_ready()) {
            found.extend(endpoint.addresses.iter().filter_map(host).map(|host| WorkerAddress {
                uri: format!("{}://{host}:{port}", service.scheme),
                tls_name: tls_name.clone(),
            }));
        }
    }
    found
}

#[derive(Deserialize)]
struct SliceList {
    metadata: ListMeta,
    #[serde(default)]
    items: Vec<Slice>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: serde_json::Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Slice {
    metadata: Meta,
    address_type: String,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<Port>>,
}

#[derive(Deserialize)]
struct Meta {
    name: String,
}

#[derive(Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

#[derive(Deserialize)]
struct Endpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
}

#[derive(Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

impl Endpoint {
    /// An unknown readiness is to be read as ready, says the API.
    fn is_ready(&self) -> bool {
        self.conditions.ready.unwrap_or(true) && !self.conditions.terminating.unwrap_or(false)
    }
}
