//! Integer weights of the bicubic antialias filter along one axis.

use std::ops::Range;

/// The filter's sharpness; Keys' cubic with a = -1/2.
const CUBIC_A: f64 = -0.5;
/// Half the width of the unscaled filter, in source pixels.
const CUBIC_RADIUS: f64 = 2.0;
/// Fractional bits never exceed this.
const MAX_PRECISION_BITS: u32 = 22;

/// Which source pixels make each target pixel of one axis, and in what parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AxisWeights {
    /// First source pixel of each target pixel; neither these nor the ends ever decrease.
    pub(super) starts: Vec<u32>,
    /// Source pixels that each target pixel reads; 1 at least.
    pub(super) counts: Vec<u32>,
    /// `longest` weights for each target pixel in units of `2^-precision`, zero past its count.
    weights: Vec<i16>,
    /// Most source pixels that one target pixel reads.
    pub(super) longest: usize,
    /// Fractional bits of the weights; 1 at least.
    pub(super) precision: u32,
}

impl AxisWeights {
    /// Weights for an axis of `source` pixels made into `target`; both at least 1.
    ///
    /// Source: the uint8 path of torch's `_upsample_bicubic2d_aa` (2.11): windows and weights in
    /// double precision, normalised to 1, then rounded half away from zero to 16 bits with the most
    /// fractional bits that keep the largest weight below 2^15.
    pub(super) fn new(source: u32, target: u32) -> Self {
        let exact: Vec<(u32, Vec<f64>)> =
            (0..target).map(|index| exact_weights(source, target, index)).collect();
        let largest = exact.iter().flat_map(|(_, row)| row).fold(0.0_f64, |a, &b| a.max(b));
        let precision = precision_for(largest);
        let longest = exact.iter().map(|(_, row)| row.len()).max().unwrap_or(1);
        let scale = f64::from(1_u32 << precision);
        let mut weights = Vec::with_capacity(exact.len() * longest);
        for (_, row) in &exact {
            // `round` takes halves away from zero
            weights.extend(row.iter().map(|&weight| (weight * scale).round() as i16));
            weights.extend(std::iter::repeat_n(0, longest - row.len()));
        }
        Self {
            starts: exact.iter().map(|(start, _)| *start).collect(),
            counts: exact.iter().map(|(_, row)| row.len() as u32).collect(),
            weights,
            longest,
            precision,
        }
    }

    /// Bytes of the tables.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.starts[..])
            + size_of_val(&self.counts[..])
            + size_of_val(&self.weights[..])
    }

    /// The target pixels of `range`, which is not empty.
    pub(super) fn part(&self, range: Range<usize>) -> AxisPart<'_> {
        AxisPart { axis: self, first: range.start, len: range.len() }
    }

    /// Weights of one target pixel, its padding left out.
    pub(super) fn row(&self, index: usize) -> &[i16] {
        &self.weights[index * self.longest..][..self.counts[index] as usize]
    }
}

/// Neighbouring target pixels of an axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisPart<'a> {
    axis: &'a AxisWeights,
    first: usize,
    len: usize,
}

impl<'a> AxisPart<'a> {
    /// Target pixels in it.
    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Source pixels that they are made of.
    pub(super) fn source(self) -> Range<usize> {
        let last = self.first + self.len - 1;
        let end = self.axis.starts[last] + self.axis.counts[last];
        self.axis.starts[self.first] as usize..end as usize
    }

    /// Of each target pixel: its first source pixel, counted from that of the part, and weights.
    pub(super) fn windows(self) -> impl Iterator<Item = (usize, &'a [i16])> {
        let origin = self.axis.starts[self.first];
        (self.first..self.first + self.len)
            .map(move |index| ((self.axis.starts[index] - origin) as usize, self.axis.row(index)))
    }

    /// As [`AxisWeights::precision`].
    pub(super) fn precision(self) -> u32 {
        self.axis.precision
    }
}

/// First source pixel and normalised weights of one target pixel.
fn exact_weights(source: u32, target: u32, index: u32) -> (u32, Vec<f64>) {
    let scale = f64::from(source) / f64::from(target);
    let (support, inverse) =
        if scale >= 1.0 { (CUBIC_RADIUS * scale, 1.0 / scale) } else { (CUBIC_RADIUS, 1.0) };
    let center = scale * (f64::from(index) + 0.5);
    // casts truncate, as the reference's do; a negative start saturates to 0
    let start = (center - support + 0.5) as u32;
    let end = ((center + support + 0.5) as u32).min(source);
    let longest = support.ceil() as u32 * 2 + 1;
    let count = end.saturating_sub(start).min(longest);
    let mut weights: Vec<f64> = (0..count)
        .map(|tap| cubic((f64::from(tap) + f64::from(start) - center + 0.5) * inverse))
        .collect();
    let total: f64 = weights.iter().sum();
    if total != 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
    (start, weights)
}

/// Keys' cubic convolution kernel at distance `x`.
fn cubic(x: f64) -> f64 {
    let a = CUBIC_A;
    let x = x.abs();
    if x < 1.0 {
        ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
    } else {
        0.0
    }
}

/// The most fractional bits with which `largest` still fits 16 signed bits.
fn precision_for(largest: f64) -> u32 {
    (0..MAX_PRECISION_BITS)
        .find(|bits| (0.5 + largest * f64::from(1_u32 << (bits + 1))) as i64 >= 1 << 15)
        .unwrap_or(MAX_PRECISION_BITS)
}

#[cfg(test)]
mod tests {
    use super::AxisWeights;

    #[test]
    fn an_unchanged_axis_copies_each_pixel() {
        let axis = AxisWeights::new(7, 7);
        for index in 0..7 {
            let weight_of_self = index - axis.starts[index] as usize;
            for (tap, &weight) in axis.row(index).iter().enumerate() {
                let expected = if tap == weight_of_self { 1 << axis.precision } else { 0 };
                assert_eq!(weight, expected, "pixel {index}, tap {tap}");
            }
        }
    }

    #[test]
    fn windows_stay_inside_the_source_and_never_step_back() {
        for (source, target) in [(1, 28), (3, 1000), (1000, 3), (1920, 896), (7, 6), (65535, 28)] {
            let axis = AxisWeights::new(source, target);
            let ends: Vec<u32> = axis.starts.iter().zip(&axis.counts).map(|(a, b)| a + b).collect();
            assert!(axis.starts.is_sorted() && ends.is_sorted(), "{source} to {target}");
            for (start, count) in axis.starts.iter().zip(&axis.counts) {
                assert!(*count >= 1 && start + count <= source, "{source} to {target}");
            }
            assert!(axis.precision >= 1);
        }
    }

    #[test]
    fn weights_of_a_pixel_add_up_to_one_but_for_rounding() {
        for (source, target) in [(5, 13), (640, 84), (28, 28), (4001, 1876)] {
            let axis = AxisWeights::new(source, target);
            for index in 0..target as usize {
                let sum: i64 = axis.row(index).iter().map(|&weight| i64::from(weight)).sum();
                let error = (sum - (1 << axis.precision)).unsigned_abs();
                assert!(error <= axis.longest as u64, "{source} to {target}: off by {error}");
            }
        }
    }
}
