//! Ids to text step by step, whole characters only.

use crate::tokenizer::TokenBytes;
use std::sync::Arc;

/// Which tokens leave no text.
#[derive(Clone, Debug, Default)]
pub struct HiddenTokens(Arc<[u32]>);

impl HiddenTokens {
    /// These ids leave no text.
    pub fn new(mut ids: Vec<u32>) -> Self {
        ids.sort_unstable();
        ids.dedup();
        Self(ids.into())
    }

    /// Whether `id` leaves no text.
    pub fn contains(&self, id: u32) -> bool {
        self.0.binary_search(&id).is_ok()
    }
}

/// Turns a stream of ids into a stream of text.
#[derive(Clone)]
pub struct Detokenizer {
    bytes: Arc<TokenBytes>,
    hidden: HiddenTokens,
    /// The beginning of a character whose end has not come.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Starts at the beginning of a text.
    pub fn new(bytes: Arc<TokenBytes>, hidden: HiddenTokens) -> Self {
        Self { bytes, hidden, pending: Vec::new() }
    }

    /// The text that is complete now. Bytes that can never be valid become U+FFFD, one for each
    /// maximal invalid run, as when decoding the whole.
    pub fn push(&mut self, ids: &[u32]) -> String {
        for &id in ids {
            if !self.hidden.contains(id) {
                self.pending.extend_from_slice(self.bytes.get(id));
            }
        }
        let mut text = String::with_capacity(self.pending.len());
        let mut done = 0;
        loop {
            match std::str::from_utf8(&self.pending[done..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    done = self.pending.len();
                    break;
                }
                Err(error) => {
                    let valid = done + error.valid_up_to();
                    text.push_str(
                        std::str::from_utf8(&self.pending[done..valid])
                            .expect("invariant: checked by the call before"),
                    );
                    done = valid;
                    let Some(invalid) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done += invalid;
                }
            }
        }
        self.pending.drain(..done);
        text
    }

    /// The ids have ended. The beginning of a character that never ended is dropped: it is no
    /// text. Gives the number of bytes dropped.
    pub fn finish(&mut self) -> usize {
        std::mem::take(&mut self.pending).len()
    }
}

#[cfg(test)]
mod tests;
