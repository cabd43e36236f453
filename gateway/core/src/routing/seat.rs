//! One worker as routing sees it: its word on its load, what was sent since, how it fares.

use super::breaker::{Breaker, BreakerPolicy};
use super::chain::PageKeys;
use super::lag::Lag;
use super::roles::Role;

/// Place of a worker in the router; given again once its worker has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeatId(pub u16);

/// What decides between workers. Times are seconds, work is counted in prompt tokens.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// What a request that runs beside ours costs it, in prompt tokens computed instead.
    pub request_tokens: f64,
    /// What a prompt token that must be computed weighs beside one that is waited for; above 1,
    /// since others wait for it too.
    pub work_weight: f64,
    /// Prompt tokens a second of every worker while none has said its own rate.
    pub default_tokens_per_s: f64,
    /// A worker with more requests than the mean times this, and `spare_requests` more, gets none
    /// for the sake of its cache or of affinity.
    pub max_imbalance: f64,
    /// See `max_imbalance`.
    pub spare_requests: f64,
    /// Time over which a worker that has just become ready is given its full share.
    pub slow_start_s: f64,
    /// A worker that has requests and executes no step for so long is out until it does.
    pub stall_s: f64,
    /// Delay on the way to a worker that counts for nothing: any link and any event loop has it.
    pub usual_lag_s: f64,
    /// Time over which a longer delay is forgotten, to about a third.
    pub lag_memory_s: f64,
    /// Requests are refused while even the least expected wait is longer.
    pub max_wait_s: f64,
    /// When a worker that fails is left alone.
    pub breaker: BreakerPolicy,
    /// Pages of all workers that are remembered.
    pub max_index_pages: usize,
    /// Pages remembered of what was sent to a worker that does not tell what it holds.
    pub max_sent_pages: usize,
    /// A worker that fetches prompts computes one itself of which it lacks no more tokens than this.
    pub min_prefill_tokens: u32,
    /// What fetching a prompt token costs, where computing one costs 1.
    pub fetch_weight: f64,
    /// It also does so if the wait for another one is longer than computing it by this factor.
    pub prefill_patience: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            request_tokens: 128.0,
            work_weight: 1.5,
            default_tokens_per_s: 8000.0,
            max_imbalance: 1.5,
            spare_requests: 4.0,
            slow_start_s: 10.0,
            stall_s: 60.0,
            usual_lag_s: 0.25,
            lag_memory_s: 10.0,
            max_wait_s: f64::INFINITY,
            breaker: BreakerPolicy::default(),
            max_index_pages: 4_000_000,
            max_sent_pages: 16_384,
            min_prefill_tokens: 256,
            fetch_weight: 0.1,
            prefill_patience: 4.0,
        }
    }
}

/// What a worker says of its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SeatLoad {
    /// Requests in its batch.
    pub running_requests: u32,
    /// Requests it has accepted and not begun.
    pub waiting_requests: u32,
    /// Prompt tokens accepted and not yet computed.
    pub waiting_prompt_tokens: u64,
    /// Cache pages that requests own.
    pub used_pages: u32,
    /// All its cache pages.
    pub total_pages: u32,
    /// Steps executed since its start.
    pub steps: u64,
    /// Prompt tokens it computes in a second; 0 while it does not know.
    pub prompt_tokens_per_s: f64,
}

/// What is known of a worker once it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Longest prompt plus output.
    pub max_context_tokens: u32,
    /// Tokens of a cache page; 0 if it shares none.
    pub page_tokens: u32,
    /// What it does.
    pub role: Role,
}

/// Whether a ready worker is given requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Yes.
    Good,
    /// It has requests and makes no step.
    Stalled,
    /// Its breaker is open.
    Broken,
}

#[derive(Debug)]
pub(super) struct Seat {
    /// Tells workers apart for affinity; the same over restarts of gateway and worker.
    pub(super) name: u64,
    /// Tells tickets of this worker from those of its predecessors in the seat.
    pub(super) generation: u64,
    pub(super) ready: Option<(Standing, f64)>,
    pub(super) epoch: u64,
    pub(super) tells_pages: bool,
    pub(super) load: SeatLoad,
    pub(super) breaker: Breaker,
    pub(super) lag: Lag,
    /// Requests given and not ended, and that number when the load was told.
    pub(super) assigned: i64,
    assigned_then: i64,
    /// Prompt tokens given since the load was told.
    pub(super) unreported_tokens: u64,
    pub(super) num_reports: u64,
    moved_at_s: f64,
    /// Pages of ended requests, and after how many words it must have told of them.
    untold: Vec<(u64, PageKeys)>,
}

impl Seat {
    pub(super) fn new(name: u64, generation: u64) -> Self {
        Self {
            name,
            generation,
            ready: None,
            epoch: 0,
            tells_pages: false,
            load: SeatLoad::default(),
            breaker: Breaker::default(),
            lag: Lag::default(),
            assigned: 0,
            assigned_then: 0,
            unreported_tokens: 0,
            num_reports: 0,
            moved_at_s: 0.0,
            untold: Vec::new(),
        }
    }

    pub(super) fn report(&mut self, load: SeatLoad, now_s: f64) {
        let is_busy = load.running_requests + load.waiting_requests > 0;
        let was_busy = self.load.running_requests + self.load.waiting_requests > 0;
        if load.steps != self.load.steps || !is_busy || !was_busy {
            self.moved_at_s = now_s;
        }
        self.load = load;
        self.assigned_then = self.assigned;
        self.unreported_tokens = 0;
        self.num_reports += 1;
    }

    /// Notes pages that it has computed and may not have told of yet.
    pub(super) fn expect_until_told(&mut self, pages: PageKeys) {
        // the next word may have been on its way already
        self.untold.push((self.num_reports + 2, pages));
    }

    /// Pages noted so that it must have told of by now.
    pub(super) fn told_by_now(&mut self) -> Vec<PageKeys> {
        let num_reports = self.num_reports;
        let (told, untold) = std::mem::take(&mut self.untold)
            .into_iter()
            .partition(|(due, _): &(u64, PageKeys)| *due <= num_reports);
        self.untold = untold;
        let told: Vec<(u64, PageKeys)> = told;
        told.into_iter().map(|(_, pages)| pages).collect()
    }

    /// Requests it has, by its own last word and by what was sent and has ended since.
    ///
    /// A word is always a little old: a burst would else go as one to who was idle a moment ago.
    pub(super) fn requests(&self) -> f64 {
        let told = i64::from(self.load.running_requests) + i64::from(self.load.waiting_requests);
        (told + self.assigned - self.assigned_then).max(0) as f64
    }

    pub(super) fn queued_tokens(&self) -> f64 {
        (self.load.waiting_prompt_tokens + self.unreported_tokens) as f64
    }

    /// Its reading speed, or `unknown` while it has not said one.
    pub(super) fn tokens_per_s(&self, unknown: f64) -> f64 {
        let told = self.load.prompt_tokens_per_s;
        if told > 0.0 { told } else { unknown }
    }

    pub(super) fn health(&self, policy: &Policy, now_s: f64) -> Health {
        let is_busy = self.load.running_requests + self.load.waiting_requests > 0;
        if is_busy && now_s - self.moved_at_s > policy.stall_s {
            Health::Stalled
        } else if !self.breaker.admits(now_s) {
            Health::Broken
        } else {
            Health::Good
        }
    }

    /// Share of the work of a seasoned worker that this one should have, above 0 to 1.
    pub(super) fn share(&self, policy: &Policy, now_s: f64) -> f64 {
        match self.ready {
            Some((_, since_s)) if policy.slow_start_s > 0.0 => {
                ((now_s - since_s) / policy.slow_start_s).clamp(0.1, 1.0)
            }
            _ => 1.0,
        }
    }
}
