//! Text completions and the tokenizer endpoints.

use super::fields::{Fields, wrong_type};
use super::generation::{Generation, StreamWish, read_completion, read_stream, token_ids};
use super::tools::response_format;
use super::{Conversation, Limits, Standing, check_chat};
use crate::constraint::ResponseFormat;
use crate::error::RequestError;
use crate::json::Json;
use crate::openai::{CompletionRequest, DetokenizeRequest, TokenizeRequest};

/// One prompt of a text completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompletionPrompt {
    /// To be tokenized, control tokens read as such.
    Text(String),
    /// Already tokenized.
    Ids(Vec<u32>),
}

/// A checked text completion.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionTask {
    /// The model asked for.
    pub model: Option<String>,
    /// At least one.
    pub prompts: Vec<CompletionPrompt>,
    /// The prompt is repeated before its completion.
    pub echo: bool,
    /// What the tokenizer itself would put around a text is added.
    pub add_special_tokens: bool,
    /// Sampling and ending.
    pub generation: Generation,
    /// What form the text must have.
    pub response_format: ResponseFormat,
    /// On whose behalf, and how urgently.
    pub standing: Standing,
    /// Streaming wishes.
    pub stream: StreamWish,
}

/// A checked tokenize request.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeTask {
    /// Plain text.
    Text {
        /// The model asked for.
        model: Option<String>,
        /// What to tokenize.
        text: String,
        /// What the tokenizer itself would put around a text is added.
        add_special_tokens: bool,
    },
    /// A conversation.
    Chat(Box<Conversation>),
}

const MAX_PROMPTS: usize = 128;

/// Checks a text completion.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_completion(
    request: CompletionRequest,
    limits: &Limits,
) -> Result<CompletionTask, RequestError> {
    let body = Fields::new(&request.0, "");
    if let Some(suffix) = body.string("suffix")?
        && !suffix.is_empty()
    {
        return Err(RequestError::invalid("suffix", "suffix is not supported; leave it out"));
    }
    let echo = body.boolean("echo")?.unwrap_or(false);
    if echo && body.get("logprobs").is_some() {
        let message = "echo cannot stand beside logprobs: there are none of the prompt's tokens";
        return Err(RequestError::invalid("echo", message));
    }
    Ok(CompletionTask {
        model: body.string("model")?.map(str::to_owned),
        prompts: prompts(&body, limits)?,
        echo,
        add_special_tokens: body.boolean("add_special_tokens")?.unwrap_or(true),
        generation: read_completion(&body, limits)?,
        response_format: response_format(&body)?,
        standing: Standing::read(&body)?,
        stream: read_stream(&body)?,
    })
}

/// Checks a tokenize request: `prompt` or `messages`.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_tokenize(
    request: TokenizeRequest,
    limits: &Limits,
) -> Result<TokenizeTask, RequestError> {
    let body = Fields::new(&request.0, "");
    if body.get("messages").is_some() {
        return Ok(TokenizeTask::Chat(Box::new(check_chat(request, limits)?)));
    }
    match body.string("prompt")? {
        Some(text) => Ok(TokenizeTask::Text {
            model: body.string("model")?.map(str::to_owned),
            text: text.to_owned(),
            add_special_tokens: body.boolean("add_special_tokens")?.unwrap_or(true),
        }),
        None => Err(RequestError::invalid("prompt", "prompt or messages must be given")),
    }
}

/// Checks a detokenize request and gives its ids.
///
/// # Errors
/// `InvalidRequest` naming the field, its value and what is allowed.
pub fn check_detokenize(
    request: DetokenizeRequest,
    limits: &Limits,
) -> Result<Vec<u32>, RequestError> {
    let body = Fields::new(&request.0, "");
    match body.array("tokens")? {
        Some(items) => token_ids(items, "tokens", limits),
        None => Err(RequestError::invalid("tokens", "tokens is missing; give a list of token ids")),
    }
}

fn prompts(body: &Fields, limits: &Limits) -> Result<Vec<CompletionPrompt>, RequestError> {
    let items = match body.get("prompt") {
        None => return Err(RequestError::invalid("prompt", "prompt is missing")),
        Some(Json::String(text)) => return Ok(vec![CompletionPrompt::Text(text.clone())]),
        Some(Json::Array(items)) => items,
        Some(other) => return Err(wrong_type("prompt".into(), "a string or a list", other)),
    };
    if items.is_empty() {
        return Err(RequestError::invalid("prompt", "prompt is an empty list"));
    }
    if matches!(items[0], Json::Number(_)) {
        return Ok(vec![CompletionPrompt::Ids(token_ids(items, "prompt", limits)?)]);
    }
    if items.len() > MAX_PROMPTS {
        return Err(RequestError::invalid(
            "prompt",
            format!("prompt has {} entries; at most {MAX_PROMPTS} are allowed", items.len()),
        ));
    }
    items.iter().enumerate().map(|(index, item)| prompt(item, index, limits)).collect()
}

fn prompt(item: &Json, index: usize, limits: &Limits) -> Result<CompletionPrompt, RequestError> {
    let path = format!("prompt[{index}]");
    match item {
        Json::String(text) => Ok(CompletionPrompt::Text(text.clone())),
        Json::Array(ids) if ids.is_empty() => {
            Err(RequestError::invalid(path.clone(), format!("{path} is an empty list")))
        }
        Json::Array(ids) => Ok(CompletionPrompt::Ids(token_ids(ids, &path, limits)?)),
        other => Err(wrong_type(path, "a string or a list of token ids", other)),
    }
}
