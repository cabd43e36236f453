//! Added tokens: where they stand in a text, by the rules of the `tokenizers` library.

use aho_corasick::{AhoCorasick, MatchKind};
use std::collections::HashMap;
use std::ops::Range;

/// A token outside the learned vocabulary, matched as a whole before anything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Left out of decoded text by default.
    pub special: bool,
    /// Matched in normalised text, after the others.
    pub normalized: bool,
    /// Takes white space on its left with it.
    pub lstrip: bool,
    /// Takes white space on its right with it.
    pub rstrip: bool,
    /// Only as a word of its own.
    pub single_word: bool,
}

/// A piece of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    /// Ordinary text.
    Text(Range<usize>),
    /// An added token.
    Token {
        /// Its id.
        id: u32,
        /// The text it stands for, with the white space it takes.
        range: Range<usize>,
    },
}

/// All added tokens of a tokenizer.
pub struct AddedVocabulary {
    tokens: Vec<AddedToken>,
    by_content: HashMap<String, usize>,
    by_id: HashMap<u32, usize>,
    /// Tokens matched in the raw text come first, then those matched in normalised text.
    passes: Vec<(AhoCorasick, Vec<usize>)>,
}

impl AddedVocabulary {
    /// Indexes the tokens.
    ///
    /// # Errors
    /// Tokens that cannot be told from text, or that need a normaliser.
    pub fn new(tokens: &[AddedToken], has_normalizer: bool) -> Result<Self, String> {
        for token in tokens {
            if token.content.chars().count() < 2 {
                return Err(format!(
                    "the added token {} is {:?}; one character cannot be told from text",
                    token.id, token.content
                ));
            }
            if token.normalized && has_normalizer {
                return Err(format!(
                    "the added token {:?} is matched in normalised text, which is not supported",
                    token.content
                ));
            }
        }
        let mut passes = Vec::new();
        for normalized in [false, true] {
            let members: Vec<usize> =
                (0..tokens.len()).filter(|&at| tokens[at].normalized == normalized).collect();
            if members.is_empty() {
                continue;
            }
            let automaton = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(members.iter().map(|&at| &tokens[at].content))
                .map_err(|error| format!("the added tokens cannot be indexed: {error}"))?;
            passes.push((automaton, members));
        }
        Ok(Self {
            by_content: tokens.iter().map(|token| token.content.clone()).zip(0..).collect(),
            by_id: tokens.iter().map(|token| token.id).zip(0..).collect(),
            tokens: tokens.to_vec(),
            passes,
        })
    }

    /// All tokens, in order of the file.
    pub fn tokens(&self) -> &[AddedToken] {
        &self.tokens
    }

    /// The token with that text.
    pub fn by_content(&self, content: &str) -> Option<&AddedToken> {
        self.by_content.get(content).map(|&at| &self.tokens[at])
    }

    /// The token with that id.
    pub fn by_id(&self, id: u32) -> Option<&AddedToken> {
        self.by_id.get(&id).map(|&at| &self.tokens[at])
    }

    /// Cuts a text at its added tokens; the pieces cover it.
    pub fn split(&self, text: &str) -> Vec<Segment> {
        let mut segments = vec![Segment::Text(0..text.len())];
        for (automaton, members) in &self.passes {
            let mut next = Vec::with_capacity(segments.len());
            for segment in segments {
                match segment {
                    Segment::Text(range) => {
                        self.split_pass(text, range, automaton, members, &mut next)
                    }
                    token => next.push(token),
                }
            }
            segments = next;
        }
        segments.retain(|segment| !matches!(segment, Segment::Text(range) if range.is_empty()));
        segments
    }

    fn split_pass(
        &self,
        text: &str,
        range: Range<usize>,
        automaton: &AhoCorasick,
        members: &[usize],
        out: &mut Vec<Segment>,
    ) {
        let part = &text[range.clone()];
        let mut done = 0;
        for found in automaton.find_iter(part) {
            let token = &self.tokens[members[found.pattern().as_usize()]];
            let (mut start, mut end) = (found.start(), found.end());
            if token.single_word
                && (part[..start].chars().next_back().is_some_and(is_word)
                    || part[end..].chars().next().is_some_and(is_word))
            {
                continue;
            }
            if token.lstrip {
                start = part[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end += part[end..].len() - part[end..].trim_start().len();
            }
            if done < start {
                out.push(Segment::Text(range.start + done..range.start + start));
            }
            out.push(Segment::Token {
                id: token.id,
                range: range.start + start..range.start + end,
            });
            done = end;
        }
        out.push(Segment::Text(range.start + done..range.end));
    }
}

/// `\w` of the reference's regular expression.
fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}
