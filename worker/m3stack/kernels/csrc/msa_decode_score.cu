// Index scoring at decode: streams every visible index-key page once and leaves one rank key a block.
//
// A page is the M side of the matrix product (8 warps of 16 tokens), the index heads of all query
// rows of a request are the N side. One warp feeds a ring of pages with bulk copies. Pages are dealt
// page-major with the request fastest, so that requests sharing a prefix read it from L2, and in
// strides coprime to the grid, so that one long request still spreads over all processors.
#include "async_copy.cuh"

namespace m3 {

struct ScoreArgs {
    const void* q;             // bf16 [T,G,D], or int8 [T,G,2,D] (high and low bytes) for the first stage
    const float4* q_meta;      // first stage only: [T,G] {scale, norm bound, 0, 0}
    const void* pages;         // bf16 or int8 [P,B,D]
    const uint32_t* page_meta; // first stage only: [P,B] {bf16 scale, bf16 bound}
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    uint32_t* keys;            // [T*G, row_stride]; the upper bounds of the first stage
    uint32_t* lower_keys;      // first stage only
    int64_t page_stride_bytes;
    int64_t table_stride;
    int64_t row_stride;
    int32_t num_seqs;
    int32_t groups;
    int32_t seq_stride;        // >= num_seqs and coprime to the grid
    int32_t table_width;
};

constexpr int kScoreWarps = 8;
constexpr int kScoreThreads = (kScoreWarps + 1) * 32;
constexpr int kColumnBytes = 256;  // one query row and head: 128 bf16, or two planes of 128 int8

#ifndef M3_SCORE_RING_KIB
#define M3_SCORE_RING_KIB 200
#endif
constexpr int kScoreRingBytes = M3_SCORE_RING_KIB * 1024;

template <bool kInt8, int kTiles>
struct ScoreShape {
    static constexpr int kPageBytes = kPageTokens * kHeadDim * (kInt8 ? 1 : 2);
    static constexpr int kMetaBytes = kInt8 ? kPageTokens * 4 : 0;
    // a column is a (row, head); int8 columns take two lanes of the tile, high and low
    static constexpr int kColumns = kInt8 ? kTiles * 4 : kTiles * 8;
    static constexpr int kQueryBytes = kColumns * kColumnBytes;
    static constexpr int kQueryMetaBytes = kInt8 ? kColumns * 16 : 0;
    static constexpr int kStageBytes = kPageBytes + kMetaBytes + kQueryBytes + kQueryMetaBytes;
    static constexpr int kFit = kScoreRingBytes / kStageBytes;
    static constexpr int kStages = kFit < 12 ? kFit : 12;
    static constexpr int kPartials = 2 * kScoreWarps * kColumns * (kInt8 ? 2 : 1);
    static size_t shared_bytes(int num_seqs) {
        return size_t(kStages) * kStageBytes + kPartials * 4 + 2 * kStages * 8 + kStages * 8 + kStages * 4 +
               (2 * num_seqs + 2) * 4 + 16;
    }
};

template <bool kInt8, int kTiles>
__global__ void __launch_bounds__(kScoreThreads, 1) score_kernel(const __grid_constant__ ScoreArgs args) {
    using Shape = ScoreShape<kInt8, kTiles>;
    constexpr int kStages = Shape::kStages;
    extern __shared__ __align__(128) uint8_t shared[];
    uint8_t* stages = shared;
    float* partials = reinterpret_cast<float*>(shared + kStages * Shape::kStageBytes);
    uint64_t* full = reinterpret_cast<uint64_t*>(partials + Shape::kPartials);
    uint64_t* empty = full + kStages;
    int2* item = reinterpret_cast<int2*>(empty + kStages);
    int* owner = reinterpret_cast<int*>(item + kStages);
    int* max_pages = owner + kStages;
    int* lens = max_pages + 1;
    int* starts = lens + args.num_seqs;

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], kScoreWarps);
            owner[stage] = -1;
        }
        *max_pages = 0;
        barrier_init_fence();
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    __syncthreads();
    // the feeding warp's first pages, looked up before the lengths are known and used only if they exist
    const int first_work = blockIdx.x + lane * gridDim.x;
    const int first_index = first_work / args.seq_stride, first_s = first_work % args.seq_stride;
    int first_page = 0;
    if (warp == kScoreWarps && first_s < args.num_seqs && first_index < args.table_width)
        first_page = args.page_table[first_s * args.table_stride + first_index];
    for (int s = thread; s <= args.num_seqs; s += kScoreThreads) {
        starts[s] = args.query_start[s];
        if (s < args.num_seqs) {
            lens[s] = args.seq_lens[s];
            atomicMax(max_pages, (lens[s] + kPageTokens - 1) / kPageTokens);
        }
    }
    __syncthreads();

    if (warp == kScoreWarps) {
        const int total = *max_pages * args.seq_stride;
        const int step = gridDim.x;
        int issued = 0;
        for (int base = blockIdx.x; base < total; base += 32 * step) {
            const int work = base + lane * step;
            const int page_index = work / args.seq_stride, s = work % args.seq_stride;
            const bool real = work < total && s < args.num_seqs && page_index * kPageTokens < lens[s] &&
                              starts[s + 1] > starts[s];
            int page = first_page;
            if (real && base != blockIdx.x) page = args.page_table[s * args.table_stride + page_index];
            for (uint32_t mask = __ballot_sync(~0u, real); mask; mask &= mask - 1) {
                const int source = __ffs(mask) - 1;
                const int item_page = __shfl_sync(~0u, page, source);
                const int item_s = __shfl_sync(~0u, s, source);
                const int item_index = __shfl_sync(~0u, page_index, source);
                const int stage = issued % kStages;
                if (issued >= kStages) barrier_wait(&empty[stage], (issued / kStages - 1) & 1);
                if (lane == 0) {
                    uint8_t* buffer = stages + stage * Shape::kStageBytes;
                    const int columns = min((starts[item_s + 1] - starts[item_s]) * args.groups, Shape::kColumns);
                    const bool fresh = owner[stage] != item_s;
                    item[stage] = make_int2(item_s, item_index);
                    owner[stage] = item_s;
                    barrier_arrive_expect(&full[stage],
                                          Shape::kPageBytes + Shape::kMetaBytes +
                                              (fresh ? columns * (kColumnBytes + (kInt8 ? 16 : 0)) : 0));
                    bulk_copy(buffer, static_cast<const uint8_t*>(args.pages) + item_page * args.page_stride_bytes,
                              Shape::kPageBytes, &full[stage]);
                    uint8_t* meta = buffer + Shape::kPageBytes;
                    if (kInt8)
                        bulk_copy(meta, args.page_meta + int64_t(item_page) * kPageTokens, Shape::kMetaBytes,
                                  &full[stage]);
                    if (fresh) {
                        const int64_t first = int64_t(starts[item_s]) * args.groups;
                        uint8_t* q = meta + Shape::kMetaBytes;
                        bulk_copy(q, static_cast<const uint8_t*>(args.q) + first * kColumnBytes,
                                  columns * kColumnBytes, &full[stage]);
                        if (kInt8)
                            bulk_copy(q + Shape::kQueryBytes, args.q_meta + first, columns * 16, &full[stage]);
                    }
                }
                __syncwarp();
                ++issued;
            }
        }
        const int stage = issued % kStages;
        if (issued >= kStages) barrier_wait(&empty[stage], (issued / kStages - 1) & 1);
        if (lane == 0) {
            item[stage] = make_int2(-1, -1);
            barrier_arrive(&full[stage]);
        }
        return;
    }

    const int g = lane / 4, t = lane % 4;
    for (int done = 0;; ++done) {
        const int stage = done % kStages;
        barrier_wait(&full[stage], (done / kStages) & 1);
        const int2 what = item[stage];
        if (what.x < 0) break;
        const uint8_t* buffer = stages + stage * Shape::kStageBytes;
        const uint8_t* meta = buffer + Shape::kPageBytes;
        const uint8_t* q = meta + Shape::kMetaBytes;
        const int num_rows = starts[what.x + 1] - starts[what.x];
        const int columns = min(num_rows * args.groups, Shape::kColumns);
        const int len = lens[what.x];
        const int first_slot = what.y * kPageTokens;
        const bool whole = first_slot + kPageTokens <= len - num_rows + 1;
        const int token = warp * 16 + g;
        float* out = partials + (done & 1) * (Shape::kPartials / 2);

        if constexpr (!kInt8) {
            uint4 top[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                top[i] = *reinterpret_cast<const uint4*>(buffer + token * 256 + (t + 4 * i) * 16);
                low[i] = *reinterpret_cast<const uint4*>(buffer + (token + 8) * 256 + (t + 4 * i) * 16);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint4 b = *reinterpret_cast<const uint4*>(q + (tile * 8 + g) * 256 + (t + 4 * i) * 16);
                    mma_bf16(c, {top[i].x, low[i].x, top[i].y, low[i].y}, b.x, b.y);
                    mma_bf16(c, {top[i].z, low[i].z, top[i].w, low[i].w}, b.z, b.w);
                }
                float best[2];
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const int column = tile * 8 + 2 * t + side;
                    const int last = len - num_rows + column / args.groups - first_slot;
                    const float x = (whole || token <= last) ? c[side] : -INFINITY;
                    const float y = (whole || token + 8 <= last) ? c[side + 2] : -INFINITY;
                    best[side] = max_nan(x, y);
#pragma unroll
                    for (int hop = 4; hop < 32; hop *= 2)
                        best[side] = max_nan(best[side], __shfl_xor_sync(~0u, best[side], hop));
                }
                if (g == 0) {
                    float2* to = reinterpret_cast<float2*>(out + warp * Shape::kColumns + tile * 8 + 2 * t);
                    *to = make_float2(best[0], best[1]);
                }
            }
        } else {
            uint4 top[2], low[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                top[i] = *reinterpret_cast<const uint4*>(buffer + token * 128 + (t + 4 * i) * 16);
                low[i] = *reinterpret_cast<const uint4*>(buffer + (token + 8) * 128 + (t + 4 * i) * 16);
            }
            const uint32_t* page_meta = reinterpret_cast<const uint32_t*>(meta);
            const uint32_t meta_top = page_meta[token], meta_low = page_meta[token + 8];
            const float scale_top = __uint_as_float(meta_top << 16), scale_low = __uint_as_float(meta_low << 16);
            const float bound_top = __uint_as_float(meta_top & 0xFFFF0000u);
            const float bound_low = __uint_as_float(meta_low & 0xFFFF0000u);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                int32_t c[4] = {0, 0, 0, 0};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint4 b = *reinterpret_cast<const uint4*>(q + (tile * 8 + g) * 128 + (t + 4 * i) * 16);
                    mma_s8(c, {top[i].x, low[i].x, top[i].y, low[i].y}, b.x, b.y);
                    mma_s8(c, {top[i].z, low[i].z, top[i].w, low[i].w}, b.z, b.w);
                }
                // the lanes of one thread are the high and low byte of one column
                const int column = tile * 4 + t;
                const float4 q_meta = *reinterpret_cast<const float4*>(q + Shape::kQueryBytes + column * 16);
                const int last = len - num_rows + column / args.groups - first_slot;
                const bool see_top = whole || token <= last, see_low = whole || token + 8 <= last;
                const float near_top = float(c[0] * 256 + c[1]) * (q_meta.x * scale_top);
                const float near_low = float(c[2] * 256 + c[3]) * (q_meta.x * scale_low);
                const float slack_top = q_meta.y * bound_top, slack_low = q_meta.y * bound_low;
                float upper = max_nan(see_top ? near_top + slack_top : -INFINITY,
                                      see_low ? near_low + slack_low : -INFINITY);
                float lower = max_nan(see_top ? near_top - slack_top : -INFINITY,
                                      see_low ? near_low - slack_low : -INFINITY);
#pragma unroll
                for (int hop = 4; hop < 32; hop *= 2) {
                    upper = max_nan(upper, __shfl_xor_sync(~0u, upper, hop));
                    lower = max_nan(lower, __shfl_xor_sync(~0u, lower, hop));
                }
                if (g == 0) {
                    float2* to = reinterpret_cast<float2*>(out) + warp * Shape::kColumns + column;
                    *to = make_float2(upper, lower);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[stage]);
        named_barrier(1, kScoreWarps * 32);
        if (warp == done % kScoreWarps) {
            const int64_t first_row = int64_t(starts[what.x]) * args.groups;
            for (int column = lane; column < columns; column += 32) {
                const int64_t at = (first_row + column) * args.row_stride + what.y;
                if constexpr (!kInt8) {
                    float best = out[column];
#pragma unroll
                    for (int other = 1; other < kScoreWarps; ++other)
                        best = max_nan(best, out[other * Shape::kColumns + column]);
                    args.keys[at] = rank_key(best);
                } else {
                    const float2* pairs = reinterpret_cast<const float2*>(out);
                    float2 best = pairs[column];
#pragma unroll
                    for (int other = 1; other < kScoreWarps; ++other) {
                        const float2 next = pairs[other * Shape::kColumns + column];
                        best.x = max_nan(best.x, next.x);
                        best.y = max_nan(best.y, next.y);
                    }
                    // an unbounded block may stand anywhere: always rescored, never part of the cut
                    args.keys[at] = rank_key(best.x != best.x ? INFINITY : best.x);
                    args.lower_keys[at] = rank_key(best.y);
                }
            }
        }
    }
}

template <bool kInt8, int kTiles>
cudaError_t launch_score(const ScoreArgs& args, int grid, cudaStream_t stream) {
    const void* kernel = reinterpret_cast<const void*>(&score_kernel<kInt8, kTiles>);
    const size_t bytes = ScoreShape<kInt8, kTiles>::shared_bytes(args.num_seqs);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    void* params[] = {const_cast<ScoreArgs*>(&args)};
    return launch(kernel, dim3(grid), kScoreThreads, bytes, 1, params, stream);
}

}  // namespace m3

extern "C" int m3_score(const m3::ScoreArgs* args, int columns, int grid, cudaStream_t stream) {
    if (columns <= 8) return m3::launch_score<false, 1>(*args, grid, stream);
    if (columns <= 16) return m3::launch_score<false, 2>(*args, grid, stream);
    if (columns <= 32) return m3::launch_score<false, 4>(*args, grid, stream);
    return cudaErrorInvalidValue;
}

extern "C" int m3_score_int8(const m3::ScoreArgs* args, int columns, int grid, cudaStream_t stream) {
    if (columns <= 4) return m3::launch_score<true, 1>(*args, grid, stream);
    if (columns <= 8) return m3::launch_score<true, 2>(*args, grid, stream);
    if (columns <= 16) return m3::launch_score<true, 4>(*args, grid, stream);
    if (columns <= 32) return m3::launch_score<true, 8>(*args, grid, stream);
    return cudaErrorInvalidValue;
}
