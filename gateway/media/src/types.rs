//! The vocabulary of media: sizes, frames, grids, patches.

/// Width and height in pixels, as displayed (rotation already applied).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageSize {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl ImageSize {
    /// Number of pixels.
    pub fn pixels(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }
}

/// A patch grid: temporal patches, rows, columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GridThw {
    /// Temporal patches.
    pub t: u32,
    /// Patch rows.
    pub h: u32,
    /// Patch columns.
    pub w: u32,
}

impl GridThw {
    /// Number of patches.
    pub fn patches(self) -> u64 {
        u64::from(self.t) * u64::from(self.h) * u64::from(self.w)
    }
}

/// How frames are cut into patch rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchLayout {
    /// Side of a patch in pixels.
    pub patch_size: u32,
    /// Frames in one temporal patch.
    pub temporal_patch_size: u32,
    /// Side of the square of patches that the projector merges into one token.
    pub merge_size: u32,
}

impl PatchLayout {
    /// Both sides of a target size must be multiples of this, in pixels.
    pub fn factor(self) -> u32 {
        self.patch_size * self.merge_size
    }
}

/// Normalisation the worker applies per channel on the 0..1 scale: `(x / 255 - mean) / std`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelNorm {
    /// Mean of R, G, B.
    pub mean: [f32; 3],
    /// Standard deviation of R, G, B.
    pub std: [f32; 3],
}

/// One picture: `height * width * 3` bytes, row by row, R G B interleaved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RgbFrame {
    /// Size in pixels.
    pub size: ImageSize,
    /// Interleaved bytes.
    pub pixels: Vec<u8>,
}

/// What is known of a clip before any frame is decoded.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipInfo {
    /// Display size (rotation and sample aspect of 1 applied).
    pub size: ImageSize,
    /// Frames in the stream; at least 1.
    pub num_frames: u64,
    /// Average frames a second; above 0.
    pub fps: f64,
    /// Seconds.
    pub duration_s: f64,
}

/// Patch rows of one media item, ready for the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patches {
    /// `grid.patches()` rows of `3 * frames_per_patch * patch_size^2` bytes.
    pub bytes: Vec<u8>,
    /// The grid.
    pub grid: GridThw,
    /// 1 for a still (the worker repeats it over time), else `temporal_patch_size`.
    pub frames_per_patch: u32,
}

/// SHA-256 over source bytes and every parameter that changes pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MediaHash(pub [u8; 32]);
