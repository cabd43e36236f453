//! What routing reports: choices and their reasons, workers by state, pages known of them.

use std::time::Duration;

use gateway_core::routing::{Reason, SeatLoad, Stage};

use super::exposition::{Counter, Histogram, Page};

/// Bounds in seconds of one choice.
const CHOICE: &[f64] = &[0.000_005, 0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.001, 0.01];
const REASONS: [(Reason, &str); 4] = [
    (Reason::LeastWait, "least_wait"),
    (Reason::Cache, "cache"),
    (Reason::Affinity, "affinity"),
    (Reason::Spill, "spill"),
];

/// Stages that are asked of a worker for another one's sake.
const STAGES: [(Stage, &str); 2] = [(Stage::Prefill, "prefill"), (Stage::Encode, "encode")];

/// How many workers are in which state, at the time of a scrape.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerCount {
    /// Taking requests.
    pub ready: usize,
    /// Reading weights.
    pub loading: usize,
    /// Finishing what they have.
    pub draining: usize,
    /// Having requests and making no step.
    pub stalled: usize,
    /// Left alone after failing.
    pub broken: usize,
    /// Serving another model.
    pub refused: usize,
    /// Not answering.
    pub unreachable: usize,
}

/// The workers at the time of a scrape.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    /// By state.
    pub count: WorkerCount,
    /// Added up over those that answer.
    pub load: SeatLoad,
    /// Cache pages known of all workers: as told, and as expected of what was sent.
    pub known_pages: (usize, usize),
}

impl Fleet {
    pub(super) fn write(&self, page: &mut Page) {
        let name = "m3stack_gateway_workers";
        page.head(name, "gauge", "Known workers by state.");
        for (label, count) in [
            ("ready", self.count.ready),
            ("loading", self.count.loading),
            ("draining", self.count.draining),
            ("stalled", self.count.stalled),
            ("broken", self.count.broken),
            ("refused", self.count.refused),
            ("unreachable", self.count.unreachable),
        ] {
            page.sample(name, &format!("state=\"{label}\""), count);
        }
        let name = "m3stack_gateway_worker_requests";
        page.head(name, "gauge", "Requests of all workers, by their own word.");
        page.sample(name, "state=\"running\"", self.load.running_requests);
        page.sample(name, "state=\"waiting\"", self.load.waiting_requests);
        let name = "m3stack_gateway_worker_waiting_prompt_tokens";
        page.head(name, "gauge", "Prompt tokens accepted by workers and not yet computed.");
        page.sample(name, "", self.load.waiting_prompt_tokens);
        let name = "m3stack_gateway_worker_cache_pages";
        page.head(name, "gauge", "Cache pages of all workers.");
        page.sample(name, "state=\"used\"", self.load.used_pages);
        page.sample(name, "state=\"total\"", self.load.total_pages);
        let name = "m3stack_gateway_known_pages";
        page.head(name, "gauge", "Cache pages known of workers, one a page and worker.");
        page.sample(name, "source=\"told\"", self.known_pages.0);
        page.sample(name, "source=\"sent\"", self.known_pages.1);
    }

    pub(super) fn write_vllm(&self, page: &mut Page, labels: &str) {
        let usage = match self.load.total_pages {
            0 => 0.0,
            total => f64::from(self.load.used_pages) / f64::from(total),
        };
        for (name, value) in [
            ("vllm:num_requests_running", f64::from(self.load.running_requests)),
            ("vllm:num_requests_waiting", f64::from(self.load.waiting_requests)),
            ("vllm:kv_cache_usage_perc", usage),
        ] {
            page.head(name, "gauge", "As in vLLM, over all workers.");
            page.sample(name, labels, value);
        }
    }
}

/// Counts of choices.
#[derive(Debug)]
pub(super) struct RoutingCounts {
    chosen: [Counter; REASONS.len()],
    seconds: Histogram,
    matched_tokens: Counter,
    retries: Counter,
    shed: Counter,
    /// By stage: done, and left to the worker that answers.
    stages: [[Counter; 2]; STAGES.len()],
}

impl Default for RoutingCounts {
    fn default() -> Self {
        Self {
            chosen: Default::default(),
            seconds: Histogram::new(CHOICE),
            matched_tokens: Counter::default(),
            retries: Counter::default(),
            shed: Counter::default(),
            stages: Default::default(),
        }
    }
}

impl RoutingCounts {
    pub(super) fn chosen(&self, reason: Reason, matched_tokens: u32, taken: Duration) {
        for ((known, _), count) in REASONS.iter().zip(&self.chosen) {
            count.add(u64::from(*known == reason));
        }
        self.matched_tokens.add(u64::from(matched_tokens));
        self.seconds.observe(taken.as_secs_f64());
    }

    pub(super) fn retried(&self) {
        self.retries.add(1);
    }

    pub(super) fn shed(&self) {
        self.shed.add(1);
    }

    pub(super) fn stage_ended(&self, stage: Stage, is_done: bool) {
        for ((known, _), counts) in STAGES.iter().zip(&self.stages) {
            counts[usize::from(!is_done)].add(u64::from(*known == stage));
        }
    }

    pub(super) fn write(&self, page: &mut Page) {
        let name = "m3stack_gateway_stages_total";
        let help = "Parts of requests that other workers were to compute for the one that answers, \
                    by outcome; what is skipped it computes itself.";
        page.head(name, "counter", help);
        for ((_, stage), counts) in STAGES.iter().zip(&self.stages) {
            for (outcome, count) in ["done", "skipped"].iter().zip(counts) {
                let labels = format!("stage=\"{stage}\",outcome=\"{outcome}\"");
                page.sample(name, &labels, count.value());
            }
        }
        let name = "m3stack_gateway_routing_choices_total";
        page.head(name, "counter", "Workers chosen, by reason.");
        for ((_, label), count) in REASONS.iter().zip(&self.chosen) {
            page.sample(name, &format!("reason=\"{label}\""), count.value());
        }
        let name = "m3stack_gateway_routing_seconds";
        page.head(name, "histogram", "One choice of a worker.");
        page.histogram(name, "", &self.seconds);
        for (name, help, count) in [
            (
                "m3stack_gateway_routing_matched_tokens_total",
                "Prompt tokens thought to be in the cache of the worker chosen.",
                &self.matched_tokens,
            ),
            ("m3stack_gateway_worker_retries_total", "Requests tried elsewhere.", &self.retries),
            (
                "m3stack_gateway_shed_requests_total",
                "Requests sent away because every worker had too much to do.",
                &self.shed,
            ),
        ] {
            page.head(name, "counter", help);
            page.sample(name, "", count.value());
        }
    }
}
