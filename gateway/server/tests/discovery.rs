//! Workers from Kubernetes, before a scripted API server: lists, watches, and all that goes wrong.

#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use gateway_server::discovery::kubernetes::{ApiServer, Service, follow};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// What the server is told to answer, and what it was asked.
struct Script {
    list: Value,
    status: u16,
    /// The events of each watch that is opened, from the first on.
    watches: Vec<mpsc::Receiver<Bytes>>,
    asked: Vec<(String, Option<String>)>,
}

/// How long a test waits for what must happen, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(100);

type Shared = Arc<Mutex<Script>>;

fn slices(script: &Shared, request: &hyper::Request<hyper::body::Incoming>) -> Response {
    assert_eq!(request.uri().path(), PATH);
    let query = request.uri().query().unwrap_or_default();
    let query: Vec<(String, String)> =
        url::form_urlencoded::parse(query.as_bytes()).into_owned().collect();
    let mut script = script.lock().unwrap();
    let bearer = request.headers().get("authorization");
    let bearer = bearer.map(|value| value.to_str().unwrap().to_owned());
    script.asked.push((request.uri().to_string(), bearer));
    let is_watch =
        query.iter().any(|(key, value)| (key.as_str(), value.as_str()) == ("watch", "1"));
    let body = if is_watch {
        assert!(query.contains(&("resourceVersion".into(), "7".into())), "{query:?}");
        if script.watches.is_empty() {
            Body::from_stream(futures::stream::pending::<Result<Bytes, Infallible>>())
        } else {
            let events = tokio_stream::wrappers::ReceiverStream::new(script.watches.remove(0));
            Body::from_stream(futures::StreamExt::map(events, Ok::<_, Infallible>))
        }
    } else {
        Body::from(script.list.to_string())
    };
    Response::builder().status(script.status).body(body).unwrap()
}

/// Answers every connection for as long as it is not dropped.
async fn serve(listener: tokio::net::TcpListener, script: Shared) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let script = Arc::clone(&script);
        let service = hyper::service::service_fn(move |request| {
            let response = slices(&script, &request);
            async move { Ok::<_, Infallible>(response) }
        });
        let stream = hyper_util::rt::TokioIo::new(stream);
        let serving = hyper::server::conn::http1::Builder::new().serve_connection(stream, service);
        connections.spawn(async move {
            let _ = serving.await;
        });
    }
}

const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices";

struct Cluster {
    script: Shared,
    server: ApiServer,
    found: mpsc::UnboundedReceiver<Vec<String>>,
    _serving: tokio::task::JoinSet<()>,
}

fn list(slices: &[Value]) -> Value {
    json!({"kind": "EndpointSliceList", "metadata": {"resourceVersion": "7"}, "items": slices})
}

fn slice(name: &str, endpoints: &[(&str, Option<bool>)]) -> Value {
    let endpoints: Vec<_> = endpoints
        .iter()
        .map(|(address, ready)| json!({"addresses": [address], "conditions": {"ready": ready}}))
        .collect();
    let family = if name.ends_with("v6") { "IPv6" } else { "IPv4" };
    json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "m3-worker"}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "metrics", "port": 9100}, {"name": "grpc", "port": 50051}],
    })
}

fn event(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{}\n", json!({"type": kind, "object": object})))
}

impl Cluster {
    async fn start(
        first: Value,
        watches: Vec<mpsc::Receiver<Bytes>>,
        token: Option<PathBuf>,
    ) -> Self {
        let script = Script { list: first, status: 200, watches, asked: Vec::new() };
        let script = Arc::new(Mutex::new(script));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = ApiServer { url, token, ca: None };
        let service = Service {
            namespace: "models".into(),
            name: "m3-worker".into(),
            port: "grpc".into(),
            scheme: "http",
        };
        let (sender, found) = mpsc::unbounded_channel();
        let publish = move |list: Vec<gateway_server::workers::WorkerAddress>| {
            let mut uris: Vec<_> = list.into_iter().map(|address| address.uri).collect();
            uris.sort();
            let _ = sender.send(uris);
        };
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut serving = tokio::task::JoinSet::new();
        serving.spawn(serve(listener, Arc::clone(&script)));
        serving.spawn(follow(server.clone(), service, publish));
        Self { script, server, found, _serving: serving }
    }

    async fn next(&mut self) -> Vec<String> {
        let next = tokio::time::timeout(PATIENCE, self.found.recv());
        next.await.expect("nothing was found").unwrap()
    }
}

const A: &str = "http://10.0.0.1:50051";
const B: &str = "http://10.0.0.2:50051";

#[tokio::test]
async fn ready_endpoints_of_all_slices_are_workers() {
    let slices = [
        slice("one", &[("10.0.0.1", Some(true)), ("10.0.0.9", Some(false)), ("10.0.0.2", None)]),
        slice("two-v6", &[("fd00::5", Some(true))]),
        json!({"metadata": {"name": "empty"}, "addressType": "IPv4", "endpoints": null, "ports": null}),
    ];
    let mut cluster = Cluster::start(list(&slices), vec![], None).await;

    assert_eq!(cluster.next().await, [A, B, "http://[fd00::5]:50051"]);
    let asked = cluster.script.lock().unwrap().asked[0].clone();
    assert!(asked.0.ends_with("?labelSelector=kubernetes.io%2Fservice-name%3Dm3-worker"));
    assert_eq!(asked.1, None);
    assert!(cluster.server.url.starts_with("http://127.0.0.1:"));
}

#[tokio::test]
async fn a_worker_that_is_no_longer_ready_terminating_or_deleted_is_gone_with_the_event() {
    let (events, watch) = mpsc::channel(8);
    let both = [("10.0.0.1", Some(true)), ("10.0.0.2", Some(true))];
    let mut cluster = Cluster::start(list(&[slice("one", &both)]), vec![watch], None).await;
    assert_eq!(cluster.next().await, [A, B]);

    let changed = slice("one", &[("10.0.0.1", Some(false)), ("10.0.0.2", Some(true))]);
    events.send(event("MODIFIED", &changed)).await.unwrap();
    assert_eq!(cluster.next().await, [B]);

    let mut leaving = slice("one", &both);
    leaving["endpoints"][1]["conditions"]["terminating"] = json!(true);
    // an event may come in pieces
    let whole = event("MODIFIED", &leaving);
    events.send(whole.slice(..10)).await.unwrap();
    events.send(whole.slice(10..)).await.unwrap();
    assert_eq!(cluster.next().await, [A]);

    events.send(event("BOOKMARK", &json!({"metadata": {"resourceVersion": "9"}}))).await.unwrap();
    events.send(event("ADDED", &slice("two", &[("10.0.0.2", Some(true))]))).await.unwrap();
    assert_eq!(cluster.next().await, [A, B]);
    events.send(event("DELETED", &leaving)).await.unwrap();
    assert_eq!(cluster.next().await, [B]);
}

#[tokio::test]
async fn what_was_missed_while_the_watch_was_away_is_listed_anew() {
    let (events, watch) = mpsc::channel(8);
    let both = [("10.0.0.1", Some(true)), ("10.0.0.2", Some(true))];
    let mut cluster = Cluster::start(list(&[slice("one", &both)]), vec![watch], None).await;
    assert_eq!(cluster.next().await, [A, B]);

    // deleted while nobody watches: no event will ever tell
    cluster.script.lock().unwrap().list = list(&[slice("one", &both[1..])]);
    drop(events);

    assert_eq!(cluster.next().await, [B]);
}

#[tokio::test]
async fn a_version_that_is_too_old_is_listed_anew() {
    let (events, watch) = mpsc::channel(8);
    let mut cluster = Cluster::start(list(&[]), vec![watch], None).await;
    assert!(cluster.next().await.is_empty());

    cluster.script.lock().unwrap().list = list(&[slice("one", &[("10.0.0.1", Some(true))])]);
    let gone = json!({"kind": "Status", "code": 410, "reason": "Expired"});
    events.send(event("ERROR", &gone)).await.unwrap();

    assert_eq!(cluster.next().await, [A]);
}

#[tokio::test]
async fn a_server_that_fails_for_a_while_changes_nothing_and_a_token_is_read_anew() {
    let token = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::write(&token, "first\n").unwrap();
    let (events, watch) = mpsc::channel(8);
    let first = list(&[slice("one", &[("10.0.0.1", Some(true))])]);
    let mut cluster = Cluster::start(first, vec![watch], Some(token.to_path_buf())).await;
    assert_eq!(cluster.next().await, [A]);

    cluster.script.lock().unwrap().status = 403;
    std::fs::write(&token, "second\n").unwrap();
    drop(events);
    let script = Arc::clone(&cluster.script);
    let is_asked_again = move || {
        let script = script.lock().unwrap();
        let last = script.asked.last().and_then(|(_, bearer)| bearer.clone());
        last.as_deref() == Some("Bearer second") && script.asked.len() > 3
    };
    let deadline = std::time::Instant::now() + PATIENCE;
    while !is_asked_again() {
        assert!(std::time::Instant::now() < deadline, "it was not asked again");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(cluster.found.try_recv().is_err(), "the list was changed by a failure");
    {
        let mut script = cluster.script.lock().unwrap();
        script.status = 200;
        script.list = list(&[slice("one", &[("10.0.0.2", Some(true))])]);
    }
    assert_eq!(cluster.next().await, [B]);
}

#[test]
fn outside_a_cluster_the_missing_variable_is_named() {
    let message = ApiServer::in_cluster().unwrap_err();
    assert!(message.contains("KUBERNETES_SERVICE_HOST"), "{message}");
}
