//! Texts between tags as terminals: what the schema allows, less what the parser would read as
//! something else.

use super::super::NAMESPACE;
use super::reading::Inexpressible;
use crate::json::{Json, Object};
use crate::lark::regex;
use crate::schema::Types;
use std::fmt::Write as _;

/// How a text must not look, so that it is read as a string.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    excluded: Vec<&'static str>,
}

/// The looks of other types. Source: JSON's grammar.
const LOOKS: [(Types, &str); 5] = [
    (Types::NULL, "null"),
    (Types::BOOLEAN, "true|false"),
    (Types::NUMBER, r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"),
    (Types::ARRAY, r"[ \t\r\n]*\[(?s:.*)"),
    (Types::OBJECT, r"[ \t\r\n]*\{(?s:.*)"),
];

impl Look {
    /// Strings at a place where values of these types may stand.
    pub(super) fn of(types: Types) -> Self {
        let others = LOOKS.iter().filter(|(kind, _)| types.has(*kind));
        Self { excluded: others.map(|(_, look)| *look).collect() }
    }
}

/// The terminal of a string, with the rules of its schema if there are any.
///
/// # Errors
/// A pattern that is no regular expression over a whole text.
pub(super) fn string_terminal(
    look: &Look,
    schema: Option<&Object>,
) -> Result<String, Inexpressible> {
    let mut parts = Vec::new();
    if let Some(schema) = schema {
        parts.extend(length(schema)?);
        if let Some(Json::String(pattern)) = schema.get("pattern") {
            parts.push(regex(&whole_text(pattern)?));
        }
        if let Some(format) = schema.get("format").and_then(Json::as_str) {
            parts.extend(format_pattern(format).map(regex));
        }
    }
    if parts.is_empty() {
        parts.push(regex("(?s:.*)"));
    }
    let mut terminal = format!("{} & ~{}", parts.join(" & "), regex(&without(&[NAMESPACE])));
    for look in &look.excluded {
        let _ = write!(terminal, " & ~{}", regex(look));
    }
    Ok(terminal)
}

/// Texts with one of these in them.
pub(super) fn without(markers: &[&str]) -> String {
    let escaped: Vec<String> = markers.iter().map(|marker| escaped(marker)).collect();
    format!("(?s:.*)({})(?s:.*)", escaped.join("|"))
}

fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for character in text.chars() {
        if character.is_ascii_punctuation() {
            pattern.push('\\');
        }
        pattern.push(character);
    }
    // a slash needs none, and `<`, `>` must have none: they would be word boundaries
    pattern.replace("\\/", "/").replace("\\<", "<").replace("\\>", ">")
}

fn length(schema: &Object) -> Result<Option<String>, Inexpressible> {
    let read = |key: &str| match schema.get(key) {
        Some(Json::Number(number)) => number.as_u64(),
        _ => None,
    };
    Ok(match (read("minLength").unwrap_or(0), read("maxLength")) {
        (0, None) => None,
        (least, None) => Some(regex(&format!("(?s:.{{{least},}})"))),
        (least, Some(most)) if least <= most => Some(regex(&format!("(?s:.{{{least},{most}}})"))),
        (least, Some(most)) => {
            return Err(format!("a text of at least {least} and at most {most} characters"));
        }
    })
}

/// A schema's pattern, which matches anywhere in a text, as one that matches all of it.
fn whole_text(pattern: &str) -> Result<String, Inexpressible> {
    let scan = Scan::of(pattern);
    let begins = pattern.starts_with('^');
    let ends = scan.ends_in_anchor;
    let num_anchors = usize::from(begins) + usize::from(ends);
    if scan.num_anchors != num_anchors || (num_anchors > 0 && scan.has_top_level_choice) {
        return Err(format!("the pattern {pattern:?} with anchors inside"));
    }
    let inside = &pattern[usize::from(begins)..pattern.len() - usize::from(ends)];
    let any = "(?s:.*)";
    let (before, behind) = (if begins { "" } else { any }, if ends { "" } else { any });
    Ok(format!("{before}(?:{}){behind}", ascii_classes(inside)))
}

/// Where a pattern's anchors and choices stand.
#[derive(Default)]
struct Scan {
    num_anchors: usize,
    ends_in_anchor: bool,
    has_top_level_choice: bool,
}

impl Scan {
    fn of(pattern: &str) -> Self {
        let mut scan = Self::default();
        let (mut depth, mut is_class, mut is_escaped) = (0_usize, false, false);
        for character in pattern.chars() {
            scan.ends_in_anchor = false;
            match character {
                _ if is_escaped => {
                    is_escaped = false;
                    continue;
                }
                '\\' => is_escaped = true,
                ']' => is_class = false,
                _ if is_class => {}
                '[' => is_class = true,
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                '|' if depth == 0 => scan.has_top_level_choice = true,
                '^' => scan.num_anchors += 1,
                '$' => {
                    scan.num_anchors += 1;
                    scan.ends_in_anchor = true;
                }
                _ => {}
            }
        }
        scan
    }
}

/// In a schema's patterns `\d` and `\w` mean ASCII, in the workers' they mean Unicode.
/// Source: ECMA-262, CharacterClassEscape.
fn ascii_classes(pattern: &str) -> String {
    let mut written = String::with_capacity(pattern.len());
    let (mut is_class, mut is_escaped) = (false, false);
    for character in pattern.chars() {
        if is_escaped {
            is_escaped = false;
            match (character, is_class) {
                ('d', true) => written.push_str("0-9"),
                ('d', false) => written.push_str("[0-9]"),
                ('w', true) => written.push_str("A-Za-z0-9_"),
                ('w', false) => written.push_str("[A-Za-z0-9_]"),
                ('D', false) => written.push_str("[^0-9]"),
                ('W', false) => written.push_str("[^A-Za-z0-9_]"),
                ('/', _) => written.push('/'),
                (other, _) => {
                    written.push('\\');
                    written.push(other);
                }
            }
            continue;
        }
        match character {
            '\\' => {
                is_escaped = true;
                continue;
            }
            '[' => is_class = true,
            ']' => is_class = false,
            _ => {}
        }
        written.push(character);
    }
    if is_escaped {
        written.push('\\');
    }
    written
}

/// Formats that are held to; others are taken as remarks, as the specification has it.
/// Source: RFC 3339 (dates and times), RFC 9562 (UUIDs), RFC 791 (addresses).
fn format_pattern(format: &str) -> Option<&'static str> {
    Some(match format {
        "date" => DATE,
        "time" => TIME,
        "date-time" => DATE_TIME,
        "uuid" => "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "ipv4" => {
            r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        }
        "email" => {
            r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
        }
        _ => return None,
    })
}

macro_rules! date {
    () => {
        "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    };
}
macro_rules! time {
    () => {
        r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    };
}
const DATE: &str = date!();
const TIME: &str = time!();
const DATE_TIME: &str = concat!(date!(), "T", time!());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_anywhere_unless_it_is_anchored() {
        for (pattern, whole) in [
            ("a", "(?s:.*)(?:a)(?s:.*)"),
            ("^a", "(?:a)(?s:.*)"),
            ("a$", "(?s:.*)(?:a)"),
            (r"^a\$", r"(?:a\$)(?s:.*)"),
            (r"^\d[\w.]$", "(?:[0-9][A-Za-z0-9_.])"),
            ("a|b", "(?s:.*)(?:a|b)(?s:.*)"),
            ("^(a|b)$", "(?:(a|b))"),
            (r"[$^]\/", "(?s:.*)(?:[$^]/)(?s:.*)"),
        ] {
            assert_eq!(whole_text(pattern).as_deref(), Ok(whole), "{pattern}");
        }
        for inexpressible in ["^a|b$", "a^b", "(^a)", "a$b", "(a$)"] {
            assert!(whole_text(inexpressible).is_err(), "{inexpressible}");
        }
    }

    #[test]
    fn markers_are_escaped_for_what_they_mean() {
        assert_eq!(without(&["]<]x[>["]), r"(?s:.*)(\]<\]x\[>\[)(?s:.*)");
        assert_eq!(without(&["</mm:think>"]), r"(?s:.*)(</mm\:think>)(?s:.*)");
    }
}
