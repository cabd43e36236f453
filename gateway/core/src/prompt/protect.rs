//! Template variables of a conversation, its text protected from becoming control tokens.

use crate::conversation::Conversation;
use crate::error::RequestError;
use crate::json::Json;
use crate::template::{SENTINEL_VARIABLE, scalar_value};
use crate::tokenizer::{Guard, Protection, Tokenizer, unused_characters};
use indexmap::IndexMap;
use minijinja::value::Value;
use std::borrow::Cow;

/// What stands at a place of the conversation.
#[derive(Clone, Copy)]
enum Place {
    /// A word of ours.
    Fixed,
    /// The client's own text and keys.
    Open { keys: Protection, texts: Protection },
    /// A message; its content has this protection.
    Message(Protection),
    /// Text, or a list of parts.
    Content(Protection),
    /// A tool call, or a list of them.
    Call,
    /// Name and arguments of a call.
    CallFunction,
    /// A declared tool.
    Tool,
    /// A declared function.
    ToolFunction,
    /// A template variable the client set.
    Variable,
}

const OPEN: Place = Place::Open { keys: Protection::Inside, texts: Protection::Full };
const OPEN_KEYS: Place = Place::Open { keys: Protection::Full, texts: Protection::Full };
/// Printed between quotes, or compared with words of the template.
const QUOTED: Place = Place::Open { keys: Protection::Inside, texts: Protection::Inside };

impl Place {
    fn member(self, key: &str) -> Self {
        match (self, key) {
            (Self::Fixed, _)
            | (Self::Message(_), "role")
            | (Self::Content(_) | Self::Call | Self::Tool, "type") => Self::Fixed,
            (Self::Message(protection), "content") => Self::Content(protection),
            (Self::Message(_), "tool_calls") => Self::Call,
            (Self::Call, "function") => Self::CallFunction,
            (Self::CallFunction, "arguments") => OPEN_KEYS,
            (Self::Tool, "function") => Self::ToolFunction,
            (Self::ToolFunction, "name" | "description") => OPEN,
            (Self::Tool | Self::ToolFunction, _) => QUOTED,
            (Self::Message(_) | Self::Call | Self::CallFunction, _) => OPEN,
            (Self::Content(_) | Self::Open { .. } | Self::Variable, _) => self,
        }
    }

    fn keys(self) -> Option<Protection> {
        match self {
            Self::Fixed => None,
            Self::Open { keys, .. } => Some(keys),
            _ => Some(Protection::Inside),
        }
    }

    fn text(self, text: &str) -> Option<Protection> {
        match self {
            Self::Fixed => None,
            Self::Open { texts, .. } => Some(texts),
            Self::Content(protection) => Some(protection),
            // a plain word is a switch that the template compares
            Self::Variable if text.bytes().all(|byte| byte.is_ascii_alphanumeric()) => None,
            _ => Some(Protection::Full),
        }
    }
}

/// A conversation with the characters that mark places in it.
pub(super) struct Protected<'a> {
    guard: &'a Guard,
    /// Assistant markers that keep their meaning.
    exempt: &'a [&'a str],
    messages: &'a [Json],
    conversation: &'a Conversation,
    /// Put inside added tokens that the client typed; `None` if it typed none.
    sentinel: Option<char>,
    /// Put at the end of a message that is to be continued.
    continuation: Option<char>,
}

impl<'a> Protected<'a> {
    pub(super) fn new(
        tokenizer: &'a Tokenizer,
        exempt: &'a [&'a str],
        messages: &'a [Json],
        conversation: &'a Conversation,
    ) -> Result<Self, RequestError> {
        let guard = tokenizer.guard();
        let mut protected =
            Self { guard, exempt, messages, conversation, sentinel: None, continuation: None };
        let mut texts = Vec::new();
        let mut is_needed = false;
        for (json, place) in protected.roots() {
            visit(json, place, &mut |text, protection| {
                is_needed |= guard.is_needed(text, protection, exempt);
                texts.push(text);
            });
        }
        let wanted = usize::from(is_needed) + usize::from(conversation.continue_final_message);
        let mut unused = unused_characters(&texts, wanted);
        if unused.len() < wanted {
            return Err(RequestError::invalid(
                "messages",
                "the text uses every private character, so that none is left to mark places in it",
            ));
        }
        protected.sentinel = if is_needed { unused.pop() } else { None };
        protected.continuation = unused.pop();
        Ok(protected)
    }

    /// The same conversation with nothing put into its text.
    #[cfg(test)]
    pub(super) fn bare(self) -> Self {
        Self { sentinel: None, ..self }
    }

    pub(super) fn sentinel(&self) -> Option<char> {
        self.sentinel
    }

    /// Everything that the client wrote and a template may print.
    fn roots(&self) -> impl Iterator<Item = (&'a Json, Place)> + use<'a> {
        let messages = self.messages.iter().map(|message| (message, message_place(message)));
        let tools = self.conversation.tools.iter().map(|tool| (tool, Place::Tool));
        let variables = self.conversation.template_variables.values();
        messages.chain(tools).chain(variables.map(|value| (value, Place::Variable)))
    }

    /// The template's variables; `fixed` are the server's own.
    pub(super) fn variables(&self, fixed: impl Iterator<Item = (String, Json)>) -> Value {
        let mut map = IndexMap::<Value, Value>::new();
        for (name, value) in &self.conversation.template_variables {
            map.insert(Value::from(name.as_str()), self.value(value, Place::Variable));
        }
        for (name, value) in fixed {
            map.insert(Value::from(name), self.value(&value, Place::Fixed));
        }
        let last = self.messages.len().saturating_sub(1);
        let messages =
            self.messages.iter().enumerate().map(|(at, message)| match self.continuation {
                Some(mark) if at == last => {
                    let marked = with_mark(message, mark);
                    self.value(&marked, message_place(&marked))
                }
                _ => self.value(message, message_place(message)),
            });
        map.insert(Value::from("messages"), messages.collect::<Vec<_>>().into());
        let tools = self.conversation.tools.iter().map(|tool| self.value(tool, Place::Tool));
        let tools: Vec<Value> = tools.collect();
        // templates ask `if tools`, or `if tools is not none`
        let tools = if tools.is_empty() { Value::from(()) } else { tools.into() };
        map.insert(Value::from("tools"), tools);
        map.insert(
            Value::from("add_generation_prompt"),
            Value::from(self.conversation.add_generation_prompt),
        );
        if let Some(sentinel) = self.sentinel {
            map.insert(Value::from(SENTINEL_VARIABLE), Value::from(sentinel.to_string()));
        }
        Value::from_object(map)
    }

    fn value(&self, json: &Json, place: Place) -> Value {
        match json {
            Json::String(text) => Value::from(self.text(text, place.text(text))),
            Json::Array(items) => {
                items.iter().map(|item| self.value(item, place)).collect::<Vec<_>>().into()
            }
            Json::Object(object) => {
                let mut map = IndexMap::<Value, Value>::with_capacity(object.len());
                for (key, value) in object {
                    let member = self.value(value, place.member(key));
                    map.insert(Value::from(self.text(key, place.keys())), member);
                }
                Value::from_object(map)
            }
            scalar => scalar_value(scalar),
        }
    }

    fn text<'t>(&self, text: &'t str, protection: Option<Protection>) -> Cow<'t, str> {
        let (Some(sentinel), Some(protection)) = (self.sentinel, protection) else {
            return Cow::Borrowed(text);
        };
        let protected = self.guard.protect(text, sentinel, protection, self.exempt);
        protected.map_or(Cow::Borrowed(text), Cow::Owned)
    }

    /// Ends the text where the message to be continued ends.
    pub(super) fn cut_continuation(&self, text: &mut String) -> Result<(), RequestError> {
        let Some(mark) = self.continuation else { return Ok(()) };
        let Some(end) = text.rfind(mark) else {
            return Err(RequestError::invalid(
                "continue_final_message",
                "the chat template does not show the end of the last message",
            ));
        };
        text.truncate(end);
        Ok(())
    }
}

fn message_place(message: &Json) -> Place {
    match message.get("role").and_then(Json::as_str) {
        Some("assistant") => Place::Message(Protection::Assistant),
        _ => Place::Message(Protection::Full),
    }
}

/// The message with `mark` at the end of its text.
fn with_mark(message: &Json, mark: char) -> Json {
    let mut marked = message.clone();
    if let Json::Object(object) = &mut marked
        && let Some(Json::String(text)) = object.get_mut("content")
    {
        text.push(mark);
    }
    marked
}

fn visit<'a>(json: &'a Json, place: Place, see: &mut impl FnMut(&'a str, Protection)) {
    match json {
        Json::String(text) => {
            if let Some(protection) = place.text(text) {
                see(text, protection);
            }
        }
        Json::Array(items) => items.iter().for_each(|item| visit(item, place, see)),
        Json::Object(object) => {
            for (key, value) in object {
                if let Some(protection) = place.keys() {
                    see(key, protection);
                }
                visit(value, place.member(key), see);
            }
        }
        _ => {}
    }
}
