//! The filters, tests and functions that chat templates expect from their Python host.

use super::UnixClock;
use super::python::{DumpOptions, dumps};
use super::values::LiteralNumber;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Variable that holds a character which is no text and must pass through every escape.
pub(crate) const SENTINEL_VARIABLE: &str = "m3stack_sentinel";

/// Marks an error as the template's own refusal.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Adds everything to `environment`.
pub(super) fn install(environment: &mut Environment<'static>, clock: UnixClock) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_test("number", |value: Value| value.is_number() || literal(&value).is_some());
    environment.add_test("integer", |value: Value| match literal(&value) {
        Some(number) => number.is_integer,
        None => value.is_integer(),
    });
    environment.add_test("float", |value: Value| match literal(&value) {
        Some(number) => !number.is_integer,
        None => value.is_number() && !value.is_integer(),
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: String| strftime(&format, clock()));
}

/// The message of `raise_exception`, if that is where the error comes from.
pub(super) fn raised_message(error: &Error) -> Option<String> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = source {
        if let Some(raised) = current.downcast_ref::<Raised>() {
            return Some(raised.0.clone());
        }
        source = current.source();
    }
    None
}

/// Python's methods of strings, lists and mappings.
fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), name) {
        (Some(text), "title") if arguments.is_empty() => Ok(Value::from(title(text))),
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// `str.title`: a letter begins a word wherever no letter stands before it.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_inside = false;
    for character in text.chars() {
        if is_inside {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        is_inside = character.is_alphabetic();
    }
    out
}

fn literal(value: &Value) -> Option<&LiteralNumber> {
    value.downcast_object_ref::<LiteralNumber>()
}

/// `json.dumps` with the arguments that templates pass to the filter.
fn tojson(state: &State, value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = match indent {
        None => None,
        Some(indent) if indent.is_none() || indent.is_undefined() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent.clone()).map_err(|_| bad_indent())?.min(64)),
        }),
    };
    let separators: Option<Value> = kwargs.get("separators")?;
    let (item_separator, key_separator) = match separators {
        Some(pair) if !pair.is_none() && !pair.is_undefined() => {
            (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string())
        }
        _ if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        _ => (", ".to_owned(), ": ".to_owned()),
    };
    let options = DumpOptions {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sentinel: state
            .lookup(SENTINEL_VARIABLE)
            .and_then(|value| value.as_str().and_then(|text| text.chars().next())),
    };
    kwargs.assert_all_used()?;
    dumps(&value, &options).map(Value::from)
}

fn bad_indent() -> Error {
    Error::new(ErrorKind::InvalidOperation, "tojson: indent must be a number or a string")
}

/// The subset of C's `strftime` that chat templates use, in UTC.
fn strftime(format: &str, unix_s: i64) -> Result<String, Error> {
    let date = CivilTime::from_unix(unix_s);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let code = characters.next().unwrap_or('%');
        let code = if code == '-' {
            let code = characters.next().unwrap_or('%');
            out.push_str(date.field(code)?.trim_start_matches('0'));
            continue;
        } else {
            code
        };
        out.push_str(&date.field(code)?);
    }
    Ok(out)
}

struct CivilTime {
    year: i64,
    month: usize,
    day: i64,
    weekday: usize,
    second_of_day: i64,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl CivilTime {
    /// Source: the days-to-civil algorithm over 400-year eras that begin on 1 March.
    fn from_unix(unix_s: i64) -> Self {
        let days = unix_s.div_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: usize::try_from(month).expect("invariant: 1 to 12"),
            day,
            weekday: usize::try_from((days + 4).rem_euclid(7)).expect("invariant: 0 to 6"),
            second_of_day: unix_s.rem_euclid(86_400),
        }
    }

    fn field(&self, code: char) -> Result<String, Error> {
        let hour = self.second_of_day / 3600;
        let minute = self.second_of_day / 60 % 60;
        Ok(match code {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year.rem_euclid(100)),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'B' => MONTHS[self.month - 1].to_owned(),
            'b' | 'h' => MONTHS[self.month - 1][..3].to_owned(),
            'A' => WEEKDAYS[self.weekday].to_owned(),
            'a' => WEEKDAYS[self.weekday][..3].to_owned(),
            'H' => format!("{hour:02}"),
            'I' => format!("{:02}", (hour + 11) % 12 + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'M' => format!("{minute:02}"),
            'S' => format!("{:02}", self.second_of_day % 60),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{hour:02}:{minute:02}:{:02}", self.second_of_day % 60),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: %{other} is not supported"),
                ));
            }
        })
    }
}
