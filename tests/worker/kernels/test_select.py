"""Back ends are chosen by name, checked before use, and refused with a reason."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels.batches import BatchShape, make_batch
from m3stack.kernels import select, self_check
from m3stack.kernels.attention import reference, with_flashinfer, with_torch
from m3stack.kernels.build import CompilerMissingError, KernelUnavailableError, find_compiler
from m3stack.kernels.gpu_back_ends import decode_apart
from m3stack.kernels.interface import HostLengths, LayerPages, PagedRows
from m3stack.kernels.msa.with_cuda import refuse_other_models
from m3stack.kernels.reference_table import reference_kernels
from m3stack.kernels.select import BackEnd, build_kernels
from m3stack.kernels.self_check import check_operation
from m3stack.kernels.shape import KernelShape
from m3stack.kernels.triton_table import triton_operations

# numpy warns about how the interpreter of triton 3.6 reads scalars
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CPU = torch.device("cpu")
SMALL = KernelShape(
    dtype=torch.float16,
    heads=8,
    groups=2,
    head_dim=32,
    rotary_dim=16,
    page_tokens=16,
    num_blocks=3,
    num_local_blocks=1,
    vision_heads=2,
    vision_head_dim=20,
    experts=6,
    experts_per_token=3,
)
M3 = KernelShape(
    dtype=torch.bfloat16,
    heads=64,
    groups=4,
    head_dim=128,
    rotary_dim=64,
    page_tokens=128,
    num_blocks=16,
    num_local_blocks=1,
    vision_heads=16,
    vision_head_dim=80,
    experts=128,
    experts_per_token=4,
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_cpu_gets_the_reference(name):
    assert build_kernels(name, shape=SMALL, device=CPU) == reference_kernels()


@pytest.mark.parametrize("name", ["triton", "cuda", "flashinfer"])
def test_a_gpu_back_end_is_refused_on_a_cpu_by_name(name):
    with pytest.raises(KernelUnavailableError, match=f"{name} needs a CUDA device, got cpu"):
        build_kernels(name, shape=SMALL, device=CPU)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(KernelUnavailableError, match="'fast', expected one of auto, reference"):
        build_kernels("fast", shape=SMALL, device=CPU)


@pytest.mark.parametrize(
    "operation",
    [
        "gemma_norm",
        "swiglu_oai",
        "attention_prologue",
        "varlen_attention",
        "paged_attention",
        "choose_blocks",
        "block_attention",
    ],
)
def test_the_reference_passes_every_check_and_a_wrong_operation_none(operation):
    reference = reference_kernels()
    right = getattr(reference, operation)
    check_operation(operation, right, reference, SMALL, CPU)

    def wrong(*inputs):
        result = right(*inputs)
        first = result[0] if isinstance(result, tuple) else result
        first.view(-1)[0] += 100
        return result

    with pytest.raises(KernelUnavailableError, match=operation):
        check_operation(operation, wrong, reference, SMALL, CPU)

    def not_a_number(*inputs):
        result = right(*inputs)
        first = result[0] if isinstance(result, tuple) else result
        return (first * float("nan"), *result[1:]) if result is not first else first * float("nan")

    with pytest.raises(KernelUnavailableError, match=operation):
        check_operation(operation, not_a_number, reference, SMALL, CPU)


@pytest.mark.parametrize("operation", sorted(triton_operations(SMALL, CPU)))
def test_triton_operations_pass_their_checks(operation, monkeypatch):
    # the interpreter is slow; other numbers of tokens are the tests' of the experts themselves
    monkeypatch.setattr(self_check, "EXPERT_TOKENS", (1, 5))
    run = triton_operations(SMALL, CPU)[operation]
    check_operation(operation, run, reference_kernels(), SMALL, CPU)


@pytest.mark.parametrize("operation", ["varlen_attention", "paged_attention"])
def test_torch_operations_pass_their_checks(operation):
    run = getattr(with_torch, operation)
    check_operation(operation, run, reference_kernels(), SMALL, CPU)


def fake_supply(monkeypatch, **by_back_end):
    """Replaces the operations of back ends; a string is the reason why one cannot run."""

    def operations(rung, shape, device):
        supplied = by_back_end.get(rung.value, {})
        if isinstance(supplied, str):
            raise KernelUnavailableError(supplied)
        return supplied

    real = select._operations
    monkeypatch.setattr(
        select,
        "_operations",
        lambda rung, shape, device: (
            real(rung, shape, device)
            if rung is BackEnd.REFERENCE
            else operations(rung, shape, device)
        ),
    )
    monkeypatch.setattr(select, "_describe", lambda device: "a test GPU (sm_90)")
    checked = select.check_operation
    monkeypatch.setattr(
        select,
        "check_operation",
        lambda name, run, reference, shape, device: checked(name, run, reference, shape, CPU),
    )


def test_auto_says_what_it_leaves_out_and_takes_the_next(monkeypatch, caplog):
    reference = reference_kernels()

    def wrong_norm(x, weight, eps):
        return reference.gemma_norm(x, weight, eps) + 1

    def right_norm(x, weight, eps):
        return reference.gemma_norm(x, weight, eps)

    def crashing(*inputs):
        raise RuntimeError("driver too old")

    fake_supply(
        monkeypatch,
        flashinfer="not installed",
        cuda={"gemma_norm": wrong_norm, "choose_blocks": crashing},
        triton={"gemma_norm": right_norm},
    )
    caplog.set_level(logging.INFO)
    kernels = build_kernels("auto", shape=SMALL, device=torch.device("cuda"))
    assert kernels.gemma_norm is right_norm
    assert kernels.choose_blocks == reference.choose_blocks
    assert kernels.name == "auto (triton, reference)"
    said = caplog.text
    assert "back_end=flashinfer reason=not installed" in said
    assert "op=gemma_norm back_end=cuda reason=gemma_norm: relative error" in said
    assert "op=choose_blocks back_end=cuda reason=driver too old" in said
    assert "op=gemma_norm back_end=triton" in said


def test_a_named_back_end_that_cannot_run_is_an_error_with_the_reason(monkeypatch):
    fake_supply(monkeypatch, cuda="no nvcc")
    with pytest.raises(KernelUnavailableError, match=r"'cuda' cannot run on a test GPU.*no nvcc"):
        build_kernels("cuda", shape=SMALL, device=torch.device("cuda"))


def test_a_named_back_end_that_is_wrong_is_an_error_naming_the_operation(monkeypatch):
    fake_supply(monkeypatch, triton={"gemma_norm": lambda x, weight, eps: x * 2})
    expected = "gemma_norm: back end triton fails on a test GPU"
    with pytest.raises(KernelUnavailableError, match=expected):
        build_kernels("triton", shape=SMALL, device=torch.device("cuda"))


def test_models_the_hopper_kernels_do_not_serve_are_named():
    refuse_other_models(M3)
    with pytest.raises(KernelUnavailableError, match=r"dtype torch\.bfloat16, got torch\.float16"):
        refuse_other_models(SMALL)


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("m3stack.kernels.build.DEFAULT_HOME", str(tmp_path))
    with pytest.raises(CompilerMissingError, match="CUDA kernels need nvcc"):
        find_compiler()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float32}, "FlashInfer serves torch.bfloat16, torch.float16, got torch.f"),
        ({"head_dim": 32}, "FlashInfer serves head dims 64, 128, 256, got 32"),
    ],
)
def test_flashinfer_names_what_it_does_not_serve_before_it_compiles(change, said):
    with_flashinfer.refuse_other_models(M3)
    with pytest.raises(KernelUnavailableError, match=said):
        with_flashinfer.refuse_other_models(dataclasses.replace(M3, **change))


def test_steps_of_one_row_a_sequence_have_an_operation_of_their_own() -> None:
    decode, other = (
        lambda q, pages, rows, scale: torch.zeros(1),
        lambda q, pages, rows, scale: torch.ones(1),
    )
    both = decode_apart(decode, other)
    pages = LayerPages(torch.empty(0), torch.empty(0), None)
    for longest, expected in ((1, 0.0), (2, 1.0)):
        rows = PagedRows(torch.empty(0), torch.empty(0), torch.empty(0), longest, 9)
        assert both(torch.empty(0), pages, rows, 1.0).item() == expected


@pytest.mark.parametrize("counts", [(1, 1, 7, 1, 3), (1, 5), (4, 1), (2,), (1, 1, 2)])
def test_rows_of_one_token_before_prompts_are_attended_to_apart(counts: tuple[int, ...]) -> None:
    shape = BatchShape(seq_lens=tuple(130 + 90 * n for n in range(len(counts))), num_rows=counts)
    batch = make_batch(shape, device="cpu", seed=3)
    starts, lens = batch.rows.query_start_S1, batch.rows.seq_lens_S
    rows = dataclasses.replace(batch.rows, host=HostLengths(starts, lens))
    seen: list[tuple[str, PagedRows]] = []

    def named(name: str):
        def run(q: torch.Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> torch.Tensor:
            seen.append((name, rows))
            return reference.paged_attention(q, pages, rows, scale)

        return run

    both = decode_apart(named("decode"), named("other"))
    q_THD, scale = batch.q_THD.float(), 128**-0.5
    pages = LayerPages(batch.pages.k_PGBD.float(), batch.pages.v_PGBD.float(), None)
    expected = reference.paged_attention(q_THD, pages, rows, scale)
    for _ in range(2):
        torch.testing.assert_close(both(q_THD, pages, rows, scale), expected)
    single = next((place for place, count in enumerate(counts) if count > 1), len(counts))
    assert [name for name, _ in seen] == (["decode", "other"] if single else ["other"]) * 2
    # the second layer comes with the rows that the first was planned for
    assert all(
        one is other for (_, one), (_, other) in zip(seen, seen[len(seen) // 2 :], strict=False)
    )
    if single:
        assert seen[0][1].seq_lens_S.tolist() == lens[:single].tolist()
        behind = seen[1][1]
        assert behind.host is not None
        assert behind.host.query_start_S1.tolist() == behind.query_start_S1.tolist()
