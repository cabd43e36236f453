//! Typed access to the members of a JSON object, with errors that name path, value and limit.

use crate::error::RequestError;
use crate::json::{Json, Number, Object};
use std::ops::RangeInclusive;

/// Members that are looked through one by one.
const MAX_LOOKED_THROUGH: usize = 16;

/// An object of the request and where it stands in it; `null` members count as absent.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    members: &'a Object,
    prefix: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(members: &'a Object, prefix: impl Into<String>) -> Self {
        Self { members, prefix: prefix.into() }
    }

    /// The object at `value`, which stands at `path`.
    pub(crate) fn of(value: &'a Json, path: String) -> Result<Self, RequestError> {
        match value {
            Json::Object(members) => Ok(Self { members, prefix: path }),
            other => Err(wrong_type(path, "an object", other)),
        }
    }

    pub(crate) fn members(&self) -> &'a Object {
        self.members
    }

    /// Path of a member of this object.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    /// Path of this object.
    pub(crate) fn here(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Json> {
        // a request has few members and is asked for many: hashing each name costs more than looking
        let found = match self.members.len() {
            ..=MAX_LOOKED_THROUGH => {
                self.members.iter().find(|(name, _)| *name == key).map(|(_, value)| value)
            }
            _ => self.members.get(key),
        };
        found.filter(|value| !value.is_null())
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, RequestError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(self.path(key), "a string", other)),
        }
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, RequestError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(self.path(key), "a boolean", other)),
        }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, RequestError> {
        self.get(key).map(|value| Fields::of(value, self.path(key))).transpose()
    }

    pub(crate) fn array(&self, key: &str) -> Result<Option<&'a [Json]>, RequestError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_type(self.path(key), "a list", other)),
        }
    }

    fn number(&self, key: &str) -> Result<Option<&'a Number>, RequestError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Number(number)) => Ok(Some(number)),
            Some(other) => Err(wrong_type(self.path(key), "a number", other)),
        }
    }

    /// A real number within bounds.
    pub(crate) fn real(
        &self,
        key: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f32>, RequestError> {
        let Some(number) = self.number(key)? else { return Ok(None) };
        let value = number.as_f64();
        if !range.contains(&value) {
            return Err(self.out_of_range(key, number, *range.start(), *range.end()));
        }
        Ok(Some(value as f32))
    }

    /// Any number.
    pub(crate) fn double(&self, key: &str) -> Result<Option<f64>, RequestError> {
        Ok(self.number(key)?.map(Number::as_f64))
    }

    /// Any integer; one that is out of range is the nearest that is not.
    pub(crate) fn whole(&self, key: &str) -> Result<Option<i64>, RequestError> {
        let Some(number) = self.number(key)? else { return Ok(None) };
        let value = number.as_f64();
        match number.as_i64() {
            Some(value) => Ok(Some(value)),
            None if number.is_integer() || value.fract() == 0.0 => Ok(Some(value as i64)),
            None => Err(self.not_whole(key, number)),
        }
    }

    /// A real number above 0, up to a limit.
    pub(crate) fn positive(&self, key: &str, most: f32) -> Result<Option<f32>, RequestError> {
        let Some(number) = self.number(key)? else { return Ok(None) };
        // below the smallest float it would become 0
        let value = number.as_f64() as f32;
        if value > 0.0 && value <= most {
            return Ok(Some(value));
        }
        let path = self.path(key);
        let message =
            format!("{path} is {}; it must be above 0 and at most {most}", number.literal());
        Err(RequestError::invalid(path, message))
    }

    /// An integer within bounds.
    pub(crate) fn integer(
        &self,
        key: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, RequestError> {
        let Some(number) = self.number(key)? else { return Ok(None) };
        match number.as_i64() {
            Some(value) if range.contains(&value) => Ok(Some(value)),
            Some(_) => Err(self.out_of_range(key, number, *range.start(), *range.end())),
            None if number.is_integer() => {
                Err(self.out_of_range(key, number, *range.start(), *range.end()))
            }
            None => Err(self.not_whole(key, number)),
        }
    }

    /// An integer within bounds that fits 32 bits.
    pub(crate) fn count(
        &self,
        key: &str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, RequestError> {
        let wide = i64::from(*range.start())..=i64::from(*range.end());
        Ok(self
            .integer(key, wide)?
            .map(|value| u32::try_from(value).expect("invariant: checked against a u32 range")))
    }

    fn not_whole(&self, key: &str, found: &Number) -> RequestError {
        let path = self.path(key);
        let message = format!("{path} must be an integer, not {}", found.literal());
        RequestError::invalid(path, message)
    }

    fn out_of_range<B: std::fmt::Display>(
        &self,
        key: &str,
        found: &Number,
        low: B,
        high: B,
    ) -> RequestError {
        let path = self.path(key);
        let message = format!("{path} is {}; it must be from {low} to {high}", found.literal());
        RequestError::invalid(path, message)
    }
}

/// `path must be WANTED, not FOUND`.
pub(crate) fn wrong_type(path: String, wanted: &str, found: &Json) -> RequestError {
    let message = format!("{path} must be {wanted}, not {}", found.type_name());
    RequestError::invalid(path, message)
}

/// The value as JSON, cut to a length fit for a message.
pub(crate) fn excerpt(value: &Json) -> String {
    const LONGEST: usize = 80;
    let text = value.to_compact();
    match text.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}
