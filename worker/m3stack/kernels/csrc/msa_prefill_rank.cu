// The two ends of prefill block choice: cutting rows into tiles, and merging what their pieces ranked.
#include "msa_prefill_score.cuh"

namespace m3 {

__device__ int block_scan(int value, int* total) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < (blockDim.x >> 5); ++i) {
    if (i < warp) before += warp_sums[i];
    all += warp_sums[i];
  }
  __syncthreads();
  *total = all;
  return before + sum - value;
}

__device__ int4 make_tile(const ScoreArguments& a, int tile) {
  if (tile >= a.sequence_tiles[a.num_sequences + 1]) return make_int4(0, 0, kNoPosition, 0);
  const int sequence = last_at_or_before(a.sequence_tiles, a.num_sequences + 1, tile);
  const int first = (tile - a.sequence_tiles[sequence]) * kTileRows;
  const int rows = rows_of(a, sequence);
  const int length = sequence < a.num_sequences ? a.seq_lens[sequence] : 0;
  const int position = length > 0 ? length * a.num_groups - rows + first : kNoPosition;
  return make_int4(a.query_start[sequence] * a.num_groups + first, min(kTileRows, rows - first),
                   position, sequence);
}

// Cuts every sequence into tiles; rows past the last sequence form one more, empty one.
__global__ void __launch_bounds__(1024) plan_tiles(const ScoreArguments a) {
  chain_release();
  int before = 0, total;
  for (int base = 0; base <= a.num_sequences; base += blockDim.x) {
    const int sequence = base + threadIdx.x;
    const int rows = sequence <= a.num_sequences ? rows_of(a, sequence) : 0;
    const int first = before + block_scan((rows + kTileRows - 1) / kTileRows, &total);
    if (sequence <= a.num_sequences) a.sequence_tiles[sequence] = first;
    before += total;
  }
  if (threadIdx.x == 0) a.sequence_tiles[a.num_sequences + 1] = before;
  __syncthreads();
  before = 0;
  for (int base = 0; base < a.num_tiles; base += blockDim.x) {
    const int tile = base + threadIdx.x;
    int pages = 0;
    if (tile < a.num_tiles) {
      const int4 record = make_tile(a, tile);
      a.tiles[tile] = record;
      if (record.z >= 0)
        pages = ranked_pages((record.z + record.y - 1) / a.num_groups, a.num_local);
    }
    const int start = before + block_scan(pages, &total);
    if (tile < a.num_tiles) a.work_start[tile] = start;
    before += total;
  }
  if (threadIdx.x == 0) a.work_start[a.num_tiles] = before;
}

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
  chain_wait();
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
    for (int worker = first + warp % kWarpsPerRow; worker <= last; worker += kWarpsPerRow) {
      if (lane >= 16) key = lists[worker * pitch];
      key = merge_lists(key);
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

// Cuts the step into tiles and counts their pages. Returns a cudaError_t.
extern "C" int m3_prefill_plan(const m3::ScoreArguments* arguments, void* stream_handle) {
  m3::plan_tiles<<<1, 1024, 0, static_cast<cudaStream_t>(stream_handle)>>>(*arguments);
  return cudaGetLastError();
}

// Turns the lists that scoring left into chosen blocks. Returns a cudaError_t.
extern "C" int m3_prefill_rank(const m3::ScoreArguments* arguments, void* stream_handle) {
  using namespace m3;
  const ScoreArguments& a = *arguments;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  // few tiles are cut into many pieces each
  if (a.num_tiles <= 32)
    return launch_chained(merge_pieces<4>, dim3(kTileRows, a.num_tiles), 128, 0, stream, a);
  return launch_chained(merge_pieces<1>, dim3(kTileRows / 4, a.num_tiles), 128, 0, stream, a);
}
