//! How long words to and from a worker are under way, beyond what it computes.

use super::router::Router;
use super::seat::{Policy, SeatId};

/// The longest delay that was seen of late, forgotten little by little.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lag {
    worst_s: f64,
    seen_at_s: f64,
}

impl Lag {
    fn note(&mut self, delay_s: f64, policy: &Policy, now_s: f64) {
        // one short word says little of a link: it may have met no other
        if delay_s >= self.remembered_s(policy, now_s) {
            *self = Self { worst_s: delay_s, seen_at_s: now_s };
        }
    }

    fn remembered_s(&self, policy: &Policy, now_s: f64) -> f64 {
        let age_s = (now_s - self.seen_at_s).max(0.0);
        self.worst_s * (-age_s / policy.lag_memory_s).exp()
    }

    /// By how much it puts off a first token, beyond what every link may.
    pub(super) fn beyond_usual_s(&self, policy: &Policy, now_s: f64) -> f64 {
        (self.remembered_s(policy, now_s) - policy.usual_lag_s).max(0.0)
    }
}

impl Router {
    /// A worker has begun a request that was sent so long ago, its time in the queue apart.
    pub fn lagged(&mut self, seat: SeatId, delay_s: f64, now_s: f64) {
        let policy = self.policy;
        if let Some(seat) = self.seat_mut(seat) {
            seat.lag.note(delay_s, &policy, now_s);
        }
    }
}
