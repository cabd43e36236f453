//! The chunks of PNG and WebP files that are wanted before decoding: PNG's size, and EXIF wherever
//! it stands. Lengths that the file does not hold are never believed.

use super::RawHeader;
use super::orientation::Orientation;
use crate::error::MediaError;
use crate::types::ImageSize;

/// Bytes before the first chunk of a PNG.
const PNG_START: usize = 8;
/// Bytes before the first chunk of a WebP: `RIFF`, a length, `WEBP`.
const WEBP_START: usize = 12;
/// Bytes of a chunk's length, and of its type.
const FIELD: usize = 4;

/// Size and orientation of a PNG. EXIF may also follow the image data.
pub(super) fn read_png_header(bytes: &[u8]) -> Result<RawHeader, MediaError> {
    let cut = |reason: &str| MediaError::Truncated { format: "PNG", reason: reason.into() };
    let mut chunks = PngChunks { rest: bytes.get(PNG_START..).unwrap_or_default() };
    let (kind, header) = chunks.next().ok_or_else(|| cut("it ends inside its header"))?;
    let &[w3, w2, w1, w0, h3, h2, h1, h0, ..] = header else {
        return Err(cut("its header is cut"));
    };
    if kind != *b"IHDR" {
        let reason = "it does not begin with a header".into();
        return Err(MediaError::Unreadable { format: "PNG", reason });
    }
    let size = ImageSize {
        width: u32::from_be_bytes([w3, w2, w1, w0]),
        height: u32::from_be_bytes([h3, h2, h1, h0]),
    };
    let (mut exif, mut xmp) = (None, None);
    for (kind, data) in chunks {
        match &kind {
            b"eXIf" => exif = exif.or(Some(data)),
            b"iTXt" => xmp = xmp_text(data).or(xmp),
            _ => {}
        }
    }
    Ok(RawHeader { size, orientation: Orientation::stated(exif, xmp) })
}

/// The XMP packet in a PNG's text chunk, if it is one that is not compressed.
fn xmp_text(data: &[u8]) -> Option<&[u8]> {
    // key, flag of compression and its method, then language and key again, each ended by a zero
    let rest = data.strip_prefix(b"XML:com.adobe.xmp\0\0")?.get(1..)?;
    let mut parts = rest.splitn(3, |byte| *byte == 0);
    parts.nth(2)
}

/// Orientation of a WebP, whose EXIF follows the image data.
pub(super) fn webp_orientation(bytes: &[u8]) -> Orientation {
    let chunks = WebpChunks { rest: bytes.get(WEBP_START..).unwrap_or_default() };
    let (mut exif, mut xmp) = (None, None);
    for (kind, data) in chunks {
        match &kind {
            b"EXIF" => exif = exif.or(Some(data)),
            b"XMP " => xmp = xmp.or(Some(data)),
            _ => {}
        }
    }
    Orientation::stated(exif, xmp)
}

/// The size of an animated WebP; `None` if the file is none.
pub(crate) fn webp_canvas(bytes: &[u8]) -> Option<ImageSize> {
    const ANIMATED: u8 = 2;
    let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..WEBP_START) == Some(b"WEBP");
    let mut chunks = WebpChunks { rest: bytes.get(WEBP_START..).filter(|_| is_webp)? };
    let (kind, data) = chunks.next()?;
    let &[flags, _, _, _, w0, w1, w2, h0, h1, h2] = data.first_chunk()?;
    let side = |bytes: [u8; 3]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]) + 1;
    let size = ImageSize { width: side([w0, w1, w2]), height: side([h0, h1, h2]) };
    (kind == *b"VP8X" && flags & ANIMATED > 0).then_some(size)
}

/// Of each frame of an animated WebP, the size that it gives itself if it is a lossy one.
pub(crate) fn webp_frames(bytes: &[u8]) -> impl Iterator<Item = Option<ImageSize>> {
    let chunks = WebpChunks { rest: bytes.get(WEBP_START..).unwrap_or_default() };
    chunks.filter(|(kind, _)| kind == b"ANMF").map(|(_, data)| animated_lossy_size(data))
}

/// Size that a frame's lossy data gives itself.
fn animated_lossy_size(frame: &[u8]) -> Option<ImageSize> {
    // place, size, duration and flags, then the frame's own chunks
    let mut frame = WebpChunks { rest: frame.get(16..)? };
    lossy_size(frame.find(|(kind, _)| kind == b"VP8 ")?.1)
}

fn lossy_size(data: &[u8]) -> Option<ImageSize> {
    // three bytes of frame tag, three of start code, 14 bits of width and height each
    let &[w0, w1, h0, h1] = data.get(6..)?.first_chunk()?;
    let side = |low, high| u32::from(u16::from_le_bytes([low, high]) & 0x3fff);
    Some(ImageSize { width: side(w0, w1), height: side(h0, h1) })
}

/// Size that the first lossy frame of a WebP gives itself, which may contradict the file's header:
/// its decoder compares them only after decoding.
pub(super) fn webp_lossy_size(bytes: &[u8]) -> Option<ImageSize> {
    let mut chunks = WebpChunks { rest: bytes.get(WEBP_START..)? };
    match chunks.find(|(kind, _)| matches!(kind, b"ANMF" | b"VP8 "))? {
        (kind, data) if kind == *b"ANMF" => animated_lossy_size(data),
        (_, data) => lossy_size(data),
    }
}

/// Type and data of each whole chunk: length, type, data, checksum. Checking is the decoder's part.
struct PngChunks<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for PngChunks<'a> {
    type Item = ([u8; FIELD], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = u32::from_be_bytes(*self.rest.first_chunk()?) as usize;
        let kind = *self.rest.get(FIELD..)?.first_chunk()?;
        let data = self.rest.get(2 * FIELD..)?.get(..length)?;
        self.rest = self.rest.get(3 * FIELD + length..).unwrap_or_default();
        Some((kind, data))
    }
}

/// Type and data of each whole chunk: type, length, data, a byte of padding after an odd length.
struct WebpChunks<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for WebpChunks<'a> {
    type Item = ([u8; FIELD], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let kind = *self.rest.first_chunk()?;
        let length = u32::from_le_bytes(*self.rest.get(FIELD..)?.first_chunk()?) as usize;
        let data = self.rest.get(2 * FIELD..)?.get(..length)?;
        self.rest = self.rest.get(2 * FIELD + length.next_multiple_of(2)..).unwrap_or_default();
        Some((kind, data))
    }
}

#[cfg(test)]
mod tests {
    use super::{ImageSize, Orientation, webp_lossy_size, webp_orientation};

    const EXIF: &[u8] = b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0";

    fn webp(claimed: u32) -> Vec<u8> {
        let mut bytes = b"RIFF\0\0\0\0WEBP".to_vec();
        bytes.extend(b"VP8L\x03\0\0\0abc\0"); // an odd length, padded
        bytes.extend(b"EXIF");
        bytes.extend(claimed.to_le_bytes());
        bytes.extend(EXIF);
        bytes
    }

    #[test]
    fn exif_after_a_padded_chunk_is_found() {
        let six = Orientation::from_exif_value(6);
        assert_eq!(webp_orientation(&webp(EXIF.len() as u32)), six);
    }

    #[test]
    fn a_length_that_the_file_does_not_hold_is_not_believed() {
        for claimed in [EXIF.len() as u32 + 1, 1 << 30, u32::MAX] {
            assert_eq!(webp_orientation(&webp(claimed)), Orientation::default());
        }
        assert_eq!(webp_orientation(b"RIFF"), Orientation::default());
    }

    #[test]
    fn the_first_lossy_frame_tells_its_size_still_or_animated() {
        let size = Some(ImageSize { width: 0x1234, height: 0x0201 });
        let frame = b"VP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a\x34\x52\x01\x02";
        let still = [b"RIFF\0\0\0\0WEBPVP8X\x02\0\0\0ab".as_slice(), frame].concat();
        assert_eq!(webp_lossy_size(&still), size);
        let animated = [b"RIFF\0\0\0\0WEBPANMF\x22\0\0\0".as_slice(), &[0; 16], frame].concat();
        assert_eq!(webp_lossy_size(&animated), size);
        assert_eq!(webp_lossy_size(&webp(0)), None);
    }
}
