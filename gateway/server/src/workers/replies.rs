//! A worker's replies to one call. Every token passes through here, so messages are read where they
//! arrived: no copy, no layers of bodies, no decoder behind a pointer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::HttpBody;
use axum::http::{Response, StatusCode};
use bytes::{Buf, Bytes, BytesMut};
use prost::Message as _;
use tonic::body::Body;
use tonic::{Code, Status};

use super::wire::proto;

/// Largest message taken from a worker: many tokens with many alternatives.
const MAX_REPLY_BYTES: usize = 16 << 20;
/// A flag for compression, which is never asked for, and a length.
const PREFIX_BYTES: usize = 5;

/// Messages of a response, in order.
pub(super) struct Replies {
    body: Body,
    unread: Unread,
    is_over: bool,
}

impl Replies {
    /// The messages of a response whose head has come.
    ///
    /// # Errors
    /// What the head says has failed.
    pub(super) fn of(response: Response<Body>) -> Result<Self, Status> {
        // a call that fails at once has its end in its head
        if let Some(status) = Status::from_header_map(response.headers())
            && status.code() != Code::Ok
        {
            return Err(status);
        }
        if response.status() != StatusCode::OK {
            let status = response.status();
            return Err(Status::new(meaning(status), format!("HTTP status {status}")));
        }
        Ok(Self { body: response.into_body(), unread: Unread::default(), is_over: false })
    }

    /// The next message; `None` after the last.
    pub(super) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<proto::GenerateResponse, Status>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let next = ready!(self.poll_message(context));
        self.is_over = !matches!(next, Ok(Some(_)));
        Poll::Ready(next.transpose())
    }

    fn poll_message(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<proto::GenerateResponse>, Status>> {
        loop {
            if let Some(message) = self.unread.next()? {
                let decoded = proto::GenerateResponse::decode(message);
                return Poll::Ready(decoded.map(Some).map_err(|error| {
                    Status::internal(format!("a reply that cannot be read: {error}"))
                }));
            }
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(context)) else {
                return Poll::Ready(self.unread.check_end());
            };
            match frame?.into_data() {
                Ok(data) => self.unread.add(data),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    return Poll::Ready(match Status::from_header_map(&trailers) {
                        Some(status) if status.code() != Code::Ok => Err(status),
                        _ => self.unread.check_end(),
                    });
                }
            }
        }
    }
}

/// Source: the gRPC project's "HTTP to gRPC Status Code Mapping".
fn meaning(status: StatusCode) -> Code {
    match status.as_u16() {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

/// Bytes that have come. Nearly always a piece is one message or several, and is not copied.
#[derive(Default)]
struct Unread {
    whole: Bytes,
    /// The beginning of a message that came in pieces; empty while `whole` is not.
    pieces: BytesMut,
}

impl Unread {
    fn add(&mut self, data: Bytes) {
        if self.pieces.is_empty() && self.whole.is_empty() {
            self.whole = data;
            return;
        }
        self.pieces.extend_from_slice(&std::mem::take(&mut self.whole));
        self.pieces.extend_from_slice(&data);
        if matches!(length(&self.pieces), Ok(Some(length)) if self.pieces.len() >= length) {
            self.whole = self.pieces.split().freeze();
        }
    }

    /// The next message that is there as a whole, without its prefix.
    fn next(&mut self) -> Result<Option<Bytes>, Status> {
        // of one in pieces, too, a length beyond the limit is told at once
        let start = if self.whole.is_empty() { &self.pieces[..] } else { &self.whole[..] };
        match length(start)? {
            Some(length) if self.whole.len() >= length => {
                let mut message = self.whole.split_to(length);
                message.advance(PREFIX_BYTES);
                Ok(Some(message))
            }
            _ => Ok(None),
        }
    }

    fn check_end<T>(&self) -> Result<Option<T>, Status> {
        if self.whole.is_empty() && self.pieces.is_empty() {
            return Ok(None);
        }
        Err(Status::unavailable("the call ended within a message"))
    }
}

/// Bytes of the first message and its prefix, once they can be known.
fn length(bytes: &[u8]) -> Result<Option<usize>, Status> {
    let Some((flag, rest)) = bytes.split_first() else { return Ok(None) };
    if *flag != 0 {
        return Err(Status::internal(format!("a reply with the compression flag {flag}")));
    }
    let Some((length, _)) = rest.split_first_chunk() else { return Ok(None) };
    let length = u32::from_be_bytes(*length) as usize;
    if length > MAX_REPLY_BYTES {
        let message = format!("a reply of {length} bytes, the limit is {MAX_REPLY_BYTES}");
        return Err(Status::out_of_range(message));
    }
    Ok(Some(PREFIX_BYTES + length))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use axum::http::HeaderMap;
    use futures::future::poll_fn;
    use hyper::body::Frame;
    use proto::generate_response::Body as Reply;

    use super::*;

    /// A body that gives these frames.
    struct Frames(VecDeque<Frame<Bytes>>);

    impl HttpBody for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    fn tokens(token_ids: Vec<u32>) -> proto::GenerateResponse {
        let tokens = proto::Tokens { token_ids, logprobs: Vec::new() };
        proto::GenerateResponse { body: Some(Reply::Tokens(tokens)) }
    }

    fn written(messages: &[proto::GenerateResponse]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.push(0);
            bytes.extend((message.encoded_len() as u32).to_be_bytes());
            message.encode(&mut bytes).unwrap();
        }
        bytes
    }

    fn trailers(code: &'static str) -> Frame<Bytes> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", code.parse().unwrap());
        Frame::trailers(trailers)
    }

    fn replies(frames: impl IntoIterator<Item = Frame<Bytes>>) -> Replies {
        let body = Body::new(Frames(frames.into_iter().collect()));
        Replies::of(Response::new(body)).unwrap()
    }

    async fn all(mut replies: Replies) -> (Vec<proto::GenerateResponse>, Option<Status>) {
        let mut found = Vec::new();
        loop {
            match poll_fn(|context| replies.poll_next(context)).await {
                Some(Ok(message)) => found.push(message),
                end => {
                    assert!(poll_fn(|context| replies.poll_next(context)).await.is_none());
                    return (found, end.and_then(Result::err));
                }
            }
        }
    }

    #[tokio::test]
    async fn messages_are_the_same_however_they_are_cut() {
        let sent = [tokens(vec![1]), tokens((0..3000).collect()), tokens(vec![]), tokens(vec![7])];
        let bytes = written(&sent);
        for size in [1, 2, 4, 5, 6, 9, 100, bytes.len() - 1, bytes.len()] {
            let pieces = bytes.chunks(size).map(Bytes::copy_from_slice).map(Frame::data);
            let (found, end) = all(replies(pieces.chain([trailers("0")]))).await;
            assert_eq!(found, sent, "pieces of {size}");
            assert!(end.is_none());
        }
    }

    #[tokio::test]
    async fn a_call_ends_as_its_last_word_says() {
        let data = || Frame::data(Bytes::from(written(&[tokens(vec![5])])));
        let (found, end) = all(replies([data(), trailers("8")])).await;
        assert_eq!((found.len(), end.unwrap().code()), (1, Code::ResourceExhausted));

        let cut = Frame::data(Bytes::from_static(&[0, 0, 0]));
        let (found, end) = all(replies([data(), cut])).await;
        assert_eq!((found.len(), end.unwrap().code()), (1, Code::Unavailable));

        // no word at all is an end as well: whoever asks misses the finish
        let (found, end) = all(replies([data()])).await;
        assert_eq!((found.len(), end.is_none()), (1, true));
    }

    #[tokio::test]
    async fn what_is_no_message_of_ours_is_an_error() {
        for (bytes, code) in [
            (&[1, 0, 0, 0, 0][..], Code::Internal),
            (&[0, 1, 0, 0, 1][..], Code::OutOfRange),
            (&[0, 0, 0, 0, 1, 0xff][..], Code::Internal),
        ] {
            let frame = Frame::data(Bytes::copy_from_slice(bytes));
            assert_eq!(all(replies([frame])).await.1.unwrap().code(), code, "{bytes:?}");
        }
    }

    #[test]
    fn a_head_may_be_the_end() {
        let mut refused = Response::new(Body::empty());
        refused.headers_mut().insert("grpc-status", "3".parse().unwrap());
        assert_eq!(Replies::of(refused).err().unwrap().code(), Code::InvalidArgument);
        let mut busy = Response::new(Body::empty());
        *busy.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        assert_eq!(Replies::of(busy).err().unwrap().code(), Code::Unavailable);
    }
}
