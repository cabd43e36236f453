"""Worker settings: file, environment and flags resolved once into a frozen `WorkerConfig`.

Precedence: flag, then environment `M3STACK_WORKER_<NAME>`, then file, then default. Unknown names
are refused wherever they stand. `flags` hands over the command line and the environment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from m3stack.errors import StartupError
from m3stack.setting_checks import (
    address,
    address_or_none,
    address_or_off,
    anything,
    at_least,
    device,
    drain,
    first_steps,
    fraction,
    one_of,
    seconds,
    slowdown,
    sources,
)
from m3stack.setting_relations import check_together, place_told_by_controller

ENV_PREFIX = "M3STACK_WORKER_"
BUILTIN_CHECKPOINT = Path(__file__).parent / "checkpoints" / "tiny"
LOG_LEVELS = ("debug", "info", "warn", "warning", "error")
DTYPES = ("auto", "float32", "bfloat16")
INDEX_COPIES = ("none", "int8")
KV_DTYPES = ("auto", "fp8")
ROLES = ("all", "encode", "prefill", "decode")


def _setting(default: Any, help_text: str, check: Callable[[Any], str | None]) -> Any:
    """A field with its default, what a person is told about it, and its check.

    `check` gives what is expected instead, or None if the value is good.
    """
    return field(default=default, metadata={"help": help_text, "check": check})


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker can be told. Zero means "derive it" where the help says so."""

    model_path: str = _setting(
        str(BUILTIN_CHECKPOINT),
        "directory of a checkpoint in the released layout",
        anything,
    )
    served_model_name: str = _setting(
        "", "name the model is served under; default: the directory's name", anything
    )
    max_context_tokens: int = _setting(
        0,
        "most tokens of prompt and output together; 0: what the model supports",
        at_least(0),
    )
    log_level: str = _setting("info", "debug, info, warn or error", one_of(LOG_LEVELS))
    listen: str = _setting("127.0.0.1:50051", "gRPC address; port 0 picks a free one", address)
    role: str = _setting(
        "all",
        "all; or one part of the work, for fleets that divide it: encode (media only, no text "
        "model), prefill (prompts, for others to fetch), decode (answers, from prompts it fetches)",
        one_of(ROLES),
    )
    tls_dir: str = _setting(
        "",
        "serve gRPC by TLS with tls.crt and tls.key of this directory; ca.crt there: only to "
        "clients with a certificate it has signed",
        anything,
    )
    allowed_sources: str = _setting(
        "",
        "where other workers may be that requests tell this one to fetch from: names, *.suffixes, "
        "addresses and networks, separated by commas; empty: anywhere",
        sources,
    )
    metrics_listen: str = _setting(
        "off", "address that serves Prometheus metrics, or off", address_or_off
    )
    vllm_metrics: bool = _setting(
        False, "show the names of vLLM's metrics beside our own", anything
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N", device)
    dtype: str = _setting(
        "auto",
        "auto (float32 on a CPU, bfloat16 on a GPU), float32 or bfloat16",
        one_of(DTYPES),
    )
    kernels: str = _setting("auto", "kernel back end; auto picks by device", anything)
    mxfp8_weights: str = _setting(
        "auto",
        "what becomes of a checkpoint's MXFP8 weights: keep (half the memory, decoded inside the "
        "kernels), decode (to dtype, at load); auto: kept on a GPU in bfloat16, where all text "
        "linears are MXFP8",
        one_of(("auto", "keep", "decode")),
    )
    random_weights: bool = _setting(
        False,
        "draw weights on the device instead of reading any: for measuring speed, answers are noise",
        anything,
    )
    tensor_parallel: int = _setting(
        1, "ranks that share the model, each a process and, on GPUs, a GPU", at_least(1)
    )
    hosts: int = _setting(
        1,
        "machines that the ranks are spread over, equally many on each; the controller of a "
        "LeaderWorkerSet tells it (LWS_GROUP_SIZE)",
        at_least(1),
    )
    host_index: int = _setting(
        0,
        "which of the machines this is; 0 leads and answers requests, the others follow "
        "(LWS_WORKER_INDEX)",
        at_least(0),
    )
    leader_address: str = _setting(
        "",
        "host:port on which machine 0 is joined by the others (LWS_LEADER_ADDRESS, port 50052)",
        address_or_none,
    )
    host_key_file: str = _setting(
        "",
        "file with a secret that all machines of a worker hold; empty: whoever reaches "
        "leader_address may join",
        anything,
    )
    host_silence_s: float = _setting(
        20.0, "seconds without a sign after which another machine counts as lost", seconds
    )
    expert_parallel: int = _setting(
        1,
        "groups of ranks that routed experts are dealt out to, a divisor of tensor_parallel; the "
        "ranks of a group split its experts by width",
        at_least(1),
    )
    shard_index_keys: bool = _setting(
        False,
        "every rank keeps the index keys of its share of the pages, and ranks choose blocks "
        "together: more cache and faster decoding of long contexts, one exchange a layer",
        anything,
    )
    kv_dtype: str = _setting(
        "auto",
        "auto: cache in dtype; fp8: K and V of the sparse layers in e4m3, half the bytes, scaled "
        "by head so that none is cut off, answers not quite the same",
        one_of(KV_DTYPES),
    )
    index_copy: str = _setting(
        "none",
        "int8: a one-byte copy of the index keys, 6% more cache, that nearly halves what decoding "
        "of long contexts reads on Hopper; the blocks chosen stay the same; none: no copy",
        one_of(INDEX_COPIES),
    )
    kv_memory_fraction: float = _setting(
        0.9, "share of the memory left after loading that cache pages may take", fraction
    )
    num_pages: int = _setting(0, "cache pages; 0: from kv_memory_fraction", at_least(0))
    hot_pages: int = _setting(
        0,
        "cache pages whose keys and values stay on the GPU; sparse layers fetch those of others "
        "from host memory when they choose them; 0: all stay",
        at_least(0),
    )
    host_cache_bytes: int = _setting(
        -1,
        "host memory for cache pages the device has no room for; 0: none; -1: none on a CPU, "
        "8 GiB (a quarter of what is free at most) on a GPU",
        at_least(-1),
    )
    host_restore_cost_tokens: int = _setting(
        16,
        "prompt tokens computed in the time a page takes to come back from host memory; shorter "
        "pages are computed again",
        at_least(0),
    )
    prefix_cache: bool = _setting(True, "keep computed pages for later requests", anything)
    max_batch_tokens: int = _setting(
        0, "tokens of a step; 0: 512 on a CPU, 8192 on a GPU", at_least(0)
    )
    max_mixed_tokens: int = _setting(
        0,
        "tokens of a step in which requests wait for their next token; smaller: shorter waits, "
        "slower prompts; 0: a quarter of max_batch_tokens on a GPU, all of it on a CPU",
        at_least(0),
    )
    mixed_step_slowdown: float = _setting(
        -1.0,
        "in time, what max_mixed_tokens is in tokens: a step with prompts takes about that many "
        "times one without, or longer where prompts would get less than 36% of it; learnt as steps "
        "run; 0: no such bound; -1: 2.1 on a GPU, 0 on a CPU",
        slowdown,
    )
    chunk_growth_prefix_tokens: int = _setting(
        131072,
        "while nobody waits for a token, a prompt's steps double once that many of its tokens are "
        "computed; 0: never",
        at_least(0),
    )
    step_overlap: str = _setting(
        "auto",
        "on: a step is queued before the last one has ended; off; auto: on a GPU",
        one_of(("auto", "on", "off")),
    )
    decode_graph_bytes: int = _setting(
        -1,
        "memory of every GPU that recorded decode steps (CUDA graphs) may take; -1: 2 GiB; 0: none",
        at_least(-1),
    )
    first_steps_s: float = _setting(
        -1.0,
        "seconds that a worker may spend, before it is ready, on steps of all sizes, so that no "
        "request waits for a kernel to be compiled; far less where kernels were compiled before; "
        "0: none; -1: 120 on a GPU, 0 on a CPU",
        first_steps,
    )
    max_sequences: int = _setting(64, "requests that run at once", at_least(1))
    max_sequences_per_tenant: int = _setting(
        0, "requests of one tenant that run at once; 0: no limit", at_least(0)
    )
    max_waiting_requests: int = _setting(
        1024, "requests that may queue; more are refused as overload", at_least(1)
    )
    max_encode_patches: int = _setting(
        16384, "vision patches of a step; a larger item runs alone", at_least(1)
    )
    vision_cache_bytes: int = _setting(
        1 << 30,
        "bytes of media features held, those of running requests included",
        at_least(1),
    )
    max_upload_bytes: int = _setting(
        2 << 30, "bytes of media patches received and not yet encoded", at_least(1)
    )
    upload_timeout_s: float = _setting(
        60.0, "seconds without progress after which an upload is given up", seconds
    )
    drain_s: float = _setting(
        30.0, "seconds that running requests get to finish after SIGTERM", drain
    )
    stuck_step_s: float = _setting(
        120.0, "seconds after which a step in progress makes the worker unhealthy", seconds
    )
    cpu_threads: int = _setting(
        0,
        "threads of CPU kernels; 0: one for a model this small, else all cores",
        at_least(0),
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model_path).resolve().name


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What a command line needs to offer a setting as a flag."""

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: str | int | float | bool
    help: str


# names that the file's [shared] table holds; the gateway reads the same ones
SHARED_NAMES = ("model_path", "served_model_name", "max_context_tokens", "log_level")
_TYPES: dict[str, type[str] | type[int] | type[float] | type[bool]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
}


def setting_specs() -> tuple[SettingSpec, ...]:
    """All settings, in the order of `WorkerConfig`."""
    specs: list[SettingSpec] = []
    for item in fields(WorkerConfig):
        assert item.default is not MISSING
        kind = _TYPES[str(item.type)]
        specs.append(SettingSpec(item.name, kind, item.default, item.metadata["help"]))
    return tuple(specs)


def resolve(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
) -> WorkerConfig:
    """The one configuration of a worker.

    Args:
        flags: settings given on the command line, by name; None means not given.
        environ: environment; of names without the prefix, only `LWS_*` are looked at.
        file: TOML with `[shared]` and `[worker]`; a `[gateway]` table is the gateway's business.

    Raises:
        StartupError: names every setting that is unknown or has a bad value, and where it stands.
    """
    specs = {spec.name: spec for spec in setting_specs()}
    given: dict[str, tuple[object, str]] = dict(place_told_by_controller(environ))
    given |= _from_file(file) if file is not None else {}
    given |= {
        name.removeprefix(ENV_PREFIX).lower(): (text, f"environment {name}")
        for name, text in environ.items()
        if name.startswith(ENV_PREFIX)
    }
    given |= {
        name: (value, f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value is not None
    }
    complaints: list[str] = []
    values: dict[str, Any] = {}
    for name, (raw, source) in given.items():
        try:
            values[name] = _value(specs, name, raw)
        except ValueError as error:
            complaints.append(f"{source}: {error}")
    if complaints:
        raise StartupError("\n".join(complaints))
    config = WorkerConfig(**values)
    check_together(config)
    return config


def _from_file(file: Path) -> dict[str, tuple[object, str]]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartupError(f"configuration file {file} cannot be read: {error}") from error
    names = {spec.name for spec in setting_specs()}
    given: dict[str, tuple[object, str]] = {}
    for table, content in document.items():
        if table == "gateway":
            continue
        if table not in ("shared", "worker") or not isinstance(content, dict):
            raise StartupError(f"{file}: unknown {table}; expected [shared], [gateway], [worker]")
        settings = cast(dict[str, object], content)
        for name, value in settings.items():
            if name in names and (name in SHARED_NAMES) != (table == "shared"):
                place = "shared" if name in SHARED_NAMES else "worker"
                raise StartupError(f"{file}: [{table}] {name} belongs in [{place}]")
            given[name] = (value, f"{file} [{table}]")
    return given


def _value(specs: Mapping[str, SettingSpec], name: str, raw: object) -> object:
    """The checked value of a setting; raises ValueError."""
    if name not in specs:
        raise ValueError(f"unknown setting {name}")
    value = _typed(specs[name], raw)
    check = next(item for item in fields(WorkerConfig) if item.name == name).metadata["check"]
    expected = check(value)
    if expected is not None:
        raise ValueError(f"{name} is {raw!r}, expected {expected}")
    return value


def _typed(spec: SettingSpec, raw: object) -> object:
    refusal = ValueError(f"{spec.name} is {raw!r}, expected {_article(spec.type)}")
    if isinstance(raw, str) and spec.type is not str:
        words = {"true": True, "false": False, "1": True, "0": False}
        try:
            raw = words[raw.lower()] if spec.type is bool else spec.type(raw.replace("_", ""))
        except (KeyError, ValueError):
            raise refusal from None
    if spec.type is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    # True is an int to Python, but not to a person
    if not isinstance(raw, spec.type) or isinstance(raw, bool) != (spec.type is bool):
        raise refusal
    return raw


def _article(kind: type) -> str:
    return {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[kind]
