"""The check every chosen operation passes at start: small inputs in the model's shape, both ways.

A wrong driver, compiler or library shows here, by name, before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import (
    HeadNorms,
    Kernels,
    LayerPages,
    Mxfp8Weight,
    PagedRows,
    PartRows,
    SharedExpert,
    Weight,
)
from m3stack.kernels.msa.candidates import part_of_rows
from m3stack.kernels.msa.index_copy import IndexCopy, copy_index_keys, page_bytes
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.shape import KernelShape

# half-precision outputs of sums in another order; wrong results are off by far more
LIMIT = 2e-2
# what a check multiplies: more than one tile of every back end, and a small share of a real layer
WIDTH, INNER = 384, 128
# few tokens and many take different kernels
EXPERT_TOKENS = (1, 5, 33, 300)
ROUTED_TOKENS = (1, 2, 33)
# of a GPU: decode rows that share its processors in other ways, and a chunk of many rows
DECODE_ROWS, CHUNK_ROWS = (9, 40), 1100
# keys that a sequence is said to have at most: an index copy is worth reading first
COPIED_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of one step: a decode batch, or one with a prefill chunk."""

    q_THD: Tensor
    index_q_TGD: Tensor
    pages: LayerPages
    rows: PagedRows


def check_operation(
    name: str, run: Callable, reference: Kernels, shape: KernelShape, device: torch.device
) -> None:
    """Compares one operation with its reference on the device.

    Raises:
        KernelUnavailableError: names the operation and how far it is off.
    """
    check = {
        "gemma_norm": _check_norm,
        "swiglu_oai": _check_swiglu,
        "attention_prologue": _check_prologue,
        "varlen_attention": _check_varlen,
        "paged_attention": _check_paged,
        "choose_blocks": _check_choice,
        "choose_candidates": _check_candidates,
        "merge_candidates": _check_merge,
        "block_attention": _check_blocks,
        "route_tokens": _check_routing,
        "run_experts": _check_experts,
        "linear_mxfp8": _check_linear,
    }[name]
    check(run, reference, shape, device)


def steps(shape: KernelShape, device: torch.device) -> list[Step]:
    """Decode steps and steps with a chunk, each past the length where blocks are left out."""
    long = (shape.num_blocks + 5) * shape.page_tokens + 3
    made = [
        _step(shape, device, seq_lens=(long, 5, 0), num_rows=(1, 1, 1)),
        _step(shape, device, seq_lens=(long, shape.page_tokens), num_rows=(40, 1)),
    ]
    if device.type == "cuda":
        made += [
            _step(shape, device, seq_lens=(long, *[5] * (count - 1)), num_rows=(1,) * count)
            for count in DECODE_ROWS
        ]
        made.append(_step(shape, device, seq_lens=(long + CHUNK_ROWS,), num_rows=(CHUNK_ROWS,)))
    return made


def _step(
    shape: KernelShape,
    device: torch.device,
    seq_lens: tuple[int, ...],
    num_rows: tuple[int, ...],
) -> Step:
    torch_lens = torch.tensor(seq_lens, dtype=torch.int32)
    pages_each = (torch_lens + shape.page_tokens - 1) // shape.page_tokens
    num_pages, width = int(pages_each.sum()), int(pages_each.max())
    table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    order = torch.arange(num_pages, dtype=torch.int32).flip(0)
    for row, part in enumerate(order.split(pages_each.tolist())):
        table[row, : len(part)] = part
    rows = PagedRows(
        query_start_S1=torch.tensor((0, *num_rows)).cumsum(0).to(torch.int32).to(device),
        seq_lens_S=torch_lens.to(device),
        page_table_SJ=table.to(device),
        max_query_len=max(num_rows),
        max_seq_len=max(seq_lens),
    )
    num_tokens, dim = sum(num_rows), shape.head_dim
    pool = (num_pages, shape.groups, shape.page_tokens, dim)
    pages = LayerPages(
        _normal(shape, device, *pool),
        _normal(shape, device, *pool),
        _integers(shape, device, num_pages, shape.page_tokens, dim),
    )
    return Step(
        q_THD=_normal(shape, device, num_tokens, shape.heads, dim),
        index_q_TGD=_integers(shape, device, num_tokens, shape.groups, dim),
        pages=pages,
        rows=rows,
    )


def _normal(shape: KernelShape, device: torch.device, *size: int) -> Tensor:
    # a generator of its own: the program's random state is not the check's to move
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator).to(device, shape.dtype)


def _integers(shape: KernelShape, device: torch.device, *size: int) -> Tensor:
    # sums of products of small integers are exact in any order: choices must be equal
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randint(-2, 3, size, generator=generator).to(device, shape.dtype)


def _require_close(name: str, actual: Tensor, expected: Tensor) -> None:
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= LIMIT:
        raise KernelUnavailableError(
            f"{name}: relative error {error:.3g} against the reference, limit {LIMIT:.3g}"
        )


def _check_norm(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    x = _normal(shape, device, 3, 96)
    weight = _normal(shape, device, 96).float()
    _require_close("gemma_norm", run(x, weight, 1e-6), reference.gemma_norm(x, weight, 1e-6))


def _check_swiglu(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    gate, up = (8 * _normal(shape, device, 3, 192)).chunk(2, dim=-1)
    _require_close(
        "swiglu_oai", run(gate, up, 1.702, 7.0), reference.swiglu_oai(gate, up, 1.702, 7.0)
    )


def _check_prologue(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    num_tokens, groups, dim = 3, shape.groups, shape.head_dim
    row = _normal(shape, device, num_tokens, shape.heads + 3 * groups + 1, dim)
    q, k, v, index_q, index_k = row.split((shape.heads, groups, groups, groups, 1), dim=1)
    norms = HeadNorms(*_normal(shape, device, 4, dim).float(), 1e-6)
    angle = _normal(shape, device, num_tokens, shape.rotary_dim // 2).float()
    slots = torch.tensor([1, -1, shape.page_tokens + 2], device=device)
    written = []
    for prologue in (run, reference.attention_prologue):
        pool = torch.zeros(2, groups, shape.page_tokens, dim, dtype=shape.dtype, device=device)
        pages = LayerPages(pool, pool.clone(), pool[:, 0].clone())
        made = prologue(
            q, k, v, index_q, index_k[:, 0], norms, angle.cos(), angle.sin(), slots, pages
        )
        written.append((*made, pages.k_PGBD, pages.v_PGBD, pages.index_k_PBD))
    for actual, expected in zip(*written, strict=True):
        _require_close("attention_prologue", actual, expected)


def _check_varlen(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    bounds = torch.tensor([0, 7, 40], dtype=torch.int32, device=device)
    size = (3, 40, shape.vision_heads, shape.vision_head_dim)
    q, k, v = _normal(shape, device, *size)
    inputs = (q, k, v, bounds, 33, shape.vision_head_dim**-0.5)
    _require_close("varlen_attention", run(*inputs), reference.varlen_attention(*inputs))


def _check_paged(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    for step in steps(shape, device):
        inputs = (step.q_THD, step.pages, step.rows, shape.head_dim**-0.5)
        _require_close("paged_attention", run(*inputs), reference.paged_attention(*inputs))


def _check_choice(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    for step in steps(shape, device):
        inputs = (step.index_q_TGD, step.pages.index_k_PBD, step.rows)
        inputs = (*inputs, shape.num_blocks, shape.num_local_blocks)
        if not torch.equal(run(*inputs), reference.choose_blocks(*inputs)):
            raise KernelUnavailableError("choose_blocks: other blocks than the reference chooses")
    if device.type == "cuda":
        step, copy = _copied_step(shape, device)
        inputs = (step.index_q_TGD, step.pages.index_k_PBD, step.rows)
        inputs = (*inputs, shape.num_blocks, shape.num_local_blocks)
        if not torch.equal(run(*inputs, copy), reference.choose_blocks(*inputs)):
            raise KernelUnavailableError(
                "choose_blocks: with an index copy other blocks than the reference chooses"
            )


def _copied_step(shape: KernelShape, device: torch.device) -> tuple[Step, Tensor]:
    """A decode step whose lengths, for all that the host knows, pay for reading a copy first."""
    step = steps(shape, device)[0]
    table, index_k_PBD = step.rows.page_table_SJ, step.pages.index_k_PBD
    assert index_k_PBD is not None
    width = COPIED_TOKENS // shape.page_tokens
    rows = replace(
        step.rows,
        page_table_SJ=functional.pad(table, (0, width - table.shape[1])),
        max_seq_len=COPIED_TOKENS,
    )
    size = page_bytes(shape.page_tokens, shape.head_dim)
    copy_PX = torch.empty((len(index_k_PBD), size), dtype=torch.uint8, device=device)
    copy = IndexCopy.over(copy_PX, shape.page_tokens)
    keys_PBD, meta_PB = copy_index_keys(index_k_PBD)
    copy.keys_PBD.copy_(keys_PBD)
    copy.meta_PB.copy_(meta_PB)
    return replace(step, rows=rows), copy_PX


def _parts(step: Step, shape: KernelShape, ranks: int) -> Iterator[tuple[Tensor, PartRows]]:
    """What each rank holds of the index keys, and how it sees the step."""
    index_k_PBD = step.pages.index_k_PBD
    assert index_k_PBD is not None
    for rank in range(ranks):
        pool = torch.cat([index_k_PBD[rank::ranks], torch.full_like(index_k_PBD[:1], torch.nan)])
        part = part_of_rows(
            step.rows,
            rank=rank,
            ranks=ranks,
            page_tokens=shape.page_tokens,
            last_row=len(pool) - 1,
            num_local=shape.num_local_blocks,
        )
        yield pool, part


def _check_candidates(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    for step in steps(shape, device):
        for pool, part in _parts(step, shape, 2):
            inputs = (step.index_q_TGD, pool, part, shape.num_blocks, shape.num_local_blocks)
            if not torch.equal(
                _ranked(run, inputs, shape), _ranked(reference.choose_candidates, inputs, shape)
            ):
                raise KernelUnavailableError(
                    "choose_candidates: other blocks than the reference chooses"
                )


def _ranked(choose: Callable, inputs: tuple, shape: KernelShape) -> Tensor:
    """Candidates that can win: local blocks leave fewer places than there are entries."""
    return choose(*inputs)[..., : shape.num_blocks - shape.num_local_blocks]


def _check_merge(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    for step in steps(shape, device):
        found = [
            reference.choose_candidates(
                step.index_q_TGD, pool, part, shape.num_blocks, shape.num_local_blocks
            )
            for pool, part in _parts(step, shape, 3)
        ]
        inputs = (torch.stack(found), step.rows, shape.page_tokens, shape.num_local_blocks)
        if not torch.equal(run(*inputs), reference.merge_candidates(*inputs)):
            raise KernelUnavailableError("merge_candidates: other blocks than the reference merges")


def _check_blocks(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    for step in steps(shape, device):
        blocks_GTK = reference.choose_blocks(
            step.index_q_TGD,
            step.pages.index_k_PBD,
            step.rows,
            shape.num_blocks,
            shape.num_local_blocks,
        )
        inputs = (step.q_THD, step.pages, blocks_GTK, step.rows, shape.head_dim**-0.5)
        _require_close("block_attention", run(*inputs), reference.block_attention(*inputs))


def _check_routing(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    router = _integers(shape, device, shape.experts, WIDTH)
    bias = _integers(shape, device, shape.experts).float() / 4
    for num_tokens in ROUTED_TOKENS:
        x = _integers(shape, device, num_tokens, WIDTH)
        # scores between 0 and 1 that sums in another order leave as they are
        inputs = (x, router.float() / 64, bias, shape.experts_per_token)
        ids, weights = run(*inputs)
        expected_ids, expected_weights = reference.route_tokens(*inputs)
        if not torch.equal(ids, expected_ids):
            raise KernelUnavailableError("route_tokens: other experts than the reference chooses")
        _require_close("route_tokens", weights, expected_weights)


def _check_experts(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    def matrix(*size: int) -> Tensor:
        return _normal(shape, device, *size) * size[-1] ** -0.5

    experts = min(shape.experts, 6)
    plain = (matrix(experts, 2 * INNER, WIDTH), matrix(experts, WIDTH, INNER))
    own = (matrix(2 * INNER, WIDTH), matrix(WIDTH, INNER))
    forms: list[tuple[tuple[Weight, Weight], SharedExpert]] = [(plain, SharedExpert(*own))]
    if shape.dtype == torch.bfloat16:
        gate_up, down, *coded_own = (mxfp8.encode(one) for one in (*plain, *own))
        forms.append(((gate_up, down), SharedExpert(*coded_own)))
    chosen = min(shape.experts_per_token, experts)
    # the choice of a kernel counts on all experts: as many tokens more as there are fewer here
    most = EXPERT_TOKENS[-1] * shape.experts // experts
    for num_tokens in sorted({*EXPERT_TOKENS, most}):
        x = _normal(shape, device, num_tokens, WIDTH)
        ids = _normal(shape, device, num_tokens, experts).argsort(1)[:, :chosen].to(torch.int32)
        ids[-1, -1] = -1
        weights = _normal(shape, device, num_tokens, chosen).float().sigmoid()
        for weights_pair, shared in forms:
            for rides in (shared, None):
                inputs = (x, *weights_pair, ids, weights, 1.702, 7.0)
                actual = run(*inputs, shared=rides, factor=2.0)
                expected = reference.run_experts(*inputs, shared=rides, factor=2.0)
                # the one result that may be all zeros
                if expected.any():
                    _require_close("run_experts", actual, expected)


def _check_linear(run: Callable, reference: Kernels, shape: KernelShape, device: torch.device):
    if shape.dtype != torch.bfloat16:
        return  # weights are kept in MXFP8 beside bf16 activations alone
    weight: Mxfp8Weight = mxfp8.encode(_normal(shape, device, INNER, WIDTH))
    for num_tokens in EXPERT_TOKENS:
        x = _normal(shape, device, num_tokens, WIDTH)
        _require_close("linear_mxfp8", run(x, weight), reference.linear_mxfp8(x, weight))
