//! The resampling kernels in 256-bit integer vectors; every byte equals that of `scalar`.
#![allow(unsafe_code)]

use super::weights::AxisPart;
use super::{BAND, CHANNELS, Place, scalar};
use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_cvtsi32_si128, _mm_loadu_si128, _mm_prefetch, _mm_storeu_si128,
    _mm256_add_epi32, _mm256_castsi128_si256, _mm256_castsi256_si128, _mm256_extracti128_si256,
    _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_packs_epi32,
    _mm256_packus_epi16, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_sra_epi32,
    _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
};

/// Bytes of a vector.
const VECTOR: usize = 32;
/// Bytes of half a vector: the side of the squares that are transposed.
const HALF: usize = 16;

/// How far ahead of a row's bytes they are asked for, a few lines of the cache.
const PREFETCH: usize = 256;

/// Proof that this machine runs these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    /// `None` on a machine without the instructions.
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx2").then_some(Self(()))
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
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { weighted_blocks(source, stride, weights, precision, body) };
        if !tail.is_empty() {
            scalar::weighted_rows(&source[whole..], stride, weights, precision, tail);
        }
    }

    /// As [`scalar::narrow`].
    pub(super) fn narrow(self, columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { narrow(columns, axis, target) }
    }

    /// As [`scalar::to_columns`].
    pub(super) fn to_columns(self, rows: &[&[u8]], columns: &mut [u8]) {
        let whole = rows[0].len() / HALF * HALF;
        let (squares, rest) = columns.split_at_mut(whole * BAND);
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { to_columns(rows, squares) };
        if !rest.is_empty() {
            let strips: Vec<&[u8]> = rows.iter().map(|row| &row[whole..]).collect();
            scalar::to_columns(&strips, rest);
        }
    }

    /// As [`scalar::to_rows`].
    pub(super) fn to_rows(self, columns: &[u8], place: Place, target: &mut [u8]) {
        let whole = columns.len() / BAND / HALF * HALF;
        let (squares, rest) = columns.split_at(whole * BAND);
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { to_rows(squares, place, target) };
        if !rest.is_empty() {
            scalar::to_rows(rest, Place { offset: place.offset + whole, ..place }, target);
        }
    }
}

#[target_feature(enable = "avx2")]
fn narrow(columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
    let pixel = CHANNELS * BAND;
    for ((start, weights), out) in axis.windows().zip(target.chunks_exact_mut(pixel)) {
        weighted_blocks(&columns[start * pixel..], pixel, weights, axis.precision(), out);
    }
}

/// Weighted rows for whole vectors of `target`, two rows a step.
#[inline]
#[target_feature(enable = "avx2")]
fn weighted_blocks(
    source: &[u8],
    stride: usize,
    weights: &[i16],
    precision: u32,
    target: &mut [u8],
) {
    let (pairs, odd) = weights.as_chunks::<2>();
    assert!(source.len() >= (weights.len() - 1) * stride + target.len());
    let rounding = _mm256_set1_epi32(scalar::rounding(precision));
    let shift = _mm_cvtsi32_si128(precision as i32);
    let zero = _mm256_setzero_si256();
    for (block, out) in target.chunks_exact_mut(VECTOR).enumerate() {
        let first = block * VECTOR;
        let mut sums = [rounding; 4];
        for (pair, &[weight, next_weight]) in pairs.iter().enumerate() {
            let at = first + 2 * pair * stride;
            // SAFETY: rows 2 * pair and 2 * pair + 1 are in `source`, by the assertion above.
            let (a, b) = unsafe { (load(source, at), load(source, at + stride)) };
            sums = add_taps(sums, a, b, [weight, next_weight]);
        }
        if let &[weight] = odd {
            // SAFETY: the last row is in `source`, by the assertion above.
            let a = unsafe { load(source, first + (weights.len() - 1) * stride) };
            sums = add_taps(sums, a, zero, [weight, 0]);
        }
        let [a, b, c, d] = sums.map(|sum| _mm256_sra_epi32(sum, shift));
        // packing interleaves within halves exactly as unpacking did, so the order comes back
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        // SAFETY: `out` has VECTOR bytes, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
    }
}

/// Adds two rows of bytes times their weights to 32 sums, kept in unpacking order.
#[inline]
#[target_feature(enable = "avx2")]
fn add_taps(sums: [__m256i; 4], a: __m256i, b: __m256i, weights: [i16; 2]) -> [__m256i; 4] {
    let weights = _mm256_set1_epi32(i32::from(weights[0]) & 0xffff | i32::from(weights[1]) << 16);
    let zero = _mm256_setzero_si256();
    let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
    let add = |sum, bytes| _mm256_add_epi32(sum, _mm256_madd_epi16(bytes, weights));
    [
        add(sums[0], _mm256_unpacklo_epi8(low, zero)),
        add(sums[1], _mm256_unpackhi_epi8(low, zero)),
        add(sums[2], _mm256_unpacklo_epi8(high, zero)),
        add(sums[3], _mm256_unpackhi_epi8(high, zero)),
    ]
}

/// Turns squares of 16 columns: the upper 16 rows in the lower halves, the others in the upper.
#[target_feature(enable = "avx2")]
fn to_columns(rows: &[&[u8]], columns: &mut [u8]) {
    let width = columns.len() / BAND;
    assert!(rows.iter().all(|row| row.len() >= width));
    let lanes: [&[u8]; BAND] = std::array::from_fn(|lane| rows[lane.min(rows.len() - 1)]);
    for (block, out) in columns.chunks_exact_mut(HALF * BAND).enumerate() {
        let left = block * HALF;
        // the processor follows fewer streams than there are rows; a quarter of them a square
        for lane in lanes.iter().skip(block % 4).step_by(4) {
            prefetch(lane, left + PREFETCH);
        }
        let mut square = [_mm256_setzero_si256(); HALF];
        for (lane, vector) in square.iter_mut().enumerate() {
            // SAFETY: every row has the `width` bytes of all squares, by the assertion above.
            *vector = unsafe { load_halves(lanes[lane], lanes[lane + HALF], left) };
        }
        let turned = transposed(square);
        for (column, vector) in out.chunks_exact_mut(BAND).zip(turned) {
            // SAFETY: a column has BAND bytes, the size of a vector, and needs no alignment.
            unsafe { _mm256_storeu_si256(column.as_mut_ptr().cast(), vector) };
        }
    }
}

/// The way back for whole squares.
#[target_feature(enable = "avx2")]
fn to_rows(columns: &[u8], place: Place, target: &mut [u8]) {
    for (block, bytes) in columns.chunks_exact(HALF * BAND).enumerate() {
        let mut square = [_mm256_setzero_si256(); HALF];
        for (vector, column) in square.iter_mut().zip(bytes.chunks_exact(BAND)) {
            // SAFETY: a column has BAND bytes, the size of a vector, and needs no alignment.
            *vector = unsafe { _mm256_loadu_si256(column.as_ptr().cast()) };
        }
        let turned = transposed(square);
        let left = place.offset + block * HALF;
        let mut rows = target.chunks_exact_mut(place.row_bytes).map(|row| &mut row[left..][..HALF]);
        let low = turned.iter().map(|&vector| _mm256_castsi256_si128(vector));
        let high = turned.iter().map(|&vector| _mm256_extracti128_si256::<1>(vector));
        for half in low.chain(high) {
            let Some(out) = rows.next() else { break };
            // SAFETY: `out` has the 16 bytes that the store writes, at any alignment.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), half) };
        }
    }
}

/// Transposes the 16 by 16 bytes in the lower halves, and those in the upper halves.
///
/// Each round interleaves vector `i` with vector `i + 8`, which rotates the bits of a byte's place
/// (vector, byte) by one; four rounds exchange vector and byte.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(mut square: [__m256i; HALF]) -> [__m256i; HALF] {
    for _ in 0..4 {
        let mut next = square;
        for index in 0..HALF / 2 {
            let (a, b) = (square[index], square[index + HALF / 2]);
            next[2 * index] = _mm256_unpacklo_epi8(a, b);
            next[2 * index + 1] = _mm256_unpackhi_epi8(a, b);
        }
        square = next;
    }
    square
}

/// 32 bytes of `bytes` from `at` on.
///
/// # Safety
/// They must be there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(bytes: &[u8], at: usize) -> __m256i {
    debug_assert!(at + VECTOR <= bytes.len());
    // SAFETY: the caller vouches for the bytes, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().add(at).cast()) }
}

/// 16 bytes of each row from `at` on, in the lower and the upper half.
///
/// # Safety
/// They must be there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_halves(low: &[u8], high: &[u8], at: usize) -> __m256i {
    debug_assert!(at + HALF <= low.len() && at + HALF <= high.len());
    // SAFETY: the caller vouches for the bytes, and the loads need no alignment.
    let (low, high) = unsafe {
        (
            _mm_loadu_si128(low.as_ptr().add(at).cast()),
            _mm_loadu_si128(high.as_ptr().add(at).cast()),
        )
    };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
}

/// Asks for the line of the cache that holds byte `at` of a row, which may lie past its end.
#[inline]
#[target_feature(enable = "avx2")]
#[allow(unused_unsafe, reason = "a prefetch is unsafe in the oldest compiler we support")]
fn prefetch(row: &[u8], at: usize) {
    // SAFETY: a prefetch is a hint; it may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(at).cast()) };
}
