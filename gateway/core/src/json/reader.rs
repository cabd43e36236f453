//! The JSON grammar.

use super::{Json, JsonError, MAX_DEPTH, Number, Object};

/// Reads values one after the other.
pub(super) struct Reader<'a> {
    text: &'a str,
    position: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, position: 0 }
    }

    /// One value, and nothing after it.
    pub(super) fn document(mut self) -> Result<Json, JsonError> {
        let value = self.value(0)?;
        self.white_space();
        if self.position < self.text.len() {
            return Err(self.error("unexpected text after the value"));
        }
        Ok(value)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.position).copied()
    }

    fn error(&self, message: impl Into<String>) -> JsonError {
        error_at(self.text.as_bytes(), self.position, message)
    }

    fn unexpected(&self, wanted: &str) -> JsonError {
        match self.text.get(self.position..).and_then(|rest| rest.chars().next()) {
            Some(found) => self.error(format!("expected {wanted}, found {found:?}")),
            None => self.error(format!("expected {wanted}, found the end of the text")),
        }
    }

    fn white_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.position += 1;
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.white_space();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'n') => self.word("null", Json::Null),
            _ => Err(self.unexpected("a value")),
        }
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, JsonError> {
        if !self.text[self.position..].starts_with(word) {
            return Err(self.unexpected("a value"));
        }
        self.position += word.len();
        Ok(value)
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let end = number_end(self.text.as_bytes(), self.position)
            .ok_or_else(|| self.error("malformed number"))?;
        let literal = &self.text[self.position..end];
        self.position = end;
        Ok(Json::Number(Number(literal.into())))
    }

    fn deeper(&self, depth: usize) -> Result<usize, JsonError> {
        if depth == MAX_DEPTH {
            return Err(self.error(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        Ok(depth + 1)
    }

    fn array(&mut self, depth: usize) -> Result<Json, JsonError> {
        let depth = self.deeper(depth)?;
        self.position += 1;
        let mut items = Vec::new();
        self.white_space();
        if self.peek() == Some(b']') {
            self.position += 1;
            return Ok(Json::Array(items));
        }
        loop {
            items.push(self.value(depth)?);
            self.white_space();
            match self.peek() {
                Some(b',') => self.position += 1,
                Some(b']') => {
                    self.position += 1;
                    return Ok(Json::Array(items));
                }
                _ => return Err(self.unexpected("',' or ']'")),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        let depth = self.deeper(depth)?;
        self.position += 1;
        let mut object = Object::new();
        self.white_space();
        if self.peek() == Some(b'}') {
            self.position += 1;
            return Ok(Json::Object(object));
        }
        loop {
            self.white_space();
            if self.peek() != Some(b'"') {
                return Err(self.unexpected("a quoted key"));
            }
            let key = self.string()?;
            self.white_space();
            if self.peek() != Some(b':') {
                return Err(self.unexpected("':'"));
            }
            self.position += 1;
            let value = self.value(depth)?;
            object.insert(key, value);
            self.white_space();
            match self.peek() {
                Some(b',') => self.position += 1,
                Some(b'}') => {
                    self.position += 1;
                    return Ok(Json::Object(object));
                }
                _ => return Err(self.unexpected("',' or '}'")),
            }
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.position += 1;
        let mut out = String::new();
        loop {
            let rest = &self.text.as_bytes()[self.position..];
            let Some(plain) = plain_length(rest) else {
                self.position = self.text.len();
                return Err(self.error("unterminated string"));
            };
            out.push_str(&self.text[self.position..self.position + plain]);
            self.position += plain;
            match rest[plain] {
                b'"' => {
                    self.position += 1;
                    return Ok(out);
                }
                b'\\' => out.push(self.escape()?),
                _ => return Err(self.error("control character in a string")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        self.position += 1;
        let plain = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(),
            _ => return Err(self.unexpected("an escape")),
        };
        self.position += 1;
        Ok(plain)
    }

    fn unicode_escape(&mut self) -> Result<char, JsonError> {
        let first = self.hex4()?;
        let code = match first {
            0xd800..=0xdbff if self.text[self.position..].starts_with("\\u") => {
                self.position += 1;
                let second = self.hex4()?;
                if !(0xdc00..=0xdfff).contains(&second) {
                    return Err(self.error("lone surrogate in a string"));
                }
                0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
            }
            _ => first,
        };
        char::from_u32(code).ok_or_else(|| self.error("lone surrogate in a string"))
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.as_bytes().get(self.position + 1..self.position + 5);
        let code = digits
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .ok_or_else(|| self.error("malformed \\u escape"))?;
        self.position += 5;
        Ok(code)
    }
}

/// Where a number by the JSON grammar ends that begins at `start`.
pub(super) fn number_end(bytes: &[u8], start: usize) -> Option<usize> {
    let digits = |mut at: usize| {
        let from = at;
        while bytes.get(at).is_some_and(u8::is_ascii_digit) {
            at += 1;
        }
        (at > from).then_some(at)
    };
    let mut at = start + usize::from(bytes.get(start) == Some(&b'-'));
    at = if bytes.get(at) == Some(&b'0') { at + 1 } else { digits(at)? };
    if bytes.get(at) == Some(&b'.') {
        at = digits(at + 1)?;
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        at = digits(at + 1 + sign)?;
    }
    Some(at)
}

/// An error at a byte of the text.
pub(super) fn error_at(bytes: &[u8], position: usize, message: impl Into<String>) -> JsonError {
    let before = &bytes[..position.min(bytes.len())];
    let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    JsonError {
        message: message.into(),
        line: before.iter().filter(|&&byte| byte == b'\n').count() + 1,
        column: String::from_utf8_lossy(&before[line_start..]).chars().count() + 1,
    }
}

/// Bytes before the first that ends or interrupts a string; strings may be megabytes of base64, so
/// that blocks without any such byte are passed over together, and lines of text with an escape
/// each, so that the rest is read a word at a time.
fn plain_length(text: &[u8]) -> Option<usize> {
    let is_special = |byte: u8| (byte == b'"') | (byte == b'\\') | (byte < 0x20);
    let block = |block: &&[u8; 32]| !block.iter().fold(false, |any, &byte| any | is_special(byte));
    let passed = text.as_chunks::<32>().0.iter().take_while(block).count() * 32;
    let (words, rest) = text[passed..].as_chunks::<8>();
    for (place, word) in words.iter().enumerate() {
        let special = special_bytes(u64::from_le_bytes(*word));
        if special != 0 {
            return Some(passed + place * 8 + special.trailing_zeros() as usize / 8);
        }
    }
    let found = rest.iter().position(|&byte| is_special(byte))?;
    Some(passed + words.len() * 8 + found)
}

/// The high bit of the lowest byte that is a quote, a backslash or a control character; bits above
/// it mean nothing, no bit means that there is no such byte.
/// Source: "Determine if a word has a byte less than n", Bit Twiddling Hacks.
fn special_bytes(word: u64) -> u64 {
    const ONES: u64 = u64::MAX / 255;
    let less = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word;
    let equal = |byte: u8| less(word ^ (ONES * u64::from(byte)), 1);
    (less(word, 0x20) | equal(b'"') | equal(b'\\')) & (ONES * 0x80)
}
