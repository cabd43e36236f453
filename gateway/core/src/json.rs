//! JSON values that keep what a client wrote: key order and every digit of a number.

use indexmap::IndexMap;
use std::fmt::Write as _;

/// Nesting deeper than this is refused.
pub const MAX_DEPTH: usize = 128;

/// An object with its keys in the order of the text; a repeated key keeps its first place and its
/// last value, as in Python.
pub type Object = IndexMap<String, Json>;

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum Json {
    /// `null`
    #[default]
    Null,
    /// `true`, `false`
    Bool(bool),
    /// A number by its literal.
    Number(Number),
    /// A string.
    String(String),
    /// A list.
    Array(Vec<Json>),
    /// An object.
    Object(Object),
}

/// A number as it was written; always valid JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Number(Box<str>);

/// Where and why a text is not JSON.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} at line {line}, column {column}")]
pub struct JsonError {
    /// What was found.
    pub message: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
}

impl Number {
    /// The number that `text` spells, if it is one by the JSON grammar.
    pub fn from_literal(text: &str) -> Option<Self> {
        let end = number_end(text.as_bytes(), 0)?;
        (end == text.len()).then(|| Self(text.into()))
    }

    /// The text as written.
    pub fn literal(&self) -> &str {
        &self.0
    }

    /// Whether it is written without fraction and exponent.
    pub fn is_integer(&self) -> bool {
        !self.0.contains(['.', 'e', 'E'])
    }

    /// The nearest double; infinite if out of range.
    pub fn as_f64(&self) -> f64 {
        self.0.parse().unwrap_or(f64::NAN)
    }

    /// The value if it is an integer in range, also when written as `5.0` or `5e0`.
    pub fn as_i64(&self) -> Option<i64> {
        if self.is_integer() {
            return self.0.parse().ok();
        }
        let value = self.as_f64();
        let exact = value.fract() == 0.0 && value.abs() < 9_007_199_254_740_992.0;
        exact.then_some(value as i64)
    }

    /// The value if it is an integer in range and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        self.0.parse().ok().or_else(|| self.as_i64().and_then(|value| value.try_into().ok()))
    }
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Self(value.to_string().into())
    }
}

impl From<&str> for Json {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}

impl From<String> for Json {
    fn from(value: String) -> Self {
        Self::String(value)
    }
}

impl From<bool> for Json {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl Json {
    /// Reads one JSON value and nothing after it but white space.
    ///
    /// # Errors
    /// Text that is not JSON, not UTF-8, or nested deeper than [`MAX_DEPTH`].
    pub fn parse(bytes: &[u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| error_at(bytes, error.valid_up_to(), "text is not UTF-8"))?;
        let mut reader = Reader { text, position: 0 };
        let value = reader.value(0)?;
        reader.white_space();
        if reader.position < text.len() {
            return Err(reader.error("unexpected text after the value"));
        }
        Ok(value)
    }

    /// Builds an object.
    pub fn object<const N: usize>(members: [(&str, Json); N]) -> Self {
        Self::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// The member of that name, if this is an object that has it.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.as_object().and_then(|object| object.get(key))
    }

    /// The string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The object.
    pub fn as_object(&self) -> Option<&Object> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The list.
    pub fn as_array(&self) -> Option<&[Json]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// Whether it is `null`.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    /// What it is, for messages: `a string`, `null`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// The value without white space, characters outside ASCII unescaped.
    pub fn to_compact(&self) -> String {
        let mut out = String::new();
        self.write_compact(&mut out);
        out
    }

    /// Appends [`Json::to_compact`] to `out`.
    pub fn write_compact(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(number) => out.push_str(number.literal()),
            Self::String(text) => write_string(text, out),
            Self::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    item.write_compact(out);
                }
                out.push(']');
            }
            Self::Object(object) => {
                out.push('{');
                for (index, (key, value)) in object.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    write_string(key, out);
                    out.push(':');
                    value.write_compact(out);
                }
                out.push('}');
            }
        }
    }
}

/// Appends `text` as a JSON string with its quotes.
pub fn write_string(text: &str, out: &mut String) {
    out.push('"');
    escape_into(text, out);
    out.push('"');
}

/// Appends the inside of a JSON string; characters outside ASCII are left as they are.
pub fn escape_into(text: &str, out: &mut String) {
    let mut plain_from = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escape = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            b'\n' => "\\n",
            b'\r' => "\\r",
            b'\t' => "\\t",
            0x08 => "\\b",
            0x0c => "\\f",
            0..=0x1f => "",
            _ => continue,
        };
        out.push_str(&text[plain_from..at]);
        plain_from = at + 1;
        if escape.is_empty() {
            write!(out, "\\u{byte:04x}").expect("invariant: writing to a String cannot fail");
        } else {
            out.push_str(escape);
        }
    }
    out.push_str(&text[plain_from..]);
}

struct Reader<'a> {
    text: &'a str,
    position: usize,
}

impl Reader<'_> {
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
            let plain = rest.iter().position(|&byte| byte == b'"' || byte == b'\\' || byte < 0x20);
            let Some(plain) = plain else {
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

fn number_end(bytes: &[u8], start: usize) -> Option<usize> {
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

fn error_at(bytes: &[u8], position: usize, message: impl Into<String>) -> JsonError {
    let before = &bytes[..position.min(bytes.len())];
    let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    JsonError {
        message: message.into(),
        line: before.iter().filter(|&&byte| byte == b'\n').count() + 1,
        column: String::from_utf8_lossy(&before[line_start..]).chars().count() + 1,
    }
}
