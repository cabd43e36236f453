//! `instructions` and `input` of a responses request, turned into the one form that templates read.

use crate::conversation::fields::{Fields, wrong_type};
use crate::conversation::messages::{arguments, content};
use crate::conversation::turns::{Turns, Unanswered};
use crate::conversation::{Limits, MediaRef};
use crate::error::RequestError;
use crate::json::{Json, Object};

/// The normalised messages, and their media in order.
pub(super) fn read(
    body: &Fields,
    limits: &Limits,
) -> Result<(Vec<Json>, Vec<MediaRef>), RequestError> {
    let mut reader = Reader::default();
    if let Some(text) = body.string("instructions")? {
        reader.turns.push(message_of("system", text.into()), Vec::new());
    }
    match body.get("input") {
        None => return Err(RequestError::invalid("input", "input is missing")),
        Some(text @ Json::String(_)) => {
            reader.turns.push(message_of("user", text.clone()), Vec::new());
        }
        Some(Json::Array(items)) => {
            let (count, most) = (items.len(), limits.max_messages);
            if items.is_empty() || count > most {
                let message = format!("input has {count} items; send 1 to {most}");
                return Err(RequestError::invalid("input", message));
            }
            for (index, item) in items.iter().enumerate() {
                reader.item(&Fields::of(item, format!("input[{index}]"))?)?;
            }
        }
        Some(other) => return Err(wrong_type("input".into(), "a string or a list", other)),
    }
    reader.end_turn()?;
    reader.turns.finish(limits)
}

/// Items are finer than messages: thinking, words and calls of one turn come one by one.
#[derive(Default)]
struct Reader {
    turns: Turns,
    /// The assistant's turn that is being read.
    open: Option<OpenTurn>,
    /// Messages that came between calls and their outputs.
    waiting: Vec<(Object, Vec<MediaRef>)>,
}

#[derive(Default)]
struct OpenTurn {
    text: String,
    thinking: Vec<String>,
    calls: Vec<Json>,
    /// Path of its first item.
    path: String,
}

impl Reader {
    fn item(&mut self, item: &Fields) -> Result<(), RequestError> {
        match item.string("type")?.unwrap_or("message") {
            "message" => self.message(item),
            "reasoning" => self.reasoning(item),
            "function_call" => self.call(item),
            "function_call_output" => self.output(item),
            other => {
                let path = item.path("type");
                let message = format!(
                    "{path} is {other:?}; items are message, reasoning, function_call and \
                     function_call_output"
                );
                Err(RequestError::invalid(path, message))
            }
        }
    }

    fn message(&mut self, item: &Fields) -> Result<(), RequestError> {
        let mut media = Vec::new();
        match item.string("role")? {
            Some(role @ ("user" | "system" | "developer")) => {
                let content = content(item, "content", &mut media)?;
                self.close_turn();
                self.waiting.push((message_of(role, content), media));
                if self.turns.unanswered().is_none() {
                    self.release();
                }
                Ok(())
            }
            Some("assistant") => {
                let content = content(item, "content", &mut media)?;
                let Json::String(text) = content else {
                    let path = item.path("content");
                    let message = "assistant messages cannot hold pictures or clips";
                    return Err(RequestError::invalid(path, message));
                };
                self.turn(item)?.text.push_str(&text);
                Ok(())
            }
            other => {
                let path = item.path("role");
                let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
                let message =
                    format!("{path} is {found}; use user, assistant, system or developer");
                Err(RequestError::invalid(path, message))
            }
        }
    }

    fn reasoning(&mut self, item: &Fields) -> Result<(), RequestError> {
        let mut texts = Vec::new();
        for key in ["content", "summary"] {
            for (index, part) in item.array(key)?.unwrap_or(&[]).iter().enumerate() {
                let part = Fields::of(part, format!("{}[{index}]", item.path(key)))?;
                texts.extend(part.string("text")?.filter(|text| !text.is_empty()));
            }
            // a summary only repeats the content
            if !texts.is_empty() {
                break;
            }
        }
        let texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
        self.turn(item)?.thinking.extend(texts);
        Ok(())
    }

    fn call(&mut self, item: &Fields) -> Result<(), RequestError> {
        let id = required(item, "call_id")?;
        let name = super::spaced_name(item.string("namespace")?, required(item, "name")?);
        let arguments = arguments(item)?;
        let caller = self.turn(item)?.path.clone();
        let call = self.turns.call(Some(id), &name, arguments, &caller);
        self.turn(item)?.calls.push(call);
        Ok(())
    }

    fn output(&mut self, item: &Fields) -> Result<(), RequestError> {
        self.close_turn();
        let id = required(item, "call_id")?;
        let Some(position) = self.turns.take_call(Some(id)) else {
            let path = item.path("call_id");
            let message =
                format!("{path} is {id:?}, which no unanswered function_call before it has");
            return Err(RequestError::invalid(path, message));
        };
        let mut media = Vec::new();
        let content = content(item, "output", &mut media)?;
        let mut message = message_of("tool", content);
        message.insert("tool_call_id".to_owned(), id.into());
        self.turns.answer(position, message, media);
        Ok(())
    }

    /// The assistant's turn that the item belongs to; calls before it must be answered.
    fn turn(&mut self, item: &Fields) -> Result<&mut OpenTurn, RequestError> {
        if self.open.is_none() {
            self.end_turn()?;
        }
        let path = || OpenTurn { path: item.here().to_owned(), ..OpenTurn::default() };
        Ok(self.open.get_or_insert_with(path))
    }

    fn close_turn(&mut self) {
        let Some(turn) = self.open.take() else { return };
        let mut message = message_of("assistant", turn.text.into());
        if !turn.thinking.is_empty() {
            message.insert("reasoning_content".to_owned(), turn.thinking.join("\n").into());
        }
        if !turn.calls.is_empty() {
            message.insert("tool_calls".to_owned(), Json::Array(turn.calls));
        }
        self.turns.push(message, Vec::new());
    }

    fn end_turn(&mut self) -> Result<(), RequestError> {
        self.close_turn();
        if let Some(Unanswered { caller, ids }) = self.turns.unanswered() {
            let message = format!("{caller} begins calls without a function_call_output: {ids}");
            return Err(RequestError::invalid(caller, message));
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

fn required<'a>(item: &Fields<'a>, key: &str) -> Result<&'a str, RequestError> {
    item.string(key)?.ok_or_else(|| {
        let path = item.path(key);
        RequestError::invalid(path.clone(), format!("{path} is missing"))
    })
}

fn message_of(role: &str, content: Json) -> Object {
    [("role".to_owned(), role.into()), ("content".to_owned(), content)].into_iter().collect()
}
