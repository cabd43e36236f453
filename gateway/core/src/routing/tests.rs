//! Choices over workers that come, go, fail, fill up and remember; keys equal to the workers' own.

mod chain;
mod choices;
mod crowd;
mod index;
mod lag;
mod roles;

use std::sync::Arc;

use super::{CacheNews, Demand, Policy, Role, Router, SeatId, SeatLoad, Standing};

const PAGE: u32 = 128;
const STANDING: Standing =
    Standing { max_context_tokens: 100_000, page_tokens: PAGE, role: Role::All };

/// A router before `count` workers that have been ready for long.
fn ready(count: u16, policy: Policy) -> Router {
    let mut router = Router::new(policy);
    for number in 0..count {
        let seat = router.join(u64::from(number)).unwrap();
        router.set_ready(seat, Some(STANDING), -1000.0);
        router.cache_news(seat, &CacheNews::default());
    }
    router
}

fn prompt(tokens: u32, keys: &[u64]) -> Demand {
    Demand {
        prompt_tokens: tokens,
        context_tokens: u64::from(tokens) + 100,
        chains: vec![(0, Arc::from(keys))],
        ..Demand::default()
    }
}

fn busy(running_requests: u32, steps: u64) -> SeatLoad {
    SeatLoad { running_requests, steps, ..SeatLoad::default() }
}

fn chosen(router: &mut Router, demand: &Demand) -> SeatId {
    router.choose(demand, 0.0).unwrap().ticket.seat
}
