//! How tokens are chosen and when they end: every value filled from request or defaults.

use super::Limits;
use super::fields::{Fields, wrong_type};
use super::unsupported;
use crate::error::RequestError;
use crate::json::Json;

/// How log-probabilities are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogprobsWish {
    /// Report every token's own.
    pub wanted: bool,
    /// Alternatives at every place, 0 to 20.
    pub top: u32,
}

/// How the reply is to be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamWish {
    /// As server-sent events.
    pub stream: bool,
    /// One last chunk with token counts.
    pub include_usage: bool,
    /// Token counts in every chunk.
    pub continuous_usage: bool,
    /// Short pieces of text may wait for more.
    pub coalesce: bool,
}

impl StreamWish {
    /// As protocols without further wishes have it.
    pub(crate) fn plain(stream: bool) -> Self {
        Self { stream, coalesce: true, ..Self::default() }
    }
}

/// Sampling and ending of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// 0 to 2; 0 is greedy.
    pub temperature: f32,
    /// 0 to 1; 0 keeps the most probable token alone.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 0 to 1.
    pub min_p: f32,
    /// Fixed, or left to the server.
    pub seed: Option<u64>,
    /// At least 1; `None` means as many as fit.
    pub max_tokens: Option<u32>,
    /// A `max_tokens` beyond the context means as many as fit; else it is refused.
    pub fit_context: bool,
    /// No end before that many.
    pub min_tokens: u32,
    /// Stop ids do not end the reply.
    pub ignore_eos: bool,
    /// Above 0; 1 changes nothing.
    pub repetition_penalty: f32,
    /// -2 to 2.
    pub presence_penalty: f32,
    /// -2 to 2.
    pub frequency_penalty: f32,
    /// Log-probabilities.
    pub logprobs: LogprobsWish,
    /// Further ids that end the reply.
    pub stop_token_ids: Vec<u32>,
    /// Added to logits, by id; -100 to 100.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these may be sampled; empty allows all.
    pub allowed_token_ids: Vec<u32>,
    /// These are never sampled.
    pub banned_token_ids: Vec<u32>,
    /// Texts that end the reply; none is empty.
    pub stop: Vec<String>,
    /// The matched stop text is part of the reply.
    pub include_stop: bool,
    /// Samples of one prompt, at least 1.
    pub num_samples: u32,
    /// Control tokens are left out of the text.
    pub skip_special_tokens: bool,
}

/// Length of a text completion that does not say how long it may be. Source: OpenAI's API.
const COMPLETION_TOKENS: u32 = 16;
const MAX_BIASED_TOKENS: usize = 1024;

/// Generation fields of a chat request.
pub(super) fn read_chat(body: &Fields, limits: &Limits) -> Result<Generation, RequestError> {
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.count("top_logprobs", 0..=20)?.unwrap_or(0);
    if top > 0 && !wanted {
        return Err(RequestError::invalid(
            "top_logprobs",
            format!("top_logprobs is {top}, which needs logprobs to be true"),
        ));
    }
    let ending = Ending { max_tokens: max_tokens(body, limits)?, ..ending(body, limits)? };
    read(body, limits, LogprobsWish { wanted, top }, ending)
}

/// Generation fields of a text completion, where `logprobs` is a number.
pub(super) fn read_completion(body: &Fields, limits: &Limits) -> Result<Generation, RequestError> {
    let top = body.count("logprobs", 0..=20)?;
    let logprobs = LogprobsWish { wanted: top.is_some(), top: top.unwrap_or(0) };
    let default = COMPLETION_TOKENS.min(limits.max_output_tokens);
    let max_tokens = max_tokens(body, limits)?.or(Some(default));
    read(body, limits, logprobs, Ending { max_tokens, ..ending(body, limits)? })
}

/// Generation fields of a messages request. Agents ask for a fixed, large `max_tokens` whatever
/// the prompt: one beyond the context is no mistake there.
pub(crate) fn read_messages(body: &Fields, limits: &Limits) -> Result<Generation, RequestError> {
    let max_tokens = body.count("max_tokens", 1..=u32::MAX)?;
    let stop = stop(body, "stop_sequences", limits)?;
    let ending = Ending { max_tokens, fit_context: true, stop };
    let mut generation = read(body, limits, LogprobsWish::default(), ending)?;
    generation.num_samples = 1;
    Ok(generation)
}

/// Generation fields of a responses request.
pub(crate) fn read_responses(body: &Fields, limits: &Limits) -> Result<Generation, RequestError> {
    let max_tokens = body.count("max_output_tokens", 1..=limits.max_output_tokens)?;
    let ending = Ending { max_tokens, ..Ending::default() };
    let mut generation = read(body, limits, LogprobsWish::default(), ending)?;
    generation.num_samples = 1;
    Ok(generation)
}

/// What ends a reply, read in the words of each protocol.
#[derive(Default)]
struct Ending {
    max_tokens: Option<u32>,
    fit_context: bool,
    stop: Vec<String>,
}

fn ending(body: &Fields, limits: &Limits) -> Result<Ending, RequestError> {
    Ok(Ending { stop: stop(body, "stop", limits)?, ..Ending::default() })
}

/// Streaming fields.
pub(super) fn read_stream(body: &Fields) -> Result<StreamWish, RequestError> {
    let stream = body.boolean("stream")?.unwrap_or(false);
    let Some(options) = body.object("stream_options")? else {
        return Ok(StreamWish::plain(stream));
    };
    Ok(StreamWish {
        stream,
        include_usage: options.boolean("include_usage")?.unwrap_or(false),
        continuous_usage: options.boolean("continuous_usage_stats")?.unwrap_or(false),
        coalesce: options.boolean("coalesce")?.unwrap_or(true),
    })
}

fn read(
    body: &Fields,
    limits: &Limits,
    logprobs: LogprobsWish,
    ending: Ending,
) -> Result<Generation, RequestError> {
    unsupported::refuse(body)?;
    let defaults = &limits.defaults;
    let penalty = |key| body.real(key, -2.0..=2.0).map(|value| value.unwrap_or(0.0));
    Ok(Generation {
        temperature: body.real("temperature", 0.0..=2.0)?.unwrap_or(defaults.temperature),
        top_p: body.real("top_p", 0.0..=1.0)?.unwrap_or(defaults.top_p),
        top_k: top_k(body)?.unwrap_or(defaults.top_k),
        min_p: body.real("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
        seed: seed(body)?,
        max_tokens: ending.max_tokens,
        fit_context: ending.fit_context,
        min_tokens: body.count("min_tokens", 0..=limits.max_output_tokens)?.unwrap_or(0),
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        repetition_penalty: body
            .positive("repetition_penalty", 10.0)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: penalty("presence_penalty")?,
        frequency_penalty: penalty("frequency_penalty")?,
        logprobs,
        stop_token_ids: stop_token_ids(body, limits)?,
        logit_bias: logit_bias(body, limits)?,
        allowed_token_ids: listed_ids(body, "allowed_token_ids", limits)?,
        banned_token_ids: listed_ids(body, "banned_token_ids", limits)?,
        stop: ending.stop,
        include_stop: body.boolean("include_stop_str_in_output")?.unwrap_or(false),
        num_samples: body.count("n", 1..=limits.max_samples)?.unwrap_or(1),
        skip_special_tokens: body.boolean("skip_special_tokens")?.unwrap_or(true),
    })
}

/// -1, which some clients send, keeps all as 0 does.
fn top_k(body: &Fields) -> Result<Option<u32>, RequestError> {
    let value = body.integer("top_k", -1..=i64::from(u32::MAX))?;
    Ok(value.map(|value| u32::try_from(value).unwrap_or(0)))
}

fn seed(body: &Fields) -> Result<Option<u64>, RequestError> {
    // a negative seed keeps its bits: each is a seed of its own
    if let Some(Json::Number(number)) = body.get("seed")
        && let Some(value) = number.as_u64()
    {
        return Ok(Some(value));
    }
    Ok(body.integer("seed", i64::MIN..=i64::MAX)?.map(|value| value as u64))
}

fn max_tokens(body: &Fields, limits: &Limits) -> Result<Option<u32>, RequestError> {
    let range = 1..=limits.max_output_tokens;
    match body.count("max_completion_tokens", range.clone())? {
        Some(value) => Ok(Some(value)),
        None => body.count("max_tokens", range),
    }
}

fn token_id(value: &Json, path: String, limits: &Limits) -> Result<u32, RequestError> {
    let Json::Number(number) = value else { return Err(wrong_type(path, "a token id", value)) };
    number
        .as_u64()
        .and_then(|id| u32::try_from(id).ok())
        .filter(|&id| id < limits.vocab_size)
        .ok_or_else(|| {
            let message = format!(
                "{path} is {}; token ids are integers from 0 to {}",
                number.literal(),
                limits.vocab_size.saturating_sub(1)
            );
            RequestError::invalid(path, message)
        })
}

/// A list of token ids at `path`.
pub(super) fn token_ids(
    items: &[Json],
    path: &str,
    limits: &Limits,
) -> Result<Vec<u32>, RequestError> {
    items
        .iter()
        .enumerate()
        .map(|(index, item)| token_id(item, format!("{path}[{index}]"), limits))
        .collect()
}

fn stop_token_ids(body: &Fields, limits: &Limits) -> Result<Vec<u32>, RequestError> {
    let items = body.array("stop_token_ids")?.unwrap_or(&[]);
    token_ids(items, "stop_token_ids", limits)
}

/// A list of ids at `key`, without those that come twice.
fn listed_ids(body: &Fields, key: &str, limits: &Limits) -> Result<Vec<u32>, RequestError> {
    let mut ids = token_ids(body.array(key)?.unwrap_or(&[]), key, limits)?;
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn logit_bias(body: &Fields, limits: &Limits) -> Result<Vec<(u32, f32)>, RequestError> {
    let Some(table) = body.object("logit_bias")? else { return Ok(Vec::new()) };
    if table.members().len() > MAX_BIASED_TOKENS {
        return Err(RequestError::invalid(
            "logit_bias",
            format!(
                "logit_bias has {} entries; at most {MAX_BIASED_TOKENS} are allowed",
                table.members().len()
            ),
        ));
    }
    let mut biases = Vec::with_capacity(table.members().len());
    for key in table.members().keys() {
        let id = key.parse().ok().filter(|&id: &u32| id < limits.vocab_size).ok_or_else(|| {
            let message = format!(
                "logit_bias has the key {key:?}; keys are token ids from 0 to {}",
                limits.vocab_size.saturating_sub(1)
            );
            RequestError::invalid(table.path(key), message)
        })?;
        if let Some(bias) = table.real(key, -100.0..=100.0)? {
            biases.push((id, bias));
        }
    }
    Ok(biases)
}

fn stop(body: &Fields, key: &str, limits: &Limits) -> Result<Vec<String>, RequestError> {
    let items = match body.get(key) {
        None => return Ok(Vec::new()),
        Some(text @ Json::String(_)) => std::slice::from_ref(text),
        Some(Json::Array(items)) => items,
        Some(other) => return Err(wrong_type(key.into(), "a string or a list", other)),
    };
    if items.len() > limits.max_stop_strings {
        return Err(RequestError::invalid(
            key,
            format!(
                "{key} has {} strings; at most {} are allowed",
                items.len(),
                limits.max_stop_strings
            ),
        ));
    }
    let mut texts = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let path = format!("{key}[{index}]");
        let Json::String(text) = item else { return Err(wrong_type(path, "a string", item)) };
        if text.len() > limits.max_stop_bytes {
            let message = format!(
                "{path} has {} bytes; at most {} are allowed",
                text.len(),
                limits.max_stop_bytes
            );
            return Err(RequestError::invalid(path, message));
        }
        // an empty stop text would end every reply at once; clients send it for "none"
        if !text.is_empty() {
            texts.push(text.clone());
        }
    }
    Ok(texts)
}
