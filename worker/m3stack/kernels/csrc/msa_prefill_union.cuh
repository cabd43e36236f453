// Prefill attention by query tiles: 4 or 8 neighbouring tokens read the union of their blocks once.
//
// A tile never crosses sequences. Every row attends exactly its own blocks: a union entry carries
// one bit a token, and a warp is one token. One warpgroup is four tokens and skips blocks that none
// of them chose. Keys of the next block multiply while this block's weights meet its values. Who
// fills the rings, and from pages of which format, is each kernel's own.
#pragma once

#include "msa_prefill_attend.cuh"

namespace m3 {

// What the kernels of a format and a tile size differ in. `Feed` is what those who fill the rings
// keep in shared memory beside them.
template <int WARPGROUPS, int FEED_WARPGROUPS, int STAGES, int FILLERS, Values VALUES, typename FEED>
struct UnionForm {
  using Feed = FEED;
  static constexpr Values kValues = VALUES;
  // f16 ones are of e4m3 pages, whose scales `Feed` has
  static constexpr bool kIsCoded = VALUES == Values::kF16;
  static constexpr int kWarpgroups = WARPGROUPS;           // that multiply; four tokens each
  static constexpr int kFeedWarpgroups = FEED_WARPGROUPS;  // these come first
  static constexpr int kThreads = (WARPGROUPS + FEED_WARPGROUPS) * kWarpgroup;
  static constexpr int kStages = STAGES;
  static constexpr int kFillers = FILLERS;  // arrivals that fill a stage, beside bytes
  static constexpr int kEntries = 4 * WARPGROUPS * kChosen;
  // How far a warpgroup may look for its next keys while it still holds the values of a block. Its
  // unread values then lag its keys by at most twice this less one. For two warpgroups to wait for
  // each other, one for keys and one for values, that lag must exceed twice the stages.
  static constexpr int kLookahead = STAGES;
};

template <typename F>
struct UnionShared {
  alignas(1024) uint8_t keys[F::kStages][kPageBytes];
  uint8_t values[F::kStages][kPageBytes];
  uint8_t queries[2][F::kWarpgroups * 8192];  // halves of 64 columns; 64 rows a warpgroup
  unsigned entries[F::kWarpgroups][F::kEntries];
  uint64_t key_full[F::kStages], value_full[F::kStages];
  uint64_t key_empty[F::kStages], value_empty[F::kStages];
  uint64_t query_full, query_empty;
  typename F::Feed feed;
};

template <typename F>
__device__ __forceinline__ void init_barriers(UnionShared<F>& shared) {
  for (int i = 0; i < F::kStages; ++i) {
    barrier_init(&shared.key_full[i], F::kFillers);
    barrier_init(&shared.value_full[i], F::kFillers);
    barrier_init(&shared.key_empty[i], 4 * F::kWarpgroups);
    barrier_init(&shared.value_empty[i], 4 * F::kWarpgroups);
  }
  barrier_init(&shared.query_full, 1);
  barrier_init(&shared.query_empty, F::kWarpgroups);
}

struct UnionLaunch {
  AttendArguments a;
  CUtensorMap queries, keys, values;
};

// Tiles of one group follow each other, so that neighbours find their pages in L2.
struct UnionItem {
  int tile, group, size;
  const int2* entries;
};

template <typename F>
__device__ __forceinline__ UnionItem union_item(const AttendArguments& a, int index) {
  UnionItem item;
  item.group = index / a.num_tiles;
  item.tile = index - item.group * a.num_tiles;
  item.size = a.union_sizes[index];
  item.entries = a.unions + int64_t(index) * F::kEntries;
  return item;
}

// By one lane, once all readers are past the queries before.
template <typename F>
__device__ __forceinline__ void copy_queries(const AttendArguments& a, const UnionItem& item,
                                             const CUtensorMap* queries, UnionShared<F>& shared,
                                             uint32_t parity) {
  barrier_wait(&shared.query_empty, parity);
  barrier_expect(&shared.query_full, F::kWarpgroups * 16384);
  for (int half = 0; half < 2; ++half)
    copy_tile_3d(shared.queries[half], queries, &shared.query_full, 64 * half,
                 item.group * kHeads, a.tiles[item.tile].x);
}

// Where the arm is measured, the sums over runs are counted by whoever decides.
__device__ __forceinline__ bool takes_unions(const AttendArguments& a) {
  if (a.arm == kMeasured && blockIdx.x == 0 && threadIdx.x < 2)
    atomicAdd(&a.totals[threadIdx.x], selection_sum(a, threadIdx.x));
  return union_arm_chosen(a);
}

// One warpgroup's way through the two rings. Blocks it does not need are let go, each after its
// arrival: a stage must not be released twice in one pass.
template <typename F>
struct UnionReader {
  UnionShared<F>& shared;
  Ring<F::kStages> keys, values;
  int warpgroup;
  int next_key, next_value;  // indices into the union

  __device__ __forceinline__ int find_next(int from, int size) const {
    while (from < size && !((shared.entries[warpgroup][from] >> (kMemberShift + 4 * warpgroup)) & 15))
      ++from;
    return from;
  }
  // a lane that still waits for a stage must not find it filled twice
  __device__ __forceinline__ void release_keys() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.key_empty[keys.stage]);
    keys.advance();
    ++next_key;
  }
  __device__ __forceinline__ void release_values() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.value_empty[values.stage]);
    values.advance();
    ++next_value;
  }
  // Afterwards the keys, or values, of this index are there to be read.
  __device__ __forceinline__ void await_keys(int index) {
    barrier_wait(&shared.key_full[keys.stage], keys.parity);
    while (next_key < index) {
      release_keys();
      barrier_wait(&shared.key_full[keys.stage], keys.parity);
    }
  }
  __device__ __forceinline__ void await_values(int index) {
    barrier_wait(&shared.value_full[values.stage], values.parity);
    while (next_value < index) {
      release_values();
      barrier_wait(&shared.value_full[values.stage], values.parity);
    }
  }
  // Lets keys and values go in step, with nothing held.
  __device__ __forceinline__ void skip_to(int index) {
    while (next_key < index) {
      await_keys(next_key);
      release_keys();
      await_values(next_value);
      release_values();
    }
  }
};

struct TokenView {
  int bit, position, length;
  float scale_log2;
};

// Weights of the block for this warp's token, in place of the scores; zeros if it did not choose it.
__device__ __forceinline__ float2 weigh_block(float (&scores)[64], SoftmaxRows& rows,
                                              const TokenView& token, unsigned entry, float unit) {
  if (!((entry >> token.bit) & 1)) {
    // in place, so that zeros and weights share registers
#pragma unroll
    for (int i = 0; i < 64; ++i) clear(scores[i]);
    return make_float2(1, 1);
  }
  const int visible = token.position + 1 - int(entry & kBlockMask) * kPage;
  if (visible < kPage) hide_keys(scores, visible);
  return soften(scores, rows, token.scale_log2, unit);
}

// State of one warpgroup's tile: out and weights always belong to blocks up to the current one.
template <typename F>
struct UnionTile {
  UnionReader<F>& reader;
  const TokenView& token;
  SoftmaxRows rows;
  float out[64];
  float scores[64];
  uint32_t weights[32];
  float unit = 1;  // what 1 of `out` stands for: the scale of the last page's values

  __device__ __forceinline__ unsigned entry(int index) const {
    return reader.shared.entries[reader.warpgroup][index];
  }
  __device__ __forceinline__ void start_scores() {
    multiply_keys<F::kValues>(scores, reader.shared.queries[0] + reader.warpgroup * 8192,
                              F::kWarpgroups * 8192, reader.shared.keys[reader.keys.stage]);
  }
  __device__ __forceinline__ void prepare_values(int index) {
    reader.await_values(index);
    const int written = token.length - int(entry(index) & kBlockMask) * kPage;
    if (written < kPage)
      zero_unwritten(reader.shared.values[reader.values.stage], max(written, 0),
                     reader.warpgroup);
  }
  __device__ __forceinline__ void start_output() {
    multiply_values<F::kValues>(out, weights, reader.shared.values[reader.values.stage], 1);
  }
  // Of the keys and values of the block whose keys are held.
  __device__ __forceinline__ float2 scales() const {
    if constexpr (F::kIsCoded) return reader.shared.feed.scales[reader.keys.stage];
    return make_float2(1, 1);
  }
  // Weights of a block; returns the factors for `out` as it is.
  __device__ __forceinline__ float2 weigh(int index, float2 scales) {
    float2 factors = weigh_block(scores, rows, token, entry(index), scales.x);
    if constexpr (F::kIsCoded) {
      if (((entry(index) >> token.bit) & 1) && scales.y != unit) {
        const float ratio = unit / scales.y;
        factors = make_float2(factors.x * ratio, factors.y * ratio);
        unit = scales.y;
      }
    }
    return factors;
  }
  // Scores and weighs a block with no product in flight.
  __device__ __forceinline__ void begin_block(int index) {
    reader.skip_to(index);
    reader.await_keys(index);
    start_scores();
    const float2 of_block = scales();
    mma_wait<0>();
    mma_settle(scores);
    reader.release_keys();
    rescale(out, weigh(index, of_block));
    pack_weights<F::kValues>(scores, weights);
  }
  __device__ __forceinline__ void finish_block(int index) {
    prepare_values(index);
    start_output();
    mma_wait<0>();
    mma_settle(out);
    reader.release_values();
  }
  // Finishes a block while the next one is scored and weighed.
  __device__ __forceinline__ void overlap_blocks(int current, int next) {
    reader.await_keys(next);
    prepare_values(current);
    start_scores();
    start_output();
    const float2 of_next = scales();
    mma_wait<1>();
    mma_settle(scores);
    reader.release_keys();
    const float2 factors = weigh(next, of_next);
    mma_wait<0>();
    mma_settle(out);
    reader.release_values();
    rescale(out, factors);
    pack_weights<F::kValues>(scores, weights);
  }
};

template <typename F>
__device__ __forceinline__ void attend_union(UnionTile<F>& tile, int size) {
  auto& reader = tile.reader;
  int current = reader.find_next(0, size);
  if (current < size) {
    tile.begin_block(current);
    for (int next = reader.find_next(current + 1, size); next < size;
         next = reader.find_next(current + 1, size)) {
      if (next - current <= F::kLookahead) {
        tile.overlap_blocks(current, next);
      } else {
        tile.finish_block(current);
        tile.begin_block(next);
      }
      current = next;
    }
    tile.finish_block(current);
  }
  reader.skip_to(size);
}

// A warpgroup's queries to f16, in place; those beyond 65,504, which no norm leaves, to infinity.
template <typename F>
__device__ __forceinline__ void narrow_queries(UnionShared<F>& shared, int warpgroup) {
  const int thread = threadIdx.x % kWarpgroup;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    auto* at = reinterpret_cast<uint4*>(shared.queries[i / 4] + warpgroup * 8192) +
               i % 4 * kWarpgroup + thread;
    const uint4 x = *at;
    *at = make_uint4(pack_f16(low_of_bf16(x.x), high_of_bf16(x.x)),
                     pack_f16(low_of_bf16(x.y), high_of_bf16(x.y)),
                     pack_f16(low_of_bf16(x.z), high_of_bf16(x.z)),
                     pack_f16(low_of_bf16(x.w), high_of_bf16(x.w)));
  }
  publish_shared_writes();
  warpgroup_sync(1 + warpgroup);
}

template <typename F>
__device__ void attend_tiles(const AttendArguments& a, UnionShared<F>& shared) {
  const int thread = threadIdx.x % kWarpgroup;
  UnionReader<F> reader{shared, {}, {}, int(threadIdx.x) / kWarpgroup - F::kFeedWarpgroups, 0, 0};
  const int token = 4 * reader.warpgroup + thread / 32;
  uint32_t query_parity = 0;
  for (int index = blockIdx.x; index < a.num_tiles * a.num_groups; index += gridDim.x) {
    const UnionItem item = union_item<F>(a, index);
    const int4 tile = a.tiles[item.tile];
    const TokenView view{kMemberShift + token, tile.z + token, tile.w, a.scale * kLog2e};
    UnionTile<F> state{reader, view, {}, {}};
    if (item.size > 0) {
      for (int i = thread; i < item.size; i += kWarpgroup)
        shared.entries[reader.warpgroup][i] = item.entries[i].y;
      warpgroup_sync(1 + reader.warpgroup);
      barrier_wait(&shared.query_full, query_parity);
      query_parity ^= 1;
      if constexpr (F::kIsCoded) narrow_queries(shared, reader.warpgroup);
      reader.next_key = reader.next_value = 0;
      attend_union(state, item.size);
      // all warps are past their last look at the entries and the queries
      warpgroup_sync(1 + reader.warpgroup);
      if (thread == 0) barrier_arrive(&shared.query_empty);
    }
    if (token < tile.y) {
      const float low = quad_sum(state.rows.sum_low), high = quad_sum(state.rows.sum_high);
      store_rows(state.out, low > 0 ? state.unit / low : 0, high > 0 ? state.unit / high : 0,
                 a.out + (int64_t(tile.x + token) * a.num_heads + item.group * kHeads) * kDim);
    }
  }
}

template <typename Shared, typename Launch>
cudaError_t launch_union(void (*kernel)(const Launch), const Launch& launch, int threads,
                         int workers, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared) + 1024;
  static_assert(kBytes <= 232448, "shared memory of one SM");
  const void* address = reinterpret_cast<const void*>(kernel);
  const cudaError_t error =
      cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  Launch copy = launch;
  void* arguments[] = {&copy};
  return launch_plain(address, dim3(workers), threads, kBytes, arguments, stream);
}

}  // namespace m3
