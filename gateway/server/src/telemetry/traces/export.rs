//! Sends finished traces to a collector, in batches, and asks workers for their part of them.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::spans::{Child, FinishedTrace, INTERNAL, fresh_span};
use crate::workers::explain;

/// Traces that may wait; more are dropped, never waited for.
const MAX_WAITING: usize = 1024;
const BATCH: usize = 64;
/// How long a trace waits for company.
const PAUSE: Duration = Duration::from_millis(500);
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
const LAST_SEND: Duration = Duration::from_secs(2);

/// The way to the collector.
#[derive(Debug)]
pub struct Tracer {
    sender: Mutex<Option<mpsc::Sender<FinishedTrace>>>,
    exporting: Mutex<Option<JoinHandle<()>>>,
    num_dropped: AtomicU64,
}

impl Tracer {
    /// Begins to send to `endpoint`, without a path; needs a running tokio runtime.
    ///
    /// # Errors
    /// There can be no HTTP client.
    pub fn start(endpoint: &str) -> Result<Self, String> {
        let client = reqwest::Client::builder().timeout(SEND_TIMEOUT).build();
        let client = client.map_err(|error| error.to_string())?;
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        let exporting = tokio::spawn(export(client, format!("{endpoint}/v1/traces"), receiver));
        Ok(Self {
            sender: Mutex::new(Some(sender)),
            exporting: Mutex::new(Some(exporting)),
            num_dropped: AtomicU64::new(0),
        })
    }

    pub(super) fn send(&self, trace: FinishedTrace) {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_sent = sender.is_some_and(|sender| sender.try_send(trace).is_ok());
        if !is_sent && self.num_dropped.fetch_add(1, Ordering::Relaxed).is_multiple_of(1000) {
            tracing::warn!("traces are dropped: the collector is too slow or gone");
        }
    }

    /// Sends what waits, for a short while, and ends.
    pub async fn finish(&self) {
        drop(self.sender.lock().unwrap_or_else(PoisonError::into_inner).take());
        let exporting = self.exporting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut exporting) = exporting
            && tokio::time::timeout(LAST_SEND, &mut exporting).await.is_err()
        {
            exporting.abort();
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let exporting = self.exporting.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(exporting) = exporting {
            exporting.abort();
        }
    }
}

async fn export(client: reqwest::Client, url: String, mut receiver: mpsc::Receiver<FinishedTrace>) {
    let mut complaint = String::new();
    let mut batch = Vec::new();
    while receiver.recv_many(&mut batch, BATCH).await > 0 {
        if batch.len() < BATCH {
            // company may come; the end of the gateway is no reason to wait for it
            tokio::time::timeout(PAUSE, fill(&mut receiver, &mut batch)).await.ok();
        }
        let mut body = Vec::with_capacity(batch.len());
        for trace in batch.drain(..) {
            body.extend(resource_spans(trace).await);
        }
        let request = client.post(&url).header("content-type", "application/json");
        let sent = request.body(json!({ "resourceSpans": body }).to_string()).send().await;
        match sent.and_then(reqwest::Response::error_for_status) {
            Ok(_) => complaint.clear(),
            Err(error) => {
                let error = error.without_url().to_string();
                if error != complaint {
                    tracing::warn!(%error, "traces cannot be sent");
                    complaint = error;
                }
            }
        }
    }
}

async fn fill(receiver: &mut mpsc::Receiver<FinishedTrace>, batch: &mut Vec<FinishedTrace>) {
    while batch.len() < BATCH {
        match receiver.recv().await {
            Some(trace) => batch.push(trace),
            None => return,
        }
    }
}

/// The gateway's spans, and those of the workers it called, by their own account.
async fn resource_spans(trace: FinishedTrace) -> Vec<Value> {
    let mut inside = Vec::new();
    for (call, span_id) in &trace.calls {
        for entry in explain(&call.channel, &call.request_id).await {
            let began = call.began + entry.start;
            let mut span = trace.span(&Child {
                name: &entry.phase,
                kind: INTERNAL,
                span_id: fresh_span(),
                parent: *span_id,
                began,
                ended: began + entry.duration,
            });
            let number = |key: &str, value: u64| json!({"key": key, "value": {"intValue": value.to_string()}});
            span["attributes"] = json!([
                number("m3stack.tokens", entry.tokens),
                number("m3stack.steps", entry.steps)
            ]);
            inside.push(span);
        }
    }
    let mut all = vec![resource("m3stack-gateway", trace.spans)];
    if !inside.is_empty() {
        all.push(resource("m3stack-worker", inside));
    }
    all
}

fn resource(service: &str, spans: Vec<Value>) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({
        "resource": {"attributes": [
            {"key": "service.name", "value": {"stringValue": service}},
            {"key": "service.version", "value": {"stringValue": version}},
        ]},
        "scopeSpans": [{"scope": {"name": "m3stack", "version": version}, "spans": spans}],
    })
}
