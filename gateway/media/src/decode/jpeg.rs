//! JPEG: a walk over its markers, and decoding by libjpeg-turbo as the reference decodes.

use super::RawHeader;
use super::orientation::Orientation;
use super::pixels;
use crate::error::MediaError;
use crate::types::{ImageSize, RgbFrame};
use turbojpeg::{Colorspace, Decompressor, Image, PixelFormat};

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

/// Size and orientation, from the markers before the first scan.
pub(super) fn read_header(bytes: &[u8]) -> Result<RawHeader, MediaError> {
    let mut size = None;
    let mut orientation = None;
    for segment in Segments::of(bytes) {
        match segment.marker {
            0xc0..=0xcf if !matches!(segment.marker, 0xc4 | 0xc8 | 0xcc) => {
                size = size.or(Some(frame_size(segment.body)?));
            }
            0xe1 if segment.body.starts_with(b"Exif\0\0") => {
                orientation.get_or_insert(Orientation::from_exif_block(segment.body));
            }
            0xda if size.is_none() => {
                return Err(unreadable("a scan comes before the frame header"));
            }
            0xd9 if size.is_none() => return Err(unreadable("it has no frame header")),
            0xd9 | 0xda => break,
            _ => {}
        }
    }
    let size = size.ok_or_else(|| truncated("it ends before the frame header"))?;
    Ok(RawHeader { size, orientation: orientation.unwrap_or_default() })
}

/// The picture as stored.
pub(super) fn decode(bytes: &[u8], size: ImageSize) -> Result<RgbFrame, MediaError> {
    if !Segments::of(bytes).any(|segment| segment.marker == 0xd9) {
        return Err(truncated("it ends inside a scan, without an end marker"));
    }
    let failed = |error: turbojpeg::Error| unreadable(error.to_string());
    let mut decompressor = Decompressor::new().map_err(failed)?;
    decompressor.set_scan_limit(MAX_SCANS).map_err(failed)?;
    let header = decompressor.read_header(bytes).map_err(failed)?;
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
    if let Err(error) = decompressor.decompress(bytes, image) {
        let text = error.to_string();
        if !HARMLESS_WARNINGS.iter().any(|warning| text.contains(warning)) {
            return Err(unreadable(text));
        }
    }
    let pixels = if is_cmyk { pixels::inverted_cmyk_to_rgb(&samples) } else { samples };
    Ok(RgbFrame { size, pixels })
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
mod tests {
    use super::{MediaError, Segments, read_header};

    #[test]
    fn markers_are_found_across_padding_restarts_and_stuffed_bytes() {
        let mut bytes = b"\xff\xd8".to_vec();
        bytes.extend(b"\xff\xff\xff\xfe\x00\x04\xff\xd9"); // padded comment that holds an end marker
        bytes.extend(b"junk\xff\xda\x00\x03\x01"); // bytes between segments, then a scan header
        bytes.extend(b"\x12\xff\x00\x34\xff\xd3\x56\xff\xff\xd9"); // coded data, then the end
        let markers: Vec<u8> = Segments::of(&bytes).map(|segment| segment.marker).take(3).collect();
        assert_eq!(markers, [0xfe, 0xda, 0xd9]);
    }

    #[test]
    fn a_file_cut_before_its_frame_header_is_truncated() {
        for bytes in [b"\xff\xd8\xff".as_slice(), b"\xff\xd8\xff\xc0\x00\x11\x08\x00"] {
            assert!(matches!(read_header(bytes), Err(MediaError::Truncated { .. })));
        }
    }

    #[test]
    fn a_scan_or_an_end_before_the_frame_header_is_unreadable() {
        for bytes in [b"\xff\xd8\xff\xda\x00\x02\x00".as_slice(), b"\xff\xd8\xff\xd9"] {
            assert!(matches!(read_header(bytes), Err(MediaError::Unreadable { .. })));
        }
    }
}
