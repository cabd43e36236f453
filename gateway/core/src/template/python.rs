//! Python's own way of writing values: `json.dumps` and `repr` of a float.

use super::values::LiteralNumber;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write as _;

/// `repr(value)` of a Python float.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) =
        scientific.split_once('e').expect("invariant: scientific notation has an exponent");
    let exponent: i32 = exponent.parse().expect("invariant: the exponent is an integer");
    if (-4..16).contains(&exponent) {
        let mut text = value.to_string();
        if !text.contains('.') {
            text.push_str(".0");
        }
        return text;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// Options of `json.dumps`.
pub(super) struct DumpOptions {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
    /// Not escaped, whatever the other options say.
    pub(super) sentinel: Option<char>,
}

/// `json.dumps(value, **options)`.
pub(super) fn dumps(value: &Value, options: &DumpOptions) -> Result<String, Error> {
    let mut out = String::new();
    write_value(value, options, 0, &mut out)?;
    Ok(out)
}

fn write_value(
    value: &Value,
    options: &DumpOptions,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    if depth > crate::json::MAX_DEPTH * 2 {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number_text(value)),
        ValueKind::String => write_string(value.as_str().unwrap_or_default(), options, out),
        ValueKind::Seq | ValueKind::Iterable => write_list(value, options, depth, out)?,
        ValueKind::Map => write_map(value, options, depth, out)?,
        ValueKind::Plain => match value.downcast_object_ref::<LiteralNumber>() {
            Some(number) => out.push_str(&number.text),
            None => return Err(not_serializable(value)),
        },
        _ => return Err(not_serializable(value)),
    }
    Ok(())
}

fn not_serializable(value: &Value) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("tojson: a value of type {} is not JSON serializable", value.kind()),
    )
}

fn number_text(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_nan() => "NaN".to_owned(),
        Ok(float) if float.is_infinite() => {
            if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
        }
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

fn write_list(
    value: &Value,
    options: &DumpOptions,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    let mut first = true;
    out.push('[');
    for item in value.try_iter()? {
        separate(first, options, depth + 1, out);
        first = false;
        write_value(&item, options, depth + 1, out)?;
    }
    close(first, ']', options, depth, out);
    Ok(())
}

fn write_map(
    value: &Value,
    options: &DumpOptions,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if options.sort_keys {
        keys.sort();
    }
    let mut first = true;
    out.push('{');
    for key in keys {
        separate(first, options, depth + 1, out);
        first = false;
        match key.as_str() {
            Some(text) => write_string(text, options, out),
            None => {
                let mut text = String::new();
                write_value(&key, options, depth + 1, &mut text)?;
                write_string(&text, options, out);
            }
        }
        out.push_str(&options.key_separator);
        write_value(&value.get_item(&key)?, options, depth + 1, out)?;
    }
    close(first, '}', options, depth, out);
    Ok(())
}

fn separate(first: bool, options: &DumpOptions, depth: usize, out: &mut String) {
    if !first {
        out.push_str(&options.item_separator);
    }
    line_break(options, depth, out);
}

fn close(empty: bool, bracket: char, options: &DumpOptions, depth: usize, out: &mut String) {
    if !empty {
        line_break(options, depth, out);
    }
    out.push(bracket);
}

fn line_break(options: &DumpOptions, depth: usize, out: &mut String) {
    if let Some(indent) = &options.indent {
        out.push('\n');
        for _ in 0..depth {
            out.push_str(indent);
        }
    }
}

fn write_string(text: &str, options: &DumpOptions, out: &mut String) {
    if !options.ensure_ascii {
        return crate::json::write_string(text, out);
    }
    let mut escaped = String::new();
    crate::json::write_string(text, &mut escaped);
    let mut units = [0; 2];
    for character in escaped.chars() {
        if matches!(character, ' '..='~') || Some(character) == options.sentinel {
            out.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut units) {
            write!(out, "\\u{unit:04x}").expect("invariant: writing to a String cannot fail");
        }
    }
}
