//! What a fake worker can be told to say, and saying it.

use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, mpsc};
use tonic::metadata::{BinaryMetadataValue, MetadataMap};
use tonic::{Code, Status};

use super::fake_worker::{Holds, proto};

pub type Sender = mpsc::Sender<Result<proto::GenerateResponse, Status>>;

/// One thing a worker does with a request.
#[derive(Clone)]
pub enum Act {
    /// Leave the queue.
    Start,
    /// Say these tokens in one message.
    Tokens(Vec<u32>),
    /// Say these tokens with a log-probability each.
    Logprobs(Vec<(u32, f32)>),
    /// End by a stop id.
    Stop,
    /// End by length.
    Length,
    /// Fail with an explained error.
    Fail(proto::ErrorKind, &'static str),
    /// Fail because a field of the request cannot be kept to.
    Refuse(&'static str, &'static str),
    /// Fail with a bare status.
    Break(Code),
    /// Wait until the test says so.
    Wait(Arc<Notify>),
    /// From now on, hold all media.
    Keep,
    /// Say nothing for ever.
    Hang,
}

pub async fn play(
    holds: &Mutex<Holds>,
    header: &proto::GenerateHeader,
    acts: Vec<Act>,
    sender: &Sender,
) -> Result<(), Status> {
    use proto::generate_response::Body;
    let mut said = 0;
    for act in acts {
        match act {
            Act::Start => {
                let started =
                    proto::Started { queue_ms: 1, cached_tokens: 3, ..Default::default() };
                say(sender, Body::Started(started)).await?;
            }
            Act::Tokens(token_ids) => {
                said += token_ids.len() as u32;
                let tokens = proto::Tokens { token_ids, logprobs: Vec::new() };
                say(sender, Body::Tokens(tokens)).await?;
            }
            Act::Logprobs(tokens) => {
                said += tokens.len() as u32;
                let entry = |(id, logprob): &(u32, f32)| proto::TokenLogprob {
                    logprob: *logprob,
                    top: vec![proto::Alternative { token_id: *id, logprob: *logprob }],
                };
                let tokens = proto::Tokens {
                    logprobs: tokens.iter().map(entry).collect(),
                    token_ids: tokens.into_iter().map(|(id, _)| id).collect(),
                };
                say(sender, Body::Tokens(tokens)).await?;
            }
            Act::Stop => finish(header, said, proto::FinishReason::Stop, sender).await?,
            Act::Length => finish(header, said, proto::FinishReason::Length, sender).await?,
            Act::Fail(kind, message) => {
                return Err(explained(kind, message, "sampling.top_p"));
            }
            Act::Refuse(param, message) => {
                return Err(explained(proto::ErrorKind::InvalidRequest, message, param));
            }
            Act::Break(code) => return Err(Status::new(code, "bare")),
            Act::Wait(notify) => notify.notified().await,
            Act::Keep => *holds.lock().unwrap() = Holds::Everything,
            Act::Hang => std::future::pending().await,
        }
    }
    Ok(())
}

async fn finish(
    header: &proto::GenerateHeader,
    said: u32,
    reason: proto::FinishReason,
    sender: &Sender,
) -> Result<(), Status> {
    let usage = proto::Usage {
        prompt_tokens: header.prompt_token_ids.len() as u32,
        cached_tokens: 3,
        completion_tokens: said,
        ..proto::Usage::default()
    };
    let finished =
        proto::Finished { reason: reason.into(), stop_token_id: None, usage: Some(usage) };
    say(sender, proto::generate_response::Body::Finished(finished)).await
}

pub async fn say(sender: &Sender, body: proto::generate_response::Body) -> Result<(), Status> {
    let response = proto::GenerateResponse { body: Some(body) };
    sender.send(Ok(response)).await.map_err(|_| Status::cancelled("the gateway has left"))
}

fn explained(kind: proto::ErrorKind, message: &str, param: &str) -> Status {
    use prost::Message;
    use proto::ErrorKind as Kind;
    let code = match kind {
        Kind::InvalidRequest | Kind::ContextTooLong | Kind::MediaRejected => Code::InvalidArgument,
        Kind::Overloaded => Code::ResourceExhausted,
        Kind::WorkerUnavailable => Code::Unavailable,
        Kind::DeadlineExceeded => Code::DeadlineExceeded,
        Kind::Cancelled => Code::Cancelled,
        Kind::Internal | Kind::Unspecified => Code::Internal,
    };
    let detail =
        proto::ErrorDetail { kind: kind.into(), message: message.into(), param: param.into() };
    let mut trailers = MetadataMap::new();
    let value = BinaryMetadataValue::from_bytes(&detail.encode_to_vec());
    trailers.insert_bin("m3stack-error-bin", value);
    Status::with_metadata(code, message, trailers)
}
