//! Every way a request can fail, and the one table that says how each is shown and counted.

use gateway_core::{RequestError, RequestErrorKind};

/// The sorts of failure a client or an operator can meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
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
    /// No API key, or one that is nobody's.
    Unauthorized,
    /// The key does not allow this.
    Forbidden,
    /// The model name is unknown.
    ModelNotFound,
    /// No such route.
    NotFound,
    /// The route exists for another method.
    MethodNotAllowed,
    /// The client was too slow to send its body.
    RequestTimeout,
    /// The server that holds the media refused, broke off or is not there.
    MediaOriginFailed,
    /// The server that holds the media did not answer in time.
    MediaOriginTimeout,
    /// This machine lacks what the media needs (FFmpeg).
    MediaUnavailable,
    /// No room now; the client may come back.
    Overloaded,
    /// No worker can take or finish the request.
    WorkerUnavailable,
    /// The gateway is stopping.
    Draining,
    /// The request outlived its limit.
    DeadlineExceeded,
    /// The client has left; nobody sees this answer.
    Cancelled,
    /// Our own mistake.
    Internal,
}

/// How one kind is shown: HTTP status, OpenAI `type`, default `code`, metric label.
#[derive(Clone, Copy, Debug)]
pub struct ErrorRow {
    /// HTTP status.
    pub status: u16,
    /// `error.type` of the body.
    pub openai_type: &'static str,
    /// `error.code` unless the error brings its own.
    pub code: &'static str,
    /// Label of `m3stack_gateway_errors_total`.
    pub label: &'static str,
}

impl ErrorKind {
    /// All kinds, in the order of the metric's labels.
    pub const ALL: [Self; 20] = [
        Self::InvalidRequest,
        Self::ContextTooLong,
        Self::MediaRejected,
        Self::TooLarge,
        Self::UnsupportedMedia,
        Self::Unauthorized,
        Self::Forbidden,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::MediaOriginFailed,
        Self::MediaOriginTimeout,
        Self::MediaUnavailable,
        Self::Overloaded,
        Self::WorkerUnavailable,
        Self::Draining,
        Self::DeadlineExceeded,
        Self::Cancelled,
        Self::Internal,
    ];

    /// The single table kind → status, type, code, label.
    pub const fn row(self) -> ErrorRow {
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        let (status, openai_type, code, label) = match self {
            Self::InvalidRequest => (400, INVALID, "invalid_request", "invalid_request"),
            Self::ContextTooLong => (400, INVALID, "context_length_exceeded", "context_too_long"),
            Self::MediaRejected => (400, INVALID, "media_rejected", "media_rejected"),
            Self::TooLarge => (413, INVALID, "too_large", "too_large"),
            Self::UnsupportedMedia => (415, INVALID, "unsupported_media", "unsupported_media"),
            Self::Unauthorized => (401, INVALID, "invalid_api_key", "unauthorized"),
            Self::Forbidden => (403, INVALID, "forbidden", "forbidden"),
            Self::ModelNotFound => (404, "not_found_error", "model_not_found", "model_not_found"),
            Self::NotFound => (404, "not_found_error", "route_not_found", "not_found"),
            Self::MethodNotAllowed => (405, INVALID, "method_not_allowed", "method_not_allowed"),
            Self::RequestTimeout => (408, INVALID, "request_timeout", "request_timeout"),
            Self::MediaOriginFailed => (502, SERVER, "media_origin_failed", "media_origin_failed"),
            Self::MediaOriginTimeout => {
                (504, SERVER, "media_origin_timeout", "media_origin_timeout")
            }
            Self::MediaUnavailable => (503, SERVER, "media_unavailable", "media_unavailable"),
            Self::Overloaded => (429, "rate_limit_error", "overloaded", "overloaded"),
            Self::WorkerUnavailable => (503, SERVER, "worker_unavailable", "worker_unavailable"),
            Self::Draining => (503, SERVER, "shutting_down", "draining"),
            Self::DeadlineExceeded => (504, SERVER, "deadline_exceeded", "deadline_exceeded"),
            Self::Cancelled => (499, INVALID, "client_closed_request", "cancelled"),
            Self::Internal => (500, SERVER, "internal_error", "internal"),
        };
        ErrorRow { status, openai_type, code, label }
    }

    /// Seconds after which trying again makes sense; goes into `Retry-After`.
    pub const fn retry_after_s(self) -> Option<u32> {
        match self {
            Self::Overloaded => Some(1),
            Self::WorkerUnavailable | Self::Draining => Some(5),
            _ => None,
        }
    }
}

/// A failed request: what the client is told, and what only the log is told.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct GatewayError {
    /// What sort of failure.
    pub kind: ErrorKind,
    /// For the client: what was wrong, with the value and the limit.
    pub message: String,
    /// JSON path of the field at fault.
    pub param: Option<String>,
    /// Stable machine-readable code.
    pub code: &'static str,
    /// For the log only.
    pub detail: Option<String>,
    /// Seconds after which trying again makes sense, if it is not as for all of its kind.
    pub retry_after_s: Option<u32>,
}

impl GatewayError {
    /// An error of that kind with its default code.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let code = kind.row().code;
        Self { kind, message: message.into(), param: None, code, detail: None, retry_after_s: None }
    }

    /// Our own mistake: neutral to the client, explained to the log.
    pub fn internal(detail: impl Into<String>) -> Self {
        let message = "the gateway met an internal error; the request id finds it in the log";
        Self { detail: Some(detail.into()), ..Self::new(ErrorKind::Internal, message) }
    }

    /// The same error, naming the field at fault unless it already names one.
    #[must_use]
    pub fn at(mut self, param: &str) -> Self {
        self.param.get_or_insert_with(|| param.to_owned());
        self
    }

    /// The same error, its field called by another protocol's name.
    #[must_use]
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            self.param = Some(to.to_owned());
            self.message = self.message.replacen(from, to, 1);
        }
        self
    }

    /// The same error, with an explanation for the log.
    #[must_use]
    pub fn because(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// The same error, telling when to come back.
    #[must_use]
    pub fn retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// The body `{"error": {message, type, param, code}}`.
    pub fn body(&self) -> serde_json::Value {
        serde_json::json!({"error": {
            "message": self.message,
            "type": self.kind.row().openai_type,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<RequestError> for GatewayError {
    fn from(error: RequestError) -> Self {
        // a fault of the core itself, whose words are for us
        if error.code == Some("internal") {
            return Self::internal(error.message);
        }
        let kind = match error.kind {
            RequestErrorKind::InvalidRequest => ErrorKind::InvalidRequest,
            RequestErrorKind::ContextTooLong => ErrorKind::ContextTooLong,
            RequestErrorKind::MediaRejected => ErrorKind::MediaRejected,
            RequestErrorKind::TooLarge => ErrorKind::TooLarge,
            RequestErrorKind::UnsupportedMedia => ErrorKind::UnsupportedMedia,
            RequestErrorKind::ModelNotFound => ErrorKind::ModelNotFound,
        };
        Self {
            kind,
            message: error.message,
            param: error.param.filter(|param| !param.is_empty()),
            code: error.code.unwrap_or(kind.row().code),
            detail: None,
            retry_after_s: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_kind_has_its_own_label_and_an_error_status() {
        let labels: HashSet<_> = ErrorKind::ALL.iter().map(|kind| kind.row().label).collect();
        assert_eq!(labels.len(), ErrorKind::ALL.len());
        assert!(ErrorKind::ALL.iter().all(|kind| (400..600).contains(&kind.row().status)));
    }

    #[test]
    fn the_index_of_a_kind_is_its_place_in_the_list() {
        for (place, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place);
        }
    }

    #[test]
    fn an_internal_error_tells_the_client_nothing_of_the_cause() {
        let error = GatewayError::internal("index 7 out of range in /src/x.rs");
        assert!(!error.body().to_string().contains("x.rs"));
    }

    #[test]
    fn a_request_error_keeps_its_field_and_code() {
        let refusal =
            RequestError::new(RequestErrorKind::TooLarge, "image_too_large", "messages[0]", "no");
        let error = GatewayError::from(refusal);
        assert_eq!(
            error.body(),
            serde_json::json!({"error": {
                "message": "no", "type": "invalid_request_error",
                "param": "messages[0]", "code": "image_too_large",
            }})
        );
        assert_eq!(error.kind.row().status, 413);
    }
}
