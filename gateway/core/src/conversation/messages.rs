//! Messages as clients send them, turned into the one form that templates read.

use super::Limits;
use super::fields::{Fields, excerpt, wrong_type};
use super::media::{self, MediaRef};
use super::turns::{Part, Turns, Unanswered, join};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::MediaKind;

/// Reads `messages`: the normalised messages, and their media in order.
pub(super) fn read(
    body: &Fields,
    limits: &Limits,
) -> Result<(Vec<Json>, Vec<MediaRef>), RequestError> {
    let items = items(body, limits)?;
    let mut reader = Reader::default();
    for (index, item) in items.iter().enumerate() {
        reader.message(&Fields::of(item, format!("messages[{index}]"))?)?;
    }
    reader.require_answers()?;
    reader.turns.finish(limits)
}

/// The entries of `messages`: at least one, not too many.
pub(crate) fn items<'a>(body: &Fields<'a>, limits: &Limits) -> Result<&'a [Json], RequestError> {
    let Some(items) = body.array("messages")? else {
        return Err(RequestError::invalid("messages", "messages is missing"));
    };
    if items.is_empty() {
        return Err(RequestError::invalid("messages", "messages is empty; send at least one"));
    }
    if items.len() > limits.max_messages {
        return Err(RequestError::invalid(
            "messages",
            format!(
                "messages has {} entries; at most {} are allowed",
                items.len(),
                limits.max_messages
            ),
        ));
    }
    Ok(items)
}

/// Reads messages one after the other.
#[derive(Default)]
struct Reader {
    turns: Turns,
}

impl Reader {
    fn message(&mut self, message: &Fields) -> Result<(), RequestError> {
        let Some(role) = message.string("role")? else {
            let path = message.path("role");
            return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
        };
        match role {
            "tool" | "function" => self.tool(message),
            "root" | "system" | "developer" | "user" => self.plain(message, role),
            "assistant" => self.assistant(message),
            other => {
                let path = message.path("role");
                let text = format!(
                    "{path} is {other:?}; use root, system, developer, user, assistant or tool"
                );
                Err(RequestError::invalid(path, text))
            }
        }
    }

    fn plain(&mut self, message: &Fields, role: &str) -> Result<(), RequestError> {
        let mut media = Vec::new();
        let content = content(message, "content", &mut media)?;
        self.turns.push(named(message, role, content)?, media);
        Ok(())
    }

    fn assistant(&mut self, message: &Fields) -> Result<(), RequestError> {
        self.require_answers()?;
        let mut media = Vec::new();
        let content = content(message, "content", &mut media)?;
        if let Some(first) = media.first() {
            return Err(RequestError::invalid(
                first.param.clone(),
                "assistant messages cannot hold pictures or clips",
            ));
        }
        let mut normal = named(message, "assistant", content)?;
        let reasoning = match message.string("reasoning_content")? {
            Some(text) => Some(text),
            // an object here is another protocol's field
            None => message.get("reasoning").and_then(Json::as_str),
        };
        if let Some(text) = reasoning {
            normal.insert("reasoning_content".to_owned(), text.into());
        }
        let calls = self.calls(message)?;
        if !calls.is_empty() {
            normal.insert("tool_calls".to_owned(), Json::Array(calls));
        }
        self.turns.push(normal, Vec::new());
        Ok(())
    }

    fn calls(&mut self, message: &Fields) -> Result<Vec<Json>, RequestError> {
        let mut calls = Vec::new();
        for (index, item) in message.array("tool_calls")?.unwrap_or(&[]).iter().enumerate() {
            let call = Fields::of(item, format!("{}[{index}]", message.path("tool_calls")))?;
            let id = call.string("id")?;
            // some clients send name and arguments without the wrapper
            let function = call.object("function")?.unwrap_or_else(|| call.clone());
            calls.push(self.call(&function, id, message.here())?);
        }
        if calls.is_empty()
            && let Some(function) = message.object("function_call")?
        {
            calls.push(self.call(&function, None, message.here())?);
        }
        Ok(calls)
    }

    fn call(
        &mut self,
        function: &Fields,
        id: Option<&str>,
        caller: &str,
    ) -> Result<Json, RequestError> {
        let Some(name) = function.string("name")? else {
            let path = function.path("name");
            return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
        };
        let arguments = arguments(function)?;
        Ok(self.turns.call(id, name, arguments, caller))
    }

    fn tool(&mut self, message: &Fields) -> Result<(), RequestError> {
        let id = message.string("tool_call_id")?;
        let Some(position) = self.turns.take_call(id) else {
            return Err(stray_result(message, id));
        };
        let mut media = Vec::new();
        let content = content(message, "content", &mut media)?;
        let mut normal = named(message, "tool", content)?;
        if let Some(id) = id {
            normal.insert("tool_call_id".to_owned(), id.into());
        }
        self.turns.answer(position, normal, media);
        Ok(())
    }

    fn require_answers(&self) -> Result<(), RequestError> {
        let Some(Unanswered { caller, ids }) = self.turns.unanswered() else { return Ok(()) };
        let path = format!("{caller}.tool_calls");
        let message = format!("{path} has calls without a tool message that answers them: {ids}");
        Err(RequestError::invalid(path, message))
    }
}

fn stray_result(message: &Fields, id: Option<&str>) -> RequestError {
    let path = message.path("tool_call_id");
    let text = match id {
        Some(id) => format!(
            "{path} is {id:?}, which no unanswered call of the preceding assistant message has"
        ),
        None => format!("{} answers no tool call", message.here()),
    };
    RequestError::invalid(path, text)
}

fn named(message: &Fields, role: &str, content: Json) -> Result<Object, RequestError> {
    let mut normal = Object::new();
    normal.insert("role".to_owned(), role.into());
    normal.insert("content".to_owned(), content);
    if let Some(name) = message.string("name")? {
        normal.insert("name".to_owned(), name.into());
    }
    Ok(normal)
}

pub(crate) fn arguments(function: &Fields) -> Result<Json, RequestError> {
    let path = function.path("arguments");
    let text = match function.get("arguments") {
        None => return Ok(Json::Object(Object::new())),
        Some(object @ Json::Object(_)) => return Ok(object.clone()),
        Some(Json::String(text)) if text.trim().is_empty() => {
            return Ok(Json::Object(Object::new()));
        }
        Some(Json::String(text)) => text,
        Some(other) => return Err(wrong_type(path, "a JSON text", other)),
    };
    match Json::parse(text.as_bytes()) {
        Ok(object @ Json::Object(_)) => Ok(object),
        Ok(other) => {
            let message = format!("{path} must spell a JSON object, not {}", other.type_name());
            Err(RequestError::invalid(path, message))
        }
        Err(error) => {
            let message = format!("{path} is not valid JSON: {error}");
            Err(RequestError::invalid(path, message))
        }
    }
}

/// Content as one string if it is all text, else as a list of parts; media are appended.
pub(crate) fn content(
    message: &Fields,
    key: &str,
    media: &mut Vec<MediaRef>,
) -> Result<Json, RequestError> {
    let items = match message.get(key) {
        None => return Ok("".into()),
        Some(Json::String(text)) => return Ok(text.as_str().into()),
        Some(Json::Array(items)) => items,
        Some(other) => {
            return Err(wrong_type(message.path(key), "a string or a list of parts", other));
        }
    };
    let path = message.path(key);
    let mut parts = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        match item {
            Json::String(text) => parts.push(Part::Text(text.clone())),
            other => parts.push(part(&Fields::of(other, format!("{path}[{index}]"))?, media)?),
        }
    }
    Ok(join(parts))
}

fn part(part: &Fields, media: &mut Vec<MediaRef>) -> Result<Part, RequestError> {
    let kind = match part.string("type")? {
        Some(kind) => kind,
        None if part.get("text").is_some() => "text",
        None if part.get("output").is_some() => "output",
        None => {
            let path = part.path("type");
            return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
        }
    };
    let text_field = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "output" => "output",
        "image_url" | "input_image" | "image" => {
            media.push(media::read(part, MediaKind::Image)?);
            return Ok(Part::Media(MediaKind::Image));
        }
        "video_url" | "input_video" | "video" => {
            media.push(media::read(part, MediaKind::Video)?);
            return Ok(Part::Media(MediaKind::Video));
        }
        other => {
            let path = part.path("type");
            let message =
                format!("{path} is {other:?}; content parts are text, image_url and video_url");
            return Err(RequestError::invalid(path, message));
        }
    };
    match part.get(text_field) {
        Some(Json::String(text)) => Ok(Part::Text(text.clone())),
        Some(other) => Err(RequestError::invalid(
            part.path(text_field),
            format!("{} must be a string, not {}", part.path(text_field), excerpt(other)),
        )),
        None => Err(RequestError::invalid(
            part.path(text_field),
            format!("{} is missing", part.path(text_field)),
        )),
    }
}
