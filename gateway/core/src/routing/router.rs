//! All workers of a gateway, and the choice between them.

use std::collections::VecDeque;
use std::sync::Arc;

use super::breaker::Outcome;
use super::chain::PageKeys;
use super::demand::{CacheNews, Choice, Demand, NoChoice, Reason, Ticket};
use super::index::{MAX_SEATS, PrefixIndex};
use super::price::{Fit, cost, mix, pick};
use super::seat::{Health, Policy, Seat, SeatId, SeatLoad, Standing};

/// New pages of one request that are noted as expected of a worker that will tell of them itself;
/// more would take longer than the choice.
const MAX_EXPECTED_PAGES: usize = 256;

/// The workers and what is known of them. Times are seconds of one steady clock of the caller's.
#[derive(Debug)]
pub struct Router {
    pub(super) policy: Policy,
    pub(super) seats: Vec<Option<Seat>>,
    /// Of the request that is looked at: when another worker could have computed its prompt.
    pub(super) prefill_s: Option<f64>,
    /// Prompt tokens a second of a worker that has not said its own rate.
    pub(super) usual_rate: f64,
    num_joined: u64,
    told: PrefixIndex,
    sent: PrefixIndex,
    sent_order: Vec<VecDeque<u64>>,
    turn: usize,
    // reused between choices
    pages: Vec<u32>,
    fit: Vec<Fit>,
}

impl Router {
    /// Without workers.
    pub fn new(policy: Policy) -> Self {
        Self {
            told: PrefixIndex::new(policy.max_index_pages),
            sent: PrefixIndex::new(policy.max_index_pages),
            policy,
            seats: Vec::new(),
            prefill_s: None,
            usual_rate: policy.default_tokens_per_s,
            num_joined: 0,
            sent_order: Vec::new(),
            turn: 0,
            pages: Vec::new(),
            fit: Vec::new(),
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
        let Some(entry) = self.seat_mut(seat) else { return };
        entry.report(load, now_s);
        for pages in entry.told_by_now() {
            self.unexpect(usize::from(seat.0), &pages);
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
            self.told.add_new(place, *key);
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
        let mut fit = std::mem::take(&mut self.fit);
        let choice = self.choose_among(demand, now_s, &mut fit);
        self.fit = fit;
        let (place, reason) = choice?;
        self.take(demand, place, reason).ok_or(NoChoice::NobodyFit)
    }

    fn choose_among(
        &mut self,
        demand: &Demand,
        now_s: f64,
        fit: &mut Vec<Fit>,
    ) -> Result<(usize, Reason), NoChoice> {
        self.find_fit(demand, now_s, fit);
        if fit.is_empty() {
            return Err(self.nobody(demand));
        }
        let mean = fit.iter().map(|one| one.requests).sum::<f64>() / fit.len() as f64;
        let limit = mean * self.policy.max_imbalance + self.policy.spare_requests;
        self.match_pages(demand);
        let mut is_spilled = false;
        let unknown = self.usual_tokens_per_s(fit);
        self.usual_rate = unknown;
        self.prefill_s = self.soonest_prefill_s(demand, now_s);
        if let Some(sticky) = self.sticky(demand, fit) {
            let seat = self.seats[usize::from(sticky.place)].as_ref();
            let lag_s = seat.map_or(0.0, |seat| seat.lag.beyond_usual_s(&self.policy, now_s));
            if sticky.requests <= limit && lag_s == 0.0 {
                return Ok((usize::from(sticky.place), Reason::Affinity));
            }
            is_spilled = true;
        }
        for one in fit.iter_mut() {
            let Some(seat) = &self.seats[usize::from(one.place)] else { continue };
            let mut matched = self.matched(usize::from(one.place), seat);
            if one.requests > limit {
                is_spilled |= matched > 0;
                matched = 0;
            }
            let policy = (&self.policy, unknown);
            let wait_s = self.fetch_wait_s(seat, demand.prompt_tokens.saturating_sub(matched));
            let share = if wait_s.is_some() { self.policy.fetch_weight } else { 1.0 };
            let own = cost(seat, demand, (one.requests, matched, share), policy, now_s);
            one.cost = own + wait_s.unwrap_or(0.0);
        }
        self.turn = self.turn.wrapping_add(1);
        let place = pick(fit, self.turn).ok_or(NoChoice::NobodyFit)?;
        let seat = self.seats[place].as_ref().ok_or(NoChoice::NobodyFit)?;
        let wait_s = seat.queued_tokens() / seat.tokens_per_s(unknown);
        if wait_s > self.policy.max_wait_s {
            return Err(NoChoice::TooBusy { wait_s });
        }
        let reason = match (self.matched(place, seat) > 0, is_spilled) {
            (true, _) => Reason::Cache,
            (false, true) => Reason::Spill,
            (false, false) => Reason::LeastWait,
        };
        Ok((place, reason))
    }

    /// A given worker, whatever it has to do; `None` if it has left.
    pub fn take_seat(&mut self, demand: &Demand, seat: SeatId) -> Option<Choice> {
        self.match_pages(demand);
        self.prefill_s = None;
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
        let (tokens, num_reports) = ticket.tokens;
        if num_reports == seat.num_reports {
            seat.unreported_tokens = seat.unreported_tokens.saturating_sub(tokens);
        }
        seat.breaker.end(outcome, ticket.is_trial, now_s, &policy);
        // who does not tell what it holds is remembered by `sent_order`
        let Some(keys) = ticket.expected else { return };
        let end = keys.len().min(ticket.first_expected + MAX_EXPECTED_PAGES);
        let pages: PageKeys = keys[ticket.first_expected..end].into();
        if outcome == Outcome::Served {
            seat.expect_until_told(pages);
        } else {
            self.unexpect(place, &pages);
        }
    }

    fn unexpect(&mut self, place: usize, pages: &[u64]) {
        for key in pages {
            self.sent.remove(place, *key);
        }
    }

    pub(super) fn seat_mut(&mut self, seat: SeatId) -> Option<&mut Seat> {
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

    fn find_fit(&self, demand: &Demand, now_s: f64, fit: &mut Vec<Fit>) {
        let excluded = demand.excluded.map(|seat| usize::from(seat.0));
        fit.clear();
        for (place, seat) in self.seats.iter().enumerate() {
            let Some(seat) = seat else { continue };
            if Some(place) != excluded
                && self.is_fit(seat, demand.stage, demand.context_tokens, now_s)
            {
                fit.push(Fit { place: place as u16, requests: seat.requests(), cost: 0.0 });
            }
        }
    }

    /// The mean of the rates that were told: who has read nothing yet is taken for one of many.
    fn usual_tokens_per_s(&self, fit: &[Fit]) -> f64 {
        let seats = fit.iter().filter_map(|one| self.seats[usize::from(one.place)].as_ref());
        let told = seats.map(|seat| seat.load.prompt_tokens_per_s).filter(|rate| *rate > 0.0);
        let (sum, count) = told.fold((0.0, 0.0), |(sum, count), rate| (sum + rate, count + 1.0));
        if count > 0.0 { sum / count } else { self.policy.default_tokens_per_s }
    }

    fn nobody(&self, demand: &Demand) -> NoChoice {
        let ready = self.seats.iter().flatten().filter_map(|seat| seat.ready);
        let ready = ready.filter(|(standing, _)| standing.role.serves(demand.stage));
        match ready.map(|(standing, _)| standing.max_context_tokens).max() {
            None => NoChoice::NobodyReady,
            Some(longest) if u64::from(longest) < demand.context_tokens => {
                NoChoice::TooLong(longest)
            }
            Some(_) => NoChoice::NobodyFit,
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
    pub(super) fn matched(&self, place: usize, seat: &Seat) -> u32 {
        let page_tokens = seat.ready.map_or(0, |(standing, _)| standing.page_tokens);
        self.pages.get(place).map_or(0, |pages| pages.saturating_mul(page_tokens))
    }

    /// Whom affinity names: for each name the worker with the highest score, so that a worker
    /// that comes or goes moves only its own share.
    fn sticky(&self, demand: &Demand, fit: &[Fit]) -> Option<Fit> {
        let affinity = demand.affinity?;
        let score = |one: &&Fit| {
            let seat = self.seats[usize::from(one.place)].as_ref();
            seat.map(|seat| mix(affinity ^ seat.name.rotate_left(17)))
        };
        fit.iter().max_by_key(score).copied()
    }

    fn take(&mut self, demand: &Demand, place: usize, reason: Reason) -> Option<Choice> {
        let pages = self.pages.get(place).copied().unwrap_or(0) as usize;
        let (matched_tokens, fetches) = {
            let seat = self.seats.get(place)?.as_ref()?;
            let matched = self.matched(place, seat);
            let missing = demand.prompt_tokens.saturating_sub(matched);
            (matched, self.fetch_wait_s(seat, missing).is_some())
        };
        let share = if fetches { self.policy.fetch_weight } else { 1.0 };
        let seat = self.seats.get_mut(place).and_then(Option::as_mut)?;
        seat.assigned += 1;
        let missing = f64::from(demand.prompt_tokens.saturating_sub(matched_tokens));
        let tokens = (missing * share) as u64;
        seat.unreported_tokens += tokens;
        let tokens = (tokens, seat.num_reports);
        let is_trial = seat.breaker.begin();
        let (generation, tells_pages, epoch) = (seat.generation, seat.tells_pages, seat.epoch);
        let keys = demand.chains.iter().find(|(of, _)| *of == epoch).map(|(_, keys)| keys);
        // what is to be fetched must come first: a second request with it asks for it as well
        let keys = keys.filter(|keys| keys.len() > pages && !fetches).map(Arc::clone);
        if let Some(keys) = &keys {
            self.expect(place, tells_pages, &keys[pages..]);
        }
        Some(Choice {
            ticket: Ticket {
                seat: SeatId(place as u16),
                generation,
                is_trial,
                tokens,
                expected: keys.filter(|_| tells_pages),
                first_expected: pages,
            },
            reason,
            matched_tokens,
        })
    }

    /// Notes pages that a worker is about to compute.
    fn expect(&mut self, place: usize, tells_pages: bool, keys: &[u64]) {
        if tells_pages {
            for key in keys.iter().take(MAX_EXPECTED_PAGES) {
                self.sent.add(place, *key);
            }
            return;
        }
        let order = &mut self.sent_order[place];
        for key in keys.iter().take(self.policy.max_sent_pages) {
            if self.sent.add_new(place, *key) {
                order.push_back(*key);
            }
            if order.len() > self.policy.max_sent_pages
                && let Some(oldest) = order.pop_front()
            {
                self.sent.remove(place, oldest);
            }
        }
    }
}
