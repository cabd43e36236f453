"""Builds a worker of role encode: the engine as ever, over a model without text layers.

Prompts run through it in no time, since pages have no bytes and logits say nothing; what is left
of a request is its media, with all the planning, bounds and reports that they have anywhere.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from m3stack.assemble import Assembly, Surroundings, model_limits
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.config import WorkerConfig
from m3stack.contents import RankParts, contents_of
from m3stack.engine.constraints import ConstraintBook
from m3stack.engine.encoder import Encoder
from m3stack.engine.engine import EngineParts, EngineSettings
from m3stack.engine.grammar import GrammarCompiler, Vocabulary
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.runner import ModelRunner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler
from m3stack.hardware import Hardware
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.vision_only import load_vision
from m3stack.pools import context_limit
from m3stack.rank_model import choose_kernels, place_of, use_threads
from m3stack.step_limits import scheduler_limits

_log = logging.getLogger(__name__)


def assemble_encoder(
    config: WorkerConfig, model_config: M3Config, hardware: Hardware, around: Surroundings
) -> Assembly:
    """Loads the vision tower and builds everything around it.

    Raises:
        StartupError: checkpoint, kernels or memory do not allow it.
    """
    device = hardware.device
    model = load_vision(
        config.model_path,
        config=model_config,
        kernels=choose_kernels(config.kernels, model_config, hardware),
        place=Place(device, hardware.dtype),
        progress=around.progress,
    )
    if device.type == "cpu":
        use_threads(config, model)
    context = context_limit(config, model_config)
    num_pages = _num_pages(config, context, model_config.block_tokens)
    pool = KvPool(_no_layers(model_config, hardware.dtype), num_pages, device)
    _log.info("assembled role=encode device=%s dtype=%s", device, hardware.dtype)
    # a page here says nothing of the features behind it: none may stand for another
    pages = PrefixCache(PageAllocator(pool.num_pages), enabled=False)
    encoder = Encoder(
        model.encode_media,
        around.media,
        device,
        segment_patches=model_config.vision.segment_max_patches,
    )
    vocabulary = Vocabulary(
        Path(config.model_path) / "tokenizer.json",
        model_config.vocab_size,
        model_config.eos_token_id,
    )
    constraints = ConstraintBook(GrammarCompiler(vocabulary))
    runner = ModelRunner(
        model.forward,
        pool.layers,
        encoder=encoder,
        inputs=InputBuilder(model_config.block_tokens, device),
        sampler=Sampler(model_config.vocab_size, device, constraints),
    )
    parts = EngineParts(
        scheduler=Scheduler(scheduler_limits(config, device.type), pages, around.media),
        pages=pages,
        runner=runner,
        media=around.media,
        metrics=around.metrics,
    )
    settings = EngineSettings(
        page_tokens=model_config.block_tokens,
        max_context_tokens=context,
        eos_token_id=model_config.eos_token_id,
        segment_patches=model_config.vision.segment_max_patches,
    )
    contents = contents_of(
        config, model_config, RankParts(pool, encoder, place_of(config, 0), device)
    )
    limits = model_limits(model_config, context, hardware.dtype)
    return Assembly(parts, settings, limits, constraints, contents)


def _num_pages(config: WorkerConfig, context: int, block_tokens: int) -> int:
    # they are numbers and no more
    return config.num_pages or config.max_sequences * -(-context // block_tokens)


def _no_layers(model: M3Config, dtype: torch.dtype) -> PageShape:
    return PageShape(
        (), model.num_kv_heads, model.head_dim, model.index_dim, model.block_tokens, dtype
    )
