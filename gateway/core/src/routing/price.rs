//! What a worker would cost a request, and the cheapest of many.

use super::demand::Demand;
use super::seat::{Policy, Seat};

/// A worker that could take the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    pub(super) place: u16,
    pub(super) requests: f64,
    pub(super) cost: f64,
}

/// Seconds to the first token, and what the request makes others wait. Of prompt tokens that are
/// missing here, `share` are computed here.
pub(super) fn cost(
    seat: &Seat,
    demand: &Demand,
    (requests, matched, share): (f64, u32, f64),
    (policy, unknown_tokens_per_s): (&Policy, f64),
    now_s: f64,
) -> f64 {
    let missing = f64::from(demand.prompt_tokens.saturating_sub(matched));
    let own = missing * share;
    let page_tokens = seat.ready.map_or(0, |(standing, _)| standing.page_tokens);
    // a request that finds no free page waits for others to end
    let free = f64::from(seat.load.total_pages.saturating_sub(seat.load.used_pages));
    let lacking = if seat.load.total_pages == 0 {
        0.0
    } else {
        (missing - free * f64::from(page_tokens)).max(0.0)
    };
    // ours is waited for by those behind it: joining who computes it already spares them that
    let work = own * policy.work_weight + lacking + requests * policy.request_tokens;
    let tokens = seat.queued_tokens() + work;
    let computed_s = (tokens + policy.request_tokens)
        / seat.tokens_per_s(unknown_tokens_per_s)
        / seat.share(policy, now_s);
    computed_s + seat.lag.beyond_usual_s(policy, now_s)
}

/// The cheapest; equals take turns.
pub(super) fn pick(fit: &[Fit], turn: usize) -> Option<usize> {
    let least = fit.iter().map(|one| one.cost).min_by(f64::total_cmp)?;
    let limit = least + least.abs() * 1e-9;
    let equals = fit.iter().filter(|one| one.cost <= limit);
    let count = equals.clone().count();
    equals.skip(turn % count).map(|one| usize::from(one.place)).next()
}

/// Source: the finalizer of splitmix64.
pub(super) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
