//! Core types to and from the generated protocol types; nothing else knows the latter.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gateway_core::constraint::{Constraint, ConstraintSpec};
use gateway_core::conversation::{Generation, Standing};
use gateway_core::model::{MediaKind, MediaPlan, ModelFacts};
use gateway_core::prompt::Span;
use gateway_core::routing::{Role, SeatLoad, Stage};
use gateway_media::{MediaHash, PatchLayout, PixelNorm};
use prost::Message;
use tonic::{Code, Status};

use super::{Source, Sources, TokenLogprob, WorkerEvent, WorkerUsage};
use crate::error::{ErrorKind, GatewayError};

/// What the protocol compiler made.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub(super) mod proto {
    include!(concat!(env!("OUT_DIR"), "/client/m3stack.worker.v1.rs"));
}

/// Trailer in which a worker explains a failed call.
const ERROR_TRAILER: &str = "m3stack-error-bin";
/// Channels of a pixel.
const CHANNELS: u32 = 3;

/// One media item as announced in the header.
#[derive(Clone, Debug)]
pub struct ItemHeader {
    /// Names source bytes and every parameter that changes pixels.
    pub hash: MediaHash,
    /// Kind and grid.
    pub plan: MediaPlan,
    /// Runs of placeholder ids that its tokens replace.
    pub spans: Vec<Span>,
    /// Frames in one patch row.
    pub frames_per_patch: u32,
}

impl ItemHeader {
    /// Exact length of all patch rows.
    pub fn patch_bytes(&self, layout: PatchLayout) -> u64 {
        let row = CHANNELS * self.frames_per_patch * layout.patch_size * layout.patch_size;
        self.plan.grid.patches() * u64::from(row)
    }
}

/// Everything a worker must know before it can begin, the same for all samples of a prompt.
#[derive(Clone, Debug)]
pub struct RequestHeader {
    /// Of the model files this request was prepared for.
    pub fingerprint: [u8; 32],
    /// Placeholders expanded.
    pub prompt_token_ids: Arc<Vec<u32>>,
    /// The ids that end a reply, the model's own first.
    pub stop_token_ids: Vec<u32>,
    /// On whose behalf, a name that the client does not choose; empty for nobody in particular.
    pub tenant: String,
    /// How urgently, and with whom computed prompts may be shared.
    pub standing: Standing,
    /// What the output must look like.
    pub constraint: Option<Constraint>,
    /// Sampling and ending.
    pub generation: Generation,
    /// At least 1; what the context has room for, if the request says nothing.
    pub max_tokens: u32,
    /// How patches are cut.
    pub layout: PatchLayout,
    /// How the worker normalises them.
    pub norm: PixelNorm,
    /// Pictures and clips in prompt order.
    pub items: Vec<ItemHeader>,
}

/// What is wanted of one worker, and what others have of it already.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// The part of the work.
    pub stage: Stage,
    /// Where other parts are.
    pub sources: Sources,
}

/// A header without the prompt's ids, which are written beside it.
pub(super) fn bare_header(
    header: &RequestHeader,
    request_id: &str,
    seed: u64,
    wish: &Wish,
) -> proto::GenerateHeader {
    let mut header = generate_header(header, request_id, seed);
    header.purpose = match wish.stage {
        Stage::Answer => proto::Purpose::Unspecified,
        Stage::Prefill => proto::Purpose::Prefill,
        Stage::Encode => proto::Purpose::Encode,
    }
    .into();
    if wish.stage != Stage::Answer {
        // one that helps may be too small for the whole output, which it does not make
        header.constraint = None;
        if let Some(sampling) = &mut header.sampling {
            (sampling.max_tokens, sampling.min_tokens) = (Some(1), Some(0));
        }
    }
    header.pages_source = wish.sources.pages.as_ref().map(source);
    header.features_source = wish.sources.features.as_ref().map(source);
    header
}

/// The serialized `GenerateHeader` of a request.
pub fn header_bytes(header: &RequestHeader, request_id: &str, seed: u64) -> Vec<u8> {
    let prompt_token_ids = header.prompt_token_ids.to_vec();
    let header = generate_header(header, request_id, seed);
    proto::GenerateHeader { prompt_token_ids, ..header }.encode_to_vec()
}

fn generate_header(header: &RequestHeader, request_id: &str, seed: u64) -> proto::GenerateHeader {
    proto::GenerateHeader {
        request_id: request_id.to_owned(),
        fingerprint: Bytes::copy_from_slice(&header.fingerprint),
        sampling: Some(sampling(header, seed)),
        patch_format: (!header.items.is_empty()).then(|| patch_format(header)),
        media: header.items.iter().map(|item| media_item(item, header.layout)).collect(),
        priority: header.standing.priority,
        tenant: header.tenant.clone(),
        cache_salt: header.standing.cache_salt.clone(),
        constraint: header.constraint.as_ref().map(constraint),
        ..proto::GenerateHeader::default()
    }
}

fn source(source: &Source) -> proto::Source {
    let tls_name = source.tls_name.as_deref().unwrap_or_default().to_owned();
    proto::Source { address: source.address.clone(), tls_name }
}

fn constraint(constraint: &Constraint) -> proto::Constraint {
    use proto::constraint::Spec;
    proto::Constraint {
        spec: Some(match &constraint.spec {
            ConstraintSpec::JsonSchema(text) => Spec::JsonSchema(text.clone()),
            ConstraintSpec::Regex(text) => Spec::Regex(text.clone()),
            ConstraintSpec::Lark(text) => Spec::Lark(text.clone()),
        }),
        after_token_id: constraint.after_token_id,
        param: constraint.param.clone(),
    }
}

fn sampling(header: &RequestHeader, seed: u64) -> proto::Sampling {
    let generation = &header.generation;
    proto::Sampling {
        temperature: Some(generation.temperature),
        top_p: Some(generation.top_p),
        top_k: Some(generation.top_k),
        min_p: Some(generation.min_p),
        seed: Some(seed),
        max_tokens: Some(header.max_tokens),
        min_tokens: Some(generation.min_tokens.min(header.max_tokens)),
        ignore_eos: Some(generation.ignore_eos),
        repetition_penalty: Some(generation.repetition_penalty),
        presence_penalty: Some(generation.presence_penalty),
        frequency_penalty: Some(generation.frequency_penalty),
        top_logprobs: Some(generation.logprobs.top),
        logprobs: Some(generation.logprobs.wanted),
        stop_token_ids: header.stop_token_ids.clone(),
        logit_bias: generation.logit_bias.iter().copied().collect(),
        allowed_token_ids: generation.allowed_token_ids.clone(),
        banned_token_ids: generation.banned_token_ids.clone(),
    }
}

fn patch_format(header: &RequestHeader) -> proto::PatchFormat {
    proto::PatchFormat {
        dtype: proto::PatchDtype::U8.into(),
        mean: header.norm.mean.to_vec(),
        std: header.norm.std.to_vec(),
        channels: CHANNELS,
        patch_size: header.layout.patch_size,
        temporal_patch_size: header.layout.temporal_patch_size,
        merge_size: header.layout.merge_size,
    }
}

fn media_item(item: &ItemHeader, layout: PatchLayout) -> proto::MediaItem {
    let grid = item.plan.grid;
    proto::MediaItem {
        kind: match item.plan.kind {
            MediaKind::Image => proto::MediaKind::Image.into(),
            MediaKind::Video => proto::MediaKind::Video.into(),
        },
        media_hash: Bytes::copy_from_slice(&item.hash.0),
        grid: Some(proto::Grid { t: grid.t, h: grid.h, w: grid.w }),
        frames_per_patch: item.frames_per_patch,
        patch_bytes: item.patch_bytes(layout),
        spans: item
            .spans
            .iter()
            .map(|span| proto::Span { offset: span.offset, length: span.length })
            .collect(),
    }
}

/// What a worker says; media needs are between it and the client half of the call.
pub(super) enum Reply {
    /// The items whose patches it lacks.
    Needs(Vec<u32>),
    /// It has read all that was left for it in memory.
    Taken,
    /// Something for the request.
    Event(WorkerEvent),
}

/// # Errors
/// `WorkerUnavailable` for a reply the contract does not allow.
pub(super) fn reply(response: proto::GenerateResponse) -> Result<Reply, GatewayError> {
    use proto::generate_response::Body;
    let event = match response.body {
        Some(Body::Needs(needs)) => return Ok(Reply::Needs(needs.item_indices)),
        Some(Body::Taken(proto::MediaTaken {})) => return Ok(Reply::Taken),
        Some(Body::Started(started)) => {
            let queue = Duration::from_millis(started.queue_ms.into());
            // what was fetched for this request was not there before it
            let cached_tokens = started.cached_tokens.saturating_sub(started.transferred_tokens);
            WorkerEvent::Started { queue, cached_tokens }
        }
        Some(Body::Tokens(tokens)) => {
            if !tokens.logprobs.is_empty() && tokens.logprobs.len() != tokens.token_ids.len() {
                return Err(broken_contract("tokens and log-probabilities differ in number"));
            }
            WorkerEvent::Tokens {
                token_ids: tokens.token_ids,
                logprobs: tokens.logprobs.into_iter().map(token_logprob).collect(),
            }
        }
        Some(Body::Finished(finished)) => WorkerEvent::Finished {
            is_length: match finished.reason() {
                proto::FinishReason::Length => true,
                proto::FinishReason::Stop => false,
                proto::FinishReason::Unspecified => {
                    return Err(broken_contract("a finish without a reason"));
                }
            },
            usage: finished.usage.map(usage).unwrap_or_default(),
        },
        None => return Err(broken_contract("an empty reply")),
    };
    Ok(Reply::Event(event))
}

fn broken_contract(what: &str) -> GatewayError {
    GatewayError::new(ErrorKind::WorkerUnavailable, "the worker broke off the request")
        .because(format!("worker broke the wire contract: {what}"))
}

fn token_logprob(entry: proto::TokenLogprob) -> TokenLogprob {
    TokenLogprob {
        logprob: entry.logprob,
        top: entry.top.into_iter().map(|other| (other.token_id, other.logprob)).collect(),
    }
}

fn usage(usage: proto::Usage) -> WorkerUsage {
    WorkerUsage {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens.saturating_sub(usage.transferred_tokens),
        completion_tokens: usage.completion_tokens,
    }
}

pub(super) fn load(load: proto::Load) -> SeatLoad {
    SeatLoad {
        running_requests: load.running_requests,
        waiting_requests: load.waiting_requests,
        waiting_prompt_tokens: load.waiting_prompt_tokens,
        used_pages: load.used_pages,
        total_pages: load.total_pages,
        steps: load.steps,
        prompt_tokens_per_s: load.prompt_tokens_per_s,
    }
}

/// What a worker does; older ones do everything.
pub(super) fn role(identity: &proto::Identity) -> Role {
    match identity.role() {
        proto::WorkerRole::Unspecified | proto::WorkerRole::All => Role::All,
        proto::WorkerRole::Encode => Role::Encode,
        proto::WorkerRole::Prefill => Role::Prefill,
        proto::WorkerRole::Decode => Role::Decode,
    }
}

/// Where the worker's model differs from ours, in words; `None` if they are one.
pub(super) fn difference(identity: &proto::Identity, ours: &ModelFacts) -> Option<String> {
    if identity.fingerprint.as_ref() == ours.fingerprint() {
        return None;
    }
    let Some(theirs) = &identity.facts else {
        return Some("it does not say which model it serves".into());
    };
    let numbers = [
        ("vocab_size", theirs.vocab_size, ours.vocab_size),
        ("image_token_id", theirs.image_token_id, ours.image_token_id),
        ("video_token_id", theirs.video_token_id, ours.video_token_id),
        ("eos_token_id", theirs.eos_token_id, ours.eos_token_id),
        ("patch_size", theirs.patch_size, ours.patch_size),
        ("temporal_patch_size", theirs.temporal_patch_size, ours.temporal_patch_size),
        ("merge_size", theirs.merge_size, ours.merge_size),
        ("max_position_embeddings", theirs.max_position_embeddings, ours.max_position_embeddings),
    ];
    let mut parts = Vec::new();
    if theirs.model_type != ours.model_type {
        parts.push(format!("model_type {:?} there, {:?} here", theirs.model_type, ours.model_type));
    }
    for (name, there, here) in numbers {
        if there != here {
            parts.push(format!("{name} {there} there, {here} here"));
        }
    }
    if parts.is_empty() {
        parts.push("fingerprints differ although all known facts agree".into());
    }
    Some(format!("it serves another model: {}", parts.join("; ")))
}

/// A failed call as one of our kinds.
pub(super) fn failure(status: &Status) -> GatewayError {
    let log = format!("grpc status {:?}: {}", status.code(), status.message());
    let trailer = status.metadata().get_bin(ERROR_TRAILER).and_then(|value| value.to_bytes().ok());
    if let Some(detail) = trailer.and_then(|bytes| proto::ErrorDetail::decode(bytes).ok()) {
        return explained(detail, log);
    }
    // a status that tonic made itself tells of the connection, not of the request
    let is_transport = std::error::Error::source(status).is_some();
    match status.code() {
        Code::DeadlineExceeded if !is_transport => deadline_exceeded(),
        Code::ResourceExhausted if !is_transport => {
            GatewayError::new(ErrorKind::Overloaded, "the worker has no room; try again shortly")
        }
        Code::Internal | Code::Unknown | Code::Unimplemented if !is_transport => {
            return GatewayError::internal(log);
        }
        _ => GatewayError::new(
            ErrorKind::WorkerUnavailable,
            "the worker that served this request is gone; try again",
        ),
    }
    .because(log)
}

/// The request outlived its limit.
pub(super) fn deadline_exceeded() -> GatewayError {
    GatewayError::new(ErrorKind::DeadlineExceeded, "the request took longer than is allowed")
}

fn explained(detail: proto::ErrorDetail, log: String) -> GatewayError {
    use proto::ErrorKind as Wire;
    let kind = match detail.kind() {
        Wire::InvalidRequest => ErrorKind::InvalidRequest,
        Wire::ContextTooLong => ErrorKind::ContextTooLong,
        Wire::MediaRejected => ErrorKind::MediaRejected,
        Wire::Overloaded => ErrorKind::Overloaded,
        Wire::WorkerUnavailable | Wire::Cancelled => ErrorKind::WorkerUnavailable,
        Wire::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        Wire::Internal | Wire::Unspecified => {
            return GatewayError::internal(format!("{log}; {}", detail.message));
        }
    };
    let mut error = GatewayError::new(kind, detail.message).because(log);
    error.param = Some(detail.param).filter(|param| !param.is_empty());
    error
}
