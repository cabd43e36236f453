//! Steps of a reply as server-sent events: frames, keep-alive, one error or one end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures::FutureExt;
use futures::stream;
use serde::Serialize;

use super::{observe, record};
use crate::app::App;
use crate::error::GatewayError;
use crate::reply::{Reply, ReplyStep};

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Steps that are ready at once share a write up to this size.
const WRITE_BYTES: usize = 32 * 1024;

/// How one endpoint words its events.
pub(super) trait Wording: Send + 'static {
    /// What stands before everything else.
    fn begin(&mut self, _reply: &Reply, _frames: &mut Frames) {}

    /// The events of a step.
    fn step(&mut self, step: ReplyStep, reply: &Reply, frames: &mut Frames);

    /// The events after the last step.
    fn end(&mut self, reply: &Reply, frames: &mut Frames);

    /// A failed reply's last event; nothing after it may look like an end.
    fn fail(&mut self, error: &GatewayError, frames: &mut Frames) {
        frames.json(&error.body());
    }

    /// Says that the connection is alive.
    fn keep_alive(&mut self, frames: &mut Frames) {
        frames.raw(b": keep-alive\n\n");
    }
}

/// Server-sent events about to be written.
#[derive(Default)]
pub(super) struct Frames {
    bytes: BytesMut,
}

impl Frames {
    /// One event with a JSON value as its data.
    pub(super) fn json(&mut self, value: &impl Serialize) {
        self.bytes.extend_from_slice(b"data: ");
        let written = serde_json::to_writer((&mut self.bytes).writer(), value);
        debug_assert!(written.is_ok(), "replies hold nothing json cannot say");
        self.bytes.extend_from_slice(b"\n\n");
    }

    /// One event with a name.
    pub(super) fn named(&mut self, name: &str, value: &impl Serialize) {
        self.raw(b"event: ");
        self.raw(name.as_bytes());
        self.raw(b"\n");
        self.json(value);
    }

    /// The end mark of OpenAI's streams.
    pub(super) fn done(&mut self) {
        self.raw(b"data: [DONE]\n\n");
    }

    fn raw(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
    }
}

type Next = Result<Option<ReplyStep>, GatewayError>;

/// Answers with a stream. Errors before the first step still get a status of their own.
///
/// # Errors
/// What ends the reply before its first step.
pub(super) async fn respond<W: Wording>(
    app: &Arc<App>,
    mut reply: Reply,
    wording: W,
) -> Result<Response, GatewayError> {
    let first = match tokio::time::timeout(KEEP_ALIVE, reply.next()).await {
        Ok(Err(error)) => return Err(error),
        Ok(next) => Some(next),
        // nothing yet, but nothing wrong: the status can wait no longer than proxies do
        Err(_) => None,
    };
    let writer = Writer {
        app: Arc::clone(app),
        reply,
        wording,
        waiting: first,
        is_over: false,
        fresh: true,
    };
    let frames = stream::unfold(writer, |mut writer| async move {
        let bytes = writer.write().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), writer))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    let set = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    for (name, value) in set {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

struct Writer<W> {
    app: Arc<App>,
    reply: Reply,
    wording: W,
    /// Read from the reply and not yet written.
    waiting: Option<Next>,
    is_over: bool,
    /// Nothing was written yet.
    fresh: bool,
}

impl<W: Wording> Writer<W> {
    /// The next bytes; `None` when all is said.
    async fn write(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        let was_fresh = std::mem::take(&mut self.fresh);
        let next = match self.waiting.take() {
            Some(next) => Some(next),
            None if was_fresh => None,
            None => tokio::time::timeout(KEEP_ALIVE, self.caught_next()).await.ok(),
        };
        let mut frames = Frames::default();
        if was_fresh {
            self.wording.begin(&self.reply, &mut frames);
        }
        let Some(next) = next else {
            self.wording.keep_alive(&mut frames);
            return Some(frames.bytes.freeze());
        };
        self.put(next, &mut frames);
        while !self.is_over && frames.bytes.len() < WRITE_BYTES {
            match self.caught_next().now_or_never() {
                Some(next) => self.put(next, &mut frames),
                None => break,
            }
        }
        Some(frames.bytes.freeze())
    }

    /// A panic in the middle of a stream is an error event like any other.
    async fn caught_next(&mut self) -> Next {
        AssertUnwindSafe(self.reply.next())
            .catch_unwind()
            .await
            .unwrap_or_else(|panic| Err(observe::panicked(&*panic)))
    }

    fn put(&mut self, next: Next, frames: &mut Frames) {
        match next {
            Ok(Some(step)) => self.wording.step(step, &self.reply, frames),
            Ok(None) => {
                self.wording.end(&self.reply, frames);
                self.is_over = true;
            }
            Err(error) => {
                record(&self.app, &error);
                self.wording.fail(&error, frames);
                self.is_over = true;
            }
        }
    }
}
