//! `system` and `messages` of Anthropic's protocol, turned into the one form that templates read.

use super::blocks;
use crate::conversation::fields::{Fields, wrong_type};
use crate::conversation::messages::items;
use crate::conversation::turns::{Part, Turns, Unanswered, join};
use crate::conversation::{Limits, MediaRef};
use crate::error::RequestError;
use crate::json::{Json, Object};

/// Begins a system block that a coding agent puts there for its vendor's accounting. It differs in
/// every request: in the prompt it would only defeat the prefix cache.
const BILLING_MARK: &str = "x-anthropic-billing-header:";

/// The normalised messages, and their media in order.
pub(super) fn read(
    body: &Fields,
    limits: &Limits,
) -> Result<(Vec<Json>, Vec<MediaRef>), RequestError> {
    let mut reader = Reader::default();
    reader.system(body.get("system"))?;
    for (index, item) in items(body, limits)?.iter().enumerate() {
        reader.message(&Fields::of(item, format!("messages[{index}]"))?)?;
    }
    reader.end_turn()?;
    reader.turns.finish(limits)
}

/// Whether the last message is an assistant's, which is then to be continued.
pub(super) fn is_open_reply(messages: &[Json]) -> Result<bool, RequestError> {
    let Some(last) = messages.last() else { return Ok(false) };
    if last.get("role").and_then(Json::as_str) != Some("assistant") {
        return Ok(false);
    }
    if last.get("content").and_then(Json::as_str).is_none_or(str::is_empty) {
        return Err(RequestError::invalid(
            "messages",
            "messages ends with an assistant message without text, which cannot be continued",
        ));
    }
    Ok(true)
}

#[derive(Default)]
struct Reader {
    turns: Turns,
    /// Messages since the latest assistant message. They wait until all its calls are answered:
    /// clients spread results over several messages, and a result belongs behind its call.
    waiting: Vec<(Object, Vec<MediaRef>)>,
}

impl Reader {
    fn system(&mut self, system: Option<&Json>) -> Result<(), RequestError> {
        let mut texts = Vec::new();
        for (block, words) in blocks::list(system, "system")? {
            let text = match &block {
                None => words,
                Some(block) => match blocks::kind(block)? {
                    "text" => blocks::text(block)?,
                    other => {
                        let path = block.path("type");
                        let message = format!("{path} is {other:?}; system blocks are text");
                        return Err(RequestError::invalid(path, message));
                    }
                },
            };
            if !text.is_empty() && !text.starts_with(BILLING_MARK) {
                texts.push(text);
            }
        }
        if !texts.is_empty() {
            // each block is a text of its own; without a break their words would run together
            let content = texts.join("\n\n");
            self.turns.push(message_of("system", content.into()), Vec::new());
        }
        Ok(())
    }

    fn message(&mut self, message: &Fields) -> Result<(), RequestError> {
        match message.string("role")? {
            Some(role @ ("user" | "system")) => self.user(message, role),
            Some("assistant") => self.assistant(message),
            Some(other) => {
                let path = message.path("role");
                let text = format!("{path} is {other:?}; use user, assistant or system");
                Err(RequestError::invalid(path, text))
            }
            None => Err(blocks::missing(message, "role")),
        }
    }

    fn user(&mut self, message: &Fields, role: &str) -> Result<(), RequestError> {
        let (mut parts, mut media) = (Vec::new(), Vec::new());
        let mut has_results = false;
        for (block, words) in blocks::list(message.get("content"), &message.path("content"))? {
            match block {
                None => parts.push(Part::Text(words.to_owned())),
                Some(block) if blocks::kind(&block)? == "tool_result" => {
                    self.result(&block)?;
                    has_results = true;
                }
                Some(block) => blocks::part(&block, &mut parts, &mut media)?,
            }
        }
        if !parts.is_empty() || !has_results {
            self.waiting.push((message_of(role, join(parts)), media));
        }
        if self.turns.unanswered().is_none() {
            self.release();
        }
        Ok(())
    }

    fn result(&mut self, block: &Fields) -> Result<(), RequestError> {
        let id = block.string("tool_use_id")?;
        let id = id.ok_or_else(|| blocks::missing(block, "tool_use_id"))?;
        let Some(position) = self.turns.take_call(Some(id)) else {
            let path = block.path("tool_use_id");
            let message = format!(
                "{path} is {id:?}, which no unanswered tool_use block of the preceding assistant \
                 message has"
            );
            return Err(RequestError::invalid(path, message));
        };
        let (mut parts, mut media) = (Vec::new(), Vec::new());
        for (inner, words) in blocks::list(block.get("content"), &block.path("content"))? {
            match inner {
                None => parts.push(Part::Text(words.to_owned())),
                Some(inner) => blocks::part(&inner, &mut parts, &mut media)?,
            }
        }
        // the model has no mark for a failure: what failed is in the words, if there are any
        if parts.is_empty() && block.boolean("is_error")?.unwrap_or(false) {
            parts.push(Part::Text("error".to_owned()));
        }
        let mut message = message_of("tool", join(parts));
        message.insert("tool_call_id".to_owned(), id.into());
        self.turns.answer(position, message, media);
        Ok(())
    }

    fn assistant(&mut self, message: &Fields) -> Result<(), RequestError> {
        self.end_turn()?;
        let (mut text, mut thinking, mut calls) = (String::new(), Vec::new(), Vec::new());
        for (block, words) in blocks::list(message.get("content"), &message.path("content"))? {
            let Some(block) = block else {
                text.push_str(words);
                continue;
            };
            match blocks::kind(&block)? {
                "text" => text.push_str(blocks::text(&block)?),
                "thinking" => thinking.extend(block.string("thinking")?.filter(|t| !t.is_empty())),
                // another model's, which nobody here can read
                "redacted_thinking" => {}
                "tool_use" => calls.push(self.call(&block, message.here())?),
                other => {
                    let path = block.path("type");
                    let message = format!(
                        "{path} is {other:?}; assistant blocks are text, thinking and tool_use"
                    );
                    return Err(RequestError::invalid(path, message));
                }
            }
        }
        let mut normal = message_of("assistant", text.into());
        if !thinking.is_empty() {
            normal.insert("reasoning_content".to_owned(), thinking.join("\n").into());
        }
        if !calls.is_empty() {
            normal.insert("tool_calls".to_owned(), Json::Array(calls));
        }
        self.turns.push(normal, Vec::new());
        Ok(())
    }

    fn call(&mut self, block: &Fields, caller: &str) -> Result<Json, RequestError> {
        let id = block.string("id")?.ok_or_else(|| blocks::missing(block, "id"))?;
        let name = block.string("name")?.ok_or_else(|| blocks::missing(block, "name"))?;
        let input = match block.get("input") {
            None => Json::Object(Object::new()),
            Some(object @ Json::Object(_)) => object.clone(),
            Some(other) => return Err(wrong_type(block.path("input"), "an object", other)),
        };
        Ok(self.turns.call(Some(id), name, input, caller))
    }

    /// All calls must be answered before the assistant speaks again.
    fn end_turn(&mut self) -> Result<(), RequestError> {
        if let Some(Unanswered { caller, ids }) = self.turns.unanswered() {
            let path = format!("{caller}.content");
            let message = format!(
                "{path} has tool_use blocks without a tool_result that answers them: {ids}"
            );
            return Err(RequestError::invalid(path, message));
        }
        self.release();
        Ok(())
    }

    fn release(&mut self) {
        for (message, media) in self.waiting.drain(..) {
            self.turns.push(message, media);
        }
    }
}

fn message_of(role: &str, content: Json) -> Object {
    [("role".to_owned(), role.into()), ("content".to_owned(), content)].into_iter().collect()
}
