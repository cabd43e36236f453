"""A model whose logits are a hash of exactly what the paged cache says a row can see.

It has no arithmetic to be close about: any wrong page, slot, position or feature row gives other
tokens, and reading a slot nobody wrote raises.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache, PatchBatch
from m3stack.cache.host import HostTier, PageCopy
from m3stack.cache.host_pool import HostPool
from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.engine.constraints import ConstraintBook
from m3stack.engine.encoder import Encoder
from m3stack.engine.grammar import GrammarCompiler, Vocabulary
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.pace import Pace
from m3stack.engine.runner import ModelRunner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler, SchedulerLimits
from m3stack.engine.sequence import NO_SEGMENTS
from m3stack.types import MediaItem, MediaKind, PatchFormat, Request, Sampling, Span

VOCAB = 61
IMAGE_ID = 59
VIDEO_ID = 60
EOS_ID = 7
PAGE = 8
FEATURE_BYTES = 4
PATCH_FORMAT = PatchFormat(
    mean=(0.5, 0.5, 0.5),
    std=(0.25, 0.25, 0.25),
    channels=3,
    patch_size=2,
    temporal_patch_size=2,
    merge_size=2,
)
CPU = torch.device("cpu")
# one id a character; see the maker beside it
LETTERS = Path(__file__).parents[2] / "data" / "letters" / "tokenizer.json"
VOCABULARY = Vocabulary(LETTERS, VOCAB, EOS_ID)


class HistoryModel:
    """Writes what each row stands for into K, and hashes K along the page table for logits."""

    def __init__(self) -> None:
        self.forwards = 0
        self.encoded_items = 0
        self.encode_calls = 0

    def forward(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        self.forwards += 1
        values_T = batch.token_ids_T.to(torch.float32)
        for media in batch.media:
            values_T[media.rows_N] = media.features_NM[:, 0]
        size = caches[0].k_PGBD.shape[2]
        slots_T = batch.slots_T
        assert int(slots_T.min()) >= 0
        page_T, offset_T = slots_T // size, slots_T % size
        for layer in caches:
            layer.k_PGBD[page_T, 0, offset_T, 0] = values_T
            layer.v_PGBD[page_T, 0, offset_T, 0] = batch.positions_T.to(torch.float32)
            if layer.index_k_PBD is not None:
                layer.index_k_PBD[page_T, offset_T, 0] = values_T
        starts = batch.rows.query_start_S1.tolist()
        wanted = batch.sample_rows_S.tolist()
        logits = []
        for index, seq_len in enumerate(batch.rows.seq_lens_S.tolist()):
            last = starts[index + 1] - 1
            assert batch.positions_T[last].item() == seq_len - 1
            table = batch.rows.page_table_SJ[index].long()
            if last in wanted:
                logits.append(history_logits(self._history(caches, table, seq_len)))
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def _history(self, caches: LayerCache, table: Tensor, seq_len: int) -> list[float]:
        table = table[: -(-seq_len // caches[0].k_PGBD.shape[2])]
        values = caches[0].k_PGBD[table, 0, :, 0].flatten()[:seq_len].tolist()
        for layer in caches:
            seen = layer.k_PGBD[table, 0, :, 0].flatten()[:seq_len].tolist()
            assert seen == values, "the layers' keys differ"
            positions = layer.v_PGBD[table, 0, :, 0].flatten()[:seq_len].tolist()
            assert positions == list(range(seq_len)), "a row sees slots of another position"
            if layer.index_k_PBD is not None:
                index = layer.index_k_PBD[table, :, 0].flatten()[:seq_len].tolist()
                assert index == values, "index keys and keys differ"
        return values

    def encode_media(self, batch: PatchBatch) -> list[Tensor]:
        self.encode_calls += 1
        self.encoded_items += len(batch.patches)
        return [
            torch.tensor(expected_features(bytes(rows.numpy().tobytes()), rows.shape[0]))[:, None]
            for rows in batch.patches
        ]


def history_logits(values: Sequence[float]) -> Tensor:
    """fp32 [V], a function of the values seen."""
    digest = hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(VOCAB, generator=generator)


def expected_features(patches: bytes, num_patches: int) -> list[float]:
    """One value a merged token, out of the vocabulary's range."""
    size = len(patches) // num_patches * 4
    blocks = [patches[start : start + size] for start in range(0, len(patches), size)]
    return [
        float(1000 + int.from_bytes(hashlib.sha256(block).digest()[:2], "little"))
        for block in blocks
    ]


def sampling(**changes: object) -> Sampling:
    """Greedy, nothing special, unless changed."""
    fields: dict[str, object] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "max_tokens": 8,
        "min_tokens": 0,
        "ignore_eos": True,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": 0,
        "stop_token_ids": frozenset(),
        "logit_bias": {},
        "allowed_token_ids": frozenset(),
        "banned_token_ids": frozenset(),
    }
    assert set(changes) <= set(fields)
    return Sampling(**(fields | changes))  # type: ignore[arg-type]


def image(seed: int, *, offset: int, num_tokens: int, with_patches: bool = True) -> MediaItem:
    """A still of `num_tokens` merged tokens, at one span."""
    grid = (1, 2, 2 * num_tokens)
    patches = patch_bytes(seed, grid[0] * grid[1] * grid[2], frames=1)
    return MediaItem(
        kind=MediaKind.IMAGE,
        media_hash=hashlib.sha256(patches).digest(),
        grid_thw=grid,
        frames_per_patch=1,
        spans=(Span(offset, num_tokens),),
        patches=patches if with_patches else None,
    )


def patch_bytes(seed: int, num_patches: int, *, frames: int) -> bytearray:
    generator = torch.Generator().manual_seed(seed)
    size = (num_patches, 3 * frames * 4)
    return bytearray(
        torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).numpy().tobytes()
    )


def history_values(request: Request, patches: dict[bytes, bytes]) -> list[float]:
    """What a row after the prompt sees: ids, and features where media stands."""
    values = [float(token) for token in request.prompt_token_ids]
    for item in request.media:
        t, h, w = item.grid_thw
        features = iter(expected_features(patches[item.media_hash], t * h * w))
        for span in item.spans:
            for position in range(span.offset, span.offset + span.length):
                values[position] = next(features)
    return values


def greedy_alone(request: Request, patches: dict[bytes, bytes] | None = None) -> list[int]:
    """Tokens of a greedy request computed with no engine at all."""
    values = history_values(request, patches or {})
    stops = set(request.sampling.stop_token_ids)
    if not request.sampling.ignore_eos:
        stops.add(EOS_ID)
    output: list[int] = []
    while len(output) < request.sampling.max_tokens:
        token = int(history_logits(values).argmax())
        if token in stops:
            break
        output.append(token)
        values.append(float(token))
    return output


def clip(
    seed: int, *, offset: int, num_slices: int, tokens_per_slice: int, between: int = 1
) -> MediaItem:
    """A clip whose every temporal slice is a span of its own, `between` ids of text apart."""
    grid = (num_slices, 2, 2 * tokens_per_slice)
    patches = patch_bytes(seed, grid[0] * grid[1] * grid[2], frames=2)
    spans = [
        Span(offset + index * (tokens_per_slice + between), tokens_per_slice)
        for index in range(num_slices)
    ]
    digest = hashlib.sha256(patches).digest()
    return MediaItem(MediaKind.VIDEO, digest, grid, 2, tuple(spans), patches)


class PageCopier:
    """The real copies to and from host memory, which a test can make fail."""

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        self._pool = HostPool(pool, num_slots)
        self.should_fail: Callable[[PageCopy], bool] = lambda copy: False
        self.made: list[PageCopy] = []

    def __call__(self, copy: PageCopy) -> None:
        if self.should_fail(copy):
            raise OSError("the host tier failed")
        self._pool.copy(copy)
        self.made.append(copy)


class Stack:
    """Everything below the engine thread, over a pool full of NaN."""

    def __init__(
        self,
        *,
        num_pages: int = 32,
        limits: SchedulerLimits | None = None,
        prefix: bool = True,
        media_budget: int = 1 << 20,
        host_slots: int = 0,
        restore_cost: int = 0,
        segment_patches: int = NO_SEGMENTS,
        pace: Pace | None = None,
    ) -> None:
        shape = PageShape((True, False), 1, 1, 1, PAGE, torch.float32)
        self.pool = KvPool(shape, num_pages, CPU)
        for layer in self.pool.layers:
            for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD):
                if tensor is not None:
                    tensor.fill_(float("nan"))
        self.copier = PageCopier(self.pool, host_slots) if host_slots else None
        self.host = HostTier(host_slots, restore_cost_tokens=restore_cost) if host_slots else None
        self.pages = PrefixCache(PageAllocator(num_pages), enabled=prefix, host=self.host)
        self.media = MediaLedger(media_budget)
        self.model = HistoryModel()
        self.segment_patches = segment_patches
        self.encoder = Encoder(
            self.model.encode_media, self.media, CPU, segment_patches=segment_patches
        )
        # its threads are started by the first constraint only
        self.constraints = ConstraintBook(GrammarCompiler(VOCABULARY))
        self.runner = ModelRunner(
            self.model.forward,
            self.pool.layers,
            encoder=self.encoder,
            inputs=InputBuilder(PAGE, CPU),
            sampler=Sampler(VOCAB, CPU, self.constraints),
            copy_page=self.copier,
        )
        self.limits = limits or SchedulerLimits(
            max_batch_tokens=16, max_sequences=4, max_encode_patches=64
        )
        self.scheduler = Scheduler(self.limits, self.pages, self.media, pace)
