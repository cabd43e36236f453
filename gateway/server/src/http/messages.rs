//! `POST /v1/messages` and its token count, in Anthropic's words.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use gateway_core::anthropic::{
    BlockFolder, ErrorBody, ErrorDetail, ErrorDetails, Event, Message, MessageEnd, MessageFolder,
    MessagesTask, THREADS_UNSUPPORTED, TokenCount, check_count, check_messages, stop_reason,
};

use super::sse::{self, Frames, Wording};
use super::{RequestIds, json_response, receive, refuse_with, timed};
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::pipeline::{self, tokenize_chat};
use crate::reply::{Reply, ReplyStep, SampleEnd};

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// `POST /v1/messages`
pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    let id = RequestIds::of(&request).trace_id;
    match respond(&app, request, &id).await {
        Ok(response) => with_id(response, &id),
        Err(error) => refuse(&app, &in_own_words(error), &id),
    }
}

async fn respond(app: &Arc<App>, request: Request, id: &str) -> Result<Response, GatewayError> {
    let max_bytes = app.config.max_request_bytes;
    let (task, visit) = receive(app, request, "msg", max_bytes, check_messages).await?;
    let MessagesTask { conversation, hides_thinking } = task;
    let is_stream = conversation.stream.stream;
    let asked = conversation.generation.max_tokens;
    let mut reply = pipeline::chat(app, conversation, visit).await?;
    let words = EventWording {
        request_id: id.to_owned(),
        model: app.config.served_model_name.clone(),
        asked,
        blocks: BlockFolder::new(hides_thinking),
        end: None,
    };
    if is_stream {
        return sse::respond(app, reply, words, app.config.pace).await;
    }
    let whole = whole(&mut reply, words).await?;
    Ok(timed(json_response(&whole), reply.timing()))
}

/// The whole message is the stream, folded.
async fn whole(reply: &mut Reply, mut words: EventWording) -> Result<Message, GatewayError> {
    let mut folder = MessageFolder::default();
    while let Some(step) = reply.next().await? {
        words.read(step).into_iter().for_each(|event| folder.add(event));
    }
    words.close().into_iter().for_each(|event| folder.add(event));
    let end = words.message_end(reply).ok_or_else(|| GatewayError::internal("no end"))?;
    let mut message = words.opening(reply);
    message.content = folder.finish();
    message.stop_reason = Some(end.stop_reason);
    message.stop_sequence = end.stop_sequence;
    Ok(message)
}

/// `POST /v1/messages/count_tokens`
pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let id = RequestIds::of(&request).trace_id;
    match count(&app, request).await {
        Ok(count) => with_id(json_response(&count), &id),
        Err(error) => refuse(&app, &in_own_words(error), &id),
    }
}

async fn count(app: &Arc<App>, request: Request) -> Result<TokenCount, GatewayError> {
    let max_bytes = app.config.max_request_bytes;
    let (conversation, _visit) = receive(app, request, "count", max_bytes, check_count).await?;
    let tokens = tokenize_chat(app, conversation).await?;
    Ok(TokenCount { input_tokens: tokens.len() })
}

/// Shows an error in Anthropic's form.
pub(super) fn refuse(app: &App, error: &GatewayError, request_id: &str) -> Response {
    let (status, _) = form(error.kind);
    with_id(refuse_with(app, error, status, &body(error, request_id)), request_id)
}

fn body(error: &GatewayError, request_id: &str) -> ErrorBody {
    let (_, kind) = form(error.kind);
    // this form has no field for the parameter, and agents know a full context by these words
    let message = match (&error.param, error.kind) {
        (_, ErrorKind::ContextTooLong) => format!("prompt is too long: {}", error.message),
        (Some(param), _) if !error.message.contains(param.as_str()) => {
            format!("{param}: {}", error.message)
        }
        _ => error.message.clone(),
    };
    let details = (error.code == THREADS_UNSUPPORTED).then(|| ErrorDetails {
        error_code: error.code,
        unsupported: error.param.iter().cloned().collect(),
    });
    let error = ErrorDetail { kind, message, details };
    ErrorBody { kind: "error", error, request_id: request_id.to_owned() }
}

/// HTTP status and `error.type` of Anthropic's API.
const fn form(kind: ErrorKind) -> (u16, &'static str) {
    match kind {
        ErrorKind::InvalidRequest
        | ErrorKind::ContextTooLong
        | ErrorKind::MediaRejected
        | ErrorKind::UnsupportedMedia => (400, "invalid_request_error"),
        ErrorKind::MethodNotAllowed | ErrorKind::RequestTimeout | ErrorKind::Cancelled => {
            (kind.row().status, "invalid_request_error")
        }
        ErrorKind::Unauthorized => (401, "authentication_error"),
        ErrorKind::Forbidden => (403, "permission_error"),
        ErrorKind::TooLarge => (413, "request_too_large"),
        ErrorKind::ModelNotFound | ErrorKind::NotFound => (404, "not_found_error"),
        ErrorKind::Overloaded | ErrorKind::WorkerUnavailable | ErrorKind::Draining => {
            (529, "overloaded_error")
        }
        ErrorKind::DeadlineExceeded | ErrorKind::MediaOriginTimeout => (504, "timeout_error"),
        ErrorKind::MediaOriginFailed | ErrorKind::MediaUnavailable | ErrorKind::Internal => {
            (kind.row().status, "api_error")
        }
    }
}

/// Stages after the translation name what a chat calls it.
fn in_own_words(error: GatewayError) -> GatewayError {
    error.renamed("response_format", "output_config.format")
}

fn with_id(mut response: Response, id: &str) -> Response {
    if let Ok(value) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Steps as Anthropic's events.
struct EventWording {
    request_id: String,
    model: String,
    /// The request's `max_tokens`.
    asked: Option<u32>,
    blocks: BlockFolder,
    end: Option<Box<SampleEnd>>,
}

impl EventWording {
    fn opening(&self, reply: &Reply) -> Message {
        Message {
            id: reply.id().replacen('-', "_", 1),
            kind: "message",
            role: "assistant",
            model: self.model.clone(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: reply.usage().into(),
        }
    }

    fn read(&mut self, step: ReplyStep) -> Vec<Event> {
        let mut events = Vec::new();
        self.blocks.add(step.deltas, &mut events);
        self.end = step.end.or(self.end.take());
        events
    }

    fn close(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.blocks.finish(&mut events);
        events
    }

    fn message_end(&self, reply: &Reply) -> Option<MessageEnd> {
        let end = self.end.as_ref()?;
        let made = reply.usage().completion_tokens;
        let stop_reason = stop_reason(end.reason, end.stop_text.as_deref(), (self.asked, made));
        let is_stop = matches!(stop_reason, gateway_core::anthropic::StopReason::StopSequence);
        let stop_sequence = end.stop_text.clone().filter(|_| is_stop);
        Some(MessageEnd { stop_reason, stop_sequence })
    }
}

fn put(events: Vec<Event>, frames: &mut Frames) {
    for event in events {
        frames.named(event.name(), &event);
    }
}

impl Wording for EventWording {
    fn begin(&mut self, reply: &Reply, frames: &mut Frames) {
        put(vec![Event::MessageStart { message: self.opening(reply) }, Event::Ping], frames);
    }

    fn step(&mut self, step: ReplyStep, _reply: &Reply, frames: &mut Frames) {
        put(self.read(step), frames);
    }

    fn end(&mut self, reply: &Reply, frames: &mut Frames) {
        put(self.close(), frames);
        match self.message_end(reply) {
            Some(delta) => {
                let usage = reply.usage().into();
                put(vec![Event::MessageDelta { delta, usage }, Event::MessageStop], frames);
            }
            None => self.fail(&GatewayError::internal("a sample has no end"), frames),
        }
    }

    fn fail(&mut self, error: &GatewayError, frames: &mut Frames) {
        frames.named("error", &body(error, &self.request_id));
    }

    fn keep_alive(&mut self, frames: &mut Frames) {
        put(vec![Event::Ping], frames);
    }
}

#[cfg(test)]
mod tests {
    use super::form;
    use crate::error::ErrorKind;
    use crate::telemetry::{Fleet, Metrics, RouteLabel};

    #[test]
    fn each_status_of_this_protocol_is_counted_as_itself() {
        for kind in ErrorKind::ALL {
            let metrics = Metrics::default();
            let (status, _) = form(kind);
            metrics.http_request(RouteLabel::Messages, status, std::time::Duration::ZERO);
            let page = metrics.page(&Fleet::default(), 0);
            let line = format!("route=\"/v1/messages\",code=\"{status}\"}} 1\n");
            assert!(page.contains(&line), "{kind:?}");
        }
    }
}
