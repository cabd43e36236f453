//! Who may ask: keys at the door of the API and at that of the operators, and the name of the host.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use gateway_server::keys::Role;
use support::{FakeWorker, Gateway, Reply, chat_body, eventually, saying, worker};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const USER: &str = "sk-user-0123456789";
const ADMIN: &str = "sk-admin-0123456789";

/// A file of keys that goes away with its holder.
struct KeyFile(tempfile::TempPath);

impl KeyFile {
    fn new() -> Self {
        let file = Self(tempfile::NamedTempFile::new().unwrap().into_temp_path());
        file.write(&[("team", USER, "user"), ("ops", ADMIN, "admin")]);
        file
    }

    fn write(&self, keys: &[(&str, &str, &str)]) {
        let entry = |(name, key, role): &(&str, &str, &str)| {
            format!("[[keys]]\nname = \"{name}\"\nkey = \"{key}\"\nrole = \"{role}\"\n")
        };
        support::replace(&self.0, &keys.iter().map(entry).collect::<String>());
    }
}

async fn before(worker: &FakeWorker, file: &KeyFile, more: &[&str]) -> Gateway {
    worker.set_acts(saying("ok"));
    let keys = file.0.to_str().unwrap();
    Gateway::start(&[worker], &[&["--api-keys", keys], more].concat()).await
}

async fn ask(gateway: &Gateway, path: &str, headers: &[(&str, &str)]) -> Reply {
    let request = match path {
        "/v1/models" | "/health" | "/ready" | "/version" | "/metrics" | "/nowhere" => {
            gateway.client.get(format!("{}{path}", gateway.url))
        }
        _ => gateway
            .client
            .post(format!("{}{path}", gateway.url))
            .body(chat_body(serde_json::json!({"max_tokens": 8})).to_string()),
    };
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    support::read(request.send().await.unwrap()).await
}

#[tokio::test]
async fn a_request_without_a_known_key_is_refused_in_the_words_of_its_protocol() {
    let (worker, file) = (worker(), KeyFile::new());
    let gateway = before(&worker, &file, &[]).await;
    let bad: [&[(&str, &str)]; 6] = [
        &[],
        &[("authorization", "Bearer sk-user-012345678")],
        &[("authorization", USER)],
        &[("authorization", "Basic sk-user-0123456789")],
        &[("x-api-key", "")],
        &[("x-api-key", "sk-user-0123456789x")],
    ];
    let paths = [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/metrics",
        "/nowhere",
    ];
    for headers in bad {
        for path in paths {
            let reply = ask(&gateway, path, headers).await;
            assert_eq!(reply.status, 401, "{path} {headers:?}: {}", reply.text);
            assert_eq!(reply.error()["code"], "invalid_api_key", "{path} {headers:?}");
            assert_eq!(reply.headers["www-authenticate"], "Bearer");
            assert!(reply.headers.contains_key("x-request-id"));
        }
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let reply = ask(&gateway, path, headers).await;
            assert_eq!(reply.status, 401, "{path} {headers:?}: {}", reply.text);
            assert_eq!(reply.json()["type"], "error");
            assert_eq!(reply.json()["error"]["type"], "authentication_error");
        }
    }
    assert!(worker.seen().is_empty());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn a_key_lets_its_tenant_ask_however_its_client_sends_it() {
    let (worker, file) = (worker(), KeyFile::new());
    let gateway = before(&worker, &file, &[]).await;
    let bearer = format!("Bearer {USER}");
    let lower = format!("bearer {USER}");
    let admin = format!("Bearer {ADMIN}");
    for headers in [
        &[("authorization", bearer.as_str())][..],
        &[("authorization", lower.as_str())],
        &[("x-api-key", USER)],
        // a client that always sends some bearer beside its key
        &[("authorization", "Bearer none"), ("x-api-key", USER)],
    ] {
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/models", "/metrics"] {
            assert_eq!(ask(&gateway, path, headers).await.status, 200, "{path} {headers:?}");
        }
    }
    let reply = ask(&gateway, "/v1/chat/completions", &[("authorization", &admin)]).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let tenants: Vec<_> = worker.seen().into_iter().map(|seen| seen.header.tenant).collect();
    assert_eq!(tenants.len(), 9);
    assert!(tenants[..8].iter().all(|tenant| tenant == "team"), "{tenants:?}");
    assert_eq!(tenants[8], "ops");
}

#[tokio::test]
async fn probes_need_no_key() {
    let (worker, file) = (worker(), KeyFile::new());
    let gateway = before(&worker, &file, &[]).await;
    for path in ["/health", "/ready", "/version"] {
        assert_eq!(ask(&gateway, path, &[]).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn only_an_admin_operates() {
    let (worker, file) = (worker(), KeyFile::new());
    let gateway = before(&worker, &file, &["--admin-listen", "127.0.0.1:0"]).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let gone = tokio_util::sync::CancellationToken::new();
    let serving =
        gateway_server::http::serve_admin(Arc::clone(&gateway.app), listener, gone.clone());
    let serving = tokio::spawn(serving);
    let drain = async |key: Option<&str>| {
        let request = gateway.client.post(format!("{url}/admin/drain"));
        let request = key.into_iter().fold(request, |request, key| request.bearer_auth(key));
        support::read(request.send().await.unwrap()).await
    };

    let metrics = gateway.client.get(format!("{url}/metrics")).send().await.unwrap();
    assert_eq!(metrics.status().as_u16(), 200);
    assert_eq!(drain(None).await.status, 401);
    let refusal = drain(Some(USER)).await;
    assert_eq!((refusal.status, &refusal.error()["code"]), (403, &"forbidden".into()));
    assert!(!gateway.app.leave.is_cancelled());
    assert_eq!(drain(Some(ADMIN)).await.status, 200);
    assert!(gateway.app.leave.is_cancelled());

    gone.cancel();
    serving.await.unwrap();
}

#[tokio::test]
async fn keys_are_taken_back_and_given_while_the_gateway_runs() {
    let (worker, file) = (worker(), KeyFile::new());
    let gateway = before(&worker, &file, &[]).await;
    let keys = Arc::clone(gateway.app.keys.as_ref().unwrap());
    let fresh = "sk-fresh-0123456789";

    file.write(&[("team", fresh, "user")]);
    eventually("the new key holds", || keys.caller(fresh).is_some()).await;
    assert_eq!(ask(&gateway, "/v1/models", &[("x-api-key", USER)]).await.status, 401);
    assert_eq!(ask(&gateway, "/v1/models", &[("x-api-key", fresh)]).await.status, 200);

    // a broken file changes nothing, one that is whole again does
    std::fs::write(&file.0, "[[keys]]\nname = ").unwrap();
    file.write(&[("team", fresh, "user"), ("ops", ADMIN, "admin")]);
    eventually("the other key holds too", || keys.caller(ADMIN).is_some()).await;
    assert_eq!(keys.caller(ADMIN).unwrap().role, Role::Admin);
    assert!(keys.caller(fresh).is_some());
}

#[test]
fn a_file_that_cannot_be_used_ends_the_start() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let config = support::config(&["127.0.0.1:1".into()], &["--api-keys", "/nowhere/keys"]);
    let message = gateway_server::App::start(config).err().unwrap().to_string();
    assert!(message.starts_with("api_keys: /nowhere/keys: "), "{message}");
}

#[tokio::test]
async fn a_request_that_names_no_host_is_refused_in_the_words_of_its_protocol() {
    let worker = worker();
    worker.set_acts(saying("ok"));
    let gateway = Gateway::start(&[&worker], &[]).await;
    let address = gateway.url.strip_prefix("http://").unwrap();
    for (path, head, status) in [
        ("/health", "", "400"),
        ("/health", "host: a\r\nhost: a\r\n", "400"),
        ("/health", "host: a b\r\n", "400"),
        ("/v1/messages", "", "400"),
        ("/health", "host: a\r\n", "200"),
    ] {
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\n{head}connection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {status} ")), "{head:?}: {reply}");
        let is_theirs = reply.contains("{\"type\":\"error\"");
        assert_eq!(is_theirs, path.starts_with("/v1/messages"), "{reply}");
        assert!(status == "200" || reply.contains("Host header"), "{reply}");
    }
    // an older client has no such field
    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(b"GET /health HTTP/1.0\r\n\r\n").await.unwrap();
    let mut reply = String::new();
    client.read_to_string(&mut reply).await.unwrap();
    assert!(reply.starts_with("HTTP/1.0 200 "), "{reply}");
}
