//! Decoded planes of samples, read row by row.

use super::sequence::Sequence;
use crate::types::ImageSize;

/// How the planes of colour differences are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chroma {
    /// Grey: there are none.
    None,
    /// One sample for two by two pixels (4:2:0).
    Quarter,
    /// One sample for two pixels of a row (4:2:2).
    Half,
    /// One for each pixel (4:4:4).
    Full,
}

impl Chroma {
    /// By how many bits columns and rows are shifted.
    pub(super) fn shifts(self) -> (u32, u32) {
        match self {
            Self::None | Self::Full => (0, 0),
            Self::Half => (1, 0),
            Self::Quarter => (1, 1),
        }
    }
}

/// Planes Y, U, V one after the other without gaps: bytes, or 16-bit little-endian words.
#[derive(Debug)]
pub(super) struct Planes {
    pub(super) size: ImageSize,
    pub(super) depth: u8,
    pub(super) chroma: Chroma,
    /// Whether samples use all values, as the coded picture itself says.
    pub(super) is_full: bool,
    pub(super) bytes: Vec<u8>,
}

impl Planes {
    /// Columns and rows of a plane of a picture of this size.
    pub(super) fn plane_size(size: ImageSize, chroma: Chroma, plane: usize) -> (usize, usize) {
        let (x, y) = if plane == 0 { (0, 0) } else { chroma.shifts() };
        let half = |side: u32, shift: u32| (side as usize + shift as usize) >> shift;
        (half(size.width, x), half(size.height, y))
    }

    /// How many planes there are.
    pub(super) fn count(chroma: Chroma) -> usize {
        if chroma == Chroma::None { 1 } else { 3 }
    }

    /// Bytes of all planes.
    pub(super) fn bytes(size: ImageSize, sequence: &Sequence) -> usize {
        let planes = 0..Self::count(sequence.chroma);
        let samples = planes.map(|plane| Self::plane_size(size, sequence.chroma, plane));
        samples.map(|(width, height)| width * height).sum::<usize>() * wide(sequence.depth)
    }

    /// Writes a row of a plane into `row`, which has its length.
    pub(super) fn row(&self, plane: usize, number: usize, row: &mut [u16]) {
        let (width, _) = Self::plane_size(self.size, self.chroma, plane);
        let before: usize = (0..plane)
            .map(|plane| Self::plane_size(self.size, self.chroma, plane))
            .map(|(width, height)| width * height)
            .sum();
        let sample = wide(self.depth);
        let bytes = &self.bytes[(before + number * width) * sample..][..width * sample];
        if sample == 1 {
            for (value, byte) in row.iter_mut().zip(bytes) {
                *value = u16::from(*byte);
            }
        } else {
            let most = (1 << self.depth) - 1;
            for (value, word) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = u16::from_le_bytes(*word).min(most);
            }
        }
    }
}

/// Bytes of a sample.
pub(super) fn wide(depth: u8) -> usize {
    if depth > 8 { 2 } else { 1 }
}
