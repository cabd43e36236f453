from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_PREFILL: _ClassVar[Purpose]
    PURPOSE_ENCODE: _ClassVar[Purpose]

class PatchDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATCH_DTYPE_UNSPECIFIED: _ClassVar[PatchDtype]
    PATCH_DTYPE_U8: _ClassVar[PatchDtype]

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_VIDEO: _ClassVar[MediaKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID_REQUEST: _ClassVar[ErrorKind]
    ERROR_KIND_CONTEXT_TOO_LONG: _ClassVar[ErrorKind]
    ERROR_KIND_MEDIA_REJECTED: _ClassVar[ErrorKind]
    ERROR_KIND_OVERLOADED: _ClassVar[ErrorKind]
    ERROR_KIND_WORKER_UNAVAILABLE: _ClassVar[ErrorKind]
    ERROR_KIND_DEADLINE_EXCEEDED: _ClassVar[ErrorKind]
    ERROR_KIND_CANCELLED: _ClassVar[ErrorKind]
    ERROR_KIND_INTERNAL: _ClassVar[ErrorKind]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_ALL: _ClassVar[WorkerRole]
    WORKER_ROLE_ENCODE: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class ContentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_KIND_UNSPECIFIED: _ClassVar[ContentKind]
    CONTENT_KIND_PAGE: _ClassVar[ContentKind]
    CONTENT_KIND_FEATURES: _ClassVar[ContentKind]
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_PREFILL: Purpose
PURPOSE_ENCODE: Purpose
PATCH_DTYPE_UNSPECIFIED: PatchDtype
PATCH_DTYPE_U8: PatchDtype
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_VIDEO: MediaKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID_REQUEST: ErrorKind
ERROR_KIND_CONTEXT_TOO_LONG: ErrorKind
ERROR_KIND_MEDIA_REJECTED: ErrorKind
ERROR_KIND_OVERLOADED: ErrorKind
ERROR_KIND_WORKER_UNAVAILABLE: ErrorKind
ERROR_KIND_DEADLINE_EXCEEDED: ErrorKind
ERROR_KIND_CANCELLED: ErrorKind
ERROR_KIND_INTERNAL: ErrorKind
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_ALL: WorkerRole
WORKER_ROLE_ENCODE: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
CONTENT_KIND_UNSPECIFIED: ContentKind
CONTENT_KIND_PAGE: ContentKind
CONTENT_KIND_FEATURES: ContentKind

class GenerateRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GenerateHeader
    chunk: MediaChunk
    def __init__(self, header: _Optional[_Union[GenerateHeader, _Mapping]] = ..., chunk: _Optional[_Union[MediaChunk, _Mapping]] = ...) -> None: ...

class GenerateHeader(_message.Message):
    __slots__ = ("request_id", "fingerprint", "prompt_token_ids", "sampling", "patch_format", "media", "priority", "tenant", "cache_salt", "constraint", "purpose", "pages_source", "features_source")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PATCH_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    PAGES_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_SOURCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    fingerprint: bytes
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    patch_format: PatchFormat
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    priority: int
    tenant: str
    cache_salt: str
    constraint: Constraint
    purpose: Purpose
    pages_source: Source
    features_source: Source
    def __init__(self, request_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., patch_format: _Optional[_Union[PatchFormat, _Mapping]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., pages_source: _Optional[_Union[Source, _Mapping]] = ..., features_source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("address", "tls_name")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    address: str
    tls_name: str
    def __init__(self, address: _Optional[str] = ..., tls_name: _Optional[str] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "after_token_id", "param")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    after_token_id: int
    param: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., after_token_id: _Optional[int] = ..., param: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_logprobs", "logprobs", "stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
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
    top_logprobs: int
    logprobs: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., top_logprobs: _Optional[int] = ..., logprobs: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PatchFormat(_message.Message):
    __slots__ = ("dtype", "mean", "std", "channels", "patch_size", "temporal_patch_size", "merge_size")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    PATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEMPORAL_PATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MERGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    dtype: PatchDtype
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    def __init__(self, dtype: _Optional[_Union[PatchDtype, str]] = ..., mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ..., channels: _Optional[int] = ..., patch_size: _Optional[int] = ..., temporal_patch_size: _Optional[int] = ..., merge_size: _Optional[int] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("kind", "media_hash", "grid", "frames_per_patch", "patch_bytes", "spans")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MEDIA_HASH_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_PATCH_FIELD_NUMBER: _ClassVar[int]
    PATCH_BYTES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    kind: MediaKind
    media_hash: bytes
    grid: Grid
    frames_per_patch: int
    patch_bytes: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, kind: _Optional[_Union[MediaKind, str]] = ..., media_hash: _Optional[bytes] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., frames_per_patch: _Optional[int] = ..., patch_bytes: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("t", "h", "w")
    T_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    W_FIELD_NUMBER: _ClassVar[int]
    t: int
    h: int
    w: int
    def __init__(self, t: _Optional[int] = ..., h: _Optional[int] = ..., w: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class MediaChunk(_message.Message):
    __slots__ = ("item_index", "offset", "data", "patches_sha256", "shared")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PATCHES_SHA256_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    offset: int
    data: bytes
    patches_sha256: bytes
    shared: SharedPiece
    def __init__(self, item_index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., patches_sha256: _Optional[bytes] = ..., shared: _Optional[_Union[SharedPiece, _Mapping]] = ...) -> None: ...

class SharedPiece(_message.Message):
    __slots__ = ("process_id", "descriptor", "num_bytes")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    descriptor: int
    num_bytes: int
    def __init__(self, process_id: _Optional[int] = ..., descriptor: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("needs", "started", "tokens", "finished", "taken")
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    needs: MediaNeeds
    started: Started
    tokens: Tokens
    finished: Finished
    taken: MediaTaken
    def __init__(self, needs: _Optional[_Union[MediaNeeds, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., taken: _Optional[_Union[MediaTaken, _Mapping]] = ...) -> None: ...

class MediaNeeds(_message.Message):
    __slots__ = ("item_indices",)
    ITEM_INDICES_FIELD_NUMBER: _ClassVar[int]
    item_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, item_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class MediaTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Started(_message.Message):
    __slots__ = ("queue_ms", "cached_tokens", "transferred_tokens")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: int
    cached_tokens: int
    transferred_tokens: int
    def __init__(self, queue_ms: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    usage: Usage
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "image_tokens", "video_tokens", "transferred_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    image_tokens: int
    video_tokens: int
    transferred_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., video_tokens: _Optional[int] = ..., transferred_tokens: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "param")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    message: str
    param: str
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("heartbeat_ms", "cache_events", "memory", "memory_token")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    cache_events: bool
    memory: SharedPiece
    memory_token: bytes
    def __init__(self, heartbeat_ms: _Optional[int] = ..., cache_events: _Optional[bool] = ..., memory: _Optional[_Union[SharedPiece, _Mapping]] = ..., memory_token: _Optional[bytes] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("identity", "state", "load", "cache")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    state: WorkerState
    load: Load
    cache: CacheEvents
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("is_restart", "epoch", "added", "removed")
    IS_RESTART_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    is_restart: bool
    epoch: int
    added: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, is_restart: _Optional[bool] = ..., epoch: _Optional[int] = ..., added: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("worker_id", "version", "model_name", "facts", "fingerprint", "max_context_tokens", "page_tokens", "role", "reads_memory")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    READS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    version: str
    model_name: str
    facts: ModelFacts
    fingerprint: bytes
    max_context_tokens: int
    page_tokens: int
    role: WorkerRole
    reads_memory: bool
    def __init__(self, worker_id: _Optional[str] = ..., version: _Optional[str] = ..., model_name: _Optional[str] = ..., facts: _Optional[_Union[ModelFacts, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., max_context_tokens: _Optional[int] = ..., page_tokens: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., reads_memory: _Optional[bool] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("model_type", "vocab_size", "image_token_id", "video_token_id", "eos_token_id", "patch_size", "temporal_patch_size", "merge_size", "max_position_embeddings")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    VIDEO_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    TEMPORAL_PATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MERGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    vocab_size: int
    image_token_id: int
    video_token_id: int
    eos_token_id: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    max_position_embeddings: int
    def __init__(self, model_type: _Optional[str] = ..., vocab_size: _Optional[int] = ..., image_token_id: _Optional[int] = ..., video_token_id: _Optional[int] = ..., eos_token_id: _Optional[int] = ..., patch_size: _Optional[int] = ..., temporal_patch_size: _Optional[int] = ..., merge_size: _Optional[int] = ..., max_position_embeddings: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "waiting_prompt_tokens", "used_pages", "total_pages", "steps", "prompt_tokens_per_s")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    used_pages: int
    total_pages: int
    steps: int
    prompt_tokens_per_s: float
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., used_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_pages",)
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "outcome", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "entries")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    entries: _containers.RepeatedCompositeFieldContainer[AccountEntry]
    def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[AccountEntry, _Mapping]]] = ...) -> None: ...

class AccountEntry(_message.Message):
    __slots__ = ("phase", "start_ms", "duration_ms", "steps", "steps_ms", "tokens", "batch_tokens", "mixed_steps", "mixed_ms", "note")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEPS_FIELD_NUMBER: _ClassVar[int]
    MIXED_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    start_ms: float
    duration_ms: float
    steps: int
    steps_ms: float
    tokens: int
    batch_tokens: int
    mixed_steps: int
    mixed_ms: float
    note: str
    def __init__(self, phase: _Optional[str] = ..., start_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., steps: _Optional[int] = ..., steps_ms: _Optional[float] = ..., tokens: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., mixed_steps: _Optional[int] = ..., mixed_ms: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("kind", "layout", "epoch", "keys")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: ContentKind
    layout: str
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[_Union[ContentKind, str]] = ..., layout: _Optional[str] = ..., epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("holdings", "piece", "busy")
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    holdings: Holdings
    piece: Piece
    busy: Busy
    def __init__(self, holdings: _Optional[_Union[Holdings, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Holdings(_message.Message):
    __slots__ = ("epoch", "indices")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("index", "offset", "data", "total_bytes", "sha256")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset: int
    data: bytes
    total_bytes: int
    sha256: bytes
    def __init__(self, index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...
