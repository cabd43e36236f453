//! The script over `vllm.grpc.engine`, the worker protocol of the gateway that ours is measured
//! beside: the calls and the fields that it uses, everything else unimplemented.
//!
//! Source of the field numbers: `vllm_engine.proto` of the PyPI package smg-grpc-proto 0.4.28.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::stream::{self, Stream, StreamExt};
use gateway_core::checkpoint::Model;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::{Arguments, Script};

/// A minute of 720p in one message of its patches is some 210 MB.
const MAX_MESSAGE_BYTES: usize = 1 << 30;

#[derive(Clone, PartialEq, prost::Message)]
struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
struct Sampling {
    #[prost(uint32, optional, tag = "8")]
    max_tokens: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tokenized {
    #[prost(uint32, repeated, tag = "2")]
    input_ids: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Generate {
    #[prost(message, optional, tag = "2")]
    tokenized: Option<Tokenized>,
    #[prost(message, optional, tag = "4")]
    sampling: Option<Sampling>,
    #[prost(bool, tag = "5")]
    is_streamed: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Chunk {
    #[prost(uint32, repeated, tag = "1")]
    token_ids: Vec<u32>,
    #[prost(uint32, tag = "2")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "3")]
    completion_tokens: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Complete {
    #[prost(uint32, repeated, tag = "1")]
    output_ids: Vec<u32>,
    #[prost(string, tag = "2")]
    finish_reason: String,
    #[prost(uint32, tag = "3")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "4")]
    completion_tokens: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Reply {
    #[prost(message, optional, tag = "1")]
    chunk: Option<Chunk>,
    #[prost(message, optional, tag = "2")]
    complete: Option<Complete>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Health {
    #[prost(bool, tag = "1")]
    is_healthy: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ModelInfo {
    #[prost(string, tag = "1")]
    model_path: String,
    #[prost(bool, tag = "2")]
    is_generation: bool,
    #[prost(uint32, tag = "3")]
    max_context_length: u32,
    #[prost(uint32, tag = "4")]
    vocab_size: u32,
    #[prost(bool, tag = "5")]
    supports_vision: bool,
    #[prost(string, tag = "6")]
    served_model_name: String,
    #[prost(string, tag = "7")]
    tokenizer_path: String,
    #[prost(string, tag = "8")]
    model_type: String,
    #[prost(string, repeated, tag = "9")]
    architectures: Vec<String>,
    #[prost(int32, repeated, tag = "10")]
    eos_token_ids: Vec<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ServerInfo {
    #[prost(string, tag = "5")]
    server_type: String,
    #[prost(int32, tag = "9")]
    data_parallel_size: i32,
}

/// The service of one script.
#[derive(Clone)]
pub struct Peer {
    info: Arc<ModelInfo>,
    script: Arc<Script>,
}

pub fn service(arguments: &Arguments, model: &Model, script: Script) -> Peer {
    let facts = model.spec.facts();
    let path = arguments.model_path.to_string_lossy().into_owned();
    let info = ModelInfo {
        model_path: path.clone(),
        is_generation: true,
        max_context_length: facts.max_position_embeddings,
        vocab_size: facts.vocab_size,
        supports_vision: true,
        served_model_name: arguments.name.clone(),
        tokenizer_path: path,
        model_type: facts.model_type.clone(),
        architectures: vec!["MiniMaxM3SparseForConditionalGeneration".into()],
        eos_token_ids: vec![facts.eos_token_id.cast_signed()],
    };
    Peer { info: Arc::new(info), script: Arc::new(script) }
}

type Replies = Pin<Box<dyn Stream<Item = Result<Reply, Status>> + Send>>;

/// The answer to one request.
fn answer(script: &Script, request: Generate) -> Replies {
    let begin = Instant::now();
    let (token_ids, is_cut) = script.within(request.sampling.and_then(|some| some.max_tokens));
    let prompt_tokens = request.tokenized.map_or(0, |some| some.input_ids.len() as u32);
    let complete = Reply {
        chunk: None,
        complete: Some(Complete {
            output_ids: token_ids.clone(),
            finish_reason: if is_cut { "length" } else { "stop" }.into(),
            prompt_tokens,
            completion_tokens: token_ids.len() as u32,
        }),
    };
    if !request.is_streamed && script.interval.is_zero() {
        return stream::iter([Ok(complete)]).boxed();
    }
    let pieces: Vec<Vec<u32>> = match script.interval.is_zero() {
        true => vec![token_ids],
        false => token_ids.into_iter().map(|id| vec![id]).collect(),
    };
    let script = script.clone();
    let paced = stream::iter(pieces.into_iter().enumerate()).then(move |(place, token_ids)| {
        let script = script.clone();
        async move {
            script.wait_for_token(begin, place).await;
            let completion_tokens = place as u32 + 1;
            let chunk = Chunk { token_ids, prompt_tokens, completion_tokens };
            Reply { chunk: Some(chunk), complete: None }
        }
    });
    let is_streamed = request.is_streamed;
    let paced = paced.filter(move |_| std::future::ready(is_streamed));
    paced.chain(stream::iter([complete])).map(Ok).boxed()
}

impl NamedService for Peer {
    const NAME: &'static str = "vllm.grpc.engine.VllmEngine";
}

impl Service<http::Request<Body>> for Peer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let peer = self.clone();
        Box::pin(async move {
            let path = request.uri().path().to_owned();
            let method = path.rsplit('/').next().unwrap_or_default();
            Ok(match method {
                "Generate" => {
                    let mut grpc = Grpc::new(ProstCodec::<Reply, Generate>::default())
                        .apply_max_message_size_config(Some(MAX_MESSAGE_BYTES), None);
                    let serve = tower::service_fn(move |request: Request<Generate>| {
                        let replies = answer(&peer.script, request.into_inner());
                        std::future::ready(Ok::<_, Status>(Response::new(replies)))
                    });
                    grpc.server_streaming(serve, request).await
                }
                "HealthCheck" => unary(Health { is_healthy: true }, request).await,
                "GetModelInfo" => unary(ModelInfo::clone(&peer.info), request).await,
                "GetServerInfo" => {
                    let server_type = "vllm-grpc".into();
                    unary(ServerInfo { server_type, data_parallel_size: 1 }, request).await
                }
                "Abort" => unary(Empty {}, request).await,
                _ => Status::unimplemented(path).into_http(),
            })
        })
    }
}

/// One answer to a request of which nothing is read.
async fn unary<T: prost::Message + Default + Clone + 'static>(
    reply: T,
    request: http::Request<Body>,
) -> http::Response<Body> {
    let serve = tower::service_fn(move |_: Request<Empty>| {
        std::future::ready(Ok::<_, Status>(Response::new(reply.clone())))
    });
    Grpc::new(ProstCodec::<T, Empty>::default()).unary(serve, request).await
}
