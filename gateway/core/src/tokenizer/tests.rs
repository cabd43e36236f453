use super::*;
use crate::checkpoint::tests::{tiny_dir, tiny_model};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::OnceLock;

fn tiny_json() -> Value {
    let text = std::fs::read(tiny_dir().join("tokenizer.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The public library, added tokens and all.
pub(crate) fn reference() -> &'static tokenizers::Tokenizer {
    static REFERENCE: OnceLock<tokenizers::Tokenizer> = OnceLock::new();
    REFERENCE.get_or_init(|| {
        tokenizers::Tokenizer::from_file(tiny_dir().join("tokenizer.json")).unwrap()
    })
}

fn ids(tokenizer: &tokenizers::Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode_fast(text, special).unwrap().get_ids().to_vec()
}

/// Text in which added tokens, their beginnings and their ends are frequent.
pub(crate) fn texts() -> impl Strategy<Value = String> {
    let contents: Vec<String> = tiny_model()
        .prompt_builder
        .tokenizer()
        .added()
        .tokens()
        .iter()
        .map(|t| t.content.clone())
        .collect();
    let token = proptest::sample::select(contents);
    let pieces = prop_oneof![
        2 => token.clone(),
        2 => (token.clone(), any::<prop::sample::Index>()).prop_map(|(t, at)| t[..at.index(t.len())].to_owned()),
        2 => (token, any::<prop::sample::Index>()).prop_map(|(t, at)| t[at.index(t.len())..].to_owned()),
        3 => "[a-zA-Z0-9 ]{0,6}",
        1 => any::<String>(),
        1 => Just("\n\n".to_owned()),
        1 => proptest::sample::select(vec!["]", "<", "[", ">", "北京", "🙂", "'s", "\u{fdd0}", "\u{fdd1}"])
            .prop_map(str::to_owned),
    ];
    vec(pieces, 0..10).prop_map(|pieces| pieces.concat())
}

/// A tokenizer of single bytes with added tokens of every flavour.
fn flavoured(tokens: Vec<Value>, normalizer: Value) -> Value {
    let mut json: Value =
        serde_json::from_str(include_str!("../../../../tests/data/tiny_m3/tokenizer.json"))
            .unwrap();
    json["added_tokens"] = Value::Array(tokens);
    json["normalizer"] = normalizer;
    json
}

fn token(id: u32, content: &str, flags: [bool; 5]) -> (AddedToken, Value) {
    let [special, normalized, lstrip, rstrip, single_word] = flags;
    let token = AddedToken {
        id,
        content: content.to_owned(),
        special,
        normalized,
        lstrip,
        rstrip,
        single_word,
    };
    let json = json!({
        "id": id, "content": content, "special": special, "normalized": normalized,
        "lstrip": lstrip, "rstrip": rstrip, "single_word": single_word,
    });
    (token, json)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ids_equal_the_reference_s(text in texts(), special in any::<bool>()) {
        let found = tiny_model().prompt_builder.tokenizer().encode(&text, special).unwrap();
        prop_assert_eq!(found, ids(reference(), &text, special));
    }

    #[test]
    fn protected_text_holds_no_added_token_and_is_restored(
        before in texts(),
        text in texts(),
        after in texts(),
    ) {
        let tokenizer = tiny_model().prompt_builder.tokenizer();
        let sentinel = unused_characters(&[&before, &text, &after], 1)[0];
        let guarded = tokenizer.guard().protect(&text, sentinel, Protection::Full, &[]);
        let guarded = guarded.unwrap_or_else(|| text.clone());
        prop_assert_eq!(guarded.replace(sentinel, ""), text.clone());
        // whatever stands around it, no added token reaches into it
        let whole = format!("{before}{guarded}{after}");
        let inside = before.len()..before.len() + guarded.len();
        for segment in tokenizer.added().split(&whole) {
            if let Segment::Token { range, .. } = segment {
                let is_outside = range.end <= inside.start || range.start >= inside.end;
                prop_assert!(is_outside || inside.is_empty(), "{whole:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn flags_of_added_tokens_are_honoured(
        flags in vec(any::<[bool; 5]>(), 5),
        texts in vec("(ab|abc|bca|<x>|<x><x>| |  |_|\n|é|a){0,8}", 8),
    ) {
        let contents = ["ab", "abc", "bca", "<x>", "<x><x>"];
        let made: Vec<(AddedToken, Value)> = contents
            .iter()
            .zip(&flags)
            .enumerate()
            .map(|(at, (content, flags))| token(5000 + at as u32, content, *flags))
            .collect();
        let json = flavoured(made.iter().map(|(_, json)| json.clone()).collect(), Value::Null);
        let wanted = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&json).unwrap()).unwrap();
        let tokens: Vec<AddedToken> = made.into_iter().map(|(token, _)| token).collect();
        let tokens: Vec<AddedToken> = tokens
            .into_iter()
            .map(|token| AddedToken { id: wanted.token_to_id(&token.content).unwrap(), ..token })
            .collect();
        let tokenizer = Tokenizer::build(json, &tokens, EngineChoice::Reference).unwrap();
        for text in &texts {
            let found = tokenizer.encode(text, false).unwrap();
            prop_assert_eq!(found, ids(&wanted, text, false), "{:?} {:?}", text, tokens);
        }
    }
}

#[test]
fn an_unused_character_is_found_in_two_passes_whatever_is_typed() {
    assert_eq!(unused_characters(&["a"], 2), ['\u{fdd0}', '\u{fdd1}']);
    let noncharacters: String = ('\u{fdd0}'..='\u{fdef}').collect();
    assert_eq!(unused_characters(&[&noncharacters, "\u{fffe}"], 1), ['\u{ffff}']);
    let everything: String = ('\u{1}'..=char::MAX).collect();
    assert!(unused_characters(&[&everything], 1).is_empty());
}

#[test]
fn what_the_post_processor_adds_is_found_out() {
    let mut json = tiny_json();
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "]~!b[", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[e~[", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "]~!b[": {"id": "]~!b[", "ids": [2434], "tokens": ["]~!b["]},
            "[e~[": {"id": "[e~[", "ids": [2420], "tokens": ["[e~["]},
        },
    });
    let added = tiny_model().prompt_builder.tokenizer().added().tokens();
    let tokenizer = Tokenizer::build(json, added, EngineChoice::Auto).unwrap();
    let bare = tokenizer.encode("abc", false).unwrap();
    let full = tokenizer.encode("abc", true).unwrap();
    assert_eq!(full, [&[2434], bare.as_slice(), &[2420]].concat());
    assert_eq!(tokenizer.encode("", true).unwrap(), [2434, 2420]);
}

#[test]
fn tokens_that_cannot_be_told_from_text_are_refused() {
    let (one, json) = token(5000, "é", [false; 5]);
    let found =
        Tokenizer::build(flavoured(vec![json], Value::Null), &[one], EngineChoice::Reference);
    let message = found.err().unwrap();
    assert!(message.contains("one character cannot be told from text"), "{message}");
    let (normal, json) = token(5000, "<Ab>", [false, true, false, false, false]);
    let found = Tokenizer::build(
        flavoured(vec![json], json!({"type": "Lowercase"})),
        &[normal],
        EngineChoice::Reference,
    );
    let message = found.err().unwrap();
    assert!(message.contains("matched in normalised text"), "{message}");
}

#[test]
fn an_added_token_that_text_can_reach_is_refused() {
    let reachable = ids(reference(), "a", false)[0];
    let (token, json) = token(reachable, "<x>", [false; 5]);
    let mut json = flavoured(vec![json], Value::Null);
    // the vocabulary itself spells the token, and ordinary text reaches it
    let name = "ab";
    let vocabulary = json["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.insert("<x".into(), json!(4000));
    vocabulary.insert("<x>".into(), json!(4001));
    let merges = json["model"]["merges"].as_array_mut().unwrap();
    merges.insert(0, json!(["<", "x"]));
    merges.insert(1, json!(["<x", ">"]));
    json["pre_tokenizer"] = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let spelled = AddedToken { id: 4001, ..token };
    let found = Tokenizer::build(json, &[spelled], EngineChoice::Reference);
    let message = found.err().unwrap_or_else(|| panic!("{name} was accepted"));
    assert!(message.contains("even as ordinary text"), "{message}");
}

#[test]
fn a_decoder_that_is_not_by_bytes_is_refused() {
    let mut json = tiny_json();
    json["decoder"] = json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"});
    let message = Tokenizer::build(json, &[], EngineChoice::Auto).err().unwrap();
    assert!(message.contains("only ByteLevel is supported"), "{message}");
}

#[test]
fn bytes_of_every_token_decode_as_the_reference_decodes() {
    let table = tiny_model().prompt_builder.tokenizer().bytes();
    for id in 0..table.len() as u32 {
        let Some(_) = reference().id_to_token(id) else { continue };
        let wanted = reference().decode(&[id], false).unwrap();
        assert_eq!(String::from_utf8_lossy(table.get(id)), wanted, "{id}");
    }
}

#[test]
fn the_fast_engine_is_refused_if_it_differs() {
    // the fast engine does not know this pre-tokenizer
    let mut json = tiny_json();
    json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    ]});
    let tokenizer = Tokenizer::build(json.clone(), &[], EngineChoice::Auto).unwrap();
    assert_eq!(tokenizer.engine_name(), "tokenizers");
    assert!(tokenizer.fast_engine_refusal().is_some());
    assert!(Tokenizer::build(json, &[], EngineChoice::Fast).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Long texts are encoded in pieces; where a word could reach over a line's end, they are not
    /// cut. Each text comes twice, and with another end: remembered pieces are the same pieces.
    #[test]
    fn long_texts_are_what_the_reference_makes_of_them(
        lines in vec(
            prop_oneof![
                4 => "[a-zA-Z0-9 ,.'()]{0,90}",
                2 => proptest::sample::select(vec![
                    "", " ", "\t", "\r", "  x", "'s", "\u{a0}", "\u{2028}y", "é", "北京", "};", "\r\n",
                    "\u{301}a", "1234567", "...", "//", "\u{85}", " \u{3000}",
                ]).prop_map(str::to_owned),
                1 => any::<String>(),
            ],
            900..1400,
        ),
        ends in vec(proptest::sample::select(vec!["\n", "\n\n", "\r\n", "\n \n", " \n", "\n\t"]), 7),
    ) {
        let tokenizer = tiny_model().prompt_builder.tokenizer();
        let mut text = String::new();
        for (place, line) in lines.iter().enumerate() {
            text.push_str(line);
            text.push_str(ends[place % ends.len()]);
        }
        let ordinary = Tokenizer::build(tiny_json(), &[], EngineChoice::Reference).unwrap();
        for text in [&text, &text, &format!("{text}and on")] {
            prop_assert_eq!(
                tokenizer.encode_ordinary(text).unwrap(),
                ordinary.encode_ordinary(text).unwrap()
            );
        }
    }
}
