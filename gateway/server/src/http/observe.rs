//! Around every request: its ids, a caught panic, one log line, one count, whatever its end.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use futures::FutureExt;
use hyper::body::{Frame, SizeHint};
use tokio::time::Instant;
use tower::ServiceExt;
use tracing::Instrument;

use super::auth::{self, Door};
use super::{Tenant, host, rates, refuse, refuse_request};
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::RouteLabel;
use crate::telemetry::traces::{RequestTrace, TraceContext, hex};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const MAX_ID_BYTES: usize = 128;

/// The names of one request.
#[derive(Clone, Debug)]
pub struct RequestIds {
    /// The caller's own id, or one made here; goes back in `x-request-id` and into every log line.
    pub trace_id: String,
    /// Where its time goes.
    pub trace: Arc<RequestTrace>,
}

impl RequestIds {
    /// Those of a request that has passed through here.
    pub fn of(request: &Request) -> Self {
        request.extensions().get().cloned().unwrap_or_else(|| Self {
            trace_id: fresh_id(),
            trace: Arc::new(RequestTrace::begin(TraceContext::of(None), None)),
        })
    }
}

/// 24 letters that nobody else has.
pub(super) fn fresh_id() -> String {
    hex(&rand::random::<[u8; 12]>())
}

/// Answers one request, whatever happens in its handler.
pub(super) async fn answer(
    app: Arc<App>,
    door: Door,
    router: Router,
    mut request: Request,
) -> Response {
    let trace_id = request
        .headers()
        .get(REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES)
        .map_or_else(fresh_id, str::to_owned);
    let traceparent = request.headers().get(TRACEPARENT).and_then(|value| value.to_str().ok());
    let context = TraceContext::of(traceparent);
    let trace = Arc::new(RequestTrace::begin(context, app.tracer.clone()));
    let mut observation = Observation {
        app: Arc::clone(&app),
        route: route_label(request.uri().path()),
        began: Instant::now(),
        status: 499,
        span: tracing::info_span!("request", request_id = %trace_id,
            trace_id = %context.trace_id_hex()),
        request_id: trace_id.clone(),
        trace: Arc::clone(&trace),
    };
    let header = HeaderValue::try_from(&trace_id).ok();
    request.extensions_mut().insert(RequestIds { trace_id, trace });

    let handling = async {
        if let Err(error) = host::check(&request) {
            return Ok(refuse_request(&app, &request, &error));
        }
        match auth::check(&app, door, &mut request) {
            Ok(()) => {
                let Tenant(tenant) = request.extensions().get().cloned().unwrap_or_default();
                let response = router.oneshot(request).await;
                response.map(|mut response| {
                    rates::show(&app, &tenant, &mut response);
                    response
                })
            }
            Err(refusal) => Ok(*refusal),
        }
    };
    let handling = AssertUnwindSafe(handling).catch_unwind();
    let outcome = handling.instrument(observation.span.clone()).await;
    let mut response = match outcome {
        Ok(Ok(response)) => response,
        Err(panic) => observation.span.in_scope(|| refuse(&app, &panicked(&*panic))),
    };
    if let Some(id) = header {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    let status = response.status().as_u16();
    let (head, body) = response.into_parts();
    if body.is_end_stream() {
        observation.status = status;
    }
    Response::from_parts(head, Body::new(ObservedBody { body, status, observation }))
}

/// What a panic said, as an error.
pub(super) fn panicked(panic: &(dyn std::any::Any + Send)) -> GatewayError {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    GatewayError::internal(format!("panic: {}", text.unwrap_or_else(|| "without a word".into())))
}

fn route_label(path: &str) -> RouteLabel {
    match path {
        "/v1/chat/completions" => RouteLabel::Chat,
        "/v1/completions" => RouteLabel::Completions,
        "/v1/messages" => RouteLabel::Messages,
        "/v1/messages/count_tokens" => RouteLabel::CountTokens,
        "/v1/responses" => RouteLabel::Responses,
        "/tokenize" | "/v1/tokenize" => RouteLabel::Tokenize,
        "/detokenize" | "/v1/detokenize" => RouteLabel::Detokenize,
        "/health" | "/ready" | "/metrics" | "/version" => RouteLabel::Operations,
        _ if path.starts_with("/admin/") => RouteLabel::Operations,
        _ if path == "/v1/models" || path.starts_with("/v1/models/") => RouteLabel::Models,
        _ => RouteLabel::Other,
    }
}

/// Written down when dropped. A request that never gets further counts as 499: its client left.
struct Observation {
    app: Arc<App>,
    route: RouteLabel,
    began: Instant,
    status: u16,
    span: tracing::Span,
    request_id: String,
    trace: Arc<RequestTrace>,
}

impl Drop for Observation {
    fn drop(&mut self) {
        let taken = self.began.elapsed();
        self.app.metrics.http_request(self.route, self.status, taken);
        if self.status == 499 {
            self.app.metrics.error(ErrorKind::Cancelled);
        }
        let _inside = self.span.enter();
        let (status, route) = (self.status, self.route);
        let taken_ms = taken.as_secs_f64() * 1e3;
        if !matches!(route, RouteLabel::Operations) {
            self.trace.finish(&self.request_id, route.label(), status);
        }
        if matches!(route, RouteLabel::Operations) {
            tracing::debug!(?route, status, taken_ms, "answered");
        } else {
            tracing::info!(?route, status, taken_ms, "answered");
        }
    }
}

/// A response body that notices whether it was sent to its end.
struct ObservedBody {
    body: Body,
    status: u16,
    observation: Observation,
}

impl HttpBody for ObservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, status, observation } = self.get_mut();
        let _inside = observation.span.enter();
        let polled = Pin::new(&mut *body).poll_frame(context);
        let is_end = match &polled {
            Poll::Ready(None) => true,
            Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
            _ => false,
        };
        if is_end {
            observation.status = *status;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
