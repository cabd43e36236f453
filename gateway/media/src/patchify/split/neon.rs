//! Strips of pixels split by table look-ups in NEON vectors.

use super::{CHANNELS, Places};
use std::arch::aarch64::{
    uint8x16_t, uint8x16x3_t, vget_low_u8, vld1q_u8, vqtbl1q_u8, vqtbl3q_u8, vst1_u8, vst1q_u8,
};

/// Bytes of a vector.
const VECTOR: usize = 16;
/// Fewest pixels of a strip that three vectors cover without reaching past it.
const MIN_PATCH: usize = 11;
/// Bytes of the two overlapping stores that write a row of a plane.
const HALF: usize = 8;

/// Which byte of three vectors goes where in each plane; proof of the instructions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    patch: usize,
    /// Of each channel: the place to take each byte from, or one past all of them for none.
    planes: [[u8; VECTOR]; CHANNELS],
    /// Brings the last bytes of a plane's row to the front.
    tail: [u8; VECTOR],
}

impl Tables {
    /// `None` without NEON, or for patches that three vectors do not cover.
    pub(super) fn detect(patch: usize) -> Option<Self> {
        let fits = (MIN_PATCH..=VECTOR).contains(&patch);
        if !fits || !std::arch::is_aarch64_feature_detected!("neon") {
            return None;
        }
        // the third vector ends with the strip, and may overlap the second
        let overlap = VECTOR * CHANNELS - patch * CHANNELS;
        let mut planes = [[0xff; VECTOR]; CHANNELS];
        for (channel, places) in planes.iter_mut().enumerate() {
            let bytes = (channel..patch * CHANNELS).step_by(CHANNELS);
            for (place, byte) in places.iter_mut().zip(bytes) {
                *place = (if byte < 2 * VECTOR { byte } else { byte + overlap }) as u8;
            }
        }
        let tail = std::array::from_fn(|place| ((patch - HALF + place) % VECTOR) as u8);
        Some(Self { patch, planes, tail })
    }

    /// As [`super::Splitter::split_row`].
    pub(super) fn split_row(&self, row: &[u8], places: Places, out: &mut [u8]) {
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { self.split_with_neon(row, places, out) }
    }

    #[target_feature(enable = "neon")]
    fn split_with_neon(&self, row: &[u8], places: Places, out: &mut [u8]) {
        assert!(self.patch >= MIN_PATCH);
        let strip_bytes = self.patch * CHANNELS;
        let planes = [load(&self.planes[0]), load(&self.planes[1]), load(&self.planes[2])];
        let tail = load(&self.tail);
        for (strip, start) in row.chunks_exact(strip_bytes).zip(places.starts()) {
            let out = &mut out[start..][..2 * places.stride + self.patch];
            // SAFETY: a strip has at least 33 bytes: 32 from its beginning and 16 before its end
            // are inside; the loads need no alignment.
            let bytes = unsafe {
                let begin = strip.as_ptr();
                uint8x16x3_t(
                    vld1q_u8(begin),
                    vld1q_u8(begin.add(VECTOR)),
                    vld1q_u8(begin.add(strip_bytes - VECTOR)),
                )
            };
            for (channel, table) in planes.into_iter().enumerate() {
                let plane = vqtbl3q_u8(bytes, table);
                // SAFETY: a row of a plane has `patch` bytes, 8 at least, and lies in `out`.
                unsafe {
                    let begin = out.as_mut_ptr().add(channel * places.stride);
                    if self.patch == VECTOR {
                        vst1q_u8(begin, plane);
                    } else {
                        vst1_u8(begin, vget_low_u8(plane));
                        let last = vqtbl1q_u8(plane, tail);
                        vst1_u8(begin.add(self.patch - HALF), vget_low_u8(last));
                    }
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn load(bytes: &[u8; VECTOR]) -> uint8x16_t {
    // SAFETY: the array has the 16 bytes of a vector; the load needs no alignment.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}
