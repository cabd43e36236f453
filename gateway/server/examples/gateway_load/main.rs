//! Loads a gateway, or a worker directly, and prints one JSON object; `m3stack bench gateway` puts
//! what it says together. Latencies are in microseconds.
//!
//! `gateway_load whole   --gateway A --body FILE... [--concurrency N] [--seconds S | --count N]`
//! `gateway_load streams --gateway A --body FILE... [--concurrency N] [--count N] [--visible TEXT]`
//! `gateway_load direct  --worker A --protocol ours|vllm [--prompt-tokens N] [--nth-token N] ...`

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Parser, ValueEnum};
use serde_json::{Value, json};

mod direct;
mod http;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
enum Command {
    /// Requests answered whole.
    Whole {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        amount: Amount,
    },
    /// Requests answered as streams.
    Streams {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        amount: Amount,
        /// Text that is waited for: the first of a delta's content, or this.
        #[arg(long, default_value = "\"content\":\"")]
        visible: String,
    },
    /// A worker asked without a gateway.
    Direct {
        /// The worker's address.
        #[arg(long)]
        worker: SocketAddr,
        /// What it speaks.
        #[arg(long, value_enum)]
        protocol: Protocol,
        /// Length of the prompt.
        #[arg(long, default_value_t = 100)]
        prompt_tokens: usize,
        /// The most tokens of an answer.
        #[arg(long, default_value_t = 16)]
        max_tokens: u32,
        /// Token whose arrival is told, from 1.
        #[arg(long, default_value_t = 1)]
        nth_token: usize,
        #[command(flatten)]
        amount: Amount,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Protocol {
    /// `m3stack.worker.v1`.
    Ours,
    /// `vllm.grpc.engine`.
    Vllm,
}

#[derive(Args)]
struct Target {
    /// The gateway's address.
    #[arg(long)]
    gateway: SocketAddr,
    /// Bodies of chat requests, sent in turn.
    #[arg(long, required = true, num_args = 1..)]
    body: Vec<PathBuf>,
}

impl Target {
    /// The requests as they are sent.
    fn requests(&self) -> Outcome<Arc<Vec<Vec<u8>>>> {
        let request = |path| Ok(http::chat_request(self.gateway, &std::fs::read(path)?));
        Ok(Arc::new(self.body.iter().map(request).collect::<Outcome<_>>()?))
    }
}

#[derive(Args)]
struct Amount {
    /// Requests in flight.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Length of the run, if no count is given.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Requests in all.
    #[arg(long)]
    count: Option<usize>,
}

/// When the first text came, and when all had.
#[derive(Clone, Copy)]
struct Taken {
    first: Duration,
    whole: Duration,
}

/// Runs one closed loop a client; each is given the places of its requests.
async fn run<F, G>(amount: &Amount, client: F) -> Outcome<Value>
where
    F: Fn(Places) -> G,
    G: Future<Output = Outcome<Vec<Taken>>> + Send + 'static,
{
    let next = Arc::new(AtomicUsize::new(0));
    let begin = Instant::now();
    let end = begin + Duration::from_secs_f64(amount.seconds);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..amount.concurrency {
        tasks.spawn(client(Places { next: Arc::clone(&next), count: amount.count, end }));
    }
    let mut all = Vec::new();
    while let Some(taken) = tasks.join_next().await {
        all.extend(taken??);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let quantiles = |times: Vec<Duration>| {
        let mut times = times;
        times.sort_unstable();
        let at = |share: f64| {
            let place = (times.len() as f64 * share) as usize;
            times.get(place.min(times.len().saturating_sub(1))).map(|one| one.as_secs_f64() * 1e6)
        };
        json!({"min": at(0.0), "p50": at(0.5), "p99": at(0.99)})
    };
    Ok(json!({
        "concurrency": amount.concurrency,
        "requests": all.len(),
        "per_second": all.len() as f64 / seconds,
        "first_us": quantiles(all.iter().map(|one| one.first).collect()),
        "whole_us": quantiles(all.iter().map(|one| one.whole).collect()),
    }))
}

/// Hands out the places of requests until there are enough.
struct Places {
    next: Arc<AtomicUsize>,
    count: Option<usize>,
    end: Instant,
}

impl Iterator for Places {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        let is_wanted = match self.count {
            Some(count) => place < count,
            None => Instant::now() < self.end,
        };
        is_wanted.then_some(place)
    }
}

/// Asks a gateway; `visible` is what stands before the text that is waited for in streams.
async fn through_gateway(
    target: &Target,
    amount: &Amount,
    visible: Option<&str>,
) -> Outcome<Value> {
    let requests = target.requests()?;
    let needle = visible.map(str::to_owned);
    run(amount, |places| {
        let (requests, needle, gateway) = (Arc::clone(&requests), needle.clone(), target.gateway);
        async move {
            let mut connection = http::Connection::open(gateway).await?;
            let mut all = Vec::new();
            for place in places {
                let request = &requests[place % requests.len()];
                all.push(connection.ask(request, needle.as_deref()).await?);
            }
            Ok(all)
        }
    })
    .await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let report = match Command::parse() {
        Command::Whole { target, amount } => through_gateway(&target, &amount, None).await?,
        Command::Streams { target, amount, visible } => {
            through_gateway(&target, &amount, Some(&visible)).await?
        }
        Command::Direct { worker, protocol, prompt_tokens, max_tokens, nth_token, amount } => {
            let question = direct::Question { prompt_tokens, max_tokens, nth_token };
            run(&amount, |places| direct::ask(worker, protocol, question, places)).await?
        }
    };
    use std::io::Write;
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}
