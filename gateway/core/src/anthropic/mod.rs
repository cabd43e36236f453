//! Anthropic's Messages protocol as a translation: its requests become the same
//! [`Conversation`] as a chat's, and the deltas of the reply become its events.

mod blocks;
mod events;
mod messages;
mod tools;
mod types;

pub use events::{BlockFolder, MessageFolder, stop_reason};
pub use types::{
    Block, BlockDelta, ErrorBody, ErrorDetail, ErrorDetails, Event, Message, MessageEnd,
    StopReason, TokenCount, Usage,
};

use crate::constraint::{ResponseFormat, ToolChoice};
use crate::conversation::fields::Fields;
use crate::conversation::generation::read_messages;
use crate::conversation::{Conversation, Limits, Standing, StreamWish};
use crate::error::{RequestError, RequestErrorKind};
use crate::json::{Json, Object};
use crate::model::ThinkingMode;
use crate::openai::RequestBody;

/// Body of `POST /v1/messages` and `POST /v1/messages/count_tokens`.
pub type MessagesRequest = RequestBody;

/// A checked messages request.
#[derive(Clone, Debug, PartialEq)]
pub struct MessagesTask {
    /// What every protocol asks for.
    pub conversation: Conversation,
    /// Thinking is done but not shown.
    pub hides_thinking: bool,
}

/// Checks a messages request.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_messages(
    request: MessagesRequest,
    limits: &Limits,
) -> Result<MessagesTask, RequestError> {
    let body = Fields::new(&request.0, "");
    if body.get("max_tokens").is_none() {
        return Err(RequestError::invalid("max_tokens", "max_tokens is missing"));
    }
    let conversation = conversation(&body, limits)?;
    Ok(MessagesTask { conversation, hides_thinking: hides_thinking(&body)? })
}

/// Checks the body of a token count: a messages request that need not say `max_tokens`.
///
/// # Errors
/// As [`check_messages`].
pub fn check_count(
    request: MessagesRequest,
    limits: &Limits,
) -> Result<Conversation, RequestError> {
    conversation(&Fields::new(&request.0, ""), limits)
}

fn conversation(body: &Fields, limits: &Limits) -> Result<Conversation, RequestError> {
    refuse_unknown_powers(body)?;
    let (messages, media) = messages::read(body, limits)?;
    let continues = messages::is_open_reply(&messages)?;
    let declared = tools::read(body, limits)?;
    let hides_tools = declared.choice == ToolChoice::None;
    Ok(Conversation {
        model: body.string("model")?.map(str::to_owned),
        messages,
        tools: if hides_tools { Vec::new() } else { declared.tools },
        tool_schemas: declared.schemas.into(),
        tool_choice: declared.choice,
        parallel_tool_calls: declared.parallel,
        response_format: response_format(body)?,
        thinking: Some(thinking(body)?),
        template_variables: Object::new(),
        media,
        generation: read_messages(body, limits)?,
        standing: Standing::read(body)?,
        stream: StreamWish::plain(body.boolean("stream")?.unwrap_or(false)),
        continue_final_message: continues,
        add_generation_prompt: !continues,
    })
}

/// Code of a request that wants its conversation kept here. The official clients know it, and send
/// the conversation whole from then on.
pub const THREADS_UNSUPPORTED: &str = "thread_unsupported_request";

/// What would change the reply and cannot be done here is refused, not ignored.
fn refuse_unknown_powers(body: &Fields) -> Result<(), RequestError> {
    if body.get("thread").is_some() {
        return Err(RequestError::new(
            RequestErrorKind::InvalidRequest,
            THREADS_UNSUPPORTED,
            "thread",
            "thread is not supported: no conversations are kept here; send all messages",
        ));
    }
    for key in ["mcp_servers", "container"] {
        let is_empty = |value: &Json| value.as_array().is_some_and(<[Json]>::is_empty);
        if body.get(key).is_some_and(|value| !is_empty(value)) {
            return Err(RequestError::invalid(
                key,
                format!("{key} is not supported; leave it out"),
            ));
        }
    }
    Ok(())
}

/// Unlike in a chat, no word about thinking means none: clients of this protocol do not expect
/// thinking blocks that they did not ask for.
fn thinking(body: &Fields) -> Result<ThinkingMode, RequestError> {
    let Some(thinking) = body.object("thinking")? else { return Ok(ThinkingMode::Disabled) };
    match thinking.string("type")? {
        Some("enabled") => {
            // checked, but the model has no means to keep to a budget
            thinking.count("budget_tokens", 1..=u32::MAX)?;
            Ok(ThinkingMode::Enabled)
        }
        Some("disabled") => Ok(ThinkingMode::Disabled),
        Some("adaptive" | "between_tools") => Ok(ThinkingMode::Adaptive),
        other => {
            let found = other.map_or("missing".to_owned(), |word| format!("{word:?}"));
            let message = format!("thinking.type is {found}; use enabled, disabled or adaptive");
            Err(RequestError::invalid("thinking.type", message))
        }
    }
}

fn hides_thinking(body: &Fields) -> Result<bool, RequestError> {
    let Some(thinking) = body.object("thinking")? else { return Ok(false) };
    match thinking.string("display")? {
        None | Some("summarized") => Ok(false),
        Some("omitted") => Ok(true),
        Some(other) => {
            let message = format!("thinking.display is {other:?}; use summarized or omitted");
            Err(RequestError::invalid("thinking.display", message))
        }
    }
}

fn response_format(body: &Fields) -> Result<ResponseFormat, RequestError> {
    let format = match body.object("output_config")? {
        Some(config) => config.object("format")?,
        None => body.object("output_format")?,
    };
    let Some(format) = format else { return Ok(ResponseFormat::Text) };
    match (format.string("type")?, format.object("schema")?) {
        (Some("json_schema"), Some(schema)) => Ok(ResponseFormat::JsonSchema {
            name: "response".to_owned(),
            schema: Json::Object(schema.members().clone()),
            strict: true,
        }),
        _ => {
            let path = format.here().to_owned();
            let message = format!("{path} must have the type json_schema and a schema");
            Err(RequestError::invalid(path, message))
        }
    }
}

#[cfg(test)]
mod tests;
