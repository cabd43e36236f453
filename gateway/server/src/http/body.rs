//! Reads request bodies: bounded in bytes, in time, and by the budget all requests share.

use std::error::Error;
use std::io;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::sync::mpsc;

use crate::admission::ByteLease;
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};

/// Longest silence of a client that is sending.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// How long, and how far beyond the limit, the rest of a refused body is read only to be thrown
/// away: a client that is still writing would not see the refusal.
const MAX_DRAIN: Duration = Duration::from_secs(10);
const DRAINED_BODIES: u64 = 4;

/// The rest of a refused body, and how much of it is read.
struct Leftover(Body, u64);

/// Takes what is left of refused bodies; a request extension. It is read beside the connection, so
/// that the refusal does not wait for it.
#[derive(Clone)]
pub(super) struct Leftovers(mpsc::UnboundedSender<Leftover>);

impl Leftovers {
    /// A place for them, and what reads them for as long as it is asked.
    pub(super) fn new() -> (Self, impl Future<Output = ()>) {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let reading = async move {
            while let Some(Leftover(body, max_bytes)) = receiver.recv().await {
                drain(body, max_bytes).await;
            }
            std::future::pending().await
        };
        (Self(sender), reading)
    }
}

/// The whole body.
///
/// # Errors
/// `UnsupportedMedia` if it is compressed, `TooLarge`, `Overloaded`, `RequestTimeout`,
/// `InvalidRequest` if it is cut short or broken, or `Cancelled` if the client left.
pub(super) async fn read(
    app: &App,
    request: Request,
    max_bytes: u64,
) -> Result<(Bytes, ByteLease), GatewayError> {
    let (head, mut body) = request.into_parts();
    let mut was_asked_for = false;
    let outcome = match check_coding(&head.headers) {
        Ok(()) => collect(app, &mut body, max_bytes, &mut was_asked_for).await,
        Err(error) => Err(error),
    };
    // who still waits for leave to send its body has none, and will send nothing
    let waits = head.headers.contains_key(header::EXPECT) && !was_asked_for;
    let is_coming = outcome.is_err() && !waits;
    if let (true, Some(leftovers)) = (is_coming, head.extensions.get::<Leftovers>()) {
        let _ = leftovers.0.send(Leftover(body, max_bytes));
    }
    outcome
}

fn check_coding(headers: &HeaderMap) -> Result<(), GatewayError> {
    let codings = headers.get_all(header::CONTENT_ENCODING);
    match codings.iter().find(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        None => Ok(()),
        Some(coding) => {
            let message = format!("content-encoding is {coding:?}; send the body uncompressed");
            Err(GatewayError::new(ErrorKind::UnsupportedMedia, message))
        }
    }
}

async fn collect(
    app: &App,
    body: &mut Body,
    max_bytes: u64,
    was_asked_for: &mut bool,
) -> Result<(Bytes, ByteLease), GatewayError> {
    let announced = body.size_hint().exact().unwrap_or(0);
    if announced > max_bytes {
        return Err(too_large(max_bytes));
    }
    let mut lease = ByteLease::default();
    app.admission.grow(&mut lease, announced)?;
    let mut whole = Bytes::new();
    let mut rest = BytesMut::new();
    *was_asked_for = true;
    loop {
        let piece = match tokio::time::timeout(MAX_SILENCE, body.frame()).await {
            Err(_) => return Err(too_slow()),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(broken(&error)),
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(piece) => piece,
                Err(_trailers) => continue,
            },
        };
        let bytes = (whole.len() + rest.len() + piece.len()) as u64;
        if bytes > max_bytes {
            return Err(too_large(max_bytes));
        }
        app.admission.grow(&mut lease, bytes)?;
        // nearly every body is one piece: it is then not copied
        if whole.is_empty() && rest.is_empty() {
            whole = piece;
        } else {
            if rest.is_empty() {
                rest.reserve((announced as usize).max(whole.len() + piece.len()));
                rest.extend_from_slice(&std::mem::take(&mut whole));
            }
            rest.extend_from_slice(&piece);
        }
    }
    Ok((if rest.is_empty() { whole } else { rest.freeze() }, lease))
}

async fn drain(mut body: Body, max_bytes: u64) {
    let reading = async {
        let mut left = max_bytes.saturating_mul(DRAINED_BODIES);
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
            match left.checked_sub(bytes) {
                Some(remaining) => left = remaining,
                None => break,
            }
        }
    };
    let _ = tokio::time::timeout(MAX_DRAIN, reading).await;
}

fn too_large(max_bytes: u64) -> GatewayError {
    let message = format!("the request body is larger than {max_bytes} bytes, the limit here");
    GatewayError::new(ErrorKind::TooLarge, message)
}

fn too_slow() -> GatewayError {
    let limit = MAX_SILENCE.as_secs();
    let message = format!("the request body paused for more than {limit} s");
    GatewayError::new(ErrorKind::RequestTimeout, message)
}

/// A client whose body is wrong or ends early may still listen; one whose connection broke does not.
fn broken(error: &axum::Error) -> GatewayError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(found) = cause {
        let kind = found.downcast_ref::<io::Error>().map(io::Error::kind);
        let message = match kind {
            Some(io::ErrorKind::UnexpectedEof) => "the request body ended before its length",
            Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => {
                "the request body is not well-formed chunks"
            }
            _ => {
                cause = found.source();
                continue;
            }
        };
        return GatewayError::new(ErrorKind::InvalidRequest, message).because(error.to_string());
    }
    GatewayError::new(ErrorKind::Cancelled, "the client left while sending its request")
        .because(error.to_string())
}
