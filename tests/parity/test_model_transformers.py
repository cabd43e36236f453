"""The worker's model against transformers 5.24 on checkpoints of random shapes and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from m3stack.kernels.interface import Kernels
from m3stack.kernels.msa.reference import block_scores, row_positions
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.model import M3Model
from tests.parity import golden
from tests.worker import support
from tests.worker.models.minimax_m3.random_checkpoint import (
    random_config,
    random_tensors,
    write_checkpoint,
)

LOGITS = 5e-5
FEATURES = 2e-5
# closer scores could be ranked either way by two right implementations
SMALLEST_MARGIN = 2e-6


@dataclass(slots=True)
class Margin:
    """Smallest gap seen between a kept and a dropped block or expert."""

    smallest: float = float("inf")

    def note(self, scores: Tensor, kept: Tensor) -> None:
        worst_kept = scores.masked_fill(~kept, float("inf")).amin(-1)
        best_dropped = scores.masked_fill(kept, float("-inf")).amax(-1)
        self.smallest = min(self.smallest, (worst_kept - best_dropped).min().item())


def measuring(kernels: Kernels, margin: Margin) -> Kernels:
    """The same kernels, which also note how close their choices were."""

    def choose_blocks(index_q, index_k, rows, num_blocks, num_local):
        blocks = kernels.choose_blocks(index_q, index_k, rows, num_blocks, num_local)
        scores = block_scores(index_q, index_k, rows)
        ids = torch.arange(scores.shape[-1])
        own = row_positions(rows, len(index_q), scores.device)[:, None] // index_k.shape[1]
        kept = (blocks[..., None, :] == ids[:, None]).any(-1)
        scores = scores.masked_fill((ids > own - num_local) & (ids <= own), float("inf"))
        margin.note(scores.masked_fill(ids > own, -1e9), kept)
        return blocks

    def route_tokens(x, router, bias, top_k):
        ids, weights = kernels.route_tokens(x, router, bias, top_k)
        biased = (x @ router.T).sigmoid() + bias
        kept = torch.zeros_like(biased, dtype=torch.bool).scatter(1, ids.long(), True)
        margin.note(biased, kept)
        return ids, weights

    return replace(kernels, choose_blocks=choose_blocks, route_tokens=route_tokens)


@dataclass(frozen=True, slots=True)
class Pair:
    """Our model and theirs of one random checkpoint."""

    ours: M3Model
    theirs: torch.nn.Module
    margin: Margin


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module", params=range(6))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = random_config(request.param)
    directory: Path = tmp_path_factory.mktemp("random") / "m3"
    write_checkpoint(directory, config, random_tensors(config, request.param))
    margin = Margin()
    ours = support.load(directory, kernels=measuring(reference_kernels(), margin))
    theirs = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    return Pair(ours, theirs.eval(), margin)


def random_ids(count: int, seed: int) -> Tensor:
    # ids from 290 on have a meaning
    return torch.randint(0, 290, (count,), generator=torch.Generator().manual_seed(seed))


def random_pixels(grids: list[golden.Grid], frames: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(grids))
    return [
        torch.randint(0, 256, (t * h * w, 3 * frames * 196), generator=generator).to(torch.uint8)
        for t, h, w in grids
    ]


def normalised(rows: Tensor) -> Tensor:
    """What a processor hands the reference: fp32 [n, 1176]; a still's frame stands twice."""
    pixels = rows.float().view(len(rows), 3, -1, 196)
    pixels = pixels.expand(-1, -1, 2, -1)
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (golden.MEAN, golden.STD))
    return ((pixels - 255 * mean) / (255 * std)).flatten(1)


def assert_close(ours: Tensor, theirs: Tensor, limit: float) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= limit


def test_text_in_chunks_equals_transformers(pair: Pair) -> None:
    ids = random_ids(311, seed=1)
    with torch.inference_mode():
        theirs = pair.theirs(input_ids=ids[None]).logits[0]
    logits = support.PagedRunner(pair.ours).feed(support.Track(), ids.tolist(), 97)
    assert pair.margin.smallest > SMALLEST_MARGIN, "draw another seed: a choice is a near tie"
    assert_close(logits, theirs, LOGITS)


def test_greedy_decode_equals_transformers_cached_decode(pair: Pair) -> None:
    prompt = random_ids(150, seed=2)
    cache, given, expected = None, prompt[None], []
    with torch.inference_mode():
        for _ in range(12):
            output = pair.theirs(input_ids=given, cache=cache, use_cache=True)
            cache = output.cache
            given = output.logits[:, -1:].argmax(-1)
            expected.append(int(given))
    runner, track = support.PagedRunner(pair.ours), support.Track()
    tokens = [int(runner.feed(track, prompt.tolist())[-1].argmax())]
    while len(tokens) < 12:
        tokens.append(int(runner.feed(track, tokens[-1:])[-1].argmax()))
    assert tokens == expected


def test_pictures_in_a_prompt_equal_transformers(pair: Pair) -> None:
    grids = [(1, 4, 6), (1, 6, 2)]
    rows = random_pixels(grids, frames=1)
    pieces = [random_ids(40, 3), torch.full((6,), 298), random_ids(9, 4), torch.full((3,), 298)]
    ids = torch.cat([*pieces, random_ids(60, 5)])
    pixel_values = torch.cat([normalised(item) for item in rows])
    with torch.inference_mode():
        theirs = pair.theirs(
            input_ids=ids[None], pixel_values=pixel_values, image_grid_thw=torch.tensor(grids)
        )
        expected = pair.theirs.model.get_image_features(pixel_values, torch.tensor(grids))
        features = pair.ours.encode_media(golden.patch_batch(rows, [1, 1], grids))
    assert_close(torch.cat(features), torch.cat(expected.pooler_output), FEATURES)
    track = support.Track(
        media_positions_N=(ids == 298).nonzero()[:, 0], media_features_NM=torch.cat(features)
    )
    logits = support.PagedRunner(pair.ours).feed(track, ids.tolist(), 43)
    assert_close(logits, theirs.logits[0], LOGITS)


def test_a_clip_in_a_prompt_equals_transformers(pair: Pair) -> None:
    grid, longest = (7, 4, 4), pair.ours.config.vision.segment_max_patches
    # transformers wants one grid row a segment
    segments = [[min(longest, 7 - start), 4, 4] for start in range(0, 7, longest)]
    (rows,) = random_pixels([grid], frames=2)
    spans = [part for i in range(7) for part in (random_ids(5, 10 + i), torch.full((4,), 299))]
    ids = torch.cat([*spans, random_ids(30, 20)])
    with torch.inference_mode():
        theirs = pair.theirs(
            input_ids=ids[None],
            pixel_values_videos=normalised(rows),
            video_grid_thw=torch.tensor(segments),
        )
        (features,) = pair.ours.encode_media(golden.patch_batch([rows], [2], [grid]))
    track = support.Track(
        media_positions_N=(ids == 299).nonzero()[:, 0], media_features_NM=features
    )
    logits = support.PagedRunner(pair.ours).feed(track, ids.tolist(), 50)
    assert_close(logits, theirs.logits[0], LOGITS)


def test_gradients_equal_those_of_transformers(pair: Pair) -> None:
    ids, config = random_ids(120, seed=6), pair.ours.config
    last = config.num_layers - 1
    theirs = pair.theirs.model.language_model
    expected_of = {
        "embedding": theirs.embed_tokens.weight,
        "layers.0.attention.out_proj.weight": theirs.layers[0].self_attn.o_proj.weight,
        f"layers.{last}.attention.q_norm": theirs.layers[last].self_attn.q_norm.weight,
        f"layers.{last}.feed_forward.gate_up": theirs.layers[last].mlp.experts.gate_up_proj,
    }
    if config.num_experts_per_token > 1:
        # a single chosen expert has weight 1 whatever its score
        name = f"layers.{last}.feed_forward.router"
        expected_of[name] = theirs.layers[last].mlp.gate.weight
    ours = dict(pair.ours.named_parameters())
    runner = support.PagedRunner(pair.ours)
    # a masked key takes no part, but its gradient is a product with it: zero times NaN is NaN
    cache = support.make_cache(pair.ours, num_pages=64, fill=0.0)
    try:
        pair.ours.requires_grad_(True)
        batch = runner.batch([(support.Track(), ids.tolist())])
        pair.ours(batch, cache).square().mean().backward()
        pair.theirs(input_ids=ids[None]).logits[0].square().mean().backward()
        for name, parameter in expected_of.items():
            # sums over 120 tokens in another order; the largest entries are about 0.1
            assert_close(ours[name].grad, parameter.grad, 2e-5)
            assert parameter.grad.abs().max() > 1e-3
    finally:
        pair.ours.requires_grad_(False)
        pair.ours.zero_grad(set_to_none=True)
        pair.theirs.zero_grad(set_to_none=True)
