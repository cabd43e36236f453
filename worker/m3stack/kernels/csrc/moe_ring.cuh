// Expert products by warpgroups: weights and sorted tokens come through a ring in shared memory.
//
// A tile is 128 rows of a weight times up to `kMost` tokens of one expert. A warp copies both for all
// tiles of its block, ahead of two warpgroups that own 64 rows each. Weights are the left operand, so
// that a product is as wide as an expert has tokens: bf16 ones are multiplied where they stand, MXFP8
// ones are decoded into registers. A lane takes 16 bytes that stand side by side, which fixes which of
// the product's columns they are; tokens and hidden rows stand in that order (`column_at`).
// Of the up product, rows of gates and ups of the same channels fall to the same lane.
#pragma once
#include "moe_ring_copies.cuh"
#include "moe_ring_multiply.cuh"
#include "moe_ring_store.cuh"

namespace m3 {

// A function for each number of tokens, sums included: as one variable they would be merged, and spilled.
template <typename F, int N>
__device__ __forceinline__ void run(const RingArgs& a, const Tile& tile, const Lane<F>& lane, const Scales& scales,
                                    RingShared<F>& shared, Ring<F::kStages>& ring) {
    const int group = threadIdx.x / kWarpgroup - 1, chunks = a.width / kChunk;
    // set, for what is not set would have to be kept since the tile before
    float d[N / 2] = {};
    if constexpr (F::kCoded) multiply_coded<F, N>(d, chunks, lane.low_at, lane.high_at, scales, shared, ring);
    else multiply_plain<F, N>(d, chunks, shared, ring);
    // the table of tokens has been written
    if constexpr (F::kMode == kDown) named_barrier(1 + group, kWarpgroup);
    // the last block of a cluster may have no rows
    const int first = tile.row_tile * F::kTileChannels;
    if (first >= a.outputs) return;
    store<F, N>(d, a, tile, first + lane.channel, shared.rows[group], shared.weights[group]);
}

template <typename F>
__device__ __forceinline__ void consume(const RingArgs& a, RingShared<F>& shared, const Walk<F>& walk, int first,
                                        int step, int rank) {
    const int group = threadIdx.x / kWarpgroup - 1, in_group = threadIdx.x % kWarpgroup;
    const Lane<F> lane(a.outputs);
    Ring<F::kStages> ring;
    Tile tile;
    const auto hears = [] {
        __syncwarp();
        return threadIdx.x % 32 == 0;
    };
    for (Turns<F> turns(first, step); walk.find(a, turns.number, rank, tile); turns.advance(shared, hears)) {
        if (tile.count == 0) continue;
        const bool is_own = tile.expert < 0;
        Scales scales = {};
        if constexpr (F::kCoded) {
            const int64_t expert_rows = static_cast<int64_t>(F::kMode == kUp ? 2 : 1) * a.outputs;
            const int64_t base = (is_own ? 0 : tile.expert * expert_rows) + tile.row_tile * F::kTileChannels;
            const uint8_t* from = is_own ? a.own_scales : a.scales;
            scales.low = from + (base + lane.low) * (a.width / kGroup);
            scales.high = from + (base + lane.high) * (a.width / kGroup);
            // without rows, see `run`, there are none
            scales.words = tile.row_tile * F::kTileChannels < a.outputs ? a.width / 128 : 0;
        }
        if constexpr (F::kMode == kDown) {
            // of the tile before, the table has been read
            named_barrier(1 + group, kWarpgroup);
            for (int token = in_group; token < tile.count; token += kWarpgroup) {
                const int row = is_own ? tile.first + token : a.pairs[tile.first + token];
                shared.rows[group][token] = row;
                shared.weights[group][token] = is_own ? 1.0f : a.pair_weights[row] * a.factor;
            }
        }
        if constexpr (F::kMost <= 64) {
            if (tile.count <= 16) run<F, 16>(a, tile, lane, scales, shared, ring);
            else if (F::kMost == 32 || tile.count <= 32) run<F, 32>(a, tile, lane, scales, shared, ring);
            else run<F, F::kMost>(a, tile, lane, scales, shared, ring);
        } else {
            // about as many as the compiler finds registers for
            if (tile.count <= 64) run<F, 64>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 128) run<F, 128>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 192) run<F, 192>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 256) run<F, 256>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 272) run<F, 272>(a, tile, lane, scales, shared, ring);
            else run<F, 288>(a, tile, lane, scales, shared, ring);
        }
    }
}

// nobody writes to a block that has left
template <typename F>
__device__ __forceinline__ void leave() {
    if constexpr (F::kCluster > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

template <typename F>
__global__ void __launch_bounds__(kRingThreads, F::kBlocks) ring_kernel(const __grid_constant__ RingLaunch launch) {
    extern __shared__ __align__(128) uint8_t raw[];
    RingShared<F>& shared = aligned_shared<RingShared<F>>(raw);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < F::kStages; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], F::kCluster * kConsumers * kWarpgroup / 32);
        }
        for (int turn = 0; turn < kTurns; ++turn) {
            barrier_init(&shared.told[turn], 1);
            barrier_init(&shared.heard[turn], 1 + kConsumers * kWarpgroup / 32);
        }
        barrier_init_fence();
    }
    int rank = 0;
    if constexpr (F::kCluster > 1) {
        // nobody writes to a block whose barriers are not there yet
        cluster_arrive();
        cluster_wait();
        rank = rank_in_cluster();
    }
    __syncthreads();
    if constexpr (F::kMode == kUp) let_next_kernel_start();
    const Walk<F> walk(launch.a);
    const int first = blockIdx.x / F::kCluster, step = gridDim.x / F::kCluster;
    if (threadIdx.x < kWarpgroup) {
        give_registers<F::kBlocks == 2 ? 24 : 40>();
        if (threadIdx.x == 0) produce<F>(launch, shared, walk, first, step, rank);
        if (F::kTakesTurns && threadIdx.x == 32) tell<F>(launch.a, shared, walk, first, step);
        __syncwarp();
        leave<F>();
    } else {
        take_registers<F::kBlocks == 2 ? 104 : 232>();
        consume<F>(launch.a, shared, walk, first, step, rank);
        leave<F>();
    }
}

template <typename F>
cudaError_t launch_form(const RingLaunch& with, int processors, cudaStream_t stream) {
    constexpr int kSharedBytes = sizeof(RingShared<F>) + 1024;
    const void* kernel = reinterpret_cast<const void*>(&ring_kernel<F>);
    static const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
    RingLaunch copy = with;
    void* arguments[] = {&copy};
    return launch_ring(kernel, F::kBlocks * processors / F::kCluster * F::kCluster, kSharedBytes, F::kCluster, F::kMode == kDown,
                       arguments, stream);
}

}  // namespace m3
