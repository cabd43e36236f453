//! The workers' engine for constraints over a small vocabulary: every byte, some longer tokens,
//! and the markers.

use super::super::super::{NAMESPACE, THINK_CLOSE, THINK_OPEN};
use crate::constraint::{Constraint, ConstraintSpec};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use std::sync::{Arc, LazyLock};

pub(super) const NAMESPACE_ID: u32 = 256;
pub(super) const OPEN_ID: u32 = 257;
pub(super) const CLOSE_ID: u32 = 258;
const END_ID: u32 = 259;
const LONGER: [&str; 12] = [
    "tool_call>\n",
    "</tool_call>",
    "<invoke name=\"",
    "\">",
    ">\n",
    "</",
    "item>",
    "null",
    "12",
    "{\"",
    "\":",
    "]<]",
];

static FACTORY: LazyLock<ParserFactory> = LazyLock::new(|| {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for marker in [NAMESPACE, THINK_OPEN, THINK_CLOSE, "[e~["] {
        words.push([b"\xff", marker.as_bytes()].concat());
    }
    words.extend(LONGER.iter().map(|word| word.as_bytes().to_vec()));
    let info = TokRxInfo::new(u32::try_from(words.len()).unwrap(), END_ID);
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)));
    let mut factory = ParserFactory::new_simple(&environment).unwrap();
    factory.quiet();
    factory
});

/// A constraint as a worker has it.
pub(super) struct Engine {
    matcher: Matcher,
}

/// How an output went that was chosen at random.
#[derive(Debug)]
pub(super) enum Walk {
    /// To an end that the constraint allows.
    Whole(String),
    /// Longer than was asked for.
    Endless,
}

impl Engine {
    /// # Errors
    /// What the engine says against the grammar.
    pub(super) fn new(constraint: &Constraint) -> Result<Self, String> {
        let grammar = match &constraint.spec {
            ConstraintSpec::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(serde_json::from_str(schema).unwrap())
            }
            ConstraintSpec::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            ConstraintSpec::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let matcher = Matcher::new(FACTORY.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(error),
            None => Ok(Self { matcher }),
        }
    }

    /// Whether the whole text is a word; markers in it are their tokens, where they count.
    pub(super) fn accepts(&self, text: &str) -> bool {
        let mut matcher = self.matcher.deep_clone();
        if let Err(error) = matcher.consume_tokens(&ids(text)) {
            assert!(!error.to_string().contains("panic"), "{error} at {text}");
            return false;
        }
        matcher.is_accepting().unwrap()
    }

    /// Chooses tokens until an end, at random but with a liking for markers.
    pub(super) fn walk(&self, seed: u64, max_tokens: usize) -> Walk {
        let mut matcher = self.matcher.deep_clone();
        let mut random = Random(seed | 1);
        let mut bytes = Vec::new();
        for _ in 0..max_tokens {
            let mask = matcher.compute_mask_or_eos();
            let mask = mask.unwrap_or_else(|error| {
                panic!(
                    "{} after {}",
                    error.to_string().lines().next().unwrap(),
                    String::from_utf8_lossy(&bytes)
                )
            });
            let allowed: Vec<u32> = (0..NAMESPACE_ID + 4 + LONGER.len() as u32)
                .filter(|&id| mask.is_allowed(id))
                .collect();
            let markers: Vec<u32> =
                allowed.iter().copied().filter(|id| (NAMESPACE_ID..=END_ID).contains(id)).collect();
            let plain: Vec<u32> =
                allowed.iter().copied().filter(|id| (32..127).contains(id)).collect();
            let likes_markers = !markers.is_empty() && random.below(3) == 0;
            let choices = match likes_markers {
                true => &markers,
                false if !plain.is_empty() && random.below(8) > 0 => &plain,
                false => &allowed,
            };
            let id = choices[random.below(choices.len())];
            if id == END_ID {
                return Walk::Whole(String::from_utf8(bytes).unwrap());
            }
            bytes.extend_from_slice(&word(id));
            matcher.consume_token(id).unwrap();
        }
        Walk::Endless
    }
}

fn word(id: u32) -> Vec<u8> {
    match id {
        NAMESPACE_ID => NAMESPACE.into(),
        OPEN_ID => THINK_OPEN.into(),
        CLOSE_ID => THINK_CLOSE.into(),
        id if id < NAMESPACE_ID => vec![u8::try_from(id).unwrap()],
        id => LONGER[(id - END_ID - 1) as usize].into(),
    }
}

fn ids(text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    let mut rest = text;
    let markers = [(NAMESPACE, NAMESPACE_ID), (THINK_OPEN, OPEN_ID), (THINK_CLOSE, CLOSE_ID)];
    while let Some(first) = rest.bytes().next() {
        // in a call, tags of thinking are plain text
        let known = if ids.contains(&NAMESPACE_ID) { &markers[..1] } else { &markers[..] };
        match known.iter().find(|(marker, _)| rest.starts_with(marker)) {
            Some((marker, id)) => {
                ids.push(*id);
                rest = &rest[marker.len()..];
            }
            None => {
                let length = rest.chars().next().map_or(1, char::len_utf8);
                ids.push(u32::from(first));
                ids.extend(rest.as_bytes()[1..length].iter().map(|&byte| u32::from(byte)));
                rest = &rest[length..];
            }
        }
    }
    ids
}

/// xorshift. Source: Marsaglia, "Xorshift RNGs".
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}
