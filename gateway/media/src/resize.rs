//! The one resampling filter: bicubic with antialiasing in 8 bits, equal to the reference's bytes.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(accepts_avx512)]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
mod weights;

use crate::types::{ImageSize, RgbFrame};
use std::convert::Infallible;
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

/// A prepared change of size, for many frames.
#[derive(Clone, Debug)]
pub struct Resizer {
    source: ImageSize,
    target: ImageSize,
    /// `None` where the width stays.
    horizontal: Option<Across>,
    /// `None` where the height stays.
    vertical: Option<AxisWeights>,
    kernels: Kernels,
}

/// The horizontal pass.
#[derive(Clone, Debug)]
enum Across {
    /// On bands that are laid out in columns.
    Columns(AxisWeights),
    /// On rows as they are.
    #[cfg(accepts_avx512)]
    Rows(avx512::Lanes),
}

/// The instruction set in use, chosen once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    /// Plain Rust.
    Scalar,
    /// 256-bit integer vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    /// 512-bit integer vectors.
    #[cfg(accepts_avx512)]
    Avx512(avx512::Avx512),
    /// 128-bit integer vectors of 64-bit ARM.
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
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
            horizontal: axis(source.width, target.width).map(|axis| kernels.across(axis)),
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
        let mut rows = FrameRows { rest: &frame.pixels, row_bytes: self.source_row_bytes() };
        let Ok(()) = self.each_row_of(&mut rows, give);
    }

    /// The same for rows that come a few at a time; all of them are asked for, in order.
    ///
    /// # Errors
    /// Those of the rows.
    pub(crate) fn each_row_of<R: RowSource>(
        &self,
        source: &mut R,
        mut give: impl FnMut(&[u8]),
    ) -> Result<(), R::Error> {
        let mut tile = Tile::default();
        match (&self.horizontal, &self.vertical) {
            (None, None) => {
                let row_bytes = self.target_row_bytes();
                self.each_band(source, |rows| rows.chunks_exact(row_bytes).for_each(&mut give))
            }
            (Some(across), None) => {
                let row_bytes = self.target_row_bytes();
                let mut band = vec![0; BAND * row_bytes];
                self.each_band(source, |rows| {
                    let narrowed = &mut band[..rows.len() / self.source_row_bytes() * row_bytes];
                    self.narrow_band(rows, across, &mut tile, narrowed);
                    narrowed.chunks_exact(row_bytes).for_each(&mut give);
                })
            }
            (None, Some(down)) => {
                self.shorten(source, down, |rows, slot| slot.copy_from_slice(rows), give)
            }
            (Some(across), Some(down)) => {
                let narrow = |rows: &[u8], slot: &mut [u8]| {
                    self.narrow_band(rows, across, &mut tile, slot);
                };
                self.shorten(source, down, narrow, give)
            }
        }
    }

    /// Bytes of its tables: far more for a panorama than for a photo.
    pub fn bytes(&self) -> usize {
        let across = self.horizontal.as_ref().map_or(0, |across| match across {
            Across::Columns(axis) => axis.bytes(),
            #[cfg(accepts_avx512)]
            Across::Rows(lanes) => lanes.bytes(),
        });
        size_of::<Self>() + across + self.vertical.as_ref().map_or(0, AxisWeights::bytes)
    }

    /// The size of the frames taken.
    pub fn source(&self) -> ImageSize {
        self.source
    }

    /// The size of the rows given.
    pub fn target(&self) -> ImageSize {
        self.target
    }

    fn source_row_bytes(&self) -> usize {
        self.source.width as usize * CHANNELS
    }

    fn target_row_bytes(&self) -> usize {
        self.target.width as usize * CHANNELS
    }

    /// All rows, `BAND` at a time.
    fn each_band<R: RowSource>(
        &self,
        source: &mut R,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), R::Error> {
        let height = self.source.height as usize;
        for first in (0..height).step_by(BAND) {
            take(source.rows(BAND.min(height - first))?);
        }
        Ok(())
    }

    /// The vertical pass over rows that `narrow` makes of bands of source rows; only those that the
    /// vertical window still needs are kept.
    fn shorten<R: RowSource>(
        &self,
        source: &mut R,
        down: &AxisWeights,
        mut narrow: impl FnMut(&[u8], &mut [u8]),
        mut give: impl FnMut(&[u8]),
    ) -> Result<(), R::Error> {
        let row_bytes = self.target_row_bytes();
        let height = self.source.height as usize;
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
                let count = BAND.min(height - next);
                let slot = &mut window[kept * row_bytes..][..count * row_bytes];
                narrow(source.rows(count)?, slot);
                next += count;
            }
            let rows = &window[(start - first) * row_bytes..];
            self.kernels.weighted_rows(rows, down.row(index), down.precision, &mut row);
            give(&row);
        }
        Ok(())
    }

    /// Narrows a band of rows, `BAND` at most.
    fn narrow_band(&self, band: &[u8], across: &Across, tile: &mut Tile, target: &mut [u8]) {
        let (source_bytes, target_bytes) = (self.source_row_bytes(), self.target_row_bytes());
        let axis = match across {
            Across::Columns(axis) => axis,
            #[cfg(accepts_avx512)]
            Across::Rows(lanes) => return lanes.narrow(band, source_bytes, target, target_bytes),
        };
        let rows = band.chunks_exact(source_bytes);
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

/// Rows of a picture from top to bottom, each given once.
pub(crate) trait RowSource {
    /// Why rows may not come.
    type Error;

    /// The next `count` rows; the picture has at least as many left.
    ///
    /// # Errors
    /// What keeps them from coming.
    fn rows(&mut self, count: usize) -> Result<&[u8], Self::Error>;
}

/// Rows of a frame in memory.
struct FrameRows<'a> {
    rest: &'a [u8],
    row_bytes: usize,
}

impl RowSource for FrameRows<'_> {
    type Error = Infallible;

    fn rows(&mut self, count: usize) -> Result<&[u8], Infallible> {
        let (rows, rest) = self.rest.split_at(count * self.row_bytes);
        self.rest = rest;
        Ok(rows)
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
        #[cfg(accepts_avx512)]
        if let Some(proof) = avx512::Avx512::detect() {
            return Self::Avx512(proof);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(proof) = avx2::Avx2::detect() {
            return Self::Avx2(proof);
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(proof) = neon::Neon::detect() {
            return Self::Neon(proof);
        }
        Self::Scalar
    }

    fn across(self, axis: AxisWeights) -> Across {
        match self {
            #[cfg(accepts_avx512)]
            Self::Avx512(proof) => Across::Rows(avx512::Lanes::new(proof, &axis)),
            _ => Across::Columns(axis),
        }
    }

    /// One row made of the rows that follow each other in `source`.
    fn weighted_rows(self, source: &[u8], weights: &[i16], precision: u32, target: &mut [u8]) {
        let stride = target.len();
        match self {
            Self::Scalar => scalar::weighted_rows(source, stride, weights, precision, target),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.weighted_rows(source, stride, weights, precision, target),
            #[cfg(accepts_avx512)]
            Self::Avx512(proof) => proof.weighted_rows(source, stride, weights, precision, target),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(proof) => proof.weighted_rows(source, stride, weights, precision, target),
        }
    }

    fn narrow(self, columns: &[u8], axis: AxisPart<'_>, target: &mut [u8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.narrow(columns, axis, target),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(proof) => proof.narrow(columns, axis, target),
            _ => scalar::narrow(columns, axis, target),
        }
    }

    fn to_columns(self, rows: &[&[u8]], columns: &mut [u8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.to_columns(rows, columns),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(proof) => proof.to_columns(rows, columns),
            _ => scalar::to_columns(rows, columns),
        }
    }

    fn to_rows(self, columns: &[u8], place: Place, target: &mut [u8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(proof) => proof.to_rows(columns, place, target),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(proof) => proof.to_rows(columns, place, target),
            _ => scalar::to_rows(columns, place, target),
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
        #[cfg(accepts_avx512)]
        all.extend(avx512::Avx512::detect().map(Self::Avx512));
        #[cfg(target_arch = "aarch64")]
        all.extend(neon::Neon::detect().map(Self::Neon));
        all
    }
}

#[cfg(test)]
mod tests;
