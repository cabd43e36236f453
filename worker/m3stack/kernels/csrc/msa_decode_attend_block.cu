// Attention at decode where latency is all: a chosen block for each thread block, a cluster for each line.
//
// Every warp copies and scores 16 keys of its own, all warps agree on the largest score, then every warp takes
// 16 dimensions over all 128 keys. So a thread block holds its output in registers, once, and sends each head to
// the block of the cluster that owns it, without a barrier between the two. bf16 only.
#include "msa_decode_attend.cuh"

namespace m3 {

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = kBlockWarps * 32;
constexpr int kBlockKeys = kPageTokens / kBlockWarps;  // keys of a warp
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kPageBytes = kPageTokens * kRowBytes;
constexpr int kWeightPitch = 48;  // bytes between heads of a warp's weights: no bank conflicts

struct BlockShared {
    uint8_t keys[kPageBytes];  // a warp's rows take its weights once they are read
    uint8_t values[kPageBytes];
    // heads split, split + splits, .. of the line are this block's to merge: [owned head, part]
    float inbox[kGroupHeads][kHeadDim];
    float2 inbox_share[kGroupHeads];
    float most[kGroupHeads][kBlockWarps];
    float sum[kGroupHeads][kBlockWarps];
    uint64_t received;
    int found[2];
};

// this warp's 16 rows of a page, those from `visible` on as zeros
__device__ __forceinline__ void copy_rows(uint32_t to, const __nv_bfloat16* page, int64_t token_stride, int visible) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = lane % 16;
#pragma unroll 2
    for (int i = 0; i < kBlockKeys / 2; ++i) {
        const int row = warp * kBlockKeys + 2 * i + lane / 16;
        copy16_or_zero(to + row * kRowBytes + ((chunk ^ swizzle(row)) << 4), page + row * token_stride + chunk * 8,
                       row < visible);
    }
}

// scores of 16 heads with 16 keys, two tiles of 8, a tile at a time: registers are what this kernel is short of
__device__ __forceinline__ void score_keys(float (&c)[2][4], const Query<false>& query, uint32_t keys, int row, int t) {
    const int flip = swizzle(row);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 k = load_shared(keys + (row + 8 * tile) * kRowBytes + (((t + 4 * i) ^ flip) << 4));
            mma_bf16(even, query.fragment[2 * i], k.x, k.y);
            mma_bf16(odd, query.fragment[2 * i + 1], k.z, k.w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) c[tile][e] = even[e] + odd[e];
    }
}

__device__ __forceinline__ uint64_t as_bits(float x, float y) {
    return uint64_t(__float_as_uint(y)) << 32 | __float_as_uint(x);
}

__device__ __forceinline__ float largest(const float (&of)[kBlockWarps]) {
    const float4 a = *reinterpret_cast<const float4*>(&of[0]), b = *reinterpret_cast<const float4*>(&of[4]);
    return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
}

__global__ void __launch_bounds__(kBlockThreads, 3) attend_block_kernel(const __grid_constant__ AttendArgs args) {
    extern __shared__ __align__(128) uint8_t raw[];
    BlockShared& shared = *reinterpret_cast<BlockShared*>(raw);
    const int splits = args.splits, heads = args.heads_per_group;
    const int line = blockIdx.x / splits, split = blockIdx.x % splits, row = line / args.groups, group = line % args.groups;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int owned = (heads - split + splits - 1) / splits;  // 0 or less: none
    if (thread == 0) {
        barrier_init(&shared.received, 1);
        barrier_init_fence();
        barrier_arrive_expect(&shared.received, max(owned, 0) * splits * (kHeadDim * 4 + 8));
        shared.found[0] = -1;
    }
    __syncthreads();
    cluster_arrive();
    wait_for_previous_kernel();
    let_next_kernel_start();
    int block = -1;
    if (split < args.num_chosen) block = args.blocks[(int64_t(group) * args.num_rows + row) * args.num_chosen + split];
    for (int s = thread; s < args.num_seqs; s += kBlockThreads) {
        const int first = args.query_start[s], last = args.query_start[s + 1], len = args.seq_lens[s];
        if (first <= row && row < last && len > 0) {
            shared.found[0] = s;
            shared.found[1] = len - (last - row);
        }
    }
    __syncthreads();
    const int sequence = shared.found[0], position = shared.found[1];
    float out[2][4] = {};  // [8 dimensions, fragment] of heads g and g + 8
    float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    if (sequence >= 0 && block >= 0 && block * kPageTokens <= position) {  // the same for the whole thread block
        const int64_t page = args.page_table[sequence * args.table_stride + block];
        const int visible = position + 1 - block * kPageTokens;
        const uint32_t keys = shared_address(shared.keys), values = shared_address(shared.values);
        copy_rows(keys, static_cast<const __nv_bfloat16*>(args.k) + page * args.k_strides.page + group * args.k_strides.group,
                  args.k_strides.token, visible);
        copies_commit();
        copy_rows(values,
                  static_cast<const __nv_bfloat16*>(args.v) + page * args.v_strides.page + group * args.v_strides.group,
                  args.v_strides.token, visible);
        copies_commit();
        // behind the copies, since loads return in order
        const Query<false> query = load_query<false>(args.q + int64_t(line) * heads * kHeadDim, heads, g, t);
        copies_wait<1>();
        __syncwarp();
        float c[2][4];
        score_keys(c, query, keys, warp * kBlockKeys + g, t);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            float top = -INFINITY;
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = c[tile][2 * side + e];
                    x = warp * kBlockKeys + tile * 8 + 2 * t + e < visible ? x * args.scale_log2 : -INFINITY;
                    top = fmaxf(top, x);
                }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (t == 0) shared.most[g + 8 * side][warp] = top;
        }
        __syncthreads();
        uint8_t* weights = shared.keys + warp * kBlockKeys * kRowBytes;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            // the block holds a visible key: the largest score is a number unless a score is not
            most[side] = largest(shared.most[g + 8 * side]);
            const float base = most[side] == -INFINITY ? 0.f : most[side];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const float x = exp2f(c[tile][2 * side] - base), y = exp2f(c[tile][2 * side + 1] - base);
                sum[side] += x + y;
                *reinterpret_cast<uint32_t*>(weights + (g + 8 * side) * kWeightPitch + tile * 16 + t * 4) =
                    pack_pair<false>(x, y);
            }
        }
        copies_wait<0>();
        __syncthreads();
        float odd[2][4] = {};
        const int lane_row = (lane & 7) + ((lane >> 3) & 1) * 8;
#pragma unroll
        for (int part = 0; part < kBlockWarps; ++part) {
            uint32_t a[4], b[4];
            load_matrices(a, keys + part * kBlockKeys * kRowBytes + lane_row * kWeightPitch + (lane >> 4) * 16);
            const int value_row = part * kBlockKeys + lane_row;
            load_transposed(b, values + value_row * kRowBytes + (((2 * warp + (lane >> 4)) ^ swizzle(value_row)) << 4));
            mma_bf16(part % 2 ? odd[0] : out[0], a, b[0], b[1]);
            mma_bf16(part % 2 ? odd[1] : out[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[tile][e] += odd[tile][e];
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        sum[side] += __shfl_xor_sync(~0u, sum[side], 1);
        sum[side] += __shfl_xor_sync(~0u, sum[side], 2);
        if (t == 0) shared.sum[g + 8 * side][warp] = sum[side];
    }
    cluster_wait();
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int head = g + 8 * side;
        if (head >= heads) continue;
        const uint32_t owner = head % splits, place = head / splits * splits + split;
        const uint32_t to = remote_address(shared_address(&shared.inbox[place][warp * 16 + 2 * t]), owner);
        const uint32_t received = remote_address(shared_address(&shared.received), owner);
        store_remote(to, as_bits(out[0][2 * side], out[0][2 * side + 1]), received);
        store_remote(to + 32, as_bits(out[1][2 * side], out[1][2 * side + 1]), received);
    }
    __syncthreads();
    if (warp == 0 && t == 0) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int head = g + 8 * side;
            if (head >= heads) continue;
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < kBlockWarps; ++w) total += shared.sum[head][w];
            const uint32_t owner = head % splits, place = head / splits * splits + split;
            store_remote(remote_address(shared_address(&shared.inbox_share[place]), owner), as_bits(most[side], total),
                         remote_address(shared_address(&shared.received), owner));
        }
    }
    if (owned <= 0) return;
    barrier_wait_cluster(&shared.received, 0);
    const int dim = thread % kHeadDim;
    for (int turn = thread / kHeadDim; turn < owned; turn += kBlockThreads / kHeadDim) {
        float2 share = make_float2(-INFINITY, 0.f);
        if (lane < splits) share = shared.inbox_share[turn * splits + lane];
        const float weight = share_of_warp(share.x, share.y);
        float mixed = 0.f;
#pragma unroll 4
        for (int other = 0; other < splits; ++other)
            mixed += __shfl_sync(~0u, weight, other) * shared.inbox[turn * splits + other][dim];
        const int head = turn * splits + split;
        args.out[(int64_t(line) * heads + head) * kHeadDim + dim] = __float2bfloat16(mixed);
    }
}

}  // namespace m3

extern "C" int m3_attend_block(const m3::AttendArgs* args, cudaStream_t stream) {
    const int splits = args->splits, bytes = sizeof(m3::BlockShared);
    if (splits < 2 || splits > m3::kMaxSplits || (splits & (splits - 1))) return cudaErrorInvalidValue;
    if (args->num_chosen > splits) return cudaErrorInvalidValue;
    const void* kernel = reinterpret_cast<const void*>(&m3::attend_block_kernel);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    if (splits > 8) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    void* params[] = {const_cast<m3::AttendArgs*>(args)};
    return m3::launch(kernel, dim3(args->num_rows * args->groups * splits), m3::kBlockThreads, bytes, splits, params,
                      stream);
}
