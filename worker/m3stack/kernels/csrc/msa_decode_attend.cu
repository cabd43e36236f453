// Attention at decode over the chosen blocks of each (row, KV group): one cluster a row and group.
//
// One warp feeds a ring of 64-key halves of blocks with 16-byte asynchronous copies; keys after the row
// are written as zeros, so that nothing unwritten is ever read. Four warps of 16 keys each run the
// online softmax on their own keys; warps merge in shared memory, the cluster's blocks through it.
#include <cooperative_groups.h>

#include "async_copy.cuh"

namespace m3 {

namespace cg = cooperative_groups;

struct AttendArgs {
    const __nv_bfloat16* q;  // [T,H,D]
    const void* k;           // bf16 or e4m3, strides below in elements
    const void* v;
    const float* k_scale;    // e4m3 only: [P,G]
    const float* v_scale;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    const int32_t* blocks;   // [G,T,K]
    __nv_bfloat16* out;      // [T,H,D]
    int64_t k_page_stride, k_group_stride, k_token_stride;
    int64_t v_page_stride, v_group_stride, v_token_stride;
    int64_t table_stride;
    float scale_log2;        // softmax scale times log2(e)
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t heads_per_group;  // at most 16
    int32_t num_chosen;       // at most 32
};

constexpr int kUnitKeys = 64;
constexpr int kAttendWarps = 4;
constexpr int kAttendThreads = (kAttendWarps + 1) * 32;
constexpr int kGroupHeads = 16;
constexpr int kRingBytes = 96 * 1024;

// the three low bits of a key row, reversed: neighbours land in opposite halves of the banks
__device__ __forceinline__ int swizzle(int row) { return ((row & 1) << 2) | (row & 2) | ((row >> 2) & 1); }

__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two_bytes) {
    uint32_t halves;
    asm("{.reg .b16 pair; cvt.u16.u32 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair;}" : "=r"(halves) : "r"(two_bytes));
    return halves;
}

template <bool kFp8>
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
    if constexpr (kFp8) {
        const __half2 pair = __floats2half2_rn(x, y);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

// query fragments for the products with K: dimension order follows each thread's 16-byte chunks of a key row
template <bool kFp8>
struct Query {
    uint32_t fragment[8][4];
    float scale[2];  // power of two taken out of head g and head g + 8 (e4m3 only)
};

template <bool kFp8>
__device__ __forceinline__ Query<kFp8> load_query(const __nv_bfloat16* q, int heads, int g, int t) {
    Query<kFp8> query;
    const int head[2] = {g, g + 8};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        uint4 raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // bf16 rows have 16 chunks of 8 elements, e4m3 rows 8 chunks of 16
            const int element = kFp8 ? (t + 4 * (i / 2)) * 16 + (i % 2) * 8 : (t + 4 * i) * 8;
            raw[i] = make_uint4(0, 0, 0, 0);
            if (head[side] < heads) raw[i] = *reinterpret_cast<const uint4*>(q + head[side] * kHeadDim + element);
        }
        float shrink = 1.f;
        query.scale[side] = 1.f;
        if constexpr (kFp8) {
            float most = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    most = fmaxf(most, fabsf(__uint_as_float(words[w] << 16)));
                    most = fmaxf(most, fabsf(__uint_as_float(words[w] & 0xFFFF0000u)));
                }
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // exponents of 2^-100 and less are noise; both factors stay normal numbers
            const int exponent = min(max(int(__float_as_uint(most) >> 23) - 127, -100), 120);
            shrink = __uint_as_float(uint32_t(127 - exponent) << 23);
            query.scale[side] = __uint_as_float(uint32_t(127 + exponent) << 23);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t pair = words[w];
                if constexpr (kFp8)
                    pair = pack_pair<true>(__uint_as_float(pair << 16) * shrink,
                                           __uint_as_float(pair & 0xFFFF0000u) * shrink);
                query.fragment[2 * i + w / 2][side + 2 * (w % 2)] = pair;
            }
        }
    }
    return query;
}

template <bool kFp8>
struct Softmax {
    float out[16][4];
    float most[2];
    float sum[2];
};

// scores of 16 heads with the 8 keys of tile `tile` of this warp
template <bool kFp8>
__device__ __forceinline__ void key_products(float (&c)[4], const Query<kFp8>& query, uint32_t keys, int row, int t) {
    constexpr int kRowBytes = kFp8 ? 128 : 256;
    const int flip = swizzle(row);
#pragma unroll
    for (int i = 0; i < (kFp8 ? 2 : 4); ++i) {
        const uint4 b = load_shared(keys + row * kRowBytes + (((t + 4 * i) ^ flip) << 4));
        if constexpr (kFp8) {
            const uint32_t words[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int w = 0; w < 4; ++w)
                mma_f16(c, query.fragment[4 * i + w], widen_e4m3(words[w] & 0xFFFF), widen_e4m3(words[w] >> 16));
        } else {
            mma_bf16(c, query.fragment[2 * i], b.x, b.y);
            mma_bf16(c, query.fragment[2 * i + 1], b.z, b.w);
        }
    }
}

template <bool kFp8>
__device__ __forceinline__ void attend_unit(Softmax<kFp8>& state, const Query<kFp8>& query, uint32_t keys,
                                            uint32_t values, int visible, float key_scale, float value_ratio,
                                            int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int kRowBytes = kFp8 ? 128 : 256;
    float c[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) key_products<kFp8>(c[tile], query, keys, warp * 16 + tile * 8 + g, t);
    uint32_t weights[4];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        float most = state.most[side];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int key = warp * 16 + tile * 8 + 2 * t + e;
                float& x = c[tile][2 * side + e];
                x = key < visible ? x * (key_scale * query.scale[side]) : -INFINITY;
                most = fmaxf(most, x);
            }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float base = most == -INFINITY ? 0.f : most;
        const float fade = exp2f(state.most[side] - base);
        state.most[side] = most;
        float sum = 0.f;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const float x = exp2f(c[tile][2 * side] - base), y = exp2f(c[tile][2 * side + 1] - base);
            sum += x + y;
            weights[side + 2 * tile] = pack_pair<kFp8>(x, y);
        }
        state.sum[side] = state.sum[side] * fade + sum;
        const float shrink = fade * value_ratio;
        if (__any_sync(~0u, shrink != 1.f)) {
#pragma unroll
            for (int d = 0; d < 16; ++d) {
                state.out[d][2 * side] *= shrink;
                state.out[d][2 * side + 1] *= shrink;
            }
        }
    }
    const int row = warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8;
    const int flip = swizzle(row);
#pragma unroll
    for (int chunk = 0; chunk < (kFp8 ? 8 : 16); chunk += 2) {
        uint32_t b[4];
        load_transposed(b, values + row * kRowBytes + (((chunk + (lane >> 4)) ^ flip) << 4));
        if constexpr (kFp8) {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                // bytes (key 2t: d, d+1; key 2t+1: d, d+1) to the pairs of even and of odd dimensions
                const uint32_t near = __byte_perm(b[2 * next], 0, 0x3120);
                const uint32_t far = __byte_perm(b[2 * next + 1], 0, 0x3120);
                mma_f16(state.out[2 * (chunk + next)], weights, widen_e4m3(near & 0xFFFF), widen_e4m3(far & 0xFFFF));
                mma_f16(state.out[2 * (chunk + next) + 1], weights, widen_e4m3(near >> 16), widen_e4m3(far >> 16));
            }
        } else {
            mma_bf16(state.out[chunk], weights, b[0], b[1]);
            mma_bf16(state.out[chunk + 1], weights, b[2], b[3]);
        }
    }
}

template <bool kFp8>
__device__ __forceinline__ void copy_unit(uint32_t keys, uint32_t values, const uint8_t* k, const uint8_t* v,
                                          int64_t k_token_bytes, int64_t v_token_bytes, int visible, int lane) {
    constexpr int kRowBytes = kFp8 ? 128 : 256;
    constexpr int kChunks = kRowBytes / 16, kRows = 32 / kChunks;
    const int chunk = lane % kChunks;
#pragma unroll 8
    for (int base = 0; base < kUnitKeys; base += kRows) {
        const int row = base + lane / kChunks;
        const uint32_t at = row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
        copy16_or_zero(keys + at, k + row * k_token_bytes + chunk * 16, row < visible);
        copy16_or_zero(values + at, v + row * v_token_bytes + chunk * 16, row < visible);
    }
}

template <bool kFp8>
__global__ void __launch_bounds__(kAttendThreads, 2) attend_kernel(const __grid_constant__ AttendArgs args) {
    constexpr int kElement = kFp8 ? 1 : 2;
    constexpr int kHalfBytes = kUnitKeys * kHeadDim * kElement;
    constexpr int kStages = kRingBytes / (2 * kHalfBytes);
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t full[kStages], empty[kStages];
    __shared__ int found[2];
    __shared__ float warp_most[kAttendWarps][kGroupHeads], warp_sum[kAttendWarps][kGroupHeads];
    __shared__ float block_most[kGroupHeads], block_sum[kGroupHeads];
    cg::cluster_group cluster = cg::this_cluster();
    const int splits = cluster.num_blocks(), split = cluster.block_rank();
    const int line = blockIdx.x / splits, row = line / args.groups, group = line % args.groups;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 32);
            barrier_init(&empty[stage], kAttendWarps);
        }
        found[0] = -1;
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    int block = -1;
    if (lane < args.num_chosen)
        block = args.blocks[(int64_t(group) * args.num_rows + row) * args.num_chosen + lane];
    for (int s = thread; s < args.num_seqs; s += kAttendThreads) {
        const int first = args.query_start[s], last = args.query_start[s + 1], len = args.seq_lens[s];
        if (first <= row && row < last && len > 0) {
            found[0] = s;
            found[1] = len - (last - row);
        }
    }
    __syncthreads();
    const int sequence = found[0], position = found[1];
    const bool real = sequence >= 0 && block >= 0 && block * kPageTokens <= position;
    int page = real ? args.page_table[sequence * args.table_stride + block] : 0;
    const uint32_t chosen = __ballot_sync(~0u, real);
    float key_scale = args.scale_log2, value_scale = 1.f;
    if (kFp8 && real) {
        key_scale *= args.k_scale[int64_t(page) * args.groups + group];
        value_scale = args.v_scale[int64_t(page) * args.groups + group];
    }
    const int units = 2 * __popc(chosen);
    if (chosen & (chosen + 1)) {  // holes between chosen blocks: close them, order kept
        const int slot = real ? __popc(chosen & ((1u << lane) - 1)) : -1;
        int source = 0;
        for (int other = 0; other < 32; ++other)
            if (__shfl_sync(~0u, slot, other) == lane) source = other;
        block = __shfl_sync(~0u, block, source);
        page = __shfl_sync(~0u, page, source);
        key_scale = __shfl_sync(~0u, key_scale, source);
        value_scale = __shfl_sync(~0u, value_scale, source);
    }
    const int first_unit = units * split / splits, last_unit = units * (split + 1) / splits;
    const uint32_t base = shared_address(ring);

    if (warp == kAttendWarps) {
        for (int unit = first_unit; unit < last_unit; ++unit) {
            const int issued = unit - first_unit, stage = issued % kStages;
            const int source = unit / 2;
            const int unit_page = __shfl_sync(~0u, page, source);
            const int first_key = (unit % 2) * kUnitKeys;
            const int visible = position + 1 - __shfl_sync(~0u, block, source) * kPageTokens - first_key;
            if (issued >= kStages) barrier_wait(&empty[stage], (issued / kStages - 1) & 1);
            const uint8_t* k = static_cast<const uint8_t*>(args.k) +
                               (unit_page * args.k_page_stride + group * args.k_group_stride +
                                first_key * args.k_token_stride) * kElement;
            const uint8_t* v = static_cast<const uint8_t*>(args.v) +
                               (unit_page * args.v_page_stride + group * args.v_group_stride +
                                first_key * args.v_token_stride) * kElement;
            const uint32_t keys = base + stage * 2 * kHalfBytes;
            copy_unit<kFp8>(keys, keys + kHalfBytes, k, v, args.k_token_stride * kElement,
                            args.v_token_stride * kElement, visible, lane);
            copies_arrive(&full[stage]);
        }
    } else {
        const int heads = args.heads_per_group;
        const __nv_bfloat16* q =
            args.q + (int64_t(row) * args.groups + group) * heads * kHeadDim;
        const Query<kFp8> query = load_query<kFp8>(q, heads, g, t);
        Softmax<kFp8> state;
#pragma unroll
        for (int d = 0; d < 16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) state.out[d][e] = 0.f;
        state.most[0] = state.most[1] = -INFINITY;
        state.sum[0] = state.sum[1] = 0.f;
        float value_unit = 1.f;
        for (int unit = first_unit; unit < last_unit; ++unit) {
            const int done = unit - first_unit, stage = done % kStages;
            const int source = unit / 2;
            const int first_key = (unit % 2) * kUnitKeys;
            const int visible = position + 1 - __shfl_sync(~0u, block, source) * kPageTokens - first_key;
            const float unit_key_scale = __shfl_sync(~0u, key_scale, source);
            float ratio = 1.f;
            if (kFp8) {
                const float next = __shfl_sync(~0u, value_scale, source);
                if (done > 0) ratio = value_unit / next;
                value_unit = next;
            }
            barrier_wait(&full[stage], (done / kStages) & 1);
            const uint32_t keys = base + stage * 2 * kHalfBytes;
            attend_unit<kFp8>(state, query, keys, keys + kHalfBytes, visible, unit_key_scale, ratio, warp, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(&empty[stage]);
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            state.sum[side] += __shfl_xor_sync(~0u, state.sum[side], 1);
            state.sum[side] += __shfl_xor_sync(~0u, state.sum[side], 2);
        }
        // every copy has landed and been read: the ring becomes [warp, head, dim] partial outputs
        named_barrier(1, kAttendWarps * 32);
        float* partial = reinterpret_cast<float*>(ring) + warp * kGroupHeads * kHeadDim;
#pragma unroll
        for (int d = 0; d < 16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 2 * t + e % 2;
                const int dim = kFp8 ? (d / 2) * 16 + 2 * column + d % 2 : d * 8 + column;
                partial[(g + 8 * (e / 2)) * kHeadDim + dim] = state.out[d][e] * value_unit;
            }
        if (t == 0) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                warp_most[warp][g + 8 * side] = state.most[side];
                warp_sum[warp][g + 8 * side] = state.sum[side];
            }
        }
        named_barrier(1, kAttendWarps * 32);
        float* merged = reinterpret_cast<float*>(ring);
        const int dim = thread;
        for (int head = 0; head < kGroupHeads; ++head) {
            float most = warp_most[0][head];
#pragma unroll
            for (int w = 1; w < kAttendWarps; ++w) most = fmaxf(most, warp_most[w][head]);
            const float floor = most == -INFINITY ? 0.f : most;
            float sum = 0.f, value = 0.f;
#pragma unroll
            for (int w = 0; w < kAttendWarps; ++w) {
                const float weight = exp2f(warp_most[w][head] - floor);
                sum += weight * warp_sum[w][head];
                value += weight * merged[(w * kGroupHeads + head) * kHeadDim + dim];
            }
            if (splits == 1) {
                if (head < heads)
                    args.out[((int64_t(row) * args.groups + group) * heads + head) * kHeadDim + dim] =
                        __float2bfloat16(sum == 0.f ? 0.f : value / sum);
            } else {
                merged[head * kHeadDim + dim] = value;  // only this thread reads this column of warp 0
                if (dim == 0) {
                    block_most[head] = most;
                    block_sum[head] = sum;
                }
            }
        }
    }
    if (splits == 1) return;
    cluster.sync();
    if (thread < kHeadDim) {
        const int heads = args.heads_per_group;
        for (int head = split; head < heads; head += splits) {
            float most = -INFINITY;
            for (int other = 0; other < splits; ++other)
                most = fmaxf(most, cluster.map_shared_rank(block_most, other)[head]);
            const float floor = most == -INFINITY ? 0.f : most;
            float sum = 0.f, value = 0.f;
            for (int other = 0; other < splits; ++other) {
                const float weight = exp2f(cluster.map_shared_rank(block_most, other)[head] - floor);
                sum += weight * cluster.map_shared_rank(block_sum, other)[head];
                value += weight * cluster.map_shared_rank(reinterpret_cast<float*>(ring), other)[head * kHeadDim + thread];
            }
            args.out[((int64_t(row) * args.groups + group) * heads + head) * kHeadDim + thread] =
                __float2bfloat16(sum == 0.f ? 0.f : value / sum);
        }
    }
    cluster.sync();
}

template <bool kFp8>
cudaError_t launch_attend(const AttendArgs& args, int splits, cudaStream_t stream) {
    const void* kernel = reinterpret_cast<const void*>(&attend_kernel<kFp8>);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
    if (error != cudaSuccess) return error;
    if (splits > 8) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    void* params[] = {const_cast<AttendArgs*>(&args)};
    return launch(kernel, dim3(args.num_rows * args.groups * splits), kAttendThreads, kRingBytes, splits, params,
                  stream);
}

}  // namespace m3

extern "C" int m3_attend(const m3::AttendArgs* args, int fp8, int splits, cudaStream_t stream) {
    return fp8 ? m3::launch_attend<true>(*args, splits, stream) : m3::launch_attend<false>(*args, splits, stream);
}
