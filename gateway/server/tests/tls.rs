//! TLS at both ends: clients of the gateway, and the gateway as a client of workers.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gateway_server::App;
use gateway_server::tls::{ServerTls, worker_tls};
use serde_json::json;
use support::{FakeWorker, Gateway, chat_body, eventually, saying, worker};
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

fn pem(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tls");
    std::fs::read(folder.join(name)).unwrap()
}

/// A directory laid out like a Kubernetes TLS secret; removes itself.
struct Secret(tempfile::TempDir);

impl Secret {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (target, source) in files {
            std::fs::write(folder.path().join(target), pem(source)).unwrap();
        }
        Self(folder)
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }
}

fn client(with_certificate: bool) -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = reqwest::Certificate::from_pem(&pem("ca.crt")).unwrap();
    let builder = reqwest::Client::builder().no_proxy().tls_certs_only([authority]);
    let builder = if with_certificate {
        let identity = [pem("client.crt"), pem("client.key")].concat();
        builder.identity(reqwest::Identity::from_pem(&identity).unwrap())
    } else {
        builder
    };
    builder.build().unwrap()
}

#[tokio::test]
async fn clients_are_served_by_tls_and_not_without() {
    let files = [("tls.crt", "server.crt"), ("tls.key", "server.key")];
    let secret = Secret::new(&files);
    let worker = worker();
    worker.set_acts(saying("safe and sound"));
    let gateway = Gateway::start(&[&worker], &["--tls-dir", secret.path()]).await;
    let url = format!("{}/v1/chat/completions", gateway.url);
    let safe = url.replace("http://", "https://");
    let body = chat_body(json!({"stream": true})).to_string();

    let reply = client(false).post(safe).body(body.clone()).send().await.unwrap();
    assert!(reply.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    assert!(gateway.client.post(url).body(body).send().await.is_err());
    gateway.assert_idle().await;
}

#[tokio::test]
async fn with_an_authority_only_clients_it_has_signed_are_served() {
    let files = [("tls.crt", "server.crt"), ("tls.key", "server.key"), ("ca.crt", "ca.crt")];
    let secret = Secret::new(&files);
    let flags = ["--tls-dir", secret.path()];
    let gateway = Gateway::start_before(&["127.0.0.1:1".into()], &flags).await;
    let health = format!("{}/health", gateway.url.replace("http://", "https://"));
    assert!(client(false).get(&health).send().await.is_err());
    assert_eq!(client(true).get(&health).send().await.unwrap().status().as_u16(), 200);
}

#[tokio::test]
async fn workers_are_spoken_to_by_tls_and_shown_a_certificate() {
    let secret =
        Secret::new(&[("ca.crt", "ca.crt"), ("tls.crt", "client.crt"), ("tls.key", "client.key")]);
    let model = support::model();
    let facts = model.spec.facts();
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(pem("server.crt"), pem("server.key")))
        .client_ca_root(Certificate::from_pem(pem("ca.crt")));
    let wire = support::wire_facts(facts);
    let _ = rustls::crypto::ring::default_provider().install_default();
    let worker = FakeWorker::start_with(wire, facts.fingerprint(), None, Some(tls));
    worker.set_acts(saying("over tls"));
    let address = format!("https://{}", worker.address);
    let flags = ["--worker-tls-dir", secret.path()];
    let gateway = Gateway::start_before(std::slice::from_ref(&address), &flags).await;
    gateway.wait_ready(1).await;
    assert_eq!(gateway.chat(json!({})).await.status, 200);

    // without a certificate of its own it is not let in, and says so
    let bare = Secret::new(&[("ca.crt", "ca.crt")]);
    let gateway = Gateway::start_before(&[address], &["--worker-tls-dir", bare.path()]).await;
    let app: Arc<App> = Arc::clone(&gateway.app);
    eventually("it is turned away", move || {
        let missing = app.workers.what_is_missing();
        missing.first().is_some_and(|line| !line.contains("not yet contacted"))
    })
    .await;
    assert_eq!(gateway.chat(json!({})).await.status, 503);
}

#[test]
fn a_directory_that_cannot_be_used_is_named_with_the_file_and_without_what_it_holds() {
    let nothing = Secret::new(&[]);
    let message = ServerTls::open(Path::new(nothing.path())).unwrap_err();
    assert!(message.contains("tls.crt"), "{message}");
    let message = worker_tls(Path::new(nothing.path())).unwrap_err();
    assert!(message.contains("ca.crt"), "{message}");

    let mixed = Secret::new(&[("tls.crt", "server.crt"), ("tls.key", "client.key")]);
    let message = ServerTls::open(Path::new(mixed.path())).unwrap_err();
    assert!(message.contains("key"), "{message}");

    let swapped = Secret::new(&[("tls.crt", "server.key"), ("tls.key", "server.crt")]);
    let message = ServerTls::open(Path::new(swapped.path())).unwrap_err();
    assert!(message.contains("tls.crt") && !message.contains("BEGIN"), "{message}");
}
