//! JPEG: a walk over its markers, and decoding by libjpeg-turbo as the reference decodes.

use super::RawHeader;
use super::orientation::Orientation;
use super::pixels;
use crate::error::MediaError;
use crate::types::{ImageSize, RgbFrame};
use turbojpeg::{Colorspace, DecompressHeader, Decompressor, Image, PixelFormat};

const FORMAT: &str = "JPEG";

/// Progressive files of sane encoders hold about ten scans; each costs a pass over the picture, so
/// that a small file of many thousands would hold a core for minutes.
const MAX_SCANS: u32 = 100;

/// Warnings of libjpeg-turbo after which the picture is still whole. All others, the early end of a
/// scan above all, mean that some of it is made up.
const HARMLESS_WARNINGS: [&str; 6] = [
    "extraneous bytes before marker",
    "Inconsistent progression sequence",
    "Unknown Adobe color transform code",
    "unknown JFIF revision number",
    "Invalid SOS parameters for sequential JPEG",
    "bad ICC marker",
];

/// Opens a segment that holds an XMP packet.
const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

/// Size and orientation, from the markers before the first scan.
pub(super) fn read_header(bytes: &[u8]) -> Result<RawHeader, MediaError> {
    let mut size = None;
    let (mut exif, mut xmp) = (None, None);
    for segment in Segments::of(bytes) {
        match segment.marker {
            0xc0..=0xcf if !matches!(segment.marker, 0xc4 | 0xc8 | 0xcc) => {
                size = size.or(Some(frame_size(segment.body)?));
            }
            0xe1 if segment.body.starts_with(b"Exif\0\0") => {
                exif = exif.or(Some(segment.body));
            }
            0xe1 if segment.body.starts_with(XMP) => xmp = Some(&segment.body[XMP.len()..]),
            0xda if size.is_none() => {
                return Err(unreadable("a scan comes before the frame header"));
            }
            0xd9 if size.is_none() => return Err(unreadable("it has no frame header")),
            0xd9 | 0xda => break,
            _ => {}
        }
    }
    let size = size.ok_or_else(|| truncated("it ends before the frame header"))?;
    Ok(RawHeader { size, orientation: Orientation::stated(exif, xmp) })
}

/// The picture as stored.
pub(super) fn decode(bytes: &[u8], size: ImageSize) -> Result<RgbFrame, MediaError> {
    // the end marker cannot stand in coded data, so the last two bytes mostly tell
    if !bytes.ends_with(b"\xff\xd9") && !Segments::of(bytes).any(|segment| segment.marker == 0xd9) {
        return Err(truncated("it ends inside a scan, without an end marker"));
    }
    let mut decompressor = Decompressor::new().map_err(failed)?;
    decompressor.set_scan_limit(MAX_SCANS).map_err(failed)?;
    let header = decompressor.read_header(bytes);
    if header.as_ref().is_err_and(is_harmless) {
        // the library's header call has no way to go on after a warning
        let tidy = with_tidy_header(bytes);
        let header = decompressor.read_header(&tidy).map_err(failed)?;
        return decode_scans(&mut decompressor, &tidy, header, size);
    }
    decode_scans(&mut decompressor, bytes, header.map_err(failed)?, size)
}

fn decode_scans(
    decompressor: &mut Decompressor,
    bytes: &[u8],
    header: DecompressHeader,
    size: ImageSize,
) -> Result<RgbFrame, MediaError> {
    let (width, height) = (size.width as usize, size.height as usize);
    if (header.width, header.height) != (width, height) {
        let (w, h) = (header.width, header.height);
        return Err(unreadable(format!("it declares two sizes, {width}x{height} and {w}x{h}")));
    }
    let is_cmyk = matches!(header.colorspace, Colorspace::CMYK | Colorspace::YCCK);
    let format = if is_cmyk { PixelFormat::CMYK } else { PixelFormat::RGB };
    let pitch = width * format.size();
    let mut samples = vec![0; pitch * height];
    let image = Image { pixels: samples.as_mut_slice(), width, pitch, height, format };
    match decompressor.decompress(bytes, image) {
        // a warning, unlike an error, comes after the whole picture was written
        Err(error) if !is_harmless(&error) => return Err(failed(error)),
        _ => {}
    }
    let pixels = if is_cmyk { pixels::inverted_cmyk_to_rgb(samples) } else { samples };
    Ok(RgbFrame { size, pixels })
}

fn failed(error: turbojpeg::Error) -> MediaError {
    match error {
        turbojpeg::Error::TurboJpegError(text) => unreadable(text),
        other => unreadable(other.to_string()),
    }
}

fn is_harmless(error: &turbojpeg::Error) -> bool {
    let text = error.to_string();
    HARMLESS_WARNINGS.iter().any(|warning| text.contains(warning))
}

/// The file without what makes the library warn before the first scan: bytes between segments, an
/// unheard-of JFIF revision, an unheard-of Adobe transform (which then counts as the usual one).
fn with_tidy_header(bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes[..2].to_vec();
    let mut segments = Segments::of(bytes);
    let mut components = 3;
    for Segment { marker, body } in segments.by_ref() {
        let length = (body.len() as u16 + 2).to_be_bytes();
        out.extend([0xff, marker, length[0], length[1]]);
        let start = out.len();
        out.extend(body);
        match marker {
            0xc0..=0xc3 => components = body.get(5).copied().unwrap_or(components),
            0xe0 if body.starts_with(b"JFIF\0") && body.len() >= 7 => out[start + 5] = 1,
            0xee if body.starts_with(b"Adobe") && body.len() >= 12 && body[11] > 2 => {
                out[start + 11] = if components == 4 { 2 } else { 1 };
            }
            0xda => break,
            _ => {}
        }
    }
    out.extend(segments.rest);
    out
}

/// Size in a frame header: precision, height, width, components.
fn frame_size(body: &[u8]) -> Result<ImageSize, MediaError> {
    let &[_precision, h1, h0, w1, w0, ..] = body else {
        return Err(truncated("its frame header is cut"));
    };
    Ok(ImageSize {
        width: u32::from(u16::from_be_bytes([w1, w0])),
        height: u32::from(u16::from_be_bytes([h1, h0])),
    })
}

fn unreadable(reason: impl Into<String>) -> MediaError {
    MediaError::Unreadable { format: FORMAT, reason: reason.into() }
}

fn truncated(reason: &str) -> MediaError {
    MediaError::Truncated { format: FORMAT, reason: reason.into() }
}

/// One marker with the body it announces; the coded data after a scan header is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment<'a> {
    marker: u8,
    body: &'a [u8],
}

/// The markers of a file in order; ends where the data ends or no longer makes sense.
struct Segments<'a> {
    rest: &'a [u8],
}

impl<'a> Segments<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        Self { rest: bytes.get(2..).unwrap_or_default() }
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        loop {
            // a marker is 0xff and a byte that is neither 0 (coded data) nor 0xff (padding)
            let at = self.rest.iter().position(|&byte| byte == 0xff)?;
            let marker = *self.rest.get(at + 1)?;
            self.rest = &self.rest[at + 1..];
            match marker {
                0x00 | 0xff => {}
                // restarts and TEM stand alone, inside coded data too
                0x01 | 0xd0..=0xd8 => self.rest = &self.rest[1..],
                0xd9 => return Some(Segment { marker, body: &[] }),
                _ => {
                    let &[high, low] = self.rest.get(1..)?.first_chunk()?;
                    let length = usize::from(u16::from_be_bytes([high, low]));
                    let body = self.rest.get(3..1 + length)?;
                    self.rest = &self.rest[1 + length..];
                    return Some(Segment { marker, body });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
