// The exact choice of blocks from rank keys, and the second stage that makes upper bounds exact.
//
// Total order: larger key first, then lower block id. A threshold that at least `need` keys reach is
// taken from the largest keys of groups of lanes; the few keys at or above it are ranked by counting.
#include "async_copy.cuh"

namespace m3 {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kLoads = 16;            // keys that a thread has on the way at a time
constexpr int kMaxCandidates = 1024;
constexpr int kDirect = 128;          // so few keys are all ranked
constexpr int kMaxChosen = 32;
constexpr int kMaxima = kSelectThreads / 4;  // not below kMaxChosen, so that enough keys reach the cut

struct SelectArgs {
    uint32_t* keys;                   // [T*G, row_stride]; refine: upper bounds, rewritten as zeros
    const uint32_t* lower_keys;       // refine only
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    int32_t* blocks;                  // [G,T,K]
    int32_t* pages;                   // [T,G,K] virtual pages page * G + g in the order of `blocks`, or null
    int32_t* candidates;              // refine only: [T*G, row_stride]
    int32_t* num_candidates;          // refine only: [T*G]
    int64_t row_stride;
    int64_t table_stride;
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t num_chosen;
    int32_t num_local;
};

struct RowPlace {
    int sequence;  // -1 where the row belongs to no sequence with keys
    int position;
};

// every thread of the block learns where row t stands; `found` is two shared integers
__device__ __forceinline__ RowPlace find_row(const int32_t* query_start, const int32_t* seq_lens, int num_seqs,
                                             int row, int* found) {
    if (threadIdx.x == 0) found[0] = -1;
    __syncthreads();
    for (int s = threadIdx.x; s < num_seqs; s += blockDim.x) {
        const int first = query_start[s], last = query_start[s + 1], len = seq_lens[s];
        if (first <= row && row < last && len > 0) {
            found[0] = s;
            found[1] = len - (last - row);
        }
    }
    __syncthreads();
    return {found[0], found[1]};
}

__device__ __forceinline__ uint64_t total_order(uint32_t key, int block) {
    return (uint64_t(key) << 32) | uint32_t(~block);
}

struct __align__(16) SelectShared {
    uint32_t most[kMaxima];
    uint64_t candidates[kMaxCandidates + 2];
    uint64_t warp_best[kSelectWarps];
    uint32_t warp_threshold[kSelectWarps];
    int winners[kMaxChosen];
    int count;
    uint32_t cut;
    int found[2];
};

// winners and cut among shared.candidates[0..count), count even, each entry's rank by counting the larger ones
__device__ __forceinline__ void rank_candidates(int count, int need, SelectShared& shared) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(shared.candidates);
    for (int mine = threadIdx.x; mine < count; mine += kSelectThreads) {
        const uint64_t value = shared.candidates[mine];
        int rank = value == 0 ? kMaxCandidates : 0;
#pragma unroll 8
        for (int other = 0; other < count / 2; ++other) {
            const ulonglong2 pair = pairs[other];
            rank += (pair.x > value) + (pair.y > value);
        }
        if (rank < need) {
            shared.winners[rank] = int(~uint32_t(value));
            if (rank == need - 1) shared.cut = uint32_t(value >> 32);
        }
    }
    __syncthreads();
}

// the `need` best of keys[0..n), need <= n, into shared.winners in rank order; shared.cut is the last one's key
// (loops stay rolled: these kernels run once through, so fetching instructions is what they wait for)
__device__ void best_blocks(const uint32_t* keys, int n, int need, SelectShared& shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (n <= kDirect) {
        if (thread < kDirect) shared.candidates[thread] = thread < n ? total_order(keys[thread], thread) : 0;
        __syncthreads();
        rank_candidates((n + 1) & ~1, need, shared);
        return;
    }
    uint32_t most = 0;
#pragma unroll 1
    for (int base = thread; base < n; base += kLoads * kSelectThreads) {
        uint32_t key[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            key[i] = base + i * kSelectThreads < n ? keys[base + i * kSelectThreads] : 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) most = max(most, key[i]);
    }
    // the need-th largest of the maxima of four lanes each bounds the need-th largest key from below
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    if (lane % 4 == 0) shared.most[thread / 4] = most;
    if (thread == 0) shared.count = 0;
    __syncthreads();
    int larger = 0;
    const uint4* others = reinterpret_cast<const uint4*>(shared.most);
#pragma unroll 4
    for (int i = 0; i < kMaxima / 4; ++i) {
        const uint4 v = others[i];
        larger += (v.x > most) + (v.y > most) + (v.z > most) + (v.w > most);
    }
    const uint32_t threshold = __reduce_min_sync(~0u, larger < need ? most : ~0u);
    if (lane == 0) shared.warp_threshold[warp] = threshold;
    __syncthreads();
    uint32_t cut = ~0u;
#pragma unroll
    for (int i = 0; i < kSelectWarps; ++i) cut = min(cut, shared.warp_threshold[i]);
    cut = max(cut, 1u);  // key 0 is no block
#pragma unroll 4
    for (int block = thread; block < n; block += kSelectThreads) {
        const uint32_t key = keys[block];
        if (key < cut) continue;
        const int at = atomicAdd(&shared.count, 1);
        if (at < kMaxCandidates) shared.candidates[at] = total_order(key, block);
    }
    __syncthreads();
    const int count = shared.count;
    if (count <= kMaxCandidates) {
        // an even number of entries, so that they can be read in pairs; 0 ranks behind every block
        if (thread == 0) shared.candidates[count] = 0;
        __syncthreads();
        rank_candidates((count + 1) & ~1, need, shared);
        return;
    }
    // so many equal keys that the list overflows: one exact pass over the row for each winner
    uint64_t bound = ~0ull;
#pragma unroll 1
    for (int rank = 0; rank < need; ++rank) {
        uint64_t best = 0;
#pragma unroll 2
        for (int block = thread; block < n; block += kSelectThreads) {
            const uint64_t value = total_order(keys[block], block);
            if (value < bound && value > best) best = value;
        }
#pragma unroll 1
        for (int hop = 16; hop > 0; hop /= 2) {
            const uint64_t other = __shfl_xor_sync(~0u, best, hop);
            best = other > best ? other : best;
        }
        __syncthreads();
        if (lane == 0) shared.warp_best[warp] = best;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSelectWarps; ++i) best = shared.warp_best[i] > best ? shared.warp_best[i] : best;
        bound = best;
        if (thread == 0) {
            shared.winners[rank] = int(~uint32_t(best));
            shared.cut = uint32_t(best >> 32);
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SelectArgs args) {
    __shared__ SelectShared shared;
    const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
    // the scoring kernel, which alone may precede this one, has waited for whoever wrote these
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, shared.found);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int own = place.sequence < 0 ? -1 : place.position / kPageTokens;
    const int num_local = min(args.num_local, own + 1);
    const int ranked = own + 1 - num_local;
    const int need = min(args.num_chosen - num_local, ranked);
    if (need == ranked || need == 0) {
        if (thread < need) shared.winners[thread] = thread;
        __syncthreads();
    } else {
        best_blocks(args.keys + (int64_t(row) * args.groups + group) * args.row_stride, ranked, need, shared);
    }
    if (thread < 32) {
        int block = thread < need ? shared.winners[thread] : own - num_local + 1 + thread - need;
        const bool chosen = thread < need + num_local;
        if (!chosen) block = 0x7fffffff;
        int rank = 0;
#pragma unroll 8
        for (int hop = 0; hop < 32; ++hop) rank += __shfl_sync(~0u, block, hop) < block;
        if (!chosen) rank = thread;
        if (rank < args.num_chosen && thread < args.num_chosen) {
            args.blocks[(int64_t(group) * args.num_rows + row) * args.num_chosen + rank] = chosen ? block : -1;
            if (args.pages && chosen)
                args.pages[(int64_t(row) * args.groups + group) * args.num_chosen + rank] =
                    args.page_table[place.sequence * args.table_stride + block] * args.groups + group;
        }
    }
}

// leaves the blocks whose upper bound reaches the cut as candidates and clears the other keys
__global__ void __launch_bounds__(kSelectThreads) refine_kernel(const __grid_constant__ SelectArgs args) {
    __shared__ SelectShared shared;
    const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x, lane = thread % 32;
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, shared.found);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t line = int64_t(row) * args.groups + group;
    const int own = place.sequence < 0 ? -1 : place.position / kPageTokens;
    const int num_local = min(args.num_local, own + 1);
    const int ranked = own + 1 - num_local;
    const int need = min(args.num_chosen - num_local, ranked);
    if (need == ranked || need == 0) {
        if (thread == 0) args.num_candidates[line] = 0;
        return;
    }
    best_blocks(args.lower_keys + line * args.row_stride, ranked, need, shared);
    const uint32_t cut = shared.cut;
    __syncthreads();
    if (thread == 0) shared.count = 0;
    __syncthreads();
    uint32_t* keys = args.keys + line * args.row_stride;
    int32_t* candidates = args.candidates + line * args.row_stride;
    for (int base = 0; base < ranked; base += kSelectThreads) {
        const int block = base + thread;
        const bool keep = block < ranked && keys[block] >= cut;
        if (block < ranked && !keep) keys[block] = 0;
        const uint32_t mask = __ballot_sync(~0u, keep);
        int at = 0;
        if (lane == 0 && mask) at = atomicAdd(&shared.count, __popc(mask));
        at = __shfl_sync(~0u, at, 0) + __popc(mask & ((1u << lane) - 1));
        if (keep) candidates[at] = block;
    }
    __syncthreads();
    if (thread == 0) args.num_candidates[line] = shared.count;
}

struct RescoreArgs {
    const __nv_bfloat16* q;           // [T,G,D]
    const __nv_bfloat16* pages;       // [P,B,D]
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    const int32_t* candidates;
    const int32_t* num_candidates;
    uint32_t* keys;
    int64_t page_stride;
    int64_t table_stride;
    int64_t row_stride;
    int32_t num_seqs;
    int32_t groups;
};

// the one-stage score of each candidate, by the same products in the same order
__global__ void __launch_bounds__(kSelectThreads) rescore_kernel(const __grid_constant__ RescoreArgs args) {
    __shared__ int found[2];
    __shared__ float partials[2][kSelectWarps];
    const int row = blockIdx.y / args.groups, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t line = blockIdx.y;
    const int count = args.num_candidates[line];
    if (blockIdx.x >= count) return;
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, found);
    uint4 b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        b[i] = make_uint4(0, 0, 0, 0);
        if (g == 0) b[i] = *reinterpret_cast<const uint4*>(args.q + line * kHeadDim + (t + 4 * i) * 8);
    }
    const int token = warp * 16 + g;
    int turn = 0;
    for (int index = blockIdx.x; index < count; index += gridDim.x, turn ^= 1) {
        const int block = args.candidates[line * args.row_stride + index];
        const int page = args.page_table[place.sequence * args.table_stride + block];
        const __nv_bfloat16* keys = args.pages + page * args.page_stride;
        uint4 top[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            top[i] = *reinterpret_cast<const uint4*>(keys + token * kHeadDim + (t + 4 * i) * 8);
            low[i] = *reinterpret_cast<const uint4*>(keys + (token + 8) * kHeadDim + (t + 4 * i) * 8);
        }
        float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mma_bf16(c, {top[i].x, low[i].x, top[i].y, low[i].y}, b[i].x, b[i].y);
            mma_bf16(c, {top[i].z, low[i].z, top[i].w, low[i].w}, b[i].z, b[i].w);
        }
        const int last = place.position - block * kPageTokens;
        float best = max_nan(token <= last ? c[0] : -INFINITY, token + 8 <= last ? c[2] : -INFINITY);
#pragma unroll
        for (int hop = 4; hop < 32; hop *= 2) best = max_nan(best, __shfl_xor_sync(~0u, best, hop));
        if (lane == 0) partials[turn][warp] = best;
        __syncthreads();
        if (thread == 0) {
#pragma unroll
            for (int other = 1; other < kSelectWarps; ++other) best = max_nan(best, partials[turn][other]);
            args.keys[line * args.row_stride + block] = rank_key(best);
        }
    }
}

struct SplitQueryArgs {
    const __nv_bfloat16* q;  // [T*G, D]
    int8_t* planes;          // [T*G, 2, D] high and low bytes of 16-bit integers
    float4* meta;            // [T*G] {scale, norm bound, 0, 0}
    int32_t num_lines;
};

// q = scale * (256 high + low) up to half a step; norm bound >= |q|, NaN where q cannot be bounded
__global__ void __launch_bounds__(128) split_query_kernel(const __grid_constant__ SplitQueryArgs args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int line = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (line >= args.num_lines) return;
    const uint2 raw = reinterpret_cast<const uint2*>(args.q + int64_t(line) * kHeadDim)[lane];
    const float x[4] = {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u),
                        __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xFFFF0000u)};
    float most = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        most = max_nan(most, fabsf(x[i]));
        squares += x[i] * x[i];
    }
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) {
        most = max_nan(most, __shfl_xor_sync(~0u, most, hop));
        squares += __shfl_xor_sync(~0u, squares, hop);
    }
    const bool bounded = most <= 1.0e18f;  // false for NaN
    const float scale = fmaxf(most, 1.0e-18f) * (1.0f / 32512.0f);
    uint32_t high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int value = bounded ? __float2int_rn(x[i] / scale) : 0;
        const int top = (value + 128) >> 8;
        high |= uint32_t(uint8_t(top)) << (8 * i);
        low |= uint32_t(uint8_t(value - 256 * top)) << (8 * i);
    }
    uint32_t* planes = reinterpret_cast<uint32_t*>(args.planes) + int64_t(line) * 64;
    planes[lane] = high;
    planes[32 + lane] = low;
    if (lane == 0) {
        // 2^-8 above the computed root covers its rounding; the floor keeps underflow inside the bound
        const float norm = fmaxf(sqrtf(squares) * 1.00390625f, 1.0e-18f);
        args.meta[line] = make_float4(scale, bounded ? norm : __int_as_float(0x7fc00000), 0.f, 0.f);
    }
}

}  // namespace m3

extern "C" int m3_select(const m3::SelectArgs* args, int refine, cudaStream_t stream) {
    void* params[] = {const_cast<m3::SelectArgs*>(args)};
    const void* kernel = refine ? reinterpret_cast<const void*>(&m3::refine_kernel)
                                : reinterpret_cast<const void*>(&m3::select_kernel);
    return m3::launch(kernel, dim3(args->num_rows, args->groups), m3::kSelectThreads, 0, 1, params, stream);
}

extern "C" int m3_rescore(const m3::RescoreArgs* args, int lines, int splits, cudaStream_t stream) {
    void* params[] = {const_cast<m3::RescoreArgs*>(args)};
    return m3::launch(reinterpret_cast<const void*>(&m3::rescore_kernel), dim3(splits, lines), m3::kSelectThreads, 0,
                      1, params, stream);
}

extern "C" int m3_split_query(const m3::SplitQueryArgs* args, cudaStream_t stream) {
    void* params[] = {const_cast<m3::SplitQueryArgs*>(args)};
    return m3::launch(reinterpret_cast<const void*>(&m3::split_query_kernel), dim3((args->num_lines + 3) / 4), 128, 0,
                      1, params, stream);
}
