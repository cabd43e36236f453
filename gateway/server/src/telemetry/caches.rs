//! What the media caches report: hits, misses and bytes held, by cache.

use std::sync::atomic::{AtomicU64, Ordering};

use super::exposition::Page;

/// The media caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheClass {
    /// Bodies fetched from origins.
    Fetched,
    /// Sizes, frame tables and rates by content.
    Facts,
    /// Patch rows by content and parameters.
    Patches,
}

const LABELS: [&str; 3] = ["fetched", "facts", "patches"];

/// Counts of all caches.
#[derive(Debug, Default)]
pub(super) struct CacheCounts {
    hits: [AtomicU64; 3],
    misses: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
}

impl CacheCounts {
    pub(super) fn lookup(&self, class: CacheClass, is_hit: bool) {
        let group = if is_hit { &self.hits } else { &self.misses };
        group[class as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_bytes(&self, class: CacheClass, bytes: u64) {
        self.bytes[class as usize].store(bytes, Ordering::Relaxed);
    }

    pub(super) fn write(&self, page: &mut Page) {
        let name = "m3stack_gateway_media_cache_lookups_total";
        page.head(name, "counter", "Looks into a media cache.");
        for (outcome, group) in [("hit", &self.hits), ("miss", &self.misses)] {
            for (label, count) in LABELS.iter().zip(group) {
                let labels = format!("cache=\"{label}\",outcome=\"{outcome}\"");
                page.sample(name, &labels, count.load(Ordering::Relaxed));
            }
        }
        let name = "m3stack_gateway_media_cache_bytes";
        page.head(name, "gauge", "Bytes a media cache holds.");
        for (label, bytes) in LABELS.iter().zip(&self.bytes) {
            page.sample(name, &format!("cache=\"{label}\""), bytes.load(Ordering::Relaxed));
        }
    }
}
