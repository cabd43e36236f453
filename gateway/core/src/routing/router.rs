//! All workers of a gateway, and the choice between them.

use std::collections::VecDeque;
use std::sync::Arc;

use super::breaker::Outcome;
use super::chain::PageKeys;
use super::index::{MAX_SEATS, PrefixIndex};
use super::seat::{Health, Policy, Seat, SeatId, SeatLoad, Standing};

/// Pages of one request that are expected to appear on its worker; the rest is not worth the time.
const MAX_EXPECTED_PAGES: usize = 256;

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
    generation: u64,
    is_trial: bool,
    expected: Option<PageKeys>,
    first_expected: usize,
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

/// The workers and what is known of them. Times are seconds of one steady clock of the caller's.
#[derive(Debug)]
pub struct Router {
    policy: Policy,
    seats: Vec<Option<Seat>>,
    num_joined: u64,
    told: PrefixIndex,
    sent: PrefixIndex,
    sent_order: Vec<VecDeque<u64>>,
    turn: usize,
    // reused between choices
    pages: Vec<u32>,
    costs: Vec<(f64, u16)>,
}

impl Router {
    /// Without workers.
    pub fn new(policy: Policy) -> Self {
        Self {
            told: PrefixIndex::new(policy.max_index_pages),
            sent: PrefixIndex::new(policy.max_index_pages),
            policy,
            seats: Vec::new(),
            num_joined: 0,
            sent_order: Vec::new(),
            turn: 0,
            pages: Vec::new(),
            costs: Vec::new(),
        }
    }

    /// A worker to follow; `None` if there are [`MAX_SEATS`] already. `name` tells workers apart.
    pub fn join(&mut self, name: u64) -> Option<SeatId> {
        let free = self.seats.iter().position(Option::is_none);
        let place = free.unwrap_or(self.seats.len());
        if place >= MAX_SEATS {
            return None;
        }
        if place == self.seats.len() {
            self.seats.push(None);
            self.sent_order.push(VecDeque::new());
        }
        self.num_joined += 1;
        self.seats[place] = Some(Seat::new(name, self.num_joined));
        Some(SeatId(place as u16))
    }

    /// A worker is followed no longer.
    pub fn leave(&mut self, seat: SeatId) {
        self.forget_pages(seat);
        if let Some(entry) = self.seats.get_mut(usize::from(seat.0)) {
            *entry = None;
        }
    }

    /// A worker takes requests (again), or (`None`) does not.
    pub fn set_ready(&mut self, seat: SeatId, standing: Option<Standing>, now_s: f64) {
        let Some(entry) = self.seat_mut(seat) else { return };
        entry.ready = match (standing, entry.ready) {
            (Some(standing), Some((_, since_s))) => Some((standing, since_s)),
            (Some(standing), None) => Some((standing, now_s)),
            (None, _) => None,
        };
    }

    /// A worker is another process than before: what it held and did is gone.
    pub fn restarted(&mut self, seat: SeatId) {
        self.forget_pages(seat);
        if let Some(entry) = self.seat_mut(seat) {
            let mut fresh = Seat::new(entry.name, entry.generation);
            // requests on the earlier process are still to end
            fresh.assigned = entry.assigned;
            *entry = fresh;
        }
    }

    /// A worker's word on its load.
    pub fn report(&mut self, seat: SeatId, load: SeatLoad, now_s: f64) {
        if let Some(entry) = self.seat_mut(seat) {
            entry.report(load, now_s);
        }
    }

    /// A worker's word on its pages.
    pub fn cache_news(&mut self, seat: SeatId, news: &CacheNews<'_>) {
        let Some(entry) = self.seat_mut(seat) else { return };
        let is_first = !std::mem::replace(&mut entry.tells_pages, true);
        entry.epoch = news.epoch;
        if is_first || news.is_restart {
            self.forget_pages(seat);
        }
        let place = usize::from(seat.0);
        for key in news.removed {
            self.told.remove(place, *key);
        }
        for key in news.added {
            // notes are counted, but a worker holds a page once
            if !self.told.holds(place, *key) {
                self.told.add(place, *key);
            }
        }
    }

    /// Every epoch and page size that the chains of a request must cover.
    pub fn epochs(&self) -> Vec<(u64, u32)> {
        let mut epochs: Vec<_> = self
            .seats
            .iter()
            .flatten()
            .filter_map(|seat| seat.ready.map(|(standing, _)| (seat.epoch, standing.page_tokens)))
            .filter(|(_, page_tokens)| *page_tokens > 0)
            .collect();
        epochs.sort_unstable();
        epochs.dedup();
        epochs
    }

    /// How a ready worker fares.
    pub fn health(&self, seat: SeatId, now_s: f64) -> Health {
        let seat = self.seats.get(usize::from(seat.0)).and_then(Option::as_ref);
        seat.map_or(Health::Good, |seat| seat.health(&self.policy, now_s))
    }

    /// Requests given to a worker and not ended.
    pub fn assigned(&self, seat: SeatId) -> i64 {
        let seat = self.seats.get(usize::from(seat.0)).and_then(Option::as_ref);
        seat.map_or(0, |seat| seat.assigned)
    }

    /// Pages known of all workers: as told by them, and as expected of what was sent.
    pub fn num_pages(&self) -> (usize, usize) {
        (self.told.num_pages(), self.sent.num_pages())
    }

    /// The worker with the least expected time to the first token, spared where spilling demands.
    ///
    /// # Errors
    /// Why nobody can take the request.
    pub fn choose(&mut self, demand: &Demand, now_s: f64) -> Result<Choice, NoChoice> {
        let mean = self.check_candidates(demand, now_s)?;
        let limit = mean * self.policy.max_imbalance + self.policy.spare_requests;
        self.match_pages(demand);
        let sticky = self.sticky(demand, now_s);
        let mut is_spilled = false;
        if let Some(place) = sticky {
            let requests = self.seats[place].as_ref().map_or(0.0, Seat::requests);
            if requests <= limit {
                return self.take(demand, place, Reason::Affinity).ok_or(NoChoice::NobodyFit);
            }
            is_spilled = true;
        }
        self.turn = self.turn.wrapping_add(1);
        let policy = self.policy;
        let mut costs = std::mem::take(&mut self.costs);
        costs.clear();
        for (place, seat) in self.candidates(demand, now_s) {
            let is_full = seat.requests() > limit;
            let matched = if is_full { 0.0 } else { f64::from(self.matched(place, seat)) };
            is_spilled |= is_full && self.matched(place, seat) > 0;
            costs.push((cost(seat, demand, matched, &policy, now_s), place as u16));
        }
        let place = pick(&costs, self.turn);
        self.costs = costs;
        let seat = place.and_then(|place| self.seats[place].as_ref());
        let (Some(place), Some(seat)) = (place, seat) else { return Err(NoChoice::NobodyFit) };
        let wait_s = seat.queued_tokens() / seat.tokens_per_s(&policy);
        if wait_s > policy.max_wait_s {
            return Err(NoChoice::TooBusy { wait_s });
        }
        let reason = match (self.matched(place, seat) > 0, is_spilled) {
            (true, _) => Reason::Cache,
            (false, true) => Reason::Spill,
            (false, false) => Reason::LeastWait,
        };
        self.take(demand, place, reason).ok_or(NoChoice::NobodyFit)
    }

    /// A given worker, whatever it has to do; `None` if it has left.
    pub fn take_seat(&mut self, demand: &Demand, seat: SeatId) -> Option<Choice> {
        self.match_pages(demand);
        self.take(demand, usize::from(seat.0), Reason::Affinity)
    }

    /// A request has ended.
    pub fn end(&mut self, ticket: Ticket, outcome: Outcome, now_s: f64) {
        let policy = self.policy.breaker;
        let place = usize::from(ticket.seat.0);
        let Some(Some(seat)) = self.seats.get_mut(place) else { return };
        if seat.generation != ticket.generation {
            return;
        }
        seat.assigned -= 1;
        seat.breaker.end(outcome, ticket.is_trial, now_s, &policy);
        // what it computed it has told by now; who does not tell is remembered by `sent_order`
        if let Some(keys) = ticket.expected {
            let end = keys.len().min(ticket.first_expected + MAX_EXPECTED_PAGES);
            for key in &keys[ticket.first_expected..end] {
                self.sent.remove(place, *key);
            }
        }
    }

    fn seat_mut(&mut self, seat: SeatId) -> Option<&mut Seat> {
        self.seats.get_mut(usize::from(seat.0)).and_then(Option::as_mut)
    }

    fn forget_pages(&mut self, seat: SeatId) {
        let place = usize::from(seat.0);
        self.told.clear(place);
        self.sent.clear(place);
        if let Some(order) = self.sent_order.get_mut(place) {
            order.clear();
        }
    }

    fn candidates<'a>(
        &'a self,
        demand: &'a Demand,
        now_s: f64,
    ) -> impl Iterator<Item = (usize, &'a Seat)> {
        let is_fit = move |seat: &Seat| {
            seat.ready.is_some_and(|(standing, _)| {
                u64::from(standing.max_context_tokens) >= demand.context_tokens
            }) && seat.health(&self.policy, now_s) == Health::Good
        };
        let excluded = demand.excluded.map(|seat| usize::from(seat.0));
        self.seats
            .iter()
            .enumerate()
            .filter_map(|(place, seat)| seat.as_ref().map(|seat| (place, seat)))
            .filter(move |(place, seat)| Some(*place) != excluded && is_fit(seat))
    }

    /// The mean number of requests of those that could take this one.
    fn check_candidates(&self, demand: &Demand, now_s: f64) -> Result<f64, NoChoice> {
        let (mut count, mut requests) = (0.0, 0.0);
        for (_, seat) in self.candidates(demand, now_s) {
            count += 1.0;
            requests += seat.requests();
        }
        if count > 0.0 {
            return Ok(requests / count);
        }
        let ready = self.seats.iter().flatten().filter_map(|seat| seat.ready);
        match ready.map(|(standing, _)| standing.max_context_tokens).max() {
            None => Err(NoChoice::NobodyReady),
            Some(longest) if u64::from(longest) < demand.context_tokens => {
                Err(NoChoice::TooLong(longest))
            }
            Some(_) => Err(NoChoice::NobodyFit),
        }
    }

    fn match_pages(&mut self, demand: &Demand) {
        self.pages.clear();
        self.pages.resize(self.seats.len(), 0);
        for (_, keys) in &demand.chains {
            PrefixIndex::match_chain(&[&self.told, &self.sent], keys, &mut self.pages);
        }
    }

    /// Prompt tokens a seat is thought to hold.
    fn matched(&self, place: usize, seat: &Seat) -> u32 {
        let page_tokens = seat.ready.map_or(0, |(standing, _)| standing.page_tokens);
        self.pages.get(place).map_or(0, |pages| pages.saturating_mul(page_tokens))
    }

    /// Whom affinity names: for each name the worker with the highest score, so that a worker
    /// that comes or goes moves only its own share.
    fn sticky(&self, demand: &Demand, now_s: f64) -> Option<usize> {
        let affinity = demand.affinity?;
        let score = |seat: &Seat| mix(affinity ^ seat.name.rotate_left(17));
        self.candidates(demand, now_s).max_by_key(|(_, seat)| score(seat)).map(|(place, _)| place)
    }

    fn take(&mut self, demand: &Demand, place: usize, reason: Reason) -> Option<Choice> {
        let pages = self.pages.get(place).copied().unwrap_or(0) as usize;
        let seat = self.seats.get_mut(place).and_then(Option::as_mut)?;
        let page_tokens = seat.ready.map_or(0, |(standing, _)| standing.page_tokens);
        let matched_tokens = (pages as u32).saturating_mul(page_tokens);
        seat.assigned += 1;
        seat.unreported_tokens += u64::from(demand.prompt_tokens.saturating_sub(matched_tokens));
        let is_trial = seat.breaker.begin();
        let (generation, tells_pages, epoch) = (seat.generation, seat.tells_pages, seat.epoch);
        let keys = demand.chains.iter().find(|(of, _)| *of == epoch).map(|(_, keys)| keys);
        let keys = keys.filter(|keys| keys.len() > pages).map(Arc::clone);
        if let Some(keys) = &keys {
            self.expect(place, tells_pages, &keys[pages..]);
        }
        Some(Choice {
            ticket: Ticket {
                seat: SeatId(place as u16),
                generation,
                is_trial,
                expected: keys.filter(|_| tells_pages),
                first_expected: pages,
            },
            reason,
            matched_tokens,
        })
    }

    /// Notes pages that a worker is about to compute.
    fn expect(&mut self, place: usize, tells_pages: bool, keys: &[u64]) {
        for key in keys.iter().take(MAX_EXPECTED_PAGES) {
            if tells_pages {
                self.sent.add(place, *key);
            } else if !self.sent.holds(place, *key) && self.sent.add(place, *key) {
                let order = &mut self.sent_order[place];
                order.push_back(*key);
                if order.len() > self.policy.max_sent_pages
                    && let Some(oldest) = order.pop_front()
                {
                    self.sent.remove(place, oldest);
                }
            }
        }
    }
}

/// Seconds to the first token, and what the request makes others wait.
fn cost(seat: &Seat, demand: &Demand, matched: f64, policy: &Policy, now_s: f64) -> f64 {
    let own = (f64::from(demand.prompt_tokens) - matched).max(0.0);
    let page_tokens = seat.ready.map_or(0, |(standing, _)| standing.page_tokens);
    // a request that finds no free page waits for others to end
    let free = f64::from(seat.load.total_pages.saturating_sub(seat.load.used_pages));
    let lacking = if seat.load.total_pages == 0 {
        0.0
    } else {
        (own - free * f64::from(page_tokens)).max(0.0)
    };
    // ours is waited for by those behind it: joining who computes it already spares them that
    let work = own * policy.work_weight + lacking + seat.requests() * policy.request_tokens;
    let tokens = seat.queued_tokens() + work;
    (tokens + policy.request_tokens) / seat.tokens_per_s(policy) / seat.share(policy, now_s)
}

/// The cheapest; equals take turns.
fn pick(costs: &[(f64, u16)], turn: usize) -> Option<usize> {
    let least = costs.iter().map(|(cost, _)| *cost).min_by(f64::total_cmp)?;
    let is_equal = |cost: f64| cost <= least + least.abs() * 1e-9;
    let equals = costs.iter().filter(|(cost, _)| is_equal(*cost));
    let count = equals.clone().count();
    equals.skip(turn % count).map(|(_, place)| usize::from(*place)).next()
}

/// Source: the finalizer of splitmix64.
fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
