// Where the sums of a tile go: which rows a lane has, the activation between the products, the store.
#pragma once
#include "moe_ring_tiles.cuh"

namespace m3 {

// The column of a weight that stands at a place of the order in which MXFP8 is decoded.
__device__ __forceinline__ int column_at(int place) {
    const int p = place % kChunk;
    return place - p + p % 8 / 2 * 16 + p / 16 * 4 + p % 2 * 2 + p / 8 % 2;
}

__device__ __forceinline__ float activated(float gate, float up, const RingArgs& a) {
    gate = min_nan(gate, a.limit);
    up = max_nan(min_nan(up, a.limit), -a.limit);
    return (up + 1.0f) * gate * sigmoid_fast(a.alpha * gate);
}

// Stores what a lane has: rows lane / 4 (low) and lane / 4 + 8 (high) of its warp.
template <typename F, int N>
__device__ __forceinline__ void store(const float (&d)[N / 2], const RingArgs& a, const Tile& tile, int channel,
                                      const int* rows, const float* weights) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        if (8 * j >= tile.count) break;
        const int token = 8 * j + lane % 4 * 2;
        if constexpr (F::kMode == kUp) {
            const float even = activated(d[4 * j], d[4 * j + 2], a), odd = activated(d[4 * j + 1], d[4 * j + 3], a);
            // neighbours trade, so that each stores two channels of one token
            const bool is_right = lane & 4;
            const float got = __shfl_xor_sync(~0u, is_right ? even : odd, 4);
            const uint32_t two = is_right ? pack_bf16(got, odd) : pack_bf16(even, got);
            const int mine = token + is_right;
            if (mine < tile.count) {
                __nv_bfloat16* row = a.out + static_cast<int64_t>(tile.first + mine) * a.outputs;
                *reinterpret_cast<uint32_t*>(row + (channel & ~1)) = two;
            }
        } else {
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                if (token + side >= tile.count) continue;
                const float weight = weights[token + side];
                __nv_bfloat16* row = a.out + static_cast<int64_t>(rows[token + side]) * a.outputs;
                *reinterpret_cast<uint32_t*>(row + channel) =
                    pack_bf16(d[4 * j + side] * weight, d[4 * j + 2 + side] * weight);
            }
        }
    }
}

// Where a lane's two rows stand: in a stage, and among the channels of the output.
template <typename F>
struct Lane {
    uint32_t low_at, high_at;  // MXFP8
    int low, high;             // rows of an expert's weight, from the tile's first channel on
    int channel;               // from the tile's first on, in the output's order

    __device__ __forceinline__ explicit Lane(int outputs) {
        const int warp = (threadIdx.x / kWarpgroup - 1) * 4 + threadIdx.x % kWarpgroup / 32;
        const int lane = threadIdx.x % 32, row = lane / 4;
        if constexpr (F::kMode == kUp) {
            channel = warp * 8 + row;
            low = F::kCoded ? column_at(channel) : channel;
            high = low + outputs;
            low_at = place_of(low, lane);
            high_at = low_at + F::kWeightBytes / 2;
        } else {
            channel = low = warp * 16 + row * 2;
            high = low + 1;
            low_at = place_of(low, lane);
            high_at = place_of(high, lane);
        }
    }

    // Where a lane's 16 bytes of an MXFP8 row of the tile stand. Of 8 rows side by side the order is such
    // that lanes side by side read other banks: even ones first, or by bits 1, 2 and 0 of their number.
    static __device__ __forceinline__ uint32_t place_of(int row, int lane) {
        const int half = row / 64 * F::kWeightBytes / 2, group = row % 64 / 8 * 8, r = row % 8;
        if constexpr (F::kIsWide) {
            const int at = r / 2 % 2 * 4 + r / 4 * 2 + r % 2;
            return half + (group + at) * 128 + ((lane % 4 ^ at) & 3) * 16 + at / 4 * 64;
        }
        return half + (group + r % 2 * 4 + r / 2) * 64 + lane % 4 * 16;
    }
};

}  // namespace m3
