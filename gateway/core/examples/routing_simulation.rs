//! A fleet in simulated time: how evenly and how cleverly requests are spread, and how long one
//! choice takes on this machine.
//!
//! `cargo run --release -p gateway-core --example routing_simulation [requests]` prints one JSON
//! object a line: for each fleet and way of choosing, hits, balance, waits and choice times.

#![allow(clippy::print_stdout)]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use gateway_core::routing::{
    CacheNews, Choice, Demand, Outcome, Policy, Role, Router, SeatId, SeatLoad, Standing, Ticket,
};

const PAGE_TOKENS: u32 = 128;
/// Pages that a worker keeps.
const CACHE_PAGES: usize = 4000;
const PROMPT_TOKENS_PER_S: f64 = 20_000.0;
const OUTPUT_S: f64 = 4.0;
const REPORT_S: f64 = 0.1;
const RUNS: usize = 3;
/// Share of the fleet's reading speed that the prompts would take if nothing were cached.
const LOAD: f64 = 0.7;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    RoundRobin,
    LeastWait,
    Told,
    Remembered,
}

const WAYS: [(Way, &str); 4] = [
    (Way::RoundRobin, "round_robin"),
    (Way::LeastWait, "least_wait"),
    (Way::Told, "cache_told"),
    (Way::Remembered, "cache_remembered"),
];

/// A small generator, so that every way meets the same requests. Source: splitmix64.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Small numbers often, large ones seldom.
    fn popular(&mut self, limit: u64) -> u64 {
        ((limit as f64).powf(self.unit()) as u64).min(limit - 1)
    }
}

/// Requests of three sorts: a known beginning with a question of its own, the next turn of a
/// conversation, and a picture seen before or not.
struct Traffic {
    dice: Dice,
    sessions: Vec<Vec<u64>>,
}

impl Traffic {
    fn pages(&mut self) -> Arc<[u64]> {
        let fresh = |dice: &mut Dice, count| (0..count).map(|_| dice.next()).collect::<Vec<_>>();
        let named = |name: u64, count: u64| {
            let mut dice = Dice(name.wrapping_mul(0x1234_5678_9abc_def1));
            (0..count).map(|_| dice.next()).collect::<Vec<_>>()
        };
        let dice = &mut self.dice;
        let pages = match dice.below(10) {
            0..4 => {
                let system = dice.popular(200);
                let mut pages = named(system, 4 + system % 29);
                let own = 1 + dice.below(4);
                pages.extend(fresh(dice, own));
                pages
            }
            4..8 => {
                let place = dice.below(self.sessions.len() as u64) as usize;
                let session = &mut self.sessions[place];
                let more = 1 + dice.below(8);
                session.extend(fresh(dice, more));
                let whole = session.clone();
                if session.len() > 250 {
                    session.clear();
                }
                whole
            }
            _ => {
                let picture = dice.popular(20_000);
                let mut pages = named(1_000_000 + picture, 6);
                pages.extend(fresh(dice, 1));
                pages
            }
        };
        pages.into()
    }
}

#[derive(Default)]
struct Worker {
    /// Held pages, with the turn of their last use; the oldest goes first.
    pages: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
    busy_until_s: f64,
    running: u32,
    waiting: u32,
    waiting_tokens: u64,
    requests: u32,
    steps: u64,
    added: Vec<u64>,
    removed: Vec<u64>,
}

impl Worker {
    /// Prompt pages found; all of them are held afterwards.
    fn read(&mut self, pages: &[u64], turn: u64) -> usize {
        let found = pages.iter().take_while(|page| self.pages.contains_key(page)).count();
        for page in pages {
            if self.pages.insert(*page, turn).is_none() {
                self.added.push(*page);
            }
            self.order.push_back((*page, turn));
        }
        while self.pages.len() > CACHE_PAGES {
            let Some((page, used)) = self.order.pop_front() else { break };
            if self.pages.get(&page) == Some(&used) {
                self.pages.remove(&page);
                self.removed.push(page);
            }
        }
        found
    }
}

enum Event {
    Arrival,
    FirstToken { worker: usize, tokens: u64 },
    End { worker: usize, ticket: Ticket },
    Report { worker: usize },
}

/// Events by time, then by order of their making.
struct Clock {
    due: BinaryHeap<Reverse<(u64, u64)>>,
    events: HashMap<u64, Event>,
    num: u64,
}

impl Clock {
    fn add(&mut self, at_s: f64, event: Event) {
        self.num += 1;
        self.events.insert(self.num, event);
        self.due.push(Reverse(((at_s * 1e9) as u64, self.num)));
    }

    fn next(&mut self) -> Option<(f64, Event)> {
        let Reverse((at, num)) = self.due.pop()?;
        self.events.remove(&num).map(|event| (at as f64 / 1e9, event))
    }
}

struct Outcomes {
    choice_us: Vec<f64>,
    wait_s: Vec<f64>,
    prompt_pages: usize,
    found_pages: usize,
}

fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let place = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(place).copied().unwrap_or(0.0)
}

fn router(num_workers: usize, way: Way) -> Router {
    let mut router = Router::new(Policy { slow_start_s: 0.0, ..Policy::default() });
    for number in 0..num_workers {
        let Some(seat) = router.join(number as u64) else { continue };
        let standing =
            Standing { max_context_tokens: 1 << 20, page_tokens: PAGE_TOKENS, role: Role::All };
        router.set_ready(seat, Some(standing), 0.0);
        if way == Way::Told {
            router.cache_news(seat, &CacheNews::default());
        }
    }
    router
}

fn choose(router: &mut Router, way: Way, turn: u64, demand: &Demand, now_s: f64) -> Option<Choice> {
    match way {
        Way::RoundRobin => {
            let seats = demand.affinity.unwrap_or(1);
            router.take_seat(demand, SeatId((turn % seats) as u16))
        }
        _ => router.choose(demand, now_s).ok(),
    }
}

fn simulate(num_workers: usize, way: Way, num_requests: u64) -> (Vec<Worker>, Outcomes) {
    let mut router = router(num_workers, way);
    let mut workers: Vec<Worker> = Vec::new();
    workers.resize_with(num_workers, Worker::default);
    let sessions = vec![Vec::new(); num_workers * 4];
    let mut traffic = Traffic { dice: Dice(7), sessions };
    let mut clock = Clock { due: BinaryHeap::new(), events: HashMap::new(), num: 0 };
    // the mean prompt of this traffic has some 30 pages; what matters is that all ways meet it
    let gap_s = 30.0 * f64::from(PAGE_TOKENS) / (LOAD * PROMPT_TOKENS_PER_S * num_workers as f64);
    clock.add(0.0, Event::Arrival);
    for worker in 0..num_workers {
        let phase = worker as f64 / num_workers as f64;
        clock.add(REPORT_S * phase, Event::Report { worker });
    }
    let mut seen = Outcomes { choice_us: vec![], wait_s: vec![], prompt_pages: 0, found_pages: 0 };
    let (mut turn, mut left) = (0, num_requests);
    while let Some((now_s, event)) = clock.next() {
        match event {
            Event::Arrival => {
                turn += 1;
                let pages = traffic.pages();
                let tokens = pages.len() as u32 * PAGE_TOKENS + 60;
                let is_blind = matches!(way, Way::RoundRobin | Way::LeastWait);
                let chains = if is_blind { vec![] } else { vec![(0, Arc::clone(&pages))] };
                let demand = Demand {
                    prompt_tokens: tokens,
                    context_tokens: u64::from(tokens) + 500,
                    chains,
                    affinity: (way == Way::RoundRobin).then_some(num_workers as u64),
                    ..Demand::default()
                };
                let began = Instant::now();
                let choice = choose(&mut router, way, turn, &demand, now_s);
                seen.choice_us.push(began.elapsed().as_secs_f64() * 1e6);
                if let Some(choice) = choice {
                    give(
                        &mut workers,
                        &mut clock,
                        &mut seen,
                        (&pages, tokens),
                        (choice, now_s, turn),
                    );
                }
                left -= 1;
                if left > 0 {
                    let pause_s = -traffic.dice.unit().max(1e-12).ln() * gap_s;
                    clock.add(now_s + pause_s, Event::Arrival);
                }
            }
            Event::FirstToken { worker, tokens } => {
                let worker = &mut workers[worker];
                worker.waiting -= 1;
                worker.running += 1;
                worker.steps += 1;
                worker.waiting_tokens -= tokens;
            }
            Event::End { worker, ticket } => {
                workers[worker].running -= 1;
                workers[worker].steps += 1;
                router.end(ticket, Outcome::Served, now_s);
            }
            Event::Report { worker } => {
                report(&mut router, &mut workers[worker], (worker, way), now_s);
                if left > 0 {
                    clock.add(now_s + REPORT_S, Event::Report { worker });
                }
            }
        }
    }
    (workers, seen)
}

/// The worker has the request; its prompt is read after those before it.
fn give(
    workers: &mut [Worker],
    clock: &mut Clock,
    seen: &mut Outcomes,
    (pages, tokens): (&[u64], u32),
    (choice, now_s, turn): (Choice, f64, u64),
) {
    let place = usize::from(choice.ticket.seat.0);
    let worker = &mut workers[place];
    let found = worker.read(pages, turn);
    seen.prompt_pages += pages.len();
    seen.found_pages += found;
    let left = u64::from(tokens) - found as u64 * u64::from(PAGE_TOKENS);
    worker.busy_until_s = worker.busy_until_s.max(now_s) + left as f64 / PROMPT_TOKENS_PER_S;
    worker.requests += 1;
    worker.waiting += 1;
    worker.waiting_tokens += left;
    let first_s = worker.busy_until_s;
    seen.wait_s.push(first_s - now_s);
    clock.add(first_s, Event::FirstToken { worker: place, tokens: left });
    clock.add(first_s + OUTPUT_S, Event::End { worker: place, ticket: choice.ticket });
}

fn report(router: &mut Router, worker: &mut Worker, (place, way): (usize, Way), now_s: f64) {
    let seat = SeatId(place as u16);
    let load = SeatLoad {
        running_requests: worker.running,
        waiting_requests: worker.waiting,
        waiting_prompt_tokens: worker.waiting_tokens,
        steps: worker.steps,
        prompt_tokens_per_s: PROMPT_TOKENS_PER_S,
        ..SeatLoad::default()
    };
    router.report(seat, load, now_s);
    let (added, removed) = (std::mem::take(&mut worker.added), std::mem::take(&mut worker.removed));
    if way == Way::Told {
        let news = CacheNews { added: &added, removed: &removed, ..CacheNews::default() };
        router.cache_news(seat, &news);
    }
}

/// The same run again and again: whatever else this machine does, it does not do it to the same
/// choice each time, so the quickest of the runs is what the choice takes.
fn measured(num_workers: usize, way: Way, num_requests: u64) -> serde_json::Value {
    let (workers, mut seen) = simulate(num_workers, way, num_requests);
    for _ in 1..RUNS {
        let (_, again) = simulate(num_workers, way, num_requests);
        for (best, other) in seen.choice_us.iter_mut().zip(again.choice_us) {
            *best = best.min(other);
        }
    }
    row(num_workers, way, &workers, seen)
}

fn row(num_workers: usize, way: Way, workers: &[Worker], mut seen: Outcomes) -> serde_json::Value {
    let mut requests: Vec<f64> = workers.iter().map(|worker| f64::from(worker.requests)).collect();
    let mean = requests.iter().sum::<f64>() / requests.len() as f64;
    let most = quantile(&mut requests, 1.0);
    let name = WAYS.iter().find(|(known, _)| *known == way).map_or("", |(_, name)| name);
    let round = |value: f64, digits: i32| {
        let scale = 10_f64.powi(digits);
        (value * scale).round() / scale
    };
    serde_json::json!({
        "workers": num_workers,
        "way": name,
        "requests": seen.wait_s.len(),
        "mean_prompt_pages": round(seen.prompt_pages as f64 / seen.wait_s.len() as f64, 1),
        "hit_rate": round(seen.found_pages as f64 / seen.prompt_pages as f64, 3),
        "busiest_over_mean": round(most / mean, 2),
        "p05_over_mean": round(quantile(&mut requests, 0.05) / mean, 2),
        "p95_over_mean": round(quantile(&mut requests, 0.95) / mean, 2),
        "wait_mean_ms": round(seen.wait_s.iter().sum::<f64>() / seen.wait_s.len() as f64 * 1e3, 1),
        "wait_p99_ms": round(quantile(&mut seen.wait_s, 0.99) * 1e3, 1),
        "choice_p50_us": round(quantile(&mut seen.choice_us, 0.5), 1),
        "choice_p99_us": round(quantile(&mut seen.choice_us, 0.99), 1),
    })
}

fn main() {
    let asked = std::env::args().nth(1).and_then(|text| text.parse().ok());
    for num_workers in [8, 100, 1000] {
        for (way, _) in WAYS {
            let num_requests = asked.unwrap_or(num_workers as u64 * 150);
            println!("{}", measured(num_workers, way, num_requests));
        }
    }
}
