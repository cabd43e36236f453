//! The JSON of Anthropic's protocol as it goes out.

use crate::openai;
use serde::Serialize;
use serde_json::value::RawValue;

/// A message: whole, or as a stream begins it.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// `msg_...`
    pub id: String,
    /// `message`
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// `assistant`
    pub role: &'static str,
    /// The served model's name.
    pub model: String,
    /// In the order they were made.
    pub content: Vec<Block>,
    /// `null` as long as it goes on.
    pub stop_reason: Option<StopReason>,
    /// The stop sequence that ended it.
    pub stop_sequence: Option<String>,
    /// Token counts.
    pub usage: Usage,
}

/// A block of content.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// Words for the user.
    Text {
        /// The words.
        text: String,
    },
    /// Thinking.
    Thinking {
        /// The words.
        thinking: String,
        /// Goes back with them.
        signature: String,
    },
    /// A call of a tool.
    ToolUse {
        /// Unique within the reply.
        id: String,
        /// The tool's name.
        name: String,
        /// A JSON object, as the model wrote it.
        input: Box<RawValue>,
    },
}

/// What is new in the open block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum BlockDelta {
    /// Words for the user.
    TextDelta {
        /// The words.
        text: String,
    },
    /// Thinking.
    ThinkingDelta {
        /// The words.
        thinking: String,
    },
    /// The signature of a thinking block, before it closes.
    SignatureDelta {
        /// All of it.
        signature: String,
    },
    /// The next piece of a call's input.
    InputJsonDelta {
        /// JSON text.
        partial_json: String,
    },
}

/// One event of a stream.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// The first.
    MessageStart {
        /// Without content.
        message: Message,
    },
    /// A block begins.
    ContentBlockStart {
        /// Its place in the content.
        index: usize,
        /// Without words.
        content_block: Block,
    },
    /// Nothing new.
    Ping,
    /// A block goes on.
    ContentBlockDelta {
        /// Its place in the content.
        index: usize,
        /// What is new.
        delta: BlockDelta,
    },
    /// A block is over.
    ContentBlockStop {
        /// Its place in the content.
        index: usize,
    },
    /// How the message ended.
    MessageDelta {
        /// Why.
        delta: MessageEnd,
        /// Token counts of all of it.
        usage: Usage,
    },
    /// The last.
    MessageStop,
}

impl Event {
    /// The event's name, which stands beside the data.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::Ping => "ping",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

/// How a message ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MessageEnd {
    /// Why.
    pub stop_reason: StopReason,
    /// The stop sequence, if one did it.
    pub stop_sequence: Option<String>,
}

/// Why a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model was done.
    EndTurn,
    /// `max_tokens` were made.
    MaxTokens,
    /// The context is full.
    ModelContextWindowExceeded,
    /// A stop sequence was made.
    StopSequence,
    /// Tools are to be called.
    ToolUse,
}

/// Token counts of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Prompt tokens that were computed, media included.
    pub input_tokens: u64,
    /// Always 0: the prefix cache fills itself, and nothing is charged for it.
    pub cache_creation_input_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cache_read_input_tokens: u64,
    /// Tokens made.
    pub output_tokens: u64,
}

impl From<openai::Usage> for Usage {
    fn from(usage: openai::Usage) -> Self {
        let cached = usage.prompt_tokens_details.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// Reply of `POST /v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TokenCount {
    /// What the prompt of that request would have.
    pub input_tokens: usize,
}

/// Anthropic's form of an error; also an event of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorBody {
    /// `error`
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What went wrong.
    pub error: ErrorDetail,
    /// Finds the request in the log.
    pub request_id: String,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorDetail {
    /// `invalid_request_error`, `api_error`, ...
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// For people.
    pub message: String,
    /// For programs, where they must do something about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<ErrorDetails>,
}

/// What of a request is not supported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorDetails {
    /// Stable.
    pub error_code: &'static str,
    /// Names of fields.
    pub unsupported: Vec<String>,
}
