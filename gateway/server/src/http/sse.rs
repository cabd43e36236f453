//! Steps of a reply as server-sent events: frames, keep-alive, one error or one end.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use futures::FutureExt;
use futures::stream;
use gateway_core::pace::{Pace, Pacer};
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::{observe, record, timed};
use crate::app::App;
use crate::error::GatewayError;
use crate::reply::{Reply, ReplyStep};

/// Silence after which a comment is sent, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Steps that are ready at once share a write up to this size.
const WRITE_BYTES: usize = 32 * 1024;
/// Room for the events of one token.
const EVENT_BYTES: usize = 512;

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
        alarm: Box::pin(tokio::time::sleep(KEEP_ALIVE)),
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

/// A panic in the middle of a stream is an error event like any other.
async fn caught_next(reply: &mut Reply) -> Next {
    AssertUnwindSafe(reply.next())
        .catch_unwind()
        .await
        .unwrap_or_else(|panic| Err(observe::panicked(&*panic)))
}

struct Writer<W> {
    app: Arc<App>,
    pace: Paced,
    reply: Reply,
    wording: W,
    /// Read from the reply and not yet written.
    waiting: Option<Next>,
    /// Rings no later than there is something to do; moving it with every token would cost more
    /// than letting it ring for nothing.
    alarm: Pin<Box<Sleep>>,
    is_over: bool,
    /// Nothing was written yet.
    fresh: bool,
}

impl<W: Wording> Writer<W> {
    /// The next bytes; `None` when all is said.
    async fn write(&mut self) -> Option<Bytes> {
        let mut frames = Frames { bytes: BytesMut::with_capacity(EVENT_BYTES) };
        if std::mem::take(&mut self.fresh) {
            self.wording.begin(&self.reply, &mut frames);
            match self.waiting.take() {
                Some(next) => self.put(next, &mut frames),
                None => self.wording.keep_alive(&mut frames),
            }
        }
        while !self.is_over && frames.bytes.is_empty() {
            self.wait(&mut frames).await;
        }
        while !self.is_over && frames.bytes.len() < WRITE_BYTES {
            match caught_next(&mut self.reply).now_or_never() {
                Some(next) => self.put(next, &mut frames),
                None => break,
            }
        }
        (!frames.bytes.is_empty()).then(|| frames.bytes.freeze())
    }

    /// Waits for the next step, for text that is due, or for the silence to become too long.
    async fn wait(&mut self, frames: &mut Frames) {
        let silence = Instant::now() + KEEP_ALIVE;
        let due = self.pace.due().filter(|due| *due < silence);
        let until = due.unwrap_or(silence);
        if self.alarm.is_elapsed() || self.alarm.deadline() > until {
            self.alarm.as_mut().reset(until);
        }
        loop {
            tokio::select! {
                biased;
                next = caught_next(&mut self.reply) => return self.put(next, frames),
                () = &mut self.alarm => {}
            }
            let now = Instant::now();
            match due {
                _ if now < until => self.alarm.as_mut().reset(until),
                Some(_) => return self.release(now, frames),
                None => return self.wording.keep_alive(frames),
            }
        }
    }

    fn release(&mut self, now: Instant, frames: &mut Frames) {
        for step in self.pace.release(now) {
            self.wording.step(step, &self.reply, frames);
        }
    }

    fn put(&mut self, next: Next, frames: &mut Frames) {
        match next {
            Ok(Some(step)) => {
                if let Some(step) = self.pace.add(step) {
                    self.wording.step(step, &self.reply, frames);
                }
            }
            Ok(None) => {
                self.wording.end(&self.reply, frames);
                self.is_over = true;
            }
            Err(error) => {
                record(&self.app, &error);
                // what was made before the failure is shown before it
                self.release(Instant::now() + KEEP_ALIVE, frames);
                self.wording.fail(&error, frames);
                self.is_over = true;
            }
        }
    }
}
