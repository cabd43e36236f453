//! Any output, cut anywhere, is read without a panic, as if it had come whole; every byte is
//! accounted for, and complete calls have arguments that are JSON.

use gateway_core::json::Json;
use gateway_core::model::{self, ModelFiles, ModelSpec, OutputOptions, ThinkingMode, ToolSchema};
use gateway_core::output::{OutputEvent, TextClass};
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// Pieces that bytes below 32 stand for, so that structure is found soon.
const PIECES: [&str; 32] = [
    "]<]minimax[>[",
    "<tool_call>",
    "</tool_call>",
    "<invoke name=\"f\">",
    "</invoke>",
    "<s>",
    "</s>",
    "<n>",
    "</n>",
    "<item>",
    "</item>",
    "<u>",
    "</u>",
    "<o>",
    "</o>",
    "<mm:think>",
    "</mm:think>",
    "<l>",
    "</l>",
    "<invoke name=\"g\">",
    "]<]",
    "minimax[>[",
    "<mm:",
    "</mm:th",
    "\n",
    " ",
    "{\"k\":",
    "[1,",
    "null",
    "12",
    "é",
    "🙂",
];
const SCHEMA: &str = r##"{"type":"object","properties":{"s":{"type":"string"},
    "n":{"type":["integer","string"]},"l":{"type":"array","items":{"$ref":"#"}},"o":{"$ref":"#"},
    "u":{"anyOf":[{"type":"string"},{"type":"array"},{"type":"object"}]}}}"##;

/// The same in the older dialect, whose template writes plain tags.
const OLD_PIECES: [&str; 32] = [
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=\"f\">",
    "</invoke>",
    "<parameter name=\"s\">",
    "<parameter name=\"n\">",
    "<parameter name=\"l\">",
    "<parameter name=\"o\">",
    "<parameter name=\"u\">",
    "</parameter>",
    "<think>",
    "</think>",
    "<invoke name=\"g\">",
    "<invoke ",
    "<parameter ",
    "name=\"",
    "\">",
    "<minimax:",
    "</mini",
    "</para",
    "<invo",
    "</",
    "\n",
    " ",
    "{\"k\":",
    "[1,",
    "null",
    "12",
    "]",
    "}",
    "é",
    "🙂",
];

/// The built-in checkpoint's model, and the same as if its template wrote the older dialect.
static SPECS: LazyLock<[Arc<dyn ModelSpec>; 2]> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../worker/m3stack/checkpoints/tiny");
    let mut files = ModelFiles::read(Path::new(folder)).expect("the built-in checkpoint");
    let new = model::load(&files).expect("the built-in checkpoint");
    files.chat_template = OLD_PIECES[0].to_owned();
    [new, model::load(&files).expect("the built-in checkpoint")]
});

/// Thinking, answer, and name, arguments and completeness of every call.
type Reply = (String, String, Vec<(String, String, bool)>);

fn read(
    spec: &dyn ModelSpec,
    options: &OutputOptions,
    chunks: &[&str],
) -> (Reply, Vec<(TextClass, usize)>) {
    let mut parser = spec.output_parser(options);
    let mut events = Vec::new();
    for chunk in chunks {
        parser.push(chunk, &mut events);
    }
    parser.finish(&mut events);
    let mut reply = Reply::default();
    for event in events {
        match event {
            OutputEvent::Reasoning(text) => reply.0.push_str(&text),
            OutputEvent::Content(text) => reply.1.push_str(&text),
            OutputEvent::CallStart { name, .. } => reply.2.push((name, String::new(), false)),
            OutputEvent::CallArguments { index, fragment } => reply.2[index].1.push_str(&fragment),
            OutputEvent::CallEnd { index } => reply.2[index].2 = true,
        }
    }
    let mut account: Vec<(TextClass, usize)> = Vec::new();
    for stretch in parser.take_account() {
        match account.last_mut() {
            Some(last) if last.0 == stretch.class => last.1 += stretch.num_bytes,
            _ => account.push((stretch.class, stretch.num_bytes)),
        }
    }
    (reply, account)
}

/// Reads what the bytes stand for, whole and in pieces, for a tool of the schema above.
pub fn check(data: &[u8]) {
    check_with(data, Json::parse(SCHEMA.as_bytes()).ok());
}

/// The same for a tool `f` of any schema.
pub fn check_with(data: &[u8], parameters: Option<Json>) {
    let [mode, cut, rest @ ..] = data else { return };
    let dialect = usize::from(*mode / 3 % 2);
    let (spec, pieces) = (&*SPECS[dialect], [PIECES, OLD_PIECES][dialect]);
    let mut raw = String::new();
    for chunk in rest.chunk_by(|one, other| (*one < 32) == (*other < 32)) {
        match chunk[0] {
            0..32 => raw.extend(chunk.iter().map(|byte| pieces[usize::from(*byte)])),
            _ => raw.push_str(&String::from_utf8_lossy(chunk)),
        }
    }
    let thinking = [ThinkingMode::Enabled, ThinkingMode::Disabled, ThinkingMode::Adaptive];
    let tool = ToolSchema { name: "f".to_owned(), parameters, ..ToolSchema::default() };
    let options =
        OutputOptions { thinking: thinking[usize::from(*mode) % 3], tools: vec![tool].into() };
    let step = usize::from(*cut % 16) + 1;
    let places: Vec<usize> = raw.char_indices().map(|(at, _)| at).step_by(step).collect();
    let ends = places.iter().skip(1).copied().chain([raw.len()]);
    let chunks: Vec<&str> = places.iter().zip(ends).map(|(from, to)| &raw[*from..to]).collect();
    let whole = read(spec, &options, &[&raw]);
    assert_eq!(whole, read(spec, &options, &chunks));
    assert_eq!(whole.1.iter().map(|(_, bytes)| bytes).sum::<usize>(), raw.len());
    for (_, arguments, is_complete) in &whole.0.2 {
        assert!(!is_complete || Json::parse(arguments.as_bytes()).is_ok(), "{arguments}");
    }
}
