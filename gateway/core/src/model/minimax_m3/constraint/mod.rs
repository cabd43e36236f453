//! The rules of a request as a language of M3's output: thinking, answer and calls.

mod arguments;
mod numbers;
mod reading;
mod standalone;
mod strings;

use super::output::can_be_called;
use super::{NAMESPACE, THINK_CLOSE, THINK_OPEN};
use crate::constraint::{Constraint, ConstraintSpec, OutputRules, ResponseFormat, ToolChoice};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::lark::{LarkWriter, json, literal, regex, token};
use crate::model::{ThinkingMode, ToolSchema};
use strings::without;

/// Ids of the tokens that structure output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MarkerIds {
    pub(super) namespace: u32,
    pub(super) think_open: u32,
    pub(super) think_close: u32,
}

/// A grammar of more bytes is refused; workers take no more.
const MAX_GRAMMAR_BYTES: usize = 480 << 10;
/// White space in answers that are JSON: enough for pretty printing, too little to get lost in.
const WHITE_SPACE: &str = r"\n?[ \t]{0,40}";

/// The language of these rules; `None` if every output will do.
///
/// # Errors
/// `InvalidRequest` naming what cannot be expressed.
pub(super) fn constraint(
    rules: &OutputRules,
    ids: MarkerIds,
) -> Result<Option<Constraint>, RequestError> {
    let callable: Vec<&ToolSchema> =
        rules.tools.iter().filter(|tool| rules.choice.admits(&tool.name)).collect();
    let is_plain = rules.format == ResponseFormat::Text;
    let is_limited = matches!(rules.choice, ToolChoice::Allowed { .. });
    let has_strict = callable.iter().any(|tool| tool.strict);
    // a forced call leaves no room for an answer
    let answer = if rules.choice.is_forced() { None } else { Some(&rules.format) };
    let param = match answer {
        None => "tool_choice".to_owned(),
        Some(_) if !is_plain => "response_format".to_owned(),
        Some(_) if is_limited => "tool_choice".to_owned(),
        Some(_) if has_strict => first_strict(&callable),
        Some(_) => return Ok(None),
    };
    let after_token_id = (rules.thinking == ThinkingMode::Enabled).then_some(ids.think_close);
    let make = |spec| Some(Constraint { spec, after_token_id, param: param.clone() });
    if callable.is_empty()
        && rules.thinking != ThinkingMode::Adaptive
        && let Some(spec) = answer.and_then(plain_spec)
    {
        return Ok(make(spec));
    }
    let mut lark = LarkWriter::default();
    let block = match callable.as_slice() {
        [] => None,
        tools => Some(block(tools, rules, ids, &mut lark)?),
    };
    let body = match (answer, block) {
        (None, Some(block)) => block,
        (Some(ResponseFormat::Text), Some(block)) => {
            let words = lark.terminal(&words("+"));
            format!("({words})? ({block})?")
        }
        (Some(format), Some(block)) => format!("{} | {block}", answer_rule(format, &mut lark)),
        (Some(format), None) => answer_rule(format, &mut lark),
        (None, None) => {
            let message = "a call is wanted, but no function may be called";
            return Err(RequestError::invalid("tool_choice", message));
        }
    };
    let start = match rules.thinking {
        ThinkingMode::Adaptive => format!("{} ({body})", prologue(ids, &mut lark)),
        ThinkingMode::Enabled | ThinkingMode::Disabled => body,
    };
    let grammar = lark.finish(&start);
    if grammar.len() > MAX_GRAMMAR_BYTES {
        let bytes = grammar.len();
        let message = format!(
            "the grammar of {param} has {bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        );
        return Err(RequestError::invalid(param, message));
    }
    Ok(make(ConstraintSpec::Lark(grammar)))
}

/// Whether these rules say anything about how calls are written.
pub(super) fn concerns_calls(rules: &OutputRules) -> bool {
    let has_callable = rules.tools.iter().any(|tool| rules.choice.admits(&tool.name));
    let has_strict = rules.tools.iter().any(|tool| tool.strict && rules.choice.admits(&tool.name));
    let is_limited = matches!(rules.choice, ToolChoice::Allowed { .. });
    let is_plain = rules.format == ResponseFormat::Text;
    rules.choice.is_forced() || is_limited || has_strict || (has_callable && !is_plain)
}

/// Ids that would begin a call where none is wanted.
pub(super) fn banned(rules: &OutputRules, ids: MarkerIds) -> Vec<u32> {
    let bans = rules.choice == ToolChoice::None && !rules.tools.is_empty();
    if bans { vec![ids.namespace] } else { Vec::new() }
}

fn first_strict(tools: &[&ToolSchema]) -> String {
    tools.iter().find(|tool| tool.strict).map_or_else(String::new, |tool| tool.param.clone())
}

/// A language that needs no grammar of ours.
fn plain_spec(format: &ResponseFormat) -> Option<ConstraintSpec> {
    match format {
        ResponseFormat::JsonObject => {
            Some(ConstraintSpec::JsonSchema(r#"{"type":"object"}"#.to_owned()))
        }
        ResponseFormat::JsonSchema { schema, strict: true, .. } => {
            Some(ConstraintSpec::JsonSchema(schema.to_compact()))
        }
        ResponseFormat::Regex(pattern) => Some(ConstraintSpec::Regex(pattern.clone())),
        ResponseFormat::Grammar(grammar) => Some(ConstraintSpec::Lark(grammar.clone())),
        _ => None,
    }
}

/// The answer in a form.
fn answer_rule(format: &ResponseFormat, lark: &mut LarkWriter) -> String {
    match format {
        ResponseFormat::Text => lark.terminal(&words("*")),
        ResponseFormat::JsonObject => {
            answer_json(&Object::from([("type".to_owned(), "object".into())]), true)
        }
        ResponseFormat::JsonSchema { schema, strict, .. } => {
            answer_json(schema.as_object().unwrap_or(&Object::new()), *strict)
        }
        ResponseFormat::Regex(pattern) => lark.terminal(&regex(pattern)),
        ResponseFormat::Choice(texts) => {
            texts.iter().map(|text| literal(text)).collect::<Vec<_>>().join(" | ")
        }
        ResponseFormat::Grammar(grammar) => format!("%lark {{\n{grammar}\n}}"),
    }
}

fn answer_json(schema: &Object, is_strict: bool) -> String {
    let mut schema = schema.clone();
    let options = standalone::options(is_strict, "whitespace_pattern", WHITE_SPACE.into());
    schema.insert("x-guidance".to_owned(), options);
    json(&Json::Object(schema))
}

/// Text without structure.
fn words(repetition: &str) -> String {
    let any = regex(&format!("(?s:.{repetition})"));
    format!("{any} & ~{}", regex(&without(&[NAMESPACE, THINK_OPEN, THINK_CLOSE])))
}

/// What may stand before the answer if the model decides whether to think.
fn prologue(ids: MarkerIds, lark: &mut LarkWriter) -> String {
    let thoughts = lark.terminal(&words("+"));
    let (open, close) = (token(ids.think_open), token(ids.think_close));
    format!("({open} ({thoughts})? {close} | {close})?")
}

/// A block of calls. Source: the chat template, which writes calls so.
fn block(
    tools: &[&ToolSchema],
    rules: &OutputRules,
    ids: MarkerIds,
    lark: &mut LarkWriter,
) -> Result<String, RequestError> {
    let mark = token(ids.namespace);
    let mut calls = Vec::with_capacity(tools.len());
    for tool in tools {
        calls.push(call(tool, &mark, lark)?);
    }
    let one = lark.fresh_rule();
    lark.rule(&one, &calls.join(" | "));
    // a named function is called once
    let is_single = !rules.parallel || matches!(rules.choice, ToolChoice::Named(_));
    let repetition = if is_single { "" } else { "+" };
    let (open, close) = (literal("<tool_call>\n"), literal("</tool_call>"));
    Ok(format!("{mark} {open} ({one}){repetition} {mark} {close}"))
}

fn call(tool: &ToolSchema, mark: &str, lark: &mut LarkWriter) -> Result<String, RequestError> {
    let refuse = |what: String| {
        let message = format!("{} cannot be enforced: {what}", tool.param);
        RequestError::invalid(tool.param.clone(), message)
    };
    if !can_be_called(&tool.name) {
        return Err(refuse(format!("the name {:?} cannot stand in a call", tool.name)));
    }
    let inside = arguments::arguments(tool, mark, lark).map_err(refuse)?;
    let body = lark.fresh_rule();
    lark.rule(&body, &inside);
    let open = literal(&format!("<invoke name=\"{}\">", tool.name));
    Ok(format!("{mark} {open} {body} {mark} {}", literal("</invoke>\n")))
}

#[cfg(test)]
mod tests;
