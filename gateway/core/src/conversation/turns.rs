//! The order of turns as templates read it: tool results stand behind their calls, in call order.

use super::Limits;
use super::media::MediaRef;
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::MediaKind;

/// Messages in the making, whatever protocol they come by.
#[derive(Default)]
pub(crate) struct Turns {
    messages: Vec<Json>,
    media: Vec<MediaRef>,
    /// Calls of the latest assistant message that have no result yet.
    open_calls: Vec<OpenCall>,
    num_calls: usize,
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

/// Calls that no result answers.
pub(crate) struct Unanswered<'a> {
    /// Path of the message that made them.
    pub(crate) caller: &'a str,
    /// Their ids, for a message.
    pub(crate) ids: String,
}

impl Turns {
    /// The next message and its media; it ends a run of tool results.
    pub(crate) fn push(&mut self, message: Object, media: Vec<MediaRef>) {
        self.end_results();
        self.messages.push(Json::Object(message));
        self.media.extend(media);
    }

    /// A call of the assistant message that is about to be pushed, in the form of templates.
    pub(crate) fn call(
        &mut self,
        id: Option<&str>,
        name: &str,
        arguments: Json,
        caller: &str,
    ) -> Json {
        self.end_results();
        if self.caller != caller {
            caller.clone_into(&mut self.caller);
            self.num_calls = 0;
        }
        self.open_calls.push(OpenCall { id: id.map(str::to_owned), position: self.num_calls });
        self.num_calls += 1;
        let mut call = Object::new();
        if let Some(id) = id {
            call.insert("id".to_owned(), id.into());
        }
        call.insert("type".to_owned(), "function".into());
        let function = Json::object([("name", name.into()), ("arguments", arguments)]);
        call.insert("function".to_owned(), function);
        Json::Object(call)
    }

    /// Takes the open call that a result of this id answers: its place among the calls. Without
    /// an id the order of the calls decides.
    pub(crate) fn take_call(&mut self, id: Option<&str>) -> Option<usize> {
        let open = self
            .open_calls
            .iter()
            .position(|call| id.is_none() || call.id.is_none() || call.id.as_deref() == id)?;
        Some(self.open_calls.remove(open).position)
    }

    /// The result of a taken call.
    pub(crate) fn answer(&mut self, position: usize, message: Object, media: Vec<MediaRef>) {
        self.results.push(ToolResult { position, message: Json::Object(message), media });
    }

    /// Calls that wait for a result.
    pub(crate) fn unanswered(&self) -> Option<Unanswered<'_>> {
        if self.open_calls.is_empty() {
            return None;
        }
        let ids: Vec<_> = self
            .open_calls
            .iter()
            .map(|call| call.id.as_deref().unwrap_or("(no id)").to_owned())
            .collect();
        Some(Unanswered { caller: &self.caller, ids: ids.join(", ") })
    }

    /// All messages, and their media in the order of the prompt.
    pub(crate) fn finish(
        mut self,
        limits: &Limits,
    ) -> Result<(Vec<Json>, Vec<MediaRef>), RequestError> {
        self.end_results();
        check_media_counts(&self.media, limits)?;
        Ok((self.messages, self.media))
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

/// A part of a message's content.
pub(crate) enum Part {
    /// Words.
    Text(String),
    /// A picture or clip, whose place this is.
    Media(MediaKind),
}

/// Content as one string if it is all text, else as a list of parts.
pub(crate) fn join(parts: Vec<Part>) -> Json {
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
