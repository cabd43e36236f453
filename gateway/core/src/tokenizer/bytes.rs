//! The bytes that each token id stands for.

use super::AddedToken;

/// Bytes of every token of a byte-level vocabulary.
pub struct TokenBytes {
    /// `bytes[ends[id - 1]..ends[id]]` belongs to `id`.
    ends: Vec<u32>,
    bytes: Vec<u8>,
}

impl TokenBytes {
    /// Reads vocabulary and decoder of a `tokenizer.json`.
    ///
    /// # Errors
    /// A tokenizer that does not decode byte by byte.
    pub(super) fn new(tokenizer: &serde_json::Value, added: &[AddedToken]) -> Result<Self, String> {
        check_decoder(&tokenizer["decoder"])?;
        let vocabulary = tokenizer["model"]["vocab"]
            .as_object()
            .ok_or("model.vocab is missing; only BPE models are supported")?;
        let mut texts: Vec<Option<&str>> = Vec::new();
        let mut set = |id: u64, text| -> Result<(), String> {
            let at = usize::try_from(id).ok().filter(|&at| at < MAX_VOCABULARY);
            let at = at.ok_or_else(|| format!("the token id {id} is out of range"))?;
            if texts.len() <= at {
                texts.resize(at + 1, None);
            }
            texts[at] = Some(text);
            Ok(())
        };
        for (text, id) in vocabulary {
            let id = id.as_u64().ok_or_else(|| format!("the id of {text:?} is no number"))?;
            set(id, text.as_str())?;
        }
        for token in added {
            set(u64::from(token.id), token.content.as_str())?;
        }
        let alphabet = byte_alphabet();
        let mut table = Self { ends: Vec::with_capacity(texts.len()), bytes: Vec::new() };
        for text in texts {
            table.push(text.unwrap_or_default(), &alphabet)?;
        }
        Ok(table)
    }

    fn push(&mut self, text: &str, alphabet: &[Option<u8>; ALPHABET]) -> Result<(), String> {
        let start = self.bytes.len();
        for character in text.chars() {
            match alphabet.get(character as usize).copied().flatten() {
                Some(byte) => self.bytes.push(byte),
                // a text outside the byte alphabet stands for itself
                None => {
                    self.bytes.truncate(start);
                    self.bytes.extend_from_slice(text.as_bytes());
                    break;
                }
            }
        }
        let end = u32::try_from(self.bytes.len()).map_err(|_| "the vocabulary is too large")?;
        self.ends.push(end);
        Ok(())
    }

    /// Number of ids, the largest plus one.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of `id`; empty if no token has it.
    pub fn get(&self, id: u32) -> &[u8] {
        let at = id as usize;
        let Some(&end) = self.ends.get(at) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

const MAX_VOCABULARY: usize = 1 << 24;
const ALPHABET: usize = 0x144;

/// The byte that each character of the GPT-2 byte alphabet stands for: printable bytes stand for
/// themselves, the others are counted up from U+0100.
fn byte_alphabet() -> [Option<u8>; ALPHABET] {
    let mut table = [None; ALPHABET];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        table[code] = Some(byte);
    }
    table
}

fn check_decoder(decoder: &serde_json::Value) -> Result<(), String> {
    let kinds: Vec<&str> = match decoder["type"].as_str() {
        Some("Sequence") => decoder["decoders"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|step| step["type"].as_str())
            .collect(),
        Some(kind) => vec![kind],
        None => Vec::new(),
    };
    if kinds == ["ByteLevel"] {
        return Ok(());
    }
    Err(format!("the decoder is {kinds:?}; only ByteLevel is supported"))
}
