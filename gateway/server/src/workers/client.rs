//! Runs one `Generate` on one worker; dropping the events ends the call.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::Stream;
use gateway_core::routing::Outcome;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;

use super::upload::ChunkSender;
use super::wire::{self, RequestHeader, Wish, proto};
use super::{WorkerEvent, WorkerId, WorkerLease};
use crate::error::{ErrorKind, GatewayError};
use crate::telemetry::traces::{RequestTrace, WorkerCall};

/// Chunks that may wait for the connection: one in flight, one ready.
const WAITING_CHUNKS: usize = 2;

/// Largest message taken from a worker: many tokens with many alternatives.
const MAX_REPLY_BYTES: usize = 16 << 20;

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

type Opening = BoxFuture<'static, Result<tonic::Streaming<proto::GenerateResponse>, tonic::Status>>;
type Upload = BoxFuture<'static, Result<(), GatewayError>>;

/// The worker's side of one request. Everything runs inside [`WorkerEvents::next`], so dropping
/// this value stops upload, media work and generation, and frees the lease.
pub struct WorkerEvents {
    lease: WorkerLease,
    _told: Told,
    deadline: Pin<Box<Sleep>>,
    /// Kept from token to token, as the deadline is: making one costs more than asking it.
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
    opening: Option<Opening>,
    replies: Option<tonic::Streaming<proto::GenerateResponse>>,
    work: Option<(UploadWork, ChunkSender)>,
    upload: Option<Upload>,
    is_finished: bool,
}

impl WorkerEvents {
    /// Prepares the call; it is made by the first [`WorkerEvents::next`].
    pub fn new(lease: WorkerLease, call: GenerateCall<'_>) -> Self {
        let header = wire::header_request(call.header, call.request_id, call.seed, &call.wish);
        let (work, chunks) = match call.upload {
            None => (None, None),
            Some(work) => {
                let (sender, receiver) = mpsc::channel(WAITING_CHUNKS);
                (Some((work, ChunkSender::new(sender))), Some(receiver))
            }
        };
        let requests = Outgoing { header: Some(header), chunks };
        let mut request = tonic::Request::new(requests);
        request.set_timeout(call.deadline.saturating_duration_since(Instant::now()));
        if let Ok(value) = MetadataValue::try_from(call.trace_id) {
            request.metadata_mut().insert("x-request-id", value);
        }
        if let Ok(value) = MetadataValue::try_from(call.trace.context.traceparent()) {
            request.metadata_mut().insert("traceparent", value);
        }
        let told = Told {
            trace: Arc::clone(call.trace),
            request_id: call.request_id.to_owned(),
            address: Arc::clone(&lease.address),
            channel: lease.channel.clone(),
            began: Instant::now(),
        };
        let opening = open(lease.channel.clone(), request);
        let lost = Box::pin(lease.lost.clone().cancelled_owned());
        Self {
            lease,
            _told: told,
            deadline: Box::pin(tokio::time::sleep_until(call.deadline)),
            lost,
            opening: Some(opening.boxed()),
            replies: None,
            work,
            upload: None,
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
        if self.is_finished {
            return Ok(None);
        }
        let event = match self.next_event().await {
            Ok(event) => {
                // who says tokens works, whatever becomes of the request
                if !matches!(event, WorkerEvent::Started { .. }) {
                    self.lease.judge(Outcome::Served);
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
        event.map(Some)
    }

    async fn next_event(&mut self) -> Result<WorkerEvent, Failed> {
        loop {
            tokio::select! {
                biased;
                outcome = progress(&mut self.upload) => {
                    self.upload = None;
                    match outcome {
                        // the call itself knows better why it ended
                        Err(error) if error.kind == ErrorKind::WorkerUnavailable => {}
                        Err(error) => return Err(Failed::Media(error)),
                        Ok(()) => {}
                    }
                }
                reply = next_reply(&mut self.opening, &mut self.replies) => match reply? {
                    wire::Reply::Event(event) => return Ok(event),
                    wire::Reply::Needs(needed) => self.begin_upload(needed)?,
                },
                () = &mut self.deadline => return Err(wire::deadline_exceeded().into()),
                () = &mut self.lost => {
                    return Err(broken("it was restarted or fell silent").into());
                }
            }
        }
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
            let _ = replies.message().now_or_never();
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

/// What goes to the worker: the header, then chunks as they are made. (A named type: boxed
/// streams defeat the compiler's proof that the call can move between threads.)
struct Outgoing {
    header: Option<proto::GenerateRequest>,
    chunks: Option<mpsc::Receiver<proto::GenerateRequest>>,
}

impl Stream for Outgoing {
    type Item = proto::GenerateRequest;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(header) = self.header.take() {
            return Poll::Ready(Some(header));
        }
        match &mut self.chunks {
            Some(chunks) => chunks.poll_recv(context),
            None => Poll::Ready(None),
        }
    }
}

async fn open(
    channel: Channel,
    request: tonic::Request<Outgoing>,
) -> Result<tonic::Streaming<proto::GenerateResponse>, tonic::Status> {
    let client = proto::worker_service_client::WorkerServiceClient::new(channel);
    let mut client = client.max_decoding_message_size(MAX_REPLY_BYTES);
    client.generate(request).await.map(tonic::Response::into_inner)
}

/// Waits for the running upload, or for ever if there is none.
async fn progress(upload: &mut Option<Upload>) -> Result<(), GatewayError> {
    match upload {
        Some(upload) => upload.await,
        None => std::future::pending().await,
    }
}

async fn next_reply(
    opening: &mut Option<Opening>,
    replies: &mut Option<tonic::Streaming<proto::GenerateResponse>>,
) -> Result<wire::Reply, GatewayError> {
    if let Some(pending) = opening {
        let outcome = pending.await;
        *opening = None;
        *replies = Some(outcome.map_err(|status| wire::failure(&status))?);
    }
    let Some(replies) = replies else { return Err(broken("the call was never opened")) };
    match replies.message().await {
        Ok(Some(response)) => wire::reply(response),
        Ok(None) => Err(broken("the call ended without a finish")),
        Err(status) => Err(wire::failure(&status)),
    }
}

fn broken(detail: &str) -> GatewayError {
    GatewayError::new(
        ErrorKind::WorkerUnavailable,
        "the worker that served this request is gone; try again",
    )
    .because(detail)
}
