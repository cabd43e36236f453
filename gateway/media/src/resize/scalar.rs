//! The resampling kernels in plain Rust: the meaning that the faster ones must equal in every byte.

use super::weights::AxisPart;
use super::{BAND, CHANNELS, Place};

/// Bytes handled together, so that the compiler can use vector registers.
const LANES: usize = 16;

/// Rows of bytes added up by `weights`: `source` holds them `stride` bytes apart, the first at its
/// beginning, and each is as long as `target`.
pub(super) fn weighted_rows(
    source: &[u8],
    stride: usize,
    weights: &[i16],
    precision: u32,
    target: &mut [u8],
) {
    for (block, out) in target.chunks_mut(LANES).enumerate() {
        let mut sums = [rounding(precision); LANES];
        for (tap, &weight) in weights.iter().enumerate() {
            let bytes = &source[tap * stride + block * LANES..][..out.len()];
            for (sum, &value) in sums.iter_mut().zip(bytes) {
                *sum += i32::from(value) * i32::from(weight);
            }
        }
        for (byte, sum) in out.iter_mut().zip(sums) {
            *byte = (sum >> precision).clamp(0, 255) as u8;
        }
    }
}

/// The horizontal pass over rows that lie in columns, `BAND` bytes a column: a part of an axis.
pub(super) fn narrow(columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
    let pixel = CHANNELS * BAND;
    for ((start, weights), out) in axis.windows().zip(target.chunks_exact_mut(pixel)) {
        weighted_rows(&columns[start * pixel..], pixel, weights, axis.precision(), out);
    }
}

/// Lays `rows` out in columns of `BAND` bytes; where there are fewer rows, the last one stands for
/// the missing ones.
pub(super) fn to_columns(rows: &[&[u8]], columns: &mut [u8]) {
    for lane in 0..BAND {
        let row = rows[lane.min(rows.len() - 1)];
        for (column, &byte) in columns.chunks_exact_mut(BAND).zip(row) {
            column[lane] = byte;
        }
    }
}

/// The way back: as many of the band's rows as `target` has, into their place there.
pub(super) fn to_rows(columns: &[u8], place: Place, target: &mut [u8]) {
    for (lane, row) in target.chunks_exact_mut(place.row_bytes).enumerate() {
        for (byte, column) in row[place.offset..].iter_mut().zip(columns.chunks_exact(BAND)) {
            *byte = column[lane];
        }
    }
}

/// A half in fixed point.
pub(super) fn rounding(precision: u32) -> i32 {
    1 << (precision - 1)
}
