//! JSON values that keep what a client wrote: key order and every digit of a number.

mod reader;

use indexmap::IndexMap;
use reader::{Reader, error_at, number_end};
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
        Reader::new(text).document()
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

#[cfg(test)]
mod tests;
