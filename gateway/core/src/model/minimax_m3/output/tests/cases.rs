//! The shared cases, under every chunking.

use super::*;
use crate::openai::FinishReason;

/// Cases of each dialect, and how many there are at least.
const CASES: [(&Dialect, &str, usize); 2] = [
    (&dialect::M3, include_str!("../../../../../../../tests/data/parser/m3_output.json"), 51),
    (&dialect::M2, include_str!("../../../../../../../tests/data/parser/m2_output.json"), 11),
];

fn text(value: Option<&Json>) -> String {
    value.and_then(Json::as_str).unwrap_or_default().to_owned()
}

fn compared(text: &str, rule: Option<&Json>) -> String {
    match rule.and_then(Json::as_str) {
        Some("strip") => text.trim().to_owned(),
        Some("ignore_space") => text.split_whitespace().collect(),
        _ => text.to_owned(),
    }
}

fn case_options(case: &Json) -> OutputOptions {
    let thinking = match case.get("thinking_mode").and_then(Json::as_str) {
        Some("enabled") => ThinkingMode::Enabled,
        Some("disabled") => ThinkingMode::Disabled,
        _ => ThinkingMode::Adaptive,
    };
    let tools = case.get("tools").and_then(Json::as_array).unwrap_or_default();
    let tools = tools.iter().map(|tool| {
        let function = tool.get("function").unwrap();
        ToolSchema {
            name: text(function.get("name")),
            parameters: function.get("parameters").cloned(),
            ..ToolSchema::default()
        }
    });
    OutputOptions { thinking, tools: tools.collect() }
}

/// Equal as JSON values, numbers by value.
fn equal(one: &Json, other: &Json) -> bool {
    match (one, other) {
        (Json::Number(one), Json::Number(other)) => {
            one.literal() == other.literal()
                || (!(one.is_integer() && other.is_integer()) && one.as_f64() == other.as_f64())
        }
        (Json::Array(one), Json::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| equal(one, other))
        }
        (Json::Object(one), Json::Object(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .all(|(key, value)| other.get(key).is_some_and(|other| equal(value, other)))
        }
        _ => one == other,
    }
}

fn call_matches(found: &crate::openai::ToolCall, expected: &Json) -> bool {
    let arguments = Json::parse(found.function.arguments.as_bytes());
    found.function.name == text(expected.get("name"))
        && arguments.is_ok_and(|found| equal(&found, expected.get("arguments").unwrap()))
}

fn matches(reply: &Reply, case: &Json, expected: &Json) -> bool {
    let content = reply.message.content.clone().unwrap_or_default();
    let reasoning = reply.message.reasoning_content.clone().unwrap_or_default();
    let content_rule = case.get("content_compare");
    let reasoning_rule = case.get("reasoning_compare");
    let calls = &reply.message.tool_calls;
    let calls_match = match expected.get("tool_calls") {
        Some(Json::Array(wanted)) => {
            calls.len() == wanted.len()
                && calls.iter().zip(wanted).all(|(found, wanted)| call_matches(found, wanted))
        }
        _ => true,
    };
    let finish = match reply.finish_reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    };
    compared(&content, content_rule) == compared(&text(expected.get("content")), content_rule)
        && compared(&reasoning, reasoning_rule)
            == compared(&text(expected.get("reasoning")), reasoning_rule)
        && calls_match
        && finish == text(expected.get("finish_reason"))
}

fn check(case: &Json, reply: &Reply) {
    let id = text(case.get("id"));
    let expected = case.get("expected").unwrap();
    let any = case.get("expected_any").and_then(Json::as_array);
    let any = any.unwrap_or(std::slice::from_ref(expected));
    assert!(any.iter().any(|expected| matches(reply, case, expected)), "{id}: {reply:#?}");
    if let Some(last) = case.get("last_call") {
        assert!(call_matches(reply.message.tool_calls.last().unwrap(), last), "{id}: {reply:#?}");
    }
    let arguments = reply.message.tool_calls.iter().map(|call| call.function.arguments.as_str());
    let arguments: String = arguments.collect();
    if let Some(wanted) = case.get("arguments_text") {
        assert_eq!(arguments, text(Some(wanted)), "{id}");
    }
    for (key, is_wanted) in [("arguments_text_contains", true), ("arguments_text_excludes", false)]
    {
        for part in case.get(key).and_then(Json::as_array).unwrap_or_default() {
            assert_eq!(arguments.contains(part.as_str().unwrap()), is_wanted, "{id}: {part:?}");
        }
    }
    if case.get("markers_forbidden").is_some() {
        for shown in
            [&reply.message.content, &reply.message.reasoning_content].into_iter().flatten()
        {
            for marker in
                [MARK, "<mm:think>", "</mm:think>", "<minimax:tool_call>", "<invoke", "<parameter"]
            {
                assert!(!shown.contains(marker), "{id}: {shown:?}");
            }
        }
    }
    let ids: std::collections::HashSet<_> =
        reply.message.tool_calls.iter().map(|call| &call.id).collect();
    assert_eq!(ids.len(), reply.message.tool_calls.len(), "{id}");
}

#[test]
fn every_case_holds_under_every_chunking() {
    for (dialect, cases, num_cases) in CASES {
        let cases = Json::parse(cases.as_bytes()).unwrap();
        let cases = cases.get("cases").and_then(Json::as_array).unwrap();
        assert!(cases.len() >= num_cases, "{} cases", cases.len());
        cases.iter().for_each(|case| holds_under_every_chunking(dialect, case));
    }
}

fn holds_under_every_chunking(dialect: &'static Dialect, case: &Json) {
    let read =
        |options: &OutputOptions, chunks: Vec<&str>, stop| read_as(dialect, options, chunks, stop);
    let options = case_options(case);
    let raw = text(case.get("raw_output"));
    let stop = match text(case.get("engine_stop")).as_str() {
        "length" => EngineStop::Length,
        _ => EngineStop::Stop,
    };
    let whole = read(&options, vec![raw.as_str()], stop);
    check(case, &whole);
    let total: usize = whole.account.iter().map(|stretch| stretch.num_bytes).sum();
    assert_eq!(total, raw.len());
    let by_character = read(&options, characters(&raw), stop);
    assert!(same(by_character.clone(), whole.clone()), "{by_character:#?} {whole:#?}");
    // a long value has nothing new to split after its first hundred characters
    let cuts = raw.char_indices().map(|(at, _)| at).filter(|at| raw.len() < 2000 || *at < 300);
    for cut in cuts {
        let (head, tail) = raw.split_at(cut);
        let split = read(&options, vec![head, tail], stop);
        assert!(same(split.clone(), whole.clone()), "cut at {cut}: {split:#?} {whole:#?}");
    }
    for lengths in [[1, 2, 3], [4, 1, 7], [2, 50, 1], [13, 13, 12], [7, 7, 7]] {
        let split = read(&options, pieces(&raw, &lengths), stop);
        assert!(same(split, whole.clone()), "{lengths:?}");
    }
}

#[test]
fn a_long_value_arrives_while_it_is_generated() {
    let options = options(
        ThinkingMode::Disabled,
        &[("save", r#"{"type":"object","properties":{"text":{"type":"string"}}}"#)],
    );
    let raw = block(&call("save", &element("text", &"0123456789".repeat(1000))));
    let reply = read(&options, pieces(&raw, &[4]), EngineStop::Stop);
    assert!(reply.num_deltas > 2400, "{}", reply.num_deltas);
}
