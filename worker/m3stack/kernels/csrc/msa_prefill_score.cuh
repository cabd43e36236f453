// What planning, scoring and merging share: arguments, tiles of rows, and who owns which pages.
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

}  // namespace m3
