// The two ends of prefill block choice: cutting rows into tiles, and merging what their pieces ranked.
#include "msa_prefill_score.cuh"

namespace m3 {

__global__ void __launch_bounds__(1024) plan_large_step(const ScoreArguments a) { plan_tiles(a); }

// ---- merge: one row's sorted lists to the chosen blocks ----

// Lanes 0-15 hold a descending list, lanes 16-31 another; afterwards lanes 0-15 hold the best 16.
__device__ __forceinline__ unsigned long long merge_lists(unsigned long long key) {
  const int lane = threadIdx.x & 31;
  // reversing the upper half makes the whole bitonic
  key = __shfl_sync(~0u, key, lane < 16 ? lane : 47 - lane);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, key, step);
    const bool greater = (lane & step) == 0;
    key = (key > other) == greater ? key : other;
  }
  return key;
}

// Ascending ids of the ranked blocks, then the local blocks, then -1. Lane i keeps entry i.
__device__ __forceinline__ int order_blocks(const ScoreArguments& a, unsigned long long key,
                                            int position) {
  const int lane = threadIdx.x & 31;
  const int own = position / kPage;
  const int local = position < 0 ? 0 : min(min(a.num_local, own + 1), a.num_blocks);
  const bool kept = lane < a.num_blocks - local && key != 0;
  const int block = kept ? int(~uint32_t(key)) : 0x7fffffff;
  const int ranked = __popc(__ballot_sync(~0u, kept));
  int place = 0;
  for (int i = 0; i < kRanked; ++i) place += __shfl_sync(~0u, block, i) < block;
  int chosen = -1;
  for (int i = 0; i < kRanked; ++i) {
    const int other = __shfl_sync(~0u, block, i), target = __shfl_sync(~0u, place, i);
    if (i < ranked && target == lane) chosen = other;
  }
  // ranked entries are a prefix of the lanes, since the list is sorted and empty keys are last
  if (lane >= ranked && lane < ranked + local) chosen = own - local + 1 + lane - ranked;
  return chosen;
}

template <int kWarpsPerRow>
__global__ void __launch_bounds__(128) merge_pieces(const ScoreArguments a) {
  __shared__ unsigned long long partial[4][kRanked];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = blockIdx.x * (4 / kWarpsPerRow) + warp / kWarpsPerRow;
  const int tile_index = blockIdx.y;
  const int4 tile = a.tiles[tile_index];
  const bool present = row < tile.y;
  if (kWarpsPerRow == 1 && !present) return;
  const int start = a.work_start[tile_index], end = a.work_start[tile_index + 1];
  unsigned long long key = 0;
  if (present && end > start) {
    const int first = worker_of(a, start), last = worker_of(a, end - 1);
    const unsigned long long* lists =
        a.lists + (int64_t(tile_index) * kTileRows + row) * kRanked + (lane & 15);
    const int64_t pitch = int64_t(kTileRows) * kRanked;
#pragma unroll 4
    for (int worker = first + warp % kWarpsPerRow; worker <= last; worker += kWarpsPerRow) {
      const unsigned long long listed = lists[worker * pitch];
      key = merge_lists(lane < 16 ? key : listed);
    }
  }
  if (kWarpsPerRow > 1) {
    if (lane < 16) partial[warp][lane] = key;
    __syncthreads();
    if (warp > 0 || !present) return;
    for (int other = 1; other < kWarpsPerRow; ++other) {
      if (lane >= 16) key = partial[other][lane - 16];
      key = merge_lists(key);
    }
  }
  if (lane >= 16) key = 0;
  const int position = tile.z == kNoPosition ? -1 : (tile.z + row) / a.num_groups;
  const int chosen = order_blocks(a, key, position);
  const int flat = tile.x + row, token = flat / a.num_groups, group = flat % a.num_groups;
  if (lane < a.num_blocks)
    a.chosen[(int64_t(group) * a.num_tokens + token) * a.num_blocks + lane] = chosen;
}

}  // namespace m3

// Plans a step too large for the workers to plan it themselves. Returns a cudaError_t.
extern "C" int m3_prefill_plan(const m3::ScoreArguments* arguments, void* stream_handle) {
  using namespace m3;
  const ScoreArguments& a = *arguments;
  if (small_step(a)) return cudaSuccess;
  plan_large_step<<<1, 1024, 0, static_cast<cudaStream_t>(stream_handle)>>>(a);
  return cudaGetLastError();
}

// Turns the lists that scoring left into chosen blocks. Returns a cudaError_t.
extern "C" int m3_prefill_rank(const m3::ScoreArguments* arguments, void* stream_handle) {
  using namespace m3;
  const ScoreArguments& a = *arguments;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (small_step(a))
    merge_pieces<4><<<dim3(kTileRows, a.num_tiles), 128, 0, stream>>>(a);
  else
    merge_pieces<1><<<dim3(kTileRows / 4, a.num_tiles), 128, 0, stream>>>(a);
  return cudaGetLastError();
}
