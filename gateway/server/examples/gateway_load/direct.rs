//! A scripted worker asked over gRPC, in either protocol, as a gateway would ask it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use crate::{Outcome, Places, Protocol, Taken};

#[allow(missing_docs, clippy::all)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/client/m3stack.worker.v1.rs"));
}

use proto::worker_service_client::WorkerServiceClient;

/// What is asked, and which token's arrival is told.
#[derive(Clone, Copy)]
pub struct Question {
    pub prompt_tokens: usize,
    pub max_tokens: u32,
    pub nth_token: usize,
}

impl Question {
    /// Ids of two bytes each, as most of a prompt's are.
    fn token_ids(self) -> Vec<u32> {
        (0..self.prompt_tokens).map(|place| 300 + (place % 1000) as u32).collect()
    }
}

pub async fn ask(
    worker: SocketAddr,
    protocol: Protocol,
    question: Question,
    places: Places,
) -> Outcome<Vec<Taken>> {
    let endpoint = Endpoint::from_shared(format!("http://{worker}"))?;
    let channel = endpoint.tcp_nodelay(true).connect().await?;
    let mut all = Vec::new();
    for place in places {
        let channel = channel.clone();
        all.push(match protocol {
            Protocol::Ours => ours(channel, question, place).await?,
            Protocol::Vllm => peers(channel, question, place).await?,
        });
    }
    Ok(all)
}

/// Notes when the wanted token came.
struct Watch {
    begin: Instant,
    wanted: usize,
    seen: usize,
    first: Option<Duration>,
}

impl Watch {
    fn new(question: Question) -> Self {
        Self { begin: Instant::now(), wanted: question.nth_token, seen: 0, first: None }
    }

    fn see(&mut self, tokens: usize) {
        self.seen += tokens;
        if self.first.is_none() && self.seen >= self.wanted {
            self.first = Some(self.begin.elapsed());
        }
    }

    fn taken(&self) -> Outcome<Taken> {
        let first = self.first.ok_or_else(|| {
            format!("the worker said {} tokens; token {} was wanted", self.seen, self.wanted)
        })?;
        Ok(Taken { first, whole: self.begin.elapsed() })
    }
}

async fn ours(channel: Channel, question: Question, place: usize) -> Outcome<Taken> {
    let header = proto::GenerateHeader {
        request_id: format!("direct-{place}"),
        prompt_token_ids: question.token_ids(),
        sampling: Some(proto::Sampling {
            max_tokens: Some(question.max_tokens),
            ..Default::default()
        }),
        ..Default::default()
    };
    let body = Some(proto::generate_request::Body::Header(header));
    let requests = futures::stream::iter([proto::GenerateRequest { body }]);
    let mut watch = Watch::new(question);
    let mut replies = WorkerServiceClient::new(channel).generate(requests).await?.into_inner();
    while let Some(reply) = replies.message().await? {
        if let Some(proto::generate_response::Body::Tokens(tokens)) = reply.body {
            watch.see(tokens.token_ids.len());
        }
    }
    watch.taken()
}

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
    #[prost(string, tag = "1")]
    request_id: String,
    #[prost(message, optional, tag = "2")]
    tokenized: Option<Tokenized>,
    #[prost(message, optional, tag = "4")]
    sampling: Option<Sampling>,
    #[prost(bool, tag = "5")]
    is_streamed: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tokens {
    #[prost(uint32, repeated, tag = "1")]
    token_ids: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Reply {
    #[prost(message, optional, tag = "1")]
    chunk: Option<Tokens>,
}

/// Source of the field numbers: `vllm_engine.proto` of the PyPI package smg-grpc-proto 0.4.28.
async fn peers(channel: Channel, question: Question, place: usize) -> Outcome<Taken> {
    let request = Generate {
        request_id: format!("direct-{place}"),
        tokenized: Some(Tokenized { input_ids: question.token_ids() }),
        sampling: Some(Sampling { max_tokens: Some(question.max_tokens) }),
        is_streamed: true,
    };
    let mut watch = Watch::new(question);
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await?;
    let path = PathAndQuery::from_static("/vllm.grpc.engine.VllmEngine/Generate");
    let codec = ProstCodec::<Generate, Reply>::default();
    let mut replies =
        client.server_streaming(tonic::Request::new(request), path, codec).await?.into_inner();
    while let Some(reply) = replies.message().await? {
        watch.see(reply.chunk.map_or(0, |chunk| chunk.token_ids.len()));
    }
    watch.taken()
}
