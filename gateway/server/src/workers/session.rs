//! One connection to one worker's `Watch`: its identity once, then its state and load.

use std::sync::Arc;
use std::time::Duration;

use gateway_core::routing::{CacheNews, Role, SeatId, SeatLoad, Stage, Standing};
use rand::Rng;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::WorkerState;
use super::shared::Shared;
use super::wire::{self, proto};

/// How often a worker is asked to speak.
const HEARTBEAT: Duration = Duration::from_millis(1000);
/// Silence after which a worker counts as gone.
const MAX_SILENCE: Duration = Duration::from_millis(3500);
/// First and longest pause between two attempts.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Largest message taken: all pages of a worker at once.
const MAX_NEWS_BYTES: usize = 32 << 20;
/// How long requests on a worker may outlive its last word.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// What is known of a worker; sent to the pool at every change.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) state: WorkerState,
    pub(super) load: SeatLoad,
    pub(super) max_context_tokens: u32,
    pub(super) role: Role,
    /// Tokens of a cache page.
    page_tokens: u32,
    /// Whether it has read a memory file of this process.
    pub(super) reads_memory: bool,
    /// Cancelled when this start of the worker is known to be over.
    pub(super) lost: CancellationToken,
    /// Cancelled when it has said nothing for long: who still waits for it may go elsewhere.
    pub(super) silent: CancellationToken,
}

impl Report {
    /// Before the first contact.
    pub(super) fn unknown() -> Self {
        Self {
            state: WorkerState::Unreachable { reason: Arc::from("not yet contacted") },
            load: SeatLoad::default(),
            max_context_tokens: 0,
            role: Role::All,
            page_tokens: 0,
            reads_memory: false,
            lost: CancellationToken::new(),
            silent: CancellationToken::new(),
        }
    }

    /// Whether it takes requests that want an answer.
    pub(super) fn answers(&self) -> bool {
        self.state == WorkerState::Ready && self.role.serves(Stage::Answer)
    }

    /// The worker has said who it is: the start that was known, or another.
    fn is_back(&mut self, is_restarted: bool) {
        if is_restarted {
            // requests on the earlier start can never end by themselves
            self.lost.cancel();
        }
        // one that was given up and comes back as it was is not lost any more
        for token in [&mut self.lost, &mut self.silent] {
            if token.is_cancelled() {
                *token = CancellationToken::new();
            }
        }
    }
}

/// Follows one worker for ever; ends only by being aborted.
pub(super) struct Session {
    pub(super) address: Arc<str>,
    pub(super) channel: Channel,
    pub(super) seat: SeatId,
    pub(super) shared: Arc<Shared>,
    pub(super) reports: watch::Sender<Report>,
}

impl Session {
    pub(super) async fn run(self) {
        let mut known_start = String::new();
        let mut pause = BACKOFF.0;
        let mut last_word = tokio::time::Instant::now();
        loop {
            let reason = self.follow(&mut known_start, &mut pause, &mut last_word).await;
            self.mark_unreachable(&reason, last_word.elapsed());
            // gateways that lost the same worker must not all come back at once
            let jitter = rand::rng().random_range(0.5..1.0);
            tokio::time::sleep(pause.mul_f64(jitter)).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    /// One `Watch` call from begin to end; gives the reason of its end.
    async fn follow(
        &self,
        known_start: &mut String,
        pause: &mut Duration,
        last_word: &mut tokio::time::Instant,
    ) -> String {
        let mut client =
            proto::worker_service_client::WorkerServiceClient::new(self.channel.clone())
                .max_decoding_message_size(MAX_NEWS_BYTES);
        let heartbeat_ms = HEARTBEAT.as_millis() as u32;
        let (memory, memory_token) = self.shared.memory.probe().unzip();
        let opening = client.watch(proto::WatchRequest {
            heartbeat_ms,
            cache_events: true,
            memory,
            memory_token: memory_token.unwrap_or_default(),
        });
        let mut stream = match tokio::time::timeout(MAX_SILENCE, opening).await {
            Err(_) => return "it does not answer".into(),
            Ok(Err(status)) => return reason_of(&status),
            Ok(Ok(response)) => response.into_inner(),
        };
        loop {
            let message = match tokio::time::timeout(MAX_SILENCE, stream.message()).await {
                Err(_) => return format!("it has been silent for {} ms", MAX_SILENCE.as_millis()),
                Ok(Err(status)) => return reason_of(&status),
                Ok(Ok(None)) => return "it has stopped".into(),
                Ok(Ok(Some(message))) => message,
            };
            *last_word = tokio::time::Instant::now();
            *pause = BACKOFF.0;
            self.report(message, known_start);
        }
    }

    fn report(&self, message: proto::WatchResponse, known_start: &mut String) {
        let state = message.state();
        let mut is_restarted = false;
        self.reports.send_modify(|report| {
            if let Some(identity) = &message.identity {
                is_restarted = *known_start != identity.worker_id;
                report.is_back(is_restarted);
                if is_restarted {
                    known_start.clone_from(&identity.worker_id);
                    tracing::info!(worker = %self.address, version = %identity.version,
                        model = %identity.model_name, "worker connected");
                }
                report.max_context_tokens = identity.max_context_tokens;
                report.page_tokens = identity.page_tokens;
                report.role = wire::role(identity);
                report.reads_memory = identity.reads_memory;
                report.state = match wire::difference(identity, &self.shared.facts) {
                    Some(reason) => WorkerState::Refused { reason: reason.into() },
                    None => WorkerState::Loading,
                };
                if let WorkerState::Refused { reason } = &report.state {
                    tracing::error!(worker = %self.address, %reason, "worker refused");
                }
            }
            if !matches!(report.state, WorkerState::Refused { .. }) {
                report.state = match state {
                    proto::WorkerState::Ready => WorkerState::Ready,
                    proto::WorkerState::Draining => WorkerState::Draining,
                    proto::WorkerState::Loading | proto::WorkerState::Unspecified => {
                        WorkerState::Loading
                    }
                };
            }
            if let Some(load) = message.load {
                report.load = wire::load(load);
            }
        });
        self.tell_router(message.load.is_some(), message.cache.as_ref(), is_restarted);
    }

    fn tell_router(&self, has_load: bool, cache: Option<&proto::CacheEvents>, is_restarted: bool) {
        let now_s = self.shared.now_s();
        let report = self.reports.borrow();
        let standing = (report.state == WorkerState::Ready).then_some(Standing {
            max_context_tokens: report.max_context_tokens,
            page_tokens: report.page_tokens,
            role: report.role,
        });
        let mut router = self.shared.router();
        if is_restarted {
            router.restarted(self.seat);
        }
        router.set_ready(self.seat, standing, now_s);
        if has_load {
            router.report(self.seat, report.load, now_s);
        }
        if let Some(cache) = cache {
            let news = CacheNews {
                is_restart: cache.is_restart,
                epoch: cache.epoch,
                added: &cache.added,
                removed: &cache.removed,
            };
            router.cache_news(self.seat, &news);
        }
    }

    fn mark_unreachable(&self, reason: &str, silence: Duration) {
        self.reports.send_modify(|report| {
            if report.state == WorkerState::Ready {
                tracing::warn!(worker = %self.address, reason, "worker out of reach");
            }
            report.state = WorkerState::Unreachable { reason: reason.into() };
            if silence >= MAX_SILENCE {
                report.silent.cancel();
            }
            if silence > LOST_AFTER {
                report.lost.cancel();
            }
        });
        self.tell_router(false, None, false);
    }
}

/// The innermost cause; tonic's own words only say that there is one.
fn reason_of(status: &tonic::Status) -> String {
    let Some(mut cause) = std::error::Error::source(status) else {
        return format!("it answered {:?}: {}", status.code(), status.message());
    };
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_was_given_up_and_comes_back_may_have_requests_again() {
        let mut report = Report::unknown();
        let earlier = report.lost.clone();
        report.lost.cancel();
        report.is_back(false);
        assert!(earlier.is_cancelled() && !report.lost.is_cancelled());
    }

    #[test]
    fn a_word_from_the_same_start_ends_no_requests_and_one_from_another_does() {
        let mut report = Report::unknown();
        let first = report.lost.clone();
        report.is_back(false);
        assert!(!first.is_cancelled());
        report.is_back(true);
        assert!(first.is_cancelled() && !report.lost.is_cancelled());
    }
}
