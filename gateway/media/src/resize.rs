//! The one resampling filter: bicubic with antialiasing in 8 bits, equal to the reference's bytes.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod scalar;
mod weights;

use crate::types::{ImageSize, RgbFrame};
use weights::AxisWeights;

/// Bytes of a pixel.
const CHANNELS: usize = 3;

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

impl Kernels {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(proof) = avx2::Avx2::detect() {
            return Self::Avx2(proof);
        }
        Self::Scalar
    }
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
        assert_eq!(frame.size, self.source, "frame of another size");
        assert_eq!(frame.pixels.len() as u64, frame.size.pixels() * CHANNELS as u64);
        let pixels = match (&self.horizontal, &self.vertical) {
            (None, None) => frame.pixels.clone(),
            (Some(axis), None) => self.narrow_all(&frame.pixels, axis),
            (None, Some(axis)) => self.lower_all(&frame.pixels, axis),
            (Some(across), Some(down)) => self.both(&frame.pixels, across, down),
        };
        RgbFrame { size: self.target, pixels }
    }

    fn source_row_bytes(&self) -> usize {
        self.source.width as usize * CHANNELS
    }

    fn target_row_bytes(&self) -> usize {
        self.target.width as usize * CHANNELS
    }

    /// The horizontal pass alone.
    fn narrow_all(&self, pixels: &[u8], axis: &AxisWeights) -> Vec<u8> {
        let row_bytes = self.target_row_bytes();
        let mut out = vec![0; row_bytes * self.source.height as usize];
        for (pair, target) in out.chunks_mut(2 * row_bytes).enumerate() {
            self.narrow_pair(pixels, 2 * pair, target, axis);
        }
        out
    }

    /// The vertical pass alone.
    fn lower_all(&self, pixels: &[u8], axis: &AxisWeights) -> Vec<u8> {
        let row_bytes = self.target_row_bytes();
        let mut out = vec![0; row_bytes * self.target.height as usize];
        for (index, target) in out.chunks_exact_mut(row_bytes).enumerate() {
            let start = axis.starts[index] as usize;
            self.lower(
                |tap| &pixels[(start + tap) * row_bytes..][..row_bytes],
                target,
                axis,
                index,
            );
        }
        out
    }

    /// Both passes, row by row, keeping only the narrowed rows that the vertical window still needs.
    fn both(&self, pixels: &[u8], across: &AxisWeights, down: &AxisWeights) -> Vec<u8> {
        let row_bytes = self.target_row_bytes();
        // rows are narrowed two at a time, from an even number on, so a pair never wraps around
        let capacity = (down.longest() + 2).next_multiple_of(2);
        let mut ring = vec![0; capacity * row_bytes];
        let mut out = vec![0; row_bytes * self.target.height as usize];
        let mut narrowed = 0;
        for (index, target) in out.chunks_exact_mut(row_bytes).enumerate() {
            let start = down.starts[index] as usize;
            let end = start + down.counts[index] as usize;
            narrowed = narrowed.max(start & !1);
            while narrowed < end {
                let rows = 2.min(self.source.height as usize - narrowed);
                let slot = &mut ring[narrowed % capacity * row_bytes..][..rows * row_bytes];
                self.narrow_pair(pixels, narrowed, slot, across);
                narrowed += rows;
            }
            let row = |tap| &ring[(start + tap) % capacity * row_bytes..][..row_bytes];
            self.lower(row, target, down, index);
        }
        out
    }

    /// Narrows one or two rows, as many as `target` holds, from row `first` on.
    fn narrow_pair(&self, pixels: &[u8], first: usize, target: &mut [u8], axis: &AxisWeights) {
        let source_bytes = self.source_row_bytes();
        let rest = &pixels[first * source_bytes..];
        match self.kernels {
            Kernels::Scalar => {
                let rows = target.chunks_exact_mut(self.target_row_bytes());
                for (source, target) in rest.chunks_exact(source_bytes).zip(rows) {
                    scalar::horizontal_row(source, target, axis);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Kernels::Avx2(proof) => proof.horizontal_rows(rest, source_bytes, target, axis),
        }
    }

    /// Writes target row `index` of the vertical pass; `row` gives the rows of its window.
    fn lower<'a>(
        &self,
        row: impl Fn(usize) -> &'a [u8],
        target: &mut [u8],
        axis: &AxisWeights,
        index: usize,
    ) {
        let weights = axis.row(index);
        let rows: Vec<&[u8]> = (0..weights.len()).map(row).collect();
        match self.kernels {
            Kernels::Scalar => scalar::vertical_row(&rows, target, weights, axis.precision),
            #[cfg(target_arch = "x86_64")]
            Kernels::Avx2(proof) => proof.vertical_row(&rows, target, weights, axis.precision),
        }
    }
}

#[cfg(test)]
mod tests;
