//! Which worker takes a request: pure state and choices, no sockets, no clock.
//!
//! `chain` names the pages of a prompt as workers do, `index` knows who holds which page,
//! `breaker` and `seat` know how a worker fares, `roles` what it does, and [`Router`] chooses.

mod breaker;
mod chain;
mod demand;
mod index;
mod lag;
mod memory;
mod price;
mod roles;
mod router;
mod seat;
#[cfg(test)]
mod tests;

pub use breaker::{Breaker, BreakerPolicy, Outcome};
pub use chain::{ChainMedia, ChainPrompt, PageKeys, page_keys};
pub use demand::{CacheNews, Choice, Demand, NoChoice, Reason, Ticket};
pub use index::{MAX_SEATS, PrefixIndex};
pub use memory::{Candidates, ChainMemory, KnownChain};
pub use roles::{Division, Role, Stage};
pub use router::Router;
pub use seat::{Health, Policy, SeatId, SeatLoad, Standing};
