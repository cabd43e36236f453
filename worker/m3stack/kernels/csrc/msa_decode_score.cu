// Index scoring at decode: streams every visible index-key page once and leaves one rank key a block.
//
// A page is the M side of the matrix product (a team of 8 warps of 16 tokens), the index heads of all query
// rows of a request are the N side. One warp feeds a ring of pages with bulk copies. Pages are dealt
// page-major with the request fastest, so that requests sharing a prefix read it from L2, and in
// strides coprime to the grid, so that one long request still spreads over all processors.
#include "async_copy.cuh"

namespace m3 {

struct ScoreArgs {
    const __nv_bfloat16* q;    // [T,G,D]
    const void* pages;         // bf16 [P,B,D]; first stage: a page's int8 [B,D], then its [B] {bf16 scale, bf16 bound}
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    uint32_t* keys;            // [T*G, row_stride]; the upper bounds of the first stage with their tokens
    uint32_t* second_keys;     // first stage only: upper bound of all tokens but that one
    uint32_t* lower_keys;      // first stage only
    int64_t page_stride_bytes;
    int64_t table_stride;
    int64_t row_stride;
    int32_t num_seqs;
    int32_t groups;
    int32_t seq_stride;        // >= num_seqs and coprime to the grid
    int32_t table_width;
    int32_t num_lines;         // T * G
};

constexpr int kScoreWarps = 8;  // warps that share a page
constexpr int kColumnBytes = 256;  // one query row and head: 128 bf16, or two planes of 128 int8

#ifndef M3_SCORE_RING_KIB
#define M3_SCORE_RING_KIB 216
#endif
#ifndef M3_SCORE_TEAMS
#define M3_SCORE_TEAMS 2
#endif
#ifndef M3_SCORE_INT8_TEAMS
#define M3_SCORE_INT8_TEAMS 2
#endif
constexpr int kScoreRingBytes = M3_SCORE_RING_KIB * 1024;
constexpr int kInt8Stages = 8;  // what 256 lines leave room for

template <bool kInt8, int kTiles>
struct ScoreShape {
    // teams that take pages in turn: a page's latency is twice its share of bandwidth
    static constexpr int kTeams = kInt8 ? M3_SCORE_INT8_TEAMS : M3_SCORE_TEAMS;
    static constexpr int kFeeder = kScoreWarps * kTeams;
    static constexpr int kThreads = (kFeeder + 1) * 32;
    static constexpr int kKeyBytes = kPageTokens * kHeadDim * (kInt8 ? 1 : 2);
    static constexpr int kPageBytes = kKeyBytes + (kInt8 ? kPageTokens * 4 : 0);
    // a column is a (row, head); int8 columns take two lanes of the tile, high and low
    static constexpr int kColumns = kInt8 ? kTiles * 4 : kTiles * 8;
    // int8 queries of the whole step stay in shared memory, bf16 ones travel with their pages
    static constexpr int kStageBytes = kPageBytes + (kInt8 ? 0 : kColumns * kColumnBytes);
    static constexpr int kFit = kInt8 ? kInt8Stages : kScoreRingBytes / kStageBytes;
    // whole rounds of the teams: a stage belongs to one team, or a wait could take the phase of the other's page
    static constexpr int kStages = kFit / kTeams * kTeams;
    static constexpr int kPartials = kScoreWarps * kColumns * (kInt8 ? 3 : 1);  // words of one page
    // (row, head) lines of the step, and as many more as the last sequence's columns may reach past them
    static __host__ __device__ int resident_lines(int lines) { return kInt8 ? lines + kColumns : 0; }
    static size_t shared_bytes(int num_seqs, int lines) {
        return size_t(kStages) * kStageBytes + resident_lines(lines) * (kColumnBytes + sizeof(float2)) +
               2 * kTeams * kPartials * 4 + 2 * kStages * 8 + kStages * 8 + kStages * 4 + (2 * num_seqs + 2) * 4 + 16;
    }
};

// the two largest of two pairs, each pair in order
__device__ __forceinline__ void take_two(uint32_t& first, uint32_t& second, uint32_t other_first, uint32_t other_second) {
    second = max(min(first, other_first), max(second, other_second));
    first = max(first, other_first);
}

// q = scale * (256 high + low) up to half a step; norm bound >= |q|, NaN where q cannot be bounded: {scale, norm}
__device__ __forceinline__ float2 split_query(const __nv_bfloat16* q, uint32_t* planes, int lane) {
    const uint2 raw = reinterpret_cast<const uint2*>(q)[lane];
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
    planes[lane] = high;
    planes[32 + lane] = low;
    // 2^-8 above the computed root covers its rounding; the floor keeps underflow inside the bound
    const float norm = fmaxf(sqrtf(squares) * 1.00390625f, 1.0e-18f);
    return make_float2(scale, bounded ? norm : __int_as_float(0x7fc00000));
}

template <bool kInt8, int kTiles>
__global__ void __launch_bounds__(ScoreShape<kInt8, kTiles>::kThreads, 1)
    score_kernel(const __grid_constant__ ScoreArgs args) {
    using Shape = ScoreShape<kInt8, kTiles>;
    constexpr int kStages = Shape::kStages, kTeams = Shape::kTeams;
    extern __shared__ __align__(128) uint8_t shared[];
    uint8_t* stages = shared;
    uint8_t* resident = shared + kStages * Shape::kStageBytes;  // int8 planes of all lines, then scale and norm
    const int resident_lines = Shape::resident_lines(args.num_lines);
    float2* resident_meta = reinterpret_cast<float2*>(resident + resident_lines * kColumnBytes);
    float* partials = reinterpret_cast<float*>(resident_meta + resident_lines);
    uint64_t* full = reinterpret_cast<uint64_t*>(partials + 2 * kTeams * Shape::kPartials);
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
    if (warp == Shape::kFeeder && first_s < args.num_seqs && first_index < args.table_width)
        first_page = args.page_table[first_s * args.table_stride + first_index];
    for (int s = thread; s <= args.num_seqs; s += Shape::kThreads) {
        starts[s] = args.query_start[s];
        if (s < args.num_seqs) {
            lens[s] = args.seq_lens[s];
            atomicMax(max_pages, (lens[s] + kPageTokens - 1) / kPageTokens);
        }
    }
    __syncthreads();

    if (warp == Shape::kFeeder) {
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
                    const bool with_query = !kInt8 && fresh;
                    barrier_arrive_expect(&full[stage], Shape::kPageBytes + (with_query ? columns * kColumnBytes : 0));
                    bulk_copy(buffer, static_cast<const uint8_t*>(args.pages) + item_page * args.page_stride_bytes,
                              Shape::kPageBytes, &full[stage]);
                    if (with_query)
                        bulk_copy(buffer + Shape::kPageBytes,
                                  args.q + int64_t(starts[item_s]) * args.groups * kHeadDim, columns * kColumnBytes,
                                  &full[stage]);
                }
                __syncwarp();
                ++issued;
            }
        }
        for (int team = 0; team < kTeams; ++team, ++issued) {  // one end for each team
            const int stage = issued % kStages;
            if (issued >= kStages) barrier_wait(&empty[stage], (issued / kStages - 1) & 1);
            if (lane == 0) {
                item[stage] = make_int2(-1, -1);
                barrier_arrive(&full[stage]);
            }
        }
        return;
    }

    const int g = lane / 4, t = lane % 4;
    const int team = warp / kScoreWarps, team_warp = warp % kScoreWarps;
    if constexpr (kInt8) {
        // while the first pages are on their way
        for (int line = warp; line < args.num_lines; line += Shape::kFeeder) {
            uint32_t* planes = reinterpret_cast<uint32_t*>(resident + line * kColumnBytes);
            const float2 meta = split_query(args.q + int64_t(line) * kHeadDim, planes, lane);
            if (lane == 0) resident_meta[line] = meta;
        }
        named_barrier(1 + kTeams, Shape::kFeeder * 32);
    }
    for (int done = team;; done += kTeams) {
        const int stage = done % kStages;
        barrier_wait(&full[stage], (done / kStages) & 1);
        const int2 what = item[stage];
        if (what.x < 0) break;
        const uint8_t* buffer = stages + stage * Shape::kStageBytes;
        const int first_line = starts[what.x] * args.groups;
        const uint8_t* q = kInt8 ? resident + first_line * kColumnBytes : buffer + Shape::kPageBytes;
        const int num_rows = starts[what.x + 1] - starts[what.x];
        const int columns = min(num_rows * args.groups, Shape::kColumns);
        const int len = lens[what.x];
        const int first_slot = what.y * kPageTokens;
        const bool whole = first_slot + kPageTokens <= len - num_rows + 1;
        const int token = team_warp * 16 + g, turn = done / kTeams;
        float* out = partials + (2 * team + turn % 2) * Shape::kPartials;

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
                    float2* to = reinterpret_cast<float2*>(out + team_warp * Shape::kColumns + tile * 8 + 2 * t);
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
            const uint32_t* page_meta = reinterpret_cast<const uint32_t*>(buffer + Shape::kKeyBytes);
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
                const float2 q_meta = resident_meta[first_line + column];
                const int last = len - num_rows + column / args.groups - first_slot;
                const bool see_top = whole || token <= last, see_low = whole || token + 8 <= last;
                const float near_top = float(c[0] * 256 + c[1]) * (q_meta.x * scale_top);
                const float near_low = float(c[2] * 256 + c[3]) * (q_meta.x * scale_low);
                const float slack_top = q_meta.y * bound_top, slack_low = q_meta.y * bound_low;
                const uint32_t key_top = see_top ? bound_key(near_top + slack_top, token) : 0;
                const uint32_t key_low = see_low ? bound_key(near_low + slack_low, token + 8) : 0;
                uint32_t first = max(key_top, key_low), second = min(key_top, key_low);
                float lower = max_nan(see_top ? near_top - slack_top : -INFINITY,
                                      see_low ? near_low - slack_low : -INFINITY);
#pragma unroll
                for (int hop = 4; hop < 32; hop *= 2) {
                    take_two(first, second, __shfl_xor_sync(~0u, first, hop), __shfl_xor_sync(~0u, second, hop));
                    lower = max_nan(lower, __shfl_xor_sync(~0u, lower, hop));
                }
                if (g == 0) {
                    const int at = team_warp * Shape::kColumns + column;
                    reinterpret_cast<uint2*>(out)[at] = make_uint2(first, second);
                    out[2 * kScoreWarps * Shape::kColumns + at] = lower;
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&empty[stage]);
        named_barrier(1 + team, kScoreWarps * 32);
        if (team_warp == turn % kScoreWarps) {
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
                    const uint2* pairs = reinterpret_cast<const uint2*>(out);
                    const float* lowers = out + 2 * kScoreWarps * Shape::kColumns;
                    uint2 best = pairs[column];
                    float lower = lowers[column];
#pragma unroll
                    for (int other = 1; other < kScoreWarps; ++other) {
                        const uint2 next = pairs[other * Shape::kColumns + column];
                        take_two(best.x, best.y, next.x, next.y);
                        lower = max_nan(lower, lowers[other * Shape::kColumns + column]);
                    }
                    args.keys[at] = best.x;
                    args.second_keys[at] = best.y;
                    args.lower_keys[at] = rank_key(lower);
                }
            }
        }
    }
}

template <bool kInt8, int kTiles>
cudaError_t launch_score(const ScoreArgs& args, int grid, cudaStream_t stream) {
    const void* kernel = reinterpret_cast<const void*>(&score_kernel<kInt8, kTiles>);
    using Shape = ScoreShape<kInt8, kTiles>;
    const size_t bytes = Shape::shared_bytes(args.num_seqs, args.num_lines);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    void* params[] = {const_cast<ScoreArgs*>(&args)};
    return launch(kernel, dim3(grid), Shape::kThreads, bytes, 1, params, stream);
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
