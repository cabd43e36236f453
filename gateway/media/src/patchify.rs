//! Frames cut into patch rows, in the order the model's patch embedding and projector read them.

use crate::types::{GridThw, PatchLayout, Patches, RgbFrame};

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
    let grid = grid_of(frame, layout, 1);
    let mut bytes = vec![0; frame.pixels.len()];
    write_slice(&[frame], layout, &mut bytes);
    Patches { bytes, grid, frames_per_patch: 1 }
}

/// Patch rows of a clip, each `[channel, frame, row, column]` bytes; a last incomplete temporal
/// patch repeats its last frame.
///
/// # Panics
/// When there is no frame, when frames differ in size, or as [`patchify_still`].
pub fn patchify_clip(frames: &[RgbFrame], layout: PatchLayout) -> Patches {
    let first = frames.first().expect("invariant: a clip has at least one frame");
    let per_patch = layout.temporal_patch_size as usize;
    let slices = frames.len().div_ceil(per_patch);
    let grid = grid_of(first, layout, slices as u32);
    let slice_bytes = first.pixels.len() * per_patch;
    let mut bytes = vec![0; slice_bytes * slices];
    for (chunk, out) in frames.chunks(per_patch).zip(bytes.chunks_exact_mut(slice_bytes)) {
        let last = chunk.len() - 1;
        let slice: Vec<&RgbFrame> = (0..per_patch).map(|tau| &chunk[tau.min(last)]).collect();
        assert!(slice.iter().all(|frame| frame.size == first.size), "frames of one clip differ");
        write_slice(&slice, layout, out);
    }
    Patches { bytes, grid, frames_per_patch: layout.temporal_patch_size }
}

fn grid_of(frame: &RgbFrame, layout: PatchLayout, t: u32) -> GridThw {
    let (size, factor) = (frame.size, layout.factor());
    assert!(
        size.width.is_multiple_of(factor) && size.height.is_multiple_of(factor),
        "frame of {}x{} is not a multiple of {factor}",
        size.width,
        size.height
    );
    GridThw { t, h: size.height / layout.patch_size, w: size.width / layout.patch_size }
}

/// Writes one temporal patch row over all of its frames: the whole grid of one `t`.
fn write_slice(frames: &[&RgbFrame], layout: PatchLayout, out: &mut [u8]) {
    let patch = layout.patch_size as usize;
    let merge = layout.merge_size as usize;
    let width = frames[0].size.width as usize;
    let row_bytes = width * CHANNELS;
    let plane = patch * patch;
    let patch_bytes = CHANNELS * frames.len() * plane;
    let patches_wide = width / patch;
    for (tau, frame) in frames.iter().enumerate() {
        for (y, row) in frame.pixels.chunks_exact(row_bytes).enumerate() {
            let (grid_row, in_patch) = (y / patch, y % patch);
            let (block_row, in_block) = (grid_row / merge, grid_row % merge);
            for (grid_column, strip) in row.chunks_exact(patch * CHANNELS).enumerate() {
                let (block_column, across) = (grid_column / merge, grid_column % merge);
                let index = block_row * merge * patches_wide
                    + (block_column * merge + in_block) * merge
                    + across;
                let start = index * patch_bytes + tau * plane + in_patch * patch;
                split_channels(strip, &mut out[start..], frames.len() * plane, patch);
            }
        }
    }
}

/// Copies `patch` interleaved pixels into three planes that lie `plane_stride` bytes apart.
fn split_channels(strip: &[u8], out: &mut [u8], plane_stride: usize, patch: usize) {
    let (red, rest) = out.split_at_mut(plane_stride);
    let (green, blue) = rest.split_at_mut(plane_stride);
    let targets = red[..patch].iter_mut().zip(&mut green[..patch]).zip(&mut blue[..patch]);
    for (pixel, ((r, g), b)) in strip.chunks_exact(CHANNELS).zip(targets) {
        (*r, *g, *b) = (pixel[0], pixel[1], pixel[2]);
    }
}

#[cfg(test)]
mod tests;
