//! What FFmpeg does for clips, counted.

use super::exposition::{Counter, Gauge, Page};
use super::metrics::Metrics;

/// Numbers about clips.
#[derive(Debug, Default)]
pub(super) struct ClipCounts {
    processes: Gauge,
    decoded_again: Counter,
}

impl ClipCounts {
    pub(super) fn write(&self, page: &mut Page) {
        let name = "m3stack_gateway_video_processes";
        page.head(name, "gauge", "FFmpeg processes alive.");
        page.sample(name, "", self.processes.value());
        let name = "m3stack_gateway_clips_decoded_again_total";
        let help = "Clips whose index led astray, decoded again from their beginning.";
        page.head(name, "counter", help);
        page.sample(name, "", self.decoded_again.value());
    }
}

impl Metrics {
    /// An FFmpeg process has started (+1) or ended (-1).
    pub fn video_processes(&self, change: i64) {
        self.clips.processes.add(change);
    }

    /// FFmpeg processes alive now.
    pub fn video_processes_now(&self) -> i64 {
        self.clips.processes.value()
    }

    /// Clips of which the rest was decoded from the beginning after all.
    pub fn clips_decoded_again(&self) -> u64 {
        self.clips.decoded_again.value()
    }

    /// The rest of a clip is decoded from its beginning after all.
    pub fn clip_decoded_again(&self) {
        self.clips.decoded_again.add(1);
    }
}
