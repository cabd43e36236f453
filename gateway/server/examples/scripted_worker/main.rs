//! A worker without a model, for measuring gateways alone: answers every request with a fixed
//! text, at once or at a given pace, over our protocol or over a peer's.
//!
//! `scripted_worker --model-path DIR --listen HOST:PORT [--protocol ours|vllm] [--name NAME]
//! [--text FILE] [--tokens N] [--interval-ms N]`

use std::time::Duration;

use clap::{Parser, ValueEnum};
use gateway_core::checkpoint::{OpenOptions, open};
use gateway_core::tokenizer::EngineChoice;
use tokio::time::Instant;

mod ours;
mod peer;

#[derive(Clone, Copy, ValueEnum)]
enum Protocol {
    /// `m3stack.worker.v1`.
    Ours,
    /// `vllm.grpc.engine`, as far as a gateway of that protocol asks.
    Vllm,
}

#[derive(Parser)]
struct Arguments {
    /// Checkpoint whose facts and tokenizer are used.
    #[arg(long)]
    model_path: std::path::PathBuf,
    /// Address to serve on.
    #[arg(long, default_value = "127.0.0.1:50051")]
    listen: std::net::SocketAddr,
    /// What is spoken.
    #[arg(long, value_enum, default_value = "ours")]
    protocol: Protocol,
    /// Name of the model that is announced.
    #[arg(long, default_value = "scripted")]
    name: String,
    /// File with the text of every answer, its control tokens meant; without it, plain words.
    #[arg(long)]
    text: Option<std::path::PathBuf>,
    /// Tokens of every answer at most; a request's limit stands before it.
    #[arg(long, default_value_t = 16)]
    tokens: usize,
    /// Pause before each token; with 0 all come in one message.
    #[arg(long, default_value_t = 0)]
    interval_ms: u64,
}

/// What every answer says, and how fast.
#[derive(Clone)]
struct Script {
    token_ids: Vec<u32>,
    interval: Duration,
}

impl Script {
    /// The answer's tokens under a request's limit, and whether the limit cut it.
    fn within(&self, max_tokens: Option<u32>) -> (Vec<u32>, bool) {
        let limit = max_tokens.map_or(usize::MAX, |limit| limit as usize);
        let count = self.token_ids.len().min(limit);
        (self.token_ids[..count].to_vec(), count == limit)
    }

    /// Waits until a token's time has come; they do not drift.
    async fn wait_for_token(&self, begin: Instant, place: usize) {
        // a timer that has passed still takes until the next millisecond
        if self.interval.is_zero() {
            return;
        }
        let steps = u32::try_from(place + 1).unwrap_or(u32::MAX);
        tokio::time::sleep_until(begin + self.interval * steps).await;
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let options =
        OpenOptions { engine: EngineChoice::Reference, clock: gateway_server::app::unix_now };
    let model = open(&arguments.model_path, options)?;
    let text = match &arguments.text {
        Some(file) => std::fs::read_to_string(file)?,
        None => "the quick brown fox jumps over the lazy dog and ".repeat(arguments.tokens),
    };
    let mut token_ids = model.prompt_builder.encode_text(&text, false)?;
    token_ids.truncate(arguments.tokens);
    let interval = Duration::from_millis(arguments.interval_ms);
    let script = Script { token_ids, interval };
    let mut server = tonic::transport::Server::builder().tcp_nodelay(true);
    let router = match arguments.protocol {
        Protocol::Ours => server.add_service(ours::service(&model, script)),
        Protocol::Vllm => server.add_service(peer::service(&arguments, &model, script)),
    };
    router.serve(arguments.listen).await?;
    Ok(())
}
