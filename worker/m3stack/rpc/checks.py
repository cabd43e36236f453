"""Is a request header complete, in range and consistent? Turns a good one into a `Request`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from m3stack.engine.waiting import MAX_PRIORITY
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.constraints import read_constraint
from m3stack.types import MediaItem, MediaKind, PatchFormat, Request, Sampling, Span
from m3stack.worker.v1 import worker_pb2 as pb

MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 128
MAX_STOP_IDS = 1024
MAX_TOP_LOGPROBS = 20
HASH_BYTES = 32

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "logprobs",
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request has to agree with.

    Attributes:
        fingerprint: of the model's facts.
        max_context_tokens: prompt and output together.
        channels, patch_size, temporal_patch_size, merge_size: how the model reads patches.
        feature_bytes_per_token: what a merged vision token takes once encoded.
    """

    fingerprint: bytes
    vocab_size: int
    max_context_tokens: int
    eos_token_id: int
    image_token_id: int
    video_token_id: int
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    feature_bytes_per_token: int


def read_header(header: pb.GenerateHeader, limits: ModelLimits) -> Request:
    """The request a header describes, its patches still to come and its constraint not compiled.

    Raises:
        WorkerError: names the field at fault, its value and the limit.
    """
    _check_name("request_id", header.request_id, at_least=1, at_most=MAX_REQUEST_ID_CHARS)
    _check_name("tenant", header.tenant, at_least=0, at_most=MAX_TENANT_CHARS)
    _check_name("cache_salt", header.cache_salt, at_least=0, at_most=MAX_TENANT_CHARS)
    if abs(header.priority) > MAX_PRIORITY:
        raise _invalid(
            "priority", f"is {header.priority}, expected -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if header.fingerprint and header.fingerprint != limits.fingerprint:
        raise _invalid(
            "fingerprint",
            f"was prepared for model {header.fingerprint.hex()[:16]}, "
            f"this worker serves {limits.fingerprint.hex()[:16]}",
        )
    prompt = tuple(header.prompt_token_ids)
    _check_prompt(prompt, limits)
    sampling = _read_sampling(header, limits)
    _check_context(len(prompt), sampling, limits)
    constraint = read_constraint(
        header, sampling, eos_token_id=limits.eos_token_id, vocab_size=limits.vocab_size
    )
    patch_format = _read_patch_format(header, limits)
    media = tuple(
        _read_item(item, f"media[{index}]", limits) for index, item in enumerate(header.media)
    )
    _check_spans(prompt, media, limits)
    return Request(
        header.request_id,
        prompt,
        sampling,
        patch_format,
        media,
        priority=header.priority,
        tenant=header.tenant,
        cache_salt=header.cache_salt,
        constraint=constraint,
    )


def patch_bytes(item: MediaItem, limits: ModelLimits) -> int:
    """Bytes of all patch rows of an item."""
    t, h, w = item.grid_thw
    return t * h * w * limits.channels * item.frames_per_patch * limits.patch_size**2


def merged_tokens(item: MediaItem, limits: ModelLimits) -> int:
    """Placeholder tokens an item fills."""
    t, h, w = item.grid_thw
    return t * h * w // limits.merge_size**2


def _invalid(param: str, complaint: str) -> WorkerError:
    return WorkerError(ErrorKind.INVALID_REQUEST, f"{param} {complaint}", param)


def _check_name(param: str, name: str, *, at_least: int, at_most: int) -> None:
    if not at_least <= len(name) <= at_most:
        raise _invalid(param, f"has {len(name)} characters, expected {at_least} to {at_most}")
    # it is logged: no line breaks or escape codes
    if not (name.isascii() and (name.isprintable() or not name)):
        raise _invalid(param, "may hold printable ASCII only")


def _check_prompt(prompt: Sequence[int], limits: ModelLimits) -> None:
    if not prompt:
        raise _invalid("prompt_token_ids", "is empty, expected at least one token")
    largest = max(prompt)
    if largest >= limits.vocab_size:
        raise _invalid(
            f"prompt_token_ids[{prompt.index(largest)}]",
            f"is {largest}, the vocabulary ends at {limits.vocab_size - 1}",
        )


def _check_context(num_prompt: int, sampling: Sampling, limits: ModelLimits) -> None:
    limit = limits.max_context_tokens
    if num_prompt >= limit:
        raise WorkerError(
            ErrorKind.CONTEXT_TOO_LONG,
            f"the prompt has {num_prompt} tokens, {num_prompt - limit + 1} more than leave room "
            f"for one output token in a context of {limit}",
            "prompt_token_ids",
        )
    if num_prompt + sampling.max_tokens > limit:
        raise WorkerError(
            ErrorKind.CONTEXT_TOO_LONG,
            f"the prompt's {num_prompt} tokens and max_tokens {sampling.max_tokens} exceed the "
            f"context of {limit} by {num_prompt + sampling.max_tokens - limit}",
            "sampling.max_tokens",
        )


def _read_sampling(header: pb.GenerateHeader, limits: ModelLimits) -> Sampling:
    if not header.HasField("sampling"):
        raise _invalid("sampling", "is missing")
    given = header.sampling
    for name in _SAMPLING_FIELDS:
        if not given.HasField(name):
            raise _invalid(f"sampling.{name}", "is missing")
    _in_range("temperature", given.temperature, 0, 2)
    _in_range("top_p", given.top_p, 0, 1, above=True)
    _in_range("min_p", given.min_p, 0, 1)
    _in_range("max_tokens", given.max_tokens, 1, math.inf)
    _in_range("min_tokens", given.min_tokens, 0, given.max_tokens)
    _in_range("presence_penalty", given.presence_penalty, -2, 2)
    _in_range("frequency_penalty", given.frequency_penalty, -2, 2)
    # far beyond any use, and far from where fp32 logits overflow
    _in_range("repetition_penalty", given.repetition_penalty, 0, 1e6, above=True)
    _in_range("top_logprobs", given.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if given.top_logprobs and not given.logprobs:
        raise _invalid("sampling.top_logprobs", "needs logprobs = true")
    _check_ids(given, limits)
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


def _in_range(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    # written so that NaN fails
    if (low < value if above else low <= value) and value <= high:
        return
    expected = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
    if above:
        expected = f"above {low:g} to {high:g}"
    raise _invalid(f"sampling.{name}", f"is {value:g}, expected {expected}")


def _check_ids(given: pb.Sampling, limits: ModelLimits) -> None:
    end = limits.vocab_size - 1
    if len(given.stop_token_ids) > MAX_STOP_IDS:
        count = len(given.stop_token_ids)
        raise _invalid("sampling.stop_token_ids", f"has {count} ids, the limit is {MAX_STOP_IDS}")
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        largest = max(getattr(given, name), default=0)
        if largest > end:
            raise _invalid(f"sampling.{name}", f"holds {largest}, the vocabulary ends at {end}")
    for token_id, bias in given.logit_bias.items():
        if token_id > end:
            raise _invalid("sampling.logit_bias", f"holds {token_id}, the vocabulary ends at {end}")
        if not -100 <= bias <= 100:
            raise _invalid(f"sampling.logit_bias[{token_id}]", f"is {bias:g}, expected -100 to 100")
    _check_choice(given, limits)


def _check_choice(given: pb.Sampling, limits: ModelLimits) -> None:
    """Something must be left to sample, before `min_tokens` as well."""
    banned, allowed = set(given.banned_token_ids), set(given.allowed_token_ids)
    if not (allowed or banned):
        return

    def num_left(out: set[int]) -> int:
        return len(allowed - out) if allowed else limits.vocab_size - len(out)

    if not num_left(banned):
        raise _invalid("sampling.banned_token_ids", "hold every id that is allowed")
    ends = set(given.stop_token_ids) | (set() if given.ignore_eos else {limits.eos_token_id})
    if given.min_tokens and not num_left(banned | ends):
        raise _invalid(
            "sampling.min_tokens",
            f"is {given.min_tokens}, but every id that is allowed ends the request",
        )


def _read_patch_format(header: pb.GenerateHeader, limits: ModelLimits) -> PatchFormat | None:
    if not header.media:
        return None
    if not header.HasField("patch_format"):
        raise _invalid("patch_format", "is missing although there are media")
    given = header.patch_format
    if given.dtype != pb.PATCH_DTYPE_U8:
        raise _invalid("patch_format.dtype", "is not PATCH_DTYPE_U8, the only one supported")
    for name in ("channels", "patch_size", "temporal_patch_size", "merge_size"):
        value, expected = getattr(given, name), getattr(limits, name)
        if value != expected:
            raise _invalid(f"patch_format.{name}", f"is {value}, the model expects {expected}")
    for name in ("mean", "std"):
        values = getattr(given, name)
        if len(values) != limits.channels:
            raise _invalid(
                f"patch_format.{name}", f"has {len(values)} values, expected {limits.channels}"
            )
        if not all(math.isfinite(value) for value in values):
            raise _invalid(f"patch_format.{name}", "holds a value that is not finite")
    if not all(value > 0 for value in given.std):
        raise _invalid("patch_format.std", "holds a value that is not above 0")
    return PatchFormat(
        mean=tuple(given.mean),
        std=tuple(given.std),
        channels=given.channels,
        patch_size=given.patch_size,
        temporal_patch_size=given.temporal_patch_size,
        merge_size=given.merge_size,
    )


def _read_item(given: pb.MediaItem, name: str, limits: ModelLimits) -> MediaItem:
    if given.kind not in (pb.MEDIA_KIND_IMAGE, pb.MEDIA_KIND_VIDEO):
        raise _invalid(f"{name}.kind", "is neither image nor video")
    if len(given.media_hash) != HASH_BYTES:
        raise _invalid(
            f"{name}.media_hash", f"has {len(given.media_hash)} bytes, expected {HASH_BYTES}"
        )
    kind = MediaKind(given.kind)
    t, h, w = given.grid.t, given.grid.h, given.grid.w
    merge = limits.merge_size
    if t < 1 or h < 1 or w < 1 or h % merge or w % merge:
        raise _invalid(
            f"{name}.grid", f"is {t} x {h} x {w}, expected rows and columns in multiples of {merge}"
        )
    if kind is MediaKind.IMAGE and t != 1:
        raise _invalid(f"{name}.grid.t", f"is {t}, a still has 1")
    frames = (1, limits.temporal_patch_size)[kind is MediaKind.VIDEO :]
    if given.frames_per_patch not in frames:
        expected = " or ".join(str(number) for number in frames)
        raise _invalid(
            f"{name}.frames_per_patch", f"is {given.frames_per_patch}, expected {expected}"
        )
    item = MediaItem(
        kind=kind,
        media_hash=given.media_hash,
        grid_thw=(t, h, w),
        frames_per_patch=given.frames_per_patch,
        spans=tuple(Span(span.offset, span.length) for span in given.spans),
        patches=None,
    )
    if given.patch_bytes != patch_bytes(item, limits):
        raise _invalid(
            f"{name}.patch_bytes",
            f"is {given.patch_bytes}, the grid gives {patch_bytes(item, limits)}",
        )
    placed = sum(span.length for span in item.spans)
    if placed != merged_tokens(item, limits):
        raise _invalid(
            f"{name}.spans",
            f"hold {placed} tokens, the grid gives {merged_tokens(item, limits)}",
        )
    return item


def _check_spans(prompt: tuple[int, ...], media: Sequence[MediaItem], limits: ModelLimits) -> None:
    """Spans must lie on placeholders of their kind, apart from each other, and leave none over."""
    placeholder = {
        MediaKind.IMAGE: limits.image_token_id,
        MediaKind.VIDEO: limits.video_token_id,
    }
    covered = dict.fromkeys(MediaKind, 0)
    taken: list[tuple[int, int, str]] = []
    for index, item in enumerate(media):
        token_id = placeholder[item.kind]
        last_end = 0
        for number, span in enumerate(item.spans):
            name = f"media[{index}].spans[{number}]"
            end = span.offset + span.length
            if span.length < 1:
                raise _invalid(name, "is empty")
            if span.offset < last_end:
                raise _invalid(name, f"starts at {span.offset}, before the end of the one before")
            if prompt[span.offset : end] != (token_id,) * span.length:
                raise _invalid(
                    name,
                    f"covers {span.offset} to {end - 1}, where the prompt does not hold only "
                    f"{item.kind.name.lower()} placeholders ({token_id})",
                )
            last_end = end
            covered[item.kind] += span.length
            taken.append((span.offset, end, name))
    taken.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(taken):
        if start < end:
            raise _invalid(second, f"overlaps {first}")
    for kind, token_id in placeholder.items():
        found = prompt.count(token_id)
        if found != covered[kind]:
            raise _invalid(
                "media",
                f"cover {covered[kind]} {kind.name.lower()} placeholders ({token_id}), "
                f"the prompt has {found}",
            )
