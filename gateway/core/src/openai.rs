//! The JSON of the OpenAI-style endpoints: requests as sent, replies as they go out.

use crate::error::{RequestError, RequestErrorKind};
use crate::json::{Json, Object};
use serde::Serialize;

/// A request body, parsed but not judged; unknown fields are kept and tolerated.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestBody(pub Object);

/// Body of `POST /v1/chat/completions`.
pub type ChatRequest = RequestBody;
/// Body of `POST /v1/completions`.
pub type CompletionRequest = RequestBody;
/// Body of `POST /tokenize`.
pub type TokenizeRequest = RequestBody;
/// Body of `POST /detokenize`.
pub type DetokenizeRequest = RequestBody;

impl RequestBody {
    /// Reads a body.
    ///
    /// # Errors
    /// `InvalidRequest` with line and column if it is not a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, RequestError> {
        let problem = |message: String| RequestError {
            kind: RequestErrorKind::InvalidRequest,
            message,
            param: None,
            code: Some("invalid_json"),
        };
        match Json::parse(body) {
            Ok(Json::Object(object)) => Ok(Self(object)),
            Ok(other) => Err(problem(format!(
                "the request body must be a JSON object, not {}",
                other.type_name()
            ))),
            Err(error) => Err(problem(format!("the request body is not valid JSON: {error}"))),
        }
    }
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model, or a stop string, ended it.
    Stop,
    /// A token limit ended it.
    Length,
    /// The model wants tools to be called.
    ToolCalls,
}

/// Token counts of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt tokens, media included.
    pub prompt_tokens: u64,
    /// Tokens made.
    pub completion_tokens: u64,
    /// Their sum.
    pub total_tokens: u64,
    /// What the prompt consisted of.
    pub prompt_tokens_details: PromptTokensDetails,
    /// What the reply consisted of.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Parts of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Found in the prefix cache.
    pub cached_tokens: u64,
    /// Of pictures.
    pub image_tokens: u64,
    /// Of clips.
    pub video_tokens: u64,
}

/// Parts of the reply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    /// Spent on thinking.
    pub reasoning_tokens: u64,
}

/// A whole chat reply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatCompletion {
    /// `chatcmpl-...`
    pub id: String,
    /// `chat.completion`
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The served model's name.
    pub model: String,
    /// One a requested sample.
    pub choices: Vec<ChatChoice>,
    /// Token counts.
    pub usage: Usage,
}

/// One sample of a chat reply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// 0-based.
    pub index: u32,
    /// The reply.
    pub message: AssistantMessage,
    /// Present if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// The assistant's message.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AssistantMessage {
    /// `assistant`
    pub role: &'static str,
    /// The answer; `null` if there is none.
    pub content: Option<String>,
    /// The thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The thinking under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Calls, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A complete tool call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// Unique within the reply.
    pub id: String,
    /// `function`
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What to call.
    pub function: FunctionCall,
}

/// Name and arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// Function name.
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

/// One event of a streamed chat reply.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk {
    /// The same in all chunks.
    pub id: String,
    /// `chat.completion.chunk`
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The served model's name.
    pub model: String,
    /// Empty in the chunk that carries usage.
    pub choices: Vec<ChunkChoice>,
    /// Token counts, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// One sample's part of a chunk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkChoice {
    /// 0-based.
    pub index: u32,
    /// What is new.
    pub delta: Delta,
    /// Log-probabilities of the tokens of this delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<ChatLogprobs>,
    /// `null` until the last chunk of the sample.
    pub finish_reason: Option<FinishReason>,
}

/// New text of a message; at most one of content, thinking and calls is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Delta {
    /// `assistant`, in the first delta.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Text of the thinking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Parts of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// A part of one call; id, type and name only in the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta {
    /// Number of the call, from 0.
    pub index: usize,
    /// Unique within the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// What is new.
    pub function: FunctionDelta,
}

/// A part of name and arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FunctionDelta {
    /// Function name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The next piece of the JSON text.
    pub arguments: String,
}

/// Log-probabilities of a chat reply.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One a token of the content.
    pub content: Vec<TokenLogprob>,
}

/// One token with its probability and its rivals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token as text.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f64,
    /// The token as bytes.
    pub bytes: Vec<u8>,
    /// The most probable tokens at this place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<TokenLogprob>>,
}

/// A text completion, whole or as a streamed piece.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion {
    /// `cmpl-...`
    pub id: String,
    /// `text_completion`
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// The served model's name.
    pub model: String,
    /// One a prompt and sample.
    pub choices: Vec<CompletionChoice>,
    /// Token counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// One sample of a completion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompletionChoice {
    /// 0-based.
    pub index: u32,
    /// Its text, or what is new of it.
    pub text: String,
    /// Present if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `null` until the end.
    pub finish_reason: Option<FinishReason>,
}

/// Log-probabilities in the older form.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Tokens as text.
    pub tokens: Vec<String>,
    /// Natural logarithms.
    pub token_logprobs: Vec<f64>,
    /// The most probable tokens at each place.
    pub top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
    /// Where each token begins in the text, in characters.
    pub text_offset: Vec<usize>,
}

/// `GET /v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelList {
    /// `list`
    pub object: &'static str,
    /// The served models.
    pub data: Vec<ModelCard>,
}

/// One served model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelCard {
    /// Name.
    pub id: String,
    /// `model`
    pub object: &'static str,
    /// Unix seconds.
    pub created: u64,
    /// Who serves it.
    pub owned_by: String,
    /// Longest context in tokens.
    pub max_model_len: u32,
}

/// Reply of `/tokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tokenized {
    /// Number of ids.
    pub count: usize,
    /// Longest context in tokens.
    pub max_model_len: u32,
    /// The ids.
    pub tokens: Vec<u32>,
}

/// Reply of `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Detokenized {
    /// The text.
    pub prompt: String,
}

/// The OpenAI form of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// The only member.
    pub error: ErrorDetail,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorDetail {
    /// For people.
    pub message: String,
    /// `invalid_request_error`, `server_error`, ...
    #[serde(rename = "type")]
    pub kind: String,
    /// JSON path of the field at fault.
    pub param: Option<String>,
    /// Stable code for programs.
    pub code: Option<String>,
}
