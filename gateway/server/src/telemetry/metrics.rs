//! Every metric of the gateway, by name, with its closed set of labels.

#[cfg(test)]
mod tests;
mod vllm;

use std::time::Duration;

use super::caches::{CacheClass, CacheCounts};
use super::clips::ClipCounts;
use super::exposition::{Counter, Gauge, Histogram, Page};
use super::pieces::PieceCounts;
use super::process;
use super::routing::{Fleet, RoutingCounts};
use crate::error::ErrorKind;
use gateway_core::routing::{Reason, Stage};

/// Bounds in seconds for work inside the gateway.
const SHORT: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    10.0,
];
/// Bounds in seconds for waiting on a model.
const LONG: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

macro_rules! closed_set {
    ($(#[$doc:meta])* $name:ident { $($(#[$item_doc:meta])* $item:ident = $label:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$item_doc])* $item),+ }

        impl $name {
            const LABELS: &[&str] = &[$($label),+];

            /// As metrics and traces show it.
            pub fn label(self) -> &'static str {
                Self::LABELS[self as usize]
            }
        }
    };
}

closed_set! {
    /// The routes that are counted.
    RouteLabel {
        /// `/v1/chat/completions`
        Chat = "/v1/chat/completions",
        /// `/v1/completions`
        Completions = "/v1/completions",
        /// `/v1/messages`
        Messages = "/v1/messages",
        /// `/v1/messages/count_tokens`
        CountTokens = "/v1/messages/count_tokens",
        /// `/v1/responses`
        Responses = "/v1/responses",
        /// `/v1/models`, `/v1/models/{id}`
        Models = "/v1/models",
        /// `/tokenize`
        Tokenize = "/tokenize",
        /// `/detokenize`
        Detokenize = "/detokenize",
        /// `/health`, `/ready`, `/metrics`, `/version`
        Operations = "operations",
        /// Anything else.
        Other = "other",
    }
}

closed_set! {
    /// The sorts of tokens that are counted.
    TokenClass {
        /// All of the prompt.
        Prompt = "prompt",
        /// Prompt tokens whose cache was ready.
        Cached = "cached",
        /// Output, thinking included.
        Completion = "completion",
        /// Output that was thinking.
        Reasoning = "reasoning",
    }
}

closed_set! {
    /// The sorts of media.
    MediaClass {
        /// A still.
        Image = "image",
        /// A clip.
        Video = "video",
    }
}

/// Every status that a reply has, in any protocol. Another would count as the next below it.
const STATUSES: &[u16] =
    &[200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 499, 500, 502, 503, 504, 529];
/// What can become of a media item that a worker was offered.
const SHIPMENTS: &[&str] = &["sent", "held"];

/// The gateway's numbers; one instance an `App`, so that two in a process do not mix.
#[derive(Debug)]
pub struct Metrics {
    http_requests: Box<[Counter]>,
    http_seconds: Box<[Histogram]>,
    errors: Box<[Counter]>,
    running: Gauge,
    first_token_seconds: Histogram,
    token_gap_seconds: Histogram,
    reply_seconds: Histogram,
    prompt_seconds: Histogram,
    tokens: Box<[Counter]>,
    media_fetch_seconds: Box<[Histogram]>,
    media_pixels_seconds: Box<[Histogram]>,
    media_source_bytes: Box<[Counter]>,
    media_patch_bytes: Box<[Counter]>,
    media_items: Box<[Counter]>,
    pub(super) clips: ClipCounts,
    pub(super) pieces: PieceCounts,
    media_caches: CacheCounts,
    routing: RoutingCounts,
}

fn counters(count: usize) -> Box<[Counter]> {
    (0..count).map(|_| Counter::default()).collect()
}

fn histograms(count: usize, bounds: &'static [f64]) -> Box<[Histogram]> {
    (0..count).map(|_| Histogram::new(bounds)).collect()
}

impl Default for Metrics {
    fn default() -> Self {
        let media = MediaClass::LABELS.len();
        Self {
            http_requests: counters(RouteLabel::LABELS.len() * STATUSES.len()),
            http_seconds: histograms(RouteLabel::LABELS.len(), LONG),
            errors: counters(ErrorKind::ALL.len()),
            running: Gauge::default(),
            first_token_seconds: Histogram::new(LONG),
            token_gap_seconds: Histogram::new(LONG),
            reply_seconds: Histogram::new(LONG),
            prompt_seconds: Histogram::new(SHORT),
            tokens: counters(TokenClass::LABELS.len()),
            media_fetch_seconds: histograms(media, LONG),
            media_pixels_seconds: histograms(media, LONG),
            media_source_bytes: counters(media),
            media_patch_bytes: counters(media),
            media_items: counters(media * SHIPMENTS.len()),
            clips: ClipCounts::default(),
            pieces: PieceCounts::default(),
            media_caches: CacheCounts::default(),
            routing: RoutingCounts::default(),
        }
    }
}

impl Metrics {
    /// A reply has been sent to its end, or its client has left (499).
    pub fn http_request(&self, route: RouteLabel, status: u16, taken: Duration) {
        let place = STATUSES.iter().rposition(|known| *known <= status).unwrap_or(0);
        self.http_requests[route as usize * STATUSES.len() + place].add(1);
        self.http_seconds[route as usize].observe(taken.as_secs_f64());
    }

    /// A request has failed, before or after its first byte.
    pub fn error(&self, kind: ErrorKind) {
        self.errors[kind as usize].add(1);
    }

    /// A request has been admitted (+1) or has left (-1).
    pub fn running(&self, change: i64) {
        self.running.add(change);
    }

    /// Requests admitted and not yet gone.
    pub fn running_now(&self) -> i64 {
        self.running.value()
    }

    /// From the arrival of a request to its first token.
    pub fn first_token(&self, waited: Duration) {
        self.first_token_seconds.observe(waited.as_secs_f64());
    }

    /// Average time a token after the first, of one finished reply.
    pub fn token_gap(&self, mean: Duration) {
        self.token_gap_seconds.observe(mean.as_secs_f64());
    }

    /// From the arrival of a request to its last token.
    pub fn reply(&self, taken: Duration) {
        self.reply_seconds.observe(taken.as_secs_f64());
    }

    /// Template and tokenizer for one prompt.
    pub fn prompt_built(&self, taken: Duration) {
        self.prompt_seconds.observe(taken.as_secs_f64());
    }

    /// Tokens read or written.
    pub fn tokens(&self, class: TokenClass, count: u64) {
        self.tokens[class as usize].add(count);
    }

    /// One item's source bytes have arrived.
    pub fn media_fetched(&self, class: MediaClass, bytes: u64, taken: Duration) {
        self.media_source_bytes[class as usize].add(bytes);
        self.media_fetch_seconds[class as usize].observe(taken.as_secs_f64());
    }

    /// One item's patches have been made and sent.
    pub fn media_sent(&self, class: MediaClass, patch_bytes: u64, taken: Duration) {
        self.media_items[class as usize * SHIPMENTS.len()].add(1);
        self.media_patch_bytes[class as usize].add(patch_bytes);
        self.media_pixels_seconds[class as usize].observe(taken.as_secs_f64());
    }

    /// One item was not sent because the worker still held it.
    pub fn media_held(&self, class: MediaClass) {
        self.media_items[class as usize * SHIPMENTS.len() + 1].add(1);
    }

    /// A look into a media cache.
    pub fn cache_lookup(&self, class: CacheClass, is_hit: bool) {
        self.media_caches.lookup(class, is_hit);
    }

    /// What a media cache holds now.
    pub fn cache_bytes(&self, class: CacheClass, bytes: u64) {
        self.media_caches.set_bytes(class, bytes);
    }

    /// A request was given to a second worker.
    pub fn retried(&self) {
        self.routing.retried();
    }

    /// A worker was chosen, with that many prompt tokens thought to be in its cache.
    pub fn routed(&self, reason: Reason, matched_tokens: u32, taken: Duration) {
        self.routing.chosen(reason, matched_tokens, taken);
    }

    /// Another worker has computed its part of a request, or could not.
    pub fn stage_ended(&self, stage: Stage, is_done: bool) {
        self.routing.stage_ended(stage, is_done);
    }

    /// A request was sent away because every worker has too much to do.
    pub fn shed(&self) {
        self.routing.shed();
    }

    /// The whole page in Prometheus text format; `held_bytes` are those of bodies and media.
    pub fn page(&self, fleet: &Fleet, held_bytes: u64) -> String {
        let mut page = Page::new();
        self.write_http(&mut page);
        let name = "m3stack_gateway_held_bytes";
        page.head(name, "gauge", "Bytes of bodies and media held for requests.");
        page.sample(name, "", held_bytes);
        self.write_replies(&mut page);
        self.write_media(&mut page);
        self.routing.write(&mut page);
        fleet.write(&mut page);
        process::write(&mut page);
        page.into_text()
    }

    fn write_http(&self, page: &mut Page) {
        let name = "m3stack_gateway_http_requests_total";
        page.head(name, "counter", "Replies by route and status; 499 is a client that left.");
        for (route, route_label) in RouteLabel::LABELS.iter().enumerate() {
            for (place, status) in STATUSES.iter().enumerate() {
                let count = self.http_requests[route * STATUSES.len() + place].value();
                if count > 0 {
                    let labels = format!("route=\"{route_label}\",code=\"{status}\"");
                    page.sample(name, &labels, count);
                }
            }
        }
        let name = "m3stack_gateway_http_request_duration_seconds";
        page.head(name, "histogram", "From head of request to end of reply.");
        for (label, histogram) in RouteLabel::LABELS.iter().zip(&self.http_seconds) {
            page.histogram(name, &format!("route=\"{label}\""), histogram);
        }
        let name = "m3stack_gateway_errors_total";
        page.head(name, "counter", "Failed requests by kind.");
        for (kind, count) in ErrorKind::ALL.iter().zip(&self.errors) {
            page.sample(name, &format!("kind=\"{}\"", kind.row().label), count.value());
        }
        let name = "m3stack_gateway_running_requests";
        page.head(name, "gauge", "Requests admitted and not yet gone.");
        page.sample(name, "", self.running.value());
    }

    fn write_replies(&self, page: &mut Page) {
        for (name, help, histogram) in [
            (
                "m3stack_gateway_time_to_first_token_seconds",
                "From arrival to the first token.",
                &self.first_token_seconds,
            ),
            (
                "m3stack_gateway_time_per_output_token_seconds",
                "Mean gap between tokens of one reply.",
                &self.token_gap_seconds,
            ),
            (
                "m3stack_gateway_reply_seconds",
                "From arrival to the last token.",
                &self.reply_seconds,
            ),
            (
                "m3stack_gateway_prompt_seconds",
                "Template and tokenizer for one prompt.",
                &self.prompt_seconds,
            ),
        ] {
            page.head(name, "histogram", help);
            page.histogram(name, "", histogram);
        }
        let name = "m3stack_gateway_tokens_total";
        page.head(name, "counter", "Tokens read and written.");
        for (label, count) in TokenClass::LABELS.iter().zip(&self.tokens) {
            page.sample(name, &format!("kind=\"{label}\""), count.value());
        }
    }

    fn write_media(&self, page: &mut Page) {
        for (name, help, group) in [
            (
                "m3stack_gateway_media_fetch_seconds",
                "Getting the source bytes of one item.",
                &self.media_fetch_seconds,
            ),
            (
                "m3stack_gateway_media_pixels_seconds",
                "Decoding, resizing and sending one item.",
                &self.media_pixels_seconds,
            ),
        ] {
            page.head(name, "histogram", help);
            for (label, histogram) in MediaClass::LABELS.iter().zip(group) {
                page.histogram(name, &format!("kind=\"{label}\""), histogram);
            }
        }
        for (name, help, group) in [
            (
                "m3stack_gateway_media_source_bytes_total",
                "Bytes of media as sent or fetched.",
                &self.media_source_bytes,
            ),
            (
                "m3stack_gateway_media_patch_bytes_total",
                "Bytes of patches sent to workers.",
                &self.media_patch_bytes,
            ),
        ] {
            page.head(name, "counter", help);
            for (label, count) in MediaClass::LABELS.iter().zip(group) {
                page.sample(name, &format!("kind=\"{label}\""), count.value());
            }
        }
        let name = "m3stack_gateway_media_items_total";
        page.head(name, "counter", "Items sent to a worker, or still held by it.");
        for (media, media_label) in MediaClass::LABELS.iter().enumerate() {
            for (place, outcome) in SHIPMENTS.iter().enumerate() {
                let count = self.media_items[media * SHIPMENTS.len() + place].value();
                page.sample(name, &format!("kind=\"{media_label}\",outcome=\"{outcome}\""), count);
            }
        }
        self.clips.write(page);
        self.pieces.write(page);
        self.media_caches.write(page);
    }
}
