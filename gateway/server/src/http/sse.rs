//! Steps of a reply as server-sent events: frames, keep-alive, one error or one end.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use gateway_core::pace::{Pace, Pacer};
use hyper::body::Frame;
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::{observe, record, timed};
use crate::app::App;
use crate::error::GatewayError;
use crate::reply::{Reply, ReplyStep};

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Room for the events that are on their way.
const EVENTS_BYTES: usize = 1024;

/// How one endpoint words its events.
pub(super) trait Wording: Send + Unpin + 'static {
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
pub(super) struct Frames {
    bytes: BytesMut,
}

impl Frames {
    fn new() -> Self {
        Self { bytes: BytesMut::with_capacity(EVENTS_BYTES) }
    }

    /// One event with a JSON value as its data.
    pub(super) fn json(&mut self, value: &impl Serialize) {
        self.raw(b"data: ");
        self.value(value);
        self.raw(b"\n\n");
    }

    /// One event whose data is an object of which most is the same every time: its beginning up
    /// to an open list, the list's items, and what follows the list.
    pub(super) fn object(
        &mut self,
        beginning: &[u8],
        items: Option<&impl Serialize>,
        last: Option<(&str, &impl Serialize)>,
    ) {
        self.raw(b"data: ");
        self.raw(beginning);
        if let Some(item) = items {
            self.value(item);
        }
        self.raw(b"]");
        if let Some((name, value)) = last {
            self.raw(b",");
            self.value(&name);
            self.raw(b":");
            self.value(value);
        }
        self.raw(b"}\n\n");
    }

    fn value(&mut self, value: &impl Serialize) {
        let written = serde_json::to_writer((&mut self.bytes).writer(), value);
        debug_assert!(written.is_ok(), "replies hold nothing json cannot say");
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
    pace: Option<Pace>,
) -> Result<Response, GatewayError> {
    let first = match tokio::time::timeout(KEEP_ALIVE, reply.next()).await {
        Ok(Err(error)) => return Err(error),
        Ok(next) => Some(next),
        // nothing yet, but nothing wrong: the status can wait no longer than proxies do
        Err(_) => None,
    };
    let timing = reply.timing();
    let pace = Paced::new(pace, reply.num_samples());
    let writer = Writer {
        app: Arc::clone(app),
        pace,
        reply,
        wording,
        waiting: first,
        frames: Frames::new(),
        written: Instant::now(),
        alarm: Box::pin(tokio::time::sleep(KEEP_ALIVE)),
        is_over: false,
        fresh: true,
    };
    let mut response = Response::new(Body::new(writer));
    let headers = response.headers_mut();
    let set = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    for (name, value) in set {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(timed(response, timing))
}

/// The text of every sample, held to a pace; without one all goes out as it comes.
struct Paced {
    samples: Vec<Pacer>,
    began: Instant,
}

impl Paced {
    fn new(pace: Option<Pace>, num_samples: u32) -> Self {
        let samples = pace.into_iter().flat_map(|pace| (0..num_samples).map(move |_| pace));
        Self { samples: samples.map(Pacer::new).collect(), began: Instant::now() }
    }

    /// What of a step goes out now; `None` if nothing does.
    fn add(&mut self, mut step: ReplyStep) -> Option<ReplyStep> {
        let now = self.began.elapsed();
        let Some(pacer) = self.samples.get_mut(step.choice as usize) else { return Some(step) };
        let mut released = pacer.add(step.deltas, step.logprobs, now);
        if step.end.is_some() {
            let last = pacer.release();
            released.deltas.extend(last.deltas);
            released.logprobs.extend(last.logprobs);
        }
        (step.deltas, step.logprobs) = (released.deltas, released.logprobs);
        let is_empty = step.deltas.is_empty() && step.logprobs.is_empty() && step.end.is_none();
        (!is_empty).then_some(step)
    }

    /// When the first text that waits must go out.
    fn due(&self) -> Option<Instant> {
        self.samples.iter().filter_map(Pacer::due).min().map(|due| self.began + due)
    }

    /// Text that has waited until `now`.
    fn release(&mut self, now: Instant) -> Vec<ReplyStep> {
        let now = now - self.began;
        let is_due = |pacer: &Pacer| pacer.due().is_some_and(|due| due <= now);
        let samples = (0..).zip(&mut self.samples).filter(|(_, pacer)| is_due(pacer));
        let steps = samples.map(|(choice, pacer)| {
            let released = pacer.release();
            let (deltas, logprobs) = (released.deltas, released.logprobs);
            ReplyStep { choice, deltas, logprobs, queue: None, end: None }
        });
        steps.collect()
    }
}

/// A reply as the body of a response.
struct Writer<W> {
    app: Arc<App>,
    pace: Paced,
    reply: Reply,
    wording: W,
    /// Read from the reply and not yet written.
    waiting: Option<Next>,
    frames: Frames,
    /// When the last bytes were written.
    written: Instant,
    /// Rings no later than there is something to do; moving it with every token would cost more
    /// than letting it ring for nothing.
    alarm: Pin<Box<Sleep>>,
    is_over: bool,
    /// Nothing was written yet.
    fresh: bool,
}

impl<W: Wording> HttpBody for Writer<W> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    /// The next events. What is ready at once shares a write: the connection asks until nothing is.
    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let writer = self.get_mut();
        if std::mem::take(&mut writer.fresh) {
            writer.wording.begin(&writer.reply, &mut writer.frames);
            match writer.waiting.take() {
                Some(next) => writer.put(next),
                None => writer.wording.keep_alive(&mut writer.frames),
            }
        }
        loop {
            if !writer.frames.bytes.is_empty() {
                writer.written = Instant::now();
                let bytes = writer.frames.bytes.split().freeze();
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            if writer.is_over {
                return Poll::Ready(None);
            }
            match caught_next(&mut writer.reply, context) {
                Poll::Ready(next) => writer.put(next),
                Poll::Pending => ready!(writer.poll_alarm(context)),
            }
        }
    }
}

/// A panic in the middle of a stream is an error event like any other.
fn caught_next(reply: &mut Reply, context: &mut Context<'_>) -> Poll<Next> {
    std::panic::catch_unwind(AssertUnwindSafe(|| reply.poll_next(context)))
        .unwrap_or_else(|panic| Poll::Ready(Err(observe::panicked(&*panic))))
}

impl<W: Wording> Writer<W> {
    /// Writes what is due: text that has waited long enough, or a sign of life.
    fn poll_alarm(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let silence = self.written + KEEP_ALIVE;
        let due = self.pace.due().filter(|due| *due < silence);
        let until = due.unwrap_or(silence);
        loop {
            if self.alarm.is_elapsed() || self.alarm.deadline() > until {
                self.alarm.as_mut().reset(until);
            }
            ready!(self.alarm.as_mut().poll(context));
            let now = Instant::now();
            if now >= until {
                match due {
                    Some(_) => self.release(now),
                    None => self.wording.keep_alive(&mut self.frames),
                }
                return Poll::Ready(());
            }
        }
    }

    fn release(&mut self, now: Instant) {
        for step in self.pace.release(now) {
            self.wording.step(step, &self.reply, &mut self.frames);
        }
    }

    fn put(&mut self, next: Next) {
        match next {
            Ok(Some(step)) => {
                if let Some(step) = self.pace.add(step) {
                    self.wording.step(step, &self.reply, &mut self.frames);
                }
            }
            Ok(None) => {
                self.wording.end(&self.reply, &mut self.frames);
                self.is_over = true;
            }
            Err(error) => {
                record(&self.app, &error);
                // what was made before the failure is shown before it
                self.release(Instant::now() + KEEP_ALIVE);
                self.wording.fail(&error, &mut self.frames);
                self.is_over = true;
            }
        }
    }
}
