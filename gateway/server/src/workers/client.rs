//! Runs one `Generate` on one worker; dropping the events ends the call.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, Uri, Version, header};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::StreamExt;
use gateway_core::routing::Outcome;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::Status;
use tonic::body::Body;
use tonic::codec::EncodeBody;
use tonic::transport::Channel;
use tower::{Service, ServiceExt};

use super::outgoing::{Message, MessageEncoder, Outgoing};
use super::replies::Replies;
use super::shared_pieces::Ways;
use super::upload::ChunkSender;
use super::wire::{self, RequestHeader, Wish};
use super::{Sources, WorkerEvent, WorkerId, WorkerLease};
use crate::error::{ErrorKind, GatewayError};
use crate::rare::Rare;
use crate::telemetry::traces::{RequestTrace, WorkerCall};

/// Chunks that may wait for the connection: one in flight, one ready.
const WAITING_CHUNKS: usize = 2;

const GENERATE: &str = "/m3stack.worker.v1.WorkerService/Generate";

/// Makes and sends the patches of the items a worker lacks.
pub type UploadWork =
    Box<dyn FnOnce(Vec<u32>, ChunkSender) -> BoxFuture<'static, Result<(), GatewayError>> + Send>;

/// A request about to be given to a worker.
pub struct GenerateCall<'a> {
    /// What the worker must know.
    pub header: &'a RequestHeader,
    /// Unique among the running requests of this gateway.
    pub request_id: &'a str,
    /// Of this sample.
    pub seed: u64,
    /// The caller's own id, for the worker's log.
    pub trace_id: &'a str,
    /// The trace that the call is part of.
    pub trace: &'a Arc<RequestTrace>,
    /// When the request has lived long enough.
    pub deadline: Instant,
    /// Present if the header names media.
    pub upload: Option<UploadWork>,
    /// What is wanted of this worker.
    pub wish: Wish,
}

type Opening = BoxFuture<'static, Result<Replies, Status>>;
type Upload = BoxFuture<'static, Result<(), GatewayError>>;

/// The worker's side of one request. Everything runs inside [`WorkerEvents::next`], so dropping
/// this value stops upload, media work and generation, and frees the lease.
pub struct WorkerEvents {
    lease: WorkerLease,
    _told: Told,
    /// The deadline, or the loss of the worker.
    end: Rare<GatewayError>,
    /// When the worker was given its last part of the request, if it can begin at once with all.
    sent: Option<Instant>,
    /// Until the first token, or until it was told.
    silent: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    opening: Option<Opening>,
    replies: Option<Replies>,
    work: Option<(UploadWork, ChunkSender)>,
    upload: Option<Upload>,
    ways: Ways,
    is_finished: bool,
}

impl WorkerEvents {
    /// Prepares the call; it is made by the first [`WorkerEvents::next`].
    pub fn new(lease: WorkerLease, call: GenerateCall<'_>) -> Self {
        let header = wire::bare_header(call.header, call.request_id, call.seed, &call.wish);
        let ids = Arc::clone(&call.header.prompt_token_ids);
        let header = Message::Header(Box::new(header), ids);
        let ways = lease.ways();
        let (work, chunks) = match call.upload {
            None => (None, None),
            Some(work) => {
                let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
                (Some((work, ChunkSender::new(sender, Some(ways.clone())))), Some(receiver))
            }
        };
        let mut request = request(Outgoing { header: Some(header), chunks });
        let headers = request.headers_mut();
        let left = call.deadline.saturating_duration_since(Instant::now());
        for (name, value) in [
            (HeaderName::from_static("grpc-timeout"), HeaderValue::try_from(timeout(left))),
            (HeaderName::from_static("x-request-id"), HeaderValue::try_from(call.trace_id)),
            (HeaderName::from_static("traceparent"), call.trace.context.traceparent().try_into()),
        ] {
            if let Ok(value) = value {
                headers.insert(name, value);
            }
        }
        let told = Told {
            trace: Arc::clone(call.trace),
            request_id: call.request_id.to_owned(),
            address: Arc::clone(&lease.address),
            channel: lease.channel.clone(),
            began: Instant::now(),
        };
        // one that has to compile or to fetch something first says nothing of the way to it
        let begins_at_once =
            call.header.constraint.is_none() && call.wish.sources == Sources::default();
        let sent = begins_at_once.then_some(told.began);
        let opening = open(lease.channel.clone(), request);
        let (lost, deadline) = (lease.lost.clone(), call.deadline);
        let end = Rare::new(async move {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(deadline) => wire::deadline_exceeded(),
                () = lost.cancelled() => broken("it was restarted or fell silent"),
            }
        });
        let silent = Some(Box::pin(lease.silent.clone().cancelled_owned()));
        Self {
            lease,
            _told: told,
            end,
            sent,
            silent,
            opening: Some(opening.boxed()),
            replies: None,
            work,
            upload: None,
            ways,
            is_finished: false,
        }
    }

    /// The worker that serves this.
    pub fn worker(&self) -> WorkerId {
        self.lease.id
    }

    /// The right to be served by it.
    pub fn lease(&self) -> &WorkerLease {
        &self.lease
    }

    /// The next event; `None` once `Finished` was given.
    ///
    /// # Errors
    /// The worker's own error, `WorkerUnavailable` if the call broke, `DeadlineExceeded`, or what
    /// went wrong with the media while it was made.
    pub async fn next(&mut self) -> Result<Option<WorkerEvent>, GatewayError> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// [`WorkerEvents::next`] as one step of a task: every token comes through here, and a future
    /// made for each would cost more than the step.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<WorkerEvent>, GatewayError>> {
        if self.is_finished {
            return Poll::Ready(Ok(None));
        }
        let event = match ready!(self.poll_event(context)) {
            Ok(event) => {
                match &event {
                    WorkerEvent::Silent => {}
                    WorkerEvent::Started { queue, .. } => {
                        if let Some(sent) = self.sent {
                            self.lease.lagged(sent.elapsed().saturating_sub(*queue));
                        }
                    }
                    // who says tokens works, whatever becomes of the request
                    WorkerEvent::Tokens { .. } | WorkerEvent::Finished { .. } => {
                        self.silent = None;
                        self.lease.judge(Outcome::Served);
                    }
                }
                Ok(event)
            }
            Err(Failed::Worker(error)) => {
                self.lease.judge(judgement(error.kind));
                Err(error)
            }
            Err(Failed::Media(error)) => Err(error),
        };
        if matches!(event, Ok(WorkerEvent::Finished { .. }) | Err(_)) {
            self.is_finished = true;
        }
        Poll::Ready(event.map(Some))
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<WorkerEvent, Failed>> {
        loop {
            if let Some(upload) = &mut self.upload
                && let Poll::Ready(outcome) = upload.as_mut().poll(context)
            {
                self.upload = None;
                match outcome {
                    // the call itself knows better why it ended
                    Err(error) if error.kind == ErrorKind::WorkerUnavailable => {}
                    Err(error) => return Poll::Ready(Err(Failed::Media(error))),
                    Ok(()) => self.sent = self.sent.map(|_| Instant::now()),
                }
            }
            match self.poll_reply(context) {
                Poll::Ready(Ok(wire::Reply::Event(event))) => return Poll::Ready(Ok(event)),
                Poll::Ready(Ok(wire::Reply::Needs(needed))) => self.begin_upload(needed)?,
                Poll::Ready(Ok(wire::Reply::Taken)) => self.ways.release(),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
                Poll::Pending => {
                    if let Poll::Ready(error) = self.end.poll(context) {
                        return Poll::Ready(Err(error.into()));
                    }
                    let silent = self.silent.as_mut();
                    if silent.is_none_or(|silent| silent.as_mut().poll(context).is_pending()) {
                        return Poll::Pending;
                    }
                    self.silent = None;
                    return Poll::Ready(Ok(WorkerEvent::Silent));
                }
            }
        }
    }

    fn poll_reply(&mut self, context: &mut Context<'_>) -> Poll<Result<wire::Reply, GatewayError>> {
        if let Some(opening) = &mut self.opening {
            let outcome = ready!(opening.as_mut().poll(context));
            self.opening = None;
            self.replies = Some(outcome.map_err(|status| wire::failure(&status))?);
        }
        let Some(replies) = &mut self.replies else {
            return Poll::Ready(Err(broken("the call was never opened")));
        };
        Poll::Ready(match ready!(replies.poll_next(context)) {
            Some(Ok(response)) => wire::reply(response),
            None => Err(broken("the call ended without a finish")),
            Some(Err(status)) => Err(wire::failure(&status)),
        })
    }

    fn begin_upload(&mut self, needed: Vec<u32>) -> Result<(), GatewayError> {
        match self.work.take() {
            Some((work, sender)) => {
                self.upload = Some(work(needed, sender));
                Ok(())
            }
            None if needed.is_empty() => Ok(()),
            None => Err(broken("it asked twice for media, or for media that was never named")),
        }
    }

    /// Takes in the end of a finished call if it has already arrived, so that the worker sees a
    /// clean end rather than a reset.
    pub fn settle(&mut self) {
        if let Some(replies) = &mut self.replies {
            let _ = poll_fn(|context| replies.poll_next(context)).now_or_never();
        }
    }
}

/// Tells the request's trace of the call when it is over, however it ends.
struct Told {
    trace: Arc<RequestTrace>,
    request_id: String,
    address: Arc<str>,
    channel: Channel,
    began: Instant,
}

impl Drop for Told {
    fn drop(&mut self) {
        self.trace.called(WorkerCall {
            request_id: std::mem::take(&mut self.request_id),
            address: Arc::clone(&self.address),
            channel: self.channel.clone(),
            began: self.began,
            ended: Instant::now(),
        });
    }
}

/// Whose doing a failure is.
enum Failed {
    Worker(GatewayError),
    Media(GatewayError),
}

impl From<GatewayError> for Failed {
    fn from(error: GatewayError) -> Self {
        Self::Worker(error)
    }
}

/// What a failed call says about the worker: refusals, full queues and the request's own deadline
/// say nothing.
fn judgement(kind: ErrorKind) -> Outcome {
    match kind {
        ErrorKind::WorkerUnavailable | ErrorKind::Internal => Outcome::Fault,
        _ => Outcome::Neutral,
    }
}

/// The call's head and what it sends.
fn request(messages: Outgoing) -> axum::http::Request<Body> {
    let body = EncodeBody::new_client(MessageEncoder, messages.map(Ok), None, None);
    let mut request = axum::http::Request::new(Body::new(body));
    *request.method_mut() = Method::POST;
    *request.version_mut() = Version::HTTP_2;
    *request.uri_mut() = Uri::from_static(GENERATE);
    let headers = request.headers_mut();
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    request
}

/// Source: the gRPC protocol over HTTP/2: at most eight digits and a unit.
fn timeout(left: Duration) -> String {
    const MOST: u128 = 99_999_999;
    let units = [("n", left.as_nanos()), ("u", left.as_micros()), ("m", left.as_millis())];
    match units.into_iter().find(|(_, count)| *count <= MOST) {
        Some((unit, count)) => format!("{count}{unit}"),
        None => format!("{}S", u128::from(left.as_secs()).min(MOST)),
    }
}

async fn open(mut channel: Channel, request: axum::http::Request<Body>) -> Result<Replies, Status> {
    let failed = |error: tonic::transport::Error| Status::from_error(Box::new(error));
    let ready = channel.ready().await.map_err(failed)?;
    Replies::of(ready.call(request).await.map_err(failed)?)
}

/// What to call a worker that is left for another before its first token.
pub fn silent() -> GatewayError {
    broken("it has fallen silent")
}

fn broken(detail: &str) -> GatewayError {
    GatewayError::new(
        ErrorKind::WorkerUnavailable,
        "the worker that served this request is gone; try again",
    )
    .because(detail)
}
