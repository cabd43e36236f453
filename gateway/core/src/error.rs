//! What a client can do wrong, with the parameter at fault and a stable code.

/// The sorts of client mistakes; the server maps each to an HTTP status in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestErrorKind {
    /// A field is missing, of the wrong type or out of range.
    InvalidRequest,
    /// Prompt plus output do not fit the context.
    ContextTooLong,
    /// A picture or clip cannot be used.
    MediaRejected,
    /// Body or media larger than the limit.
    TooLarge,
    /// The media type is not one we read.
    UnsupportedMedia,
    /// The model name is unknown.
    ModelNotFound,
}

/// A refusal to be shown to the client as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// What sort of mistake.
    pub kind: RequestErrorKind,
    /// What was wrong, with the value and the limit.
    pub message: String,
    /// JSON path of the field at fault, e.g. `messages[0].content[1].image_url.url`.
    pub param: Option<String>,
    /// Stable machine-readable code, e.g. `context_length_exceeded`.
    pub code: Option<&'static str>,
}

/// Code of an error that is no mistake of the client but a fault of ours; its words are for the
/// log.
pub const INTERNAL: &str = "internal";

impl RequestError {
    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            kind: RequestErrorKind::InvalidRequest,
            message: message.into(),
            param: None,
            code: Some(INTERNAL),
        }
    }

    /// An `InvalidRequest` naming its field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            kind: RequestErrorKind::InvalidRequest,
            message: message.into(),
            param: Some(param.into()),
            code: None,
        }
    }

    /// An error of another kind naming its field and code.
    pub fn new(
        kind: RequestErrorKind,
        code: &'static str,
        param: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self { kind, message: message.into(), param: Some(param.into()), code: Some(code) }
    }
}
