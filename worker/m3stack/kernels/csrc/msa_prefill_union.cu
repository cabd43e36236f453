// Prefill attention by query tiles: 4 or 8 neighbouring tokens read the union of their blocks once.
//
// A tile never crosses sequences. Every row attends exactly its own blocks: a union entry carries
// one bit a token, and a warp is one token. One warpgroup is four tokens and skips blocks that none
// of them chose. Keys of the next block multiply while this block's weights meet its values.
#include "msa_prefill_attend.cuh"

namespace m3 {

constexpr int kUnionStages = 3;
template <int kWarpgroups>
struct UnionShared {
  alignas(1024) uint8_t keys[kUnionStages][kPageBytes];
  uint8_t values[kUnionStages][kPageBytes];
  uint8_t queries[2][kWarpgroups * 8192];  // halves of 64 columns; 64 rows a warpgroup
  unsigned entries[kWarpgroups][4 * kWarpgroups * kChosen];
  uint64_t key_full[kUnionStages], value_full[kUnionStages];
  uint64_t key_empty[kUnionStages], value_empty[kUnionStages];
  uint64_t query_full, query_empty;
};

// Tiles of one group follow each other, so that neighbours find their pages in L2.
struct UnionItem {
  int tile, group, size;
  const int2* entries;
};

template <int kWarpgroups>
__device__ __forceinline__ UnionItem union_item(const AttendArguments& a, int index) {
  UnionItem item;
  item.group = index / a.num_tiles;
  item.tile = index - item.group * a.num_tiles;
  item.size = a.union_sizes[index];
  item.entries = a.unions + int64_t(index) * (4 * kWarpgroups * kChosen);
  return item;
}

// Runs in one warp: copies the pages of every union, keys or values, and the queries with the keys.
template <int kWarpgroups, bool kKeys>
__device__ void copy_union_pages(const AttendArguments& a, const CUtensorMap* pages,
                                 const CUtensorMap* queries, UnionShared<kWarpgroups>& shared) {
  const int lane = threadIdx.x & 31;
  Ring<kUnionStages> ring;
  uint32_t query_parity = 1;
  for (int index = blockIdx.x; index < a.num_tiles * a.num_groups; index += gridDim.x) {
    const UnionItem item = union_item<kWarpgroups>(a, index);
    if (item.size == 0) continue;
    if (kKeys && lane == 0) {
      barrier_wait(&shared.query_empty, query_parity);
      barrier_expect(&shared.query_full, kWarpgroups * 16384);
      for (int half = 0; half < 2; ++half)
        copy_tile_3d(shared.queries[half], queries, &shared.query_full, 64 * half,
                     item.group * kHeads, a.tiles[item.tile].x);
    }
    query_parity ^= 1;
    uint64_t* full = kKeys ? shared.key_full : shared.value_full;
    uint64_t* empty = kKeys ? shared.key_empty : shared.value_empty;
    for (int base = 0; base < item.size; base += 32) {
      const int mine = item.entries[min(base + lane, item.size - 1)].x;
      for (int i = 0; i < min(32, item.size - base); ++i) {
        const int page = __shfl_sync(~0u, mine, i);
        if (lane == 0) {
          barrier_wait(&empty[ring.stage], ring.parity ^ 1);
          barrier_expect(&full[ring.stage], kPageBytes);
          uint8_t* target = kKeys ? shared.keys[ring.stage] : shared.values[ring.stage];
          for (int half = 0; half < 2; ++half)
            copy_tile_4d(target + half * kHalfBytes, pages, &full[ring.stage], 64 * half, 0,
                         item.group, page);
        }
        ring.advance();
      }
    }
  }
}

// How far a warpgroup may look for its next keys while it still holds the values of a block. Its
// unread values then lag its keys by at most twice this less one. For two warpgroups to wait for
// each other, one for keys and one for values, that lag must exceed twice the stages.
constexpr int kLookahead = kUnionStages;

// One warpgroup's way through the two rings. Blocks it does not need are let go, each after its
// arrival: a stage must not be released twice in one pass.
template <int kWarpgroups>
struct UnionReader {
  UnionShared<kWarpgroups>& shared;
  Ring<kUnionStages> keys, values;
  int warpgroup;
  int next_key, next_value;  // indices into the union

  __device__ __forceinline__ int find_next(int from, int size) const {
    while (from < size && !((shared.entries[warpgroup][from] >> (kMemberShift + 4 * warpgroup)) & 15))
      ++from;
    return from;
  }
  __device__ __forceinline__ void release_keys() {
    if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.key_empty[keys.stage]);
    keys.advance();
    ++next_key;
  }
  __device__ __forceinline__ void release_values() {
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
                                              const TokenView& token, unsigned entry) {
  if (!((entry >> token.bit) & 1)) {
    // in place, so that zeros and weights share registers
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "+f"(scores[i]));
    return make_float2(1, 1);
  }
  const int visible = token.position + 1 - int(entry & kBlockMask) * kPage;
  if (visible < kPage) hide_keys(scores, visible);
  return soften(scores, rows, token.scale_log2);
}

// State of one warpgroup's tile: out and weights always belong to blocks up to the current one.
template <int kWarpgroups>
struct UnionTile {
  UnionReader<kWarpgroups>& reader;
  const TokenView& token;
  SoftmaxRows rows;
  float out[64];
  float scores[64];
  uint32_t weights[32];

  __device__ __forceinline__ unsigned entry(int index) const {
    return reader.shared.entries[reader.warpgroup][index];
  }
  __device__ __forceinline__ void start_scores() {
    multiply_keys(scores, reader.shared.queries[0] + reader.warpgroup * 8192,
                  kWarpgroups * 8192, reader.shared.keys[reader.keys.stage]);
  }
  __device__ __forceinline__ void prepare_values(int index) {
    reader.await_values(index);
    const int written = token.length - int(entry(index) & kBlockMask) * kPage;
    if (written < kPage)
      zero_unwritten(reader.shared.values[reader.values.stage], max(written, 0),
                     reader.warpgroup);
  }
  __device__ __forceinline__ void start_output() {
    multiply_values(out, weights, reader.shared.values[reader.values.stage], 1);
  }
  // Scores and weighs a block with no product in flight.
  __device__ __forceinline__ void begin_block(int index) {
    reader.skip_to(index);
    reader.await_keys(index);
    start_scores();
    mma_wait<0>();
    mma_settle(scores);
    reader.release_keys();
    rescale(out, weigh_block(scores, rows, token, entry(index)));
    pack_weights(scores, weights);
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
    mma_wait<1>();
    mma_settle(scores);
    reader.release_keys();
    const float2 factors = weigh_block(scores, rows, token, entry(next));
    mma_wait<0>();
    mma_settle(out);
    reader.release_values();
    rescale(out, factors);
    pack_weights(scores, weights);
  }
};

template <int kWarpgroups>
__device__ __forceinline__ void attend_union(UnionTile<kWarpgroups>& tile, int size) {
  auto& reader = tile.reader;
  int current = reader.find_next(0, size);
  if (current < size) {
    tile.begin_block(current);
    for (int next = reader.find_next(current + 1, size); next < size;
         next = reader.find_next(current + 1, size)) {
      if (next - current <= kLookahead) {
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

template <int kWarpgroups>
__device__ void attend_tiles(const AttendArguments& a, UnionShared<kWarpgroups>& shared) {
  const int thread = threadIdx.x % kWarpgroup;
  UnionReader<kWarpgroups> reader{shared, {}, {}, int(threadIdx.x) / kWarpgroup - 1, 0, 0};
  const int token = 4 * reader.warpgroup + thread / 32;
  uint32_t query_parity = 0;
  for (int index = blockIdx.x; index < a.num_tiles * a.num_groups; index += gridDim.x) {
    const UnionItem item = union_item<kWarpgroups>(a, index);
    const int4 tile = a.tiles[item.tile];
    const TokenView view{kMemberShift + token, tile.z + token, tile.w, a.scale * kLog2e};
    UnionTile<kWarpgroups> state{reader, view, {}, {}};
    if (item.size > 0) {
      for (int i = thread; i < item.size; i += kWarpgroup)
        shared.entries[reader.warpgroup][i] = item.entries[i].y;
      warpgroup_sync(1 + reader.warpgroup);
      barrier_wait(&shared.query_full, query_parity);
      query_parity ^= 1;
      reader.next_key = reader.next_value = 0;
      attend_union(state, item.size);
      // all warps are past their last look at the entries and the queries
      warpgroup_sync(1 + reader.warpgroup);
      if (thread == 0) barrier_arrive(&shared.query_empty);
    }
    if (token < tile.y) {
      const float low = quad_sum(state.rows.sum_low), high = quad_sum(state.rows.sum_high);
      store_rows(state.out, low > 0 ? 1 / low : 0, high > 0 ? 1 / high : 0,
                 a.out + (int64_t(tile.x + token) * a.num_heads + item.group * kHeads) * kDim);
    }
  }
}

template <int kWarpgroups>
__global__ void __launch_bounds__((kWarpgroups + 1) * kWarpgroup, 1)
    attend_unions(const AttendArguments a, const __grid_constant__ CUtensorMap queries,
                  const __grid_constant__ CUtensorMap keys,
                  const __grid_constant__ CUtensorMap values) {
  if (a.arm == kMeasured && blockIdx.x == 0 && threadIdx.x < 2)
    atomicAdd(&a.totals[threadIdx.x], selection_sum(a, threadIdx.x));
  if (!union_arm_chosen(a)) return;
  extern __shared__ uint8_t raw[];
  auto& shared = aligned_shared<UnionShared<kWarpgroups>>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kUnionStages; ++i) {
      barrier_init(&shared.key_full[i], 1);
      barrier_init(&shared.value_full[i], 1);
      barrier_init(&shared.key_empty[i], 4 * kWarpgroups);
      barrier_init(&shared.value_empty[i], 4 * kWarpgroups);
    }
    barrier_init(&shared.query_full, 1);
    barrier_init(&shared.query_empty, kWarpgroups);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x < 32) copy_union_pages<kWarpgroups, true>(a, &keys, &queries, shared);
    else if (threadIdx.x < 64) copy_union_pages<kWarpgroups, false>(a, &values, nullptr, shared);
  } else {
    take_registers<240>();
    attend_tiles<kWarpgroups>(a, shared);
  }
}

template <int kWarpgroups>
cudaError_t launch_union(const AttendArguments& a, const CUtensorMap* maps, int workers,
                         cudaStream_t stream) {
  constexpr int kBytes = sizeof(UnionShared<kWarpgroups>) + 1024;
  static_assert(kBytes <= 232448, "shared memory of one SM");
  const auto kernel = attend_unions<kWarpgroups>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<workers, (kWarpgroups + 1) * kWarpgroup, kBytes, stream>>>(a, maps[0], maps[1], maps[2]);
  return cudaGetLastError();
}

}  // namespace m3

// `maps`: queries [T, H, D] in boxes of 64 x 16 x tile, keys and values [P, G, 128, D] in boxes of
// 64 x 128 x 1 x 1, encoded.
extern "C" int m3_prefill_attend_unions(const m3::AttendArguments* arguments, const void* maps,
                                        int workers, void* stream_handle) {
  const auto* encoded = static_cast<const CUtensorMap*>(maps);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (arguments->tile_tokens) {
    case 4: return m3::launch_union<1>(*arguments, encoded, workers, stream);
    case 8: return m3::launch_union<2>(*arguments, encoded, workers, stream);
    default: return cudaErrorInvalidValue;
  }
}
