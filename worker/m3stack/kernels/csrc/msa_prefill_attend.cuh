// What the prefill attention arms share: arguments, selection counters, softmax and store of a tile.
//
// A warp owns one token: its 16 rows are the 16 query heads of one KV group.
#pragma once

#include "msa_prefill_hopper.cuh"

namespace m3 {

constexpr int kHeads = 16;   // query heads of a KV group, the rows of a warp
constexpr int kChosen = 16;  // most blocks a row may choose
constexpr int kWarpgroupTokens = 4;
// a union entry holds the block below, a bit for each of up to 8 tokens above
constexpr int kMemberShift = 24;
constexpr unsigned kBlockMask = (1u << kMemberShift) - 1;

// Adding to one address from every tile would take longer than building the unions.
constexpr int kCounters = 8;

struct AttendArguments {
  __nv_bfloat16* out;                // [T, H, D]
  const int* blocks;                 // [G, T, K], -1 where none
  const int* query_start;            // [S + 1]
  const int* seq_lens;               // [S]
  const int* page_table;             // [S, J]
  unsigned long long* selections;    // [kCounters, 2]: union sizes, chosen blocks; sums of this run
  unsigned long long* totals;        // [2]: the same, summed over runs
  int4* tiles;                       // [tiles]: first token, tokens, its position, length
  int* union_sizes;                  // [G, tiles]
  int2* unions;                      // [G, tiles, tile tokens * 16]: page, block | tokens << 24
  float scale;
  int num_tokens, num_heads, num_groups, num_sequences, table_pitch;
  int num_tiles, num_blocks;
  int tile_tokens;                   // 4 or 8
  int arm;                           // one of Arm
  int load_limit;                    // 1,024ths, see union_arm_chosen
};

enum Arm { kMeasured = 0, kUnion = 1, kKeyMajor = 2 };

__device__ __forceinline__ unsigned long long selection_sum(const AttendArguments& a, int which) {
  unsigned long long sum = 0;
#pragma unroll
  for (int i = 0; i < kCounters; ++i) sum += a.selections[2 * i + which];
  return sum;
}

// Where the arm is measured, the union arm runs while it loads at most load_limit / 1,024 blocks for
// each block that a row chose. Both arms read the same counters, so exactly one of them runs.
__device__ __forceinline__ bool union_arm_chosen(const AttendArguments& a) {
  if (a.arm != kMeasured) return a.arm == kUnion;
  return selection_sum(a, 0) * 1024 <=
         selection_sum(a, 1) * static_cast<unsigned long long>(a.load_limit);
}

// Rows [first, last) of the step that a sequence owns; sequence num_sequences owns what is left over.
__device__ __forceinline__ int2 sequence_rows(const AttendArguments& a, int sequence) {
  return make_int2(a.query_start[sequence], sequence < a.num_sequences
                                                ? a.query_start[sequence + 1]
                                                : a.num_tokens);
}

// Cuts the rows [first, last) of the step into tiles that never cross sequences and returns the
// sequence and first row of a tile, or -1 past the end. Called by a whole warp.
__device__ __forceinline__ int2 locate_tile(const AttendArguments& a, int tile, int tile_rows,
                                            int first, int last) {
  const int lane = threadIdx.x & 31;
  int before = 0;
  for (int base = 0; base <= a.num_sequences; base += 32) {
    const int sequence = base + lane;
    int tiles = 0, start = 0;
    if (sequence <= a.num_sequences) {
      const int2 rows = sequence_rows(a, sequence);
      start = max(rows.x, first);
      tiles = max(0, min(rows.y, last) - start + tile_rows - 1) / tile_rows;
    }
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const unsigned past = __ballot_sync(~0u, before + sum > tile);
    if (past) {
      const int owner = __ffs(past) - 1;
      const int index = tile - before - __shfl_sync(~0u, sum - tiles, owner);
      return make_int2(base + owner, __shfl_sync(~0u, start, owner) + index * tile_rows);
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return make_int2(-1, 0);
}

// ---- softmax over one block of keys ----

// Running state of the two rows a thread holds: head lane / 4 and that + 8.
struct SoftmaxRows {
  float max_low = -INFINITY, max_high = -INFINITY;
  float sum_low = 0, sum_high = 0;
};

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Hides keys after `visible` keys of the block; what is hidden may be NaN.
__device__ __forceinline__ void hide_keys(float (&scores)[64], int visible) {
  const int left = visible - 2 * int(threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (8 * i >= left) scores[4 * i] = scores[4 * i + 2] = -INFINITY;
    if (8 * i + 1 >= left) scores[4 * i + 1] = scores[4 * i + 3] = -INFINITY;
  }
}

// Turns scores into weights under the new maxima; returns the factors for what came before. A score
// stands for `unit` times itself, maxima for themselves.
__device__ __forceinline__ float2 soften(float (&scores)[64], SoftmaxRows& rows, float scale_log2,
                                         float unit = 1.0f) {
  float low = scores[0], high = scores[2];
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    low = fmaxf(low, fmaxf(scores[i], scores[i + 1]));
    high = fmaxf(high, fmaxf(scores[i + 2], scores[i + 3]));
  }
  low = fmaxf(rows.max_low, quad_max(low) * unit);
  high = fmaxf(rows.max_high, quad_max(high) * unit);
  // a row without a visible key so far keeps weight 0 instead of inf - inf
  const float base_low = low == -INFINITY ? 0 : low * scale_log2;
  const float base_high = high == -INFINITY ? 0 : high * scale_log2;
  const float2 factors = make_float2(exp2_fast(rows.max_low * scale_log2 - base_low),
                                     exp2_fast(rows.max_high * scale_log2 - base_high));
  rows.max_low = low;
  rows.max_high = high;
  const float score_log2 = scale_log2 * unit;
  float sum_low = 0, sum_high = 0;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    scores[i] = exp2_fast(scores[i] * score_log2 - base_low);
    scores[i + 1] = exp2_fast(scores[i + 1] * score_log2 - base_low);
    scores[i + 2] = exp2_fast(scores[i + 2] * score_log2 - base_high);
    scores[i + 3] = exp2_fast(scores[i + 3] * score_log2 - base_high);
    sum_low += scores[i] + scores[i + 1];
    sum_high += scores[i + 2] + scores[i + 3];
  }
  rows.sum_low = rows.sum_low * factors.x + sum_low;
  rows.sum_high = rows.sum_high * factors.y + sum_high;
  return factors;
}

template <Values kValues = Values::kBf16>
__device__ __forceinline__ void pack_weights(const float (&scores)[64], uint32_t (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    weights[i] = kValues == Values::kBf16 ? pack_bf16(scores[2 * i], scores[2 * i + 1])
                                          : pack_f16(scores[2 * i], scores[2 * i + 1]);
  }
}

// Most blocks leave the maxima of a whole warp as they were.
__device__ __forceinline__ void rescale(float (&out)[64], float2 factors) {
  if (!__any_sync(~0u, factors.x != 1 || factors.y != 1)) return;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    out[i] *= factors.x;
    out[i + 1] *= factors.x;
    out[i + 2] *= factors.y;
    out[i + 3] *= factors.y;
  }
}

// ---- matrix products of one warpgroup ----

// scores[64 x 128] = queries[64 rows] * page of keys; query halves lie half_pitch bytes apart.
template <Values kValues = Values::kBf16>
__device__ __forceinline__ void multiply_keys(float (&scores)[64], const uint8_t* queries,
                                              int half_pitch, const uint8_t* keys) {
  const uint64_t q_low = describe_rows(pinned(shared_address(queries)));
  const uint64_t q_high = q_low + (half_pitch >> 4);
  const uint64_t k_low = describe_rows(pinned(shared_address(keys)));
  const uint64_t k_high = k_low + (kHalfBytes >> 4);
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    mma_shared<kValues>(scores, (step < 4 ? q_low : q_high) + 2 * (step & 3),
                        (step < 4 ? k_low : k_high) + 2 * (step & 3), step);
  mma_commit();
}

// out[64 x 128] (+)= weights[64 x 128] * page of values.
template <Values kValues = Values::kBf16>
__device__ __forceinline__ void multiply_values(float (&out)[64], const uint32_t (&weights)[32],
                                                const uint8_t* values, int accumulate) {
  const uint64_t first = describe_columns(pinned(shared_address(values)));
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    mma_registers_columns<kValues>(out, weights + 4 * step, first + step * (2048 >> 4),
                                   step > 0 ? 1 : accumulate);
  mma_commit();
}

// Zeroes value rows from `written` on: unwritten memory may hold NaN, and 0 * NaN is NaN. Every
// warpgroup does it for itself; two at once write the same zeros.
__device__ __forceinline__ void zero_unwritten(uint8_t* values, int written, int warpgroup) {
  const int thread = threadIdx.x % kWarpgroup;
  for (int i = written * 16 + thread; i < kPage * 16; i += kWarpgroup) {
    const int half = i & 8 ? kHalfBytes : 0;
    *reinterpret_cast<uint4*>(values + half + (i >> 4) * 128 + (i & 7) * 16) =
        make_uint4(0, 0, 0, 0);
  }
  publish_shared_writes();
  warpgroup_sync(1 + warpgroup);
}

// ---- store ----

// Four registers of each of four neighbouring lanes, transposed.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    if (odd) x[i] = other;
    else x[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + 2], 2);
    if (upper) x[i] = other;
    else x[i + 2] = other;
  }
}

// Writes the 16 rows of a warp, scaled, to 16 consecutive rows of 128 bf16 at `target`.
__device__ __forceinline__ void store_rows(const float (&out)[64], float low, float high,
                                           __nv_bfloat16* target) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = half ? high : low;
    auto* row = reinterpret_cast<uint4*>(target + (lane / 4 + 8 * half) * kDim) + (lane & 3);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * part + i) + 2 * half;
        x[i] = pack_bf16(out[at] * factor, out[at + 1] * factor);
      }
      transpose_quad(x);
      row[4 * part] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

}  // namespace m3
