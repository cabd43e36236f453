//! `data:` URLs to bytes, in every variant that clients send.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use crate::error::{ErrorKind, GatewayError};

const TOLERANT: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, TOLERANT);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, TOLERANT);

/// Whether the text claims to be a `data:` URL.
pub fn is_data_url(url: &str) -> bool {
    url.as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
}

/// The bytes inside. The media type is not looked at: what the bytes are decides later.
///
/// # Errors
/// `InvalidRequest` for what is not base64, `TooLarge` above `max_bytes`.
pub fn decode(url: &str, max_bytes: u64) -> Result<Vec<u8>, GatewayError> {
    let invalid = |message: String| {
        let mut error = GatewayError::new(ErrorKind::InvalidRequest, message);
        error.code = "invalid_data_url";
        error
    };
    let (head, payload) = url
        .get(5..)
        .and_then(|rest| rest.split_once(','))
        .ok_or_else(|| invalid("the data: URL has no comma before its data".into()))?;
    let is_base64 = head.split(';').skip(1).any(|part| part.trim().eq_ignore_ascii_case("base64"));
    if !is_base64 {
        return Err(invalid("data: URLs must be base64: write data:image/png;base64,...".into()));
    }
    if payload.len() as u64 / 4 * 3 > max_bytes + max_bytes / 8 + 16 {
        return Err(too_large(payload.len() as u64 / 4 * 3, max_bytes));
    }
    // nearly all are plain; only what is not pays for a second look
    let bytes = STANDARD
        .decode(payload)
        .or_else(|_| decode_unusual(payload))
        .map_err(|error| invalid(format!("the data: URL is not valid base64: {error}")))?;
    if bytes.is_empty() {
        return Err(invalid("the data: URL holds no data".into()));
    }
    if bytes.len() as u64 > max_bytes {
        return Err(too_large(bytes.len() as u64, max_bytes));
    }
    Ok(bytes)
}

/// Base64 with line breaks, or in the alphabet for URLs.
fn decode_unusual(payload: &str) -> Result<Vec<u8>, base64::DecodeError> {
    let letters: Vec<u8> = payload.bytes().filter(|letter| !letter.is_ascii_whitespace()).collect();
    // the two alphabets differ in two letters, and no valid text uses letters of both
    let is_url_safe = letters.iter().any(|letter| matches!(letter, b'-' | b'_'));
    let engine = if is_url_safe { &URL_SAFE } else { &STANDARD };
    engine.decode(letters)
}

/// The refusal of an item above the limit.
pub fn too_large(bytes: u64, max_bytes: u64) -> GatewayError {
    GatewayError::new(
        ErrorKind::TooLarge,
        format!("the media item has {bytes} bytes; at most {max_bytes} are allowed"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(url: &str) -> Result<Vec<u8>, ErrorKind> {
        decode(url, 1000).map_err(|error| error.kind)
    }

    #[test]
    fn spellings_of_the_same_bytes_are_the_same() {
        let bytes = [0xfb, 0xff, 0xfe, 0x01];
        for url in [
            "data:image/png;base64,+//+AQ==",
            "DATA:image/PNG;BASE64,+//+AQ==",
            "data:;base64,+//+AQ==",
            "data:image/jpeg;charset=utf-8;base64,+//+AQ==",
            "data:image/png;name=a.png;base64, +//+\r\nAQ==",
            "data:image/png;base64,+//+AQ",
            "data:image/png;base64,-__-AQ",
        ] {
            assert_eq!(decoded(url).as_deref(), Ok(bytes.as_slice()), "{url}");
        }
    }

    #[test]
    fn what_is_not_base64_is_refused() {
        for url in [
            "data:image/png;base64",
            "data:image/png,abc",
            "data:image/png;base64,",
            "data:image/png;base64, \n",
            "data:image/png;base64,@@@@",
            "data:image/png;base64,+/_-",
            "data:image/png;base64,AQ==AQ==",
        ] {
            assert_eq!(decoded(url), Err(ErrorKind::InvalidRequest), "{url}");
        }
    }

    #[test]
    fn the_limit_is_exact_and_checked_before_decoding() {
        let url = |bytes: usize| format!("data:;base64,{}", STANDARD.encode(vec![7; bytes]));
        assert_eq!(decoded(&url(1000)).map(|bytes| bytes.len()), Ok(1000));
        assert_eq!(decoded(&url(1001)), Err(ErrorKind::TooLarge));
        assert_eq!(decoded(&url(5000)), Err(ErrorKind::TooLarge));
    }
}
