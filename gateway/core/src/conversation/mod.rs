//! What a client asked for, checked once: messages, tools, media and every sampling value.

mod completion;
pub(crate) mod fields;
pub(crate) mod generation;
pub(crate) mod media;
pub(crate) mod messages;
mod standing;
pub(crate) mod tools;
pub(crate) mod turns;
mod unsupported;

pub use crate::constraint::{ResponseFormat, ToolChoice};
pub use completion::{
    CompletionPrompt, CompletionTask, TokenizeTask, check_completion, check_detokenize,
    check_tokenize,
};
pub use generation::{Generation, LogprobsWish, StreamWish};
pub use media::MediaRef;
pub use standing::Standing;

use crate::constraint::OutputRules;
use crate::error::RequestError;
use crate::json::{Json, Object};
use crate::model::{GenerationDefaults, OutputOptions, ThinkingMode, ToolSchema};
use crate::openai::ChatRequest;
use fields::Fields;
use std::sync::Arc;

/// Bounds a request must keep.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Messages in a conversation.
    pub max_messages: usize,
    /// Declared tools.
    pub max_tools: usize,
    /// Pictures in a conversation.
    pub max_images: usize,
    /// Clips in a conversation.
    pub max_videos: usize,
    /// Largest `max_tokens` that may be asked for.
    pub max_output_tokens: u32,
    /// Largest `n`.
    pub max_samples: u32,
    /// Stop strings.
    pub max_stop_strings: usize,
    /// Bytes of one stop string.
    pub max_stop_bytes: usize,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// What holds where the request says nothing.
    pub defaults: GenerationDefaults,
}

impl Limits {
    /// Usual bounds for a model of that vocabulary, context and defaults.
    pub fn new(vocab_size: u32, max_context_tokens: u32, defaults: GenerationDefaults) -> Self {
        Self {
            max_messages: 10_000,
            max_tools: 1024,
            max_images: 200,
            max_videos: 20,
            max_output_tokens: max_context_tokens,
            max_samples: 16,
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            vocab_size,
            defaults,
        }
    }
}

/// A checked chat request: everything later stages need.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The model asked for; `None` if the request does not say.
    pub model: Option<String>,
    /// Normalised messages: `content` is a string or a list of `text`, `image` and `video` parts,
    /// call arguments are objects, tool results stand in the order of their calls.
    pub messages: Vec<Json>,
    /// Tools as declared, key order kept; empty if the model shall see none.
    pub tools: Vec<Json>,
    /// The same, as far as reading calls needs it.
    pub tool_schemas: Arc<[ToolSchema]>,
    /// Whether calls are wanted.
    pub tool_choice: ToolChoice,
    /// Whether more than one call is wanted.
    pub parallel_tool_calls: bool,
    /// What form the answer must have.
    pub response_format: ResponseFormat,
    /// Whether the model shall think; `None` if nothing was said.
    pub thinking: Option<ThinkingMode>,
    /// Further template variables from `chat_template_kwargs`.
    pub template_variables: Object,
    /// Pictures and clips in the order of the prompt.
    pub media: Vec<MediaRef>,
    /// How tokens are chosen and when they end.
    pub generation: Generation,
    /// On whose behalf, and how urgently.
    pub standing: Standing,
    /// Streaming wishes.
    pub stream: StreamWish,
    /// The last message is an unfinished assistant turn to be continued.
    pub continue_final_message: bool,
    /// The prompt ends with the opening of an assistant turn.
    pub add_generation_prompt: bool,
}

impl Conversation {
    /// What a parser of the reply must know.
    pub fn output_options(&self) -> OutputOptions {
        OutputOptions { thinking: self.begins_with(), tools: self.tool_schemas.clone() }
    }

    /// Which output is right.
    ///
    /// # Errors
    /// `InvalidRequest` for a form that a continued answer cannot have.
    pub fn output_rules(&self) -> Result<OutputRules, RequestError> {
        if self.continue_final_message && self.response_format != ResponseFormat::Text {
            let message = "response_format cannot be kept by a reply that continues a message: \
                           its beginning is fixed";
            return Err(RequestError::invalid("response_format", message));
        }
        Ok(OutputRules {
            thinking: self.begins_with(),
            tools: self.tool_schemas.clone(),
            choice: self.tool_choice.clone(),
            parallel: self.parallel_tool_calls,
            format: self.response_format.clone(),
        })
    }

    /// A continued turn is past its thinking.
    fn begins_with(&self) -> ThinkingMode {
        match self.continue_final_message {
            true => ThinkingMode::Disabled,
            false => self.thinking.unwrap_or_default(),
        }
    }
}

/// Template variables that the gateway sets itself.
const RESERVED_VARIABLES: [&str; 7] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
    "bos_token",
    "eos_token",
];

/// Checks a chat request and fills in what it leaves open.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_chat(request: ChatRequest, limits: &Limits) -> Result<Conversation, RequestError> {
    let body = Fields::new(&request.0, "");
    let model = body.string("model")?.map(str::to_owned);
    let (messages, media) = messages::read(&body, limits)?;
    let declared = tools::read(&body, limits)?;
    let kwargs = body.object("chat_template_kwargs")?;
    let template_variables = template_variables(kwargs.as_ref())?;
    let continue_final_message = body.boolean("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt =
        body.boolean("add_generation_prompt")?.unwrap_or(!continue_final_message);
    check_continuation(&messages, continue_final_message, add_generation_prompt)?;
    Ok(Conversation {
        model,
        messages,
        tools: declared.tools,
        tool_schemas: declared.schemas.into(),
        tool_choice: declared.choice,
        parallel_tool_calls: body.boolean("parallel_tool_calls")?.unwrap_or(true),
        response_format: tools::response_format(&body)?,
        thinking: thinking(&body, kwargs.as_ref())?,
        template_variables,
        media,
        generation: generation::read_chat(&body, limits)?,
        standing: Standing::read(&body)?,
        stream: generation::read_stream(&body)?,
        continue_final_message,
        add_generation_prompt,
    })
}

fn template_variables(kwargs: Option<&Fields>) -> Result<Object, RequestError> {
    let Some(kwargs) = kwargs else { return Ok(Object::new()) };
    let mut variables = kwargs.members().clone();
    for name in RESERVED_VARIABLES {
        if variables.contains_key(name) {
            return Err(RequestError::invalid(
                kwargs.path(name),
                format!("{} is set by the server and cannot be given", kwargs.path(name)),
            ));
        }
    }
    variables.shift_remove("thinking_mode");
    Ok(variables)
}

fn check_continuation(
    messages: &[Json],
    continue_final_message: bool,
    add_generation_prompt: bool,
) -> Result<(), RequestError> {
    if !continue_final_message {
        return Ok(());
    }
    let problem =
        |message: &str| Err(RequestError::invalid("continue_final_message", message.to_owned()));
    if add_generation_prompt {
        return problem("continue_final_message and add_generation_prompt cannot both be true");
    }
    let last = messages.last().and_then(Json::as_object);
    let is_open_reply = last.is_some_and(|message| {
        message.get("role").and_then(Json::as_str) == Some("assistant")
            && message.get("content").and_then(Json::as_str).is_some_and(|text| !text.is_empty())
            && !message.contains_key("tool_calls")
    });
    if !is_open_reply {
        return problem(
            "continue_final_message needs a last message of role assistant with text content and no tool calls",
        );
    }
    Ok(())
}

/// `chat_template_kwargs.thinking_mode` or `.enable_thinking`, then `thinking`, then
/// `reasoning_effort`: the first that is there decides.
fn thinking(body: &Fields, kwargs: Option<&Fields>) -> Result<Option<ThinkingMode>, RequestError> {
    if let Some(kwargs) = kwargs {
        if let Some(mode) = kwargs.string("thinking_mode")? {
            return named_mode(mode, kwargs.path("thinking_mode")).map(Some);
        }
        if let Some(Json::Bool(enabled)) = kwargs.members().get("enable_thinking") {
            return Ok(Some(if *enabled { ThinkingMode::Enabled } else { ThinkingMode::Disabled }));
        }
    }
    if let Some(thinking) = body.object("thinking")? {
        let Some(mode) = thinking.string("type")? else {
            return Err(RequestError::invalid(
                "thinking.type",
                "thinking.type is missing; use enabled, disabled or adaptive",
            ));
        };
        return named_mode(mode, "thinking.type".to_owned()).map(Some);
    }
    Ok(match body.string("reasoning_effort")? {
        Some("none") => Some(ThinkingMode::Disabled),
        Some("minimal" | "low" | "medium") => Some(ThinkingMode::Adaptive),
        Some("high" | "xhigh" | "max") => Some(ThinkingMode::Enabled),
        _ => None,
    })
}

fn named_mode(mode: &str, param: String) -> Result<ThinkingMode, RequestError> {
    match mode {
        "enabled" => Ok(ThinkingMode::Enabled),
        "disabled" => Ok(ThinkingMode::Disabled),
        "adaptive" => Ok(ThinkingMode::Adaptive),
        other => {
            let message = format!("{param} is {other:?}; use enabled, disabled or adaptive");
            Err(RequestError::invalid(param, message))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
