//! Pure pixel work: image bytes to frames, frames to the model's size, frames to patch rows.
//!
//! No sockets, clocks, threads or async here. The C library behind JPEG is reached only through
//! `decode::jpeg::scanlines`; besides there `unsafe` is allowed only in vector code.

pub mod animation;
pub mod decode;
pub mod error;
pub mod hash;
pub mod mp4;
pub mod patchify;
pub mod picture;
pub mod resize;
pub mod sampling;
pub mod types;

pub use error::MediaError;
pub use types::{
    ClipInfo, GridThw, ImageSize, MediaHash, PatchLayout, Patches, PixelNorm, RgbFrame,
};
