// The end of the two-stage choice: from bounds of every block to the blocks chosen, in one launch.
//
// A cluster owns a (row, group) line, each of its blocks every splits-th of the line's bounds. They agree on a
// cut, each scores what of its own reaches the cut, from the bf16 keys by the one-stage arithmetic, and the first
// one ranks the best of all. Where the one token with the largest bound scores no less than the bound of the
// others, its score is the block's, and 256 bytes are read for it, not 32 KiB. Proof: docs/decisions/0013.
#include "msa_decode_select.cuh"

namespace m3 {

struct SettleArgs {
    const __nv_bfloat16* q;           // [T,G,D]
    const __nv_bfloat16* pages;       // [P,B,D]
    const uint32_t* keys;             // [T*G, row_stride] upper bounds with their tokens
    const uint32_t* second_keys;      // [T*G, row_stride] upper bounds of the other tokens
    const uint32_t* lower_keys;       // [T*G, row_stride]
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    int32_t* blocks;                  // [G,T,K]
    int32_t* num_rescored;            // [T,G]
    unsigned long long* totals;       // {rescored, ranked} blocks of all calls
    int64_t page_stride;
    int64_t table_stride;
    int64_t row_stride;
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t num_chosen;
    int32_t num_local;
    int32_t splits;                   // blocks of a cluster: a power of two up to 16
};

constexpr int kMaxSettleSplits = 16;
constexpr int kOwn = 3;               // bounds that a thread holds at a time
constexpr int kChunk = kOwn * kSelectThreads;
constexpr int kCutGroups = 128;       // whose largest lower bounds make the cut
static_assert(kChunk + kMaxChosen <= kMaxCandidates, "the scores of a chunk and those kept have room");

struct SettleShared {
    SelectShared select;              // candidates: scores of this block; at the end, of all
    uint32_t own_most[kCutGroups], most[kCutGroups];
    int listed[kChunk], listed_page[kChunk], whole[kChunk];
    uint32_t listed_bound[kChunk], listed_second[kChunk];
    int num_whole;
    uint64_t best[kMaxChosen];
    uint64_t inbox[kMaxSettleSplits][kMaxChosen];
    uint64_t inbox_count[kMaxSettleSplits];
    uint64_t exchanged, scored;       // barriers: the cut's groups are there; all scores are
    float partials[2][kSelectWarps];
};

// the query of one line as the matrix unit wants it: column 0 of eight
struct LineQuery {
    uint4 chunk[4];

    __device__ __forceinline__ explicit LineQuery(const __nv_bfloat16* q) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            chunk[i] = make_uint4(0, 0, 0, 0);
            if (g == 0) chunk[i] = *reinterpret_cast<const uint4*>(q + (t + 4 * i) * 8);
        }
    }
};

// lane 0 learns the one-stage score of one key
__device__ __forceinline__ float score_token(const LineQuery& query, const __nv_bfloat16* key) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint4 chunk[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        chunk[i] = make_uint4(0, 0, 0, 0);
        if (g == 0) chunk[i] = *reinterpret_cast<const uint4*>(key + (t + 4 * i) * 8);
    }
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mma_bf16(c, {chunk[i].x, 0, chunk[i].y, 0}, query.chunk[i].x, query.chunk[i].y);
        mma_bf16(c, {chunk[i].z, 0, chunk[i].w, 0}, query.chunk[i].z, query.chunk[i].w);
    }
    return c[0];
}

// thread 0 learns the one-stage rank key of a block up to token `last`; `turn` alternates between calls
__device__ __forceinline__ uint32_t score_block(const LineQuery& query, const __nv_bfloat16* keys, int last, int turn,
                                                float (&partials)[2][kSelectWarps]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int token = warp * 16 + g;
    uint4 top[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        top[i] = *reinterpret_cast<const uint4*>(keys + token * kHeadDim + (t + 4 * i) * 8);
        low[i] = *reinterpret_cast<const uint4*>(keys + (token + 8) * kHeadDim + (t + 4 * i) * 8);
    }
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        mma_bf16(c, {top[i].x, low[i].x, top[i].y, low[i].y}, query.chunk[i].x, query.chunk[i].y);
        mma_bf16(c, {top[i].z, low[i].z, top[i].w, low[i].w}, query.chunk[i].z, query.chunk[i].w);
    }
    float best = max_nan(token <= last ? c[0] : -INFINITY, token + 8 <= last ? c[2] : -INFINITY);
#pragma unroll
    for (int hop = 4; hop < 32; hop *= 2) best = max_nan(best, __shfl_xor_sync(~0u, best, hop));
    if (lane == 0) partials[turn][warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int other = 1; other < kSelectWarps; ++other) best = max_nan(best, partials[turn][other]);
    }
    return rank_key(best);
}

// the cut: a key that the lower bounds of at least `need` blocks of the line reach
__device__ __forceinline__ uint32_t agree_on_cut(uint32_t most, int need, int split, int splits, SettleShared& shared) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int groups = kCutGroups / splits, lanes = kSelectThreads / groups;
    for (int hop = 16; hop >= 32 / lanes; hop /= 2) most = max(most, __shfl_xor_sync(~0u, most, hop));
    uint32_t* own = splits == 1 ? shared.most : shared.own_most;
    if (lane < 32 / lanes) own[warp * (32 / lanes) + lane] = most;
    __syncthreads();
    if (splits > 1) {
        cluster_wait();
        if (thread < kCutGroups) {
            const int to = thread / groups, group = thread % groups;
            store_remote(remote_address(shared_address(&shared.most[split * groups + group]), to), own[group],
                         remote_address(shared_address(&shared.exchanged), to));
        }
        barrier_wait_cluster(&shared.exchanged, 0);
    }
    uint32_t threshold = ~0u;
    if (thread < kCutGroups) {
        const uint32_t mine = shared.most[thread];
        const uint4* others = reinterpret_cast<const uint4*>(shared.most);
        int larger = 0;
#pragma unroll 8
        for (int i = 0; i < kCutGroups / 4; ++i) {
            const uint4 v = others[i];
            larger += (v.x > mine) + (v.y > mine) + (v.z > mine) + (v.w > mine);
        }
        threshold = __reduce_min_sync(~0u, larger < need ? mine : ~0u);
    }
    if (thread < kCutGroups && lane == 0) shared.select.warp_threshold[warp] = threshold;
    __syncthreads();
    uint32_t cut = ~0u;
#pragma unroll
    for (int i = 0; i < kCutGroups / 32; ++i) cut = min(cut, shared.select.warp_threshold[i]);
    return max(cut, 1u);  // key 0 is no block
}

// leaves the `need` best of candidates[0..count) in front
__device__ __forceinline__ void keep_best(int count, int need, SettleShared& shared) {
    for (int mine = threadIdx.x; mine < count; mine += kSelectThreads) {
        const uint64_t value = shared.select.candidates[mine];
        int rank = 0;
#pragma unroll 4
        for (int other = 0; other < count; ++other) rank += shared.select.candidates[other] > value;
        if (rank < need) shared.best[rank] = value;
    }
    __syncthreads();
    if (threadIdx.x < need) shared.select.candidates[threadIdx.x] = shared.best[threadIdx.x];
    __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads, 3) settle_kernel(const __grid_constant__ SettleArgs args) {
    __shared__ SettleShared shared;
    const int splits = args.splits, line = blockIdx.x / splits, split = blockIdx.x % splits;
    const int row = line / args.groups, group = line % args.groups, thread = threadIdx.x;
    // the scoring kernel, which alone may precede this one, has waited for whoever wrote these
    const RowPlace place = find_row(args.query_start, args.seq_lens, args.num_seqs, row, shared.select.found);
    const RowNeeds needs(place, args.num_local, args.num_chosen);
    const int n = needs.ranked, need = needs.need;
    const bool is_free = need == n || need == 0;
    if (thread == 0 && splits > 1) {
        barrier_init(&shared.exchanged, 1);
        barrier_init(&shared.scored, 1);
        barrier_init_fence();
        barrier_arrive_expect(&shared.exchanged, kCutGroups * 4);
        if (split == 0) barrier_arrive_expect(&shared.scored, splits * (kMaxChosen + 1) * 8);
    }
    __syncthreads();
    // no block may write to another before that one runs
    if (splits > 1 && !is_free) cluster_arrive();
    wait_for_previous_kernel();
    let_next_kernel_start();
    int32_t* blocks = args.blocks + (int64_t(group) * args.num_rows + row) * args.num_chosen;
    if (is_free) {
        if (split != 0) return;
        if (thread < need) shared.select.winners[thread] = thread;
        __syncthreads();
        if (thread == 0) args.num_rescored[line] = 0;
        if (thread < 32) write_choice(needs, shared.select.winners, args.num_chosen, blocks);
        return;
    }
    const uint32_t* upper_keys = args.keys + line * args.row_stride;
    const uint32_t* second_keys = args.second_keys + line * args.row_stride;
    const uint32_t* lower_keys = args.lower_keys + line * args.row_stride;
    const int32_t* table = args.page_table + place.sequence * args.table_stride;
    // every splits-th block of the line, neighbours of these in different warps: few of the best share a group
    const int first = (thread / 32 + thread % 32 * kSelectWarps) * splits + split, step = kSelectThreads * splits;
    uint32_t upper[kOwn], most = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) upper[i] = first + i * step < n ? upper_keys[first + i * step] : 0;
#pragma unroll 1
    for (int block = first; block < n; block += kOwn * step) {
        uint32_t lower[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) lower[i] = block + i * step < n ? lower_keys[block + i * step] : 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) most = max(most, lower[i]);
    }
    const uint32_t cut = agree_on_cut(most, need, split, splits, shared);
    const LineQuery query(args.q + int64_t(line) * kHeadDim);
    int kept = 0, rescored = 0, turn = 0;
#pragma unroll 1
    for (int base = 0; base < n; base += kOwn * step) {
        if (base > 0) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                upper[i] = base + first + i * step < n ? upper_keys[base + first + i * step] : 0;
        }
        if (thread == 0) shared.select.count = shared.num_whole = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (upper_of(upper[i]) < cut || upper[i] == 0) continue;
            const int at = atomicAdd(&shared.select.count, 1), block = base + first + i * step;
            shared.listed[at] = block;
            shared.listed_bound[at] = upper[i];
            shared.listed_second[at] = second_keys[block];
            shared.listed_page[at] = table[block];
        }
        __syncthreads();
        const int count = shared.select.count;
#pragma unroll 1
        for (int index = thread / 32; index < count; index += kSelectWarps) {
            const uint32_t bound = shared.listed_bound[index];
            bool is_whole = upper_of(bound) >= kUnbounded;
            if (!is_whole) {
                const __nv_bfloat16* page = args.pages + shared.listed_page[index] * args.page_stride;
                const uint32_t key = rank_key(score_token(query, page + (bound & kTokenBits) * kHeadDim));
                is_whole = key < upper_of(shared.listed_second[index]);
                if (thread % 32 == 0)
                    shared.select.candidates[kept + index] = total_order(key, shared.listed[index]);
            }
            if (thread % 32 == 0 && is_whole) shared.whole[atomicAdd(&shared.num_whole, 1)] = index;
        }
        __syncthreads();
        const int num_whole = shared.num_whole;
#pragma unroll 1
        for (int at = 0; at < num_whole; ++at, turn ^= 1) {
            const int index = shared.whole[at], block = shared.listed[index];
            const uint32_t key = score_block(query, args.pages + shared.listed_page[index] * args.page_stride,
                                             place.position - block * kPageTokens, turn, shared.partials);
            if (thread == 0) shared.select.candidates[kept + index] = total_order(key, block);
        }
        kept += count;
        rescored += count;
        __syncthreads();
        if (kept > kMaxChosen) {
            keep_best(kept, need, shared);
            kept = need;
        }
    }
    uint64_t(*inbox)[kMaxChosen] = shared.inbox;
    if (thread < kMaxChosen) {
        const uint64_t value = thread < kept ? shared.select.candidates[thread] : 0;
        if (splits > 1) {
            const uint32_t scored = remote_address(shared_address(&shared.scored), 0);
            store_remote(remote_address(shared_address(&inbox[split][thread]), 0), value, scored);
            if (thread == 0)
                store_remote(remote_address(shared_address(&shared.inbox_count[split]), 0), uint64_t(rescored), scored);
        } else {
            inbox[0][thread] = value;
            shared.inbox_count[0] = rescored;
        }
    }
    if (split != 0) return;
    if (thread == 0) shared.select.count = 0;
    __syncthreads();
    if (splits > 1) barrier_wait_cluster(&shared.scored, 0);
    for (int at = thread; at < splits * kMaxChosen; at += kSelectThreads) {
        const uint64_t value = inbox[at / kMaxChosen][at % kMaxChosen];
        if (value != 0) shared.select.candidates[atomicAdd(&shared.select.count, 1)] = value;
    }
    __syncthreads();
    const int count = shared.select.count;
    if (thread == 0) {
        shared.select.candidates[count] = 0;  // they are read in pairs; 0 ranks behind every block
        int sum = 0;
        for (int other = 0; other < splits; ++other) sum += int(shared.inbox_count[other]);
        args.num_rescored[line] = sum;
        atomicAdd(args.totals, static_cast<unsigned long long>(sum));
        atomicAdd(args.totals + 1, static_cast<unsigned long long>(n));
    }
    __syncthreads();
    rank_candidates((count + 1) & ~1, need, shared.select, shared.select.winners);
    if (thread < 32) write_choice(needs, shared.select.winners, args.num_chosen, blocks);
}

}  // namespace m3

extern "C" int m3_settle(const m3::SettleArgs* args, cudaStream_t stream) {
    const int splits = args->splits;
    if (splits < 1 || splits > m3::kMaxSettleSplits || (splits & (splits - 1))) return cudaErrorInvalidValue;
    const void* kernel = reinterpret_cast<const void*>(&m3::settle_kernel);
    if (splits > 8) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    void* params[] = {const_cast<m3::SettleArgs*>(args)};
    return m3::launch(kernel, dim3(args->num_rows * args->groups * splits), m3::kSelectThreads, 0, splits, params, stream);
}
