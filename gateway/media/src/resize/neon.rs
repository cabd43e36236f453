//! The resampling kernels in 128-bit NEON vectors; every byte equals that of `scalar`.
#![allow(unsafe_code)]

use super::weights::AxisPart;
use super::{BAND, CHANNELS, Place, scalar};
use std::arch::aarch64::{
    int32x4_t, uint8x16_t, vdupq_n_s32, vdupq_n_u8, vget_high_u8, vget_low_s16, vget_low_u8,
    vld1q_u8, vmlal_high_n_s16, vmlal_n_s16, vmovl_u8, vqmovn_high_u16, vqmovn_u16,
    vqmovun_high_s32, vqmovun_s32, vreinterpretq_s16_u16, vshlq_s32, vst1q_u8, vzip1q_u8,
    vzip2q_u8,
};

/// Bytes of a vector, and the side of the squares that are transposed.
const VECTOR: usize = 16;

/// Proof that this machine runs these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neon(());

impl Neon {
    /// `None` on a machine without the instructions.
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    /// As [`scalar::weighted_rows`].
    pub(super) fn weighted_rows(
        self,
        source: &[u8],
        stride: usize,
        weights: &[i16],
        precision: u32,
        target: &mut [u8],
    ) {
        let whole = target.len() / VECTOR * VECTOR;
        let (body, tail) = target.split_at_mut(whole);
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { weighted_blocks(source, stride, weights, precision, body) };
        if !tail.is_empty() {
            scalar::weighted_rows(&source[whole..], stride, weights, precision, tail);
        }
    }

    /// As [`scalar::narrow`].
    pub(super) fn narrow(self, columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { narrow(columns, axis, target) }
    }

    /// As [`scalar::to_columns`].
    pub(super) fn to_columns(self, rows: &[&[u8]], columns: &mut [u8]) {
        let whole = rows[0].len() / VECTOR * VECTOR;
        let (squares, rest) = columns.split_at_mut(whole * BAND);
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { to_columns(rows, squares) };
        if !rest.is_empty() {
            let strips: Vec<&[u8]> = rows.iter().map(|row| &row[whole..]).collect();
            scalar::to_columns(&strips, rest);
        }
    }

    /// As [`scalar::to_rows`].
    pub(super) fn to_rows(self, columns: &[u8], place: Place, target: &mut [u8]) {
        let whole = columns.len() / BAND / VECTOR * VECTOR;
        let (squares, rest) = columns.split_at(whole * BAND);
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { to_rows(squares, place, target) };
        if !rest.is_empty() {
            scalar::to_rows(rest, Place { offset: place.offset + whole, ..place }, target);
        }
    }
}

#[target_feature(enable = "neon")]
fn narrow(columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
    let pixel = CHANNELS * BAND;
    for ((start, weights), out) in axis.windows().zip(target.chunks_exact_mut(pixel)) {
        weighted_blocks(&columns[start * pixel..], pixel, weights, axis.precision(), out);
    }
}

/// Weighted rows for whole vectors of `target`, a row a step.
#[inline]
#[target_feature(enable = "neon")]
fn weighted_blocks(
    source: &[u8],
    stride: usize,
    weights: &[i16],
    precision: u32,
    target: &mut [u8],
) {
    assert!(source.len() >= (weights.len() - 1) * stride + target.len());
    let rounding = vdupq_n_s32(scalar::rounding(precision));
    // a shift to the left by less than nothing goes to the right, and keeps the sign
    let shift = vdupq_n_s32(-(precision as i32));
    for (block, out) in target.chunks_exact_mut(VECTOR).enumerate() {
        let mut sums = [rounding; 4];
        for (tap, &weight) in weights.iter().enumerate() {
            // SAFETY: row `tap` is in `source`, by the assertion above.
            let bytes = unsafe { load(source, block * VECTOR + tap * stride) };
            sums = add_tap(sums, bytes, weight);
        }
        let [a, b, c, d] = sums.map(|sum| vshlq_s32(sum, shift));
        // each narrowing saturates, so that a sum below 0 becomes 0 and one above 255 becomes 255
        let low = vqmovun_high_s32(vqmovun_s32(a), b);
        let high = vqmovun_high_s32(vqmovun_s32(c), d);
        let bytes = vqmovn_high_u16(vqmovn_u16(low), high);
        // SAFETY: `out` has VECTOR bytes, and the store needs no alignment.
        unsafe { vst1q_u8(out.as_mut_ptr(), bytes) };
    }
}

/// Adds a row of bytes times its weight to 16 sums.
#[inline]
#[target_feature(enable = "neon")]
fn add_tap(sums: [int32x4_t; 4], bytes: uint8x16_t, weight: i16) -> [int32x4_t; 4] {
    let low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
    let high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
    [
        vmlal_n_s16(sums[0], vget_low_s16(low), weight),
        vmlal_high_n_s16(sums[1], low, weight),
        vmlal_n_s16(sums[2], vget_low_s16(high), weight),
        vmlal_high_n_s16(sums[3], high, weight),
    ]
}

/// Turns squares of 16 columns, those of the upper 16 rows and of the lower 16 in turn.
#[target_feature(enable = "neon")]
fn to_columns(rows: &[&[u8]], columns: &mut [u8]) {
    let width = columns.len() / BAND;
    assert!(rows.iter().all(|row| row.len() >= width));
    let lanes: [&[u8]; BAND] = std::array::from_fn(|lane| rows[lane.min(rows.len() - 1)]);
    for (block, out) in columns.chunks_exact_mut(VECTOR * BAND).enumerate() {
        for half in [0, VECTOR] {
            let mut square = [vdupq_n_u8(0); VECTOR];
            for (vector, lane) in square.iter_mut().zip(&lanes[half..]) {
                // SAFETY: every row has the `width` bytes of all squares, by the assertion above.
                *vector = unsafe { load(lane, block * VECTOR) };
            }
            for (column, vector) in out.chunks_exact_mut(BAND).zip(transposed(square)) {
                let place = &mut column[half..half + VECTOR];
                // SAFETY: `place` has VECTOR bytes, and the store needs no alignment.
                unsafe { vst1q_u8(place.as_mut_ptr(), vector) };
            }
        }
    }
}

/// The way back for whole squares.
#[target_feature(enable = "neon")]
fn to_rows(columns: &[u8], place: Place, target: &mut [u8]) {
    for (block, bytes) in columns.chunks_exact(VECTOR * BAND).enumerate() {
        let left = place.offset + block * VECTOR;
        let mut rows =
            target.chunks_exact_mut(place.row_bytes).map(|row| &mut row[left..][..VECTOR]);
        for half in [0, VECTOR] {
            let mut square = [vdupq_n_u8(0); VECTOR];
            for (vector, column) in square.iter_mut().zip(bytes.chunks_exact(BAND)) {
                // SAFETY: a column has BAND bytes, two vectors.
                *vector = unsafe { load(column, half) };
            }
            for (vector, out) in transposed(square).into_iter().zip(&mut rows) {
                // SAFETY: `out` has VECTOR bytes, and the store needs no alignment.
                unsafe { vst1q_u8(out.as_mut_ptr(), vector) };
            }
        }
    }
}

/// Transposes 16 by 16 bytes.
///
/// Each round interleaves vector `i` with vector `i + 8`, which rotates the bits of a byte's place
/// (vector, byte) by one; four rounds exchange vector and byte.
#[inline]
#[target_feature(enable = "neon")]
fn transposed(mut square: [uint8x16_t; VECTOR]) -> [uint8x16_t; VECTOR] {
    for _ in 0..4 {
        let mut next = square;
        for index in 0..VECTOR / 2 {
            let (a, b) = (square[index], square[index + VECTOR / 2]);
            next[2 * index] = vzip1q_u8(a, b);
            next[2 * index + 1] = vzip2q_u8(a, b);
        }
        square = next;
    }
    square
}

/// 16 bytes of `bytes` from `at` on.
///
/// # Safety
/// They must be there.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load(bytes: &[u8], at: usize) -> uint8x16_t {
    debug_assert!(at + VECTOR <= bytes.len());
    // SAFETY: the caller vouches for the bytes, and the load needs no alignment.
    unsafe { vld1q_u8(bytes.as_ptr().add(at)) }
}
