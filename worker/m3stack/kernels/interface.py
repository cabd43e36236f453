"""The frozen table of operations a model may call, and the contract each back end must keep.

Letters, the same in every file: T tokens this step, S sequences, H query heads, G KV groups,
D head dim, P pages of the pool, B tokens per page, J pages of a sequence, K chosen blocks,
N vision patches, E experts, M model width.

The plain torch functions in the `reference.py` files are the meaning of these operations. A
faster back end is compared with them before it is timed (`docs/decisions/0003`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What the host knows of a step's rows, for operations that plan there.

    Attributes:
        query_start_S1, seq_lens_S: those of `PagedRows`, int32, in host memory.
    """

    query_start_S1: Tensor
    seq_lens_S: Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where this step's query rows stand in their sequences, and which pages hold their keys.

    Sequence s owns rows `query_start_S1[s] : query_start_S1[s+1]` of the step. Its row i stands at
    position `seq_lens_S[s] - num_rows(s) + i`. Keys of the rows themselves are already written.

    Attributes:
        query_start_S1: int32 [S+1], cumulative row counts, first element 0.
        seq_lens_S: int32 [S], keys visible to the last row of each sequence. A padded row of a
            graph batch has length 0 and must yield zeros.
        page_table_SJ: int32 [S, J], physical page of each 128-token block. Entries past
            `ceil(seq_len / B)` are undefined and must not be read as addresses.
        max_query_len: largest row count of a sequence (host integer).
        max_seq_len: largest entry of `seq_lens_S` (host integer, may be an upper bound).
        host: the lengths where they were built; None where a planner has to read them back.
    """

    query_start_S1: Tensor
    seq_lens_S: Tensor
    page_table_SJ: Tensor
    max_query_len: int
    max_seq_len: int
    host: HostLengths | None = None


@dataclass(frozen=True, slots=True)
class PartRows:
    """A step as a rank sees it whose index keys are a part of all.

    Every sequence is shortened to blocks that matter here: first those of its pages that the rank
    holds and that all its rows may rank, then, whoever holds them, the blocks from the first row's
    local ones on. Rows keep their distance to the latter, so that what a row may rank is what
    stands below its local blocks, as in a whole sequence. `msa/candidates.py` builds it.

    Attributes:
        rows: of the shortened sequences; the page table counts rows of the rank's own index-key
            tensor, and a block that another rank holds stands as that tensor's last row.
        blocks_SJ: int32 [S, J], id in the whole sequence of each entry of that page table;
            `NO_BLOCK` where another rank holds it.
    """

    rows: PagedRows
    blocks_SJ: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Gemma norm weights over one head, shared by all heads: fp32 or model dtype, each [D].

    `index_q` and `index_k` are None on dense layers.
    """

    q: Tensor
    k: Tensor
    index_q: Tensor | None
    index_k: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's slice of the paged cache; one page id covers K, V and index-K.

    Attributes:
        k_PGBD, v_PGBD: head-major pages [P, G, B, D], model dtype; on sparse layers they may be
            float8_e4m3fn, where larger values than 448 are kept as 448.
        index_k_PBD: [P, B, D_index] or None on dense layers.
        index_copy_PX: uint8 [P, B * (D_index + 4)], the int8 copy of the index keys
            (`msa/index_copy.py`), written with them; None where none is kept.
    """

    k_PGBD: Tensor
    v_PGBD: Tensor
    index_k_PBD: Tensor | None
    index_copy_PX: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Mxfp8Weight:
    """A weight kept in MXFP8; `quantised/mxfp8.py` says what its values are.

    Attributes:
        elements: float8_e4m3fn [..., out, in]; in a weight that kernels get, none is NaN.
        scales: uint8 [..., out, in / 32], E8M0; in such a weight 0 to 134.
    """

    elements: Tensor
    scales: Tensor


Weight = Tensor | Mxfp8Weight


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every token goes through, of the routed ones' width and format.

    Attributes:
        gate_up_fM: [2F, M], gate rows first.
        down_MF: [M, F].
    """

    gate_up_fM: Weight
    down_MF: Weight


class RunExperts(Protocol):
    """The clamped SwiGLU of each token's experts, added up."""

    def __call__(
        self,
        x_TM: Tensor,
        gate_up_EfM: Weight,
        down_EMF: Weight,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        alpha: float,
        limit: float,
        *,
        shared: SharedExpert | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """`factor * sum of the chosen experts by weight + the shared expert`.

        Weights in MXFP8 mean their decoded values; activations are never quantised.

        Args:
            x_TM: [T, M].
            gate_up_EfM: [E, 2F, M], gate rows first.
            down_EMF: [E, M, F].
            ids_Tk: int32 [T, k]; negative ids add nothing.
            weights_Tk: fp32 [T, k].
            alpha, limit: of the activation.
            shared: added with weight 1 where given.
            factor: of the routed experts alone.

        Returns:
            [T, M] in the dtype of `x_TM`.
        """
        ...


# x [..., M], weight [M], eps -> [..., M]: x * rsqrt(mean(x^2) + eps) * (1 + w), fp32 inside.
GemmaNorm = Callable[[Tensor, Tensor, float], Tensor]

# gate [..., F], up [..., F], alpha, limit -> [..., F]:
# g = min(g, limit), u = clamp(u, -limit, limit), (u + 1) * g * sigmoid(alpha * g); fp32 inside.
SwigluOai = Callable[[Tensor, Tensor, float, float], Tensor]


class AttentionPrologue(Protocol):
    """Norms and rotates a step's heads and writes its keys and values into the cache.

    q, k, index q and index k are normed per head and rotated in their first R dims (split-half
    pairs i and i + R/2). K, V and index-K, with its copy where one is kept, go into slot
    `page * B + offset`; rows with a negative slot write nothing.
    """

    def __call__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index_q_TGD: Tensor | None,
        index_k_TD: Tensor | None,
        norms: HeadNorms,
        cos: Tensor,
        sin: Tensor,
        slots_T: Tensor,
        pages: LayerPages,
        index_slots_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(q [T,H,D], index q [T,G',D] or None), normed and rotated.

        Args:
            index_q_TGD: its G' may differ from the G of keys and values.
            cos, sin: fp32 [T, R/2].
            slots_T: int64 [T].
            index_slots_T: int64 [T], slots of the index keys where they are not `slots_T`: a rank
                that holds a part of them writes the others nowhere.
        """
        ...


# q, k, v [N,H,D], cu_seqlens int32 [rows+1], max_len, scale -> [N,H,D]: full attention in each row.
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]

# q [T,H,D], pages, rows, scale -> [T,H,D]: causal attention over every visible key.
PagedAttention = Callable[[Tensor, LayerPages, PagedRows, float], Tensor]

# index_q [T,G,D], index_k [P,B,D], rows, num_blocks K, num_local_blocks -> int32 [G,T,K].
# Score of a block: max over its visible keys of the unscaled fp32 dot product. The local blocks
# (the row's own and those just before it) are always chosen and count inside K; the rest is
# ranked by score descending, then lower block id; NaN counts as -inf, +0 equals -0. The
# result is ascending (so the row's own block stands last) and padded with -1 at the tail.
# Where `LayerPages.index_copy_PX` is kept, it follows as a last argument: it may change the time
# that a back end takes, never the result.
ChooseBlocks = Callable[..., Tensor]

# index_q [T,G,D], index_k [P',B,D], part of a step, num_blocks K, num_local_blocks ->
# int64 [G,T,K]: the best of the blocks whose index keys this rank holds, descending;
# `msa/candidates.py` says what an entry means. Blocks whose score is NaN or minus infinity may be
# left out.
ChooseCandidates = Callable[[Tensor, Tensor, PartRows, int, int], Tensor]

# candidates of R ranks int64 [R,G,T,K], rows, page tokens B, num_local_blocks -> int32 [G,T,K]:
# what `ChooseBlocks` gives with all index keys.
MergeCandidates = Callable[[Tensor, PagedRows, int, int], Tensor]

# q [T,H,D], pages, blocks int32 [G,T,K], rows, scale -> [T,H,D]: exact softmax over the keys of
# the chosen blocks at or before the row. Query head h reads KV group h // (H/G).
BlockAttention = Callable[[Tensor, LayerPages, Tensor, PagedRows, float], Tensor]

# x [T,M], router weight fp32 [E,M], bias fp32 [E], top_k -> (ids int32 [T,k], weights fp32 [T,k]).
# s = sigmoid(W x) in fp32; the k largest of s + bias, ties to the lower id; weights s / sum(s).
RouteTokens = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]

# x [T,M], weight [N,M] -> [T,N] in the dtype of x: x W^T with the decoded weight, fp32 sums.
LinearMxfp8 = Callable[[Tensor, Mxfp8Weight], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One chosen speed for every operation; built once at start by `select.build_kernels`."""

    name: str
    gemma_norm: GemmaNorm
    swiglu_oai: SwigluOai
    attention_prologue: AttentionPrologue
    varlen_attention: VarlenAttention
    paged_attention: PagedAttention
    choose_blocks: ChooseBlocks
    choose_candidates: ChooseCandidates
    merge_candidates: MergeCandidates
    block_attention: BlockAttention
    route_tokens: RouteTokens
    run_experts: RunExperts
    linear_mxfp8: LinearMxfp8


NO_BLOCK = -1
INDEX_DTYPE = torch.int32
