//! The workers as the rest of the gateway sees them: who they are, how they fare, what they say.

pub mod client;
mod pool;
mod routing;
mod session;
mod upload;
mod wire;

use std::sync::Arc;

pub use client::{GenerateCall, UploadWork, WorkerEvents};
pub use pool::{WorkerLease, WorkerPool};
pub use upload::{ChunkSender, ItemUpload, gather};
pub use wire::{ItemHeader, RequestHeader, header_bytes};

/// Place of a worker in the configured list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(pub u32);

/// Whether a worker takes requests, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// Takes requests.
    Ready,
    /// Is there, reading weights.
    Loading,
    /// Finishes what it has and takes nothing new.
    Draining,
    /// Serves another model than this gateway prepares requests for.
    Refused {
        /// Where the two differ.
        reason: Arc<str>,
    },
    /// Does not answer.
    Unreachable {
        /// What happened when it was last asked.
        reason: Arc<str>,
    },
}

/// What a worker last reported of its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerLoad {
    /// Requests in its batch.
    pub running_requests: u32,
    /// Requests it has accepted and not begun.
    pub waiting_requests: u32,
    /// Prompt tokens accepted and not yet computed.
    pub waiting_prompt_tokens: u64,
}

/// One worker at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerView {
    /// Its place in the list.
    pub id: WorkerId,
    /// Whether it takes requests.
    pub state: WorkerState,
    /// Its own last word on its load.
    pub load: WorkerLoad,
    /// Requests this gateway has given it since that word, less those that have ended.
    pub unreported_requests: i64,
    /// Longest prompt plus output it serves; 0 while unknown.
    pub max_context_tokens: u32,
}

/// One thing a worker says about a request.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerEvent {
    /// The request has left the queue.
    Started {
        /// Prompt tokens whose cache was found ready.
        cached_tokens: u32,
    },
    /// The next tokens.
    Tokens {
        /// Their ids, at least one.
        token_ids: Vec<u32>,
        /// One entry a token if asked for, else empty.
        logprobs: Vec<TokenLogprob>,
    },
    /// The end, if nothing went wrong.
    Finished {
        /// Whether the length ended it (else a stop id did).
        is_length: bool,
        /// The worker's own count.
        usage: WorkerUsage,
    },
}

/// The log-probability of one token and of the likeliest ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Of the token itself.
    pub logprob: f32,
    /// Id and log-probability, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The worker's count of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerUsage {
    /// The whole prompt.
    pub prompt_tokens: u32,
    /// Of these, found in the cache.
    pub cached_tokens: u32,
    /// Output.
    pub completion_tokens: u32,
}
