//! What the user wrote: flags, environment and file, merged but not yet checked.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::ConfigError;

const ENV_PREFIX: &str = "M3STACK_GATEWAY_";

/// Reads flags, environment (through clap) and the file they name; the first that speaks wins.
pub(super) fn read<I, S>(arguments: I) -> Result<(SharedKeys, GatewayKeys), ConfigError>
where
    I: IntoIterator<Item = S>,
    S: Into<OsString> + Clone,
{
    let matches = command().try_get_matches_from(arguments)?;
    let arguments = Arguments::from_arg_matches(&matches)?;
    let variables = tuning_variables(std::env::vars_os())?;
    let file = arguments.config.as_deref().map(read_file).transpose()?.unwrap_or_default();
    let shared = merged("shared", &[table(&file.shared), table(&arguments.shared)])?;
    let settings = assignments(&arguments.set)?;
    let layers = [table(&file.gateway), variables, settings, table(&arguments.gateway)];
    Ok((shared, merged("gateway", &layers)?))
}

fn command() -> clap::Command {
    let mut text = String::from("Keys for --set, the file and the environment only:\n");
    for (name, help) in TUNING {
        text.push_str(&format!("  {name}\n          {help}\n"));
    }
    Arguments::command().after_long_help(text)
}

/// The m3stack gateway: OpenAI-style REST in, gRPC to the workers out.
#[derive(Debug, Parser)]
#[command(name = "m3stack-gateway", version, max_term_width = 100)]
struct Arguments {
    /// TOML file with the tables [shared] and [gateway]; flags and environment win over it.
    #[arg(long, env = "M3STACK_GATEWAY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// A setting that has no flag of its own (see below); may be given again.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    shared: SharedKeys,
    #[command(flatten)]
    gateway: GatewayKeys,
}

/// Keys without a flag, and what they mean; the default in brackets.
const TUNING: &[(&str, &str)] = &[
    ("max_media_bytes", "Largest picture or clip as sent or fetched [67108864]."),
    (
        "max_buffered_bytes",
        "Bodies and media held at once by all requests; more are answered 429 [1073741824].",
    ),
    ("max_request_media_bytes", "Source bytes of all media of one request [268435456]."),
    ("max_request_images", "Pictures in one request [200]."),
    ("max_request_videos", "Clips in one request [20]."),
    ("max_request_media_tokens", "Tokens of all media of one request [what the context holds]."),
    ("max_request_video_frames", "Frames taken from all clips of one request [15360]."),
    (
        "max_request_decoded_pixels",
        "Pixels decoded for one request, skipped frames included [50000000000].",
    ),
    ("max_image_pixels", "Pixels of one picture, or of one frame of a clip [64000000]."),
    ("max_video_duration_s", "Longest clip [14400]."),
    (
        "media_work_bytes",
        "Memory for decoding at one time; more waits, the cheap before the dear [1073741824].",
    ),
    ("media_cache_bytes", "Memory for media seen before; 0 keeps none [268435456]."),
    ("media_threads", "Threads that decode and resize [number of cores]."),
    ("max_video_processes", "FFmpeg processes at once [half the cores, at least 1]."),
    (
        "media_proxy",
        "HTTP proxy that media are fetched through, http://host:port; it resolves names: list allowed_media_hosts [none].",
    ),
    ("media_root", "Directory whose files requests may name as file:///... [none]."),
    (
        "media_timeout_s",
        "Time for fetching one item, rewriting an animation, and each FFmpeg run [60].",
    ),
    (
        "max_queue_wait_s",
        "Requests are answered 429 while every worker has prompts of more than this waiting; 0: never [0].",
    ),
    (
        "worker_stall_s",
        "A worker that has requests and makes no step for so long gets no more [60].",
    ),
    (
        "stream_hold_ms",
        "Streamed text shorter than 5 characters waits so long for more; 0 sends every token [100].",
    ),
    (
        "reasoning_field",
        "Chat's name for thinking: reasoning_content, reasoning, or both [reasoning_content].",
    ),
    (
        "slow_start_s",
        "Time over which a worker that has just become ready is given its full share [10].",
    ),
    ("breaker_faults", "Failures in a row after which a worker is left alone [5]."),
    ("breaker_pause_s", "How long at first; each failed trial doubles it, up to 60 [2]."),
];

/// Keys of the table `[shared]`, the same for gateway and worker.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
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

/// Keys of the table `[gateway]`. Those that clap skips have no flag of their own: they stand in
/// the file, in the environment, or behind `--set`.
#[derive(Clone, Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GatewayKeys {
    /// Address to serve REST on [default: 127.0.0.1:8000].
    #[arg(long, env = "M3STACK_GATEWAY_LISTEN", value_name = "HOST:PORT")]
    pub(super) listen: Option<String>,
    /// Address for metrics and operators' calls, or off; then /metrics is served with the rest
    /// [default: off].
    #[arg(long, env = "M3STACK_GATEWAY_ADMIN_LISTEN", value_name = "HOST:PORT")]
    pub(super) admin_listen: Option<String>,
    /// Workers, separated by commas: host:port, https://host:port, dns://name:port (asked every
    /// 5 s), k8s://namespace/service:port (watched), file:///path (one a line, read when it
    /// changes) [default: 127.0.0.1:50051].
    #[arg(long, env = "M3STACK_GATEWAY_WORKERS", value_name = "WORKER,...", value_delimiter = ',')]
    pub(super) workers: Option<Vec<String>>,
    /// Serve HTTPS with tls.crt and tls.key of this directory; ca.crt there: only to clients with
    /// a certificate it has signed.
    #[arg(long, env = "M3STACK_GATEWAY_TLS_DIR", value_name = "DIR")]
    pub(super) tls_dir: Option<PathBuf>,
    /// For https:// workers: ca.crt of this directory has signed theirs; tls.crt and tls.key, if
    /// there, are shown to them.
    #[arg(long, env = "M3STACK_GATEWAY_WORKER_TLS_DIR", value_name = "DIR")]
    pub(super) worker_tls_dir: Option<PathBuf>,
    /// File of API keys; without it everyone who reaches the gateway may use it.
    #[arg(long, env = "M3STACK_GATEWAY_API_KEYS", value_name = "FILE")]
    pub(super) api_keys: Option<PathBuf>,
    /// Serve on an address that others can reach without API keys.
    #[arg(
        long,
        env = "M3STACK_GATEWAY_ALLOW_ANONYMOUS",
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(super) allow_anonymous: Option<bool>,
    /// TOML file of limits by tenant: tables [default] and [tenants.NAME] with
    /// max_concurrent_requests and tokens_per_minute.
    #[arg(long, env = "M3STACK_GATEWAY_TENANT_LIMITS", value_name = "FILE")]
    pub(super) tenant_limits: Option<PathBuf>,
    /// Requests served at once; more are answered 429 [default: 256].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_CONCURRENT_REQUESTS", value_name = "N")]
    pub(super) max_concurrent_requests: Option<u32>,
    /// Largest request body [default: 67108864].
    #[arg(long, env = "M3STACK_GATEWAY_MAX_REQUEST_BYTES", value_name = "BYTES")]
    pub(super) max_request_bytes: Option<u64>,
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
    /// Where traces go (OTLP over HTTP, JSON), for example http://collector:4318.
    #[arg(long, env = "M3STACK_GATEWAY_OTLP_ENDPOINT", value_name = "URL")]
    pub(super) otlp_endpoint: Option<String>,
    /// Show the names of vLLM's metrics beside our own.
    #[arg(
        long,
        env = "M3STACK_GATEWAY_VLLM_METRICS",
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(super) vllm_metrics: Option<bool>,
    #[arg(skip)]
    pub(super) max_media_bytes: Option<u64>,
    #[arg(skip)]
    pub(super) max_buffered_bytes: Option<u64>,
    #[arg(skip)]
    pub(super) max_request_media_bytes: Option<u64>,
    #[arg(skip)]
    pub(super) max_request_images: Option<u32>,
    #[arg(skip)]
    pub(super) max_request_videos: Option<u32>,
    #[arg(skip)]
    pub(super) max_request_media_tokens: Option<u64>,
    #[arg(skip)]
    pub(super) max_request_video_frames: Option<u64>,
    #[arg(skip)]
    pub(super) max_request_decoded_pixels: Option<u64>,
    #[arg(skip)]
    pub(super) max_image_pixels: Option<u64>,
    #[arg(skip)]
    pub(super) max_video_duration_s: Option<u32>,
    #[arg(skip)]
    pub(super) media_work_bytes: Option<u64>,
    #[arg(skip)]
    pub(super) media_cache_bytes: Option<u64>,
    #[arg(skip)]
    pub(super) media_threads: Option<u32>,
    #[arg(skip)]
    pub(super) max_video_processes: Option<u32>,
    #[arg(skip)]
    pub(super) media_proxy: Option<String>,
    #[arg(skip)]
    pub(super) media_root: Option<PathBuf>,
    #[arg(skip)]
    pub(super) media_timeout_s: Option<u32>,
    #[arg(skip)]
    pub(super) max_queue_wait_s: Option<u32>,
    #[arg(skip)]
    pub(super) worker_stall_s: Option<u32>,
    #[arg(skip)]
    pub(super) stream_hold_ms: Option<u32>,
    #[arg(skip)]
    pub(super) reasoning_field: Option<String>,
    #[arg(skip)]
    pub(super) slow_start_s: Option<u32>,
    #[arg(skip)]
    pub(super) breaker_faults: Option<u32>,
    #[arg(skip)]
    pub(super) breaker_pause_s: Option<u32>,
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

/// The settings without a flag that stand in the environment. A misspelt variable would otherwise
/// be a setting that silently does nothing.
pub(super) fn tuning_variables(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Table, ConfigError> {
    let command = Arguments::command();
    let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_env).collect();
    let mut table = Table::new();
    for (name, value) in variables {
        let text = name.to_string_lossy();
        let Some(suffix) = text.strip_prefix(ENV_PREFIX) else { continue };
        if let Some((key, _)) = TUNING.iter().find(|(key, _)| key.to_uppercase() == suffix) {
            table.insert((*key).to_owned(), value_of(&value.to_string_lossy()));
            continue;
        }
        // kubernetes sets these for a service called m3stack-gateway
        let is_service_link =
            suffix == "PORT" || suffix.starts_with("PORT_") || suffix.starts_with("SERVICE_");
        if !is_service_link && !known.contains(&name.as_os_str()) {
            return Err(ConfigError::UnknownVariable { name: text.into_owned() });
        }
    }
    Ok(table)
}

/// What stands behind `--set`.
fn assignments(given: &[String]) -> Result<Table, ConfigError> {
    let mut table = Table::new();
    for text in given {
        let invalid = |message: String| ConfigError::Invalid { key: "set", message };
        let Some((key, value)) = text.split_once('=') else {
            return Err(invalid(format!("expected KEY=VALUE, got {text:?}")));
        };
        let key = key.trim();
        if !TUNING.iter().any(|(name, _)| *name == key) {
            let flag = format!("--{}", key.replace('_', "-"));
            let is_flag = Arguments::command()
                .get_arguments()
                .any(|argument| argument.get_long() == flag.strip_prefix("--"));
            return Err(invalid(if is_flag {
                format!("{key} has a flag of its own: {flag}")
            } else {
                format!("there is no setting {key:?}; `m3stack-gateway --help` lists them")
            }));
        }
        table.insert(key.to_owned(), value_of(value));
    }
    Ok(table)
}

/// A number or a truth where the text is one, else the text.
fn value_of(text: &str) -> Value {
    let text = text.trim();
    let parsed = toml::from_str::<Table>(&format!("value = {text}")).ok();
    let value = parsed.and_then(|mut table| table.remove("value"));
    value.unwrap_or_else(|| Value::String(text.to_owned()))
}

fn table(keys: &impl Serialize) -> Table {
    // every key is a text, a number, a truth or a list of texts, all of which toml can say
    Table::try_from(keys).unwrap_or_default()
}

/// One set of keys; of several layers that say the same, the last is heard.
fn merged<T: DeserializeOwned>(name: &'static str, layers: &[Table]) -> Result<T, ConfigError> {
    let mut whole = Table::new();
    for layer in layers {
        whole.extend(layer.clone());
    }
    T::deserialize(whole).map_err(|error| ConfigError::Invalid {
        key: name,
        message: error.to_string().trim().replace('\n', " "),
    })
}
