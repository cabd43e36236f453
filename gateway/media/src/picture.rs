//! A picture's file made into patch rows in one go: rows are resized and cut up as they are decoded.

use crate::decode::{DecodeLimits, JpegRows, decode_image, open_rows};
use crate::error::MediaError;
use crate::patchify::{TemporalPatch, patch_bytes};
use crate::resize::{Resizer, RowSource};
use crate::types::{GridThw, PatchLayout, Patches, RgbFrame};

/// What becomes of a picture, and how long it is wanted.
pub struct PictureJob<'a> {
    /// What it may cost.
    pub limits: &'a DecodeLimits,
    /// From its size as displayed to that at which it is cut up.
    pub resizer: &'a Resizer,
    /// How it is cut up.
    pub layout: PatchLayout,
    /// Asked now and then; the work is given up once it is false.
    pub is_wanted: &'a mut dyn FnMut() -> bool,
}

/// Patch rows of a picture at the resizer's target size; `None` if they are no longer wanted.
///
/// # Errors
/// As [`decode_image`].
///
/// # Panics
/// When a side of the target is not a multiple of [`PatchLayout::factor`], or the resizer is for
/// pictures of another size.
pub fn picture_patches(bytes: &[u8], job: PictureJob<'_>) -> Result<Option<Patches>, MediaError> {
    let mut rows = vec![0; patch_bytes(job.resizer.target(), job.layout, 1)];
    let grid = fill_patches(bytes, job, &mut rows)?;
    Ok(grid.map(|grid| Patches { grid, bytes: rows, frames_per_patch: 1 }))
}

/// Patch rows of a picture that was decoded elsewhere, at the resizer's target size.
///
/// # Panics
/// As [`picture_patches`].
pub fn frame_patches(frame: &RgbFrame, resizer: &Resizer, layout: PatchLayout) -> Patches {
    let mut bytes = vec![0; patch_bytes(resizer.target(), layout, 1)];
    let grid = fill_frame_patches(frame, resizer, layout, &mut bytes);
    Patches { grid, bytes, frames_per_patch: 1 }
}

/// The same into a buffer of [`patch_bytes`] bytes; gives the grid.
///
/// # Panics
/// As [`picture_patches`], and when the buffer has another length.
pub fn fill_frame_patches(
    frame: &RgbFrame,
    resizer: &Resizer,
    layout: PatchLayout,
    buffer: &mut [u8],
) -> GridThw {
    let mut slice = TemporalPatch::in_buffer(resizer.target(), layout, 1, buffer);
    let grid = slice.grid();
    slice.add(frame, resizer);
    grid
}

/// [`picture_patches`] into a buffer of [`patch_bytes`] bytes; gives the grid. What is in the buffer after
/// `None` or an error means nothing.
///
/// # Errors
/// As [`decode_image`].
///
/// # Panics
/// As [`picture_patches`], and when the buffer has another length.
pub fn fill_patches(
    bytes: &[u8],
    job: PictureJob<'_>,
    buffer: &mut [u8],
) -> Result<Option<GridThw>, MediaError> {
    let PictureJob { limits, resizer, layout, is_wanted } = job;
    let mut slice = TemporalPatch::in_buffer(resizer.target(), layout, 1, buffer);
    let grid = slice.grid();
    let Some(rows) = open_rows(bytes, limits)? else {
        let frame = decode_image(bytes, limits)?;
        return Ok(is_wanted().then(|| {
            slice.add(&frame, resizer);
            grid
        }));
    };
    assert_eq!(rows.size(), resizer.source(), "a picture of another size");
    let mut watched = Watched { rows, is_wanted };
    match slice.add_rows(&mut watched, resizer) {
        Err(Ended::Unwanted) => Ok(None),
        Err(Ended::Broken(error)) => Err(error),
        Ok(()) => watched.rows.finish().map(|()| Some(grid)),
    }
}

/// Rows that end when nobody wants them any more.
struct Watched<'a> {
    rows: JpegRows<'a>,
    is_wanted: &'a mut dyn FnMut() -> bool,
}

enum Ended {
    Unwanted,
    Broken(MediaError),
}

impl RowSource for Watched<'_> {
    type Error = Ended;

    fn rows(&mut self, count: usize) -> Result<&[u8], Ended> {
        if !(self.is_wanted)() {
            return Err(Ended::Unwanted);
        }
        self.rows.rows(count).map_err(Ended::Broken)
    }
}

#[cfg(test)]
mod tests;
