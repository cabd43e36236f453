// Puts (token, expert) pairs in order of their experts, and tokens in order of their pairs.
//
// A block an expert: each reads all ids, so none waits for another and no size leaves the GPU.
#include "moe_ring_tiles.cuh"

namespace m3 {

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32, kMostExperts = 1024;

struct SortArgs {
    const int32_t* ids;  // [num_pairs]; negative ones are in no block
    int32_t* pairs;      // [num_pairs], ascending by expert and number; -1 past the sorted ones
    int32_t* places;     // [num_pairs], where in `pairs` a pair stands; -1 for those in no block
    int32_t* experts;    // [max_blocks], -1 where a block is not used
    int32_t* firsts;     // [max_blocks]
    int32_t* counts;     // [max_blocks]
    int32_t num_pairs;
    int32_t num_experts;
    int32_t max_blocks;
    int32_t most;  // tokens of a block, a multiple of 16
};

// Sum over the threads before this one, and over all; `parts` are a warp's each.
__device__ __forceinline__ int sum_before(int mine, int* parts, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = mine;
    for (int hop = 1; hop < 32; hop *= 2) {
        const int other = __shfl_sync(~0u, sum, max(lane - hop, 0));
        if (lane >= hop) sum += other;
    }
    __syncthreads();
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < kSortWarps; ++i) {
        if (i < warp) before += parts[i];
        total += parts[i];
    }
    return before + sum - mine;
}

// Blocks of an expert with this many pairs: none larger than `most`, all about as large.
__device__ __forceinline__ int blocks_of(int count, int most) { return (count + most - 1) / most; }

__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ SortArgs a) {
    __shared__ int bins[kMostExperts];
    __shared__ int parts[kSortWarps];
    const int expert = blockIdx.x, thread = threadIdx.x;
    for (int i = thread; i < a.num_experts; i += kSortThreads) bins[i] = 0;
    __syncthreads();
    // a warp takes pairs side by side, so that order is kept
    const int lane = thread % 32, share = (a.num_pairs + kSortThreads - 1) / kSortThreads * 32;
    const int from = min(thread / 32 * share, a.num_pairs), to = min(from + share, a.num_pairs);
    int mine = 0;
#pragma unroll 4
    for (int base = from; base < to; base += 32) {
        const int one = base + lane < to ? a.ids[base + lane] : -1;
        if (one >= 0 && one < a.num_experts) atomicAdd(&bins[one], 1);
        mine += __popc(__ballot_sync(~0u, one == expert));
    }
    __syncthreads();
    int rows = 0, blocks = 0, start, first, all_rows, all_blocks, count;
    for (int other = thread; other < a.num_experts; other += kSortThreads) {
        if (other < expert) rows += bins[other], blocks += blocks_of(bins[other], a.most);
    }
    sum_before(rows, parts, start);
    sum_before(blocks, parts, first);
    int place = start + __shfl_sync(~0u, sum_before(lane == 0 ? mine : 0, parts, count), 0);
    const bool is_last = expert == a.num_experts - 1;
#pragma unroll 4
    for (int base = from; base < to; base += 32) {
        const int pair = base + lane, one = pair < to ? a.ids[pair] : -1;
        const bool is_mine = one == expert;
        const unsigned all = __ballot_sync(~0u, is_mine);
        if (is_mine) {
            const int at = place + __popc(all & ((1u << lane) - 1));
            a.pairs[at] = pair;
            a.places[pair] = at;
        } else if (is_last && pair < to && (one < 0 || one >= a.num_experts)) {
            a.places[pair] = -1;
        }
        place += __popc(all);
    }
    const int own = blocks_of(count, a.most);
    const int size = own == 0 ? 0 : ((count + own - 1) / own + 15) / 16 * 16;
    for (int i = thread; i < own; i += kSortThreads) {
        a.experts[first + i] = expert;
        a.firsts[first + i] = start + i * size;
        a.counts[first + i] = max(0, min(size, count - i * size));
    }
    if (!is_last) return;
    all_rows = start + count;
    all_blocks = first + own;
    for (int i = all_rows + thread; i < a.num_pairs; i += kSortThreads) a.pairs[i] = -1;
    for (int i = all_blocks + thread; i < a.max_blocks; i += kSortThreads) {
        a.experts[i] = -1;
        a.firsts[i] = a.counts[i] = 0;
    }
}

struct GatherArgs {
    const void* x;          // bf16 [tokens, width]
    const int32_t* places;  // [tokens, top_k], rows of `out`, negative where there is none
    void* out;              // bf16 [num_pairs (+ tokens), width]: each pair's token, then all tokens
    int32_t* next_tiles;    // [2], set to 0 for the products that follow
    int64_t x_row;          // elements between rows of x
    int32_t num_pairs;
    int32_t top_k;
    int32_t width;
    int32_t is_coded;       // columns in the order in which MXFP8 is decoded, see `column_at`
    int32_t with_tokens;    // whether all tokens follow the pairs
};

constexpr int kGatherThreads = 192;

// A block a token: it is read once, however many experts it goes to.
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const __grid_constant__ GatherArgs a) {
    // 16 columns a thread, which are stored 8 at a time side by side
    __shared__ uint4 ordered[2 * kGatherThreads];
    const int64_t token = blockIdx.x;
    const int thread = threadIdx.x, copies = a.top_k + a.with_tokens;
    if (token == 0 && thread < 2) a.next_tiles[thread] = 0;
    const auto* from = static_cast<const __nv_bfloat16*>(a.x) + token * a.x_row;
    const int32_t* places = a.places + token * a.top_k;
    for (int first = 0; first < a.width / 16; first += kGatherThreads) {
        const int part = first + thread;
        if (part < a.width / 16 && a.is_coded == 0) {
            const auto* in = reinterpret_cast<const uint4*>(from) + 2 * part;
            ordered[2 * thread] = in[0], ordered[2 * thread + 1] = in[1];
        } else if (part < a.width / 16) {
            // of the quarters of 64 columns, four each: first the even ones, then the odd
            const int span = part / 4 * kChunk, j = part % 4;
            uint2 four[4];
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                four[quarter] = *reinterpret_cast<const uint2*>(from + span + quarter * 16 + j * 4);
            }
            uint32_t even[4], odd[4];
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                even[quarter] = (four[quarter].x & 0xffffu) | four[quarter].y << 16;
                odd[quarter] = four[quarter].x >> 16 | (four[quarter].y & 0xffff0000u);
            }
            ordered[2 * thread] = make_uint4(even[0], even[1], even[2], even[3]);
            ordered[2 * thread + 1] = make_uint4(odd[0], odd[1], odd[2], odd[3]);
        }
        __syncthreads();
        const int count = min(2 * kGatherThreads, a.width / 8 - 2 * first);
        for (int i = 0; i < copies; ++i) {
            const int64_t row = i < a.top_k ? places[i] : a.num_pairs + token;
            if (row < 0) continue;
            auto* to = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.out) + row * a.width) + 2 * first;
#pragma unroll
            for (int at = thread; at < 2 * kGatherThreads; at += kGatherThreads) {
                if (at < count) to[at] = ordered[at];
            }
        }
        __syncthreads();
    }
}

}  // namespace m3

// at most 1,024 experts
extern "C" int m3_sort(const m3::SortArgs* a, cudaStream_t stream) {
    using namespace m3;
    if (a->num_experts > kMostExperts) return cudaErrorInvalidValue;
    void* arguments[] = {const_cast<SortArgs*>(a)};
    return launch_plain(reinterpret_cast<const void*>(&sort_kernel), dim3(a->num_experts), kSortThreads, 0, arguments,
                        stream);
}

extern "C" int m3_gather(const m3::GatherArgs* a, int tokens, cudaStream_t stream) {
    using namespace m3;
    void* arguments[] = {const_cast<GatherArgs*>(a)};
    return launch_plain(reinterpret_cast<const void*>(&gather_kernel), dim3(tokens), kGatherThreads, 0, arguments, stream);
}
