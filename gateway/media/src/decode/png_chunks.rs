//! The chunks of a PNG that are wanted before decoding: size, and EXIF wherever it stands.

use super::RawHeader;
use super::orientation::Orientation;
use crate::error::MediaError;
use crate::types::ImageSize;

/// Bytes of the signature.
const SIGNATURE: usize = 8;

/// Size and orientation. EXIF may also follow the image data.
pub(super) fn read_header(bytes: &[u8]) -> Result<RawHeader, MediaError> {
    let cut = |reason: &str| MediaError::Truncated { format: "PNG", reason: reason.into() };
    let mut chunks = Chunks { rest: bytes.get(SIGNATURE..).unwrap_or_default() };
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
    let exif = chunks.find(|(kind, _)| kind == b"eXIf");
    let orientation = exif.map(|(_, block)| Orientation::from_exif_block(block));
    Ok(RawHeader { size, orientation: orientation.unwrap_or_default() })
}

/// Type and data of each whole chunk; checksums are the decoder's matter.
struct Chunks<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Chunks<'a> {
    type Item = ([u8; 4], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = u32::from_be_bytes(*self.rest.first_chunk()?) as usize;
        let kind = *self.rest.get(4..8)?.first_chunk()?;
        let data = self.rest.get(8..length.checked_add(8)?)?;
        self.rest = self.rest.get(length + 12..).unwrap_or_default();
        Some((kind, data))
    }
}
