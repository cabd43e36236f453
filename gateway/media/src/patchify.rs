//! Frames cut into patch rows, in the order the model's patch embedding and projector read them.

mod split;

use crate::resize::{Resizer, RowSource};
use crate::types::{GridThw, ImageSize, PatchLayout, Patches, RgbFrame};
use split::{Places, Splitter};
use std::ops::DerefMut;

/// Colour channels of a frame.
const CHANNELS: usize = 3;

/// Patch rows of one still, each `[channel, row, column]` bytes: the second temporal copy that the
/// model's patch embedding expects is left to the worker.
///
/// Rows come merge block by merge block (top to bottom, left to right), inside a block row by row.
///
/// # Panics
/// When a side of the frame is not a multiple of [`PatchLayout::factor`], which the plan of a still
/// rules out.
pub fn patchify_still(frame: &RgbFrame, layout: PatchLayout) -> Patches {
    patchify_resized(frame, &Resizer::new(frame.size, frame.size), layout)
}

/// The same of a frame at the resizer's target size, without the resized frame between: its rows
/// are cut up while they are fresh.
///
/// # Panics
/// As [`patchify_still`], and when the resizer was made for another size than the frame's.
pub fn patchify_resized(frame: &RgbFrame, resizer: &Resizer, layout: PatchLayout) -> Patches {
    let mut slice = TemporalPatch::new(resizer.target(), layout, 1);
    slice.add(frame, resizer);
    Patches { grid: slice.grid(), bytes: slice.finish(), frames_per_patch: 1 }
}

/// Patch rows of a clip, each `[channel, frame, row, column]` bytes; a last incomplete temporal
/// patch repeats its last frame.
///
/// # Panics
/// When there is no frame, when frames differ in size, or as [`patchify_still`].
pub fn patchify_clip(frames: &[RgbFrame], layout: PatchLayout) -> Patches {
    let first = frames.first().expect("invariant: a clip has at least one frame");
    let resizer = Resizer::new(first.size, first.size);
    let per_patch = layout.temporal_patch_size;
    let mut bytes = Vec::new();
    for chunk in frames.chunks(per_patch as usize) {
        let mut slice = TemporalPatch::new(first.size, layout, per_patch);
        chunk.iter().for_each(|frame| slice.add(frame, &resizer));
        bytes.extend(slice.finish());
    }
    let t = frames.len().div_ceil(per_patch as usize) as u32;
    let grid = GridThw { t, ..grid_of(first.size, layout) };
    Patches { bytes, grid, frames_per_patch: per_patch }
}

/// The whole grid of one temporal patch, filled frame by frame, in a buffer of its own or in one
/// that was lent.
#[derive(Debug)]
pub struct TemporalPatch<B = Vec<u8>> {
    size: ImageSize,
    layout: PatchLayout,
    num_frames: u32,
    num_added: u32,
    bytes: B,
    splitter: Splitter,
}

impl TemporalPatch {
    /// An empty one, for frames of that target size.
    ///
    /// # Panics
    /// When a side is not a multiple of [`PatchLayout::factor`].
    pub fn new(size: ImageSize, layout: PatchLayout, num_frames: u32) -> Self {
        Self::in_buffer(size, layout, num_frames, vec![0; patch_bytes(size, layout, num_frames)])
    }
}

impl<B: DerefMut<Target = [u8]>> TemporalPatch<B> {
    /// The same in a buffer of [`patch_bytes`] bytes, all of which will be written.
    ///
    /// # Panics
    /// As [`TemporalPatch::new`], and when the buffer has another length.
    pub fn in_buffer(size: ImageSize, layout: PatchLayout, num_frames: u32, bytes: B) -> Self {
        assert_eq!(bytes.len(), patch_bytes(size, layout, num_frames), "buffer of another length");
        let splitter = Splitter::new(layout.patch_size as usize);
        Self { size, layout, num_frames, num_added: 0, bytes, splitter }
    }

    /// Rows and columns of patches.
    pub fn grid(&self) -> GridThw {
        grid_of(self.size, self.layout)
    }

    /// Whether all its frames are there.
    pub fn is_full(&self) -> bool {
        self.num_added == self.num_frames
    }

    /// Adds the next frame, resized on the way.
    ///
    /// # Panics
    /// When it is full, or when the resizer was made for other sizes.
    pub fn add(&mut self, frame: &RgbFrame, resizer: &Resizer) {
        self.check_next(resizer);
        let mut y = 0;
        resizer.each_row(frame, |row| {
            self.write_row(y, row);
            y += 1;
        });
        self.num_added += 1;
    }

    /// The same for a frame whose rows come a few at a time.
    ///
    /// # Errors
    /// Those of the rows; the frame does not count then.
    ///
    /// # Panics
    /// As [`TemporalPatch::add`].
    pub(crate) fn add_rows<R: RowSource>(
        &mut self,
        rows: &mut R,
        resizer: &Resizer,
    ) -> Result<(), R::Error> {
        self.check_next(resizer);
        let mut y = 0;
        resizer.each_row_of(rows, |row| {
            self.write_row(y, row);
            y += 1;
        })?;
        self.num_added += 1;
        Ok(())
    }

    fn check_next(&self, resizer: &Resizer) {
        assert!(!self.is_full(), "a temporal patch of {} frames is full", self.num_frames);
        assert_eq!(resizer.target(), self.size, "frames of one clip differ");
    }

    /// The patch rows; missing frames repeat the last one.
    ///
    /// # Panics
    /// When no frame was added.
    pub fn finish(mut self) -> B {
        assert!(self.num_added > 0, "a temporal patch without a frame");
        let plane = (self.layout.patch_size as usize).pow(2);
        let last = (self.num_added as usize - 1) * plane;
        let frames = plane * self.num_frames as usize;
        for channel in self.bytes.chunks_exact_mut(frames) {
            let (given, missing) = channel.split_at_mut(last + plane);
            missing.chunks_exact_mut(plane).for_each(|out| out.copy_from_slice(&given[last..]));
        }
        self.bytes
    }

    /// Puts one row of pixels where it belongs in each patch of its grid row.
    fn write_row(&mut self, y: usize, row: &[u8]) {
        let patch = self.layout.patch_size as usize;
        let merge = self.layout.merge_size as usize;
        let plane = patch * patch;
        let stride = plane * self.num_frames as usize;
        let patch_bytes = CHANNELS * stride;
        let (grid_row, in_patch) = (y / patch, y % patch);
        let (block_row, in_block) = (grid_row / merge, grid_row % merge);
        let patches_wide = self.size.width as usize / patch;
        let places = Places {
            first: (block_row * merge * patches_wide + in_block * merge) * patch_bytes
                + self.num_added as usize * plane
                + in_patch * patch,
            merge,
            patch_bytes,
            stride,
        };
        self.splitter.split_row(row, places, &mut self.bytes);
    }
}

/// Bytes of one temporal patch of frames of that size.
///
/// # Panics
/// When a side is not a multiple of [`PatchLayout::factor`].
pub fn patch_bytes(size: ImageSize, layout: PatchLayout, num_frames: u32) -> usize {
    let plane = (layout.patch_size as usize).pow(2);
    grid_of(size, layout).patches() as usize * CHANNELS * num_frames as usize * plane
}

fn grid_of(size: ImageSize, layout: PatchLayout) -> GridThw {
    let factor = layout.factor();
    assert!(
        size.width.is_multiple_of(factor) && size.height.is_multiple_of(factor),
        "frame of {}x{} is not a multiple of {factor}",
        size.width,
        size.height
    );
    GridThw { t: 1, h: size.height / layout.patch_size, w: size.width / layout.patch_size }
}

#[cfg(test)]
mod tests;
