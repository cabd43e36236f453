//! Who may come in: a permit a request, and a shared budget for the bytes all requests hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::Metrics;
use crate::tenants::Tenants;

/// Bytes are counted in steps of this, so that a budget of terabytes still fits a semaphore.
const STEP_BYTES: u64 = 4096;

/// The door of the gateway. Nobody waits at it: what does not fit is told to come back.
#[derive(Debug)]
pub struct Admission {
    taken: Arc<AtomicU32>,
    max_requests: u32,
    tenants: Arc<Tenants>,
    steps: Arc<Semaphore>,
    num_steps: u64,
    max_bytes: u64,
    is_closed: AtomicBool,
    metrics: Arc<Metrics>,
}

/// Who asks, as far as that decides whether there is room.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caller<'a> {
    /// On whose behalf; empty is one tenant like any other.
    pub tenant: &'a str,
    /// Above 0 is urgent, below 0 can wait.
    pub priority: i32,
}

/// The right to be served; dropping it makes room.
#[derive(Debug)]
pub struct Permit {
    taken: Arc<AtomicU32>,
    tenants: Arc<Tenants>,
    tenant: String,
    metrics: Arc<Metrics>,
}

impl Permit {
    /// Notes tokens that the request has used.
    pub fn charge(&self, tokens: u64) {
        self.tenants.charge(&self.tenant, tokens, Instant::now());
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.taken.fetch_sub(1, Ordering::AcqRel);
        self.tenants.leave(&self.tenant, Instant::now());
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
    pub fn new(
        max_requests: u32,
        max_bytes: u64,
        tenants: Arc<Tenants>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let steps = usize::try_from(max_bytes.div_ceil(STEP_BYTES)).unwrap_or(usize::MAX);
        let steps = steps.min(Semaphore::MAX_PERMITS);
        Self {
            taken: Arc::default(),
            max_requests,
            tenants,
            steps: Arc::new(Semaphore::new(steps)),
            num_steps: steps as u64,
            max_bytes,
            is_closed: AtomicBool::new(false),
            metrics,
        }
    }

    /// Lets one ordinary request of nobody in particular in.
    ///
    /// # Errors
    /// As [`Admission::enter_as`].
    pub fn enter(&self) -> Result<Permit, GatewayError> {
        self.enter_as(Caller::default())
    }

    /// Lets one request in. Urgent ones have a tenth of the places on top, those that can wait
    /// leave a fifth of them free.
    ///
    /// # Errors
    /// `Overloaded` when its places or its tenant's are taken, `Draining` after
    /// [`Admission::close`].
    pub fn enter_as(&self, caller: Caller<'_>) -> Result<Permit, GatewayError> {
        if self.is_closed() {
            return Err(GatewayError::new(
                ErrorKind::Draining,
                "the gateway is shutting down; send the request to another one",
            ));
        }
        let limit = self.places(caller.priority);
        let take = |taken: u32| (taken < limit).then_some(taken + 1);
        if self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_err() {
            return Err(GatewayError::new(
                ErrorKind::Overloaded,
                format!("all {limit} places for running requests are taken; try again shortly"),
            ));
        }
        if let Err(refusal) = self.tenants.enter(caller.tenant, Instant::now()) {
            self.taken.fetch_sub(1, Ordering::AcqRel);
            return Err(refusal);
        }
        self.metrics.running(1);
        Ok(Permit {
            taken: Arc::clone(&self.taken),
            tenants: Arc::clone(&self.tenants),
            tenant: caller.tenant.to_owned(),
            metrics: Arc::clone(&self.metrics),
        })
    }

    /// Requests at once when one of this priority is the last of them.
    fn places(&self, priority: i32) -> u32 {
        let all = self.max_requests;
        match priority {
            1.. => all.saturating_add(all / 10),
            0 => all,
            _ => (all - all / 5).max(1),
        }
    }

    /// What tenants have left.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
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

    /// Bytes held now under the shared budget, in steps of a page.
    pub fn held_bytes(&self) -> u64 {
        let free = self.steps.available_permits() as u64;
        self.num_steps.saturating_sub(free) * STEP_BYTES
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
        Admission::new(max_requests, max_bytes, Arc::default(), Arc::new(Metrics::default()))
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
    fn what_can_wait_leaves_room_and_what_is_urgent_finds_some() {
        let door = admission(10, 0);
        let enter = |priority| door.enter_as(Caller { tenant: "", priority });
        let mut inside: Vec<_> = (0..8).map(|_| enter(-1).unwrap()).collect();

        let refusal = enter(-1).unwrap_err();
        assert!(refusal.message.contains("all 8 places"), "{refusal}");
        inside.extend([enter(0).unwrap(), enter(0).unwrap()]);
        assert_eq!(enter(0).unwrap_err().kind, ErrorKind::Overloaded);
        inside.push(enter(3).unwrap());
        assert_eq!(enter(3).unwrap_err().kind, ErrorKind::Overloaded);

        drop(inside);
        assert!(enter(-1).is_ok());
    }

    #[test]
    fn a_tenant_that_is_refused_holds_no_place() {
        let table = toml::from_str("[tenants.a]\nmax_concurrent_requests = 1\n").unwrap();
        let tenants = Arc::new(Tenants::new(table));
        let door = Admission::new(2, 0, tenants, Arc::new(Metrics::default()));
        let as_a = Caller { tenant: "a", priority: 0 };

        let _inside = door.enter_as(as_a).unwrap();
        for _ in 0..5 {
            assert_eq!(door.enter_as(as_a).unwrap_err().code, "rate_limit_exceeded");
        }

        assert_eq!(door.metrics.running_now(), 1);
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
        assert_eq!(door.held_bytes(), 53_248);
        drop(first);
        assert_eq!(door.held_bytes(), 0);

        door.grow(&mut second, 64 * 1024).unwrap();
    }
}
