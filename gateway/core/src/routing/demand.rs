//! What a request needs of a worker, and what it gets.

use super::chain::PageKeys;
use super::roles::Stage;
use super::seat::SeatId;

/// What a worker says of the pages it holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheNews<'a> {
    /// Whether everything told before is void.
    pub is_restart: bool,
    /// How often the worker has forgotten everything.
    pub epoch: u64,
    /// Pages it holds from now on.
    pub added: &'a [u64],
    /// Pages it holds no longer.
    pub removed: &'a [u64],
}

/// What a request needs of a worker.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Prompt and longest output.
    pub context_tokens: u64,
    /// Page keys by the cache epoch they belong to.
    pub chains: Vec<(u64, PageKeys)>,
    /// Requests of equal affinity go to one worker.
    pub affinity: Option<u64>,
    /// A worker that has just failed this request.
    pub excluded: Option<SeatId>,
    /// What is wanted of the worker.
    pub stage: Stage,
    /// Names its first picture or clip, if it has any: requests with equal ones share an encoder.
    pub media: Option<u64>,
    /// Prompt tokens up to the end of the last one.
    pub media_end: u32,
}

/// Why a worker was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It had the least to do.
    LeastWait,
    /// It holds the beginning of the prompt.
    Cache,
    /// The request asked for the same worker as others before it.
    Affinity,
    /// Who holds the beginning of the prompt, or whom affinity names, has too much to do.
    Spill,
}

/// The right to give one request to one worker; [`Router::end`] takes it back.
#[derive(Debug)]
pub struct Ticket {
    /// The worker.
    pub seat: SeatId,
    pub(super) generation: u64,
    pub(super) is_trial: bool,
    /// Prompt tokens to be computed, and after how many of the worker's words it was sent.
    pub(super) tokens: (u64, u64),
    pub(super) expected: Option<PageKeys>,
    pub(super) first_expected: usize,
}

/// A chosen worker.
#[derive(Debug)]
pub struct Choice {
    /// To be given back when the request has ended.
    pub ticket: Ticket,
    /// Why this worker.
    pub reason: Reason,
    /// Prompt tokens that it is thought to hold.
    pub matched_tokens: u32,
}

/// Why there is no worker for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NoChoice {
    /// None takes requests.
    NobodyReady,
    /// Those that do are too small; the longest context among them.
    TooLong(u32),
    /// All that could are left alone for now: they stall or have failed too often.
    NobodyFit,
    /// Even the shortest wait is too long.
    TooBusy {
        /// That wait.
        wait_s: f64,
    },
}
