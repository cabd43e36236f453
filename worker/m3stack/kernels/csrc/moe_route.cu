// Routing of few tokens: a block for each expert's scores, and the block that ends last chooses.
//
// Sums are fp32 in an order of their own, the same on every run. NaN ranks above all numbers, +0 equals
// -0, and of equal scores the lower expert comes first.
#include "async_copy.cuh"
#include "moe_choose.cuh"

namespace m3 {

constexpr int kRouteThreads = 384, kRouteWarps = kRouteThreads / 32;
constexpr int kMostExperts = 256;

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

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) value += __shfl_xor_sync(~0u, value, hop);
    return value;
}

// one warp: the best experts of a token
__device__ __forceinline__ void choose(const RouteArgs& a, int token) {
    float logits[kMostExperts / 32];
#pragma unroll
    for (int i = 0; i < kMostExperts / 32; ++i) {
        const int expert = i * 32 + threadIdx.x % 32;
        // past L1, which other blocks' writes do not reach
        logits[i] = expert < a.num_experts ? __ldcg(a.scores + token * a.num_experts + expert) : 0.0f;
    }
    choose_experts(logits, a.bias, a.num_experts, a.top_k, a.ids + token * a.top_k, a.weights + token * a.top_k);
}

template <int TOKENS>
__global__ void __launch_bounds__(kRouteThreads) route_kernel(const __grid_constant__ RouteArgs a) {
    __shared__ float parts[kRouteWarps][TOKENS];
    const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto* gates = reinterpret_cast<const float4*>(a.router + static_cast<int64_t>(expert) * a.width);
    const auto* x = static_cast<const __nv_bfloat16*>(a.x);
    float sums[TOKENS] = {};
#pragma unroll 4
    for (int column = threadIdx.x; column < a.width / 4; column += kRouteThreads) {
        const float4 gate = __ldg(gates + column);
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
            const uint2 four = __ldg(reinterpret_cast<const uint2*>(x + token * a.x_row) + column);
            // a bf16 is the upper half of an fp32
            sums[token] = fmaf(__uint_as_float(four.x << 16), gate.x, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.x & 0xffff0000u), gate.y, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.y << 16), gate.z, sums[token]);
            sums[token] = fmaf(__uint_as_float(four.y & 0xffff0000u), gate.w, sums[token]);
        }
    }
    // what is left waits for itself more than for memory: experts may ask for the weights that they know
    let_next_kernel_start();
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) {
        const float sum = warp_sum(sums[token]);
        if (lane == 0) parts[warp][token] = sum;
    }
    __syncthreads();
    if (threadIdx.x < TOKENS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kRouteWarps; ++i) sum += parts[i][threadIdx.x];
        a.scores[threadIdx.x * a.num_experts + expert] = sum;
        __threadfence();
    }
    if (warp != 0) return;
    // one warp from here on; of it, lane 0 tells
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(a.arrived, 1);
    if (__shfl_sync(~0u, before, 0) != static_cast<int>(gridDim.x) - 1) return;
    __threadfence();
#pragma unroll
    for (int token = 0; token < TOKENS; ++token) choose(a, token);
    if (lane == 0) *a.arrived = 0;
}

template <int TOKENS>
cudaError_t launch_route(const RouteArgs& a, cudaStream_t stream) {
    route_kernel<TOKENS><<<a.num_experts, kRouteThreads, 0, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace m3

// one or two tokens, at most 256 experts and 32 of them a token; width a multiple of 4
extern "C" int m3_route(const m3::RouteArgs* a, cudaStream_t stream) {
    using namespace m3;
    if (a->num_experts > kMostExperts || a->top_k > 32) return cudaErrorInvalidValue;
    if (a->num_tokens == 1) return launch_route<1>(*a, stream);
    if (a->num_tokens == 2) return launch_route<2>(*a, stream);
    return cudaErrorInvalidValue;
}
