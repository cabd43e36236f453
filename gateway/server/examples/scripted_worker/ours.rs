//! The script over `m3stack.worker.v1`.

use std::pin::Pin;
use std::time::Duration;

use futures::stream::{self, Stream, StreamExt};
use gateway_core::checkpoint::Model;
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming};

use crate::Script;

#[allow(missing_docs, clippy::all)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/server/m3stack.worker.v1.rs"));
}

use proto::generate_response::Body;
use proto::worker_service_server::{WorkerService, WorkerServiceServer};

pub struct Scripted {
    identity: proto::Identity,
    script: Script,
}

pub fn service(model: &Model, script: Script) -> WorkerServiceServer<Scripted> {
    let scripted = Scripted { identity: identity(model), script };
    WorkerServiceServer::new(scripted).max_decoding_message_size(64 << 20)
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerService for Scripted {
    type GenerateStream = Replies<proto::GenerateResponse>;
    type WatchStream = Replies<proto::WatchResponse>;

    async fn watch(
        &self,
        _request: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let message = |identity| {
            let state = proto::WorkerState::Ready.into();
            let load = Some(proto::Load::default());
            Ok(proto::WatchResponse { identity, state, load, ..Default::default() })
        };
        let first = stream::iter([message(Some(self.identity.clone()))]);
        let pulse = stream::unfold((), move |()| async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            Some((message(None), ()))
        });
        Ok(Response::new(first.chain(pulse).boxed()))
    }

    async fn generate(
        &self,
        request: Request<Streaming<proto::GenerateRequest>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let begin = Instant::now();
        let mut requests = request.into_inner();
        let Some(proto::generate_request::Body::Header(header)) =
            requests.message().await?.and_then(|request| request.body)
        else {
            return Err(Status::invalid_argument("the first message must be the header"));
        };
        let asking = take_media(&header, requests);
        let max_tokens = header.sampling.and_then(|sampling| sampling.max_tokens);
        let (token_ids, is_cut) = self.script.within(max_tokens);
        let usage = proto::Usage {
            prompt_tokens: header.prompt_token_ids.len() as u32,
            completion_tokens: token_ids.len() as u32,
            ..proto::Usage::default()
        };
        let reason = if is_cut { proto::FinishReason::Length } else { proto::FinishReason::Stop };
        let finished = Body::Finished(proto::Finished {
            reason: reason.into(),
            usage: Some(usage),
            ..Default::default()
        });
        let started = Body::Started(proto::Started::default());
        let tokens = |token_ids| Body::Tokens(proto::Tokens { token_ids, logprobs: Vec::new() });
        let reply = |body| Ok(proto::GenerateResponse { body: Some(body) });
        if self.script.interval.is_zero() {
            let bodies = [started, tokens(token_ids), finished];
            return Ok(Response::new(asking.chain(stream::iter(bodies.map(reply))).boxed()));
        }
        let script = self.script.clone();
        let paced = stream::iter(token_ids.into_iter().enumerate()).then(move |(place, id)| {
            let script = script.clone();
            async move {
                script.wait_for_token(begin, place).await;
                tokens(vec![id])
            }
        });
        let all = stream::iter([started]).chain(paced).chain(stream::iter([finished]));
        Ok(Response::new(asking.chain(all.map(reply)).boxed()))
    }
}

/// Asks for every item of a request and reads them to their end; nothing for one without media.
fn take_media(
    header: &proto::GenerateHeader,
    mut requests: Streaming<proto::GenerateRequest>,
) -> Replies<proto::GenerateResponse> {
    let count = u32::try_from(header.media.len()).unwrap_or(u32::MAX);
    if count == 0 {
        return stream::empty().boxed();
    }
    let needs = Body::Needs(proto::MediaNeeds { item_indices: (0..count).collect() });
    let asked = Ok(proto::GenerateResponse { body: Some(needs) });
    let mut left: u64 = header.media.iter().map(|item| item.patch_bytes).sum();
    let taking = async move {
        while left > 0 {
            match requests.message().await?.and_then(|request| request.body) {
                Some(proto::generate_request::Body::Chunk(chunk)) => {
                    left = left.saturating_sub(chunk.data.len() as u64);
                }
                _ => return Err(Status::invalid_argument("media broke off")),
            }
        }
        Ok(())
    };
    let taken = stream::once(taking).filter_map(|done| async { done.err().map(Err) });
    stream::iter([asked]).chain(taken).boxed()
}

fn identity(model: &Model) -> proto::Identity {
    let facts = model.spec.facts();
    proto::Identity {
        worker_id: format!("scripted-{}", std::process::id()),
        version: env!("CARGO_PKG_VERSION").into(),
        model_name: "scripted".into(),
        fingerprint: facts.fingerprint().to_vec().into(),
        max_context_tokens: facts.max_position_embeddings,
        page_tokens: 128,
        facts: Some(proto::ModelFacts {
            model_type: facts.model_type.clone(),
            vocab_size: facts.vocab_size,
            image_token_id: facts.image_token_id,
            video_token_id: facts.video_token_id,
            eos_token_id: facts.eos_token_id,
            patch_size: facts.patch_size,
            temporal_patch_size: facts.temporal_patch_size,
            merge_size: facts.merge_size,
            max_position_embeddings: facts.max_position_embeddings,
        }),
        ..Default::default()
    }
}
