//! Who may come in: a permit a request, and a shared budget for the bytes all requests hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::Metrics;

/// Bytes are counted in steps of this, so that a budget of terabytes still fits a semaphore.
const STEP_BYTES: u64 = 4096;

/// The door of the gateway. Nobody waits at it: what does not fit is told to come back.
#[derive(Debug)]
pub struct Admission {
    places: Arc<Semaphore>,
    max_requests: u32,
    steps: Arc<Semaphore>,
    max_bytes: u64,
    is_closed: AtomicBool,
    metrics: Arc<Metrics>,
}

/// The right to be served; dropping it makes room.
#[derive(Debug)]
pub struct Permit {
    _place: OwnedSemaphorePermit,
    metrics: Arc<Metrics>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.metrics.running(-1);
    }
}

/// Bytes held under the shared budget; dropping it gives them back.
#[derive(Debug, Default)]
pub struct ByteLease {
    held: Option<OwnedSemaphorePermit>,
    bytes: u64,
}

impl ByteLease {
    /// Bytes that may be held under this lease.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Admission {
    /// Room for that many requests and bytes at once.
    pub fn new(max_requests: u32, max_bytes: u64, metrics: Arc<Metrics>) -> Self {
        let steps = usize::try_from(max_bytes.div_ceil(STEP_BYTES)).unwrap_or(usize::MAX);
        Self {
            places: Arc::new(Semaphore::new(max_requests as usize)),
            max_requests,
            steps: Arc::new(Semaphore::new(steps.min(Semaphore::MAX_PERMITS))),
            max_bytes,
            is_closed: AtomicBool::new(false),
            metrics,
        }
    }

    /// Lets one request in.
    ///
    /// # Errors
    /// `Overloaded` when all places are taken, `Draining` after [`Admission::close`].
    pub fn enter(&self) -> Result<Permit, GatewayError> {
        if self.is_closed() {
            return Err(GatewayError::new(
                ErrorKind::Draining,
                "the gateway is shutting down; send the request to another one",
            ));
        }
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let limit = self.max_requests;
            GatewayError::new(
                ErrorKind::Overloaded,
                format!("all {limit} places for running requests are taken; try again shortly"),
            )
        })?;
        self.metrics.running(1);
        Ok(Permit { _place: place, metrics: Arc::clone(&self.metrics) })
    }

    /// Grows a lease to at least `bytes`.
    ///
    /// # Errors
    /// `Overloaded` when the shared budget has no room; the lease keeps what it had.
    pub fn grow(&self, lease: &mut ByteLease, bytes: u64) -> Result<(), GatewayError> {
        if bytes <= lease.bytes {
            return Ok(());
        }
        let missing = bytes.div_ceil(STEP_BYTES) - lease.bytes.div_ceil(STEP_BYTES);
        let more = u32::try_from(missing)
            .ok()
            .and_then(|steps| Arc::clone(&self.steps).try_acquire_many_owned(steps).ok())
            .ok_or_else(|| {
                let limit = self.max_bytes;
                GatewayError::new(
                    ErrorKind::Overloaded,
                    format!(
                        "no room for {bytes} more bytes: the requests now running fill the \
                         budget of {limit} bytes for bodies and media; try again shortly"
                    ),
                )
            })?;
        match &mut lease.held {
            Some(held) => held.merge(more),
            None => lease.held = Some(more),
        }
        lease.bytes = bytes;
        Ok(())
    }

    /// Lets nobody in any more; those inside stay.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Whether the door is closed for good.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_requests: u32, max_bytes: u64) -> Admission {
        Admission::new(max_requests, max_bytes, Arc::new(Metrics::default()))
    }

    #[test]
    fn a_place_is_free_again_when_its_permit_is_dropped() {
        let door = admission(1, 0);

        let inside = door.enter().unwrap();
        assert_eq!(door.enter().unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!(door.metrics.running_now(), 1);
        drop(inside);

        assert_eq!(door.metrics.running_now(), 0);
        assert!(door.enter().is_ok());
    }

    #[test]
    fn a_closed_door_refuses_with_another_reason_than_a_full_house() {
        let door = admission(1, 0);
        door.close();
        assert_eq!(door.enter().unwrap_err().kind, ErrorKind::Draining);
    }

    #[test]
    fn bytes_are_shared_by_all_and_come_back_with_the_lease() {
        let door = admission(1, 64 * 1024);
        let (mut first, mut second) = (ByteLease::default(), ByteLease::default());

        door.grow(&mut first, 40_000).unwrap();
        door.grow(&mut first, 50_000).unwrap();
        assert_eq!(door.grow(&mut second, 30_000).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!(second.bytes(), 0);
        drop(first);

        door.grow(&mut second, 64 * 1024).unwrap();
    }
}
