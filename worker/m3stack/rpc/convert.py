"""Generated messages to plain types and back, for server and client alike."""

from __future__ import annotations

from collections.abc import Sequence

from m3stack.engine.account import Account
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import (
    WHOLE,
    Constraint,
    ConstraintKind,
    Event,
    Finished,
    FinishReason,
    Load,
    MediaItem,
    MediaKind,
    PatchFormat,
    Request,
    Sampling,
    Source,
    Span,
    Stage,
    Started,
    TokenLogprob,
    Tokens,
    Usage,
)
from m3stack.worker.v1 import worker_pb2 as pb

ERROR_TRAILER = "m3stack-error-bin"


def started_to_proto(event: Started) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.Started(queue_ms=event.queue_ms, cached_tokens=event.cached_tokens)
    )


def tokens_to_proto(event: Tokens) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        tokens=pb.Tokens(
            token_ids=event.token_ids,
            logprobs=[
                pb.TokenLogprob(
                    logprob=entry.logprob,
                    top=[pb.Alternative(token_id=t, logprob=value) for t, value in entry.top],
                )
                for entry in event.logprobs
            ],
        )
    )


def finished_to_proto(event: Finished) -> pb.GenerateResponse:
    usage = event.usage
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=f"FINISH_REASON_{event.reason.name}",
            stop_token_id=event.stop_token_id,
            usage=pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                image_tokens=usage.image_tokens,
                video_tokens=usage.video_tokens,
            ),
        )
    )


def event_from_proto(response: pb.GenerateResponse) -> Event | None:
    """The event in a reply, or None if it holds no event (media needs)."""
    body = response.WhichOneof("body")
    if body == "started":
        return Started(response.started.queue_ms, response.started.cached_tokens)
    if body == "tokens":
        logprobs = tuple(
            TokenLogprob(entry.logprob, tuple((a.token_id, a.logprob) for a in entry.top))
            for entry in response.tokens.logprobs
        )
        return Tokens(tuple(response.tokens.token_ids), logprobs)
    if body == "finished":
        given = response.finished
        usage = given.usage
        return Finished(
            FinishReason(given.reason),
            given.stop_token_id if given.HasField("stop_token_id") else None,
            Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                image_tokens=usage.image_tokens,
                video_tokens=usage.video_tokens,
            ),
        )
    return None


def header_to_proto(
    request: Request, fingerprint: bytes, stage: Stage = WHOLE
) -> pb.GenerateHeader:
    """The header that announces a request; its patches follow in chunks."""
    header = pb.GenerateHeader(
        request_id=request.request_id,
        fingerprint=fingerprint,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling_to_proto(request.sampling),
        media=[_item_to_proto(item, request.patch_format) for item in request.media],
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        purpose=stage.purpose.value,  # type: ignore[arg-type]
        pages_source=_source_to_proto(stage.pages),
        features_source=_source_to_proto(stage.features),
    )
    if request.patch_format is not None:
        header.patch_format.CopyFrom(_patch_format_to_proto(request.patch_format))
    if request.constraint is not None:
        header.constraint.CopyFrom(_constraint_to_proto(request.constraint))
    return header


def _source_to_proto(source: Source | None) -> pb.Source | None:
    return source and pb.Source(address=source.address, tls_name=source.tls_name)


def _constraint_to_proto(constraint: Constraint) -> pb.Constraint:
    given = pb.Constraint(param=constraint.param, after_token_id=constraint.after_token_id)
    setattr(given, constraint.kind.value, constraint.text)
    return given


def constraint_from_proto(header: pb.GenerateHeader) -> Constraint | None:
    """The constraint of a header that names one; its kind must be set."""
    if not header.HasField("constraint"):
        return None
    given = header.constraint
    kind = ConstraintKind(given.WhichOneof("spec"))
    return Constraint(
        kind,
        getattr(given, kind.value),
        given.after_token_id if given.HasField("after_token_id") else None,
        given.param or f"constraint.{kind.value}",
    )


def _sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sorted(sampling.allowed_token_ids),
        banned_token_ids=sorted(sampling.banned_token_ids),
    )


def _patch_format_to_proto(patch_format: PatchFormat) -> pb.PatchFormat:
    return pb.PatchFormat(
        dtype=pb.PATCH_DTYPE_U8,
        mean=patch_format.mean,
        std=patch_format.std,
        channels=patch_format.channels,
        patch_size=patch_format.patch_size,
        temporal_patch_size=patch_format.temporal_patch_size,
        merge_size=patch_format.merge_size,
    )


def _item_to_proto(item: MediaItem, patch_format: PatchFormat | None) -> pb.MediaItem:
    assert patch_format is not None
    t, h, w = item.grid_thw
    row_bytes = patch_format.channels * item.frames_per_patch * patch_format.patch_size**2
    return pb.MediaItem(
        kind=f"MEDIA_KIND_{item.kind.name}",
        media_hash=item.media_hash,
        grid=pb.Grid(t=t, h=h, w=w),
        frames_per_patch=item.frames_per_patch,
        patch_bytes=t * h * w * row_bytes,
        spans=[pb.Span(offset=span.offset, length=span.length) for span in item.spans],
    )


def load_to_proto(load: Load) -> pb.Load:
    return pb.Load(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_prompt_tokens=load.waiting_prompt_tokens,
        used_pages=load.used_pages,
        total_pages=load.total_pages,
        steps=load.steps,
        prompt_tokens_per_s=load.prompt_tokens_per_s,
    )


def load_from_proto(load: pb.Load) -> Load:
    return Load(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        waiting_prompt_tokens=load.waiting_prompt_tokens,
        used_pages=load.used_pages,
        total_pages=load.total_pages,
        steps=load.steps,
        prompt_tokens_per_s=load.prompt_tokens_per_s,
    )


def account_to_proto(account: Account) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request_id=account.request_id,
        outcome=account.outcome,
        prompt_tokens=account.prompt_tokens,
        cached_tokens=account.cached_tokens,
        output_tokens=account.output_tokens,
        preemptions=account.preemptions,
        entries=[
            pb.AccountEntry(
                phase=entry.phase.value,
                start_ms=entry.start_s * 1000,
                duration_ms=entry.duration_s * 1000,
                steps=entry.work.steps,
                steps_ms=entry.work.steps_s * 1000,
                tokens=entry.tokens,
                batch_tokens=entry.work.tokens,
                mixed_steps=entry.work.mixed_steps,
                mixed_ms=entry.work.mixed_s * 1000,
                note=entry.note,
            )
            for entry in account.entries
        ],
    )


def error_to_proto(kind: ErrorKind, message: str, param: str) -> bytes:
    """What stands in the trailer of a failed call."""
    detail = pb.ErrorDetail(kind=f"ERROR_KIND_{kind.name}", message=message, param=param)
    return detail.SerializeToString()


def error_from_proto(trailer: bytes) -> WorkerError:
    """The failure in an error trailer."""
    detail = pb.ErrorDetail.FromString(trailer)
    return WorkerError(ErrorKind(detail.kind), detail.message, detail.param)


def request_from_header(header: pb.GenerateHeader, patches: Sequence[bytes]) -> Request:
    """The request a header of our own making announces, with its items' patch bytes.

    Args:
        header: complete, as the gateway makes it; nothing is checked again.
        patches: one an item, in order.
    """
    given = header.patch_format
    patch_format = PatchFormat(
        mean=tuple(given.mean),
        std=tuple(given.std),
        channels=given.channels,
        patch_size=given.patch_size,
        temporal_patch_size=given.temporal_patch_size,
        merge_size=given.merge_size,
    )
    return Request(
        request_id=header.request_id,
        prompt_token_ids=tuple(header.prompt_token_ids),
        sampling=_sampling_from_proto(header.sampling),
        patch_format=patch_format if header.media else None,
        media=tuple(
            _item_from_proto(item, rows) for item, rows in zip(header.media, patches, strict=True)
        ),
        priority=header.priority,
        tenant=header.tenant,
        cache_salt=header.cache_salt,
        constraint=constraint_from_proto(header),
    )


def _sampling_from_proto(given: pb.Sampling) -> Sampling:
    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
        min_tokens=given.min_tokens,
        ignore_eos=given.ignore_eos,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logprobs=given.logprobs,
        top_logprobs=given.top_logprobs,
        stop_token_ids=frozenset(given.stop_token_ids),
        logit_bias=dict(given.logit_bias),
        allowed_token_ids=frozenset(given.allowed_token_ids),
        banned_token_ids=frozenset(given.banned_token_ids),
    )


def _item_from_proto(given: pb.MediaItem, patches: bytes) -> MediaItem:
    return MediaItem(
        kind=MediaKind(given.kind),
        media_hash=given.media_hash,
        grid_thw=(given.grid.t, given.grid.h, given.grid.w),
        frames_per_patch=given.frames_per_patch,
        spans=tuple(Span(span.offset, span.length) for span in given.spans),
        patches=patches,
    )
