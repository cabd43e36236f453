"""`m3stack bench layers`: where a step's time goes, on a truncated model of the released widths.

One dense and four sparse layers with all 128 experts and random weights stand on one GPU. Decode
steps are CUDA graph replays, prefill steps run eagerly. The attention part of a sparse layer is
timed beside dense attention over the same pages, which is what sparsity is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.batch import DeviceBatch
from m3stack.bench.kernels.harness import Ceilings, measure_ceilings
from m3stack.bench.layers_floors import Part, Work, decode_work, prefill_work
from m3stack.bench.layers_report import write_report
from m3stack.bench.multi_gpu.shards import page_shape, random_pool
from m3stack.bench.multi_gpu.steps import Stopwatch, step
from m3stack.cache.pool import KvPool
from m3stack.kernels.interface import Kernels, LayerPages
from m3stack.kernels.select import build_kernels
from m3stack.layers import Place
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.attention import StepRows
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import DecoderLayer, M3Model
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.models.minimax_m3.ranks import WHOLE
from m3stack.rank_model import kernel_shape

FORMS = ("bf16", "mxfp8")
DECODE = ((1, 8192), (1, 131072), (1, 1048576), (8, 8192), (8, 131072), (64, 8192), (64, 131072))
CHUNK_TOKENS = 8192
PREFILL = (8192, 131072, 1048576)
SPARSE_LAYERS = 4
REPEATS = 3
# tokens the pool holds; sequences that need more read the same pages
POOL_TOKENS = 1 << 20
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One sparse layer in a step, and what the step costs beside its layers; microseconds.

    Attributes:
        context: tokens of each sequence, those of the step included.
        attention_us: norms of heads, cache write, block choice and attention over them.
        rest_us: norms, additions and what no part accounts for.
        dense_attention_us: attention over all keys, in the place of block choice and attention.
        dense_layer_us: the dense layer whole.
        ends_us: embedding, last norm and head.
        floors_us: by part, from this run's ceilings.
    """

    phase: str
    form: str
    batch: int
    context: int
    tokens: int
    layer_us: float
    attention_us: float
    moe_us: float
    projections_us: float
    rest_us: float
    dense_attention_us: float
    dense_layer_us: float
    ends_us: float
    floors_us: dict[str, float]


def truncated(config: M3Config, num_sparse: int) -> M3Config:
    """The same model with its first dense layer and `num_sparse` sparse ones."""
    return replace(
        config,
        num_layers=1 + num_sparse,
        sparse_layers=(False, *(True,) * num_sparse),
        moe_layers=(False, *(True,) * num_sparse),
        quantization=None,
    )


class LayerBench:
    """A truncated model with its pages, and the time of its parts."""

    def __init__(
        self, config: M3Config, form: str, device: torch.device, *, pool_tokens: int, kernels: str
    ) -> None:
        self.config, self._form, self._device = config, form, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = kernel_shape(config, dtype)
        self.kernels: Kernels = build_kernels(kernels, shape=shape, device=device)
        place = Place(device, dtype, keeps_mxfp8=form == "mxfp8")
        self._model: M3Model = random_model(config, kernels=self.kernels, place=place)
        num_pages = pool_tokens // config.block_tokens
        self._pool: KvPool = random_pool(page_shape(config, WHOLE, dtype), num_pages, device)
        self._watch = Stopwatch(device, lambda: None, repeats=REPEATS)
        self._num_pages, self._dtype = num_pages, dtype

    @torch.inference_mode()
    def row(
        self, phase: str, *, batch: int, context: int, tokens: int, floors: dict[str, float]
    ) -> LayerRow:
        """Times one step shape.

        Args:
            phase: `decode` (captured) or `prefill`.
            tokens: rows of each sequence.
        """
        batch_of = step(
            num_rows=tokens,
            ends=[context] * batch,
            num_pages=self._num_pages,
            page_tokens=self.config.block_tokens,
            vocab_size=self.config.vocab_size,
            device=self._device,
        )
        ms = partial(self._watch.median_ms, is_captured=phase == "decode")
        inputs = _Inputs(self, batch_of, batch * tokens)
        us = {name: ms(call) * 1e3 for name, call in inputs.calls().items()}
        layers = self.config.num_layers - 1
        attention = us["attention"] / layers
        projections = us["projections"] / layers
        moe, layer = us["moe"] / layers, us["layers"] / layers
        return LayerRow(
            phase=phase,
            form=self._form,
            batch=batch,
            context=context,
            tokens=tokens,
            layer_us=layer,
            attention_us=attention - projections,
            moe_us=moe,
            projections_us=projections,
            rest_us=layer - attention - moe,
            dense_attention_us=us["dense_attention"] / (layers if tokens == 1 else 1),
            dense_layer_us=us["dense_layer"],
            ends_us=us["ends"],
            floors_us=floors,
        )

    @property
    def model(self) -> M3Model:
        return self._model

    @property
    def pool(self) -> KvPool:
        return self._pool

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype


class _Inputs:
    """One step's tensors, and the calls that its parts are."""

    def __init__(self, bench: LayerBench, batch: DeviceBatch, num_tokens: int) -> None:
        self._bench, self._batch = bench, batch
        config, device = bench.config, batch.positions_T.device
        generator = torch.Generator(device).manual_seed(3)
        draw = partial(torch.randn, generator=generator, device=device, dtype=bench.dtype)
        self._x_TM = draw(num_tokens, config.hidden_size)
        self._heads = draw(num_tokens, config.num_heads * config.head_dim)
        self._q_THD = self._heads.view(num_tokens, config.num_heads, config.head_dim)
        frequencies = config.rope.frequencies(config.rotary_dim, device)
        angles = batch.positions_T[:, None].float() * frequencies
        self._step = StepRows(batch.rows, batch.slots_T, angles.cos(), angles.sin())

    def calls(self) -> dict[str, Call]:
        bench = self._bench
        first, *sparse = (cast(DecoderLayer, layer) for layer in bench.model.layers)
        pages = bench.pool.layers
        dense_pages = pages[1:] if self._batch.rows.max_query_len == 1 else pages[1:2]
        return {
            "layers": lambda: [
                self._layer(one, p) for one, p in zip(sparse, pages[1:], strict=True)
            ],
            "attention": lambda: [
                one.attention(self._x_TM, self._step, p)
                for one, p in zip(sparse, pages[1:], strict=True)
            ],
            "projections": lambda: [self._project(one) for one in sparse],
            "moe": lambda: [one.feed_forward(self._x_TM) for one in sparse],
            # in prefill it takes longer than all else together, so one layer stands for all
            "dense_attention": lambda: [self._dense(p) for p in dense_pages],
            "dense_layer": lambda: self._layer(first, pages[0]),
            "ends": self._ends,
        }

    def _ends(self) -> Tensor:
        model = self._bench.model
        x_TM = functional.embedding(self._batch.token_ids_T, model.embedding)
        x_SM = x_TM.index_select(0, self._batch.sample_rows_S)
        eps = self._bench.config.rms_norm_eps
        return model.head(self._bench.kernels.gemma_norm(x_SM, model.norm, eps)).float()

    def _layer(self, layer: DecoderLayer, pages: LayerPages) -> Tensor:
        return layer(self._x_TM, self._step, pages)

    def _project(self, layer: DecoderLayer) -> tuple[Tensor, Tensor]:
        attention = layer.attention
        return attention.in_proj(self._x_TM), attention.out_proj(self._heads)

    def _dense(self, pages: LayerPages) -> Tensor:
        bench = self._bench
        scale = bench.config.head_dim**-0.5
        return bench.kernels.paged_attention(self._q_THD, pages, self._batch.rows, scale)


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes; 0 measured, 2 it cannot run here."""
    parser = argparse.ArgumentParser(prog="m3stack bench layers", description=__doc__)
    parser.add_argument("--form", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--kernels", default="auto", help="kernel back end")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON, text and picture")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("the layer bench needs a CUDA device; torch sees none", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    config = truncated(released_model_config(), SPARSE_LAYERS)
    rows: list[LayerRow] = []
    names: list[str] = []
    for form in options.form:
        bench = LayerBench(
            config, form, torch.device("cuda"), pool_tokens=POOL_TOKENS, kernels=options.kernels
        )
        names.append(bench.kernels.name)

        def floors(work: dict[Part, Work]) -> dict[str, float]:
            return {part: ceilings.floor_us(one.num_bytes, one.flops) for part, one in work.items()}

        for batch, context in DECODE:
            work = decode_work(config, form, batch, context)
            rows.append(
                bench.row("decode", batch=batch, context=context, tokens=1, floors=floors(work))
            )
            _keep(rows, ceilings, options.out)
        for context in PREFILL:
            work = prefill_work(config, form, CHUNK_TOKENS, context)
            rows.append(
                bench.row(
                    "prefill", batch=1, context=context, tokens=CHUNK_TOKENS, floors=floors(work)
                )
            )
            _keep(rows, ceilings, options.out)
        del bench
        torch.cuda.empty_cache()
    print("kernels:", "; ".join(names))
    return 0


def _keep(rows: list[LayerRow], ceilings: Ceilings, out: Path | None) -> None:
    """Prints the last row and writes all, so that a run cut short leaves its figures."""
    row = rows[-1]
    floor = sum(row.floors_us.values())
    print(
        f"{row.phase:8}{row.form:6} B={row.batch:<3} {row.context:>8} tokens: layer "
        f"{row.layer_us:9.1f} us (floor {floor:9.1f}) attention {row.attention_us:9.1f} "
        f"moe {row.moe_us:9.1f} projections {row.projections_us:8.1f} rest {row.rest_us:7.1f} "
        f"dense attention {row.dense_attention_us:9.1f} dense layer {row.dense_layer_us:9.1f} "
        f"ends {row.ends_us:8.1f}",
        flush=True,
    )
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    records = [asdict(row) for row in rows]
    path = out / "layer-h200.json"
    path.write_text(json.dumps({"machine": asdict(ceilings), "rows": records}, indent=1) + "\n")
    write_report(path, out)
