//! Reads request bodies: bounded in bytes, in time, and by the budget all requests share.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::admission::ByteLease;
use crate::app::App;
use crate::error::{ErrorKind, GatewayError};

/// Longest silence of a client that is sending.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// How long, and how far beyond the limit, a body is read only to be thrown away: a client that
/// is still writing would not see the refusal.
const MAX_DRAIN: Duration = Duration::from_secs(10);
const DRAINED_BODIES: u64 = 4;

/// The whole body.
///
/// # Errors
/// `TooLarge`, `Overloaded`, `RequestTimeout`, or `Cancelled` if the client left.
pub(super) async fn read(
    app: &App,
    mut body: Body,
    max_bytes: u64,
) -> Result<(Bytes, ByteLease), GatewayError> {
    let announced = body.size_hint().exact().unwrap_or(0);
    if announced > max_bytes {
        drain(&mut body, max_bytes).await;
        return Err(too_large(max_bytes));
    }
    let mut lease = ByteLease::default();
    if let Err(error) = app.admission.grow(&mut lease, announced) {
        drain(&mut body, max_bytes).await;
        return Err(error);
    }
    let mut whole = Bytes::new();
    let mut rest = BytesMut::new();
    loop {
        let piece = match tokio::time::timeout(MAX_SILENCE, body.frame()).await {
            Err(_) => return Err(too_slow()),
            Ok(None) => break,
            Ok(Some(Err(error))) => return Err(gone(&error)),
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(piece) => piece,
                Err(_trailers) => continue,
            },
        };
        let bytes = (whole.len() + rest.len() + piece.len()) as u64;
        if bytes > max_bytes {
            drain(&mut body, max_bytes).await;
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

async fn drain(body: &mut Body, max_bytes: u64) {
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

fn gone(error: &axum::Error) -> GatewayError {
    GatewayError::new(ErrorKind::Cancelled, "the client left while sending its request")
        .because(error.to_string())
}
