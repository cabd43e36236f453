//! Builds and owns everything requests share; nothing here is a global.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use gateway_core::checkpoint::{self, Model, OpenOptions};
use gateway_core::conversation::Limits;
use gateway_core::model::ModelLoadError;
use gateway_core::tokenizer::EngineChoice;
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::blocking::BlockingPool;
use crate::config::GatewayConfig;
use crate::discovery::Discovery;
use crate::keys::KeyRing;
use crate::media::MediaLoader;
use crate::telemetry::Metrics;
use crate::telemetry::traces::Tracer;
use crate::tenants::{LimitTable, Tenants};
use crate::tls::{ServerTls, worker_tls};
use crate::workers::WorkerPool;

/// Why an app could not be built.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The checkpoint's files are missing or contradict each other.
    #[error("the model in {path} cannot be used: {source}")]
    Model {
        /// The directory.
        path: String,
        /// What is wrong with it.
        source: Box<ModelLoadError>,
    },
    /// A setting contradicts the model.
    #[error("max_context_tokens is {asked}, but the model was made for at most {limit}")]
    ContextTooLong {
        /// The setting.
        asked: u32,
        /// The model's own.
        limit: u32,
    },
    /// A worker, or a way to find workers, cannot be used.
    #[error("workers: {0}")]
    Workers(String),
    /// A certificate, a key or a file of limits cannot be used.
    #[error("{key}: {message}")]
    File {
        /// The setting that names it.
        key: &'static str,
        /// Which file, and what is wrong with it.
        message: String,
    },
    /// The address to serve on cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// As configured.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another failure of the system.
    #[error("cannot start: {0}")]
    System(#[from] std::io::Error),
}

/// What all requests share.
pub struct App {
    /// The checked settings.
    pub config: GatewayConfig,
    /// Facts, prompts and grammar of the served model.
    pub model: Model,
    /// Of the model's facts, for workers to compare.
    pub fingerprint: [u8; 32],
    /// Bounds that requests must keep.
    pub limits: Limits,
    /// Longest prompt plus output.
    pub max_context_tokens: u32,
    /// Fetches and decodes.
    pub media: Arc<MediaLoader>,
    /// The workers.
    pub workers: Arc<WorkerPool>,
    /// What keeps the list of workers.
    pub discovery: Discovery,
    /// What clients are shown; `None` serves plain HTTP.
    pub tls: Option<ServerTls>,
    /// Who may ask; `None` lets everyone.
    pub keys: Option<Arc<KeyRing>>,
    /// The door.
    pub admission: Arc<Admission>,
    /// Threads for long texts.
    pub text_pool: BlockingPool,
    /// The way to a collector of traces, if there is one.
    pub tracer: Option<Arc<Tracer>>,
    /// Numbers for operators.
    pub metrics: Arc<Metrics>,
    /// Unix seconds of the start.
    pub created: u64,
    /// Cancelled when running requests have no time left.
    pub abort: CancellationToken,
    /// Cancelled when an operator asks for what SIGTERM does.
    pub leave: CancellationToken,
}

impl App {
    /// Opens the configured checkpoint and begins to follow the workers; needs a running tokio
    /// runtime.
    ///
    /// # Errors
    /// [`StartError`] naming what cannot be used.
    pub fn start(config: GatewayConfig) -> Result<Arc<Self>, StartError> {
        let options = OpenOptions { engine: EngineChoice::Auto, clock: unix_now };
        let model =
            checkpoint::open(&config.model_path, options).map_err(|source| StartError::Model {
                path: config.model_path.display().to_string(),
                source: Box::new(source),
            })?;
        Self::with_model(config, model)
    }

    /// The same with a model that is already open.
    ///
    /// # Errors
    /// As [`App::start`].
    pub fn with_model(config: GatewayConfig, model: Model) -> Result<Arc<Self>, StartError> {
        let facts = model.spec.facts();
        let limit = facts.max_position_embeddings;
        let max_context_tokens = config.max_context_tokens.unwrap_or(limit);
        if max_context_tokens > limit {
            return Err(StartError::ContextTooLong { asked: max_context_tokens, limit });
        }
        // before anything of ours speaks TLS, to whomever; a second call changes nothing
        let _ = rustls::crypto::ring::default_provider().install_default();
        let file = |key, message| StartError::File { key, message };
        let tls = config.tls_dir.as_deref().map(ServerTls::open).transpose();
        let tls = tls.map_err(|message| file("tls_dir", message))?;
        let worker_tls = config.worker_tls_dir.as_deref().map(worker_tls).transpose();
        let worker_tls = worker_tls.map_err(|message| file("worker_tls_dir", message))?;
        let keys = config.api_keys.as_deref().map(KeyRing::open).transpose();
        let keys = keys.map_err(|message| file("api_keys", message))?;
        let limits_by_tenant = config.tenant_limits.as_deref().map(LimitTable::read).transpose();
        let limits_by_tenant =
            limits_by_tenant.map_err(|message| file("tenant_limits", message))?;
        let tracer = config.otlp_endpoint.as_deref().map(Tracer::start).transpose();
        let tracer = tracer.map_err(|message| file("otlp_endpoint", message))?.map(Arc::new);
        let tenants = Arc::new(Tenants::new(limits_by_tenant.unwrap_or_default()));
        let metrics = Arc::new(Metrics::default());
        let admission = Arc::new(Admission::new(
            config.max_concurrent_requests,
            config.max_buffered_bytes,
            tenants,
            Arc::clone(&metrics),
        ));
        let workers = Arc::new(WorkerPool::new(
            config.routing,
            facts.clone(),
            worker_tls,
            Arc::clone(&admission),
            Arc::clone(&metrics),
        ));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        Ok(Arc::new(Self {
            fingerprint: facts.fingerprint(),
            limits: limits(&config, &model),
            max_context_tokens,
            media: Arc::new(MediaLoader::new(&config.media, Arc::clone(&metrics))?),
            discovery: Discovery::start(&config.workers, &workers).map_err(StartError::Workers)?,
            workers,
            tls,
            keys,
            admission,
            tracer,
            text_pool: BlockingPool::new(cores),
            created: unix_now().try_into().unwrap_or(0),
            abort: CancellationToken::new(),
            leave: CancellationToken::new(),
            metrics,
            model,
            config,
        }))
    }
}

/// The model's bounds, with those that the operator sets.
fn limits(config: &GatewayConfig, model: &Model) -> Limits {
    let media = config.media.limits;
    Limits {
        max_images: media.max_images as usize,
        max_videos: media.max_videos as usize,
        ..model.limits()
    }
}

/// Unix seconds.
pub fn unix_now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
