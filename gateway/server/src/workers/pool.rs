//! Holds the workers: follows each, hands out leases, says what is missing.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use gateway_core::model::ModelFacts;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::session::{Report, Session};
use super::{WorkerId, WorkerState, WorkerView, routing};
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::WorkerCount;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Token replies are small; windows this size never throttle them.
const WINDOW_BYTES: u32 = 1 << 20;

/// The configured workers and the tasks that follow them.
#[derive(Debug)]
pub struct WorkerPool {
    slots: Vec<Slot>,
    followers: Vec<JoinHandle<()>>,
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Slot {
    address: Arc<str>,
    channel: Channel,
    reports: watch::Receiver<Report>,
    assigned: Arc<AtomicI64>,
}

/// The right to give one request to one worker; counted until dropped.
#[derive(Debug)]
pub struct WorkerLease {
    /// The worker.
    pub id: WorkerId,
    pub(super) channel: Channel,
    pub(super) lost: CancellationToken,
    assigned: Arc<AtomicI64>,
}

impl WorkerLease {
    fn new(id: WorkerId, slot: &Slot) -> Self {
        slot.assigned.fetch_add(1, Ordering::Relaxed);
        Self {
            id,
            channel: slot.channel.clone(),
            lost: slot.reports.borrow().lost.clone(),
            assigned: Arc::clone(&slot.assigned),
        }
    }
}

impl Drop for WorkerLease {
    fn drop(&mut self) {
        self.assigned.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl WorkerPool {
    /// Begins to follow every worker; needs a running tokio runtime.
    ///
    /// # Errors
    /// The address that is not a URI.
    pub fn start(uris: &[String], facts: ModelFacts) -> Result<Self, tonic::transport::Error> {
        let facts = Arc::new(facts);
        let mut pool = Self { slots: Vec::new(), followers: Vec::new(), turn: AtomicUsize::new(0) };
        for uri in uris {
            let channel = Endpoint::from_shared(uri.clone())?
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(16 * WINDOW_BYTES)
                .connect_lazy();
            let address = Arc::from(uri.trim_start_matches("http://"));
            let (sender, reports) = watch::channel(Report::unknown());
            let assigned = Arc::new(AtomicI64::new(0));
            let session = Session {
                address: Arc::clone(&address),
                channel: channel.clone(),
                facts: Arc::clone(&facts),
                reports: sender,
                assigned: Arc::clone(&assigned),
            };
            pool.followers.push(tokio::spawn(session.run()));
            pool.slots.push(Slot { address, channel, reports, assigned });
        }
        Ok(pool)
    }

    /// Follows the workers no longer; what is known of them stays as it is.
    pub fn stop(&self) {
        for follower in &self.followers {
            follower.abort();
        }
    }

    /// Every worker at this moment.
    pub fn snapshot(&self) -> Vec<WorkerView> {
        (0..)
            .zip(&self.slots)
            .map(|(id, slot)| {
                let report = slot.reports.borrow();
                WorkerView {
                    id: WorkerId(id),
                    state: report.state.clone(),
                    load: report.load,
                    unreported_requests: slot.assigned.load(Ordering::Relaxed) - report.assigned,
                    max_context_tokens: report.max_context_tokens,
                }
            })
            .collect()
    }

    /// Leases the worker with the least to do.
    ///
    /// # Errors
    /// `WorkerUnavailable` saying what is missing, or how short the longest context is.
    pub fn lease(
        &self,
        context_tokens: u64,
        excluded: Option<WorkerId>,
    ) -> Result<WorkerLease, GatewayError> {
        let views = self.snapshot();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        match routing::choose(&views, excluded, context_tokens, turn) {
            Some(id) => self.lease_of(id),
            None => Err(self.nobody(&views, context_tokens)),
        }
    }

    /// Leases one worker, whatever it has to do.
    ///
    /// # Errors
    /// `WorkerUnavailable` if there is no such worker.
    pub fn lease_of(&self, id: WorkerId) -> Result<WorkerLease, GatewayError> {
        match self.slots.get(id.0 as usize) {
            Some(slot) => Ok(WorkerLease::new(id, slot)),
            None => Err(GatewayError::internal(format!("no worker {id:?}"))),
        }
    }

    /// Confirms, before any media work, that someone could take a request.
    ///
    /// # Errors
    /// `WorkerUnavailable` saying what is missing.
    pub fn check_someone_ready(&self) -> Result<(), GatewayError> {
        let is_ready = |slot: &Slot| slot.reports.borrow().state == WorkerState::Ready;
        if self.slots.iter().any(is_ready) {
            return Ok(());
        }
        Err(self.nobody(&self.snapshot(), 0))
    }

    /// The longest context that any ready worker holds; `None` while none is ready.
    pub fn longest_context(&self) -> Option<u32> {
        let ready = self.slots.iter().map(|slot| slot.reports.borrow());
        ready
            .filter(|report| report.state == WorkerState::Ready)
            .map(|report| report.max_context_tokens)
            .max()
    }

    fn nobody(&self, views: &[WorkerView], context_tokens: u64) -> GatewayError {
        let longest = views
            .iter()
            .filter(|view| view.state == WorkerState::Ready)
            .map(|view| view.max_context_tokens)
            .max();
        let message = match longest {
            Some(longest) if u64::from(longest) < context_tokens => format!(
                "the request needs {context_tokens} tokens of context; the workers now ready \
                 hold {longest}"
            ),
            Some(_) => "no other worker is ready to take the request".into(),
            None => format!("no worker is ready: {}", self.what_is_missing().join("; ")),
        };
        GatewayError::new(ErrorKind::WorkerUnavailable, message)
    }

    /// One line a worker that is not ready.
    pub fn what_is_missing(&self) -> Vec<String> {
        let line = |slot: &Slot| {
            let address = &slot.address;
            match &slot.reports.borrow().state {
                WorkerState::Ready => None,
                WorkerState::Loading => Some(format!("worker {address} is loading")),
                WorkerState::Draining => Some(format!("worker {address} is draining")),
                WorkerState::Refused { reason } => {
                    Some(format!("worker {address} is refused: {reason}"))
                }
                WorkerState::Unreachable { reason } => {
                    Some(format!("worker {address} is out of reach: {reason}"))
                }
            }
        };
        self.slots.iter().filter_map(line).collect()
    }

    /// Workers by state.
    pub fn count(&self) -> WorkerCount {
        let mut count = WorkerCount::default();
        for slot in &self.slots {
            match slot.reports.borrow().state {
                WorkerState::Ready => count.ready += 1,
                WorkerState::Loading => count.loading += 1,
                WorkerState::Draining => count.draining += 1,
                WorkerState::Refused { .. } => count.refused += 1,
                WorkerState::Unreachable { .. } => count.unreachable += 1,
            }
        }
        count
    }

    /// Requests now given to workers, over all of them.
    pub fn assigned(&self) -> i64 {
        self.slots.iter().map(|slot| slot.assigned.load(Ordering::Relaxed)).sum()
    }
}
