"""What settings must be to each other, and what the surroundings say of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from m3stack.errors import StartupError

if TYPE_CHECKING:
    from m3stack.config import WorkerConfig

# where a leader is joined, unless `leader_address` says otherwise
JOIN_PORT = 50052


def check_together(config: WorkerConfig) -> None:
    """Refuses settings that do not go together.

    Raises:
        StartupError: names the first ones that do not.
    """
    if config.hot_pages and (config.tensor_parallel > 1 or config.host_cache_bytes > 0):
        raise StartupError(
            f"hot_pages is {config.hot_pages}, which goes neither with tensor_parallel "
            f"{config.tensor_parallel} nor with host_cache_bytes {config.host_cache_bytes}"
        )
    if config.role in ("prefill", "decode") and not config.prefix_cache:
        raise StartupError(
            f"role is {config.role}, which works through the prefix cache; prefix_cache is off"
        )
    if config.role != "all" and config.hot_pages:
        raise StartupError(
            f"hot_pages is {config.hot_pages}, which does not go with role {config.role}"
        )
    ranks = config.tensor_parallel
    if config.role == "encode" and config.random_weights:
        raise StartupError("random_weights is on, but role encode is of use with real ones only")
    if config.role == "encode" and ranks > 1:
        raise StartupError(
            f"tensor_parallel is {ranks}, but the vision tower is not split: run that many workers "
            "of role encode instead"
        )
    if ranks % config.expert_parallel:
        raise StartupError(
            f"expert_parallel is {config.expert_parallel}, expected a divisor of tensor_parallel "
            f"({ranks})"
        )
    if config.shard_index_keys and config.index_copy != "none":
        raise StartupError(
            f"index_copy is {config.index_copy}, but index keys that ranks hold in parts "
            "(shard_index_keys) have no copy; unset one of the two"
        )
    if config.shard_index_keys and ranks == 1:
        raise StartupError("shard_index_keys needs tensor_parallel of at least 2, it is 1")
    for name in ("max_batch_tokens", "max_mixed_tokens"):
        value = getattr(config, name)
        if value and value <= config.max_sequences:
            raise StartupError(
                f"{name} is {value}, expected more than max_sequences "
                f"({config.max_sequences}), so that prompts advance beside running requests"
            )
    _check_hosts(config)


def _check_hosts(config: WorkerConfig) -> None:
    hosts, ranks = config.hosts, config.tensor_parallel
    if config.host_index >= hosts:
        raise StartupError(
            f"host_index is {config.host_index}, expected less than hosts, which is {hosts}"
        )
    if hosts == 1:
        return
    if ranks % hosts:
        raise StartupError(
            f"tensor_parallel is {ranks}, expected a multiple of hosts, which is {hosts}"
        )
    if not config.leader_address or config.leader_address.endswith(":0"):
        raise StartupError(
            f"leader_address is {config.leader_address!r}, but hosts is {hosts}: the others join "
            "host 0 there; expected host:port"
        )


def place_told_by_controller(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    """What the controller of a LeaderWorkerSet says of a pod's place in its group, by setting.

    Source: LeaderWorkerSet v0.6, which sets these in every container of a group.
    """
    names = {"hosts": "LWS_GROUP_SIZE", "host_index": "LWS_WORKER_INDEX"}
    told: dict[str, tuple[object, str]] = {
        setting: (environ[name], f"environment {name}")
        for setting, name in names.items()
        if name in environ
    }
    leader = environ.get("LWS_LEADER_ADDRESS")
    if leader:
        told["leader_address"] = (f"{leader}:{JOIN_PORT}", "environment LWS_LEADER_ADDRESS")
    return told
