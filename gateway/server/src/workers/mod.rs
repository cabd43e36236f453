//! The workers as the rest of the gateway sees them: who they are, how they fare, what they say.

mod channel;
pub mod client;
mod demand;
mod explain;
mod gathered;
mod lease;
mod outgoing;
mod pool;
mod replies;
mod session;
mod shared;
mod shared_pieces;
mod upload;
mod wire;

use std::sync::Arc;

pub use client::{GenerateCall, UploadWork, WorkerEvents, silent};
pub use explain::{PhaseEntry, explain};
use gateway_core::routing::{Role, SeatLoad};
pub use lease::WorkerLease;
pub use pool::WorkerPool;
pub use upload::{ChunkSender, ItemUpload, gather};
pub use wire::{ItemHeader, RequestHeader, Wish, header_bytes};

/// Number of a worker; none is given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(pub u32);

/// Where a worker is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerAddress {
    /// `http://host:port` or `https://host:port`.
    pub uri: String,
    /// The name its certificate is for, if it is not the host.
    pub tls_name: Option<String>,
}

/// A worker as other workers reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// `host:port`.
    pub address: String,
    /// The name its certificate is for, if it is not the host.
    pub tls_name: Option<Arc<str>>,
}

/// Who has computed parts of a request for others to fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// The pages of its prompt.
    pub pages: Option<Source>,
    /// The features of its media.
    pub features: Option<Source>,
}

/// Whether a worker takes requests, and if not, why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerState {
    /// Takes requests.
    Ready,
    /// Is there, reading weights.
    Loading,
    /// Finishes what it has and takes nothing new.
    Draining,
    /// Has requests and makes no step.
    Stalled,
    /// Has failed several requests in a row and is left alone for a while.
    Broken,
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

/// One worker at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerView {
    /// Its number.
    pub id: WorkerId,
    /// Where it is.
    pub address: Arc<str>,
    /// Whether it takes requests.
    pub state: WorkerState,
    /// What it does.
    pub role: Role,
    /// Its own last word on its load.
    pub load: SeatLoad,
    /// Requests this gateway has given it that have not ended.
    pub assigned_requests: i64,
    /// Longest prompt plus output it serves; 0 while unknown.
    pub max_context_tokens: u32,
}

/// One thing a worker says about a request.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerEvent {
    /// Nothing at all has come from the worker, on any request, for so long that another one
    /// should be asked; given once, before the first token, and the worker may still speak.
    Silent,
    /// The request has left the queue.
    Started {
        /// Time in the worker's queue.
        queue: std::time::Duration,
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
