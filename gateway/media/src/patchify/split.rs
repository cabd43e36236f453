//! Interleaved pixels of one row into the planes of its patches: plain, and by byte shuffles.
#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
mod neon;

use super::CHANNELS;

/// Where the strips of one row of pixels go, one strip a patch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Where the first strip's red bytes begin.
    pub(super) first: usize,
    /// Patches beside each other in a merge block, whose patches follow each other.
    pub(super) merge: usize,
    /// Bytes of a patch.
    pub(super) patch_bytes: usize,
    /// Bytes between the planes of a patch.
    pub(super) stride: usize,
}

impl Places {
    /// Where the red bytes of each strip begin, from left to right.
    fn starts(self) -> impl Iterator<Item = usize> {
        let block_bytes = self.merge * self.merge * self.patch_bytes;
        (0..).flat_map(move |block| {
            (0..self.merge)
                .map(move |across| self.first + block * block_bytes + across * self.patch_bytes)
        })
    }
}

/// Splits strips of a fixed number of pixels; the instructions are chosen once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitter {
    patch: usize,
    #[cfg(target_arch = "x86_64")]
    shuffles: Option<x86::Shuffles>,
    #[cfg(target_arch = "aarch64")]
    shuffles: Option<neon::Tables>,
}

impl Splitter {
    /// For strips of `patch` pixels.
    pub(super) fn new(patch: usize) -> Self {
        Self {
            patch,
            #[cfg(target_arch = "x86_64")]
            shuffles: x86::Shuffles::detect(patch),
            #[cfg(target_arch = "aarch64")]
            shuffles: neon::Tables::detect(patch),
        }
    }

    /// The same without special instructions.
    #[cfg(test)]
    fn plain(patch: usize) -> Self {
        Self {
            patch,
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            shuffles: None,
        }
    }

    /// Copies each strip of a row to the beginnings of the three planes of its patch in `out`.
    pub(super) fn split_row(&self, row: &[u8], places: Places, out: &mut [u8]) {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if let Some(shuffles) = &self.shuffles {
            return shuffles.split_row(row, places, out);
        }
        for (strip, start) in row.chunks_exact(self.patch * CHANNELS).zip(places.starts()) {
            let (red, rest) = out[start..].split_at_mut(places.stride);
            let (green, blue) = rest.split_at_mut(places.stride);
            for (index, pixel) in strip.chunks_exact(CHANNELS).enumerate() {
                (red[index], green[index], blue[index]) = (pixel[0], pixel[1], pixel[2]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHANNELS, Places};
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_or_si128, _mm_shuffle_epi8, _mm_storel_epi64,
        _mm_storeu_si128,
    };

    /// Bytes of a vector.
    const VECTOR: usize = 16;
    /// Fewest pixels of a strip that three vectors cover without reaching past it.
    const MIN_PATCH: usize = 11;
    /// Bytes of the two overlapping stores that write a row of a plane.
    const HALF: usize = 8;

    /// Which byte of each of three vectors goes where in each plane; proof of the instructions.
    #[derive(Clone, Copy, Debug)]
    pub(super) struct Shuffles {
        patch: usize,
        /// `[channel][vector]`: the place to take each byte from, or none.
        masks: [[[u8; VECTOR]; CHANNELS]; CHANNELS],
        /// Brings the last bytes of a plane's row to the front.
        tail: [u8; VECTOR],
    }

    impl Shuffles {
        /// `None` without SSSE3, or for patches that three vectors do not cover.
        pub(super) fn detect(patch: usize) -> Option<Self> {
            let fits = (MIN_PATCH..=VECTOR).contains(&patch);
            if !fits || !std::arch::is_x86_feature_detected!("ssse3") {
                return None;
            }
            // the third vector ends with the strip, and may overlap the second
            let starts = [0, VECTOR, patch * CHANNELS - VECTOR];
            let mut masks = [[[0x80; VECTOR]; CHANNELS]; CHANNELS];
            for (channel, vectors) in masks.iter_mut().enumerate() {
                let bytes = (channel..patch * CHANNELS).step_by(CHANNELS);
                for (pixel, byte) in bytes.enumerate() {
                    let vector = (byte / VECTOR).min(2);
                    vectors[vector][pixel] = (byte - starts[vector]) as u8;
                }
            }
            let tail = std::array::from_fn(|place| ((patch - HALF + place) % VECTOR) as u8);
            Some(Self { patch, masks, tail })
        }

        /// As [`super::Splitter::split_row`].
        pub(super) fn split_row(&self, row: &[u8], places: Places, out: &mut [u8]) {
            // SAFETY: `self` exists only where SSSE3 was detected.
            unsafe { self.split_with_ssse3(row, places, out) }
        }

        #[target_feature(enable = "ssse3")]
        fn split_with_ssse3(&self, row: &[u8], places: Places, out: &mut [u8]) {
            assert!(self.patch >= MIN_PATCH);
            let strip_bytes = self.patch * CHANNELS;
            let mut masks = [[load(&self.tail); CHANNELS]; CHANNELS];
            for (loaded, bytes) in masks.iter_mut().flatten().zip(self.masks.iter().flatten()) {
                *loaded = load(bytes);
            }
            let tail = load(&self.tail);
            for (strip, start) in row.chunks_exact(strip_bytes).zip(places.starts()) {
                let out = &mut out[start..][..2 * places.stride + self.patch];
                // SAFETY: a strip has at least 33 bytes: 32 from its beginning and 16 before its
                // end are inside; the loads need no alignment.
                let (a, b, c) = unsafe {
                    let begin = strip.as_ptr();
                    (
                        _mm_loadu_si128(begin.cast()),
                        _mm_loadu_si128(begin.add(VECTOR).cast()),
                        _mm_loadu_si128(begin.add(strip_bytes - VECTOR).cast()),
                    )
                };
                for (channel, [x, y, z]) in masks.into_iter().enumerate() {
                    let (a, b) = (_mm_shuffle_epi8(a, x), _mm_shuffle_epi8(b, y));
                    let plane = _mm_or_si128(_mm_or_si128(a, b), _mm_shuffle_epi8(c, z));
                    // SAFETY: a row of a plane has `patch` bytes, 8 at least, and lies in `out`.
                    unsafe {
                        let begin = out.as_mut_ptr().add(channel * places.stride);
                        if self.patch == VECTOR {
                            _mm_storeu_si128(begin.cast(), plane);
                        } else {
                            _mm_storel_epi64(begin.cast(), plane);
                            let last = _mm_shuffle_epi8(plane, tail);
                            _mm_storel_epi64(begin.add(self.patch - HALF).cast(), last);
                        }
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "ssse3")]
    fn load(bytes: &[u8; VECTOR]) -> __m128i {
        // SAFETY: the array has the 16 bytes of a vector; the load needs no alignment.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Places, Splitter};

    #[test]
    fn shuffles_equal_the_plain_way_and_touch_nothing_else() {
        for patch in 1..40 {
            let row: Vec<u8> = (0..4 * patch * 3).map(|at| (at * 37 + 11) as u8).collect();
            for stride in [patch, patch + 5, 3 * patch * patch] {
                let places = Places { first: 3, merge: 2, patch_bytes: 3 * stride, stride };
                let mut plain = vec![0xee; 3 + 6 * 3 * stride];
                let mut fast = plain.clone();
                Splitter::plain(patch).split_row(&row, places, &mut plain);
                Splitter::new(patch).split_row(&row, places, &mut fast);
                assert!(plain == fast, "{patch} pixels, {stride} apart");
                assert_eq!(plain[3 + stride], row[1], "green of the first pixel");
                assert_eq!(plain[3 + 4 * 3 * stride], row[2 * patch * 3], "the next block");
            }
        }
    }
}
