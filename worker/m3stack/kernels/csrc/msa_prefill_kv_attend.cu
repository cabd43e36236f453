// Prefill attention one block of keys at a time: every row that chose the block meets it here.
//
// A block's keys and values are copied once a piece of at most 64 rows; four rows of 16 heads are
// one tile of 64, gathered by the copy engine. A tile's result is one normalised bf16 partial and a
// log-sum per row and slot; a second kernel adds the partials of a row in slot order. So cost does
// not depend on how selections agree, and the sum does not depend on the order of the work.
#include "msa_prefill_kv_major.cuh"

namespace m3 {

constexpr int kReaders = 3;  // warpgroups that multiply
constexpr int kKeyStages = 2;
constexpr int kQueryStages = 2;
constexpr int kCombineBlocks = 6;  // thread blocks of the sum on one SM

struct KeyMajorShared {
  alignas(1024) uint8_t keys[kKeyStages][kPageBytes];
  uint8_t values[kKeyStages][kPageBytes];
  uint8_t queries[kReaders][kQueryStages][2][8192];  // halves of 64 columns, 4 rows of 16 heads
  uint64_t key_full[kKeyStages], value_full[kKeyStages], page_empty[kKeyStages];
  uint64_t query_full[kReaders][kQueryStages], query_empty[kReaders][kQueryStages];
};

__device__ __forceinline__ int tiles_of(const KeyPiece& piece) {
  return (piece.num_edges + kWarpgroupTokens - 1) / kWarpgroupTokens;
}

__device__ void copy_key_pages(const InvertArguments& v, const CUtensorMap* keys,
                               const CUtensorMap* values, KeyMajorShared& shared) {
  Ring<kKeyStages> ring;
  const int pieces = v.slices[v.num_slices].y;
  for (int index = blockIdx.x; index < pieces; index += gridDim.x) {
    const KeyPiece piece = v.pieces[index];
    barrier_wait(&shared.page_empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&shared.key_full[ring.stage], kPageBytes);
    for (int half = 0; half < 2; ++half)
      copy_tile_4d(shared.keys[ring.stage] + half * kHalfBytes, keys,
                   &shared.key_full[ring.stage], 64 * half, 0, piece.group, piece.page);
    barrier_expect(&shared.value_full[ring.stage], kPageBytes);
    for (int half = 0; half < 2; ++half)
      copy_tile_4d(shared.values[ring.stage] + half * kHalfBytes, values,
                   &shared.value_full[ring.stage], 64 * half, 0, piece.group, piece.page);
    ring.advance();
  }
}

// Runs in one warp; lane i copies row i of a tile. Rows a tile lacks keep what was there before:
// rows do not mix, and theirs are not stored.
__device__ void copy_queries(const InvertArguments& v, const CUtensorMap* queries,
                             KeyMajorShared& shared) {
  const int lane = threadIdx.x & 31;
  Ring<kQueryStages> rings[kReaders];
  int reader = 0;
  const int pieces = v.slices[v.num_slices].y;
  for (int index = blockIdx.x; index < pieces; index += gridDim.x) {
    const KeyPiece piece = v.pieces[index];
    for (int first = 0; first < piece.num_edges; first += kWarpgroupTokens) {
      const int rows = min(kWarpgroupTokens, piece.num_edges - first);
#pragma unroll
      for (int i = 0; i < kReaders; ++i) {
        if (i != reader) continue;
        const int stage = rings[i].stage;
        uint64_t* full = &shared.query_full[i][stage];
        if (lane == 0) {
          barrier_wait(&shared.query_empty[i][stage], rings[i].parity ^ 1);
          barrier_expect(full, rows * kHeads * kDim * 2);
        }
        __syncwarp();
        if (lane < rows) {
          const int row = v.edges[piece.first_edge + first + lane] / kChosen;
          for (int half = 0; half < 2; ++half)
            copy_tile_3d(shared.queries[i][stage][half] + lane * (kHeads * 128), queries, full,
                         64 * half, piece.group * kHeads, row);
        }
        __syncwarp();
        rings[i].advance();
      }
      reader = reader + 1 == kReaders ? 0 : reader + 1;
    }
  }
}

// Writes this warp's row: its normalised sum over the block and, per head, the log-sum in base 2.
__device__ __forceinline__ void store_partial(const InvertArguments& v, const KeyPiece& piece,
                                              int edge, const float (&out)[64],
                                              const SoftmaxRows& rows, float scale_log2) {
  const int lane = threadIdx.x & 31;
  const float low = quad_sum(rows.sum_low), high = quad_sum(rows.sum_high);
  const int64_t local = edge - int64_t(v.first_token) * kChosen;
  const int64_t at = local * v.base.num_heads + piece.group * kHeads;
  store_rows(out, low > 0 ? 1 / low : 0, high > 0 ? 1 / high : 0, v.partial + at * kDim);
  if ((lane & 3) == 0) {
    // a sum that is NaN is not an empty one: its row is NaN, not what the other blocks give
    v.partial_lse[at + lane / 4] = low == 0 ? -INFINITY : rows.max_low * scale_log2 + log2f(low);
    v.partial_lse[at + lane / 4 + 8] =
        high == 0 ? -INFINITY : rows.max_high * scale_log2 + log2f(high);
  }
}

struct KeyMajorReader {
  KeyMajorShared& shared;
  Ring<kQueryStages> queries;
  int warpgroup;
};

__device__ __forceinline__ void meet_block(const InvertArguments& v, KeyMajorReader& reader,
                                           const KeyPiece& piece, int first, int stage,
                                           float scale_log2) {
  auto& shared = reader.shared;
  const int warp = threadIdx.x % kWarpgroup / 32;
  const bool present = first + warp < piece.num_edges;
  const int edge = v.edges[piece.first_edge + (present ? first + warp : first)];
  const int visible = edge / kChosen + piece.position_offset + 1 - piece.block * kPage;
  barrier_wait(&shared.query_full[reader.warpgroup][reader.queries.stage], reader.queries.parity);
  float scores[64];
  multiply_keys(scores, shared.queries[reader.warpgroup][reader.queries.stage][0], 8192,
                shared.keys[stage]);
  mma_wait<0>();
  mma_settle(scores);
  if ((threadIdx.x & 31) == 0)
    barrier_arrive(&shared.query_empty[reader.warpgroup][reader.queries.stage]);
  reader.queries.advance();
  if (visible < kPage) hide_keys(scores, visible);
  SoftmaxRows rows;
  soften(scores, rows, scale_log2);
  uint32_t weights[32];
  pack_weights(scores, weights);
  float out[64];
  multiply_values(out, weights, shared.values[stage], 0);
  mma_wait<0>();
  mma_settle(out);
  if (present) store_partial(v, piece, edge, out, rows, scale_log2);
}

__device__ void meet_blocks(const InvertArguments& v, KeyMajorShared& shared) {
  KeyMajorReader reader{shared, {}, int(threadIdx.x) / kWarpgroup - 1};
  Ring<kKeyStages> ring;
  const float scale_log2 = v.base.scale * kLog2e;
  int turn = 0;  // tiles go round the warpgroups across pieces
  const int pieces = v.slices[v.num_slices].y;
  for (int index = blockIdx.x; index < pieces; index += gridDim.x) {
    const KeyPiece piece = v.pieces[index];
    const int tiles = tiles_of(piece);
    int tile = reader.warpgroup - turn;
    if (tile < 0) tile += kReaders;
    turn = (turn + tiles) % kReaders;
    barrier_wait(&shared.key_full[ring.stage], ring.parity);
    barrier_wait(&shared.value_full[ring.stage], ring.parity);
    if (tile < tiles && piece.written < kPage)
      zero_unwritten(shared.values[ring.stage], max(piece.written, 0), reader.warpgroup);
    for (; tile < tiles; tile += kReaders)
      meet_block(v, reader, piece, tile * kWarpgroupTokens, ring.stage, scale_log2);
    if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.page_empty[ring.stage]);
    ring.advance();
  }
}

__global__ void __launch_bounds__((kReaders + 1) * kWarpgroup, 1)
    attend_key_major(const InvertArguments v, const __grid_constant__ CUtensorMap queries,
                     const __grid_constant__ CUtensorMap keys,
                     const __grid_constant__ CUtensorMap values) {
  if (union_arm_chosen(v.base)) return;
  extern __shared__ uint8_t raw[];
  auto& shared = aligned_shared<KeyMajorShared>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kKeyStages; ++i) {
      barrier_init(&shared.key_full[i], 1);
      barrier_init(&shared.value_full[i], 1);
      barrier_init(&shared.page_empty[i], 4 * kReaders);
    }
    for (int i = 0; i < kReaders * kQueryStages; ++i) {
      barrier_init(&shared.query_full[0][0] + i, 1);
      barrier_init(&shared.query_empty[0][0] + i, 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 0) copy_key_pages(v, &keys, &values, shared);
    else if (threadIdx.x >= 32 && threadIdx.x < 64) copy_queries(v, &queries, shared);
  } else {
    take_registers<160>();
    meet_blocks(v, shared);
  }
}

// Adds one (row, head)'s partials in slot order, 16 lanes together. Slots without a block are not
// read: they hold what an earlier step left.
__device__ __forceinline__ void combine_row(const InvertArguments& v, int64_t index) {
  const int heads = v.base.num_heads, lane = threadIdx.x & 15;
  const int token = int(index / heads), head = int(index % heads);
  const int64_t first = int64_t(token) * kChosen * heads + head;
  const float lse = v.partial_lse[first + int64_t(lane) * heads];
  float highest = lse;
#pragma unroll
  for (int step = 1; step < 16; step *= 2)
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  const float weight = lse == -INFINITY ? 0 : exp2f(lse - highest);
  float all = 0;
  float sums[8] = {};
#pragma unroll
  for (int slot = 0; slot < kChosen; ++slot) {
    const float share = __shfl_sync(~0u, weight, slot, 16);
    if (share == 0) continue;
    all += share;
    const uint4 packed = reinterpret_cast<const uint4*>(
        v.partial + (first + int64_t(slot) * heads) * kDim)[lane];
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[2 * i] += share * __uint_as_float(words[i] << 16);
      sums[2 * i + 1] += share * __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  const float factor = all > 0 ? 1 / all : 0;
  uint4 result;
  result.x = pack_bf16(sums[0] * factor, sums[1] * factor);
  result.y = pack_bf16(sums[2] * factor, sums[3] * factor);
  result.z = pack_bf16(sums[4] * factor, sums[5] * factor);
  result.w = pack_bf16(sums[6] * factor, sums[7] * factor);
  reinterpret_cast<uint4*>(v.base.out +
                           (int64_t(v.first_token + token) * heads + head) * kDim)[lane] = result;
}

// A grid that fills the SMs once: where the other arm ran, it must be cheap to leave.
__global__ void __launch_bounds__(256, kCombineBlocks) combine_partials(const InvertArguments v) {
  if (union_arm_chosen(v.base)) return;
  // a multiple of 16 heads: the two halves of a warp end together
  const int64_t count = int64_t(v.num_tokens) * v.base.num_heads;
  for (int64_t index = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 16; index < count;
       index += int64_t(gridDim.x) * blockDim.x / 16)
    combine_row(v, index);
}

}  // namespace m3

// `maps` as for the unions, but queries in boxes of 64 x 16 x 1.
extern "C" int m3_prefill_attend_key_major(const m3::InvertArguments* arguments, const void* maps,
                                           int workers, void* stream_handle) {
  using namespace m3;
  const InvertArguments& v = *arguments;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const auto* encoded = static_cast<const CUtensorMap*>(maps);
  constexpr int kBytes = sizeof(KeyMajorShared) + 1024;
  static_assert(kBytes <= 232448, "shared memory of one SM");
  const cudaError_t error = cudaFuncSetAttribute(
      attend_key_major, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  attend_key_major<<<workers, (kReaders + 1) * kWarpgroup, kBytes, stream>>>(
      v, encoded[0], encoded[1], encoded[2]);
  combine_partials<<<workers * kCombineBlocks, 256, 0, stream>>>(v);
  return cudaGetLastError();
}
