// Routing of many tokens by the matrix units, as exact as fp32 sums.
//
// Tokens are bf16. An fp32 weight is the sum of three bf16 parts, to the last bit, and a product of two
// bf16 is exact in fp32. The units cut off what sums lose, so no sum of theirs goes beyond 64 columns:
// those are added up in fp32, rounded, in an order of their own, the same on every run.
// Columns are split over the GPU where tokens alone would not fill it.
#include <cstring>

#include "moe_choose.cuh"
#include "moe_products.cuh"

namespace m3 {

constexpr int kTile = 128;     // tokens of a block, and experts
constexpr int kColumns = 64;   // of a stage
constexpr int kParts = 3;      // of a weight
constexpr int kPartBytes = kTile * kColumns * 2;
constexpr int kStageBytes = (1 + kParts) * kPartBytes;
constexpr int kStages = 3;
constexpr int kConsumers = 2;
constexpr int kScoreThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kChooseThreads = 128, kSplitThreads = 256;

struct RouteManyArgs {
    const float* router;  // [experts, width]
    void* parts;          // bf16 [3, 128, width]
    float* partial;       // [splits, tokens, 128] of logits
    const float* bias;    // [experts]
    int32_t* ids;         // [tokens, top_k]
    float* weights;       // [tokens, top_k]
    int32_t num_tokens;
    int32_t num_experts;
    int32_t top_k;
    int32_t width;
    int32_t splits;
};

struct ScoreLaunch {
    CUtensorMap tokens, router;
    RouteManyArgs a;
};

struct __align__(1024) ScoreShared {
    uint8_t stages[kStages][kStageBytes];
    uint64_t full[kStages], empty[kStages];
};

__device__ __forceinline__ uint32_t upper_half(float value) {
    // what is not finite has no remainder
    return __bfloat16_as_ushort(__float2bfloat16(value));
}

__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ RouteManyArgs a) {
    const int64_t count = static_cast<int64_t>(kTile) * a.width;
    const int64_t place = (static_cast<int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x) * 2;
    if (place >= count) return;
    const bool exists = place / a.width < a.num_experts;
    uint32_t pairs[kParts] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        float rest = exists ? a.router[place + side] : 0.0f;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const uint32_t half = upper_half(rest);
            pairs[part] |= half << 16 * side;
            const bool is_finite = (half & 0x7f80u) != 0x7f80u;
            rest = is_finite ? rest - __uint_as_float(half << 16) : 0.0f;
        }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        static_cast<uint32_t*>(a.parts)[(part * count + place) / 2] = pairs[part];
    }
}

__global__ void __launch_bounds__(kScoreThreads, 1) score_kernel(const __grid_constant__ ScoreLaunch with) {
    extern __shared__ __align__(128) uint8_t raw[];
    ScoreShared& shared = aligned_shared<ScoreShared>(raw);
    const RouteManyArgs& a = with.a;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], kConsumers * kWarpgroup / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int tile = blockIdx.x, split = blockIdx.y;
    const int chunks = a.width / kColumns, share = (chunks + a.splits - 1) / a.splits;
    const int from = min(split * share, chunks), to = min(from + share, chunks);
    Ring<kStages> ring;
    if (threadIdx.x < kWarpgroup) {
        give_registers<40>();
        if (threadIdx.x != 0) return;
        for (int chunk = from; chunk < to; ++chunk) {
            barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            uint64_t* full = &shared.full[ring.stage];
            barrier_arrive_expect(full, kStageBytes);
            uint8_t* at = shared.stages[ring.stage];
            copy_tile(at, &with.tokens, full, chunk * kColumns, tile * kTile);
            for (int part = 0; part < kParts; ++part) {
                copy_tile(at + (1 + part) * kPartBytes, &with.router, full, chunk * kColumns, part * kTile);
            }
            ring.advance();
        }
    } else {
        take_registers<232>();
        const int group = threadIdx.x / kWarpgroup - 1, warp = threadIdx.x % kWarpgroup / 32, lane = threadIdx.x % 32;
        float total[kTile / 2] = {};
        for (int chunk = from; chunk < to; ++chunk) {
            float sums[kTile / 2] = {};
            barrier_wait(&shared.full[ring.stage], ring.parity);
            const uint32_t at = shared_address(shared.stages[ring.stage]);
            const uint64_t x = describe_rows(at + group * 64 * kColumns * 2);
            mma_fence();
            // small parts first
#pragma unroll
            for (int part = kParts; part > 0; --part) {
                const uint64_t router = describe_rows(at + part * kPartBytes);
#pragma unroll
                for (int k = 0; k < 4; ++k) mma_shared<0, kTile>(sums, x + 2 * k, router + 2 * k, 1);
            }
            mma_commit();
            mma_wait<0>();
            mma_settle<kTile / 2>(sums);
            if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
            ring.advance();
#pragma unroll
            for (int i = 0; i < kTile / 2; ++i) total[i] += sums[i];
        }
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int token = tile * kTile + group * 64 + warp * 16 + side * 8 + lane / 4;
            if (token >= a.num_tokens) continue;
            float* row = a.partial + (static_cast<int64_t>(split) * a.num_tokens + token) * kTile + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < kTile / 8; ++j) {
                *reinterpret_cast<float2*>(row + 8 * j) = make_float2(total[4 * j + 2 * side], total[4 * j + 2 * side + 1]);
            }
        }
    }
}

__global__ void __launch_bounds__(kChooseThreads) choose_kernel(const __grid_constant__ RouteManyArgs a) {
    const int token = blockIdx.x * (kChooseThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= a.num_tokens) return;
    float logits[kTile / 32] = {};
    for (int split = 0; split < a.splits; ++split) {
        const float* row = a.partial + (static_cast<int64_t>(split) * a.num_tokens + token) * kTile;
#pragma unroll
        for (int i = 0; i < kTile / 32; ++i) logits[i] += row[i * 32 + lane];
    }
    const int64_t at = static_cast<int64_t>(token) * a.top_k;
    choose_experts(logits, a.bias, a.num_experts, a.top_k, a.ids + at, a.weights + at);
}

}  // namespace m3

// At most 128 experts and 32 of them a token; width a multiple of 64; maps: two tensor maps, of tokens
// in boxes of 128, and of the parts.
extern "C" int m3_route_many(const m3::RouteManyArgs* a, const void* maps, cudaStream_t stream) {
    using namespace m3;
    if (a->num_experts > kTile || a->top_k > 32 || a->width % kColumns != 0) return cudaErrorInvalidValue;
    ScoreLaunch with;
    std::memcpy(&with, maps, 2 * sizeof(CUtensorMap));
    with.a = *a;
    constexpr int kSharedBytes = sizeof(ScoreShared) + 1024;
    const void* scores = reinterpret_cast<const void*>(&score_kernel);
    static const cudaError_t allowed =
        cudaFuncSetAttribute(scores, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
    void* plain[] = {const_cast<RouteManyArgs*>(a)};
    void* mapped[] = {&with};
    const int splitters = (kTile * a->width / 2 + kSplitThreads - 1) / kSplitThreads;
    cudaError_t code = launch_plain(reinterpret_cast<const void*>(&split_kernel), dim3(splitters), kSplitThreads, 0,
                                    plain, stream);
    if (code != cudaSuccess) return code;
    const int tiles = (a->num_tokens + kTile - 1) / kTile;
    code = launch_plain(scores, dim3(tiles, a->splits), kScoreThreads, kSharedBytes, mapped, stream);
    if (code != cudaSuccess) return code;
    constexpr int kEach = kChooseThreads / 32;
    return launch_plain(reinterpret_cast<const void*>(&choose_kernel), dim3((a->num_tokens + kEach - 1) / kEach),
                        kChooseThreads, 0, plain, stream);
}
