//! JPEG: a walk over its markers, and decoding by libjpeg-turbo as the reference decodes.

mod scanlines;

use super::RawHeader;
use super::orientation::Orientation;
use super::pixels;
use crate::error::MediaError;
use crate::resize::RowSource;
use crate::types::{ImageSize, RgbFrame};
use scanlines::Scanlines;

const FORMAT: &str = "JPEG";

/// Rows that begin at a multiple of this the library writes past the processor's caches.
///
/// Source: `jdcolext-avx2.asm` of libjpeg-turbo 3, which stores with `vmovntdq` there.
const STREAMED: usize = 32;

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
    let mut scanlines = open(bytes, size)?;
    let mut samples = vec![0; scanlines.row_bytes() * size.height as usize];
    scanlines.read(&mut samples).map_err(unreadable)?;
    let is_cmyk = scanlines.is_cmyk();
    let pixels = if is_cmyk { pixels::inverted_cmyk_to_rgb(samples) } else { samples };
    Ok(RgbFrame { size, pixels })
}

fn open(bytes: &[u8], size: ImageSize) -> Result<Scanlines<'_>, MediaError> {
    // the end marker cannot stand in coded data, so the last two bytes mostly tell
    if !bytes.ends_with(b"\xff\xd9") && !Segments::of(bytes).any(|segment| segment.marker == 0xd9) {
        return Err(truncated("it ends inside a scan, without an end marker"));
    }
    let scanlines = Scanlines::open(bytes).map_err(unreadable)?;
    if scanlines.size() != (size.width, size.height) {
        let ((width, height), (w, h)) = ((size.width, size.height), scanlines.size());
        return Err(unreadable(format!("it declares two sizes, {width}x{height} and {w}x{h}")));
    }
    Ok(scanlines)
}

/// The picture as stored, a few rows at a time: they are used while they are fresh in the
/// processor's cache, and the whole frame never is in memory.
pub(crate) struct JpegRows<'a> {
    scanlines: Scanlines<'a>,
    band: Vec<u8>,
}

impl<'a> JpegRows<'a> {
    /// `None` for a picture whose samples are inks: it must be converted as a whole.
    pub(super) fn open(bytes: &'a [u8], size: ImageSize) -> Result<Option<Self>, MediaError> {
        let scanlines = open(bytes, size)?;
        Ok((!scanlines.is_cmyk()).then(|| Self { scanlines, band: Vec::new() }))
    }

    /// Columns and rows.
    pub(crate) fn size(&self) -> ImageSize {
        let (width, height) = self.scanlines.size();
        ImageSize { width, height }
    }

    /// Reads what is left, so that damage at the end does not go unnoticed.
    pub(crate) fn finish(mut self) -> Result<(), MediaError> {
        while self.scanlines.rows_left() > 0 {
            self.rows(1)?;
        }
        Ok(())
    }
}

impl RowSource for JpegRows<'_> {
    type Error = MediaError;

    fn rows(&mut self, count: usize) -> Result<&[u8], MediaError> {
        let length = count * self.scanlines.row_bytes();
        self.band.resize(length + STREAMED, 0);
        let place = beside_streaming(self.band.as_ptr().addr());
        let rows = &mut self.band[place..place + length];
        self.scanlines.read(rows).map_err(unreadable)?;
        Ok(rows)
    }
}

/// Bytes from `address` on after which rows begin so that the library leaves them in the caches.
fn beside_streaming(address: usize) -> usize {
    // with an odd address and rows of even length no row begins at a multiple
    (STREAMED + 1 - address % STREAMED) % STREAMED
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
