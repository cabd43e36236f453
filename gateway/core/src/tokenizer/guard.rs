//! Keeps typed text from becoming control tokens: a character that occurs nowhere in the request
//! is put inside every added token's text, and taken out again once the true ones are found.

use super::AddedVocabulary;
use aho_corasick::{AhoCorasick, MatchKind};
use std::collections::HashMap;

/// How much of a text is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Added tokens inside the text, and those that it could form with its neighbours.
    Full,
    /// Added tokens inside the text only; for text that is printed between quotes, or looked up.
    Inside,
    /// As `Full`, but the model's own assistant markers keep their meaning.
    Assistant,
}

/// Finds what must be broken in untrusted text.
pub struct Guard {
    all: Option<AhoCorasick>,
    /// Whether there is any at all, which most texts are passed over for several times faster.
    any: Option<AhoCorasick>,
    contents: Vec<String>,
    /// Proper suffixes of added tokens, by first byte.
    tails: HashMap<u8, Vec<String>>,
    /// Proper prefixes of added tokens, by last byte.
    heads: HashMap<u8, Vec<String>>,
}

impl Guard {
    /// Prepares protection against these tokens.
    pub fn new(added: &AddedVocabulary) -> Self {
        let contents: Vec<String> =
            added.tokens().iter().map(|token| token.content.clone()).collect();
        let mut tails: HashMap<u8, Vec<String>> = HashMap::new();
        let mut heads: HashMap<u8, Vec<String>> = HashMap::new();
        for content in &contents {
            for (cut, _) in content.char_indices().skip(1) {
                let (head, tail) = content.split_at(cut);
                tails.entry(tail.as_bytes()[0]).or_default().push(tail.to_owned());
                heads.entry(head.as_bytes()[head.len() - 1]).or_default().push(head.to_owned());
            }
        }
        let index = |kind| {
            AhoCorasick::builder()
                .match_kind(kind)
                .build(&contents)
                .expect("invariant: the same patterns were indexed before")
        };
        let is_some = !contents.is_empty();
        let all = is_some.then(|| index(MatchKind::Standard));
        let any = is_some.then(|| index(MatchKind::LeftmostFirst));
        Self { all, any, contents, tails, heads }
    }

    /// The text with `sentinel` put where it must break; `None` if it needs none.
    /// `exempt` are the assistant markers.
    pub fn protect(
        &self,
        text: &str,
        sentinel: char,
        protection: Protection,
        exempt: &[&str],
    ) -> Option<String> {
        let cuts = self.cuts(text, protection, exempt);
        if cuts.is_empty() {
            return None;
        }
        let mut out = String::with_capacity(text.len() + cuts.len() * sentinel.len_utf8());
        let mut from = 0;
        for cut in cuts {
            out.push_str(&text[from..cut]);
            out.push(sentinel);
            from = cut;
        }
        out.push_str(&text[from..]);
        Some(out)
    }

    /// Whether a text needs any protection.
    pub fn is_needed(&self, text: &str, protection: Protection, exempt: &[&str]) -> bool {
        !self.cuts(text, protection, exempt).is_empty()
    }

    fn cuts(&self, text: &str, protection: Protection, exempt: &[&str]) -> Vec<usize> {
        let mut cuts = Vec::new();
        let (Some(&first), Some(&last)) = (text.as_bytes().first(), text.as_bytes().last()) else {
            return cuts;
        };
        let continues = |tail: &String| tail.starts_with(text) || text.starts_with(tail.as_str());
        if protection != Protection::Inside
            && self.tails.get(&first).is_some_and(|tails| tails.iter().any(continues))
        {
            cuts.push(0);
        }
        let is_any = self.any.as_ref().is_some_and(|any| any.is_match(text));
        let all = self.all.iter().filter(|_| is_any);
        for found in all.flat_map(|all| all.find_overlapping_iter(text)) {
            let content = self.contents[found.pattern().as_usize()].as_str();
            if protection == Protection::Assistant && exempt.contains(&content) {
                continue;
            }
            let width = content.chars().next().map_or(0, char::len_utf8);
            cuts.push(found.start() + width);
        }
        let begins = |head: &String| head.ends_with(text) || text.ends_with(head.as_str());
        if protection != Protection::Inside
            && self.heads.get(&last).is_some_and(|heads| heads.iter().any(begins))
        {
            cuts.push(text.len());
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}

/// Characters that are in none of the texts, those first that no text should use; never more than
/// two passes over the texts.
pub(crate) fn unused_characters(texts: &[&str], wanted: usize) -> Vec<char> {
    const TRIED: usize = 4;
    let noncharacters = ('\u{fdd0}'..='\u{fdef}').chain((0..=16u32).flat_map(|plane| {
        [0xfffe, 0xffff].into_iter().filter_map(move |low| char::from_u32(plane << 16 | low))
    }));
    let is_unused = |character: &char| !texts.iter().any(|text| text.contains(*character));
    let first: Vec<char> =
        noncharacters.clone().take(TRIED).filter(is_unused).take(wanted).collect();
    if first.len() == wanted {
        return first;
    }
    let mut used = vec![false; char::MAX as usize + 1];
    for character in texts.iter().flat_map(|text| text.chars()) {
        used[character as usize] = true;
    }
    let private = ('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
    let all = noncharacters.chain(private).filter(|&character| !used[character as usize]);
    all.take(wanted).collect()
}
