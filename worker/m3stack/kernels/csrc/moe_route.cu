// Routing of few tokens: a block for each expert's scores, and the block that ends last chooses.
//
// Sums are fp32 in an order of their own, the same on every run. NaN ranks above all numbers, +0 equals
// -0, and of equal scores the lower expert comes first.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace m3 {

constexpr int kRouteThreads = 128, kRouteWarps = kRouteThreads / 32;
constexpr int kMostTokens = 8, kMostExperts = 256;

struct RouteArgs {
    const void* x;        // bf16 [tokens, width]
    const float* router;  // [experts, width]
    const float* bias;    // [experts]
    float* scores;        // [tokens, experts] of logits
    int32_t* arrived;     // one counter, zero between launches
    int32_t* ids;         // [tokens, top_k]
    float* weights;       // [tokens, top_k]
    int64_t x_row;
    int32_t num_tokens;
    int32_t num_experts;
    int32_t top_k;
    int32_t width;
};

__device__ __forceinline__ int32_t ordered(float value) {
    if (value != value) return 0x7fffffff;
    const int32_t bits = __float_as_int(value == 0.0f ? 0.0f : value);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) value += __shfl_xor_sync(~0u, value, hop);
    return value;
}

// one warp: the best experts of a token, best first, and their shares
__device__ __forceinline__ void choose(const RouteArgs& a, int token) {
    constexpr int kEach = kMostExperts / 32;
    const int lane = threadIdx.x % 32;
    float score[kEach];
    int32_t order[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int expert = i * 32 + lane;
        const bool exists = expert < a.num_experts;
        // past L1, which other blocks' writes do not reach
        const float logit = exists ? __ldcg(a.scores + token * a.num_experts + expert) : 0.0f;
        score[i] = 1.0f / (1.0f + expf(-logit));
        order[i] = exists ? ordered(score[i] + a.bias[expert]) : INT32_MIN;
    }
    float total = 0.0f, mine = 0.0f;
    int32_t my_expert = 0;
    for (int rank = 0; rank < a.top_k; ++rank) {
        int32_t best = INT32_MIN;
        int place = kMostExperts;
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
    if (lane < a.top_k) {
        a.ids[token * a.top_k + lane] = my_expert;
        a.weights[token * a.top_k + lane] = mine / total;
    }
}

__global__ void __launch_bounds__(kRouteThreads) route_kernel(const __grid_constant__ RouteArgs a) {
    __shared__ float parts[kRouteWarps][kMostTokens];
    __shared__ bool is_last;
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto* gates = reinterpret_cast<const float4*>(a.router + static_cast<int64_t>(expert) * a.width);
    const auto* x = static_cast<const __nv_bfloat16*>(a.x);
    float sums[kMostTokens] = {};
#pragma unroll 4
    for (int column = threadIdx.x; column < a.width / 4; column += kRouteThreads) {
        const float4 gate = __ldg(gates + column);
#pragma unroll
        for (int token = 0; token < kMostTokens; ++token) {
            if (token >= a.num_tokens) break;
            const uint2 four = __ldg(reinterpret_cast<const uint2*>(x + token * a.x_row) + column);
            // a bf16 is the upper half of an fp32
            sums[token] = fmaf(__uint_as_float(four.x << 16), gate.x, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.x & 0xffff0000u), gate.y, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.y << 16), gate.z, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.y & 0xffff0000u), gate.w, sums[token]);
        }
    }
#pragma unroll
    for (int token = 0; token < kMostTokens; ++token) {
        const float sum = warp_sum(sums[token]);
        if (lane == 0) parts[warp][token] = sum;
    }
    __syncthreads();
    if (threadIdx.x < a.num_tokens) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kRouteWarps; ++i) sum += parts[i][threadIdx.x];
        a.scores[threadIdx.x * a.num_experts + expert] = sum;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(a.arrived, 1) == static_cast<int>(gridDim.x) - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int token = warp; token < a.num_tokens; token += kRouteWarps) choose(a, token);
    if (threadIdx.x == 0) *a.arrived = 0;
}

}  // namespace m3

// at most 8 tokens, 256 experts and 32 of them a token; width a multiple of 4
extern "C" int m3_route(const m3::RouteArgs* a, cudaStream_t stream) {
    using namespace m3;
    if (a->num_tokens > kMostTokens || a->num_experts > kMostExperts || a->top_k > 32) return cudaErrorInvalidValue;
    route_kernel<<<a->num_experts, kRouteThreads, 0, stream>>>(*a);
    return cudaGetLastError();
}
