//! The Prometheus text format: counters, gauges and histograms as lines.

use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub(super) struct Gauge(AtomicI64);

impl Gauge {
    pub(super) fn add(&self, amount: i64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn value(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Observations counted by upper bounds.
#[derive(Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    /// One more than `bounds`: the last counts what lies above all of them.
    counts: Box<[AtomicU64]>,
    /// The bits of an `f64`: a count of small units would cut what a choice of microseconds takes.
    sum_bits: AtomicU64,
}

impl Histogram {
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum_bits: AtomicU64::new(0) }
    }

    pub(super) fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value.max(0.0)).to_bits());
        // never refuses: it is tried again until nobody came between
        let _ = self.sum_bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

/// A growing answer to a scrape.
pub(super) struct Page {
    text: String,
}

impl Page {
    pub(super) fn new() -> Self {
        Self { text: String::with_capacity(16 * 1024) }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// Starts a metric: its help and type.
    pub(super) fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// One sample; `labels` is either empty or `name="value",…` with values of closed sets.
    pub(super) fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        if labels.is_empty() {
            self.push(format_args!("{name} {value}\n"));
        } else {
            self.push(format_args!("{name}{{{labels}}} {value}\n"));
        }
    }

    /// All samples of a histogram.
    pub(super) fn histogram(&mut self, name: &str, labels: &str, histogram: &Histogram) {
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (place, count) in histogram.counts.iter().enumerate() {
            total += count.load(Ordering::Relaxed);
            match histogram.bounds.get(place) {
                Some(bound) => self
                    .push(format_args!("{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {total}\n")),
                None => {
                    self.push(format_args!("{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {total}\n"))
                }
            }
        }
        let sum = f64::from_bits(histogram.sum_bits.load(Ordering::Relaxed));
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, total);
    }

    fn push(&mut self, line: std::fmt::Arguments<'_>) {
        self.text.write_fmt(line).expect("invariant: writing to a String cannot fail");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_up_to_and_including_its_bounds() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        for value in [0.05, 0.1, 0.5, 5.0] {
            histogram.observe(value);
        }

        let mut page = Page::new();
        page.histogram("x", "a=\"b\"", &histogram);

        assert_eq!(
            page.into_text(),
            "x_bucket{a=\"b\",le=\"0.1\"} 2\nx_bucket{a=\"b\",le=\"1\"} 3\n\
             x_bucket{a=\"b\",le=\"+Inf\"} 4\nx_sum{a=\"b\"} 5.65\nx_count{a=\"b\"} 4\n"
        );
    }

    #[test]
    fn what_takes_less_than_a_microsecond_is_in_the_sum() {
        let histogram = Histogram::new(&[0.1]);
        for _ in 0..1024 {
            histogram.observe(0.000_000_5);
        }

        let mut page = Page::new();
        page.histogram("x", "", &histogram);

        let text = page.into_text();
        let sum: f64 = text
            .lines()
            .find_map(|line| line.strip_prefix("x_sum "))
            .and_then(|sum| sum.parse().ok())
            .unwrap_or(0.0);
        assert!((sum - 0.000_512).abs() < 1e-9, "{text}");
    }
}
