// What the forms of decode attention share: arguments, query fragments, products with keys, weights of parts.
#pragma once
#include "async_copy.cuh"

namespace m3 {

struct PageStrides {  // in elements
    int64_t page, group, token;
};

struct AttendArgs {
    const __nv_bfloat16* q;  // [T,H,D]
    const void* k;           // bf16 or e4m3
    const void* v;
    const float* k_scale;    // e4m3 only: [P,G], or null where all are 1
    const float* v_scale;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* page_table;
    const int32_t* blocks;   // [G,T,K]
    __nv_bfloat16* out;      // [T,H,D]
    float* partials;         // [lines, splits, heads, D], then most and sum [lines, splits, heads] (memory merge)
    int32_t* arrived;        // [lines], zero between launches (memory merge)
    PageStrides k_strides, v_strides;
    int64_t table_stride;
    float scale_log2;        // softmax scale times log2(e)
    int32_t num_seqs;
    int32_t num_rows;
    int32_t groups;
    int32_t heads_per_group;  // at most 16
    int32_t num_chosen;       // at most 32
    int32_t splits;
};

constexpr int kGroupHeads = 16;
constexpr int kMaxSplits = 16;

// lane i holds the largest score and the sum of part i: its share of the whole, already divided by the total
__device__ __forceinline__ float share_of_warp(float most, float sum) {
    float top = most;
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, hop));
    const float weight = exp2f(most - (top == -INFINITY ? 0.f : top));
    float total = weight * sum;
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) total += __shfl_xor_sync(~0u, total, hop);
    return total == 0.f ? 0.f : weight / total;
}

// the three low bits of a key row, reversed: neighbours land in opposite halves of the banks
__device__ __forceinline__ int swizzle(int row) { return ((row & 1) << 2) | (row & 2) | ((row >> 2) & 1); }

__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two_bytes) {
    uint32_t halves;
    asm("{.reg .b16 pair; cvt.u16.u32 pair, %1; cvt.rn.f16x2.e4m3x2 %0, pair;}" : "=r"(halves) : "r"(two_bytes));
    return halves;
}

template <bool kFp8>
__device__ __forceinline__ uint32_t pack_pair(float x, float y) {
    if constexpr (kFp8) {
        const __half2 pair = __floats2half2_rn(x, y);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

// query fragments for the products with K: dimension order follows each thread's 16-byte chunks of a key row
template <bool kFp8>
struct Query {
    uint32_t fragment[8][4];
    float scale[2];  // power of two taken out of head g and head g + 8 (e4m3 only)
};

template <bool kFp8>
__device__ __forceinline__ Query<kFp8> load_query(const __nv_bfloat16* q, int heads, int g, int t) {
    Query<kFp8> query;
    const int head[2] = {g, g + 8};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        uint4 raw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // bf16 rows have 16 chunks of 8 elements, e4m3 rows 8 chunks of 16
            const int element = kFp8 ? (t + 4 * (i / 2)) * 16 + (i % 2) * 8 : (t + 4 * i) * 8;
            raw[i] = make_uint4(0, 0, 0, 0);
            if (head[side] < heads) raw[i] = *reinterpret_cast<const uint4*>(q + head[side] * kHeadDim + element);
        }
        float shrink = 1.f;
        query.scale[side] = 1.f;
        if constexpr (kFp8) {
            float most = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    most = fmaxf(most, fabsf(__uint_as_float(words[w] << 16)));
                    most = fmaxf(most, fabsf(__uint_as_float(words[w] & 0xFFFF0000u)));
                }
            }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // exponents of 2^-100 and less are noise; both factors stay normal numbers
            const int exponent = min(max(int(__float_as_uint(most) >> 23) - 127, -100), 120);
            shrink = __uint_as_float(uint32_t(127 - exponent) << 23);
            query.scale[side] = __uint_as_float(uint32_t(127 + exponent) << 23);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t pair = words[w];
                if constexpr (kFp8)
                    pair = pack_pair<true>(__uint_as_float(pair << 16) * shrink,
                                           __uint_as_float(pair & 0xFFFF0000u) * shrink);
                query.fragment[2 * i + w / 2][side + 2 * (w % 2)] = pair;
            }
        }
    }
    return query;
}

// scores of 16 heads with 16 keys of this warp, two tiles of 8; four independent sums keep the units busy
template <bool kFp8>
__device__ __forceinline__ void key_products(float (&c)[2][4], const Query<kFp8>& query, uint32_t keys, int row, int t) {
    constexpr int kRowBytes = kFp8 ? 128 : 256;
    constexpr int kVectors = kFp8 ? 2 : 4;
    const int flip = swizzle(row);
    uint4 b[2][kVectors];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            b[tile][i] = load_shared(keys + (row + 8 * tile) * kRowBytes + (((t + 4 * i) ^ flip) << 4));
    float odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const uint4 k = b[tile][i];
            if constexpr (kFp8) {
                mma_f16(c[tile], query.fragment[4 * i], widen_e4m3(k.x & 0xFFFF), widen_e4m3(k.x >> 16));
                mma_f16(odd[tile], query.fragment[4 * i + 1], widen_e4m3(k.y & 0xFFFF), widen_e4m3(k.y >> 16));
                mma_f16(c[tile], query.fragment[4 * i + 2], widen_e4m3(k.z & 0xFFFF), widen_e4m3(k.z >> 16));
                mma_f16(odd[tile], query.fragment[4 * i + 3], widen_e4m3(k.w & 0xFFFF), widen_e4m3(k.w >> 16));
            } else {
                mma_bf16(c[tile], query.fragment[2 * i], k.x, k.y);
                mma_bf16(odd[tile], query.fragment[2 * i + 1], k.z, k.w);
            }
        }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[tile][e] += odd[tile][e];
}

}  // namespace m3
