//! Messages as clients send them, turned into the one form that templates read.

use super::Limits;
use super::fields::{Fields, excerpt, wrong_type};
use super::media::{self, MediaRef};
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::MediaKind;

/// Reads `messages`: the normalised messages, and their media in order.
pub(super) fn read(
    body: &Fields,
    limits: &Limits,
) -> Result<(Vec<Json>, Vec<MediaRef>), RequestError> {
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
    let mut reader = Reader { messages: Vec::with_capacity(items.len()), ..Reader::default() };
    for (index, item) in items.iter().enumerate() {
        reader.message(&Fields::of(item, format!("messages[{index}]"))?)?;
    }
    reader.require_answers()?;
    check_media_counts(&reader.media, limits)?;
    Ok((reader.messages, reader.media))
}

fn check_media_counts(media: &[MediaRef], limits: &Limits) -> Result<(), RequestError> {
    for (kind, most, word) in [
        (MediaKind::Image, limits.max_images, "image"),
        (MediaKind::Video, limits.max_videos, "video"),
    ] {
        let count = media.iter().filter(|item| item.kind == kind).count();
        if count > most {
            return Err(RequestError::invalid(
                "messages",
                format!("the number of {word}s is {count}, larger than the limit: {most}"),
            ));
        }
    }
    Ok(())
}

/// Reads messages one after the other and links tool results to their calls.
#[derive(Default)]
struct Reader {
    messages: Vec<Json>,
    media: Vec<MediaRef>,
    /// Calls of the latest assistant message that have no result yet.
    open_calls: Vec<OpenCall>,
    /// Path of the message that made them.
    caller: String,
    /// Results of the run of tool messages that is being read, with their media.
    results: Vec<ToolResult>,
}

struct OpenCall {
    id: Option<String>,
    position: usize,
}

struct ToolResult {
    position: usize,
    message: Json,
    media: Vec<MediaRef>,
}

impl Reader {
    fn message(&mut self, message: &Fields) -> Result<(), RequestError> {
        let Some(role) = message.string("role")? else {
            let path = message.path("role");
            return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
        };
        if matches!(role, "tool" | "function") {
            return self.tool(message);
        }
        self.end_results();
        match role {
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
        let content = content(message, &mut self.media)?;
        self.messages.push(Json::Object(named(message, role, content)?));
        Ok(())
    }

    fn assistant(&mut self, message: &Fields) -> Result<(), RequestError> {
        self.require_answers()?;
        let media_before = self.media.len();
        let content = content(message, &mut self.media)?;
        if self.media.len() > media_before {
            let path = self.media[media_before].param.clone();
            return Err(RequestError::invalid(
                path,
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
            self.caller = message.here().to_owned();
        }
        self.messages.push(Json::Object(normal));
        Ok(())
    }

    fn calls(&mut self, message: &Fields) -> Result<Vec<Json>, RequestError> {
        let mut calls = Vec::new();
        for (index, item) in message.array("tool_calls")?.unwrap_or(&[]).iter().enumerate() {
            let call = Fields::of(item, format!("{}[{index}]", message.path("tool_calls")))?;
            let id = call.string("id")?.map(str::to_owned);
            // some clients send name and arguments without the wrapper
            let function = call.object("function")?.unwrap_or_else(|| call.clone());
            calls.push(self.call(&function, id)?);
        }
        if calls.is_empty()
            && let Some(function) = message.object("function_call")?
        {
            calls.push(self.call(&function, None)?);
        }
        Ok(calls)
    }

    fn call(&mut self, function: &Fields, id: Option<String>) -> Result<Json, RequestError> {
        let Some(name) = function.string("name")? else {
            let path = function.path("name");
            return Err(RequestError::invalid(path.clone(), format!("{path} is missing")));
        };
        let arguments = arguments(function)?;
        self.open_calls.push(OpenCall { id: id.clone(), position: self.open_calls.len() });
        let mut call = Object::new();
        if let Some(id) = id {
            call.insert("id".to_owned(), id.into());
        }
        call.insert("type".to_owned(), "function".into());
        let function = Json::object([("name", name.into()), ("arguments", arguments)]);
        call.insert("function".to_owned(), function);
        Ok(Json::Object(call))
    }

    fn tool(&mut self, message: &Fields) -> Result<(), RequestError> {
        let id = message.string("tool_call_id")?;
        // without an id the order of the calls decides
        let open = self
            .open_calls
            .iter()
            .position(|call| id.is_none() || call.id.is_none() || call.id.as_deref() == id);
        let Some(open) = open else { return Err(self.stray_result(message, id)) };
        let position = self.open_calls.remove(open).position;
        let mut media = Vec::new();
        let content = content(message, &mut media)?;
        let mut normal = named(message, "tool", content)?;
        if let Some(id) = id {
            normal.insert("tool_call_id".to_owned(), id.into());
        }
        self.results.push(ToolResult { position, message: Json::Object(normal), media });
        Ok(())
    }

    fn stray_result(&self, message: &Fields, id: Option<&str>) -> RequestError {
        let path = message.path("tool_call_id");
        let text = match id {
            Some(id) => format!(
                "{path} is {id:?}, which no unanswered call of the preceding assistant message has"
            ),
            None => format!("{} answers no tool call", message.here()),
        };
        RequestError::invalid(path, text)
    }

    /// A run of tool messages has ended: their only link to the calls is order, so they are put
    /// in the order of the calls.
    fn end_results(&mut self) {
        self.results.sort_by_key(|result| result.position);
        for result in self.results.drain(..) {
            self.messages.push(result.message);
            self.media.extend(result.media);
        }
    }

    fn require_answers(&mut self) -> Result<(), RequestError> {
        self.end_results();
        if self.open_calls.is_empty() {
            return Ok(());
        }
        let ids: Vec<_> = self
            .open_calls
            .iter()
            .map(|call| call.id.as_deref().unwrap_or("(no id)").to_owned())
            .collect();
        let path = format!("{}.tool_calls", self.caller);
        let message = format!(
            "{path} has calls without a tool message that answers them: {}",
            ids.join(", ")
        );
        Err(RequestError::invalid(path, message))
    }
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

fn arguments(function: &Fields) -> Result<Json, RequestError> {
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
fn content(message: &Fields, media: &mut Vec<MediaRef>) -> Result<Json, RequestError> {
    let items = match message.get("content") {
        None => return Ok("".into()),
        Some(Json::String(text)) => return Ok(text.as_str().into()),
        Some(Json::Array(items)) => items,
        Some(other) => {
            return Err(wrong_type(message.path("content"), "a string or a list of parts", other));
        }
    };
    let path = message.path("content");
    let mut parts = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        match item {
            Json::String(text) => parts.push(Part::Text(text.clone())),
            other => parts.push(part(&Fields::of(other, format!("{path}[{index}]"))?, media)?),
        }
    }
    Ok(join(parts))
}

enum Part {
    Text(String),
    Media(MediaKind),
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

fn join(parts: Vec<Part>) -> Json {
    if parts.iter().all(|part| matches!(part, Part::Text(_))) {
        let texts = parts.into_iter().map(|part| match part {
            Part::Text(text) => text,
            Part::Media(_) => String::new(),
        });
        return Json::String(texts.collect());
    }
    let parts = parts.into_iter().map(|part| match part {
        Part::Text(text) => Json::object([("type", "text".into()), ("text", text.into())]),
        Part::Media(MediaKind::Image) => Json::object([("type", "image".into())]),
        Part::Media(MediaKind::Video) => Json::object([("type", "video".into())]),
    });
    Json::Array(parts.collect())
}
