// A rank's candidates from the lists that prefill scoring leaves of its part of the index keys.
//
// What a candidate is: see msa_candidates.cu.
#include "msa_prefill_score.cuh"

namespace m3 {

struct PieceCandidates {
  ScoreArguments scored;  // of the shortened sequences
  const int* ids;         // [S, ids_pitch], id in the whole sequence; negative where another rank's
  long long* candidates;  // [G, T, K], descending
  int ids_pitch;
};

// Lanes 0-15 hold a descending list, lanes 16-31 another; afterwards lanes 0-15 hold the best 16.
__device__ __forceinline__ unsigned long long best_of_two(unsigned long long key) {
  const int lane = threadIdx.x & 31;
  // with its upper half reversed the whole is bitonic
  key = __shfl_sync(~0u, key, lane < 16 ? lane : 47 - lane);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, key, step);
    if ((key > other) != ((lane & step) == 0)) key = other;
  }
  return key;
}

// A warp a row: the lists of its pieces to one, then ids of the whole sequence.
__global__ void __launch_bounds__(128) candidates_of_pieces(const PieceCandidates p) {
  const ScoreArguments& a = p.scored;
  const int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  const int4 tile = a.tiles[blockIdx.y];
  if (row >= tile.y) return;
  const int start = a.work_start[blockIdx.y], end = a.work_start[blockIdx.y + 1];
  unsigned long long key = 0;
  if (end > start) {
    const int first = worker_of(a, start), last = worker_of(a, end - 1);
    const unsigned long long* lists =
        a.lists + (int64_t(blockIdx.y) * kTileRows + row) * kRanked + (lane & 15);
    for (int worker = first; worker <= last; ++worker) {
      const unsigned long long listed = lists[int64_t(worker) * kTileRows * kRanked];
      key = best_of_two(lane < 16 ? key : listed);
    }
  }
  if (lane >= 16) key = 0;
  if (key != 0) {
    const int id = p.ids[int64_t(tile.w) * p.ids_pitch + int(~uint32_t(key))];
    key = id < 0 ? 0 : (key & ~0xffffffffull) | uint32_t(~id);
  }
  // ids keep the order of entries, so what is left is still descending
  const uint32_t kept = __ballot_sync(~0u, key != 0);
  const int before = __popc(kept & ((1u << lane) - 1)), count = __popc(kept);
  const int place = key != 0 ? before : count + lane - before;
  const int flat = tile.x + row, token = flat / a.num_groups, group = flat % a.num_groups;
  if (place < a.num_blocks)
    p.candidates[(int64_t(group) * a.num_tokens + token) * a.num_blocks + place] =
        static_cast<long long>(key ^ (1ull << 63));
}

}  // namespace m3

// Turns the lists that scoring left into candidates. Returns a cudaError_t.
extern "C" int m3_prefill_candidates(const m3::PieceCandidates* arguments, void* stream_handle) {
  using namespace m3;
  candidates_of_pieces<<<dim3(kTileRows / 4, arguments->scored.num_tiles), 128, 0,
                         static_cast<cudaStream_t>(stream_handle)>>>(*arguments);
  return cudaGetLastError();
}
