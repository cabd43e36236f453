//! Still-image bytes to an upright RGB frame: format by content, size guard, orientation, alpha.

pub mod avif;
mod chunks;
mod format;
mod jpeg;
mod orientation;
mod pixels;
mod raster;
mod tiff_tags;

pub(crate) use chunks::{webp_canvas, webp_frames};
pub use format::ImageFormat;
pub(crate) use jpeg::JpegRows;

use crate::error::MediaError;
use crate::types::{ImageSize, RgbFrame};
use orientation::Orientation;

/// What is known of a picture before any pixel is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// Size as displayed, orientation applied; both sides at least 1.
    pub size: ImageSize,
    /// The format found in the bytes, whatever their label said.
    pub format: ImageFormat,
}

/// What one picture may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Most pixels that a header may declare. Decoding takes 3 to 9 bytes of memory for each, a
    /// TIFF of 16 bits up to 16.
    pub max_pixels: u64,
}

impl Default for DecodeLimits {
    /// 64 million pixels: above a 50 megapixel camera, below 200 MB for the frame.
    fn default() -> Self {
        Self { max_pixels: 64_000_000 }
    }
}

/// The size and format of a picture, from its header alone.
///
/// # Errors
/// As [`decode_image`], but for what only the pixels can tell.
pub fn read_header(bytes: &[u8]) -> Result<ImageHeader, MediaError> {
    let format = ImageFormat::of(bytes)?;
    let raw = RawHeader::read(bytes, format)?;
    Ok(ImageHeader { size: raw.orientation.turned(raw.size), format })
}

/// The picture as displayed: the first frame of an animation, orientation applied, transparency
/// composited over white, grey and palettes expanded, 16 bits cut to 8, colour profiles ignored.
/// AVIF is decoded in a process of its own, by way of [`avif::AvifPlan`], and refused here.
///
/// # Errors
/// [`MediaError`]; `TooManyPixels` comes before anything is decoded. No input panics.
pub fn decode_image(bytes: &[u8], limits: &DecodeLimits) -> Result<RgbFrame, MediaError> {
    let (format, raw) = checked_header(bytes, limits)?;
    let frame = match format {
        ImageFormat::Jpeg => jpeg::decode(bytes, raw.size)?,
        ImageFormat::Avif => return Err(avif::not_here()),
        _ => raster::decode(bytes, format, raw.size)?,
    };
    Ok(raw.orientation.apply(frame))
}

/// The rows of a picture, if it can be had a few rows at a time, upright as it is stored: a JPEG of
/// grey or colour, mostly.
///
/// # Errors
/// As [`decode_image`].
pub(crate) fn open_rows<'a>(
    bytes: &'a [u8],
    limits: &DecodeLimits,
) -> Result<Option<JpegRows<'a>>, MediaError> {
    let (format, raw) = checked_header(bytes, limits)?;
    if format != ImageFormat::Jpeg || raw.orientation != Orientation::default() {
        return Ok(None);
    }
    JpegRows::open(bytes, raw.size)
}

fn checked_header(
    bytes: &[u8],
    limits: &DecodeLimits,
) -> Result<(ImageFormat, RawHeader), MediaError> {
    let format = ImageFormat::of(bytes)?;
    let raw = RawHeader::read(bytes, format)?;
    if raw.size.pixels() > limits.max_pixels {
        return Err(MediaError::TooManyPixels { size: raw.size, limit: limits.max_pixels });
    }
    Ok((format, raw))
}

/// A header as stored: the size before the orientation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RawHeader {
    size: ImageSize,
    orientation: Orientation,
}

impl RawHeader {
    fn read(bytes: &[u8], format: ImageFormat) -> Result<Self, MediaError> {
        let header = match format {
            ImageFormat::Jpeg => jpeg::read_header(bytes)?,
            ImageFormat::Avif => avif::read_header(bytes)?,
            _ => raster::read_header(bytes, format)?,
        };
        if header.size.width == 0 || header.size.height == 0 {
            return Err(MediaError::Unreadable {
                format: format.name(),
                reason: format!("its size is {}x{}", header.size.width, header.size.height),
            });
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests;
