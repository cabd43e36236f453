// Attention at decode over the chosen blocks of each (row, KV group): one cluster a row and group.
//
// Feeding warps fill a ring of 64-key halves of blocks by 16-byte asynchronous copies; keys after the row
// are written as zeros, so that nothing unwritten is ever read. Four warps of 16 keys each run the
// online softmax on their own keys; warps merge in shared memory, the cluster's blocks through it.
#include <cooperative_groups.h>

#include "msa_decode_attend.cuh"

namespace m3 {

namespace cg = cooperative_groups;

constexpr int kUnitKeys = 64;
constexpr int kTeamWarps = 4;  // warps that share a unit, 16 keys each
constexpr int kMinClusterSplits = 8;
constexpr int kInboxBytes = kGroupHeads / kMinClusterSplits * kMaxSplits * kHeadDim * 4;
constexpr int kPitch = kHeadDim + 8;  // floats between heads of a partial output: no bank conflicts

// how the blocks of a line come together: alone, through a cluster (few lines; clusters do not fill the
// processors), or through memory where the last block to arrive merges
enum Merge { kAlone, kCluster, kMemory };

// one team and two blocks a processor for many lines; two teams taking turns where lines are few and
// the time of one block is what counts
template <int kTeams>
struct AttendShape {
    static constexpr int kWarps = kTeamWarps * kTeams;
    static constexpr int kFeeders = 2 * kTeams;  // for each team one warp that copies K and one that copies V
    static constexpr int kThreads = (kWarps + kFeeders) * 32;
    static constexpr int kRingBytes = 96 * 1024 * kTeams;
    static constexpr int kBlocksPerProcessor = kTeams == 1 ? 2 : 1;
};

__device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

template <bool kFp8>
struct Softmax {
    float out[16][4];
    float most[2];
    float sum[2];
};

template <bool kFp8>
__device__ __forceinline__ void attend_unit(Softmax<kFp8>& state, const Query<kFp8>& query, uint32_t keys,
                                            uint32_t values, int visible, float key_scale, float value_ratio,
                                            int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    constexpr int kRowBytes = kFp8 ? 128 : 256;
    float c[2][4] = {};
    key_products<kFp8>(c, query, keys, warp * 16 + g, t);
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

// where a lane of the feeding warp stands in a unit: its chunk of a row, and its first row
template <bool kFp8>
struct CopyLane {
    static constexpr int kRowBytes = kFp8 ? 128 : 256;
    static constexpr int kChunks = kRowBytes / 16;
    static constexpr int kRows = 32 / kChunks;   // rows that one instruction of the warp copies
    static constexpr int kPhases = 8 / kRows;    // instructions until the swizzle repeats
    int row, chunk;
    uint32_t place[kPhases];                     // shared offsets of the first kPhases rows of this lane

    __device__ __forceinline__ explicit CopyLane(int lane) : row(lane / kChunks), chunk(lane % kChunks) {
#pragma unroll
        for (int phase = 0; phase < kPhases; ++phase) {
            const int at = row + phase * kRows;
            place[phase] = at * kRowBytes + ((chunk ^ swizzle(at)) << 4);
        }
    }
};

// one half unit, K or V: whole halves of dense pages cost one instruction a copy and no arithmetic
template <bool kFp8>
__device__ __forceinline__ void copy_half(uint32_t to, const uint8_t* from, int64_t token_bytes, int visible,
                                          const CopyLane<kFp8>& lane) {
    using Lane = CopyLane<kFp8>;
    const uint8_t* mine = from + lane.row * token_bytes + lane.chunk * 16;
    if (visible >= kUnitKeys && token_bytes == Lane::kRowBytes) {
#pragma unroll
        for (int base = 0; base < kUnitKeys; base += Lane::kRows) {
            const int phase = base / Lane::kRows % Lane::kPhases;
            copy16(to + lane.place[phase] + base / 8 * 8 * Lane::kRowBytes, mine + base * Lane::kRowBytes);
        }
        return;
    }
#pragma unroll 1
    for (int base = 0; base < kUnitKeys; base += 8) {
#pragma unroll
        for (int phase = 0; phase < Lane::kPhases; ++phase) {
            copy16_or_zero(to + lane.place[phase] + base * Lane::kRowBytes, mine,
                           lane.row + base + phase * Lane::kRows < visible);
            mine += Lane::kRows * token_bytes;
        }
    }
}

template <bool kFp8, int kTeams, Merge kMerge>
__global__ void __launch_bounds__(AttendShape<kTeams>::kThreads, AttendShape<kTeams>::kBlocksPerProcessor)
    attend_kernel(const __grid_constant__ AttendArgs args) {
    using Shape = AttendShape<kTeams>;
    constexpr int kWarps = Shape::kWarps;
    constexpr int kElement = kFp8 ? 1 : 2;
    constexpr int kHalfBytes = kUnitKeys * kHeadDim * kElement;
    constexpr int kStages = Shape::kRingBytes / (2 * kHalfBytes);
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t full[kStages], empty[kStages];
    __shared__ int found[2];
    __shared__ __align__(16) float warp_most[kGroupHeads][kWarps], warp_sum[kGroupHeads][kWarps];
    __shared__ float block_most[kGroupHeads], block_sum[kGroupHeads];
    // cluster merge: block `split` owns heads split, split + splits, ..; the others write their parts here
    using Inbox = float[kMaxSplits][kHeadDim];
    Inbox* inbox = reinterpret_cast<Inbox*>(ring + Shape::kRingBytes);
    __shared__ float2 inbox_share[kGroupHeads / kMinClusterSplits][kMaxSplits];
    const int splits = kMerge == kAlone ? 1 : args.splits;
    const int line = blockIdx.x / splits, split = blockIdx.x % splits, row = line / args.groups, group = line % args.groups;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&full[stage], 64);
            barrier_init(&empty[stage], kTeamWarps);
        }
        found[0] = -1;
        barrier_init_fence();
    }
    __syncthreads();
    // no block may write to another before that one runs
    if constexpr (kMerge == kCluster) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int heads = args.heads_per_group;
    int block = -1, first = 0, last = 0, len = 0;
    if (lane < args.num_chosen)
        block = args.blocks[(int64_t(group) * args.num_rows + row) * args.num_chosen + lane];
    if (thread < args.num_seqs) {
        first = args.query_start[thread];
        last = args.query_start[thread + 1];
        len = args.seq_lens[thread];
    }
    // loads return in order: the query is asked for after what is needed before it
    const Query<kFp8> query = load_query<kFp8>(args.q + int64_t(line) * heads * kHeadDim, heads, g, t);
    for (int s = thread;;) {
        if (first <= row && row < last && len > 0) {
            found[0] = s;
            found[1] = len - (last - row);
        }
        s += Shape::kThreads;
        if (s >= args.num_seqs) break;
        first = args.query_start[s];
        last = args.query_start[s + 1];
        len = args.seq_lens[s];
    }
    __syncthreads();
    const int sequence = found[0], position = found[1];
    const bool real = sequence >= 0 && block >= 0 && block * kPageTokens <= position;
    int page = real ? args.page_table[sequence * args.table_stride + block] : 0;
    const uint32_t chosen = __ballot_sync(~0u, real);
    float key_scale = args.scale_log2, value_scale = 1.f;
    if (kFp8 && real && args.k_scale != nullptr) {
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

    if (warp >= kWarps) {
        const CopyLane<kFp8> copy_lane(lane);
        const int team = (warp - kWarps) / 2, half = (warp - kWarps) % 2;
        const PageStrides& at = half ? args.v_strides : args.k_strides;
        const uint8_t* pool = static_cast<const uint8_t*>(half ? args.v : args.k) + group * at.group * kElement;
        for (int issued = team; issued < last_unit - first_unit; issued += kTeams) {
            const int unit = first_unit + issued, stage = issued % kStages;
            const int unit_page = __shfl_sync(~0u, page, unit / 2);
            const int first_key = (unit % 2) * kUnitKeys;
            const int visible = position + 1 - __shfl_sync(~0u, block, unit / 2) * kPageTokens - first_key;
            if (issued >= kStages) barrier_wait(&empty[stage], (issued / kStages - 1) & 1);
            copy_half<kFp8>(base + (2 * stage + half) * kHalfBytes,
                            pool + (unit_page * at.page + first_key * at.token) * kElement, at.token * kElement,
                            visible, copy_lane);
            copies_arrive(&full[stage]);
        }
        if constexpr (kMerge == kCluster) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    } else {
        Softmax<kFp8> state;
#pragma unroll
        for (int d = 0; d < 16; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) state.out[d][e] = 0.f;
        state.most[0] = state.most[1] = -INFINITY;
        state.sum[0] = state.sum[1] = 0.f;
        float value_unit = 1.f;
        const int team = warp / kTeamWarps;
        for (int done = team; done < last_unit - first_unit; done += kTeams) {
            const int unit = first_unit + done, stage = done % kStages;
            const int source = unit / 2;
            const int first_key = (unit % 2) * kUnitKeys;
            const int visible = position + 1 - __shfl_sync(~0u, block, source) * kPageTokens - first_key;
            const float unit_key_scale = __shfl_sync(~0u, key_scale, source);
            float ratio = 1.f;
            if (kFp8) {
                const float next = __shfl_sync(~0u, value_scale, source);
                if (done >= kTeams) ratio = value_unit / next;
                value_unit = next;
            }
            barrier_wait(&full[stage], (done / kStages) & 1);
            const uint32_t keys = base + stage * 2 * kHalfBytes;
            attend_unit<kFp8>(state, query, keys, keys + kHalfBytes, visible, unit_key_scale, ratio,
                              warp % kTeamWarps, lane);
            __syncwarp();
            if (lane == 0) barrier_arrive(&empty[stage]);
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            state.sum[side] += __shfl_xor_sync(~0u, state.sum[side], 1);
            state.sum[side] += __shfl_xor_sync(~0u, state.sum[side], 2);
        }
        if constexpr (kMerge == kCluster) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        // every copy has landed and been read: the ring becomes [warp, head, dim] partial outputs
        named_barrier(1, kWarps * 32);
        float* partial = reinterpret_cast<float*>(ring) + warp * kGroupHeads * kPitch;
#pragma unroll
        for (int d = 0; d < 16; d += 2)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float* to = partial + (g + 8 * side) * kPitch;
                const float* even = state.out[d] + 2 * side;
                const float* odd = state.out[d + 1] + 2 * side;
                if constexpr (kFp8) {
                    store_pair(to + d * 8 + 4 * t, even[0] * value_unit, odd[0] * value_unit);
                    store_pair(to + d * 8 + 4 * t + 2, even[1] * value_unit, odd[1] * value_unit);
                } else {
                    store_pair(to + d * 8 + 2 * t, even[0], even[1]);
                    store_pair(to + d * 8 + 8 + 2 * t, odd[0], odd[1]);
                }
            }
        if (t == 0) {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                warp_most[g + 8 * side][warp] = state.most[side];
                warp_sum[g + 8 * side][warp] = state.sum[side];
            }
        }
        named_barrier(1, kWarps * 32);
        if (thread < kGroupHeads) {
            float top = -INFINITY, total = 0.f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) top = fmaxf(top, warp_most[thread][w]);
            const float floor = top == -INFINITY ? 0.f : top;
            float weight[kWarps];
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                weight[w] = exp2f(warp_most[thread][w] - floor);
                total += weight[w] * warp_sum[thread][w];
            }
            if constexpr (kMerge == kCluster) {
                if (thread < heads)
                    *cg::this_cluster().map_shared_rank(&inbox_share[thread / splits][split], thread % splits) =
                        make_float2(top, total);
            } else {
                block_most[thread] = top;
                block_sum[thread] = total;
            }
            const float inverse = kMerge != kAlone ? 1.f : total == 0.f ? 0.f : 1.f / total;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) warp_most[thread][w] = weight[w] * inverse;
        }
        named_barrier(1, kWarps * 32);
        float* merged = reinterpret_cast<float*>(ring);
        const int dim = thread % kHeadDim;
#pragma unroll 2
        for (int head = thread / kHeadDim; head < heads; head += kTeams) {
            float value = 0.f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w)
                value += warp_most[head][w] * merged[(w * kGroupHeads + head) * kPitch + dim];
            if constexpr (kMerge == kAlone)
                args.out[(int64_t(line) * heads + head) * kHeadDim + dim] = __float2bfloat16(value);
            else if constexpr (kMerge == kCluster)
                *cg::this_cluster().map_shared_rank(&inbox[head / splits][split][dim], head % splits) = value;
            else
                __stcg(&args.partials[((int64_t(line) * splits + split) * heads + head) * kHeadDim + dim], value);
        }
    }
    if constexpr (kMerge == kAlone) return;
    __nv_bfloat16* out = args.out + int64_t(line) * heads * kHeadDim;
    if constexpr (kMerge == kCluster) {
        cg::this_cluster().sync();  // every inbox is full, and nobody reads another's memory any more
        if (thread < kHeadDim)
            for (int head = split; head < heads; head += splits) {
                const int turn = head / splits;
                float2 share = make_float2(-INFINITY, 0.f);
                if (lane < splits) share = inbox_share[turn][lane];
                const float weight = share_of_warp(share.x, share.y);
                float mixed = 0.f;
#pragma unroll 4
                for (int other = 0; other < splits; ++other)
                    mixed += __shfl_sync(~0u, weight, other) * inbox[turn][other][thread];
                out[head * kHeadDim + thread] = __float2bfloat16(mixed);
            }
    } else {
        float* sums = args.partials + int64_t(args.num_rows) * args.groups * splits * heads * kHeadDim;
        const int64_t first = int64_t(line) * splits * heads;
        if (thread < heads)
            __stcg(reinterpret_cast<float2*>(sums) + first + split * heads + thread,
                   make_float2(block_most[thread], block_sum[thread]));
        __syncthreads();
        if (thread == 0) {
            __threadfence();
            found[0] = atomicAdd(&args.arrived[line], 1) == splits - 1;
        }
        __syncthreads();
        if (!found[0]) return;
        __threadfence();
        if (thread == 0) args.arrived[line] = 0;
        // the ring is free: it takes the weights [split, head]
        float* weights = reinterpret_cast<float*>(ring);
        for (int head = warp; head < heads; head += Shape::kThreads / 32) {
            float2 share = make_float2(-INFINITY, 0.f);
            if (lane < splits) share = __ldcg(reinterpret_cast<const float2*>(sums) + first + lane * heads + head);
            const float weight = share_of_warp(share.x, share.y);
            if (lane < splits) weights[lane * kGroupHeads + head] = weight;
        }
        __syncthreads();
        if (thread >= kWarps * 32) return;
        const int dim = thread % kHeadDim, first_head = thread / kHeadDim;
        float mixed[kGroupHeads / kTeams] = {};
#pragma unroll 2
        for (int other = 0; other < splits; ++other)
#pragma unroll
            for (int turn = 0; turn < kGroupHeads / kTeams; ++turn) {
                const int head = turn * kTeams + first_head;
                if (head < heads)
                    mixed[turn] += weights[other * kGroupHeads + head] *
                                   __ldcg(&args.partials[(first + other * heads + head) * kHeadDim + dim]);
            }
#pragma unroll
        for (int turn = 0; turn < kGroupHeads / kTeams; ++turn) {
            const int head = turn * kTeams + first_head;
            if (head < heads) out[head * kHeadDim + dim] = __float2bfloat16(mixed[turn]);
        }
    }
}

template <bool kFp8, int kTeams, Merge kMerge>
cudaError_t launch_attend(const AttendArgs& args, cudaStream_t stream) {
    using Shape = AttendShape<kTeams>;
    const void* kernel = reinterpret_cast<const void*>(&attend_kernel<kFp8, kTeams, kMerge>);
    const int bytes = Shape::kRingBytes + (kMerge == kCluster ? kInboxBytes : 0);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const int cluster = kMerge == kCluster ? args.splits : 1;
    if (cluster > 8) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
    }
    void* params[] = {const_cast<AttendArgs*>(&args)};
    return launch(kernel, dim3(args.num_rows * args.groups * args.splits), Shape::kThreads, bytes, cluster, params,
                  stream);
}

template <bool kFp8>
cudaError_t attend(const AttendArgs& args, int teams, int merge, cudaStream_t stream) {
    if (args.splits < 1 || args.splits > kMaxSplits || (args.splits == 1) != (merge == kAlone)) return cudaErrorInvalidValue;
    if (merge == kAlone)
        return teams == 1 ? launch_attend<kFp8, 1, kAlone>(args, stream) : launch_attend<kFp8, 2, kAlone>(args, stream);
    if (merge == kCluster && args.splits < kMinClusterSplits) return cudaErrorInvalidValue;
    if (merge == kCluster) return launch_attend<kFp8, 2, kCluster>(args, stream);
    return launch_attend<kFp8, 2, kMemory>(args, stream);
}

}  // namespace m3

extern "C" int m3_attend(const m3::AttendArgs* args, int fp8, int teams, int merge, cudaStream_t stream) {
    return fp8 ? m3::attend<true>(*args, teams, merge, stream) : m3::attend<false>(*args, teams, merge, stream);
}
