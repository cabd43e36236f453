//! The two tokenizer engines behind one trait, and the check that the fast one earns its place.

use serde_json::Value;

/// Encodes text in which no added token is meant.
pub trait OrdinaryEncoder: Send + Sync {
    /// Name for logs.
    fn name(&self) -> &'static str;

    /// Ids of a text.
    ///
    /// # Errors
    /// The engine's own failure.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
}

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// The fast one if it agrees with the reference, else the reference.
    #[default]
    Auto,
    /// `fastokens`; an error if it cannot be used.
    Fast,
    /// `tokenizers`.
    Reference,
}

/// An engine and what was found out while building it.
pub(super) struct BuiltEngine {
    pub(super) encoder: Box<dyn OrdinaryEncoder>,
    pub(super) affixes: (Vec<u32>, Vec<u32>),
    pub(super) refusal: Option<String>,
}

/// Builds the engine of a `tokenizer.json`, which is taken apart: added tokens are handled
/// outside the engines.
pub(super) fn build(mut json: Value, choice: EngineChoice) -> Result<BuiltEngine, String> {
    for (field, empty) in [
        ("added_tokens", Value::Array(Vec::new())),
        ("truncation", Value::Null),
        ("padding", Value::Null),
    ] {
        json[field] = empty;
    }
    let text = serde_json::to_vec(&json).map_err(|error| error.to_string())?;
    let open_reference =
        || tokenizers::Tokenizer::from_bytes(&text).map_err(|error| error.to_string());
    if choice == EngineChoice::Reference {
        let reference = open_reference()?;
        let affixes = affixes(&reference)?;
        return Ok(BuiltEngine { encoder: Box::new(Reference(reference)), affixes, refusal: None });
    }
    json["post_processor"] = Value::Null;
    let can_cut = splits_after_newlines(&json["pre_tokenizer"]);
    // a large vocabulary takes seconds to open, so both engines are opened side by side
    let (reference, fast) = std::thread::scope(|scope| {
        let fast = scope.spawn(|| fastokens::Tokenizer::from_json(json));
        (open_reference(), fast.join())
    });
    let reference = reference?;
    let affixes = affixes(&reference)?;
    let reference = Reference(reference);
    let fast = match fast {
        Ok(Ok(mut fast)) => {
            fast.enable_segment_cache(SEGMENT_CACHE_BYTES);
            checked(Fast { tokenizer: fast, can_cut }, &reference)
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("fastokens failed while opening".to_owned()),
    };
    match fast {
        Ok(fast) => Ok(BuiltEngine { encoder: Box::new(fast), affixes, refusal: None }),
        Err(reason) if choice == EngineChoice::Fast => Err(reason),
        Err(reason) => {
            Ok(BuiltEngine { encoder: Box::new(reference), affixes, refusal: Some(reason) })
        }
    }
}

/// The fast engine, if it gives what the reference gives.
fn checked(fast: Fast, reference: &Reference) -> Result<Fast, String> {
    for text in check_corpus() {
        let (found, wanted) = (fast.encode(&text)?, reference.encode(&text)?);
        if found != wanted {
            let at = found.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
            return Err(format!("fastokens differs from tokenizers at token {at} of {text:.40?}"));
        }
    }
    Ok(fast)
}

/// Text and ids of segments between added tokens that the fast engine remembers: system blocks and
/// earlier turns come again with every request of a conversation.
const SEGMENT_CACHE_BYTES: usize = 32 << 20;

struct Reference(tokenizers::Tokenizer);

impl OrdinaryEncoder for Reference {
    fn name(&self) -> &'static str {
        "tokenizers"
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoding = self.0.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }
}

struct Fast {
    tokenizer: fastokens::Tokenizer,
    /// Long texts may be cut where no token can cross.
    can_cut: bool,
}

impl OrdinaryEncoder for Fast {
    fn name(&self) -> &'static str {
        "fastokens"
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let pieces = if self.can_cut { pieces(text) } else { vec![text] };
        let segments: Vec<_> = pieces.into_iter().map(fastokens::EncodeSegment::ordinary).collect();
        // through this door, unlike the others, a single segment is remembered
        self.tokenizer.encode_segments(&segments).map_err(|error| error.to_string())
    }
}

/// Least size of a piece: small enough that a long prompt which differs from an earlier one at its
/// end is remembered up to there, large enough that looking pieces up costs nothing.
const PIECE_BYTES: usize = 8 * 1024;

/// Cuts a long text where no token can cross: before a visible ASCII byte that begins a line. The
/// same beginning is cut the same way, whatever follows it.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::with_capacity(text.len() / PIECE_BYTES + 1);
    let mut rest = text;
    while rest.len() > 2 * PIECE_BYTES {
        let bytes = rest.as_bytes();
        let begins_a_line = |at: &usize| bytes[at - 1] == b'\n' && bytes[*at].is_ascii_graphic();
        let Some(at) = (PIECE_BYTES..rest.len()).find(begins_a_line) else { break };
        let (piece, tail) = rest.split_at(at);
        pieces.push(piece);
        rest = tail;
    }
    pieces.push(rest);
    pieces
}

/// Whether a pre-tokenizer is the one of M3, of which the cuts are known to be right: a newline
/// ends a word, and what may follow it in the same word is white space only.
fn splits_after_newlines(pre_tokenizer: &Value) -> bool {
    let parts = pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice);
    let [split, bytes] = parts else { return false };
    split["type"] == "Split"
        && split["pattern"]["Regex"] == WORDS
        && split["behavior"] == "Isolated"
        && split["invert"] == false
        && bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false
}

/// Source: `tokenizer.json` of the built-in checkpoint, which has the layout of M3.
const WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// What the post-processor puts before and after a text.
fn affixes(tokenizer: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    const PROBE: &str = "a";
    let ids = |special| {
        tokenizer
            .encode_fast(PROBE, special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| error.to_string())
    };
    let (bare, full) = (ids(false)?, ids(true)?);
    let at = full
        .windows(bare.len().max(1))
        .position(|window| window == bare)
        .ok_or("the post-processor changes the text's own tokens, which is not supported")?;
    Ok((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

/// About 10 kB of awkward text: scripts, spaces, digits, code, emoji, combining marks.
fn check_corpus() -> Vec<String> {
    const PIECES: [&str; 20] = [
        "The quick brown fox can't jump over the lazy dog's 1234567890 back; it DIDN'T try.\r\n\r\n",
        "fn main() {\n    let xs = vec![1, 2, 3];\n\t\tprintln!(\"{xs:?}\"); // ok\n}\n\n\n",
        "/* a */\n/** b */\nfoo(bar)/baz\\qux http://example.org/a?b=c&d=%20#e\n",
        "   leading and trailing   \t \n \n  mixed \u{a0}\u{3000} spaces\u{200b}\u{2028}\u{2029}end",
        "北京的天气很好，今天气温二十五度。我们去公园吧！",
        "東京タワーは高さ333メートルです。ひらがなとカタカナ。",
        "안녕하세요 세계! 한국어 문장입니다.",
        "Съешь ещё этих мягких французских булок, да выпей чаю",
        "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣٤٥",
        "नमस्ते दुनिया क्षत्रिय १२३",
        "Ünïcödé nai\u{308}ve e\u{301}\u{323}\u{302} Ǆ ǅ ǆ ﬁ ﬂ ſ İ ı",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ☀️🚲 \u{1f1e9}\u{1f1ea}",
        "]<]minimax[>[<tool_call> <mm:think> </mm:think> [e~[ ]~b] ]~!b[",
        "'s 'T 're'VE 'M 'll 'D it's IT'S O'Reilly ''' \"\"",
        "1 12 123 1234 12345 1,234,567.89 3.14e-10 0x1F 0b101 ½ ² Ⅷ",
        "a_b-c.d:e;f|g~h`i^j*k+l=m<n>o[p]q{r}s(t)u!v?w@x#y$z%",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "================================\n--------------------------------\n",
        "{\"name\": \"get_weather\", \"parameters\": {\"type\": \"object\", \"n\": [1, -2.5e3, null]}}",
        "\u{0}\u{1}\u{7f}\u{80}\u{fffd}\u{feff}\u{e000}\u{10ffff}",
    ];
    let mut texts: Vec<String> = PIECES.iter().map(|&piece| piece.to_owned()).collect();
    // every pair of neighbours, so that what joins over an edge is checked too
    for (at, first) in PIECES.iter().enumerate() {
        texts.push(format!("{first}{}", PIECES[(at * 7 + 3) % PIECES.len()]));
        texts.push(format!("{}\n {first}", PIECES[(at * 11 + 5) % PIECES.len()]));
    }
    texts.push(PIECES.concat());
    texts
}

#[cfg(test)]
mod tests {
    use super::{PIECE_BYTES, pieces, splits_after_newlines};

    #[test]
    fn a_common_beginning_is_cut_alike() {
        let lines: String = (0..4000).map(|number| format!("line {number}\n\n  more\n")).collect();
        let (one, other) = (format!("{lines}x"), format!("{lines}y\nz"));
        let (cut, again) = (pieces(&one), pieces(&other));
        assert!(cut.len() > 5);
        assert_eq!(cut[..cut.len() - 1], again[..cut.len() - 1]);
        assert_eq!(cut.concat(), one);
        for piece in &cut[1..] {
            assert!(piece.starts_with("line"), "{piece:.20}");
        }
        assert!(cut[..cut.len() - 1].iter().all(|piece| piece.len() >= PIECE_BYTES));
    }

    #[test]
    fn a_text_without_lines_stays_whole() {
        let text = "no end ".repeat(10_000);
        assert_eq!(pieces(&text), [&text]);
    }

    #[test]
    fn only_the_pre_tokenizer_of_m3_is_known_to_split_so() {
        let folder = crate::checkpoint::tests::tiny_dir();
        let text = std::fs::read(folder.join("tokenizer.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert!(splits_after_newlines(&json["pre_tokenizer"]));
        json["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext".into();
        assert!(!splits_after_newlines(&json["pre_tokenizer"]));
        assert!(!splits_after_newlines(&serde_json::Value::Null));
    }
}
