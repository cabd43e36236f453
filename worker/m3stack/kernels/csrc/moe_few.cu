// Expert and linear products of few tokens: weights stream from memory into the matrix units' registers.
//
// A warp owns 16 rows of a weight and multiplies them with NT * 8 tokens. A lane loads 16 bytes that
// stand side by side in a row; which of the product's columns they are does not matter as long as
// weights and tokens agree, so no weight is moved. Rows of MXFP8 are decoded where they are loaded.
// Of the up product, 8 rows are gates and 8 the ups of the same channels: the activation is local.
#include "async_copy.cuh"
#include "moe_weights.cuh"

namespace m3 {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBuffers = 3;  // slices of the tokens in shared memory

enum Mode { kUp = 0, kDown = 1, kLinear = 2 };

struct FewArgs {
    const void* x;                   // bf16 [rows, width]: tokens, hidden rows, or tokens of a linear
    const void* elements;            // [E, rows, width] bf16, or e4m3 without NaN codes
    const uint8_t* scales;           // [E, rows, width / 32], or null for bf16; 0 to 134
    const void* shared_elements;     // the shared expert's, or null
    const uint8_t* shared_scales;
    const int32_t* pairs;            // [blocks, tokens of a block], or null: block b is pair b
    const int32_t* experts;          // [blocks], negative where a block is not used
    const float* weights;            // [pairs], of the down product
    void* out;                       // hidden bf16, results fp32, or linear bf16: [rows, outputs]
    int64_t x_row;                   // elements between rows of x
    float alpha;
    float limit;
    float factor;                    // of the routed experts
    int32_t num_pairs;               // of routed experts; pair num_pairs + t is token t's shared one
    int32_t num_tokens;
    int32_t top_k;
    int32_t width;                   // of a weight row
    int32_t outputs;                 // channels: half the rows of an up product
    int32_t shared_blocks;           // blocks of the shared expert, which come first
    int32_t num_blocks;              // with them
    int32_t is_early;                // an up product may start while the kernel before it ends
};

__device__ __forceinline__ void product(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                        uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <bool MXFP8, int NT>
struct Few {
    static constexpr int kTokens = 8 * NT;
    static constexpr int kPiece = MXFP8 ? 64 : 32;  // columns in 64 bytes of a row
    static constexpr int kSlice = NT == 8 ? 256 : 512;  // columns of tokens in a buffer
    static constexpr int kLoads = NT == 8 && MXFP8 ? 2 : 4;  // pieces of a row on the way at a time
    static constexpr int kTurns = kSlice / kPiece / kLoads;
    static_assert(kTurns % 2 == 0, "loads alternate between two sets of registers");
    // rows 64 or 16 bytes off a multiple of 128: 8 lanes read 8 different groups of banks
    static constexpr int kRowBytes = 2 * kSlice + (MXFP8 ? 16 : 64);
    static constexpr int kBufferBytes = kTokens * kRowBytes;
    static constexpr int kSharedBytes = kBuffers * kBufferBytes;

    struct Loads {
        uint4 low[kLoads], high[kLoads];
        uint32_t low_scales[kLoads / 2], high_scales[kLoads / 2];
    };

    // a lane's bytes of its two rows
    struct Rows {
        const uint8_t *low, *high, *low_scales, *high_scales;
        int pieces;

        __device__ __forceinline__ void load(Loads& to, int first) const {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if (first + i >= pieces) continue;
                to.low[i] = load_weights(low + static_cast<int64_t>(first + i) * 64);
                to.high[i] = load_weights(high + static_cast<int64_t>(first + i) * 64);
                // four bytes are the scales of two pieces
                if (MXFP8 && i % 2 == 0) {
                    to.low_scales[i / 2] = __ldg(reinterpret_cast<const uint32_t*>(low_scales + 2 * (first + i)));
                    to.high_scales[i / 2] = __ldg(reinterpret_cast<const uint32_t*>(high_scales + 2 * (first + i)));
                }
            }
        }
    };

    // adds the products of one piece; `tokens` is where the lane's part of the piece stands
    static __device__ __forceinline__ void multiply(float (&sums)[NT][4], const Loads& of, int i, uint32_t tokens) {
        const uint32_t low[4] = {of.low[i].x, of.low[i].y, of.low[i].z, of.low[i].w};
        const uint32_t high[4] = {of.high[i].x, of.high[i].y, of.high[i].z, of.high[i].w};
        if constexpr (MXFP8) {
            const uint32_t selector = byte_selector(threadIdx.x % 4 / 2 + i % 2 * 2);
            const uint32_t low_factor = factor_of(__byte_perm(of.low_scales[i / 2], 0, selector));
            const uint32_t high_factor = factor_of(__byte_perm(of.high_scales[i / 2], 0, selector));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t a[2][4];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int at = 2 * half + j;
                    a[j][0] = times(widened_even(low[at]), low_factor);
                    a[j][1] = times(widened_even(high[at]), high_factor);
                    a[j][2] = times(widened_odd(low[at]), low_factor);
                    a[j][3] = times(widened_odd(high[at]), high_factor);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 b = shared_load(tokens + n * 8 * kRowBytes + half * 16);
                    product(sums[n], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
                    product(sums[n], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint4 b = shared_load(tokens + n * 8 * kRowBytes);
                product(sums[n], low[0], high[0], low[1], high[1], b.x, b.y);
                product(sums[n], low[2], high[2], low[3], high[3], b.z, b.w);
            }
        }
    }

    static __device__ __forceinline__ uint4 shared_load(uint32_t address) {
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(address));
        return value;
    }
};

// the row of x that a pair reads; pairs past the routed ones are the shared expert's, one a token
template <Mode MODE>
__device__ __forceinline__ int64_t row_of(const FewArgs& a, int pair) {
    if (MODE == kDown) return pair;
    return pair < a.num_pairs ? pair / a.top_k : pair - a.num_pairs;
}

template <bool MXFP8, int NT, Mode MODE>
__global__ void __launch_bounds__(kThreads, NT == 8 || (NT == 4 && MXFP8) ? 1 : 2) few_kernel(const __grid_constant__ FewArgs a) {
    using F = Few<MXFP8, NT>;
    extern __shared__ __align__(128) uint8_t buffers[];
    __shared__ int pair_of[F::kTokens];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block = blockIdx.y - a.shared_blocks;  // below 0: of the shared expert
    // the up product may start while tokens are routed: which experts, it cannot know before
    if (MODE == kUp && block >= 0) wait_for_previous_kernel();
    const int expert = block < 0 ? 0 : a.experts[block];
    if (expert < 0) return;

    // rows past the end repeat the last one, and are not stored
    const int low_channel = (blockIdx.x * kWarps + warp) * (MODE == kUp ? 8 : 16) + lane / 4;
    const int high_channel = low_channel + 8;
    const int last = a.outputs - 1;
    const int64_t first_row = static_cast<int64_t>(expert) * (MODE == kUp ? 2 : 1) * a.outputs;
    const int64_t low_row = first_row + min(low_channel, last);
    const int64_t high_row = MODE == kUp ? low_row + a.outputs : first_row + min(high_channel, last);
    const auto* elements = static_cast<const uint8_t*>(block < 0 ? a.shared_elements : a.elements);
    const uint8_t* scales = block < 0 ? a.shared_scales : a.scales;
    const int64_t row_bytes = static_cast<int64_t>(a.width) * (MXFP8 ? 1 : 2);
    typename F::Rows rows;
    rows.low = elements + low_row * row_bytes + lane % 4 * 16;
    rows.high = elements + high_row * row_bytes + lane % 4 * 16;
    rows.low_scales = scales + low_row * (a.width / kGroup);
    rows.high_scales = scales + high_row * (a.width / kGroup);
    rows.pieces = a.width / F::kPiece;
    typename F::Loads held[2] = {};
    rows.load(held[0], 0);
    if constexpr (MODE == kUp) {
        if (block < 0) wait_for_previous_kernel();
        // the down product may take the places that become free, and wait there with its weights loaded
        let_next_kernel_start();
    }

    const int none = a.num_pairs + a.num_tokens;
    if (threadIdx.x < F::kTokens) {
        int pair = none;
        if (block < 0) {
            pair = min(a.num_pairs + static_cast<int>(blockIdx.y) * F::kTokens + static_cast<int>(threadIdx.x), none);
        } else if (a.pairs == nullptr) {
            if (threadIdx.x == 0) pair = block;
        } else {
            const int routed = a.pairs[block * F::kTokens + threadIdx.x];
            if (routed < a.num_pairs) pair = routed;
        }
        pair_of[threadIdx.x] = pair;
    }
    __syncthreads();

    const auto* x = static_cast<const __nv_bfloat16*>(a.x);
    const uint32_t shared = shared_address(buffers);
    const int slices = (a.width + F::kSlice - 1) / F::kSlice;
    // tokens of bf16 weights go to shared memory by themselves; the others by way of registers, half a
    // slice at a time
    constexpr int kCopies = F::kSlice / 8;  // of a token's row
    constexpr int kShare = F::kTokens * kCopies / kThreads / 2, kHalf = F::kTurns / 2;
    static_assert(2 * kShare * kThreads == F::kTokens * kCopies, "every thread copies as much");
    auto fetch = [&](int slice, int half, uint4 (&moved)[kShare]) {
        if (slice >= slices) return;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int place = threadIdx.x + (half * kShare + i) * kThreads, token = place / kCopies;
            const int column = slice * F::kSlice + place % kCopies * 8, pair = pair_of[token];
            const bool keep = pair != none && column < a.width;
            const auto* from = keep ? x + row_of<MODE>(a, pair) * a.x_row + column : x;
            if constexpr (MXFP8) {
                moved[i] = keep ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
            } else {
                const uint32_t to = shared + slice % kBuffers * F::kBufferBytes + token * F::kRowBytes;
                copy16_or_zero(to + place % kCopies * 16, from, keep);
            }
        }
    };
    auto settle = [&](int slice, int half, const uint4 (&moved)[kShare]) {
        if constexpr (MXFP8) {
            if (slice >= slices) return;
#pragma unroll
            for (int i = 0; i < kShare; ++i) {
                const int place = threadIdx.x + (half * kShare + i) * kThreads;
                uint8_t* to = buffers + slice % kBuffers * F::kBufferBytes + place / kCopies * F::kRowBytes;
                *reinterpret_cast<uint4*>(to + place % kCopies * 16) = in_order(moved[i]);
            }
        }
    };
    auto finish = [] { if constexpr (!MXFP8) asm volatile("cp.async.commit_group;" ::: "memory"); };
    // what the kernel before this one wrote
    if constexpr (MODE == kDown) wait_for_previous_kernel();
    // the first two slices whole, all of them on the way at once
    uint4 first[4][kShare];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        fetch(i / 2, i % 2, first[i]);
        if (i % 2 == 1) finish();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) settle(i / 2, i % 2, first[i]);
    uint4 moved[kShare];
    float sums[NT][4] = {};
    for (int slice = 0; slice < slices; ++slice) {
        if constexpr (!MXFP8) asm volatile("cp.async.wait_group 1;" ::: "memory");
        // the slice has come, and nobody reads the buffer that is filled next
        __syncthreads();
        const uint32_t tokens = shared + slice % kBuffers * F::kBufferBytes + lane / 4 * F::kRowBytes +
                                lane % 4 * (MXFP8 ? 32 : 16);
#pragma unroll
        for (int turn = 0; turn < F::kTurns; ++turn) {
            const int first = (slice * F::kTurns + turn) * F::kLoads;
            rows.load(held[(turn + 1) % 2], first + F::kLoads);
            if (turn % kHalf == 0) fetch(slice + 2, turn / kHalf, moved);
#pragma unroll
            for (int i = 0; i < F::kLoads; ++i) {
                // registers of pieces past the end hold older ones
                if (first + i < rows.pieces) {
                    F::multiply(sums, held[turn % 2], i, tokens + (turn * F::kLoads + i) * F::kPiece * 2);
                }
            }
            if (turn % kHalf == kHalf - 1) settle(slice + 2, turn / kHalf, moved);
        }
        finish();
    }

#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int pair = pair_of[n * 8 + lane % 4 * 2 + side];
            if (pair == none) continue;
            const float low = sums[n][side], high = sums[n][2 + side];
            const int64_t row = static_cast<int64_t>(MODE == kLinear ? pair - a.num_pairs : pair) * a.outputs;
            if constexpr (MODE == kUp) {
                // comparisons that keep NaN, as clamp does
                const float gate = low > a.limit ? a.limit : low;
                const float up = high > a.limit ? a.limit : (high < -a.limit ? -a.limit : high);
                const float acted = (up + 1.0f) * gate / (1.0f + __expf(-a.alpha * gate));
                auto* hidden = static_cast<__nv_bfloat16*>(a.out);
                if (low_channel <= last) hidden[row + low_channel] = __float2bfloat16_rn(acted);
            } else if constexpr (MODE == kDown) {
                const float weight = pair < a.num_pairs ? a.weights[pair] * a.factor : 1.0f;
                auto* results = static_cast<float*>(a.out);
                if (low_channel <= last) results[row + low_channel] = low * weight;
                if (high_channel <= last) results[row + high_channel] = high * weight;
            } else {
                auto* out = static_cast<__nv_bfloat16*>(a.out);
                if (low_channel <= last) out[row + low_channel] = __float2bfloat16_rn(low);
                if (high_channel <= last) out[row + high_channel] = __float2bfloat16_rn(high);
            }
        }
    }
}

template <bool MXFP8, int NT, Mode MODE>
cudaError_t launch(const FewArgs& a, cudaStream_t stream) {
    constexpr int kChannels = kWarps * (MODE == kUp ? 8 : 16);
    constexpr int kSharedBytes = Few<MXFP8, NT>::kSharedBytes;
    static const cudaError_t allowed = cudaFuncSetAttribute(
        few_kernel<MXFP8, NT, MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
    const dim3 grid((a.outputs + kChannels - 1) / kChannels, a.num_blocks);
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = MODE == kDown || (MODE == kUp && a.is_early != 0) ? 1 : 0;
    return cudaLaunchKernelEx(&config, few_kernel<MXFP8, NT, MODE>, a);
}

template <bool MXFP8, Mode MODE>
cudaError_t launch_tokens(const FewArgs& a, int tokens, cudaStream_t stream) {
    switch (tokens) {
        case 8: return launch<MXFP8, 1, MODE>(a, stream);
        case 16: return launch<MXFP8, 2, MODE>(a, stream);
        case 32: return launch<MXFP8, 4, MODE>(a, stream);
        case 64: return launch<MXFP8, 8, MODE>(a, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace m3

// tokens of a block: 8, 16, 32 or 64; mode: 0 up, 1 down, 2 linear
extern "C" int m3_few(const m3::FewArgs* a, int tokens, int mode, cudaStream_t stream) {
    using namespace m3;
    if (a->num_blocks == 0) return cudaSuccess;
    const bool coded = a->scales != nullptr;
    switch (mode) {
        case kUp: return coded ? launch_tokens<true, kUp>(*a, tokens, stream) : launch_tokens<false, kUp>(*a, tokens, stream);
        case kDown:
            return coded ? launch_tokens<true, kDown>(*a, tokens, stream) : launch_tokens<false, kDown>(*a, tokens, stream);
        case kLinear: return coded ? launch_tokens<true, kLinear>(*a, tokens, stream) : cudaErrorInvalidValue;
        default: return cudaErrorInvalidValue;
    }
}
