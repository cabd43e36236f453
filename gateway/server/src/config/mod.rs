//! Settings: file, environment and flags in, one checked `GatewayConfig` out.

mod addresses;
mod raw;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use addresses::{admin_address, listen_address, otlp_endpoint, worker_sources};
use gateway_core::output::ReasoningField;
use gateway_core::pace::Pace;
use gateway_core::routing::{BreakerPolicy, Policy};
use raw::{GatewayKeys, SharedKeys};

pub use addresses::{ProxyUrl, WorkerSource, worker_uri};

const MIB: u64 = 1024 * 1024;

/// Why the gateway cannot start with what it was told.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Flags or environment could not be read; the text is clap's.
    #[error(transparent)]
    Arguments(#[from] clap::Error),
    /// The file named by `--config` cannot be read.
    #[error("cannot read the config file {path}: {source}")]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML of the expected shape.
    #[error("config file {path}: {message}")]
    Malformed {
        /// The path as given.
        path: PathBuf,
        /// Position and reason.
        message: String,
    },
    /// A value is out of range or needed and absent.
    #[error("{key}: {message}")]
    Invalid {
        /// The key as written in the file.
        key: &'static str,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// A variable with our prefix that names no setting.
    #[error("unknown environment variable {name}; `m3stack-gateway --help` lists the known ones")]
    UnknownVariable {
        /// The variable.
        name: String,
    },
}

/// How much is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Everything.
    Debug,
    /// Life events.
    Info,
    /// Degraded, and named.
    Warning,
    /// Someone must act.
    Error,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Checked settings; nothing writes to them after start.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Checkpoint directory.
    pub model_path: PathBuf,
    /// Name that requests use.
    pub served_model_name: String,
    /// Longest prompt plus output; `None` takes the model's own.
    pub max_context_tokens: Option<u32>,
    /// How much is logged.
    pub log_level: LogLevel,
    /// How log lines look.
    pub log_format: LogFormat,
    /// `host:port` to serve on.
    pub listen: String,
    /// `host:port` for metrics and operators' calls; `None` serves `/metrics` with the rest.
    pub admin_listen: Option<String>,
    /// Where workers are found.
    pub workers: Vec<WorkerSource>,
    /// How workers are chosen and judged.
    pub routing: Policy,
    /// Certificate and key to serve with, and who signs clients' certificates.
    pub tls_dir: Option<PathBuf>,
    /// Who signs workers' certificates, and what they are shown.
    pub worker_tls_dir: Option<PathBuf>,
    /// API keys.
    pub api_keys: Option<PathBuf>,
    /// Limits by tenant.
    pub tenant_limits: Option<PathBuf>,
    /// Base URL of an OTLP collector.
    pub otlp_endpoint: Option<String>,
    /// Whether the names of vLLM's metrics are shown too.
    pub vllm_metrics: bool,
    /// Requests served at once.
    pub max_concurrent_requests: u32,
    /// Largest request body.
    pub max_request_bytes: u64,
    /// Limits on media.
    pub media: MediaConfig,
    /// Bodies and media held at once.
    pub max_buffered_bytes: u64,
    /// Longest life of a request.
    pub request_timeout: Duration,
    /// How streamed text is cut; `None` sends every token as it comes.
    pub pace: Option<Pace>,
    /// Under which name chat completions send thinking; every name is read.
    pub reasoning_field: ReasoningField,
    /// Time for running requests to finish on SIGTERM.
    pub drain_timeout: Duration,
}

/// Checked settings of the media rooms.
#[derive(Clone, Debug)]
pub struct MediaConfig {
    /// Largest picture or clip, as sent or fetched.
    pub max_bytes: u64,
    /// What one request may ask for.
    pub limits: MediaLimits,
    /// Memory for decoding at one time.
    pub work_bytes: u64,
    /// Memory for media seen before; 0 keeps none.
    pub cache_bytes: u64,
    /// Threads that decode and resize.
    pub threads: u32,
    /// FFmpeg processes at once.
    pub max_video_processes: u32,
    /// Time for one fetch or one FFmpeg run.
    pub timeout: Duration,
    /// Hosts media may come from; empty means any public one.
    pub allowed_hosts: Vec<String>,
    /// Whether private and loopback addresses may be fetched from.
    pub allow_private: bool,
    /// Proxy that media are fetched through.
    pub proxy: Option<ProxyUrl>,
    /// Directory whose files may be named by `file:` URLs.
    pub root: Option<PathBuf>,
}

/// Limits on the media of one request, all checked before anything is decoded.
#[derive(Clone, Copy, Debug)]
pub struct MediaLimits {
    /// Source bytes of all items.
    pub max_bytes: u64,
    /// Pictures.
    pub max_images: u32,
    /// Clips.
    pub max_videos: u32,
    /// Tokens of all items; `None` leaves it to the context.
    pub max_tokens: Option<u64>,
    /// Frames taken from all clips.
    pub max_frames: u64,
    /// Pixels that are decoded, skipped frames included.
    pub max_decoded_pixels: u64,
    /// Pixels of one picture, or of one frame of a clip.
    pub max_image_pixels: u64,
    /// Longest clip.
    pub max_video_duration: Duration,
}

impl GatewayConfig {
    /// Reads flags, environment (through clap) and the file they name.
    ///
    /// # Errors
    /// [`ConfigError`] naming the key, the value and what would be right; `--help` and
    /// `--version` also come back this way.
    pub fn from_arguments<I, S>(arguments: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator<Item = S>,
        S: Into<std::ffi::OsString> + Clone,
    {
        let (shared, gateway) = raw::read(arguments)?;
        resolve(shared, gateway)
    }
}

/// Fills the defaults and checks every value.
fn resolve(shared: SharedKeys, keys: GatewayKeys) -> Result<GatewayConfig, ConfigError> {
    let model_path = shared.model_path.ok_or_else(|| ConfigError::Invalid {
        key: "model_path",
        message: "no model given; name a checkpoint directory with --model-path".into(),
    })?;
    let served_model_name = served_name(shared.served_model_name, &model_path)?;
    let seconds =
        |value: Option<u32>, default: u32| Duration::from_secs(u64::from(value.unwrap_or(default)));
    let max_request_bytes =
        at_least_one("max_request_bytes", keys.max_request_bytes.unwrap_or(64 * MIB))?;
    Ok(GatewayConfig {
        served_model_name,
        max_context_tokens: shared
            .max_context_tokens
            .map(|value| at_least_one("max_context_tokens", value))
            .transpose()?,
        log_level: log_level(shared.log_level.as_deref().unwrap_or("info"))?,
        log_format: log_format(keys.log_format.as_deref().unwrap_or("text"))?,
        listen: listen_address(&keys)?,
        admin_listen: admin_address(keys.admin_listen.as_deref())?,
        workers: worker_sources(&keys)?,
        routing: routing(&keys)?,
        tls_dir: keys.tls_dir.clone(),
        worker_tls_dir: keys.worker_tls_dir.clone(),
        api_keys: keys.api_keys.clone(),
        tenant_limits: keys.tenant_limits.clone(),
        otlp_endpoint: otlp_endpoint(keys.otlp_endpoint.as_deref())?,
        vllm_metrics: keys.vllm_metrics.unwrap_or(false),
        max_concurrent_requests: at_least_one(
            "max_concurrent_requests",
            keys.max_concurrent_requests.unwrap_or(256),
        )?,
        max_request_bytes,
        max_buffered_bytes: buffered_bytes(&keys, max_request_bytes)?,
        request_timeout: at_least_one("request_timeout_s", seconds(keys.request_timeout_s, 1800))?,
        drain_timeout: seconds(keys.drain_timeout_s, 30),
        pace: match keys.stream_hold_ms.unwrap_or(100) {
            0 => None,
            hold => Some(Pace::new(Duration::from_millis(hold.into()))),
        },
        reasoning_field: reasoning_field(keys.reasoning_field.as_deref())?,
        media: media_config(keys)?,
        model_path,
    })
}

fn routing(keys: &GatewayKeys) -> Result<Policy, ConfigError> {
    let default = Policy::default();
    let seconds = |value: Option<u32>, default: f64| value.map_or(default, f64::from);
    let breaker = BreakerPolicy {
        faults: at_least_one(
            "breaker_faults",
            keys.breaker_faults.unwrap_or(default.breaker.faults),
        )?,
        pause_s: seconds(keys.breaker_pause_s, default.breaker.pause_s),
        ..default.breaker
    };
    Ok(Policy {
        slow_start_s: seconds(keys.slow_start_s, default.slow_start_s),
        stall_s: at_least_one("worker_stall_s", seconds(keys.worker_stall_s, default.stall_s))?,
        max_wait_s: match keys.max_queue_wait_s {
            None | Some(0) => default.max_wait_s,
            Some(limit) => f64::from(limit),
        },
        breaker,
        ..default
    })
}

fn media_config(keys: GatewayKeys) -> Result<MediaConfig, ConfigError> {
    let cores =
        std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1));
    Ok(MediaConfig {
        max_bytes: at_least_one("max_media_bytes", keys.max_media_bytes.unwrap_or(64 * MIB))?,
        proxy: keys.media_proxy.as_deref().map(addresses::media_proxy).transpose()?,
        root: keys.media_root.clone().map(addresses::media_root).transpose()?,
        limits: media_limits(&keys)?,
        work_bytes: at_least_one("media_work_bytes", keys.media_work_bytes.unwrap_or(1024 * MIB))?,
        cache_bytes: keys.media_cache_bytes.unwrap_or(256 * MIB),
        threads: at_least_one("media_threads", keys.media_threads.unwrap_or(cores))?,
        max_video_processes: at_least_one(
            "max_video_processes",
            keys.max_video_processes.unwrap_or((cores / 2).max(1)),
        )?,
        timeout: at_least_one(
            "media_timeout_s",
            Duration::from_secs(u64::from(keys.media_timeout_s.unwrap_or(60))),
        )?,
        allowed_hosts: keys
            .allowed_media_hosts
            .unwrap_or_default()
            .into_iter()
            .map(|host| host.trim().to_ascii_lowercase())
            .collect(),
        allow_private: keys.allow_private_media.unwrap_or(false),
    })
}

fn media_limits(keys: &GatewayKeys) -> Result<MediaLimits, ConfigError> {
    let count = |key, value: Option<u64>, default| at_least_one(key, value.unwrap_or(default));
    Ok(MediaLimits {
        max_bytes: count("max_request_media_bytes", keys.max_request_media_bytes, 256 * MIB)?,
        max_images: keys.max_request_images.unwrap_or(200),
        max_videos: keys.max_request_videos.unwrap_or(20),
        max_tokens: keys.max_request_media_tokens,
        max_frames: count("max_request_video_frames", keys.max_request_video_frames, 15_360)?,
        max_decoded_pixels: count(
            "max_request_decoded_pixels",
            keys.max_request_decoded_pixels,
            50_000_000_000,
        )?,
        max_image_pixels: count("max_image_pixels", keys.max_image_pixels, 64_000_000)?,
        max_video_duration: at_least_one(
            "max_video_duration_s",
            Duration::from_secs(u64::from(keys.max_video_duration_s.unwrap_or(14_400))),
        )?,
    })
}

fn buffered_bytes(keys: &GatewayKeys, max_request_bytes: u64) -> Result<u64, ConfigError> {
    let value = keys.max_buffered_bytes.unwrap_or((1024 * MIB).max(max_request_bytes));
    if value < max_request_bytes {
        return Err(ConfigError::Invalid {
            key: "max_buffered_bytes",
            message: format!(
                "{value} is below max_request_bytes ({max_request_bytes}): no full-size request \
                 could ever be served"
            ),
        });
    }
    Ok(value)
}

fn at_least_one<T: Default + PartialEq>(key: &'static str, value: T) -> Result<T, ConfigError> {
    if value == T::default() {
        return Err(ConfigError::Invalid { key, message: "must be at least 1, got 0".into() });
    }
    Ok(value)
}

fn served_name(given: Option<String>, model_path: &Path) -> Result<String, ConfigError> {
    let directory_name = || {
        let path = model_path.canonicalize().unwrap_or_else(|_| model_path.to_owned());
        path.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    given.or_else(directory_name).filter(|name| !name.is_empty()).ok_or_else(|| {
        ConfigError::Invalid {
            key: "served_model_name",
            message: "must not be empty; give the model a name".into(),
        }
    })
}

fn log_level(text: &str) -> Result<LogLevel, ConfigError> {
    match text.to_ascii_lowercase().as_str() {
        "debug" => Ok(LogLevel::Debug),
        "info" => Ok(LogLevel::Info),
        "warning" | "warn" => Ok(LogLevel::Warning),
        "error" => Ok(LogLevel::Error),
        _ => Err(ConfigError::Invalid {
            key: "log_level",
            message: format!("expected debug, info, warning or error, got {text:?}"),
        }),
    }
}

fn reasoning_field(text: Option<&str>) -> Result<ReasoningField, ConfigError> {
    match text {
        None | Some("reasoning_content") => Ok(ReasoningField::ReasoningContent),
        Some("reasoning") => Ok(ReasoningField::Reasoning),
        Some("both") => Ok(ReasoningField::Both),
        Some(other) => Err(ConfigError::Invalid {
            key: "reasoning_field",
            message: format!("expected reasoning_content, reasoning or both, got {other:?}"),
        }),
    }
}

fn log_format(text: &str) -> Result<LogFormat, ConfigError> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err(ConfigError::Invalid {
            key: "log_format",
            message: format!("expected text or json, got {text:?}"),
        }),
    }
}
