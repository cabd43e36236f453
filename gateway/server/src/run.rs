//! From settings to a served port and back: start, signals, drain, exit code.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::app::{App, StartError};
use crate::config::{ConfigError, GatewayConfig};
use crate::http;
use crate::priority;
use crate::telemetry::start_logging;

/// Exit code for settings that cannot be used.
pub const EXIT_CONFIG: u8 = 2;
/// Exit code for a start that failed.
pub const EXIT_START: u8 = 1;
/// Time for threads that cannot be interrupted.
const THREADS_LAST: Duration = Duration::from_millis(500);

/// The whole program behind its arguments (the first is its name): parses, serves until SIGTERM
/// or SIGINT, drains. Gives the exit code; what went wrong is printed to stderr.
pub fn run_with_arguments<I, S>(arguments: I) -> u8
where
    I: IntoIterator<Item = S>,
    S: Into<std::ffi::OsString> + Clone,
{
    let config = match GatewayConfig::from_arguments(arguments) {
        Ok(config) => config,
        Err(ConfigError::Arguments(shown)) => {
            let _ = shown.print();
            return if shown.use_stderr() { EXIT_CONFIG } else { 0 };
        }
        Err(error) => {
            eprintln!("m3stack-gateway: {error}");
            return EXIT_CONFIG;
        }
    };
    start_logging(config.log_level, config.log_format);
    match run(config) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("m3stack-gateway: {error}");
            EXIT_START
        }
    }
}

/// Serves until SIGTERM or SIGINT and drains; a second signal ends the draining.
///
/// # Errors
/// What keeps the gateway from starting.
pub fn run(config: GatewayConfig) -> Result<(), StartError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(io_threads())
        .on_thread_start(priority::answer_at_once)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve_until_signal(config));
    runtime.shutdown_timeout(THREADS_LAST);
    outcome
}

/// Threads for sockets: half the cores, so that tokens are not handed from core to core more than
/// they must be; text, pictures and clips have threads of their own.
fn io_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2))
}

async fn serve_until_signal(config: GatewayConfig) -> Result<(), StartError> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    // a port that is taken should be said before a large tokenizer is read
    let listener = listen(&config.listen).await?;
    let admin = match &config.admin_listen {
        Some(address) => Some(listen(address).await?),
        None => None,
    };
    // what the system has bound: the settings may have said port 0
    let address = listener.local_addr()?;
    let admin_address = admin.as_ref().map(TcpListener::local_addr).transpose()?;
    let admin_address = admin_address.map_or("off".to_owned(), |address| address.to_string());
    let app = App::start(config)?;
    tracing::info!(
        %address,
        model = %app.config.served_model_name,
        tokenizer = app.model.prompt_builder.tokenizer().engine_name(),
        workers = app.config.workers.len(),
        tls = app.tls.is_some(),
        admin = %admin_address,
        "gateway listens"
    );
    let gone = CancellationToken::new();
    let admin = admin
        .map(|listener| tokio::spawn(http::serve_admin(Arc::clone(&app), listener, gone.clone())));
    let follower = Arc::clone(&app);
    let refreshing = tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            tracing::info!("SIGHUP: looking for workers again");
            follower.discovery.refresh();
        }
    });
    let leave = app.leave.clone();
    if let Some(missing) = app.media.missing_for_video() {
        tracing::warn!(missing, "clips will be refused");
    }
    let serving = tokio::spawn(http::serve(app, listener, stop.clone()));
    let mut serving = std::pin::pin!(serving);
    let received = async || {
        tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        }
    };
    let mut received = received;
    tokio::select! {
        outcome = serving.as_mut() => return outcome.map_err(|error| StartError::System(error.into())),
        name = received() => tracing::info!(signal = name, "stopping"),
        () = leave.cancelled() => tracing::info!("stopping: an operator asked for it"),
    }
    stop.cancel();
    tokio::select! {
        _ = serving.as_mut() => {}
        name = received() => tracing::warn!(signal = name, "stopping at once"),
    }
    // operators see the drain to its end
    gone.cancel();
    refreshing.abort();
    if let Some(admin) = admin {
        let _ = admin.await;
    }
    Ok(())
}

async fn listen(address: &str) -> Result<TcpListener, StartError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|source| StartError::Listen { address: address.to_owned(), source })
}
