//! The one resampling filter: bicubic with antialiasing in 8 bits, equal to the reference's bytes.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;
mod weights;

use crate::types::{ImageSize, RgbFrame};
use weights::{AxisPart, AxisWeights};

/// Bytes of a pixel.
const CHANNELS: usize = 3;
/// Rows that the horizontal pass takes together: a vector of bytes.
const BAND: usize = 32;
/// Target pixels that it makes of them at a time, so that their columns stay in the nearest cache.
const TILE: usize = 64;

/// A frame at another size.
///
/// # Panics
/// When a side of either size is 0.
///
/// Source: torch 2.11's uint8 `_upsample_bicubic2d_aa` without corner alignment, through which the
/// reference processor of transformers 5.24 resizes; equal in every byte.
pub fn resize(frame: &RgbFrame, target: ImageSize) -> RgbFrame {
    Resizer::new(frame.size, target).resize(frame)
}

/// A prepared change of size, for many frames of one clip.
#[derive(Clone, Debug)]
pub struct Resizer {
    source: ImageSize,
    target: ImageSize,
    /// `None` where the width stays.
    horizontal: Option<AxisWeights>,
    /// `None` where the height stays.
    vertical: Option<AxisWeights>,
    kernels: Kernels,
}

/// The instruction set in use, chosen once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    /// Plain Rust.
    Scalar,
    /// 256-bit integer vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
}

impl Resizer {
    /// Weights for frames of size `source` made into size `target`.
    ///
    /// # Panics
    /// When a side of either size is 0.
    pub fn new(source: ImageSize, target: ImageSize) -> Self {
        Self::with_kernels(source, target, Kernels::best())
    }

    fn with_kernels(source: ImageSize, target: ImageSize, kernels: Kernels) -> Self {
        for side in [source.width, source.height, target.width, target.height] {
            assert!(side > 0, "cannot resize {source:?} to {target:?}");
        }
        let axis = |from: u32, to: u32| (from != to).then(|| AxisWeights::new(from, to));
        Self {
            source,
            target,
            horizontal: axis(source.width, target.width),
            vertical: axis(source.height, target.height),
            kernels,
        }
    }

    /// The frame at the target size.
    ///
    /// # Panics
    /// When the frame is not of the size that this was made for, or its bytes do not fill it.
    pub fn resize(&self, frame: &RgbFrame) -> RgbFrame {
        let mut pixels = Vec::with_capacity(self.target_row_bytes() * self.target.height as usize);
        self.each_row(frame, |row| pixels.extend_from_slice(row));
        RgbFrame { size: self.target, pixels }
    }

    /// Gives the rows of the frame at the target size, from top to bottom, while they are fresh in
    /// the processor's cache.
    ///
    /// # Panics
    /// As [`Resizer::resize`].
    pub(crate) fn each_row(&self, frame: &RgbFrame, give: impl FnMut(&[u8])) {
        assert_eq!(frame.size, self.source, "frame of another size");
        assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * CHANNELS as u64);
        match (&self.horizontal, &self.vertical) {
            (None, None) => frame.pixels.chunks_exact(self.target_row_bytes()).for_each(give),
            (Some(axis), None) => self.narrow_all(&frame.pixels, axis, give),
            (None, Some(axis)) => {
                let row_bytes = self.target_row_bytes();
                let mut row = vec![0; row_bytes];
                let mut give = give;
                for index in 0..axis.starts.len() {
                    let window = &frame.pixels[axis.starts[index] as usize * row_bytes..];
                    let weights = axis.row(index);
                    self.kernels.weighted_rows(window, weights, axis.precision, &mut row);
                    give(&row);
                }
            }
            (Some(across), Some(down)) => self.both(&frame.pixels, across, down, give),
        }
    }

    /// The size of the rows given.
    pub(crate) fn target(&self) -> ImageSize {
        self.target
    }

    fn source_row_bytes(&self) -> usize {
        self.source.width as usize * CHANNELS
    }

    fn target_row_bytes(&self) -> usize {
        self.target.width as usize * CHANNELS
    }

    /// The horizontal pass alone.
    fn narrow_all(&self, pixels: &[u8], axis: &AxisWeights, give: impl FnMut(&[u8])) {
        let row_bytes = self.target_row_bytes();
        let height = self.source.height as usize;
        let mut tile = Tile::default();
        let mut band = vec![0; BAND * row_bytes];
        let mut give = give;
        for first in (0..height).step_by(BAND) {
            let rows = &mut band[..BAND.min(height - first) * row_bytes];
            self.narrow_band(pixels, first, axis, &mut tile, rows);
            rows.chunks_exact(row_bytes).for_each(&mut give);
        }
    }

    /// Both passes, keeping only the narrowed rows that the vertical window still needs.
    fn both(
        &self,
        pixels: &[u8],
        across: &AxisWeights,
        down: &AxisWeights,
        mut give: impl FnMut(&[u8]),
    ) {
        let row_bytes = self.target_row_bytes();
        let height = self.source.height as usize;
        let mut tile = Tile::default();
        // rows `first` to `next` of the narrowed picture
        let mut window = vec![0; (down.longest + BAND) * row_bytes];
        let (mut first, mut next) = (0, 0);
        let mut row = vec![0; row_bytes];
        for index in 0..down.starts.len() {
            let start = down.starts[index] as usize;
            let end = start + down.counts[index] as usize;
            while next < end {
                let kept = next.saturating_sub(start);
                window
                    .copy_within((next - kept - first) * row_bytes..(next - first) * row_bytes, 0);
                first = next - kept;
                let rows = BAND.min(height - next);
                let slot = &mut window[kept * row_bytes..][..rows * row_bytes];
                self.narrow_band(pixels, next, across, &mut tile, slot);
                next += rows;
            }
            let rows = &window[(start - first) * row_bytes..];
            self.kernels.weighted_rows(rows, down.row(index), down.precision, &mut row);
            give(&row);
        }
    }

    /// Narrows rows from row `first` on, as many as `target` holds, `BAND` at most.
    fn narrow_band(
        &self,
        pixels: &[u8],
        first: usize,
        axis: &AxisWeights,
        tile: &mut Tile,
        target: &mut [u8],
    ) {
        let (source_bytes, target_bytes) = (self.source_row_bytes(), self.target_row_bytes());
        let count = target.len() / target_bytes;
        let rows = pixels[first * source_bytes..].chunks_exact(source_bytes).take(count);
        let width = axis.starts.len();
        for start in (0..width).step_by(TILE) {
            let part = axis.part(start..width.min(start + TILE));
            let source = part.source();
            let (from, to) = (source.start * CHANNELS, source.end * CHANNELS);
            let strips: Vec<&[u8]> = rows.clone().map(|row| &row[from..to]).collect();
            tile.wide.resize((to - from) * BAND, 0);
            tile.narrow.resize(part.len() * CHANNELS * BAND, 0);
            self.kernels.to_columns(&strips, &mut tile.wide);
            self.kernels.narrow(&tile.wide, part, &mut tile.narrow);
            let place = Place { row_bytes: target_bytes, offset: start * CHANNELS };
            self.kernels.to_rows(&tile.narrow, place, target);
        }
    }
}

/// Where in the rows of a buffer a part of each row belongs.
#[derive(Clone, Copy)]
struct Place {
    /// Bytes of a whole row.
    row_bytes: usize,
    /// Bytes of a row before the part.
    offset: usize,
}

/// Scratch of the horizontal pass, which works on columns: there, as in the vertical pass, a pixel
/// is a weighted sum of neighbouring rows of bytes.
#[derive(Default)]
struct Tile {
    /// A part of `BAND` source rows in columns: `[pixel, channel, row]`.
    wide: Vec<u8>,
    /// What becomes of it: `TILE` pixels at most.
    narrow: Vec<u8>,
}

impl Kernels {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(proof) = avx2::Avx2::detect() {
            return Self::Avx2(proof);
        }
        Self::Scalar
    }

    /// One row made of the rows that follow each other in `source`.
    fn weighted_rows(self, source: &[u8], weights: &[i16], precision: u32, target: &mut [u8]) {
        let stride = target.len();
        match self {
            Self::Scalar => scalar::weighted_rows(source, stride, weights, precision, target),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.weighted_rows(source, stride, weights, precision, target),
        }
    }

    fn narrow(self, columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
        match self {
            Self::Scalar => scalar::narrow(columns, axis, target),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.narrow(columns, axis, target),
        }
    }

    fn to_columns(self, rows: &[&[u8]], columns: &mut [u8]) {
        match self {
            Self::Scalar => scalar::to_columns(rows, columns),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.to_columns(rows, columns),
        }
    }

    fn to_rows(self, columns: &[u8], place: Place, target: &mut [u8]) {
        match self {
            Self::Scalar => scalar::to_rows(columns, place, target),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.to_rows(columns, place, target),
        }
    }
}

#[cfg(test)]
impl Kernels {
    /// Every one that this machine runs.
    fn all() -> Vec<Self> {
        let mut all = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        all.extend(avx2::Avx2::detect().map(Self::Avx2));
        all
    }
}

#[cfg(test)]
mod tests;
