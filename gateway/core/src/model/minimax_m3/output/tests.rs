use super::*;
use crate::json::Json;
use crate::openai::AssistantMessage;
use crate::output::{EngineStop, MessageFolder, ReasoningField, ReplyFolder};

mod cases;
mod m2;
pub(in super::super) mod round_trip;
mod rules;
mod tables;

const MARK: &str = "]<]minimax[>[";

/// Everything a reply came to.
#[derive(Clone, Debug, PartialEq)]
pub(in super::super) struct Reply {
    pub(in super::super) message: AssistantMessage,
    /// Arguments of all calls, also of those that were cut off.
    arguments: Vec<String>,
    account: Vec<Stretch>,
    num_deltas: usize,
    finish_reason: crate::openai::FinishReason,
}

fn options(thinking: ThinkingMode, tools: &[(&str, &str)]) -> OutputOptions {
    let tools = tools.iter().map(|(name, parameters)| ToolSchema {
        name: (*name).to_owned(),
        parameters: Some(Json::parse(parameters.as_bytes()).unwrap()),
        ..ToolSchema::default()
    });
    OutputOptions { thinking, tools: tools.collect() }
}

/// Reads `chunks` and folds the events as the server does.
fn read<'a>(
    options: &OutputOptions,
    chunks: impl IntoIterator<Item = &'a str>,
    stop: EngineStop,
) -> Reply {
    read_as(&dialect::M3, options, chunks, stop)
}

fn read_as<'a>(
    dialect: &'static Dialect,
    options: &OutputOptions,
    chunks: impl IntoIterator<Item = &'a str>,
    stop: EngineStop,
) -> Reply {
    let mut parser = M3Parser::new(options, dialect);
    let mut folder = ReplyFolder::new("reply", 0, ReasoningField::ReasoningContent);
    let mut message = MessageFolder::default();
    let mut arguments: Vec<String> = Vec::new();
    let mut account: Vec<Stretch> = Vec::new();
    let mut num_deltas = 0;
    let mut take = |parser: &mut M3Parser, events: Vec<OutputEvent>| {
        for event in &events {
            match event {
                OutputEvent::CallStart { .. } => arguments.push(String::new()),
                OutputEvent::CallArguments { index, fragment } => {
                    arguments[*index].push_str(fragment);
                }
                _ => {}
            }
        }
        for delta in folder.deltas(events) {
            num_deltas += 1;
            message.add(delta);
        }
        for stretch in parser.take_account() {
            match account.last_mut() {
                Some(last) if last.class == stretch.class => last.num_bytes += stretch.num_bytes,
                _ => account.push(stretch),
            }
        }
    };
    for chunk in chunks {
        let mut events = Vec::new();
        parser.push(chunk, &mut events);
        take(&mut parser, events);
    }
    let mut events = Vec::new();
    parser.finish(&mut events);
    take(&mut parser, events);
    let finish_reason = folder.finish_reason(stop);
    Reply { message: message.finish(&folder), arguments, account, num_deltas, finish_reason }
}

pub(in super::super) fn whole(options: &OutputOptions, text: &str) -> Reply {
    read(options, [text], EngineStop::Stop)
}

/// One character at a time.
fn characters(text: &str) -> Vec<&str> {
    text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]).collect()
}

/// Pieces of the given lengths in characters, over and over.
fn pieces<'a>(text: &'a str, lengths: &[usize]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for &length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let end = rest.char_indices().nth(length.max(1)).map_or(rest.len(), |(at, _)| at);
        let (piece, tail) = rest.split_at(end);
        pieces.push(piece);
        rest = tail;
    }
    pieces
}

fn same(mut one: Reply, mut other: Reply) -> bool {
    one.num_deltas = 0;
    other.num_deltas = 0;
    one == other
}

pub(in super::super) fn block(calls: &str) -> String {
    format!("{MARK}<tool_call>\n{calls}{MARK}</tool_call>")
}

pub(in super::super) fn call(name: &str, elements: &str) -> String {
    format!("{MARK}<invoke name=\"{name}\">{elements}{MARK}</invoke>\n")
}

pub(in super::super) fn element(name: &str, inside: &str) -> String {
    format!("{MARK}<{name}>{inside}{MARK}</{name}>")
}
