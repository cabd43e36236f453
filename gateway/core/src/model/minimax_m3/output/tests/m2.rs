//! The older dialect: plain tags, the same grammar.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

const SCHEMA: &str = r#"{"type":"object","properties":{"s":{"type":"string"},
    "n":{"type":"integer"},"l":{"type":"array","items":{"type":"integer"}},
    "o":{"type":"object"},"u":{"type":["string","null"]}}}"#;

fn tools(thinking: ThinkingMode) -> OutputOptions {
    options(thinking, &[("f", SCHEMA), ("g", "{}")])
}

fn old(options: &OutputOptions, raw: &str) -> Reply {
    let whole = read_as(&dialect::M2, options, [raw], EngineStop::Stop);
    let mut ways = vec![characters(raw)];
    ways.extend(raw.char_indices().map(|(at, _)| Vec::from(<[&str; 2]>::from(raw.split_at(at)))));
    for chunks in ways {
        let split = read_as(&dialect::M2, options, chunks, EngineStop::Stop);
        assert!(same(split.clone(), whole.clone()), "{split:#?} {whole:#?}");
    }
    let total: usize = whole.account.iter().map(|stretch| stretch.num_bytes).sum();
    assert_eq!(total, raw.len());
    whole
}

#[test]
fn thinking_words_and_calls_are_read_by_the_same_grammar() {
    let raw = "I think.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name=\"f\">\n\
        <parameter name=\"s\">a <b> & \"c\"\n</parameter>\n<parameter name=\"n\">3</parameter>\n\
        <parameter name=\"l\">[1, 2]</parameter>\n<parameter name=\"o\">{\"k\": null}</parameter>\n\
        <parameter name=\"u\">null</parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n\
        </minimax:tool_call>";
    let reply = old(&tools(ThinkingMode::Enabled), raw);
    assert_eq!(reply.message.reasoning_content.as_deref(), Some("I think.\n"));
    assert_eq!(reply.message.content.as_deref(), Some("\n\nI look.\n"));
    let arguments: Vec<_> =
        reply.message.tool_calls.iter().map(|call| call.function.arguments.as_str()).collect();
    let first = r#"{"s":"a <b> & \"c\"\n","n":3,"l":[1,2],"o":{"k":null},"u":null}"#;
    assert_eq!(arguments, [first, "{}"]);
}

#[test]
fn what_is_no_call_is_text() {
    for raw in [
        "Use <invoke name=\"f\"> to call.",
        "<minimax:tool_call> begins a block.",
        "<parameter name=\"x\">y</parameter>",
        "<invoke",
        "]<]minimax[>[<tool_call>",
        "a <parameter > b",
        "<think>ing aloud",
    ] {
        let raw = format!("Well: {raw}");
        let reply = old(&tools(ThinkingMode::Disabled), &raw);
        assert_eq!(reply.message.content.as_deref(), Some(&*raw));
        assert!(reply.message.tool_calls.is_empty());
    }
}

#[test]
fn left_out_tags_are_supplied() {
    let block = |inside: &str| format!("<minimax:tool_call>\n{inside}\n</minimax:tool_call>");
    for inside in [
        "<invoke name=\"f\"><parameter name=\"n\">3</parameter></invoke>",
        "<invoke name='f'><parameter name=n>3</invoke>",
        "<invoke name=\"f\"><parameter name=\"n\">3</parameter>",
        "<invoke name=\"f\">\n<parameter name=\"n\">\n3\n</parameter>\n</invoke>\n<invoke name=\"\">",
    ] {
        let reply = old(&tools(ThinkingMode::Disabled), &block(inside));
        assert_eq!(reply.message.tool_calls[0].function.arguments, r#"{"n":3}"#, "{inside}");
    }
}

#[test]
fn the_template_names_the_dialect() {
    let old = "{{ '<minimax:tool_call>' }}";
    assert_eq!(Dialect::of_template(old), &dialect::M2);
    assert_eq!(Dialect::of_template("{{ ']<]minimax[>[<tool_call>' }}"), &dialect::M3);
    assert_eq!(Dialect::of_template("no calls at all"), &dialect::M3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_output_is_an_error_and_chunking_changes_nothing(
        pieces_of_output in vec(prop_oneof![
            Just("<minimax:tool_call>"), Just("</minimax:tool_call>"), Just("<invoke name=\"f\">"),
            Just("</invoke>"), Just("<parameter name=\"s\">"), Just("<parameter name=\"l\">"),
            Just("</parameter>"), Just("<parameter "), Just("<invoke "), Just("<think>"),
            Just("</think>"), Just("<minimax"), Just(">"), Just("\n"), Just("word"), Just("[1]"),
            Just("🙂"), Just("name=\"n\""),
        ], 0..20),
        lengths in vec(1..9usize, 1..5),
        is_thinking in any::<bool>(),
    ) {
        let raw = pieces_of_output.concat();
        let mode = if is_thinking { ThinkingMode::Enabled } else { ThinkingMode::Disabled };
        let options = tools(mode);
        let whole = read_as(&dialect::M2, &options, [raw.as_str()], EngineStop::Stop);
        let split = read_as(&dialect::M2, &options, pieces(&raw, &lengths), EngineStop::Stop);
        prop_assert!(same(whole.clone(), split.clone()), "{:#?}\n{:#?}", whole, split);
        let total: usize = whole.account.iter().map(|stretch| stretch.num_bytes).sum();
        prop_assert_eq!(total, raw.len());
        for call in &whole.message.tool_calls {
            let arguments = Json::parse(call.function.arguments.as_bytes());
            prop_assert!(matches!(arguments, Ok(Json::Object(_))), "{}", call.function.arguments);
        }
    }
}
