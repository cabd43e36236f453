// How prefill scoring is planned: tiles of rows, their pages, and which worker owns which of them.
#pragma once

#include "msa_prefill_hopper.cuh"

namespace m3 {

constexpr int kTileRows = 256;
constexpr int kRanked = 16;

struct ScoreArguments {
  const __nv_bfloat16* index_q;  // [T, G, D]
  const int* query_start;        // [S + 1]
  const int* seq_lens;           // [S]
  const int* page_table;         // [S, J]
  int4* tiles;                   // first row, rows, (position of row 0) * G, sequence
  int* sequence_tiles;           // [S + 2] prefix of tiles
  int* work_start;               // [tiles + 1] prefix of pages; the last entry is all work
  unsigned long long* lists;     // [tiles + SMs, 256, 16]
  int* chosen;                   // [G, T, K]
  int num_tokens, num_groups, num_sequences, table_pitch;
  int num_tiles, num_workers, num_blocks, num_local;
};

// A step of few tiles is planned by every worker for itself, which spares a launch, and its tiles are
// cut into many pieces each, so more warps merge a row.
constexpr int kSmallTiles = 32;

__device__ __host__ inline bool small_step(const ScoreArguments& a) {
  return a.num_tiles <= kSmallTiles;  // no more sequences than tiles
}

// A tile of rows of no sequence, or of an empty one, has this position.
constexpr int kNoPosition = -1;

__device__ __forceinline__ int rows_of(const ScoreArguments& a, int sequence) {
  const int last = sequence < a.num_sequences ? a.query_start[sequence + 1] : a.num_tokens;
  return (last - a.query_start[sequence]) * a.num_groups;
}

// Greatest i in [0, count) with starts[i] <= value; starts[0] <= value.
__device__ __forceinline__ int last_at_or_before(const int* starts, int count, int value) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= value) low = middle;
    else high = middle;
  }
  return low;
}

__device__ __forceinline__ int ranked_pages(int position, int num_local) {
  return max(0, position / kPage - num_local + 1);
}

// Workers that have work: each of them owns at least one page, so every list they leave is written.
__device__ __forceinline__ int active_workers(const ScoreArguments& a) {
  return min(a.num_workers, a.work_start[a.num_tiles]);
}

// Worker w owns the work from here up to where worker w + 1 starts.
__device__ __forceinline__ int worker_start(const ScoreArguments& a, int worker) {
  const int active = active_workers(a), all = a.work_start[a.num_tiles];
  return worker >= active ? all : int(int64_t(worker) * all / active);
}

__device__ __forceinline__ int worker_of(const ScoreArguments& a, int work) {
  const int64_t active = active_workers(a), all = a.work_start[a.num_tiles];
  return int(((int64_t(work) + 1) * active + all - 1) / all) - 1;
}

__device__ inline int block_scan(int value, int* total) {
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

__device__ inline int4 make_tile(const ScoreArguments& a, int tile) {
  if (tile >= a.sequence_tiles[a.num_sequences + 1]) return make_int4(0, 0, kNoPosition, 0);
  const int sequence = last_at_or_before(a.sequence_tiles, a.num_sequences + 1, tile);
  const int first = (tile - a.sequence_tiles[sequence]) * kTileRows;
  const int rows = rows_of(a, sequence);
  const int length = sequence < a.num_sequences ? a.seq_lens[sequence] : 0;
  const int position = length > 0 ? length * a.num_groups - rows + first : kNoPosition;
  return make_int4(a.query_start[sequence] * a.num_groups + first, min(kTileRows, rows - first),
                   position, sequence);
}

// Cuts every sequence into tiles and counts their pages; rows past the last sequence form one more,
// empty one. Called by a whole thread block; the outputs may lie in its shared memory.
__device__ inline void plan_tiles(const ScoreArguments& a) {
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
  __syncthreads();
}

}  // namespace m3
