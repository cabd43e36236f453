//! Pure pixel work: image bytes to frames, frames to the model's size, frames to patch rows.
//!
//! No sockets, clocks, threads or async here. The C library behind JPEG is reached only through
//! `decode`; `unsafe` is allowed only in the resampler's SIMD.

pub mod decode;
pub mod error;
pub mod hash;
pub mod patchify;
pub mod resize;
pub mod sampling;
pub mod types;

pub use error::MediaError;
pub use types::{
    ClipInfo, GridThw, ImageSize, MediaHash, PatchLayout, Patches, PixelNorm, RgbFrame,
};
