//! Measures a gateway before a scripted worker: what it adds to a request, and how many it serves.
//!
//! `gateway_load --gateway HOST:PORT --worker HOST:PORT --model NAME [--seconds N]
//! [--concurrency N,N,...]` prints one JSON object. Latencies are in microseconds. The direct
//! figure is the same worker asked over gRPC with a prompt of the same length: the difference of
//! the medians is what the gateway adds.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[allow(missing_docs, clippy::all)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/client/m3stack.worker.v1.rs"));
}

use proto::worker_service_client::WorkerServiceClient;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Clone, Parser)]
struct Arguments {
    /// The gateway's address.
    #[arg(long)]
    gateway: SocketAddr,
    /// The worker's address.
    #[arg(long)]
    worker: SocketAddr,
    /// Name under which the gateway serves the model.
    #[arg(long)]
    model: String,
    /// Length of each run.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Requests in flight, run by run.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    concurrency: Vec<usize>,
}

/// One kept connection to the gateway.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    async fn open(address: SocketAddr) -> Outcome<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(16 * 1024) })
    }

    /// Sends a request and gives the body of its answer, which must be a 200 of known length.
    async fn ask(&mut self, request: &[u8]) -> Outcome<Value> {
        self.stream.write_all(request).await?;
        self.buffer.clear();
        let head = loop {
            if let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err("the gateway closed the connection".into());
            }
        };
        let text = std::str::from_utf8(&self.buffer[..head])?.to_ascii_lowercase();
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .ok_or("an answer without a length")?
            .parse::<usize>()?;
        while self.buffer.len() < head + length {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err("the gateway closed the connection".into());
            }
        }
        if !text.starts_with("http/1.1 200") {
            return Err(String::from_utf8_lossy(&self.buffer).into_owned().into());
        }
        Ok(serde_json::from_slice(&self.buffer[head..])?)
    }
}

fn chat_request(arguments: &Arguments) -> Vec<u8> {
    let body = json!({
        "model": arguments.model,
        "messages": [{"role": "user", "content": "Say something about the weather today, please."}],
        "max_tokens": 16,
        "temperature": 0,
    })
    .to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        arguments.gateway,
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

/// Latencies of requests through the gateway.
async fn through_gateway(arguments: &Arguments, concurrency: usize) -> Outcome<Vec<Duration>> {
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (request, address) = (chat_request(arguments), arguments.gateway);
        tasks.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut taken = Vec::new();
            while Instant::now() < end {
                let begin = Instant::now();
                connection.ask(&request).await?;
                taken.push(begin.elapsed());
            }
            Outcome::Ok(taken)
        });
    }
    let mut all = Vec::new();
    while let Some(taken) = tasks.join_next().await {
        all.extend(taken??);
    }
    Ok(all)
}

/// Latencies of the same worker asked directly, one request after the other.
async fn direct(arguments: &Arguments, prompt_tokens: usize) -> Outcome<Vec<Duration>> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", arguments.worker))?;
    let channel = endpoint.tcp_nodelay(true).connect().await?;
    let mut client = WorkerServiceClient::new(channel);
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    let mut taken = Vec::new();
    while Instant::now() < end {
        let header = proto::GenerateHeader {
            request_id: format!("direct-{}", taken.len()),
            prompt_token_ids: vec![7; prompt_tokens],
            sampling: Some(proto::Sampling { max_tokens: Some(16), ..Default::default() }),
            ..Default::default()
        };
        let body = Some(proto::generate_request::Body::Header(header));
        let requests = futures::stream::iter([proto::GenerateRequest { body }]);
        let begin = Instant::now();
        let mut replies = client.generate(requests).await?.into_inner();
        while replies.message().await?.is_some() {}
        taken.push(begin.elapsed());
    }
    Ok(taken)
}

/// Median, 99th percentile and rate.
fn summary(mut taken: Vec<Duration>, concurrency: usize, seconds: u64) -> Value {
    taken.sort_unstable();
    let at = |share: f64| {
        let place = (taken.len() as f64 * share) as usize;
        taken.get(place.min(taken.len().saturating_sub(1))).map(|one| one.as_secs_f64() * 1e6)
    };
    json!({
        "concurrency": concurrency,
        "requests": taken.len(),
        "per_second": taken.len() as f64 / seconds as f64,
        "p50_us": at(0.5),
        "p99_us": at(0.99),
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let arguments = Arguments::parse();
    let mut connection = Connection::open(arguments.gateway).await?;
    let answer = connection.ask(&chat_request(&arguments)).await?;
    let prompt_tokens = answer["usage"]["prompt_tokens"].as_u64().ok_or("no usage")?;
    let direct = direct(&arguments, usize::try_from(prompt_tokens)?).await?;
    let mut runs = Vec::new();
    for concurrency in &arguments.concurrency {
        let taken = through_gateway(&arguments, *concurrency).await?;
        runs.push(summary(taken, *concurrency, arguments.seconds));
    }
    let report = json!({
        "prompt_tokens": prompt_tokens,
        "direct_grpc": summary(direct, 1, arguments.seconds),
        "through_gateway": runs,
    });
    use std::io::Write;
    writeln!(std::io::stdout(), "{report:#}")?;
    Ok(())
}
