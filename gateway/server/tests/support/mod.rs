//! A gateway in this process, on a real port, before fake workers; and a client to ask it.

#![allow(dead_code)]

pub mod fake_worker;
pub mod origin;
pub mod script;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gateway_core::checkpoint::Model;
use gateway_core::model::ModelFacts;
use gateway_server::{App, GatewayConfig};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

#[allow(unused_imports)]
pub use fake_worker::{FakeWorker, Holds, proto};
pub use script::Act;

/// Name under which the tests serve the model.
pub const MODEL: &str = "tiny-m3";
/// How long a test waits for what must happen: long enough for a machine that does much else.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// The built-in tiny checkpoint.
pub fn checkpoint() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../worker/m3stack/checkpoints/tiny")
}

/// The handed media files.
pub fn media_directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/media")
}

/// Opens the checkpoint as the gateway does.
pub fn model() -> Model {
    use gateway_core::checkpoint::{OpenOptions, open};
    use gateway_core::tokenizer::EngineChoice;
    let options =
        OpenOptions { engine: EngineChoice::Reference, clock: gateway_server::app::unix_now };
    open(&checkpoint(), options).unwrap()
}

/// Facts in the words of the wire.
pub fn wire_facts(facts: &ModelFacts) -> proto::ModelFacts {
    proto::ModelFacts {
        model_type: facts.model_type.clone(),
        vocab_size: facts.vocab_size,
        image_token_id: facts.image_token_id,
        video_token_id: facts.video_token_id,
        eos_token_id: facts.eos_token_id,
        patch_size: facts.patch_size,
        temporal_patch_size: facts.temporal_patch_size,
        merge_size: facts.merge_size,
        max_position_embeddings: facts.max_position_embeddings,
    }
}

/// A fake worker that serves the tiny checkpoint.
pub fn worker() -> FakeWorker {
    worker_at(None)
}

/// The same on a given address.
pub fn worker_at(address: Option<SocketAddr>) -> FakeWorker {
    let model = model();
    let facts = model.spec.facts();
    FakeWorker::start(wire_facts(facts), facts.fingerprint(), address)
}

/// A running gateway and a client.
pub struct Gateway {
    pub app: Arc<App>,
    pub url: String,
    pub client: reqwest::Client,
    stop: CancellationToken,
    serving: Option<tokio::task::JoinHandle<()>>,
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not json: {}", self.text))
    }

    /// The error of a refusal, with its form checked.
    pub fn error(&self) -> Value {
        let body = self.json();
        let error = body["error"].as_object().unwrap_or_else(|| panic!("no error: {body}"));
        let mut keys: Vec<_> = error.keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["code", "message", "param", "type"], "{body}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert!(error["code"].is_string() && error["type"].is_string(), "{body}");
        body["error"].clone()
    }

    pub fn message(&self) -> String {
        self.error()["message"].as_str().unwrap().to_owned()
    }
}

impl Gateway {
    /// A gateway before these workers, with further flags; returns once it is ready.
    pub async fn start(workers: &[&FakeWorker], flags: &[&str]) -> Self {
        let addresses: Vec<_> = workers.iter().map(|worker| worker.address.to_string()).collect();
        let gateway = Self::start_before(&addresses, flags).await;
        gateway.wait_ready(workers.len()).await;
        gateway
    }

    /// The same without waiting for workers.
    pub async fn start_before(addresses: &[String], flags: &[&str]) -> Self {
        Self::with(config(addresses, flags), None).await
    }

    /// The same with a model of the test's own.
    pub async fn with(config: GatewayConfig, model: Option<Model>) -> Self {
        let app = match model {
            Some(model) => App::with_model(config, model),
            None => App::start(config),
        };
        let app = app.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let serving =
            tokio::spawn(gateway_server::http::serve(Arc::clone(&app), listener, stop.clone()));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        Self { app, url, client, stop, serving: Some(serving) }
    }

    pub async fn wait_ready(&self, workers: usize) {
        let app = Arc::clone(&self.app);
        eventually("workers are ready", move || app.workers.count().ready >= workers).await;
    }

    /// Begins the stop that SIGTERM begins.
    pub fn begin_stop(&mut self) -> tokio::task::JoinHandle<()> {
        self.stop.cancel();
        self.serving.take().unwrap()
    }

    pub async fn get(&self, path: &str) -> Reply {
        read(self.client.get(format!("{}{path}", self.url)).send().await.unwrap()).await
    }

    pub async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> Reply {
        read(self.send(path, body).await).await
    }

    /// The response with its body unread.
    pub async fn send(&self, path: &str, body: impl Into<reqwest::Body>) -> reqwest::Response {
        self.client.post(format!("{}{path}", self.url)).body(body).send().await.unwrap()
    }

    pub async fn chat(&self, more: Value) -> Reply {
        self.post("/v1/chat/completions", chat_body(more).to_string()).await
    }

    /// A streamed chat, its events read to the end.
    pub async fn chat_stream(&self, mut more: Value) -> Vec<String> {
        more["stream"] = json!(true);
        let reply = self.chat(more).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        events(&reply.text)
    }

    /// Confirms that nothing of any request is left in the gateway.
    pub async fn assert_idle(&self) {
        let app = Arc::clone(&self.app);
        eventually("nothing is left behind", move || {
            app.metrics.running_now() == 0
                && app.workers.assigned() == 0
                && app.metrics.video_processes_now() == 0
        })
        .await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop.cancel();
        self.app.abort.cancel();
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

pub fn config(addresses: &[String], flags: &[&str]) -> GatewayConfig {
    let model_path = checkpoint();
    let workers = addresses.join(",");
    let mut arguments = vec![
        "m3stack-gateway",
        "--model-path",
        model_path.to_str().unwrap(),
        "--served-model-name",
        MODEL,
        "--workers",
        &workers,
    ];
    arguments.extend(flags);
    GatewayConfig::from_arguments(arguments).unwrap()
}

/// Changes a whole file at once, so that whoever follows it never reads half.
pub fn replace(path: &std::path::Path, text: &str) {
    let new = tempfile::NamedTempFile::new_in(path.parent().unwrap()).unwrap();
    std::fs::write(&new, text).unwrap();
    new.persist(path).unwrap();
}

/// A small chat request with these fields set.
pub fn chat_body(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

pub async fn read(response: reqwest::Response) -> Reply {
    let status = response.status().as_u16();
    let headers = response.headers().clone();
    Reply { status, headers, text: response.text().await.unwrap() }
}

/// The data of every server-sent event.
pub fn events(text: &str) -> Vec<String> {
    text.split("\n\n")
        .filter(|event| !event.is_empty() && !event.starts_with(':'))
        .map(|event| event.strip_prefix("data: ").expect("an event is data").to_owned())
        .collect()
}

/// Waits for something that another task is about to do.
pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Ids of a text in which added tokens are meant as such.
pub fn ids(text: &str) -> Vec<u32> {
    thread_local! { static MODEL: Model = model(); }
    MODEL.with(|model| model.prompt_builder.encode_text(text, false).unwrap())
}

/// Acts that say a text, a few tokens a message, and stop.
pub fn saying(text: &str) -> Vec<Act> {
    let mut acts = vec![Act::Start];
    acts.extend(ids(text).chunks(3).map(|chunk| Act::Tokens(chunk.to_vec())));
    acts.push(Act::Stop);
    acts
}
