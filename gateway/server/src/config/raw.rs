//! What the user wrote: flags, environment and file, merged but not yet checked.

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser};
use serde::Deserialize;

use super::ConfigError;

const ENV_PREFIX: &str = "M3STACK_GATEWAY_";

/// Reads flags, environment (through clap) and the file they name; the first that speaks wins.
pub(super) fn read<I, S>(arguments: I) -> Result<(SharedKeys, GatewayKeys), ConfigError>
where
    I: IntoIterator<Item = S>,
    S: Into<std::ffi::OsString> + Clone,
{
    let arguments = Arguments::try_parse_from(arguments)?;
    refuse_unknown_variables(std::env::vars_os().map(|(name, _)| name))?;
    let file = arguments.config.as_deref().map(read_file).transpose()?.unwrap_or_default();
    Ok((arguments.shared.or(file.shared), arguments.gateway.or(file.gateway)))
}

/// The m3stack gateway: OpenAI-style REST in, gRPC to the workers out.
#[derive(Debug, Parser)]
#[command(name = "m3stack-gateway", version, max_term_width = 100)]
struct Arguments {
    /// TOML file with the tables [shared] and [gateway]; flags and environment win over it.
    #[arg(long, env = "M3STACK_GATEWAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    shared: SharedKeys,
    #[command(flatten)]
    gateway: GatewayKeys,
}

/// Keys of the table `[shared]`, the same for gateway and worker.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SharedKeys {
    /// Checkpoint directory (config.json, tokenizer.json, chat template; no weights needed here).
    #[arg(long, env = "M3STACK_GATEWAY_MODEL_PATH", value_name = "DIR")]
    pub(super) model_path: Option<PathBuf>,
    /// Name that requests use for the model [default: name of the directory].
    #[arg(long, env = "M3STACK_GATEWAY_SERVED_MODEL_NAME", value_name = "NAME")]
    pub(super) served_model_name: Option<String>,
    /// Longest prompt plus output [default: what the model was made for].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_CONTEXT_TOKENS", value_name = "N")]
    pub(super) max_context_tokens: Option<u32>,
    /// debug, info, warning or error [default: info].
    #[arg(long, env = "M3STACK_GATEWAY_LOG_LEVEL", value_name = "LEVEL")]
    pub(super) log_level: Option<String>,
}

/// Keys of the table `[gateway]`.
#[derive(Clone, Debug, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GatewayKeys {
    /// Address to serve REST on [default: 127.0.0.1:8000].
    #[arg(long, env = "M3STACK_GATEWAY_LISTEN", value_name = "HOST:PORT")]
    pub(super) listen: Option<String>,
    /// Workers, separated by commas [default: 127.0.0.1:50051].
    #[arg(
        long,
        env = "M3STACK_GATEWAY_WORKERS",
        value_name = "HOST:PORT,...",
        value_delimiter = ','
    )]
    pub(super) workers: Option<Vec<String>>,
    /// Requests served at once; more are answered 429 [default: 256].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_CONCURRENT_REQUESTS", value_name = "N")]
    pub(super) max_concurrent_requests: Option<u32>,
    /// Largest request body [default: 67108864].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_BYTES", value_name = "BYTES")]
    pub(super) max_request_bytes: Option<u64>,
    /// Largest picture or clip as sent or fetched [default: 67108864].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_MEDIA_BYTES", value_name = "BYTES")]
    pub(super) max_media_bytes: Option<u64>,
    /// Bodies and media held at once by all requests; more are answered 429 [default: 1073741824].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_BUFFERED_BYTES", value_name = "BYTES")]
    pub(super) max_buffered_bytes: Option<u64>,
    /// Source bytes of all media of one request [default: 268435456].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_MEDIA_BYTES", value_name = "BYTES")]
    pub(super) max_request_media_bytes: Option<u64>,
    /// Pictures in one request [default: 200].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_IMAGES", value_name = "N")]
    pub(super) max_request_images: Option<u32>,
    /// Clips in one request [default: 20].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_VIDEOS", value_name = "N")]
    pub(super) max_request_videos: Option<u32>,
    /// Tokens of all media of one request [default: what the context holds].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_MEDIA_TOKENS", value_name = "N")]
    pub(super) max_request_media_tokens: Option<u64>,
    /// Frames taken from all clips of one request [default: 15360].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_VIDEO_FRAMES", value_name = "N")]
    pub(super) max_request_video_frames: Option<u64>,
    /// Pixels decoded for one request, skipped frames included [default: 50000000000].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_DECODED_PIXELS", value_name = "N")]
    pub(super) max_request_decoded_pixels: Option<u64>,
    /// Pixels of one picture, or of one frame of a clip [default: 64000000].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_IMAGE_PIXELS", value_name = "N")]
    pub(super) max_image_pixels: Option<u64>,
    /// Longest clip [default: 14400].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_VIDEO_DURATION_S", value_name = "SECONDS")]
    pub(super) max_video_duration_s: Option<u32>,
    /// Memory for decoding at one time; more waits, the cheap before the dear [default: 1073741824].
    #[arg(long, env = "M3STACK_GATEWAY_MEDIA_WORK_BYTES", value_name = "BYTES")]
    pub(super) media_work_bytes: Option<u64>,
    /// Memory for media seen before; 0 keeps none [default: 268435456].
    #[arg(long, env = "M3STACK_GATEWAY_MEDIA_CACHE_BYTES", value_name = "BYTES")]
    pub(super) media_cache_bytes: Option<u64>,
    /// Threads that decode and resize [default: number of cores].
    #[arg(long, env = "M3STACK_GATEWAY_MEDIA_THREADS", value_name = "N")]
    pub(super) media_threads: Option<u32>,
    /// FFmpeg processes at once [default: half the cores, at least 1].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_VIDEO_PROCESSES", value_name = "N")]
    pub(super) max_video_processes: Option<u32>,
    /// Time for fetching one item, and for each FFmpeg run [default: 60].
    #[arg(long, env = "M3STACK_GATEWAY_MEDIA_TIMEOUT_S", value_name = "SECONDS")]
    pub(super) media_timeout_s: Option<u32>,
    /// Hosts media may be fetched from; empty means any public one.
    #[arg(
        long,
        env = "M3STACK_GATEWAY_ALLOWED_MEDIA_HOSTS",
        value_name = "HOST,...",
        value_delimiter = ','
    )]
    pub(super) allowed_media_hosts: Option<Vec<String>>,
    /// Fetch media also from private and loopback addresses: lets callers reach your network.
    #[arg(
        long,
        env = "M3STACK_GATEWAY_ALLOW_PRIVATE_MEDIA",
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(super) allow_private_media: Option<bool>,
    /// Longest life of a request [default: 1800].
    #[arg(long, env = "M3STACK_GATEWAY_REQUEST_TIMEOUT_S", value_name = "SECONDS")]
    pub(super) request_timeout_s: Option<u32>,
    /// On SIGTERM, time for running requests to finish [default: 30].
    #[arg(long, env = "M3STACK_GATEWAY_DRAIN_TIMEOUT_S", value_name = "SECONDS")]
    pub(super) drain_timeout_s: Option<u32>,
    /// text or json [default: text].
    #[arg(long, env = "M3STACK_GATEWAY_LOG_FORMAT", value_name = "FORMAT")]
    pub(super) log_format: Option<String>,
}

/// The config file: our two tables; the worker's own table is the worker's business.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ConfigFile {
    pub(super) shared: SharedKeys,
    pub(super) gateway: GatewayKeys,
    #[serde(rename = "worker")]
    _worker: serde::de::IgnoredAny,
}

pub(super) fn read_file(path: &Path) -> Result<ConfigFile, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })?;
    toml::from_str(&text).map_err(|error| ConfigError::Malformed {
        path: path.to_owned(),
        message: error.to_string(),
    })
}

/// A misspelt variable would otherwise be a setting that silently does nothing.
pub(super) fn refuse_unknown_variables(
    names: impl Iterator<Item = std::ffi::OsString>,
) -> Result<(), ConfigError> {
    let command = Arguments::command();
    let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_env).collect();
    for name in names {
        let text = name.to_string_lossy();
        let Some(suffix) = text.strip_prefix(ENV_PREFIX) else { continue };
        // kubernetes sets these for a service called m3stack-gateway
        let is_service_link =
            suffix == "PORT" || suffix.starts_with("PORT_") || suffix.starts_with("SERVICE_");
        if !is_service_link && !known.contains(&name.as_os_str()) {
            return Err(ConfigError::UnknownVariable { name: text.into_owned() });
        }
    }
    Ok(())
}

impl SharedKeys {
    fn or(self, file: Self) -> Self {
        Self {
            model_path: self.model_path.or(file.model_path),
            served_model_name: self.served_model_name.or(file.served_model_name),
            max_context_tokens: self.max_context_tokens.or(file.max_context_tokens),
            log_level: self.log_level.or(file.log_level),
        }
    }
}

impl GatewayKeys {
    fn or(self, file: Self) -> Self {
        Self {
            listen: self.listen.or(file.listen),
            workers: self.workers.or(file.workers),
            max_concurrent_requests: self.max_concurrent_requests.or(file.max_concurrent_requests),
            max_request_bytes: self.max_request_bytes.or(file.max_request_bytes),
            max_media_bytes: self.max_media_bytes.or(file.max_media_bytes),
            max_buffered_bytes: self.max_buffered_bytes.or(file.max_buffered_bytes),
            max_request_media_bytes: self.max_request_media_bytes.or(file.max_request_media_bytes),
            max_request_images: self.max_request_images.or(file.max_request_images),
            max_request_videos: self.max_request_videos.or(file.max_request_videos),
            max_request_media_tokens: self
                .max_request_media_tokens
                .or(file.max_request_media_tokens),
            max_request_video_frames: self
                .max_request_video_frames
                .or(file.max_request_video_frames),
            max_request_decoded_pixels: self
                .max_request_decoded_pixels
                .or(file.max_request_decoded_pixels),
            max_image_pixels: self.max_image_pixels.or(file.max_image_pixels),
            max_video_duration_s: self.max_video_duration_s.or(file.max_video_duration_s),
            media_work_bytes: self.media_work_bytes.or(file.media_work_bytes),
            media_cache_bytes: self.media_cache_bytes.or(file.media_cache_bytes),
            media_threads: self.media_threads.or(file.media_threads),
            max_video_processes: self.max_video_processes.or(file.max_video_processes),
            media_timeout_s: self.media_timeout_s.or(file.media_timeout_s),
            allowed_media_hosts: self.allowed_media_hosts.or(file.allowed_media_hosts),
            allow_private_media: self.allow_private_media.or(file.allow_private_media),
            request_timeout_s: self.request_timeout_s.or(file.request_timeout_s),
            drain_timeout_s: self.drain_timeout_s.or(file.drain_timeout_s),
            log_format: self.log_format.or(file.log_format),
        }
    }
}
