"""Plain data that travels between the RPC side and the engine; no torch, no proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from m3stack.errors import ErrorKind


class MediaKind(Enum):
    IMAGE = 1
    VIDEO = 2


class FinishReason(Enum):
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; ranges as in `worker.proto`, checked at the RPC edge."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: bool
    top_logprobs: int
    stop_token_ids: frozenset[int]
    logit_bias: Mapping[int, float]
    allowed_token_ids: frozenset[int] = frozenset()
    """Only these may be sampled; empty allows all."""
    banned_token_ids: frozenset[int] = frozenset()


class ConstraintKind(Enum):
    """The language a constraint's text is written in; value = name of the proto field."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language that the output must belong to.

    Attributes:
        text: the specification, in the language that `kind` names.
        after_token_id: it begins behind the first generated token with this id; None: at once.
        param: name of what asked for it, for error messages.
    """

    kind: ConstraintKind
    text: str
    after_token_id: int | None = None
    param: str = "constraint"


@dataclass(frozen=True, slots=True)
class PatchFormat:
    """How patch bytes are read: u8 rows, `(x / 255 - mean) / std` per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """A run of placeholder ids in the prompt."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture or clip of a request.

    Attributes:
        media_hash: 32 bytes; equal hashes mean equal patches.
        grid_thw: temporal patches, rows, columns of the patch grid.
        frames_per_patch: frames stored in a patch row (1 for stills).
        spans: where its merged tokens stand in the prompt, in order.
        patches: u8 rows, `t*h*w` of `channels*frames_per_patch*patch_size^2` bytes each; None if
            the worker still holds the item's embeddings.
    """

    kind: MediaKind
    media_hash: bytes
    grid_thw: tuple[int, int, int]
    frames_per_patch: int
    spans: tuple[Span, ...]
    patches: bytes | bytearray | memoryview | None


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request; immutable. All checks against the model's limits are done.

    Attributes:
        priority: larger goes first; 0 is ordinary.
        tenant: on whose behalf; empty is one tenant like any other.
        cache_salt: pages are shared only between requests of equal tenant and salt.
        constraint: what the output must look like; None: anything.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    patch_format: PatchFormat | None = None
    media: tuple[MediaItem, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token (after temperature 1, before filters), and alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    image_tokens: int
    video_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue."""

    queue_ms: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens in order; `logprobs` is empty or one entry a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Finished:
    """The one successful end of a request."""

    reason: FinishReason
    stop_token_id: int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The one unsuccessful end of a request."""

    kind: ErrorKind
    message: str
    param: str = ""


@dataclass(frozen=True, slots=True)
class MediaSettled:
    """The request's uploaded patches are gone; never sent to a client."""


Event = Started | Tokens | Finished | Failed | MediaSettled


class WorkerState(Enum):
    """Life of a worker; value = proto number."""

    LOADING = 1
    READY = 2
    DRAINING = 3


class Role(Enum):
    """What a worker does; value = proto number."""

    ALL = 1
    ENCODE = 2
    PREFILL = 3
    DECODE = 4


class Purpose(Enum):
    """What a request wants of a worker; value = proto number."""

    ANSWER = 0
    PREFILL = 1
    ENCODE = 2


@dataclass(frozen=True, slots=True)
class Source:
    """A worker as another one reaches it.

    Attributes:
        address: host:port.
        tls_name: the name its certificate is for, if that is not the host.
    """

    address: str
    tls_name: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A request's place in a fleet that divides the work.

    Attributes:
        purpose: what is wanted of this worker.
        pages, features: who may hold what has been computed of it.
    """

    purpose: Purpose = Purpose.ANSWER
    pages: Source | None = None
    features: Source | None = None

    @property
    def is_silent(self) -> bool:
        """Whether nobody wants the tokens."""
        return self.purpose is not Purpose.ANSWER


WHOLE = Stage()


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is; fields as in `worker.proto`."""

    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    used_pages: int
    total_pages: int
    steps: int
    prompt_tokens_per_s: float = 0.0
