//! All formats but JPEG, through the decoders of the `image` crate.

use super::RawHeader;
use super::chunks;
use super::format::ImageFormat;
use super::orientation::Orientation;
use super::pixels::{self, Layout};
use super::tiff_tags;
use crate::error::MediaError;
use crate::types::{ImageSize, RgbFrame};
use image::codecs::{
    bmp::BmpDecoder, gif::GifDecoder, png::PngDecoder, tiff::TiffDecoder, webp::WebPDecoder,
};
use image::error::{ImageFormatHint, LimitError, LimitErrorKind};
use image::{ColorType, ImageDecoder, ImageError, ImageResult, Limits};
use std::io::{Cursor, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes a decoder may allocate besides those that follow from the declared size: profiles, text,
/// directories.
const OVERHEAD_BYTES: u64 = 32 << 20;
/// Widest pixel that a decoder holds: four samples of 16 bits, in its own and in our buffer.
const DECODER_BYTES_PER_PIXEL: u64 = 16;

/// TIFF compressions that only pack rows: none, three for fax, LZW, deflate old and new, PackBits.
const PLAIN_COMPRESSIONS: [u16; 8] = [1, 2, 3, 4, 5, 8, 32_946, 32_773];

/// Size and orientation as stored.
pub(super) fn read_header(bytes: &[u8], format: ImageFormat) -> Result<RawHeader, MediaError> {
    if format == ImageFormat::Png {
        return chunks::read_png_header(bytes);
    }
    if format == ImageFormat::Tiff {
        check_compression(bytes)?;
    }
    let header = guarded(format, || {
        let decoder = open(bytes, format)?;
        let (width, height) = decoder.dimensions();
        // what cannot be read there is no reason to refuse the picture
        let orientation = match format {
            // its own reader allocates whatever length the chunk claims
            ImageFormat::WebP => Some(chunks::webp_orientation(bytes)),
            ImageFormat::Tiff => Some(Orientation::from_exif_block(bytes)),
            _ => None,
        };
        let size = ImageSize { width, height };
        Ok(RawHeader { size, orientation: orientation.unwrap_or_default() })
    })?;
    let lossy = (format == ImageFormat::WebP).then(|| chunks::webp_lossy_size(bytes)).flatten();
    if lossy.is_some_and(|frame| frame.pixels() > header.size.pixels()) {
        return Err(contradiction(format));
    }
    Ok(header)
}

/// The picture as stored; of an animation, its first frame.
pub(super) fn decode(
    bytes: &[u8],
    format: ImageFormat,
    size: ImageSize,
) -> Result<RgbFrame, MediaError> {
    let (color, samples) = guarded(format, || {
        let mut decoder = open(bytes, format)?;
        decoder.set_limits(limits(size.pixels()))?;
        if decoder.dimensions() != (size.width, size.height) {
            let error = LimitError::from_kind(LimitErrorKind::DimensionError);
            return Err(ImageError::Limits(error));
        }
        let color = decoder.color_type();
        let mut samples = vec![0; decoder.total_bytes() as usize];
        decoder.read_image_boxed(&mut samples)?;
        Ok((color, samples))
    })?;
    let (layout, is_wide) = match color {
        ColorType::L8 => (Layout::Grey, false),
        ColorType::La8 => (Layout::GreyAlpha, false),
        ColorType::Rgb8 => (Layout::Rgb, false),
        ColorType::Rgba8 => (Layout::Rgba, false),
        ColorType::L16 => (Layout::Grey, true),
        ColorType::La16 => (Layout::GreyAlpha, true),
        ColorType::Rgb16 => (Layout::Rgb, true),
        ColorType::Rgba16 => (Layout::Rgba, true),
        other => {
            let feature = format!("samples of type {other:?}");
            return Err(MediaError::UnsupportedFeature { format: format.name(), feature });
        }
    };
    let samples = if is_wide { pixels::high_bytes(samples) } else { samples };
    let pixels = pixels::to_rgb(samples, layout);
    if pixels.len() as u64 != size.pixels() * 3 {
        return Err(contradiction(format));
    }
    Ok(RgbFrame { size, pixels })
}

/// Refuses a TIFF that holds another picture format: that brings a size of its own, which its
/// decoder believes without asking the limits.
fn check_compression(bytes: &[u8]) -> Result<(), MediaError> {
    match tiff_tags::values(bytes, tiff_tags::COMPRESSION)
        .find(|value| !value.is_some_and(|method| PLAIN_COMPRESSIONS.contains(&method)))
    {
        None => Ok(()),
        Some(method) => Err(MediaError::UnsupportedFeature {
            format: "TIFF",
            feature: match method {
                Some(6 | 7) => "JPEG compression".into(),
                Some(method) => format!("compression {method}"),
                None => "a malformed compression tag".into(),
            },
        }),
    }
}

fn contradiction(format: ImageFormat) -> MediaError {
    let reason = "its data and its header disagree on the size".into();
    MediaError::Unreadable { format: format.name(), reason }
}

fn limits(pixels: u64) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(OVERHEAD_BYTES + pixels * DECODER_BYTES_PER_PIXEL);
    limits
}

fn open(bytes: &[u8], format: ImageFormat) -> ImageResult<Box<dyn ImageDecoder + '_>> {
    let reader = Cursor::new(bytes);
    Ok(match format {
        ImageFormat::Png => Box::new(PngDecoder::with_limits(reader, limits(0))?),
        ImageFormat::WebP => Box::new(WebPDecoder::new(reader)?),
        ImageFormat::Gif => Box::new(GifDecoder::new(reader)?),
        ImageFormat::Bmp => Box::new(BmpDecoder::new(reader)?),
        ImageFormat::Tiff => Box::new(TiffDecoder::new(reader)?),
        ImageFormat::Jpeg | ImageFormat::Avif => {
            let hint = ImageFormatHint::Name(format.name().into());
            return Err(ImageError::Unsupported(hint.into()));
        }
    })
}

/// Runs a decoder; an error, or a panic in it on hostile bytes, becomes ours.
fn guarded<T>(format: ImageFormat, work: impl FnOnce() -> ImageResult<T>) -> Result<T, MediaError> {
    let format = format.name();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| translated(format, error)),
        Err(_) => {
            let reason = "its data makes no sense to the decoder".into();
            Err(MediaError::Unreadable { format, reason })
        }
    }
}

fn translated(format: &'static str, error: ImageError) -> MediaError {
    match error {
        ImageError::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => {
            MediaError::Truncated { format, reason: "it ends before all pixels are there".into() }
        }
        ImageError::Unsupported(error) => {
            MediaError::UnsupportedFeature { format, feature: error.to_string() }
        }
        ImageError::Limits(_) => {
            let reason = "it asks for far more memory than its size needs".into();
            MediaError::Unreadable { format, reason }
        }
        other => {
            // the decoders put a line about the format before what they met
            let text = other.to_string();
            let reason = text
                .strip_prefix("Format error decoding ")
                .and_then(|rest| rest.split_once(": ").map(|(_, reason)| reason.to_owned()));
            MediaError::Unreadable { format, reason: reason.unwrap_or(text) }
        }
    }
}
