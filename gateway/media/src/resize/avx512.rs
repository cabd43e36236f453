//! The resampling kernels in 512-bit vectors, without a detour over columns; every byte equals that
//! of `scalar`.
#![allow(unsafe_code)]
// present only where the compiler has them: see the build script
#![allow(clippy::incompatible_msrv)]

use super::weights::AxisWeights;
use super::{CHANNELS, scalar};
use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm_mask_storeu_epi8, _mm_storeu_si128, _mm512_add_epi8,
    _mm512_dpwssd_epi32, _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_mask_storeu_epi8,
    _mm512_maskz_loadu_epi8, _mm512_maskz_permutexvar_epi8, _mm512_packs_epi32,
    _mm512_packus_epi16, _mm512_permutexvar_epi32, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_setzero_si512, _mm512_sra_epi32, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};
use std::ops::Range;

/// Bytes of a vector.
const VECTOR: usize = 64;
/// Sums of 32 bits in a vector.
const SUMS: usize = 16;
/// Target pixels whose channels have a sum each.
const PIXELS: usize = SUMS / CHANNELS;
/// Every other byte: bytes are spread to words.
const WORDS: u64 = 0x5555_5555_5555_5555;
/// Rows worked on beside each other, so that one waits for none of the others.
const ROWS: usize = 8;
/// Bytes by which each step begins after the one before.
const STEP: usize = 2 * CHANNELS;
/// Rows whose sums are packed together.
const PACKED: usize = 4;
/// Brings the quarters of each packed row together.
const ROWS_FIRST: [u32; SUMS] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
/// Rows for which the tables are gone through together.
const BLOCK: usize = 32;

/// Proof that this machine runs these kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    /// `None` on a machine without the instructions.
    pub(super) fn detect() -> Option<Self> {
        let is_there = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vl")
            && std::arch::is_x86_feature_detected!("avx512vbmi")
            && std::arch::is_x86_feature_detected!("avx512vnni");
        is_there.then_some(Self(()))
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
        // SAFETY: `self` exists only where the instructions were detected.
        unsafe { weighted_rows(source, stride, weights, precision, target) }
    }
}

/// A prepared horizontal pass: neighbouring target pixels are made together, a channel of each in a
/// sum of its own, two source pixels a step.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    proof: Avx512,
    groups: Vec<Group>,
    /// Weights of the steps of all groups: of each sum, those of its two source pixels.
    weights: Vec<[[i16; 2]; SUMS]>,
    precision: u32,
}

/// Target pixels that are made together.
#[derive(Clone, Debug)]
struct Group {
    /// Where the first step's bytes begin in a source row; each next step begins two pixels later.
    source: usize,
    /// Steps whose bytes all lie in the vector that begins with the first one's.
    steps_per_load: usize,
    /// Where its bytes begin in a target row.
    target: usize,
    /// Bytes of the target.
    len: usize,
    /// Which of a step's bytes each sum takes, in the places of `WORDS`.
    places: [u8; VECTOR],
    /// Its part of the weights.
    steps: Range<usize>,
}

impl Lanes {
    /// For an axis of whole rows.
    pub(super) fn new(proof: Avx512, axis: &AxisWeights) -> Self {
        let mut lanes =
            Self { proof, groups: Vec::new(), weights: Vec::new(), precision: axis.precision };
        let mut first = 0;
        while first < axis.starts.len() {
            let origin = axis.starts[first];
            // a step's two pixels must lie in one vector for all pixels of a group
            let fits = |start: &&u32| (**start - origin + 2) as usize * CHANNELS <= VECTOR;
            let count = axis.starts[first..].iter().take(PIXELS).take_while(fits).count();
            lanes.add(axis, first..first + count);
            first += count;
        }
        lanes
    }

    /// Bytes of the tables.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.groups[..]) + size_of_val(&self.weights[..])
    }

    fn add(&mut self, axis: &AxisWeights, pixels: Range<usize>) {
        let origin = axis.starts[pixels.start];
        let mut places = [0; VECTOR];
        let longest = pixels.clone().map(|pixel| axis.row(pixel).len()).max().unwrap_or(0);
        let mut steps = vec![[[0; 2]; SUMS]; longest.div_ceil(2)];
        for (index, pixel) in pixels.clone().enumerate() {
            let shift = (axis.starts[pixel] - origin) as usize * CHANNELS;
            for channel in 0..CHANNELS {
                let sum = index * CHANNELS + channel;
                places[sum * 4] = (shift + channel) as u8;
                places[sum * 4 + 2] = (shift + CHANNELS + channel) as u8;
                for (tap, weight) in axis.row(pixel).iter().enumerate() {
                    steps[tap / 2][sum][tap % 2] = *weight;
                }
            }
        }
        let furthest = places.iter().max().map_or(0, |&place| usize::from(place));
        let begin = self.weights.len();
        self.weights.append(&mut steps);
        self.groups.push(Group {
            source: origin as usize * CHANNELS,
            steps_per_load: (VECTOR - 1 - furthest) / STEP + 1,
            target: pixels.start * CHANNELS,
            len: pixels.len() * CHANNELS,
            places,
            steps: begin..self.weights.len(),
        });
    }

    /// Narrows whole rows of `source_bytes` to rows of `target_bytes`.
    pub(super) fn narrow(
        &self,
        source: &[u8],
        source_bytes: usize,
        target: &mut [u8],
        target_bytes: usize,
    ) {
        assert_eq!(source.len() / source_bytes, target.len() / target_bytes);
        let blocks = source.chunks(BLOCK * source_bytes);
        for (rows, out) in blocks.zip(target.chunks_mut(BLOCK * target_bytes)) {
            for group in &self.groups {
                let strides = [source_bytes, target_bytes];
                // SAFETY: the proof exists only where the instructions were detected.
                unsafe { self.narrow_group(group, rows, out, strides) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    fn narrow_group(&self, group: &Group, source: &[u8], target: &mut [u8], strides: [usize; 2]) {
        let [source_bytes, target_bytes] = strides;
        let count = source.len() / source_bytes;
        let reach = group.source + group.last_load() + VECTOR;
        let mut first = 0;
        while first < count {
            let rows = &source[first * source_bytes..];
            let out = &mut target[first * target_bytes..];
            if first + ROWS <= count && (ROWS - 1) * source_bytes + reach <= rows.len() {
                // SAFETY: whole vectors can be read for all rows.
                let sums = unsafe { self.sums::<ROWS, true>(group, rows, source_bytes) };
                // one by one: an array that is indexed would be kept in memory all the while
                let [a, b, c, d, e, f, g, h] = sums;
                let (upper, lower) = out.split_at_mut(PACKED * target_bytes);
                group.store(self.packed([a, b, c, d]), upper, target_bytes);
                group.store(self.packed([e, f, g, h]), lower, target_bytes);
                first += ROWS;
            } else {
                // SAFETY: it only reads what is there.
                let [sum] = unsafe { self.sums::<1, false>(group, rows, source_bytes) };
                group.store(self.packed([sum; PACKED]), &mut out[..target_bytes], target_bytes);
                first += 1;
            }
        }
    }

    /// The sums of one group in `N` rows.
    ///
    /// # Safety
    /// If `IS_INSIDE`, every row must have whole vectors of `source` to read.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    unsafe fn sums<const N: usize, const IS_INSIDE: bool>(
        &self,
        group: &Group,
        source: &[u8],
        source_bytes: usize,
    ) -> [__m512i; N] {
        let Avx512(()) = self.proof;
        // kept from the compiler, which would make a second instruction of it
        let words_mask = std::hint::black_box(WORDS);
        let mut sums = [_mm512_set1_epi32(scalar::rounding(self.precision)); N];
        let steps = self.weights[group.steps.clone()].chunks(group.steps_per_load);
        for (index, steps) in steps.enumerate() {
            let at = group.source + STEP * group.steps_per_load * index;
            let bytes: [__m512i; N] = std::array::from_fn(|row| {
                let at = row * source_bytes + at;
                if IS_INSIDE {
                    // SAFETY: the caller vouches for the bytes; the load needs no alignment.
                    unsafe { _mm512_loadu_si512(source.as_ptr().add(at).cast()) }
                } else {
                    load_some(source, at)
                }
            });
            let mut places = load(&group.places);
            for weights in steps {
                // SAFETY: sixteen pairs of 16 bits are a vector; the load needs no alignment.
                let weights = unsafe { _mm512_loadu_si512(weights.as_ptr().cast()) };
                for (sum, bytes) in sums.iter_mut().zip(bytes) {
                    let words = _mm512_maskz_permutexvar_epi8(words_mask, places, bytes);
                    *sum = _mm512_dpwssd_epi32(*sum, words, weights);
                }
                places = _mm512_add_epi8(places, _mm512_set1_epi8(STEP as i8));
            }
        }
        sums
    }

    /// The bytes that four rows of sums stand for.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    fn packed(&self, sums: [__m512i; PACKED]) -> [__m128i; PACKED] {
        let shift = _mm_cvtsi32_si128(self.precision as i32);
        let [a, b, c, d] = sums.map(|sum| _mm512_sra_epi32(sum, shift));
        // each packing saturates, so that a sum below 0 becomes 0 and one above 255 becomes 255
        let quarters = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        // SAFETY: sixteen numbers of 32 bits are a vector; the load needs no alignment.
        let order = unsafe { _mm512_loadu_si512(ROWS_FIRST.as_ptr().cast()) };
        let rows = _mm512_permutexvar_epi32(order, quarters);
        [
            _mm512_extracti32x4_epi32::<0>(rows),
            _mm512_extracti32x4_epi32::<1>(rows),
            _mm512_extracti32x4_epi32::<2>(rows),
            _mm512_extracti32x4_epi32::<3>(rows),
        ]
    }
}

impl Group {
    /// Where the last vector begins, in bytes after the first.
    fn last_load(&self) -> usize {
        (self.steps.len() - 1) / self.steps_per_load * self.steps_per_load * STEP
    }

    /// Puts the bytes of its pixels where they belong in the rows of the target, four at most.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn store(&self, rows: [__m128i; PACKED], target: &mut [u8], target_bytes: usize) {
        for (bytes, row) in rows.into_iter().zip(target.chunks_exact_mut(target_bytes)) {
            let rest = &mut row[self.target..];
            // the next group of the row writes over what is too much
            if rest.len() >= SUMS {
                // SAFETY: the row has sixteen bytes there; the store needs no alignment.
                unsafe { _mm_storeu_si128(rest.as_mut_ptr().cast(), bytes) };
            } else {
                assert!(self.len <= rest.len());
                let mask = (1_u32 << self.len) - 1;
                // SAFETY: `rest` has `len` bytes, and no others are written.
                unsafe { _mm_mask_storeu_epi8(rest.as_mut_ptr().cast(), mask as u16, bytes) };
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn weighted_rows(source: &[u8], stride: usize, weights: &[i16], precision: u32, target: &mut [u8]) {
    let (pairs, odd) = weights.as_chunks::<2>();
    assert!(source.len() >= (weights.len() - 1) * stride + target.len());
    let rounding = _mm512_set1_epi32(scalar::rounding(precision));
    let shift = _mm_cvtsi32_si128(precision as i32);
    for (block, out) in target.chunks_mut(VECTOR).enumerate() {
        let first = block * VECTOR;
        let mask = first_bytes(out.len());
        let mut sums = [rounding; 4];
        for (pair, &taps) in pairs.iter().enumerate() {
            let at = first + 2 * pair * stride;
            // SAFETY: rows 2 * pair and 2 * pair + 1 are in `source`, by the assertion above, and
            // only the bytes under the mask are read.
            let (a, b) =
                unsafe { (load_mask(source, at, mask), load_mask(source, at + stride, mask)) };
            sums = add_taps(sums, a, b, taps);
        }
        if let &[weight] = odd {
            // SAFETY: the last row is in `source`, by the assertion above.
            let a = unsafe { load_mask(source, first + (weights.len() - 1) * stride, mask) };
            sums = add_taps(sums, a, _mm512_setzero_si512(), [weight, 0]);
        }
        let [a, b, c, d] = sums.map(|sum| _mm512_sra_epi32(sum, shift));
        // packing interleaves within quarters exactly as unpacking did, so the order comes back
        let bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        // SAFETY: only the bytes under the mask are written, and `out` has them.
        unsafe { _mm512_mask_storeu_epi8(out.as_mut_ptr().cast(), mask, bytes) };
    }
}

/// Adds two rows of bytes times their weights to 64 sums, kept in unpacking order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_taps(sums: [__m512i; 4], a: __m512i, b: __m512i, weights: [i16; 2]) -> [__m512i; 4] {
    let weights = _mm512_set1_epi32(i32::from(weights[0]) & 0xffff | i32::from(weights[1]) << 16);
    let zero = _mm512_setzero_si512();
    let (low, high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
    [
        _mm512_dpwssd_epi32(sums[0], _mm512_unpacklo_epi8(low, zero), weights),
        _mm512_dpwssd_epi32(sums[1], _mm512_unpackhi_epi8(low, zero), weights),
        _mm512_dpwssd_epi32(sums[2], _mm512_unpacklo_epi8(high, zero), weights),
        _mm512_dpwssd_epi32(sums[3], _mm512_unpackhi_epi8(high, zero), weights),
    ]
}

/// As many bytes of `bytes` from `at` on as it has, up to a vector; zeros for the others.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_some(bytes: &[u8], at: usize) -> __m512i {
    let rest = &bytes[at.min(bytes.len())..];
    // SAFETY: only the bytes under the mask are read, and they are there.
    unsafe { load_mask(rest, 0, first_bytes(rest.len())) }
}

/// The bytes of `bytes` from `at` on that the mask names; zeros for the others.
///
/// # Safety
/// They must be there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load_mask(bytes: &[u8], at: usize, mask: u64) -> __m512i {
    // SAFETY: the caller vouches for the bytes, and the load needs no alignment.
    unsafe { _mm512_maskz_loadu_epi8(mask, bytes.as_ptr().add(at).cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; VECTOR]) -> __m512i {
    // SAFETY: the array has the bytes of a vector; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// A mask of the first `count` bytes, all 64 at most.
#[inline]
fn first_bytes(count: usize) -> u64 {
    if count >= VECTOR { u64::MAX } else { (1 << count) - 1 }
}
