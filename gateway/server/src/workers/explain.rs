//! Asks a worker where a request's time went.

use std::time::Duration;

use tonic::transport::Channel;

use super::wire::proto;

/// A worker that does not answer soon will not tell any more.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A stretch of a request's time in a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseEntry {
    /// `queue`, `prefill`, `decode` and the like.
    pub phase: String,
    /// Since the request reached the worker.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// The request's own tokens in it.
    pub tokens: u64,
    /// Steps of the worker in it.
    pub steps: u64,
}

/// What the worker remembers of a request; nothing if it cannot be asked.
pub async fn explain(channel: &Channel, request_id: &str) -> Vec<PhaseEntry> {
    let mut client = proto::admin_service_client::AdminServiceClient::new(channel.clone());
    let mut request =
        tonic::Request::new(proto::ExplainRequest { request_id: request_id.to_owned() });
    request.set_timeout(TIMEOUT);
    let answer = tokio::time::timeout(TIMEOUT, client.explain(request)).await;
    let Ok(Ok(answer)) = answer else { return Vec::new() };
    let milliseconds = |value: f64| Duration::from_secs_f64(value.clamp(0.0, 1e9) / 1e3);
    let entry = |entry: proto::AccountEntry| PhaseEntry {
        start: milliseconds(entry.start_ms),
        duration: milliseconds(entry.duration_ms),
        tokens: entry.tokens,
        steps: entry.steps,
        phase: entry.phase,
    };
    answer.into_inner().entries.into_iter().map(entry).collect()
}
