//! What the gateway tells its operators: log lines here, numbers in `metrics`, `traces`.

mod caches;
mod clips;
mod exposition;
mod metrics;
mod pieces;
mod process;
mod routing;
pub mod traces;

pub use caches::CacheClass;
pub use metrics::{MediaClass, Metrics, RouteLabel, TokenClass};
pub use routing::{Fleet, WorkerCount};

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogLevel};

/// Starts logging to stderr; a second call in one process changes nothing.
pub fn start_logging(level: LogLevel, format: LogFormat) {
    let level = match level {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warning => "warn",
        LogLevel::Error => "error",
    };
    // foreign crates log request parts at debug; only their warnings are ours to print
    let filter = EnvFilter::new(format!(
        "error,gateway_server={level},gateway_core={level},gateway_media={level}"
    ));
    let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(is_terminal)
        // a line that cannot be written is lost: to say so on the same full disk would panic
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    let outcome = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if outcome.is_err() {
        tracing::debug!("logging was already started by the embedding program");
    }
}
