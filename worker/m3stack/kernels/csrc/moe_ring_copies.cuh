// What fills the ring: a lane that copies weights and tokens for all tiles of its block.
#pragma once
#include "moe_ring_tiles.cuh"

namespace m3 {

// What is copied for the stages of a tile.
template <typename F>
struct Copies {
    const CUtensorMap *weights, *tokens;
    int first_rows, second_rows;  // coordinates of a weight's groups of rows
    int first_token, boxes, box_tokens;

    __device__ __forceinline__ Copies(const RingLaunch& launch, const Tile& tile, int rank) {
        const bool is_own = tile.expert < 0;
        weights = is_own ? &launch.own_weights : &launch.weights;
        tokens = is_own ? &launch.own_tokens : &launch.tokens;
        const int expert = is_own ? 0 : tile.expert, outputs = launch.a.outputs;
        if constexpr (F::kCoded) {
            const int rows = outputs * (F::kMode == kUp ? 2 : 1);
            first_rows = (expert * rows + tile.row_tile * F::kTileChannels) / 8;
            second_rows = first_rows + (F::kMode == kUp ? outputs / 8 : 8);
        } else {
            first_rows = tile.row_tile * 8;
            second_rows = expert;
        }
        first_token = tile.first_token;
        // each block of a cluster copies one at least: what it waits for then holds back the others too,
        // whose warps would else come a second time before its own have come once
        box_tokens = launch.a.box_tokens;
        boxes = max((tile.count + box_tokens - 1) / box_tokens, F::kCluster);
    }

    __device__ __forceinline__ void copy_weights(RingShared<F>& shared, int stage, int column) const {
        uint64_t* full = &shared.full[stage];
        barrier_arrive_expect(full, F::kWeightBytes + boxes * box_tokens * F::kColumns * 2);
        uint8_t* to = shared.stages[stage];
        if constexpr (F::kIsWide) {
            copy_rows(to, weights, full, column, 0, first_rows);
            copy_rows(to + F::kWeightBytes / 2, weights, full, column, 0, second_rows);
        } else if constexpr (F::kCoded) {
            copy_rows(to, weights, full, column, first_rows, 0);
            copy_rows(to + F::kWeightBytes / 2, weights, full, column, second_rows, 0);
        } else {
            copy_rows(to, weights, full, column, first_rows, second_rows);
        }
    }

    // of a cluster, each block copies every other box for both
    __device__ __forceinline__ void copy_tokens(RingShared<F>& shared, int stage, int column, int rank) const {
        uint8_t* to = shared.stages[stage] + F::kWeightBytes;
        uint64_t* full = &shared.full[stage];
#pragma unroll 1
        for (int box = rank; box < boxes; box += F::kCluster) {
            const int token = box * box_tokens;
            uint8_t* at = to + token * kChunk * 2;
            if constexpr (F::kIsWide) {
                copy_tile(at + F::kTokenBytes, tokens, full, column + kChunk, first_token + token);
            }
            if constexpr (F::kCluster == 1) copy_tile(at, tokens, full, column, first_token + token);
            else copy_tile_to_both(at, tokens, full, column, first_token + token);
        }
    }
};

// Copies what all tiles of the block need.
template <typename F>
__device__ __forceinline__ void produce(const RingLaunch& launch, RingShared<F>& shared, const Walk<F>& walk, int first,
                                        int step, int rank) {
    const int width = launch.a.width;
    Ring<F::kStages> ring;
    Tile tile;
    bool is_first = true;
    const auto hears = [] { return true; };
    for (Turns<F> turns(first, step); walk.find(launch.a, turns.number, rank, tile); turns.advance(shared, hears)) {
        if (tile.count == 0) continue;
        const Copies<F> copies(launch, tile, rank);
        int ahead = 0;
        if (is_first) {
            // weights do not depend on the kernel before this one
            ahead = min(width, F::kStages * F::kColumns);
#pragma unroll 1
            for (int column = 0; column < ahead; column += F::kColumns) {
                copies.copy_weights(shared, column / F::kColumns, column);
            }
            wait_for_previous_kernel();
            is_first = false;
        }
#pragma unroll 1
        for (int column = 0; column < width; column += F::kColumns) {
            if (column >= ahead) {
                barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
                copies.copy_weights(shared, ring.stage, column);
            }
            copies.copy_tokens(shared, ring.stage, column, rank);
            ring.advance();
        }
    }
    if constexpr (F::kCluster > 1) {
        // the other block's releases must find this one
        for (int i = 0; i < F::kStages; ++i) {
            barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            ring.advance();
        }
    }
}

}  // namespace m3
