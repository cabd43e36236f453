//! Any JSON as a tool's schema, and any output under it: a grammar or a refusal with words, and a
//! reader that is the same whole and in pieces. The schema ends at the first byte 255.
#![no_main]

#[path = "../output_parser_body.rs"]
mod body;

use std::path::Path;
use std::sync::{Arc, LazyLock};

use gateway_core::constraint::{ConstraintSpec, OutputRules, ResponseFormat, ToolChoice};
use gateway_core::json::Json;
use gateway_core::model::{self, ModelFiles, ModelSpec, ThinkingMode, ToolSchema};
use libfuzzer_sys::fuzz_target;

const END_OF_SCHEMA: u8 = 255;
/// Workers take no more.
const MAX_GRAMMAR_BYTES: usize = 480 << 10;

static SPEC: LazyLock<Arc<dyn ModelSpec>> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../worker/m3stack/checkpoints/tiny");
    let files = ModelFiles::read(Path::new(folder)).expect("the built-in checkpoint");
    model::load(&files).expect("the built-in checkpoint")
});

/// Asks for the language of these rules; whether there is one.
fn has_grammar(rules: &OutputRules) -> bool {
    SPEC.banned_token_ids(rules);
    match SPEC.constraint(rules) {
        Ok(Some(constraint)) => {
            assert!(!constraint.param.is_empty());
            if let ConstraintSpec::Lark(grammar) = constraint.spec {
                assert!(grammar.len() <= MAX_GRAMMAR_BYTES);
            }
            true
        }
        Ok(None) => panic!("{rules:?} ask for something"),
        Err(refusal) => {
            assert!(!refusal.message.is_empty() && refusal.param.is_some(), "{refusal:?}");
            false
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some(end) = bytes.iter().position(|byte| *byte == END_OF_SCHEMA) else { return };
    let Ok(schema) = Json::parse(&bytes[..end]) else { return };
    let output = &bytes[end + 1..];
    let thinking = [ThinkingMode::Enabled, ThinkingMode::Disabled, ThinkingMode::Adaptive];
    let thinking = thinking[usize::from(output.first().copied().unwrap_or(0)) % 3];
    for strict in [false, true] {
        let tool = ToolSchema {
            name: "f".to_owned(),
            parameters: Some(schema.clone()),
            strict,
            param: "tools[0].function.parameters".to_owned(),
        };
        let choice = ToolChoice::Required;
        let rules =
            OutputRules { thinking, tools: vec![tool].into(), choice, ..OutputRules::default() };
        let is_short = bytes.len() < 1 << 12;
        assert!(has_grammar(&rules) || strict || !is_short, "a tool that is not strict is refused");
        let format = ResponseFormat::JsonSchema {
            name: "answer".to_owned(),
            schema: schema.clone(),
            strict,
        };
        has_grammar(&OutputRules { thinking, format, ..OutputRules::default() });
    }
    body::check_with(output, Some(schema));
});
