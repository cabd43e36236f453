"""Builds what a worker runs from its configuration: model, cache, engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from m3stack.cache.host import HostTier
from m3stack.cache.host_pool import HostPool
from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool
from m3stack.cache.prefix import PrefixCache
from m3stack.config import WorkerConfig
from m3stack.contents import Contents, RankParts, contents_of, follower_port
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.constraints import ConstraintBook
from m3stack.engine.encoder import Encoder, FeatureBook, FollowerBook
from m3stack.engine.engine import EngineParts, EngineSettings
from m3stack.engine.grammar import GrammarCompiler, Vocabulary
from m3stack.engine.graphs import DecodeGraphs
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.leader import AheadLeader, FollowerRunner, GroupPeers
from m3stack.engine.runner import NO_PEERS, AheadRunner, Forward, ModelRunner, Peers, Runner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler
from m3stack.errors import LoadingStoppedError, StartupError
from m3stack.gpu_steps import (
    bytes_of_steps,
    bytes_scarcest,
    device_counts,
    forward_of,
    pace_of,
    run_ahead,
)
from m3stack.group import RankGroup
from m3stack.hardware import Hardware, choose_hardware
from m3stack.local_ranks import Joined, Setup
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.slices import rank_slices
from m3stack.parallel import ALONE, LeadersWord, Mesh, ProcessMesh
from m3stack.pools import (
    build_host_pool,
    build_pool,
    check_hot_pages,
    context_within,
    page_shape,
)
from m3stack.rank_model import Progress, load_rank, place_of
from m3stack.rpc.checks import ModelLimits
from m3stack.step_limits import overlaps_steps, scheduler_limits
from m3stack.telemetry import WorkerMetrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What exists before the model does.

    Attributes:
        progress: called with bytes loaded and bytes in all; may raise to end the loading.
        check: called while there is nothing to load yet; may raise likewise.
        on_loss: told, on any thread, of a rank or host that is lost before loading has ended.
    """

    media: MediaLedger
    metrics: WorkerMetrics
    progress: Progress
    check: Callable[[], None] = lambda: None
    on_loss: Callable[[Exception], None] = lambda error: None


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded worker, ready for an engine thread.

    Attributes:
        limits: what requests must agree with.
        constraints: compiles and follows output constraints; whoever takes the assembly closes it.
        contents: what other workers may fetch of it; None: nothing.
        group: the other ranks of a tensor-parallel worker; whoever takes the assembly stops it.
    """

    parts: EngineParts
    settings: EngineSettings
    limits: ModelLimits
    constraints: ConstraintBook
    contents: Contents | None = None
    group: RankGroup | None = None


def assemble(
    config: WorkerConfig, model_config: M3Config, hardware: Hardware, around: Surroundings
) -> Assembly:
    """Loads the model and builds everything around it; takes as long as loading does.

    Raises:
        StartupError: checkpoint, kernels or memory do not allow it.
    """
    group = None
    if config.tensor_parallel > 1:
        # refuses sizes that do not divide, before anything is started
        rank_slices(model_config, place_of(config, 0))
        group = RankGroup(config, build_follower, check=around.check, on_loss=around.on_loss)
    try:
        return _assemble_leader(config, Ground(model_config, hardware, group), around)
    except BaseException as error:
        if group is not None:
            # a stop that was asked for is no failure of the others
            is_asked_for = isinstance(error, LoadingStoppedError | KeyboardInterrupt)
            group.stop("" if is_asked_for else str(error) or type(error).__name__)
        raise


def build_follower(
    config: WorkerConfig, joined: Joined, receive_setup: Callable[[], Setup]
) -> Runner:
    """The runner of a rank that follows; see `group.BuildFollower`."""
    mesh = ProcessMesh(joined.tensors)
    hardware = choose_hardware(config, mesh.rank)
    model_config = M3Config.from_dir(config.model_path)
    model = load_rank(config, model_config, hardware, mesh=mesh)
    word = LeadersWord(joined.control)
    word.await_all()
    limits = scheduler_limits(config, hardware.device.type)
    run_ahead(config, model, limits, mesh=mesh, agree=word.goes_on)
    bytes_scarcest(config, model, limits, mesh=mesh, least=word.least)
    setup = receive_setup()
    shape = page_shape(config, model_config, hardware, mesh.rank)
    pool = KvPool(shape, setup.num_pages, hardware.device)
    host_pool = HostPool(pool, setup.num_host_slots) if setup.num_host_slots else None
    book = FollowerBook()
    encoder = _encoder(model, book, hardware.device)
    peers = GroupPeers(joined.control)
    forward = forward_of(config, model, pool, agree=word.most)
    runner = _runner(model, pool, host_pool, encoder, forward=forward, sampler=None, peers=peers)
    rank = place_of(config, mesh.rank)
    own = RankParts(pool, encoder, rank, hardware.device)
    port = follower_port(model_config, own, mesh, book)
    return FollowerRunner(runner, book, port.obey, mesh=mesh, device=hardware.device)


@dataclass(frozen=True, slots=True)
class Ground:
    """What the leading rank builds on."""

    model_config: M3Config
    hardware: Hardware
    group: RankGroup | None


def _assemble_leader(config: WorkerConfig, ground: Ground, around: Surroundings) -> Assembly:
    model_config, hardware, group = ground.model_config, ground.hardware, ground.group
    mesh = ALONE if group is None else ProcessMesh(group.joined.tensors)
    model = load_rank(config, model_config, hardware, mesh=mesh, progress=around.progress)
    limits = scheduler_limits(config, hardware.device.type)
    reserved = _run_first_steps(config, model, limits, mesh=mesh, ground=ground, around=around)
    pool = build_pool(config, model_config, hardware, reserved_bytes=reserved)
    check_hot_pages(config, model_config, pool, limits)
    host_pool = build_host_pool(config, pool, hardware.device)
    context = context_within(config, model_config, pool)
    _log.info(
        "assembled device=%s dtype=%s ranks=%d pages=%d pool_bytes=%d max_context_tokens=%d",
        hardware.device,
        hardware.dtype,
        mesh.size,
        pool.num_pages,
        pool.num_bytes,
        context,
    )
    host = host_pool and HostTier(
        host_pool.num_slots, restore_cost_tokens=config.host_restore_cost_tokens
    )
    pages = PrefixCache(PageAllocator(pool.num_pages), enabled=config.prefix_cache, host=host)
    encoder = _encoder(model, around.media, hardware.device)
    vocabulary = Vocabulary(
        Path(config.model_path) / "tokenizer.json",
        model_config.vocab_size,
        model_config.eos_token_id,
    )
    constraints = ConstraintBook(GrammarCompiler(vocabulary))
    sampler = Sampler(model_config.vocab_size, hardware.device, constraints)
    peers = NO_PEERS if group is None else GroupPeers(group.joined.control)
    agree = None if group is None else LeadersWord(group.joined.control).most
    forward = forward_of(config, model, pool, agree=agree)
    if group is not None and isinstance(forward, DecodeGraphs):
        group.release_first(forward.release)
    around.metrics.watch_device(device_counts(model, pool, forward))
    whole = _runner(model, pool, host_pool, encoder, forward=forward, sampler=sampler, peers=peers)
    runner: AheadRunner = whole
    if group is not None:
        group.set_up(Setup(pool.num_pages, host_pool.num_slots if host_pool else 0))
        runner = AheadLeader(
            whole, mesh, send=group.send, explain=group.lost, noticed=lambda: group.noticed
        )
    parts = EngineParts(
        scheduler=Scheduler(limits, pages, around.media, pace_of(config, hardware.device)),
        pages=pages,
        runner=runner,
        media=around.media,
        metrics=around.metrics,
        ahead=runner if overlaps_steps(config, hardware.device.type) else None,
    )
    settings = EngineSettings(
        page_tokens=model_config.block_tokens,
        max_context_tokens=context,
        eos_token_id=model_config.eos_token_id,
        segment_patches=model_config.vision.segment_max_patches,
        page_bytes=pool.shape.bytes_per_page,
    )
    request_limits = model_limits(model_config, context, hardware.dtype)
    contents = contents_of(
        config,
        model_config,
        RankParts(pool, encoder, place_of(config, 0), hardware.device),
        mesh=mesh,
        send=None if group is None else group.send,
    )
    return Assembly(parts, settings, request_limits, constraints, contents, group)


def _run_first_steps(
    config: WorkerConfig,
    model: M3Model,
    limits: SchedulerLimits,
    *,
    mesh: Mesh,
    ground: Ground,
    around: Surroundings,
) -> int:
    """Every rank has loaded, has run what steps compile at first use, and the largest of them.

    Returns:
        Bytes of this rank's free memory that pages must leave, so that no rank has too little.
    """
    around.check()
    group = ground.group
    if group is None:
        run_ahead(config, model, limits, check=around.check)
        return bytes_of_steps(config, model, limits)
    word = LeadersWord(group.joined.control)
    try:
        word.await_all()
        run_ahead(config, model, limits, mesh=mesh, agree=word.goes_on, check=around.check)
        return bytes_scarcest(config, model, limits, mesh=mesh, least=word.least)
    except (LoadingStoppedError, StartupError):
        raise
    except Exception as error:
        reason = group.lost() or f"the ranks could not run a first step: {error}"
        raise StartupError(f"{reason}; see its messages above") from error


def model_limits(model: M3Config, max_context_tokens: int, dtype: torch.dtype) -> ModelLimits:
    """What a request for this model must agree with."""
    return ModelLimits(
        fingerprint=model.facts().fingerprint(),
        vocab_size=model.vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_id=model.eos_token_id,
        image_token_id=model.image_token_id,
        video_token_id=model.video_token_id,
        channels=model.vision.num_channels,
        patch_size=model.vision.patch_size,
        temporal_patch_size=model.vision.temporal_patch_size,
        merge_size=model.vision.merge_size,
        feature_bytes_per_token=model.hidden_size * dtype.itemsize,
    )


def _encoder(model: M3Model, book: FeatureBook, device: torch.device) -> Encoder:
    segment_patches = model.config.vision.segment_max_patches
    return Encoder(model.encode_media, book, device, segment_patches=segment_patches)


def _runner(
    model: M3Model,
    pool: KvPool,
    host_pool: HostPool | None,
    encoder: Encoder,
    *,
    forward: Forward,
    sampler: Sampler | None,
    peers: Peers,
) -> ModelRunner:
    return ModelRunner(
        forward,
        pool.layers,
        encoder=encoder,
        inputs=InputBuilder(model.config.block_tokens, pool.layers[0].k_PGBD.device),
        sampler=sampler,
        copy_page=host_pool.copy if host_pool is not None else None,
        peers=peers,
    )
