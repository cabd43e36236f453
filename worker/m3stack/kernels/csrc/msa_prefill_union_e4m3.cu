// Prefill attention by query tiles over e4m3 pages, see `msa_prefill_union.cuh`: the copy engine brings
// a page as it is stored, warps beside those that multiply widen it on its way into the rings.
//
// So a page is half the bytes of a bf16 one, and nothing is written back. It is widened to f16, which
// takes a fifth of the instructions that bf16 would; scales are applied to scores and sums, in fp32.
#include <cstring>

#include "msa_prefill_union.cuh"

namespace m3 {

constexpr int kCodedStages = 2, kWideStages = 2;
constexpr int kCodedBytes = kPage * kDim;

// full: a page has come; empty: all warps of its side have read it
struct CodedFeed {
  uint64_t key_full[kCodedStages], value_full[kCodedStages];
  uint64_t key_empty[kCodedStages], value_empty[kCodedStages];
  float2 scales[kWideStages];  // of keys and values, a stage of keys
};

// three warpgroups; those that do not multiply are half for keys and half for values
template <int kWarpgroups>
using CodedForm = UnionForm<kWarpgroups, 3 - kWarpgroups, kWideStages,
                            2 * (3 - kWarpgroups), Values::kF16, CodedFeed>;

template <typename F>
struct CodedShared {
  alignas(1024) uint8_t keys[kCodedStages][kCodedBytes];
  uint8_t values[kCodedStages][kCodedBytes];
  UnionShared<F> rings;
};

struct CodedLaunch {
  UnionLaunch with;
  const float* key_scales;  // [P, G]; null where all are 1
  const float* value_scales;
};

// A warp's way through the pages of all unions of a block.
template <typename F>
struct PageWalk {
  const AttendArguments& a;
  int index, at = 0, mine = 0;
  UnionItem item;

  __device__ __forceinline__ explicit PageWalk(const AttendArguments& a_)
      : a(a_), index(int(blockIdx.x) - int(gridDim.x)) {
    item.size = 0;
  }

  // False past the last page; else `page` is the next one.
  __device__ __forceinline__ bool advance(int& page) {
    while (at >= item.size) {
      index += gridDim.x;
      if (index >= a.num_tiles * a.num_groups) return false;
      item = union_item<F>(a, index);
      at = 0;
    }
    if (at % 32 == 0) mine = item.entries[min(at + int(threadIdx.x & 31), item.size - 1)].x;
    page = __shfl_sync(~0u, mine, at % 32);
    ++at;
    return true;
  }
};

// Widens this warp's part of a page: a lane takes 16 bytes of a row, eight lanes two rows whose numbers
// differ by 5 in their last three bits, so that neither loads nor stores meet in a bank.
template <int kWarps>
__device__ __forceinline__ void widen_page(const uint8_t* coded, uint8_t* wide, int warp) {
  const int lane = threadIdx.x & 31, quarter = lane / 8, column = lane % 4, half = quarter & 1;
  const int pair = 2 * warp + quarter / 2;
  const int row = pair / 4 * 8 + ((pair & 3) ^ (lane & 4 ? 5 : 0)), turn = row & 7;
  const uint8_t* from = coded + row * 128 + ((4 * half + column) ^ turn) * 16;
  uint8_t* to = wide + half * kHalfBytes + row * 128;
  const int first = ((2 * column) ^ turn) * 16, second = ((2 * column + 1) ^ turn) * 16;
  constexpr int kStep = kWarps / 2 * 1024;  // rows of all warps
  // as many loads in flight as there are registers for
#pragma unroll 2
  for (int offset = 0; offset < kCodedBytes; offset += kStep) {
    const uint4 x = *reinterpret_cast<const uint4*>(from + offset);
    const uint2 a = widen_e4m3(x.x), b = widen_e4m3(x.y), c = widen_e4m3(x.z), d = widen_e4m3(x.w);
    *reinterpret_cast<uint4*>(to + offset + first) = make_uint4(a.x, a.y, b.x, b.y);
    *reinterpret_cast<uint4*>(to + offset + second) = make_uint4(c.x, c.y, d.x, d.y);
  }
}

// Runs in the warps of one side: brings and widens the pages of every union, keys or values. The first
// warp asks for pages ahead, and with the keys for the queries.
template <typename F, bool kKeys>
__device__ void widen_union_pages(const CodedLaunch& launch, CodedShared<F>& shared, int warp) {
  const AttendArguments& a = launch.with.a;
  UnionShared<F>& rings = shared.rings;
  const CUtensorMap* pages = kKeys ? &launch.with.keys : &launch.with.values;
  uint64_t* coded_full = kKeys ? rings.feed.key_full : rings.feed.value_full;
  uint64_t* coded_empty = kKeys ? rings.feed.key_empty : rings.feed.value_empty;
  uint64_t* full = kKeys ? rings.key_full : rings.value_full;
  uint64_t* empty = kKeys ? rings.key_empty : rings.value_empty;
  const bool is_first = warp == 0, is_lane_0 = (threadIdx.x & 31) == 0;
  PageWalk<F> now(a), ahead(a);
  Ring<kCodedStages> asked, coded;
  Ring<F::kStages> ring;
  uint32_t query_parity = 1;
  const auto ask = [&] {
    int page;
    if (!ahead.advance(page)) return;
    if (is_lane_0) {
      barrier_wait(&coded_empty[asked.stage], asked.parity ^ 1);
      barrier_expect(&coded_full[asked.stage], kCodedBytes);
      copy_tile_4d(kKeys ? shared.keys[asked.stage] : shared.values[asked.stage], pages,
                   &coded_full[asked.stage], 0, 0, ahead.item.group, page);
    }
    __syncwarp();
    asked.advance();
  };
  if (is_first) {
    for (int i = 0; i < kCodedStages; ++i) ask();
  }
  int page;
  while (now.advance(page)) {
    const int64_t place = int64_t(page) * a.num_groups + now.item.group;
    barrier_wait(&coded_full[coded.stage], coded.parity);
    barrier_wait(&empty[ring.stage], ring.parity ^ 1);
    widen_page<F::kFillers>(kKeys ? shared.keys[coded.stage] : shared.values[coded.stage],
                            kKeys ? rings.keys[ring.stage] : rings.values[ring.stage], warp);
    if (kKeys && is_first && is_lane_0) {
      rings.feed.scales[ring.stage] =
          make_float2(launch.key_scales ? launch.key_scales[place] : 1,
                      launch.value_scales ? launch.value_scales[place] : 1);
    }
    // what was written here is read by products
    publish_shared_writes();
    __syncwarp();
    if (is_lane_0) {
      barrier_arrive(&full[ring.stage]);
      barrier_arrive(&coded_empty[coded.stage]);
    }
    if (is_first) {
      ask();
      // after the first page, not before it: readers of the tile before may still be busy
      if (kKeys && now.at == 1) {
        if (is_lane_0) copy_queries<F>(a, now.item, &launch.with.queries, rings, query_parity);
        __syncwarp();
        query_parity ^= 1;
      }
    }
    ring.advance();
    coded.advance();
  }
}

template <typename F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attend_coded_unions(const __grid_constant__ CodedLaunch launch) {
  const AttendArguments& a = launch.with.a;
  if (!takes_unions(a)) return;
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = aligned_shared<CodedShared<F>>(raw);
  if (threadIdx.x == 0) {
    init_barriers(shared.rings);
    for (int i = 0; i < kCodedStages; ++i) {
      barrier_init(&shared.rings.feed.key_full[i], 1);
      barrier_init(&shared.rings.feed.value_full[i], 1);
      barrier_init(&shared.rings.feed.key_empty[i], F::kFillers);
      barrier_init(&shared.rings.feed.value_empty[i], F::kFillers);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < F::kFeedWarpgroups * kWarpgroup) {
    give_registers<F::kWarpgroups == 2 ? 56 : 128>();
    const int warp = threadIdx.x / 32;
    if (warp < F::kFillers) widen_union_pages<F, true>(launch, shared, warp);
    else widen_union_pages<F, false>(launch, shared, warp - F::kFillers);
  } else {
    take_registers<F::kWarpgroups == 2 ? 224 : 240>();
    attend_tiles<F>(a, shared.rings);
  }
}

template <int kWarpgroups>
cudaError_t launch_coded_union(const CodedLaunch& launch, int workers, cudaStream_t stream) {
  using F = CodedForm<kWarpgroups>;
  return launch_union<CodedShared<F>>(attend_coded_unions<F>, launch, F::kThreads, workers, stream);
}

}  // namespace m3

// `maps`: queries bf16 [T, H, D] in boxes of 64 x 16 x tile, keys and values e4m3 [P, G, 128, D] in
// boxes of 128 x 128 x 1 x 1, encoded; scales fp32 [P, G], null where all are 1.
extern "C" int m3_prefill_attend_coded_unions(const m3::AttendArguments* arguments, const void* maps,
                                              const float* key_scales, const float* value_scales,
                                              int workers, void* stream_handle) {
  m3::CodedLaunch launch;
  launch.with.a = *arguments;
  std::memcpy(&launch.with.queries, maps, 3 * sizeof(CUtensorMap));
  launch.key_scales = key_scales;
  launch.value_scales = value_scales;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (arguments->tile_tokens) {
    case 4: return m3::launch_coded_union<1>(launch, workers, stream);
    case 8: return m3::launch_coded_union<2>(launch, workers, stream);
    default: return cudaErrorInvalidValue;
  }
}
