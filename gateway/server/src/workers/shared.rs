//! What the pool, the sessions that follow workers, and leases share: the members and the router.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use gateway_core::model::ModelFacts;
use gateway_core::routing::{Router, SeatId};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use super::WorkerId;
use super::session::Report;
use super::shared_pieces::SharedMemory;
use crate::admission::Admission;
use crate::telemetry::Metrics;

/// Workers and choices, behind short locks that are never held over an `.await`.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) facts: ModelFacts,
    pub(super) metrics: Arc<Metrics>,
    pub(super) memory: Arc<SharedMemory>,
    members: RwLock<Arc<[Arc<Member>]>>,
    router: Mutex<Router>,
    began: Instant,
}

/// One worker that is followed.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) id: WorkerId,
    pub(super) seat: SeatId,
    pub(super) uri: Arc<str>,
    pub(super) tls_name: Option<Arc<str>>,
    pub(super) channel: Channel,
    pub(super) reports: watch::Receiver<Report>,
    pub(super) follower: JoinHandle<()>,
}

impl Member {
    /// Its address as people write it.
    pub(super) fn address(&self) -> &str {
        self.uri.split_once("://").map_or(&*self.uri, |(_, address)| address)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Shared {
    pub(super) fn new(
        router: Router,
        facts: ModelFacts,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            facts,
            memory: Arc::new(SharedMemory::new(admission, Arc::clone(&metrics))),
            metrics,
            members: RwLock::new(Arc::from([])),
            router: Mutex::new(router),
            began: Instant::now(),
        }
    }

    /// The workers now followed, in order of their ids.
    pub(super) fn members(&self) -> Arc<[Arc<Member>]> {
        Arc::clone(&self.members.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_members(&self, members: Vec<Arc<Member>>) {
        *self.members.write().unwrap_or_else(PoisonError::into_inner) = members.into();
    }

    /// The router; a panic while it was held left it whole, since each change is one call.
    pub(super) fn router(&self) -> MutexGuard<'_, Router> {
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds on the router's clock.
    pub(super) fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}
