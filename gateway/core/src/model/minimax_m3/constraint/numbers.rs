//! Numbers within bounds as regular expressions over their decimal digits.

use super::reading::Inexpressible;
use crate::json::{Json, Number, Object};

/// Any integer, any number. Source: JSON's grammar.
const ANY_INTEGER: &str = "-?(0|[1-9][0-9]*)";
const ANY_NUMBER: &str = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?";
/// Bounded numbers are written with at most so many decimals, or as many as their bounds have.
const USUAL_DECIMALS: u32 = 6;
/// Bounds with more decimals are refused.
const MAX_DECIMALS: u32 = 12;
/// Bounded on one side only, a number is written with at most so many digits before the point.
const MAX_WHOLE_DIGITS: u32 = 15;
const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];

/// The expression of a number's text; `exact` names what of the schema must be kept to.
///
/// # Errors
/// Bounds that no number is within, or that are too fine; a `multipleOf` that is no power of ten.
pub(super) fn number_pattern(schema: &Object, is_integer: bool) -> Result<String, Inexpressible> {
    let step = step(schema, is_integer)?;
    let is_bounded = BOUNDS.iter().any(|key| matches!(schema.get(*key), Some(Json::Number(_))));
    if !is_bounded {
        return Ok(match step {
            Some(0) => ANY_INTEGER.to_owned(),
            Some(decimals) => format!(r"{ANY_INTEGER}(\.[0-9]{{1,{decimals}}})?"),
            None => ANY_NUMBER.to_owned(),
        });
    }
    let bounds = Bounds::of(schema)?;
    let decimals = step.unwrap_or_else(|| bounds.decimals.max(USUAL_DECIMALS));
    let words: Vec<String> = (0..=decimals).flat_map(|decimals| bounds.words(decimals)).collect();
    if words.is_empty() {
        return Err("a number within bounds that leave none".to_owned());
    }
    Ok(words.join("|"))
}

/// How many decimals a number may have at most; `None` if any.
fn step(schema: &Object, is_integer: bool) -> Result<Option<u32>, Inexpressible> {
    let Some(Json::Number(step)) = schema.get("multipleOf") else {
        return Ok(is_integer.then_some(0));
    };
    match Decimal::of(step) {
        Some(Decimal { digits: 1, decimals }) if is_integer || decimals == 0 => Ok(Some(0)),
        Some(Decimal { digits: 1, decimals }) => Ok(Some(decimals)),
        _ => Err(format!("multiples of {}", step.literal())),
    }
}

/// `digits / 10^decimals`, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decimal {
    digits: i128,
    decimals: u32,
}

impl Decimal {
    fn of(number: &Number) -> Option<Self> {
        let (mantissa, exponent) = match number.literal().split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
            None => (number.literal(), 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let mut digits: i128 = format!("{whole}{fraction}").parse().ok()?;
        let mut decimals = i32::try_from(fraction.len()).ok()?.checked_sub(exponent)?;
        while decimals > 0 && digits % 10 == 0 {
            digits /= 10;
            decimals -= 1;
        }
        if decimals < 0 {
            let factor = 10_i128.checked_pow(decimals.unsigned_abs())?;
            digits = digits.checked_mul(factor)?;
            decimals = 0;
        }
        let decimals = u32::try_from(decimals).ok()?;
        (decimals <= MAX_DECIMALS && digits.abs() < 10_i128.pow(27))
            .then_some(Self { digits, decimals })
    }

    /// The number in units of `10^-decimals`, towards smaller ones; and whether that is exact.
    fn floor(self, decimals: u32) -> (i128, bool) {
        if decimals >= self.decimals {
            return (self.digits * 10_i128.pow(decimals - self.decimals), true);
        }
        let unit = 10_i128.pow(self.decimals - decimals);
        (self.digits.div_euclid(unit), self.digits.rem_euclid(unit) == 0)
    }
}

#[derive(Default)]
struct Bounds {
    /// With whether the bound itself is within.
    least: Option<(Decimal, bool)>,
    most: Option<(Decimal, bool)>,
    decimals: u32,
}

impl Bounds {
    fn of(schema: &Object) -> Result<Self, Inexpressible> {
        let mut bounds = Self::default();
        for key in BOUNDS {
            let Some(Json::Number(number)) = schema.get(key) else { continue };
            let bound = Decimal::of(number)
                .ok_or_else(|| format!("the bound {}, which is too fine", number.literal()))?;
            bounds.decimals = bounds.decimals.max(bound.decimals);
            let is_within = !key.starts_with("exclusive");
            let place = if key.ends_with("inimum") { &mut bounds.least } else { &mut bounds.most };
            if place.is_some() {
                return Err(format!("{key} beside another bound of that side"));
            }
            *place = Some((bound, is_within));
        }
        Ok(bounds)
    }

    /// Expressions of the numbers within that have exactly so many decimals.
    fn words(&self, decimals: u32) -> Vec<String> {
        let far = 10_i128.pow(MAX_WHOLE_DIGITS + decimals) - 1;
        let least = self.least.map_or(-far, |(bound, is_within)| match bound.floor(decimals) {
            (unit, true) => unit + i128::from(!is_within),
            (unit, false) => unit + 1,
        });
        let most = self.most.map_or(far, |(bound, is_within)| match bound.floor(decimals) {
            (unit, true) => unit - i128::from(!is_within),
            (unit, false) => unit,
        });
        let mut words = Vec::new();
        if least < 0 && least <= most {
            let (low, high) = ((-most).max(1), -least);
            words.extend(magnitudes(low, high, decimals).map(|word| format!("-{word}")));
        }
        if most >= 0 && least <= most {
            words.extend(magnitudes(least.max(0), most, decimals));
        }
        words
    }
}

/// Expressions of `low..=high`, neither negative, the point before the last `decimals` digits.
fn magnitudes(low: i128, high: i128, decimals: u32) -> impl Iterator<Item = String> {
    let shortest = decimals as usize + 1;
    let longest = high.to_string().len().max(shortest);
    (shortest..=longest).flat_map(move |length| {
        // only the shortest words may begin with a zero: before the point
        let first = if length == shortest { 0 } else { 10_i128.pow(length as u32 - 1) };
        let (low, high) = (low.max(first), high.min(10_i128.pow(length as u32) - 1));
        let digits = |value: i128| -> Vec<u8> {
            format!("{value:0length$}").bytes().map(|digit| digit - b'0').collect()
        };
        let words = if low <= high { between(&digits(low), &digits(high)) } else { Vec::new() };
        words.into_iter().map(move |classes| spelled(&classes, decimals as usize))
    })
}

/// Classes of digits, place by place, whose words together are those from `low` to `high`.
fn between(low: &[u8], high: &[u8]) -> Vec<Vec<(u8, u8)>> {
    let ([first_low, low_rest @ ..], [first_high, high_rest @ ..]) = (low, high) else {
        return vec![Vec::new()];
    };
    let after = |class: (u8, u8), rest: Vec<Vec<(u8, u8)>>| {
        rest.into_iter().map(move |rest| std::iter::once(class).chain(rest).collect())
    };
    if first_low == first_high {
        return after((*first_low, *first_low), between(low_rest, high_rest)).collect();
    }
    let (all_low, all_high) = (vec![0; low_rest.len()], vec![9; low_rest.len()]);
    let any = vec![vec![(0, 9); low_rest.len()]];
    let mut words = Vec::new();
    let (mut middle_low, mut middle_high) = (*first_low, *first_high);
    if low_rest != all_low {
        words.extend(after((*first_low, *first_low), between(low_rest, &all_high)));
        middle_low += 1;
    }
    if high_rest != all_high {
        middle_high -= 1;
    }
    if middle_low <= middle_high {
        words.extend(after((middle_low, middle_high), any));
    }
    if high_rest != all_high {
        words.extend(after((*first_high, *first_high), between(&all_low, high_rest)));
    }
    words
}

fn spelled(classes: &[(u8, u8)], decimals: usize) -> String {
    let mut word = String::new();
    let point = classes.len() - decimals;
    let mut at = 0;
    while at < classes.len() {
        if at == point && at > 0 {
            word.push_str("\\.");
        }
        let (low, high) = classes[at];
        let until = if at < point { point } else { classes.len() };
        let run = classes[at..until].iter().take_while(|class| **class == (low, high)).count();
        if low == high {
            word.push(char::from(b'0' + low));
            at += 1;
            continue;
        }
        word.push_str(&format!("[{low}-{high}]"));
        if run > 1 {
            word.push_str(&format!("{{{run}}}"));
        }
        at += run;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(schema: &str, is_integer: bool) -> Result<String, Inexpressible> {
        let schema = Json::parse(schema.as_bytes()).unwrap();
        number_pattern(schema.as_object().unwrap(), is_integer)
    }

    #[test]
    fn bounds_are_kept_digit_by_digit() {
        for (schema, expected) in [
            ("{}", ANY_INTEGER),
            (r#"{"minimum":0,"maximum":0}"#, "0"),
            (r#"{"minimum":3,"maximum":27}"#, "[3-9]|1[0-9]|2[0-7]"),
            (r#"{"exclusiveMinimum":3,"exclusiveMaximum":6}"#, "[4-5]"),
            (r#"{"minimum":-2,"maximum":1}"#, "-[1-2]|[0-1]"),
            (r#"{"minimum":-12,"maximum":-9.5}"#, "-1[0-2]"),
            (r#"{"minimum":98,"maximum":103}"#, "9[8-9]|10[0-3]"),
            (r#"{"minimum":1e2,"maximum":199.0,"multipleOf":1}"#, "1[0-9]{2}"),
        ] {
            assert_eq!(pattern(schema, true).as_deref(), Ok(expected), "{schema}");
        }
        let price = r#"{"minimum":0.5,"maximum":1.25,"multipleOf":0.01}"#;
        let expected = r"1|0\.[5-9]|1\.[0-2]|0\.[5-9][0-9]|1\.[0-1][0-9]|1\.2[0-5]";
        assert_eq!(pattern(price, false).as_deref(), Ok(expected));
    }

    #[test]
    fn what_no_number_fits_or_no_expression_says_is_an_error() {
        for schema in [
            r#"{"minimum":2,"maximum":1}"#,
            r#"{"exclusiveMinimum":1,"exclusiveMaximum":2}"#,
            r#"{"multipleOf":3}"#,
            r#"{"minimum":1e-30}"#,
        ] {
            assert!(pattern(schema, true).is_err(), "{schema}");
        }
    }

    #[test]
    fn every_number_of_a_small_range_is_said_once_and_no_other() {
        for (low, high) in [(0, 7), (5, 123), (-31, 204), (-120, -9), (99, 1001)] {
            let schema = format!(r#"{{"minimum":{low},"maximum":{high}}}"#);
            let pattern = pattern(&schema, true).unwrap();
            let engine = aho(&pattern);
            for value in -1500..1500 {
                let expected = usize::from((low..=high).contains(&value));
                assert_eq!(engine(&value.to_string()), expected, "{value} in {low}..={high}");
            }
        }
    }

    /// How many alternatives of a pattern of digits and classes say a word.
    fn aho(pattern: &str) -> impl Fn(&str) -> usize {
        let words: Vec<String> = pattern.split('|').map(str::to_owned).collect();
        move |text| words.iter().filter(|word| says(word, text)).count()
    }

    fn says(word: &str, text: &str) -> bool {
        let Some(first) = word.chars().next() else { return text.is_empty() };
        if first != '[' {
            return text.starts_with(first) && says(&word[1..], &text[1..]);
        }
        let class: Vec<char> = word[1..4].chars().collect();
        let rest = &word[5..];
        let (count, rest) = match rest.strip_prefix('{') {
            Some(rest) => {
                let (count, rest) = rest.split_once('}').unwrap();
                (count.parse().unwrap(), rest)
            }
            None => (1, rest),
        };
        text.len() >= count
            && text[..count].chars().all(|digit| (class[0]..=class[2]).contains(&digit))
            && says(rest, &text[count..])
    }
}
