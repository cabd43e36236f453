//! Writes grammars in llguidance's Lark dialect, which workers read.

use crate::json::{Json, write_string};
use std::collections::HashMap;
use std::fmt::Write as _;

/// A grammar in the making. Rules are written in any order; equal terminals are written once.
#[derive(Debug, Default)]
pub struct LarkWriter {
    text: String,
    num_rules: usize,
    terminals: HashMap<String, String>,
}

impl LarkWriter {
    /// A name for a rule that is yet to be written.
    pub fn fresh_rule(&mut self) -> String {
        self.num_rules += 1;
        format!("r{}", self.num_rules)
    }

    /// How many names were given.
    pub fn num_rules(&self) -> usize {
        self.num_rules
    }

    /// Bytes written so far.
    pub fn num_bytes(&self) -> usize {
        self.text.len()
    }

    /// Writes a rule.
    pub fn rule(&mut self, name: &str, body: &str) {
        let body = if body.is_empty() { "\"\"" } else { body };
        // a string never fails to be written to
        let _ = writeln!(self.text, "{name}: {body}");
    }

    /// The name of the terminal that this expression of literals and regular expressions defines.
    pub fn terminal(&mut self, expression: &str) -> String {
        if let Some(known) = self.terminals.get(expression) {
            return known.clone();
        }
        let name = format!("T{}", self.terminals.len() + 1);
        let _ = writeln!(self.text, "{name}: {expression}");
        self.terminals.insert(expression.to_owned(), name.clone());
        name
    }

    /// The whole grammar, whose words are those of `start`. Text that must come is left to the
    /// model to cut into tokens: a tokenizer asked for it would take `<filename>` for a token.
    pub fn finish(self, start: &str) -> String {
        format!("%llguidance {{\"no_forcing\": true}}\nstart: {start}\n{}", self.text)
    }
}

/// A text, as it is.
pub fn literal(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    write_string(text, &mut quoted);
    // json leaves this one as it is, the dialect does not
    quoted.replace('\u{7f}', "\\u007f")
}

/// A regular expression that matches as a whole; not empty.
pub fn regex(pattern: &str) -> String {
    let mut written = String::with_capacity(pattern.len() + 2);
    written.push('/');
    let mut is_escaped = false;
    for character in pattern.chars() {
        match character {
            '\n' if is_escaped => written.push('n'),
            '\n' => written.push_str("\\n"),
            '/' if !is_escaped => written.push_str("\\/"),
            other => written.push(other),
        }
        is_escaped = character == '\\' && !is_escaped;
    }
    written.push('/');
    written
}

/// The token of that id, which no text can spell.
pub fn token(id: u32) -> String {
    format!("<[{id}]>")
}

/// A JSON text that the schema accepts.
pub fn json(schema: &Json) -> String {
    format!("%json {}", schema.to_compact())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_terminals_are_written_once_and_an_empty_rule_is_an_empty_text() {
        let mut lark = LarkWriter::default();
        let (one, two) = (lark.terminal("/a/"), lark.terminal("/a/"));
        let rule = lark.fresh_rule();
        lark.rule(&rule, "");
        assert_eq!(one, two);
        let rules = "start: r1 T1\nT1: /a/\nr1: \"\"\n";
        assert!(lark.finish("r1 T1").ends_with(rules));
    }

    #[test]
    fn what_would_end_a_literal_or_an_expression_is_escaped() {
        assert_eq!(literal("a\"b\\\n\u{7f}"), r#""a\"b\\\n\u007f""#);
        assert_eq!(regex(r"a/b\/c\\/d"), r"/a\/b\/c\\\/d/");
        assert_eq!(regex("a\nb"), r"/a\nb/");
    }
}
