// Exact choice from rank keys: where a row stands, the best blocks of a row, the list they make.
//
// Total order: larger key first, then lower block id. A threshold that at least `need` keys reach is
// taken from the largest keys of groups of lanes; the few keys at or above it are ranked by counting.
#pragma once
#include "async_copy.cuh"

namespace m3 {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kLoads = 16;            // keys that a thread has on the way at a time
constexpr int kMaxCandidates = 1024;
constexpr int kDirect = 128;          // so few keys are all ranked
constexpr int kMaxChosen = 32;
constexpr int kMaxima = kSelectThreads / 4;  // not below kMaxChosen, so that enough keys reach the cut

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

// what a row may rank: `ranked` blocks below the local ones, of which `need` are to be chosen
struct RowNeeds {
    int own, num_local, ranked, need;

    __device__ __forceinline__ RowNeeds(const RowPlace& place, int most_local, int num_chosen) {
        own = place.sequence < 0 ? -1 : place.position / kPageTokens;
        num_local = min(most_local, own + 1);
        ranked = own + 1 - num_local;
        need = min(num_chosen - num_local, ranked);
    }
};

// one warp: `need` winners and the local blocks in ascending order, then -1
__device__ __forceinline__ void write_choice(const RowNeeds& row, const int* winners, int num_chosen, int32_t* blocks) {
    const int lane = threadIdx.x % 32;
    int block = lane < row.need ? winners[lane] : row.own - row.num_local + 1 + lane - row.need;
    const bool chosen = lane < row.need + row.num_local;
    if (!chosen) block = 0x7fffffff;
    int rank = 0;
#pragma unroll 8
    for (int hop = 0; hop < 32; ++hop) rank += __shfl_sync(~0u, block, hop) < block;
    if (!chosen) rank = lane;
    if (rank < num_chosen && lane < num_chosen) blocks[rank] = chosen ? block : -1;
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
    int found[2];
};

// winners[0..need) among shared.candidates[0..count), count even, each entry's rank by counting the larger ones
__device__ __forceinline__ void rank_candidates(int count, int need, SelectShared& shared, int* winners) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(shared.candidates);
    for (int mine = threadIdx.x; mine < count; mine += kSelectThreads) {
        const uint64_t value = shared.candidates[mine];
        int rank = value == 0 ? kMaxCandidates : 0;
#pragma unroll 8
        for (int other = 0; other < count / 2; ++other) {
            const ulonglong2 pair = pairs[other];
            rank += (pair.x > value) + (pair.y > value);
        }
        if (rank < need) winners[rank] = int(~uint32_t(value));
    }
    __syncthreads();
}

// a key that at least `need` blocks reach, given the largest key of each thread: the need-th largest of the maxima
// of four lanes each; at least 1, since key 0 is no block
__device__ __forceinline__ uint32_t reached_key(uint32_t most, int need, SelectShared& shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
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
    return max(cut, 1u);
}

// the `need` best of keys[0..n), need <= n, into shared.winners in rank order
// (loops stay rolled: these kernels run once through, so fetching instructions is what they wait for)
__device__ inline void best_blocks(const uint32_t* keys, int n, int need, SelectShared& shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (n <= kDirect) {
        if (thread < kDirect) shared.candidates[thread] = thread < n ? total_order(keys[thread], thread) : 0;
        __syncthreads();
        rank_candidates((n + 1) & ~1, need, shared, shared.winners);
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
    const uint32_t cut = reached_key(most, need, shared);
#pragma unroll 1
    for (int base = thread; base < n; base += kLoads * kSelectThreads) {
        uint32_t key[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            key[i] = base + i * kSelectThreads < n ? keys[base + i * kSelectThreads] : 0;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (key[i] < cut) continue;
            const int at = atomicAdd(&shared.count, 1);
            if (at < kMaxCandidates) shared.candidates[at] = total_order(key[i], base + i * kSelectThreads);
        }
    }
    __syncthreads();
    const int count = shared.count;
    if (count <= kMaxCandidates) {
        // an even number of entries, so that they can be read in pairs; 0 ranks behind every block
        if (thread == 0) shared.candidates[count] = 0;
        __syncthreads();
        rank_candidates((count + 1) & ~1, need, shared, shared.winners);
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
        if (thread == 0) shared.winners[rank] = int(~uint32_t(best));
    }
    __syncthreads();
}

}  // namespace m3
