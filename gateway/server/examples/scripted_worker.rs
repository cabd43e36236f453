//! A worker without a model, for measuring the gateway alone: answers every request with a fixed
//! text, at once or at a given pace.
//!
//! `scripted_worker --model-path DIR --listen HOST:PORT [--tokens N] [--interval-ms N]`

use std::pin::Pin;
use std::time::Duration;

use clap::Parser;
use futures::stream::{self, Stream, StreamExt};
use gateway_core::checkpoint::{Model, OpenOptions, open};
use gateway_core::tokenizer::EngineChoice;
use tonic::{Request, Response, Status, Streaming};

#[allow(missing_docs, clippy::all)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/server/m3stack.worker.v1.rs"));
}

use proto::generate_response::Body;
use proto::worker_service_server::{WorkerService, WorkerServiceServer};

#[derive(Parser)]
struct Arguments {
    /// Checkpoint whose facts and tokenizer are used.
    #[arg(long)]
    model_path: std::path::PathBuf,
    /// Address to serve on.
    #[arg(long, default_value = "127.0.0.1:50051")]
    listen: std::net::SocketAddr,
    /// Tokens of every answer.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// Pause before each token; with 0 all come in one message.
    #[arg(long, default_value_t = 0)]
    interval_ms: u64,
}

struct Scripted {
    identity: proto::Identity,
    token_ids: Vec<u32>,
    interval: Duration,
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
            Ok(proto::WatchResponse { identity, state, load, cache: None })
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
        let mut requests = request.into_inner();
        let Some(proto::generate_request::Body::Header(header)) =
            requests.message().await?.and_then(|request| request.body)
        else {
            return Err(Status::invalid_argument("the first message must be the header"));
        };
        let max_tokens = header.sampling.and_then(|sampling| sampling.max_tokens).unwrap_or(1);
        let count = self.token_ids.len().min(max_tokens as usize);
        let started = Body::Started(proto::Started { queue_ms: 0, cached_tokens: 0 });
        let usage = proto::Usage {
            prompt_tokens: header.prompt_token_ids.len() as u32,
            completion_tokens: count as u32,
            ..proto::Usage::default()
        };
        let finished = Body::Finished(proto::Finished {
            reason: proto::FinishReason::Length.into(),
            stop_token_id: None,
            usage: Some(usage),
        });
        let tokens = |ids: &[u32]| {
            Body::Tokens(proto::Tokens { token_ids: ids.to_vec(), logprobs: Vec::new() })
        };
        let reply = |body| Ok(proto::GenerateResponse { body: Some(body) });
        if self.interval.is_zero() {
            let bodies = [started, tokens(&self.token_ids[..count]), finished];
            return Ok(Response::new(stream::iter(bodies.map(reply)).boxed()));
        }
        let interval = self.interval;
        let paced: Vec<Body> = self.token_ids[..count].chunks(1).map(tokens).collect();
        let paced = stream::iter(paced).then(move |body| async move {
            tokio::time::sleep(interval).await;
            body
        });
        let all = stream::iter([started]).chain(paced).chain(stream::iter([finished]));
        Ok(Response::new(all.map(reply).boxed()))
    }
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
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let options =
        OpenOptions { engine: EngineChoice::Reference, clock: gateway_server::app::unix_now };
    let model = open(&arguments.model_path, options)?;
    let text = "the quick brown fox jumps over the lazy dog and ".repeat(arguments.tokens);
    let mut token_ids = model.prompt_builder.encode_text(&text, false)?;
    token_ids.truncate(arguments.tokens);
    let service = Scripted {
        identity: identity(&model),
        token_ids,
        interval: Duration::from_millis(arguments.interval_ms),
    };
    let server = tonic::transport::Server::builder().tcp_nodelay(true);
    let service = WorkerServiceServer::new(service).max_decoding_message_size(64 << 20);
    let mut server = server;
    server.add_service(service).serve(arguments.listen).await?;
    Ok(())
}
