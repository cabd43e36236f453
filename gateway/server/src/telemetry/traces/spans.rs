//! The spans of one request, collected while it lives.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::transport::Channel;

use super::export::Tracer;
use super::{TraceContext, hex};

/// Span kinds of OTLP.
pub(super) const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
const CLIENT: u8 = 3;

/// One request's trace; sent to the collector when it is finished, if there is one.
#[derive(Debug)]
pub struct RequestTrace {
    /// Which trace, which span.
    pub context: TraceContext,
    began: (Instant, SystemTime),
    seen: Mutex<Seen>,
    tracer: Option<Arc<Tracer>>,
}

#[derive(Debug, Default)]
struct Seen {
    phases: Vec<(&'static str, Instant, Instant)>,
    calls: Vec<WorkerCall>,
}

/// One call to a worker, which can tell more about it.
#[derive(Clone, Debug)]
pub struct WorkerCall {
    /// Under which the worker knows it.
    pub request_id: String,
    /// Where the worker is.
    pub address: Arc<str>,
    /// To ask it.
    pub channel: Channel,
    /// When it was made.
    pub began: Instant,
    /// When it was over.
    pub ended: Instant,
}

/// A trace that is complete, on its way to the collector.
#[derive(Debug)]
pub(super) struct FinishedTrace {
    pub(super) context: TraceContext,
    pub(super) calls: Vec<(WorkerCall, [u8; 8])>,
    pub(super) spans: Vec<Value>,
    began: (Instant, SystemTime),
}

/// A span that is not the root.
pub(super) struct Child<'a> {
    pub(super) name: &'a str,
    pub(super) kind: u8,
    pub(super) span_id: [u8; 8],
    pub(super) parent: [u8; 8],
    pub(super) began: Instant,
    pub(super) ended: Instant,
}

impl RequestTrace {
    /// Begins with the request.
    pub fn begin(context: TraceContext, tracer: Option<Arc<Tracer>>) -> Self {
        let tracer = tracer.filter(|_| context.is_sampled);
        let began = (Instant::now(), SystemTime::now());
        Self { context, began, seen: Mutex::default(), tracer }
    }

    /// Notes a stretch of the request's time.
    pub fn phase(&self, name: &'static str, began: Instant) {
        if self.tracer.is_some() {
            self.seen().phases.push((name, began, Instant::now()));
        }
    }

    /// Notes a call to a worker that is over.
    pub fn called(&self, call: WorkerCall) {
        if self.tracer.is_some() {
            self.seen().calls.push(call);
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the request and sends what was noted; `route` and `status` are those of HTTP.
    pub fn finish(&self, request_id: &str, route: &str, status: u16) {
        let Some(tracer) = &self.tracer else { return };
        let Seen { phases, calls } = std::mem::take(&mut *self.seen());
        let root = self.context.span_id;
        let mut finished = FinishedTrace {
            context: self.context,
            calls: Vec::new(),
            spans: Vec::new(),
            began: self.began,
        };
        let attributes = json!([
            {"key": "http.route", "value": {"stringValue": route}},
            {"key": "http.response.status_code", "value": {"intValue": status.to_string()}},
            {"key": "m3stack.request_id", "value": {"stringValue": request_id}},
        ]);
        let mut span = finished.span(&Child {
            name: route,
            kind: SERVER,
            span_id: root,
            parent: self.context.parent.unwrap_or_default(),
            began: self.began.0,
            ended: Instant::now(),
        });
        span["attributes"] = attributes;
        if status >= 500 {
            span["status"] = json!({"code": 2});
        }
        finished.spans.push(span);
        for (name, began, ended) in phases {
            let child =
                Child { name, kind: INTERNAL, span_id: fresh_span(), parent: root, began, ended };
            let span = finished.span(&child);
            finished.spans.push(span);
        }
        for call in calls {
            let span_id = fresh_span();
            let mut span = finished.span(&Child {
                name: "worker",
                kind: CLIENT,
                span_id,
                parent: root,
                began: call.began,
                ended: call.ended,
            });
            span["attributes"] =
                json!([{"key": "server.address", "value": {"stringValue": &*call.address}}]);
            finished.spans.push(span);
            finished.calls.push((call, span_id));
        }
        tracer.send(finished);
    }
}

impl FinishedTrace {
    pub(super) fn span(&self, child: &Child<'_>) -> Value {
        let mut span = json!({
            "traceId": hex(&self.context.trace_id),
            "spanId": hex(&child.span_id),
            "name": child.name,
            "kind": child.kind,
            "startTimeUnixNano": self.nanoseconds(child.began),
            "endTimeUnixNano": self.nanoseconds(child.ended),
        });
        if child.parent != [0; 8] {
            span["parentSpanId"] = json!(hex(&child.parent));
        }
        span
    }

    /// A moment on the wall clock, which is read once a request: spans never run backwards.
    fn nanoseconds(&self, moment: Instant) -> String {
        let (steady, wall) = self.began;
        let since = moment.checked_duration_since(steady);
        let before = steady.saturating_duration_since(moment);
        let at = since.map_or_else(|| wall - before, |since| wall + since);
        at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_nanos().to_string()
    }
}

pub(super) fn fresh_span() -> [u8; 8] {
    rand::random::<u64>().max(1).to_be_bytes()
}
