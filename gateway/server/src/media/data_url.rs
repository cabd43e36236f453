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
    trimmed(url).as_bytes().get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"data:"))
}

/// The most bytes that can be inside, from the length of the text.
pub fn most_bytes(url: &str) -> u64 {
    let length = url.len() as u64;
    let is_base64 = parted(url).is_some_and(|(head, _)| is_base64(head));
    if is_base64 { length / 4 * 3 } else { length }
}

/// The bytes inside, in base64 or escaped. The media type is not looked at: what the bytes are
/// decides later.
///
/// # Errors
/// `InvalidRequest` for what is no `data:` URL or holds nothing, `TooLarge` above `max_bytes`.
///
/// Source: RFC 2397 for the parts, the URL standard for what stands around them.
pub fn decode(url: &str, max_bytes: u64) -> Result<Vec<u8>, GatewayError> {
    let (head, data) =
        parted(url).ok_or_else(|| invalid("the data: URL has no comma before its data".into()))?;
    let bytes = if is_base64(head) {
        from_base64(data, max_bytes)?
    } else {
        unescaped(data, |_| true, max_bytes)
            .map_err(|refusal| refusal.told(max_bytes, |letters| letters))?
    };
    if bytes.is_empty() {
        return Err(invalid("the data: URL holds no data".into()));
    }
    if bytes.len() as u64 > max_bytes {
        return Err(too_large(bytes.len() as u64, max_bytes));
    }
    Ok(bytes)
}

/// The URL without what may stand before and after it.
fn trimmed(url: &str) -> &str {
    url.trim_matches(|letter| letter <= ' ')
}

/// What the data is, and the data; `None` if no comma parts them.
fn parted(url: &str) -> Option<(&str, &str)> {
    let (head, data) = trimmed(url).get(5..)?.split_once(',')?;
    // a fragment goes on to the end, whatever is in it
    (!head.contains('#')).then_some((head, data))
}

fn is_base64(head: &str) -> bool {
    head.split(';').skip(1).any(|part| part.trim().eq_ignore_ascii_case("base64"))
}

fn from_base64(data: &str, max_bytes: u64) -> Result<Vec<u8>, GatewayError> {
    let max_letters = max_bytes.saturating_mul(4) / 3 + 4;
    // nearly all are plain; only what is not pays for a second look
    if data.len() as u64 <= max_letters
        && let Ok(bytes) = STANDARD.decode(data)
    {
        return Ok(bytes);
    }
    let letters = unescaped(data, |letter| !letter.is_ascii_whitespace(), max_letters)
        .map_err(|refusal| refusal.told(max_bytes, |letters| letters / 4 * 3))?;
    // the two alphabets differ in two letters, and no valid text uses letters of both
    let is_url_safe = letters.iter().any(|letter| matches!(letter, b'-' | b'_'));
    let engine = if is_url_safe { &URL_SAFE } else { &STANDARD };
    let bytes = engine.decode(letters);
    bytes.map_err(|error| invalid(format!("the data: URL is not valid base64: {error}")))
}

/// Why data could not be read.
enum Unread {
    /// A `%` before anything but two hexadecimal digits.
    Escape,
    /// More is kept than was allowed: so many.
    Longer(u64),
}

impl Unread {
    fn told(self, max_bytes: u64, bytes_of: fn(u64) -> u64) -> GatewayError {
        match self {
            Self::Escape => {
                invalid("a % in the data: URL is not followed by two hexadecimal digits".into())
            }
            Self::Longer(letters) => too_large(bytes_of(letters), max_bytes),
        }
    }
}

/// What is kept of the data, its escapes undone, up to a fragment; lines may break anywhere.
fn unescaped(data: &str, is_kept: fn(&u8) -> bool, max: u64) -> Result<Vec<u8>, Unread> {
    let is_break = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r');
    let mut raw = data.bytes().take_while(|byte| *byte != b'#').filter(|byte| !is_break(byte));
    let (mut kept, mut num_kept) = (Vec::new(), 0);
    while let Some(mut byte) = raw.next() {
        if byte == b'%' {
            let mut digit = || raw.next().and_then(|digit| char::from(digit).to_digit(16));
            let (Some(high), Some(low)) = (digit(), digit()) else { return Err(Unread::Escape) };
            byte = (high * 16 + low) as u8;
        }
        if is_kept(&byte) {
            num_kept += 1;
            if num_kept <= max {
                kept.push(byte);
            }
        }
    }
    if num_kept > max { Err(Unread::Longer(num_kept)) } else { Ok(kept) }
}

fn invalid(message: String) -> GatewayError {
    let mut error = GatewayError::new(ErrorKind::InvalidRequest, message);
    error.code = "invalid_data_url";
    error
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
            "data:image/png;base64,%2B%2f%2F+AQ%3d%3D",
            "data:image/png;base64,+/%\n2F+%20AQ==%0A",
            " \r\ndata:image/png;base64,+//+AQ==#a,fragment%",
            "data:image/png;name=a%2Cb;base64 ,+//+AQ==\n",
            "data:,%fb%FF%fE%01",
            "data:text/plain;x=base64,%FB\n%F\tF%FE%01#",
        ] {
            assert_eq!(decoded(url).as_deref(), Ok(bytes.as_slice()), "{url}");
        }
    }

    #[test]
    fn what_holds_no_data_is_refused() {
        for url in [
            "data:image/png;base64",
            "data:image/png%2Cabc",
            "data:#image/png;base64,AQ==",
            "data:image/png,",
            "data:image/png,#abc",
            "data:image/png,%",
            "data:image/png,100%ab%g0",
            "data:image/png;base64,AQ%3",
            "data:image/png;base64,AQ==?a=1",
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
        // however it is written
        let escaped = |bytes: usize| format!("data:,{}", "%00".repeat(bytes));
        assert_eq!(decoded(&escaped(1000)).map(|bytes| bytes.len()), Ok(1000));
        assert_eq!(decoded(&escaped(1001)), Err(ErrorKind::TooLarge));
        let wide = |bytes: usize| url(bytes).replace('B', "%42").replace("wc", "w \n c");
        assert!(wide(1000).len() > 2000);
        assert_eq!(decoded(&wide(1000)).map(|bytes| bytes.len()), Ok(1000));
        assert_eq!(decoded(&wide(1001)), Err(ErrorKind::TooLarge));
        assert_eq!(most_bytes(&url(999)), (13 + 1332) / 4 * 3);
        assert!(most_bytes(&format!("data:,{}", "a".repeat(1000))) >= 1000);
    }
}
