"""The CUDA sources of the decode kernels, run on a CPU: any order of threads gives the reference.

What the emulator cannot tell: whether a PTX wrapper says what its name says, and anything of time.
"""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from m3stack.bench.kernels.batches import BatchShape, MsaBatch, make_batch, poison_unwritten
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.kernels.interface import NO_BLOCK
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode import two_stage, with_cuda
from m3stack.kernels.msa.decode.two_stage import choose_blocks_two_stage
from m3stack.kernels.msa.decode.with_cuda import AttentionPlan, CudaDecode, Merge
from m3stack.kernels.msa.index_copy import IndexCopy
from tests.worker.kernels.cuda_on_cpu.build import EmulatedLibrary, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("decode_on_cpu"))


def decode_with(built, *, num_processors: int = 3, seed: int = 1) -> CudaDecode:
    library = EmulatedLibrary(built, num_processors=num_processors, seed=seed)
    return CudaDecode(library, device="cpu")  # type: ignore[arg-type]


def small_integers(shape: BatchShape, seed: int) -> MsaBatch:
    """Sums of products of small integers are exact in any order: choices must be equal."""
    batch = make_batch(shape, device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    index_k.copy_(torch.randint(-2, 3, index_k.shape, generator=generator))
    poison_unwritten(batch.pages, batch.rows)
    q = torch.randint(-1, 2, batch.index_q_TGD.shape, generator=generator)
    return dataclasses.replace(batch, index_q_TGD=q.to(torch.bfloat16))


def choose(decode: CudaDecode, batch: MsaBatch, chosen: int, local: int):
    assert batch.pages.index_k_PBD is not None
    return decode.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, chosen, local
    )


def two_stages(decode: CudaDecode, batch: MsaBatch, chosen: int, local: int):
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    copy = IndexCopy.of(index_k)
    return choose_blocks_two_stage(
        decode, batch.index_q_TGD, index_k, copy, batch.rows, chosen, local
    )


RAGGED = BatchShape(
    seq_lens=(3000, 0, 129, 2176), num_rows=(1, 1, 2, 1), groups=2, heads_per_group=2
)


@pytest.mark.parametrize("seed", [1, 2])
def test_one_stage_chooses_as_the_reference(built, seed):
    batch = small_integers(RAGGED, seed)
    actual = choose(decode_with(built, seed=seed), batch, 5, 1)
    expected = reference.choose_blocks(batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, 5, 1)
    require_equal(actual, expected, what="choice")


class LaunchesNothing:
    """A library of which nothing may be asked."""

    num_processors = 3

    def launch(self, name: str, *_: object) -> None:
        raise AssertionError(f"{name} was launched")


def test_a_step_without_rows_launches_nothing():
    batch = small_integers(BatchShape(seq_lens=(300, 5), num_rows=(0, 0), groups=2), 1)
    decode = CudaDecode(LaunchesNothing(), device="cpu")  # type: ignore[arg-type]
    assert choose(decode, batch, 5, 1).shape == (2, 0, 5)
    blocks_GTK, num_rescored_TG = two_stages(decode, batch, 5, 1)
    assert blocks_GTK.shape == (2, 0, 5)
    assert num_rescored_TG.shape == (0, 2)
    assert (
        decode.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, 1.0).shape
        == batch.q_THD.shape
    )


def keys_of(kind: str, index_k: torch.Tensor) -> None:
    normal = torch.randn(index_k.shape, generator=torch.Generator().manual_seed(5))
    match kind:
        case "normal":
            index_k.copy_(normal)
        case "equal":
            index_k.fill_(1.0)
        case "near_ties":
            index_k.copy_(1.0 + normal * 2.0**-8)
        case "twins":  # two tokens of a block within the bound of each other
            index_k.copy_(normal)
            index_k[:, 77] = index_k[:, 5]
            index_k[:, 90] = index_k[:, 5] * (1 + 2.0**-8)
        case "not_numbers":
            index_k.copy_(normal)
            index_k[::7, 3, 5] = float("nan")
            index_k[::5, 9, 1] = float("inf")
            index_k[::3, 11, 2] = float("-inf")


@pytest.mark.parametrize(
    ("kind", "chosen", "local", "splits"),
    [
        ("normal", 4, 1, 2),
        ("normal", 3, 0, 4),
        ("equal", 4, 1, 1),
        ("near_ties", 6, 3, 2),
        ("twins", 4, 1, 4),
        ("not_numbers", 4, 0, 2),
    ],
)
def test_two_stages_choose_what_one_stage_chooses(built, monkeypatch, kind, chosen, local, splits):
    monkeypatch.setattr(two_stage, "settle_splits", lambda *_: splits)
    shape = BatchShape(seq_lens=(1400, 0, 129), num_rows=(1, 1, 2), groups=2, heads_per_group=2)
    batch = make_batch(shape, device="cpu", seed=3, poison=False)
    assert batch.pages.index_k_PBD is not None
    keys_of(kind, batch.pages.index_k_PBD)
    poison_unwritten(batch.pages, batch.rows)
    decode = decode_with(built, num_processors=2, seed=4)
    blocks_GTK, rescored_TG = two_stages(decode, batch, chosen, local)
    require_equal(blocks_GTK, choose(decode, batch, chosen, local), what=kind)
    rescored, ranked = decode.rescored_2.tolist()
    assert rescored == int(rescored_TG.sum())
    if kind == "equal":
        assert rescored == ranked == 2 * 10  # the blocks below the first row's own one
    if kind == "normal":
        assert rescored < ranked


@pytest.mark.parametrize("splits", [2, 4])
def test_a_block_for_each_chosen_block_attends_as_the_reference(built, monkeypatch, splits):
    plan = AttentionPlan(1, splits, Merge.BLOCKS)
    monkeypatch.setattr(with_cuda, "attention_plan", lambda *_, **__: plan)
    shape = BatchShape(seq_lens=(700, 0, 131), num_rows=(1, 1, 2), groups=1, heads_per_group=5)
    batch = make_batch(shape, device="cpu", seed=6)
    blocks_GTK = torch.full((1, 4, splits), NO_BLOCK, dtype=torch.int32)
    blocks_GTK[0, 0, :2] = torch.tensor([1, 5])
    blocks_GTK[0, 2, 0] = 0  # and nothing for the last row
    decode = decode_with(built, seed=7)
    inputs = (batch.pages, blocks_GTK, batch.rows, 128**-0.5)
    actual = decode.block_attention(batch.q_THD, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), *inputs)
    # bf16 weights and outputs
    require_close(actual, expected, limit=6e-3, what="attention")
    assert not actual[[1, 3]].any()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["normal", "equal"])
@pytest.mark.parametrize("splits", [1, 2])
def test_two_stages_agree_where_a_thread_block_has_many_chunks(built, monkeypatch, kind, splits):
    monkeypatch.setattr(two_stage, "settle_splits", lambda *_: splits)
    batch = make_batch(
        BatchShape(seq_lens=(250_000,), groups=1, heads_per_group=1), device="cpu", seed=8
    )
    assert batch.pages.index_k_PBD is not None
    keys_of(kind, batch.pages.index_k_PBD)
    poison_unwritten(batch.pages, batch.rows)
    decode = decode_with(built, num_processors=2, seed=9)
    blocks_GTK, _ = two_stages(decode, batch, 16, 1)
    require_equal(blocks_GTK, choose(decode, batch, 16, 1), what=kind)
