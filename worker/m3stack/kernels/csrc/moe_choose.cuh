// How a warp chooses a token's experts from their logits.
//
// NaN ranks above all numbers, +0 equals -0, and of equal scores the lower expert comes first.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

namespace m3 {

__device__ __forceinline__ int32_t ordered(float value) {
    if (value != value) return 0x7fffffff;
    const int32_t bits = __float_as_int(value == 0.0f ? 0.0f : value);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// Writes the best experts, best first, and their shares. Of expert `i * 32 + lane` a lane has logit i;
// at most 32 are chosen.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float (&logits)[kEach], const float* bias, int num_experts,
                                               int top_k, int32_t* ids, float* weights) {
    const int lane = threadIdx.x % 32;
    float score[kEach];
    int32_t order[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int expert = i * 32 + lane;
        score[i] = 1.0f / (1.0f + expf(-logits[i]));
        order[i] = expert < num_experts ? ordered(score[i] + bias[expert]) : INT32_MIN;
    }
    float total = 0.0f, mine = 0.0f;
    int32_t my_expert = 0;
    for (int rank = 0; rank < top_k; ++rank) {
        int32_t best = INT32_MIN;
        int place = 32 * kEach;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (order[i] > best) best = order[i], place = i * 32 + lane, value = score[i];
        }
#pragma unroll
        for (int hop = 16; hop > 0; hop /= 2) {
            const int32_t other = __shfl_xor_sync(~0u, best, hop);
            const int other_place = __shfl_xor_sync(~0u, place, hop);
            const float other_value = __shfl_xor_sync(~0u, value, hop);
            if (other > best || (other == best && other_place < place)) {
                best = other, place = other_place, value = other_value;
            }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (i * 32 + lane == place) order[i] = INT32_MIN;
        }
        total += value;
        if (lane == rank) mine = value, my_expert = place;
    }
    if (lane < top_k) {
        ids[lane] = my_expert;
        weights[lane] = mine / total;
    }
}

}  // namespace m3
