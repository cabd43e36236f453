//! The format of a picture by its first bytes; labels and file names are never believed.

use crate::error::MediaError;

/// A format that we decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ImageFormat {
    /// JPEG: baseline, progressive, grey, CMYK.
    Jpeg,
    /// PNG and APNG.
    Png,
    /// WebP: lossy, lossless, animated.
    WebP,
    /// GIF.
    Gif,
    /// Windows bitmap.
    Bmp,
    /// TIFF.
    Tiff,
    /// AVIF; of a sequence, its still.
    Avif,
}

/// First bytes of the formats that we decode.
const SIGNATURES: [(&[u8], ImageFormat); 6] = [
    (b"\xff\xd8\xff", ImageFormat::Jpeg),
    (b"\x89PNG\r\n\x1a\n", ImageFormat::Png),
    (b"GIF87a", ImageFormat::Gif),
    (b"GIF89a", ImageFormat::Gif),
    (b"II\x2a\x00", ImageFormat::Tiff),
    (b"MM\x00\x2a", ImageFormat::Tiff),
];

/// First bytes that people send by mistake, for the error text.
const STRANGERS: [(&[u8], &str); 14] = [
    (b"%PDF", "a PDF document"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document, perhaps an SVG drawing"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<!doctype", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"\x00\x00\x01\x00", "a Windows icon"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"II\x2b\x00", "a BigTIFF image"),
    (b"MM\x00\x2b", "a BigTIFF image"),
    (b"{", "JSON text"),
];

/// Most names of a file that are looked at.
const MAX_BRANDS: usize = 32;

impl ImageFormat {
    /// The format of `bytes`.
    ///
    /// # Errors
    /// `Empty`, or `UnsupportedFormat` with what the bytes look like.
    pub fn of(bytes: &[u8]) -> Result<Self, MediaError> {
        if bytes.is_empty() {
            return Err(MediaError::Empty);
        }
        let known = SIGNATURES.iter().find(|(signature, _)| bytes.starts_with(signature));
        if let Some((_, format)) = known {
            return Ok(*format);
        }
        if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            return Ok(Self::WebP);
        }
        if is_bitmap(bytes) {
            return Ok(Self::Bmp);
        }
        if is_avif(bytes) {
            return Ok(Self::Avif);
        }
        Err(MediaError::UnsupportedFormat { found: stranger(bytes) })
    }

    /// Its usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
            Self::Tiff => "TIFF",
            Self::Avif => "AVIF",
        }
    }
}

/// "BM" alone also begins plain words, so the length of the second header must be a known one too.
fn is_bitmap(bytes: &[u8]) -> bool {
    let header_bytes = bytes.get(14..18).map(|field| [field[0], field[1], field[2], field[3]]);
    bytes.starts_with(b"BM")
        && matches!(
            header_bytes.map(u32::from_le_bytes),
            Some(12 | 16 | 40 | 52 | 56 | 64 | 108 | 124)
        )
}

/// The name may stand first or among those that the file is compatible with.
fn is_avif(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return false };
    let length = (u32::from_be_bytes(*length) as usize).saturating_sub(4).min(rest.len());
    let brands = rest[..length].as_chunks::<4>().0;
    matches!(brands, [kind, brands @ ..] if kind == b"ftyp"
        && brands.iter().take(MAX_BRANDS).any(|brand| matches!(brand, b"avif" | b"avis")))
}

fn stranger(bytes: &[u8]) -> &'static str {
    let text = bytes.trim_ascii_start();
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    if let Some((_, found)) = STRANGERS.iter().find(|(start, _)| text.starts_with(start)) {
        return found;
    }
    if bytes.get(4..8) == Some(b"ftyp") {
        return match bytes.get(8..12) {
            Some(b"heic" | b"heix" | b"mif1" | b"heif" | b"hevc") => "a HEIC image",
            _ => "an MP4 or QuickTime video",
        };
    }
    let start = &bytes[..bytes.len().min(256)];
    let is_text = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~' | 0x80..);
    if start.iter().all(is_text) && std::str::from_utf8(start).is_ok_and(|text| !text.is_empty()) {
        return "plain text";
    }
    "unknown binary data"
}

#[cfg(test)]
mod tests {
    use super::{ImageFormat, MediaError};

    #[test]
    fn each_signature_is_recognised_whatever_follows() {
        for (signature, format) in super::SIGNATURES {
            assert_eq!(ImageFormat::of(&[signature, b"rest"].concat()), Ok(format));
        }
        assert_eq!(ImageFormat::of(b"RIFF\x10\0\0\0WEBPVP8L"), Ok(ImageFormat::WebP));
        assert_eq!(ImageFormat::of(b"\0\0\0\x10ftypavif\0\0\0\0"), Ok(ImageFormat::Avif));
        let among_others = b"\0\0\0\x18ftypmif1\0\0\0\0miafavif";
        assert_eq!(ImageFormat::of(among_others), Ok(ImageFormat::Avif));
    }

    #[test]
    fn foreign_data_is_named_in_the_error() {
        let cases: [(&[u8], &str); 8] = [
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
            (b"\n <?xml version='1.0'?><svg/>", "an XML document, perhaps an SVG drawing"),
            (b"%PDF-1.7", "a PDF document"),
            (b"\0\0\0\x14ftypheic\0\0\0\0mif1", "a HEIC image"),
            (b"\0\0\0\x1cftypisom\0\0\0\0", "an MP4 or QuickTime video"),
            (b"BMW is a car maker, not a bitmap", "plain text"),
            (b"\xff\xd8", "unknown binary data"),
            (b"\x01\x02\x03", "unknown binary data"),
        ];
        for (bytes, found) in cases {
            assert_eq!(ImageFormat::of(bytes), Err(MediaError::UnsupportedFormat { found }));
        }
        assert_eq!(ImageFormat::of(b""), Err(MediaError::Empty));
    }
}
