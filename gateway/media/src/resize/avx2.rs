//! The resampling kernels in 256-bit integer vectors; every byte equals that of `scalar`.
#![allow(unsafe_code)]

use super::scalar;
use super::weights::{AxisWeights, TAP_GROUP};
use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_add_epi32,
    _mm256_broadcastsi128_si256, _mm256_castsi128_si256, _mm256_extract_epi32,
    _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_packs_epi32,
    _mm256_packus_epi16, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_sra_epi32, _mm256_storeu_si256, _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
};

/// Bytes of a 256-bit vector.
const VECTOR: usize = 32;
/// Bytes that one load of the horizontal kernel reads, of which it uses 12.
const LOAD: usize = 16;
/// Marks a byte that a shuffle sets to zero.
const ZERO: u8 = 0x80;
/// Pixels 0 and 1 of four as the 16-bit pairs R0 R1, G0 G1, B0 B1, 0 0.
const FIRST_PAIR: [u8; LOAD] =
    [0, ZERO, 3, ZERO, 1, ZERO, 4, ZERO, 2, ZERO, 5, ZERO, ZERO, ZERO, ZERO, ZERO];
/// Pixels 2 and 3 likewise.
const SECOND_PAIR: [u8; LOAD] =
    [6, ZERO, 9, ZERO, 7, ZERO, 10, ZERO, 8, ZERO, 11, ZERO, ZERO, ZERO, ZERO, ZERO];

/// Proof that this machine runs these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    /// `None` on a machine without the instructions.
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx2").then_some(Self(()))
    }

    /// One or two neighbouring rows made narrower or wider.
    ///
    /// `source` begins with the first row and may go on past the last; `target` holds the whole
    /// rows that result.
    pub(super) fn horizontal_rows(
        self,
        source: &[u8],
        source_bytes: usize,
        target: &mut [u8],
        axis: &AxisWeights,
    ) {
        let row_bytes = axis.starts.len() * 3;
        if target.len() == row_bytes {
            return scalar::horizontal_row(source, target, axis);
        }
        let (upper, lower) = target.split_at_mut(row_bytes);
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { two_rows(source, &source[source_bytes..], [upper, lower], axis) }
    }

    /// One row made of `rows` weighted by `weights`, one each; all rows as long as `target`.
    pub(super) fn vertical_row(
        self,
        rows: &[&[u8]],
        target: &mut [u8],
        weights: &[i16],
        precision: u32,
    ) {
        let whole = target.len() / VECTOR * VECTOR;
        // SAFETY: `self` exists only where AVX2 was detected.
        unsafe { columns(rows, &mut target[..whole], weights, precision) };
        let tails: Vec<&[u8]> = rows.iter().map(|row| &row[whole..]).collect();
        scalar::vertical_row(&tails, &mut target[whole..], weights, precision);
    }
}

/// Both rows at once, one in each half of a vector; four source pixels a step.
#[target_feature(enable = "avx2")]
fn two_rows(upper: &[u8], lower: &[u8], [above, below]: [&mut [u8]; 2], axis: &AxisWeights) {
    let rounding = _mm256_set1_epi32(scalar::rounding(axis.precision));
    let shift = _mm_cvtsi32_si128(axis.precision as i32);
    let (first_pair, second_pair) = (pattern(&FIRST_PAIR), pattern(&SECOND_PAIR));
    for (index, weights) in axis.weights.chunks_exact(axis.taps).enumerate() {
        let start = axis.starts[index] as usize * 3;
        let groups = (axis.counts[index] as usize).div_ceil(TAP_GROUP);
        let end = start + (groups - 1) * TAP_GROUP * 3 + LOAD;
        // `lower` is the shorter of the two slices; near its end a load would leave it
        let (Some(up), Some(down)) = (upper.get(start..end), lower.get(start..end)) else {
            scalar::horizontal_pixel(upper, above, axis, index);
            scalar::horizontal_pixel(lower, below, axis, index);
            continue;
        };
        let mut sums = rounding;
        for (group, four) in weights.chunks_exact(TAP_GROUP).take(groups).enumerate() {
            let pixels = load_halves(up, down, group * TAP_GROUP * 3);
            let pairs = [(first_pair, two(four[0], four[1])), (second_pair, two(four[2], four[3]))];
            for (pick, weight) in pairs {
                let taps = _mm256_shuffle_epi8(pixels, pick);
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(taps, weight));
            }
        }
        let bytes = pack(_mm256_sra_epi32(sums, shift));
        store_pixel(above, index, _mm256_extract_epi32::<0>(bytes));
        store_pixel(below, index, _mm256_extract_epi32::<4>(bytes));
    }
}

/// Columns of bytes, 32 at a time, two rows a step; `target` is a whole number of vectors.
#[target_feature(enable = "avx2")]
fn columns(rows: &[&[u8]], target: &mut [u8], weights: &[i16], precision: u32) {
    let rounding = _mm256_set1_epi32(scalar::rounding(precision));
    let shift = _mm_cvtsi32_si128(precision as i32);
    let zero = _mm256_setzero_si256();
    for (block, out) in target.chunks_exact_mut(VECTOR).enumerate() {
        let mut sums = [rounding; 4];
        for (pair, weight) in rows.chunks(2).zip(weights.chunks(2)) {
            let a = load(pair[0], block);
            let b = pair.get(1).map_or(zero, |row| load(row, block));
            let weight = two(weight[0], weight.get(1).copied().unwrap_or(0));
            let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            let taps = [
                _mm256_unpacklo_epi8(low, zero),
                _mm256_unpackhi_epi8(low, zero),
                _mm256_unpacklo_epi8(high, zero),
                _mm256_unpackhi_epi8(high, zero),
            ];
            for (sum, tap) in sums.iter_mut().zip(taps) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(tap, weight));
            }
        }
        let [a, b, c, d] = sums.map(|sum| _mm256_sra_epi32(sum, shift));
        // packing interleaves within halves exactly as unpacking did, so the order comes back
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        // SAFETY: `out` has VECTOR bytes, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
    }
}

/// Two 16-bit weights, repeated over the vector.
#[target_feature(enable = "avx2")]
fn two(first: i16, second: i16) -> __m256i {
    _mm256_set1_epi32(i32::from(first) & 0xffff | i32::from(second) << 16)
}

/// The same shuffle in both halves.
#[target_feature(enable = "avx2")]
fn pattern(bytes: &[u8; LOAD]) -> __m256i {
    // SAFETY: the array has the 16 bytes that the load reads, and the load needs no alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// 16 bytes of each slice from `offset` on, in the lower and the upper half.
#[target_feature(enable = "avx2")]
fn load_halves(low: &[u8], high: &[u8], offset: usize) -> __m256i {
    let half = |bytes: &[u8]| -> __m128i {
        let bytes: &[u8] = &bytes[offset..][..LOAD];
        // SAFETY: the slice has the 16 bytes that the load reads, and the load needs no alignment.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    };
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(half(low)), half(high))
}

/// Block number `block` of a row.
#[target_feature(enable = "avx2")]
fn load(row: &[u8], block: usize) -> __m256i {
    let bytes = &row[block * VECTOR..][..VECTOR];
    // SAFETY: the slice has the 32 bytes that the load reads, and the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// 32-bit sums as bytes, clamped; those of each half at its beginning.
#[target_feature(enable = "avx2")]
fn pack(sums: __m256i) -> __m256i {
    let words = _mm256_packs_epi32(sums, sums);
    _mm256_packus_epi16(words, words)
}

/// Writes the three low bytes of `value` as pixel `index`.
fn store_pixel(row: &mut [u8], index: usize, value: i32) {
    row[index * 3..][..3].copy_from_slice(&value.to_le_bytes()[..3]);
}
