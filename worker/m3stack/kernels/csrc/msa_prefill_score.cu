// Prefill index scoring: largest q.k of every 128-token page, and a running exact top 16 per row.
//
// Rows are (token, group) pairs in memory order, 256 a tile, so one copied page serves all groups
// and L2 is read once for 256 rows. The work, tiles x pages, is cut evenly over the SMs; a tile cut
// in several places leaves one sorted list of 16 keys per row and piece, merged afterwards. Page
// scores never reach memory. Ranked pages lie below a row's local blocks, hence are full and wholly
// visible: no mask is needed inside a page.
#include "msa_prefill_score.cuh"

namespace m3 {

constexpr int kScoreStages = 5;
constexpr int kScoreThreads = 3 * kWarpgroup;
constexpr int kListPitch = kRanked + 2;  // 144 bytes: spreads rows over the banks
constexpr uint32_t kOrderedMinusInfinity = 0x007fffffu;

// One tile's pages as one worker sees them.
struct Piece {
  int4 tile;
  int index, first_page, last_page, next_work;
};

__device__ __forceinline__ Piece piece_at(const ScoreArguments& a, int work, int work_end) {
  Piece piece;
  piece.index = last_at_or_before(a.work_start, a.num_tiles, work);
  piece.tile = a.tiles[piece.index];
  const int start = a.work_start[piece.index];
  piece.next_work = min(work_end, a.work_start[piece.index + 1]);
  piece.first_page = work - start;
  piece.last_page = piece.next_work - start;
  return piece;
}

struct ScoreShared {
  alignas(1024) uint8_t keys[kScoreStages][kPageBytes];
  alignas(16) unsigned long long lists[kTileRows][kListPitch];
  uint64_t full[kScoreStages], empty[kScoreStages];
  alignas(16) int4 tiles[kSmallTiles];
  int work_start[kSmallTiles + 1], sequence_tiles[kSmallTiles + 2];
};

// The arguments with this worker's own plan in them, which the first one leaves for the merge.
__device__ __forceinline__ ScoreArguments planned(const ScoreArguments& a, ScoreShared& shared) {
  ScoreArguments own = a;
  own.tiles = shared.tiles;
  own.work_start = shared.work_start;
  own.sequence_tiles = shared.sequence_tiles;
  plan_tiles(own);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i <= a.num_tiles; i += blockDim.x) {
      a.work_start[i] = own.work_start[i];
      if (i < a.num_tiles) a.tiles[i] = own.tiles[i];
    }
  }
  return own;
}

__device__ void copy_pages(const ScoreArguments& a, const CUtensorMap* map, ScoreShared& shared) {
  const int lane = threadIdx.x & 31;
  Ring<kScoreStages> ring;
  const int end = worker_start(a, blockIdx.x + 1);
  for (int work = worker_start(a, blockIdx.x); work < end;) {
    const Piece piece = piece_at(a, work, end);
    const int* table = a.page_table + int64_t(piece.tile.w) * a.table_pitch;
    for (int base = piece.first_page; base < piece.last_page; base += 32) {
      const int mine = table[min(base + lane, piece.last_page - 1)];
      for (int i = 0; i < min(32, piece.last_page - base); ++i) {
        const int page = __shfl_sync(~0u, mine, i);
        if (lane == 0) {
          barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
          barrier_expect(&shared.full[ring.stage], kPageBytes);
          uint8_t* target = shared.keys[ring.stage];
          copy_tile_3d(target, map, &shared.full[ring.stage], 0, 0, page);
          copy_tile_3d(target + kHalfBytes, map, &shared.full[ring.stage], 64, 0, page);
        }
        ring.advance();
      }
    }
    work = piece.next_work;
  }
}

// Row r of the tile as MMA fragments; rows past the tile are zero.
__device__ __forceinline__ void load_row(const ScoreArguments& a, const int4& tile, int row,
                                         uint32_t* fragment) {
  const bool present = row < tile.y;
  const auto* source = reinterpret_cast<const uint32_t*>(
      a.index_q + (int64_t(tile.x) + (present ? row : 0)) * kDim);
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    fragment[4 * step] = present ? source[8 * step + quad] : 0;
    fragment[4 * step + 2] = present ? source[8 * step + 4 + quad] : 0;
  }
}

__device__ __forceinline__ void score_page(float (&scores)[64], const uint32_t (&rows)[32],
                                           const uint8_t* page) {
  const uint64_t low = describe_rows(shared_address(page));
  const uint64_t high = describe_rows(shared_address(page + kHalfBytes));
  mma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    mma_registers(scores, rows + 4 * step, (step < 4 ? low : high) + 2 * (step & 3), step);
  mma_commit();
}

// Largest score of the page for rows r and r + 8, the same in the four lanes that share them.
__device__ __forceinline__ float2 page_maxima(const float (&scores)[64]) {
  float low = scores[0], high = scores[2];
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    low = max_or_nan(low, i == 0 ? scores[1] : max_or_nan(scores[i], scores[i + 1]));
    high = max_or_nan(high, i == 0 ? scores[3] : max_or_nan(scores[i + 2], scores[i + 3]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    low = max_or_nan(low, __shfl_xor_sync(~0u, low, step));
    high = max_or_nan(high, __shfl_xor_sync(~0u, high, step));
  }
  return make_float2(low, high);
}

// Unsigned order equals score order; NaN stands with minus infinity, -0 with +0.
__device__ __forceinline__ uint32_t ordered(float score) {
  if (score != score) return kOrderedMinusInfinity;
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
}

// What a lane keeps of one row: its quarter of the sorted list, the 16th score, the page limit.
struct RankedRow {
  unsigned long long* quarter;
  uint32_t cut;
  int limit;
};

__device__ __forceinline__ void rank_page(RankedRow& row, float score, int page) {
  const uint32_t order = ordered(score);
  const bool enters = page < row.limit && order > row.cut;
  if (!__any_sync(~0u, enters)) return;
  using Key = unsigned long long;
  const Key key = enters ? (Key(order) << 32) | uint32_t(~page) : 0;
  const ulonglong2 front = *reinterpret_cast<ulonglong2*>(row.quarter);
  const ulonglong2 back = *reinterpret_cast<ulonglong2*>(row.quarter + 2);
  const Key before = __shfl_up_sync(~0u, back.y, 1, 4);
  // insertion into a descending list: an entry stays, takes the key, or takes its left neighbour
  const bool first = (threadIdx.x & 3) == 0;
  const Key e0 = key > front.x ? (!first && key > before ? before : key) : front.x;
  const Key e1 = key > front.y ? (key > front.x ? front.x : key) : front.y;
  const Key e2 = key > back.x ? (key > front.y ? front.y : key) : back.x;
  const Key e3 = key > back.y ? (key > back.x ? back.x : key) : back.y;
  *reinterpret_cast<ulonglong2*>(row.quarter) = make_ulonglong2(e0, e1);
  *reinterpret_cast<ulonglong2*>(row.quarter + 2) = make_ulonglong2(e2, e3);
  row.cut = __shfl_sync(~0u, uint32_t(e3 >> 32), 3, 4);
}

__device__ __forceinline__ void start_row(const ScoreArguments& a, const int4& tile, int index,
                                          ScoreShared& shared, RankedRow& row) {
  row.quarter = &shared.lists[index][4 * (threadIdx.x & 3)];
  row.cut = 0;
  row.limit = index < tile.y ? ranked_pages((tile.z + index) / a.num_groups, a.num_local) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) row.quarter[i] = 0;
}

__device__ __forceinline__ void store_row(const RankedRow& row, unsigned long long* list) {
  auto* target = reinterpret_cast<ulonglong2*>(list + 4 * (threadIdx.x & 3));
  target[0] = *reinterpret_cast<ulonglong2*>(row.quarter);
  target[1] = *reinterpret_cast<ulonglong2*>(row.quarter + 2);
}

__device__ void score_piece(const ScoreArguments& a, const Piece& piece, ScoreShared& shared,
                            Ring<kScoreStages>& ring) {
  const int lane = threadIdx.x & 31;
  // two blocks of 64 rows a warpgroup; a thread holds rows r and r + 8 of each
  const int row = (threadIdx.x / kWarpgroup - 1) * 128 + ((threadIdx.x >> 5) & 3) * 16 + lane / 4;
  uint32_t queries[2][32];
  RankedRow ranked[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int index = row + (i >> 1) * 64 + (i & 1) * 8;
    load_row(a, piece.tile, index, queries[i >> 1] + (i & 1));
    start_row(a, piece.tile, index, shared, ranked[i]);
  }
  float first[64], second[64];
  // one block of rows multiplies while the other's maxima are taken and ranked; what this
  // warpgroup leaves idle at the end of a page, the other fills
  for (int page = piece.first_page; page < piece.last_page; ++page) {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    score_page(first, queries[0], shared.keys[ring.stage]);
    score_page(second, queries[1], shared.keys[ring.stage]);
    mma_wait<1>();
    mma_settle(first);
    const float2 upper = page_maxima(first);
    rank_page(ranked[0], upper.x, page);
    rank_page(ranked[1], upper.y, page);
    mma_wait<0>();
    mma_settle(second);
    if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
    ring.advance();
    const float2 lower = page_maxima(second);
    rank_page(ranked[2], lower.x, page);
    rank_page(ranked[3], lower.y, page);
  }
  unsigned long long* lists =
      a.lists + (int64_t(piece.index) + blockIdx.x) * kTileRows * kRanked;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_row(ranked[i], lists + (row + (i >> 1) * 64 + (i & 1) * 8) * kRanked);
}

__device__ __forceinline__ void run_roles(const ScoreArguments& a, const CUtensorMap* keys,
                                          ScoreShared& shared) {
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x < 32) copy_pages(a, keys, shared);
  } else {
    take_registers<240>();
    Ring<kScoreStages> ring;
    const int end = worker_start(a, blockIdx.x + 1);
    for (int work = worker_start(a, blockIdx.x); work < end;) {
      const Piece piece = piece_at(a, work, end);
      score_piece(a, piece, shared, ring);
      work = piece.next_work;
    }
  }
}

// Copied arguments cost the loop over pages registers and time, so large steps keep theirs constant.
template <bool kSmall>
__global__ void __launch_bounds__(kScoreThreads, 1)
    score_tiles(const ScoreArguments arguments, const __grid_constant__ CUtensorMap keys) {
  extern __shared__ uint8_t raw[];
  auto& shared = aligned_shared<ScoreShared>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kScoreStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], 8);
    }
    barrier_init_fence();
    prefetch_map(&keys);
  }
  __syncthreads();
  if constexpr (kSmall) run_roles(planned(arguments, shared), &keys, shared);
  else run_roles(arguments, &keys, shared);
}

}  // namespace m3

// Scores every page of every tile; `keys` is an encoded map of [P, 128, 128] bf16 with boxes of
// 64 x 128 x 1. Returns a cudaError_t.
extern "C" int m3_prefill_score(const m3::ScoreArguments* arguments, const void* keys,
                                void* stream_handle) {
  using namespace m3;
  const int bytes = sizeof(ScoreShared) + 1024;
  const auto kernel = small_step(*arguments) ? score_tiles<true> : score_tiles<false>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<arguments->num_workers, kScoreThreads, bytes,
           static_cast<cudaStream_t>(stream_handle)>>>(*arguments,
                                                       *static_cast<const CUtensorMap*>(keys));
  return cudaGetLastError();
}
