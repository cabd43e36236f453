"""One arm on one rank: what its model gives, and how long its steps take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m3stack.batch import DeviceBatch
from m3stack.bench.multi_gpu import floors
from m3stack.bench.multi_gpu.arms import Arm, BenchMesh
from m3stack.bench.multi_gpu.shards import divided_model, page_shape, random_pool
from m3stack.bench.multi_gpu.steps import Stopwatch, relative_error, step
from m3stack.cache.pool import KvPool
from m3stack.engine.graphs import CudaRecorder, DecodeGraphs
from m3stack.kernels.interface import Kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.index_parts import IndexParts
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.ranks import Rank
from m3stack.parallel import LeadersWord

Row = dict[str, Any]

REPLAYED_STEPS = 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured.

    Attributes:
        batches, contexts: of decode steps, every pair of them.
        chunk: rows of a prefill step, after each of `contexts`.
        num_pages: of the pool; longer steps read pages several times.
        prompt_tokens, output_tokens: of the sequence whose logits are compared.
        repeats: of every timing.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunk: int
    num_pages: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a rank of the bench runs.

    Attributes:
        group: of the ranks there are; None where there is one.
        ceiling: of this GPU.
    """

    rank: int
    place: Place
    kernels: Kernels
    group: dist.ProcessGroup | None
    ceiling: floors.Ceiling


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model gave: the tokens it chose, and the logits they were chosen from."""

    tokens: tuple[int, ...]
    logits_SV: Tensor


def _everybody() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class _Skipped(nn.Module):
    """Stands for a layer that does nothing."""

    def forward(self, x_TM: Tensor, *_: object) -> Tensor:
        return x_TM


class ArmBench:
    """A model divided by an arm, its cache, and everything measured of it."""

    def __init__(self, arm: Arm, config: M3Config, sizes: Sizes, machine: Machine) -> None:
        self._arm, self._config, self._sizes, self._machine = arm, config, sizes, machine
        world = 1 if machine.group is None else dist.get_world_size(machine.group)
        self.is_real = arm.ranks <= world
        # what is done once a step takes, by rows, context, captured or not, silent or not
        self._ends_ms: dict[tuple[int, int, bool, bool], float] = {}
        # where there are more GPUs than ranks, every one of them runs the arm
        self._place: Rank = arm.place(machine.rank % arm.ranks)
        self._mesh = BenchMesh(self._place.tp_rank, arm.ranks, machine.group)
        self._watch = Stopwatch(machine.place.device, self._mesh.barrier, repeats=sizes.repeats)
        self._model: M3Model = divided_model(
            config, self._place, kernels=machine.kernels, mesh=self._mesh, place=machine.place
        )
        shape = page_shape(config, self._place, machine.place.dtype)
        self._pool: KvPool = random_pool(shape, sizes.num_pages, machine.place.device)

    def answer(self, forced: Sequence[int] | None) -> Answer:
        """Greedy tokens and their logits after a prompt; `forced` are fed instead of the own."""
        sizes = self._sizes
        batch = self._step(sizes.prompt_tokens, [sizes.prompt_tokens])
        tokens: list[int] = []
        logits: list[Tensor] = []
        with torch.inference_mode():
            for index in range(sizes.output_tokens):
                row = self._model.forward(batch, self._pool.layers)[0]
                logits.append(row.cpu())
                tokens.append(int(row.argmax()))
                fed = tokens[-1] if forced is None else forced[index]
                batch = self._step(1, [sizes.prompt_tokens + index + 1])
                batch = replace(batch, token_ids_T=torch.full_like(batch.token_ids_T, fed))
        return Answer(tuple(tokens), torch.stack(logits))

    def compared(self, truth: Answer) -> Row:
        """How far this arm's answer is from that of the undivided model in fp32.

        In bf16 a token whose router or block choice was a near tie may be far off, divided or not:
        the median over the tokens says what the others do.
        """
        own = self.answer(truth.tokens)
        errors = [
            relative_error(*pair) for pair in zip(own.logits_SV, truth.logits_SV, strict=True)
        ]
        return {
            "kind": "equality",
            "arm": self._arm.name,
            "tokens": len(own.tokens),
            "equal_tokens": sum(a == b for a, b in zip(own.tokens, truth.tokens, strict=True)),
            "relative_error": statistics.median(errors),
            "largest_error": max(errors),
        }

    def replayed(self) -> Row:
        """How far decode steps replayed on all ranks are from the same ones as they come."""
        device, longest = self._machine.place.device, self._sizes.prompt_tokens
        graphs = DecodeGraphs(
            self._model.forward,
            self._pool.layers,
            record=CudaRecorder(device),
            page_tokens=self._config.block_tokens,
            max_sequences=4,
            budget_bytes=1 << 30,
            agree=None if self._machine.group is None else LeadersWord(_everybody()).most,
        )
        errors: list[float] = []
        with torch.inference_mode():
            for number in range(REPLAYED_STEPS):
                # three rows, where four are recorded
                batch = self._step(1, [longest + number, longest // 2 + number, longest // 3])
                plain = self._model.forward(batch, self._pool.layers)
                errors.append(relative_error(graphs(batch, self._pool.layers), plain))
        row = {
            "kind": "replayed",
            "arm": self._arm.name,
            "steps": len(errors),
            "replays": graphs.num_replays,
            "relative_error": statistics.median(errors[-graphs.num_replays :]),
            "recorded_bytes": graphs.num_bytes,
        }
        # the group cannot be closed while a recording holds it
        graphs.release()
        return row

    def timed_rows(self) -> Iterator[Row]:
        """Everything that is timed."""
        if self._arm.ranks > 1:
            yield from self._collective_rows()
        yield from self._decode_rows()
        yield from self._prefill_rows()

    def _decode_rows(self) -> Iterator[Row]:
        """Whole steps of every batch and context, and the attention in them."""
        for context in self._sizes.contexts:
            for batch_size in self._sizes.batches:
                batch = self._step(1, [context] * batch_size)
                work = floors.decode(self._config, self._place, batch_size, context)
                timed = self._timed(batch, work, is_captured=True)
                attention_us, silent_us = self._attention(batch)
                least = floors.attention_decode_bytes(
                    self._config, self._place, batch_size, context
                )
                yield {
                    **self._named("decode", batch_size, context),
                    **timed,
                    "attention_us": attention_us,
                    "silent_attention_us": silent_us,
                    "attention_floor_us": self._machine.ceiling.least_us(least, 0.0),
                }

    def _prefill_rows(self) -> Iterator[Row]:
        """A chunk after every context."""
        chunk = self._sizes.chunk
        for context in self._sizes.contexts:
            batch = self._step(chunk, [context + chunk])
            work = floors.prefill(self._config, self._place, chunk, context)
            timed = self._timed(batch, work, is_captured=False)
            yield {**self._named("prefill", chunk, context), **timed}

    def _collective_rows(self) -> Iterator[Row]:
        """The two collectives of a layer alone, in the sizes that steps have."""
        config, device = self._config, self._machine.place.device
        rows = [*self._sizes.batches, self._sizes.chunk]
        for count in rows:
            sums = torch.zeros(
                count, config.hidden_size, dtype=self._machine.place.dtype, device=device
            )
            groups = max(self._arm.ranks, config.num_kv_heads)
            found = torch.zeros(groups, count, config.topk_blocks, dtype=torch.int64, device=device)
            yield {
                **self._named("collectives", count, 0),
                "all_reduce_us": self._alone_us(partial(self._mesh.all_reduce, sums)),
                "all_to_all_us": self._alone_us(partial(self._mesh.all_to_all, found)),
            }

    def _alone_us(self, call: Callable[[], object], calls: int = 20) -> float:
        def many() -> None:
            for _ in range(calls):
                call()

        return self._watch.median_ms(many) / calls * 1e3

    def _named(self, kind: str, rows: int, context: int) -> Row:
        return {
            "kind": kind,
            "arm": self._arm.name,
            "is_real": self.is_real,
            "rows": rows,
            "context": context,
        }

    def _timed(self, batch: DeviceBatch, work: floors.Work, *, is_captured: bool) -> Row:
        """Step times with and without collectives, and a layer's share of them."""
        layer_us = self._layer_us(batch, is_captured=is_captured)
        silent_us = layer_us
        if self._arm.ranks > 1:
            with self._mesh.silent():
                silent_us = self._layer_us(batch, is_captured=is_captured)
        floor_us = self._machine.ceiling.least_us(work.num_bytes, work.flops)
        return {
            "ends_ms": self._without_layers(batch, is_captured=is_captured),
            "layer_us": layer_us,
            "silent_layer_us": silent_us,
            "layer_floor_us": floor_us,
            "of_floor": floor_us / layer_us,
        }

    def _layer_us(self, batch: DeviceBatch, *, is_captured: bool) -> float:
        forward = partial(self._model.forward, batch, self._pool.layers)
        step_ms = self._watch.median_ms(forward, is_captured=is_captured)
        ends_ms = self._without_layers(batch, is_captured=is_captured)
        return (step_ms - ends_ms) / self._config.num_layers * 1e3

    def _without_layers(self, batch: DeviceBatch, *, is_captured: bool) -> float:
        """Embedding and head, and, where index keys are in parts, the rewriting of the step."""
        rows = (len(batch.token_ids_T), batch.rows.max_seq_len)
        key = (*rows, is_captured, self._mesh.is_silent)
        if key not in self._ends_ms:
            model, layers = self._model, self._model.layers
            model.layers = nn.ModuleList(_Skipped() for _ in layers)
            ends = partial(model.forward, batch, self._pool.layers)
            self._ends_ms[key] = self._watch.median_ms(ends, is_captured=is_captured)
            model.layers = layers
        return self._ends_ms[key]

    def _attention(self, batch: DeviceBatch) -> tuple[float, float]:
        """Microseconds of a layer's block choice and attention, with and without exchange."""
        config, rank, machine = self._config, self._place, self._machine
        own = config.per_rank(rank.tp_size)
        device, num_rows = machine.place.device, len(batch.token_ids_T)
        heads = (config if rank.index_in_parts else own).num_kv_heads
        drawn = partial(torch.randn, dtype=machine.place.dtype, device=device)
        q_THD = drawn(num_rows, own.num_heads, config.head_dim)
        index_q_TGD = drawn(num_rows, heads, config.index_dim)
        kernels, scale = machine.kernels, config.head_dim**-0.5
        parts = part = None
        if rank.index_in_parts:
            parts = IndexParts(config, kernels=kernels, mesh=self._mesh, device=device)
            first = self._pool.layers[0].index_k_PBD
            assert first is not None
            part = parts.of_step(batch.rows, batch.slots_T, first)

        def attend() -> None:
            for pages in self._pool.layers:
                assert pages.index_k_PBD is not None
                if parts is None or part is None:
                    blocks_GTK = kernels.choose_blocks(
                        index_q_TGD,
                        pages.index_k_PBD,
                        batch.rows,
                        config.topk_blocks,
                        config.num_local_blocks,
                    )
                else:
                    blocks_GTK = parts.choose_blocks(
                        index_q_TGD, pages.index_k_PBD, part, batch.rows
                    )
                kernels.block_attention(q_THD, pages, blocks_GTK, batch.rows, scale)

        per_layer_us = 1e3 / len(self._pool.layers)
        whole_us = self._watch.median_ms(attend) * per_layer_us
        if not rank.index_in_parts:
            return whole_us, whole_us
        with self._mesh.silent():
            return whole_us, self._watch.median_ms(attend) * per_layer_us

    def _step(self, num_rows: int, ends: Sequence[int]) -> DeviceBatch:
        config = self._config
        return step(
            num_rows=num_rows,
            ends=ends,
            num_pages=self._sizes.num_pages,
            page_tokens=config.block_tokens,
            vocab_size=config.vocab_size,
            device=self._machine.place.device,
        )
