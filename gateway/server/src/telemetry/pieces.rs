//! By which way patches go to workers, counted.

use super::exposition::{Counter, Page};
use super::metrics::Metrics;

/// Pieces of patches.
#[derive(Debug, Default)]
pub(super) struct PieceCounts {
    shared: Counter,
    sent: Counter,
}

impl PieceCounts {
    pub(super) fn write(&self, page: &mut Page) {
        let name = "m3stack_gateway_media_pieces_total";
        let help = "Pieces of patches from 64 KiB on, left in memory of one host or sent.";
        page.head(name, "counter", help);
        page.sample(name, "way=\"shared\"", self.shared.value());
        page.sample(name, "way=\"sent\"", self.sent.value());
    }
}

impl Metrics {
    /// A piece was given to a worker.
    pub fn piece_given(&self, is_shared: bool) {
        let counter = if is_shared { &self.pieces.shared } else { &self.pieces.sent };
        counter.add(1);
    }
}
