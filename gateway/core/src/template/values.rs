//! JSON into template values that print and test as Python's do.

use super::python::float_repr;
use crate::json::{Json, Number};
use indexmap::IndexMap;
use minijinja::value::{Object as TemplateObject, ObjectRepr, Value};
use std::fmt;
use std::sync::Arc;

/// A number that the template engine would print differently from Python, or cannot hold. It
/// prints and tests as a number, but cannot be calculated with.
#[derive(Debug)]
pub(super) struct LiteralNumber {
    /// Python's text of it.
    pub(super) text: String,
    pub(super) is_integer: bool,
}

impl TemplateObject for LiteralNumber {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The template value of a scalar; lists and objects become empty ones.
pub(crate) fn scalar_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => number_value(number),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(_) => Vec::<Value>::new().into(),
        Json::Object(_) => Value::from_object(IndexMap::<Value, Value>::new()),
    }
}

fn number_value(number: &Number) -> Value {
    let literal = number.literal();
    if number.is_integer() {
        if let Ok(value) = literal.parse::<i128>() {
            return i64::try_from(value).map_or_else(|_| Value::from(value), Value::from);
        }
        return Value::from_object(LiteralNumber { text: literal.to_owned(), is_integer: true });
    }
    let value = number.as_f64();
    let text = float_repr(value);
    // the engine never prints an exponent, Python does for these
    if text.contains('e') {
        return Value::from_object(LiteralNumber { text, is_integer: false });
    }
    Value::from(value)
}
