//! Routes, and what all of them share: who asks, how bodies are read, how errors are shown.

mod admin;
mod auth;
mod body;
mod chat;
mod completions;
mod host;
mod messages;
mod observe;
mod ops;
mod pages;
mod rates;
mod responses;
mod serve;
mod sse;
mod tokens;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::{get, post};
use gateway_core::RequestError;
use gateway_core::conversation::Limits;
use gateway_core::openai::RequestBody;
use tokio::time::Instant;

pub use observe::RequestIds;
pub use serve::{serve, serve_admin};

use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::pipeline::run_text;
use crate::reply::{Timing, Visit};

/// Largest body of requests that hold no media.
const MAX_TEXT_BYTES: u64 = 16 << 20;
/// Bodies above this are parsed off the async threads.
const LONG_BODY_BYTES: u64 = 256 << 10;

/// All routes of an app.
pub fn router(app: &Arc<App>) -> Router {
    let router = Router::new();
    // with a listener for operators, what is theirs is there only
    let router = match app.config.admin_listen {
        Some(_) => router,
        None => router.route("/metrics", get(ops::metrics)),
    };
    pages::add_to(router)
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/models", get(ops::models))
        .route("/v1/models/{*id}", get(ops::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/v1/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/detokenize", post(tokens::detokenize))
        .route("/health", get(ops::health))
        .route("/ready", get(ops::ready))
        .route("/version", get(ops::version))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(Arc::clone(app))
}

async fn unknown_route(State(app): State<Arc<App>>, request: Request) -> Response {
    let path = request.uri().path();
    let error = GatewayError::new(ErrorKind::NotFound, format!("there is no route {path:?}"));
    refuse(&app, &error)
}

async fn wrong_method(State(app): State<Arc<App>>, request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path} does not answer to {method}");
    let error = GatewayError::new(ErrorKind::MethodNotAllowed, message);
    refuse_request(&app, &request, &error)
}

/// On whose behalf a request is made, as whoever checks its key says; a request extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant(pub String);

/// A request body, read, parsed and checked, and the visit it begins.
async fn receive<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    reply_prefix: &str,
    max_bytes: u64,
    check: impl FnOnce(RequestBody, &Limits) -> Result<T, RequestError> + Send + 'static,
) -> Result<(T, Visit), GatewayError> {
    let arrived = Instant::now();
    let RequestIds { trace_id, trace } = RequestIds::of(&request);
    let Tenant(tenant) = request.extensions().get().cloned().unwrap_or_default();
    let affinity = request.headers().get("x-session-affinity").and_then(|text| text.to_str().ok());
    let affinity = affinity.filter(|text| !text.is_empty()).map(str::to_owned);
    let (bytes, lease) = body::read(app, request, max_bytes).await?;
    let is_long = lease.bytes() > LONG_BODY_BYTES;
    let checked =
        run_text(app, is_long, move |app| check(RequestBody::parse(&bytes)?, &app.limits)).await?;
    trace.phase("receive", arrived);
    let visit = Visit {
        reply_id: format!("{reply_prefix}-{}", observe::fresh_id()),
        trace_id,
        trace,
        affinity,
        tenant,
        arrived,
        deadline: arrived + app.config.request_timeout,
        body: lease,
    };
    Ok((checked, visit))
}

/// Shows an error to the client, counts it, and logs what is not for the client.
fn refuse(app: &App, error: &GatewayError) -> Response {
    refuse_with(app, error, error.kind.row().status, &error.body())
}

/// The same in the words of the protocol that the request was meant for.
fn refuse_request(app: &App, request: &Request, error: &GatewayError) -> Response {
    if request.uri().path().starts_with("/v1/messages") {
        return messages::refuse(app, error, &RequestIds::of(request).trace_id);
    }
    refuse(app, error)
}

/// The same in the words of any protocol.
fn refuse_with(
    app: &App,
    error: &GatewayError,
    status: u16,
    body: &impl serde::Serialize,
) -> Response {
    record(app, error);
    let mut response = json_response(body);
    *response.status_mut() =
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if let Some(seconds) = error.retry_after_s.or(error.kind.retry_after_s()) {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Counts and logs an error, where it is handled and only there.
fn record(app: &App, error: &GatewayError) {
    app.metrics.error(error.kind);
    let kind = error.kind.row().label;
    let detail = error.detail.as_deref().unwrap_or("");
    match error.kind {
        ErrorKind::Internal => tracing::error!(kind, detail, "request failed"),
        ErrorKind::WorkerUnavailable
        | ErrorKind::DeadlineExceeded
        | ErrorKind::MediaUnavailable
        | ErrorKind::Draining => {
            tracing::warn!(kind, message = %error.message, detail, "request failed");
        }
        _ => tracing::debug!(kind, param = error.param.as_deref(), detail, "request refused"),
    }
}

/// The response with a word on where its time went.
/// Source: W3C Server Timing; durations are milliseconds.
fn timed(mut response: Response, timing: Timing) -> Response {
    let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
    let parts = format!(
        "queue;dur={:.1}, media;dur={:.1}, prefill;dur={:.1}, first_token;dur={:.1}",
        ms(timing.queue),
        ms(timing.media),
        ms(timing.prefill()),
        ms(timing.first_token),
    );
    if let Ok(value) = HeaderValue::try_from(parts) {
        response.headers_mut().insert("server-timing", value);
    }
    response
}

fn json_response(value: &impl serde::Serialize) -> Response {
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::from(body));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
