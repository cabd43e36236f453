//! Text to ids with the checkpoint's tokenizer file, added tokens told apart from text.

mod added;
mod bytes;
mod engine;
mod guard;

pub use added::{AddedToken, AddedVocabulary, Segment};
pub use bytes::TokenBytes;
pub use engine::{EngineChoice, OrdinaryEncoder};
pub(crate) use guard::unused_characters;
pub use guard::{Guard, Protection};

use crate::model::{ModelFiles, ModelLoadError};
use std::sync::Arc;

/// The checkpoint's tokenizer.
pub struct Tokenizer {
    encoder: Box<dyn OrdinaryEncoder>,
    added: AddedVocabulary,
    guard: Guard,
    bytes: Arc<TokenBytes>,
    /// What the tokenizer's own post-processor puts before and after a text.
    affixes: (Vec<u32>, Vec<u32>),
    refusal: Option<String>,
}

impl Tokenizer {
    /// Builds the tokenizer from the checkpoint's files.
    ///
    /// # Errors
    /// Files that contradict each other, or a tokenizer of a kind that is not supported.
    pub fn open(files: &ModelFiles, choice: EngineChoice) -> Result<Self, ModelLoadError> {
        Self::build(files.tokenizer_json()?, &files.added_tokens, choice)
            .map_err(|message| files.invalid("tokenizer.json", message))
    }

    fn build(
        json: serde_json::Value,
        added_tokens: &[AddedToken],
        choice: EngineChoice,
    ) -> Result<Self, String> {
        let added = AddedVocabulary::new(added_tokens, !json["normalizer"].is_null())?;
        let bytes = TokenBytes::new(&json, added_tokens)?;
        let built = engine::build(json, choice)?;
        let guard = Guard::new(&added);
        let tokenizer = Self {
            encoder: built.encoder,
            added,
            guard,
            bytes: Arc::new(bytes),
            affixes: built.affixes,
            refusal: built.refusal,
        };
        tokenizer.check_added_unreachable()?;
        Ok(tokenizer)
    }

    /// Ordinary text must never come out as an added token, or typed text could pose as control.
    fn check_added_unreachable(&self) -> Result<(), String> {
        for token in self.added.tokens() {
            let ids = self.encode_ordinary(&token.content)?;
            if let Some(id) = ids.iter().find(|&&id| self.added.by_id(id).is_some()) {
                return Err(format!(
                    "the text {:?} encodes to the added token {id} even as ordinary text",
                    token.content
                ));
            }
        }
        Ok(())
    }

    /// Name of the engine in use.
    pub fn engine_name(&self) -> &'static str {
        self.encoder.name()
    }

    /// Why the fast engine was refused, if it was; to be logged by the caller.
    pub fn fast_engine_refusal(&self) -> Option<&str> {
        self.refusal.as_deref()
    }

    /// The added tokens.
    pub fn added(&self) -> &AddedVocabulary {
        &self.added
    }

    /// Protection of untrusted text.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Bytes of every token.
    pub fn bytes(&self) -> &Arc<TokenBytes> {
        &self.bytes
    }

    /// Ids of text in which no added token is meant.
    ///
    /// # Errors
    /// The engine's own failure; no text is known to cause one.
    pub fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>, String> {
        if text.is_empty() { Ok(Vec::new()) } else { self.encoder.encode(text) }
    }

    /// Ids of text in which every added token is meant, as a plain tokenizer would give;
    /// `add_special_tokens` adds what its post-processor adds.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_ordinary`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, String> {
        let mut ids = Vec::with_capacity(text.len() / 4 + 2);
        if add_special_tokens {
            ids.extend_from_slice(&self.affixes.0);
        }
        for segment in self.added.split(text) {
            match segment {
                Segment::Text(range) => ids.extend(self.encode_ordinary(&text[range])?),
                Segment::Token { id, .. } => ids.push(id),
            }
        }
        if add_special_tokens {
            ids.extend_from_slice(&self.affixes.1);
        }
        Ok(ids)
    }
}

#[cfg(test)]
pub(crate) mod tests;
