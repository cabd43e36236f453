// Prefill attention by query tiles over bf16 pages, see `msa_prefill_union.cuh`: the copy engine
// fills the rings.
#include <cstring>

#include "msa_prefill_union.cuh"

namespace m3 {

struct NoFeed {};
template <int kWarpgroups>
using PlainForm = UnionForm<kWarpgroups, 1, 3, 1, Values::kBf16, NoFeed>;

// Runs in one warp: copies the pages of every union, keys or values, and the queries with the keys.
template <typename F, bool kKeys>
__device__ void copy_union_pages(const AttendArguments& a, const CUtensorMap* pages,
                                 const CUtensorMap* queries, UnionShared<F>& shared) {
  const int lane = threadIdx.x & 31;
  Ring<F::kStages> ring;
  uint32_t query_parity = 1;
  for (int index = blockIdx.x; index < a.num_tiles * a.num_groups; index += gridDim.x) {
    const UnionItem item = union_item<F>(a, index);
    if (item.size == 0) continue;
    if (kKeys && lane == 0) copy_queries<F>(a, item, queries, shared, query_parity);
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

template <typename F>
__global__ void __launch_bounds__(F::kThreads, 1)
    attend_unions(const __grid_constant__ UnionLaunch with) {
  const AttendArguments& a = with.a;
  if (!takes_unions(a)) return;
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = aligned_shared<UnionShared<F>>(raw);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x < 32) copy_union_pages<F, true>(a, &with.keys, &with.queries, shared);
    else if (threadIdx.x < 64) copy_union_pages<F, false>(a, &with.values, nullptr, shared);
  } else {
    take_registers<240>();
    attend_tiles<F>(a, shared);
  }
}

template <int kWarpgroups>
cudaError_t launch_plain_union(const UnionLaunch& with, int workers, cudaStream_t stream) {
  using F = PlainForm<kWarpgroups>;
  return launch_union<UnionShared<F>>(attend_unions<F>, with, F::kThreads, workers, stream);
}

}  // namespace m3

// `maps`: queries [T, H, D] in boxes of 64 x 16 x tile, keys and values [P, G, 128, D] in boxes of
// 64 x 128 x 1 x 1, encoded.
extern "C" int m3_prefill_attend_unions(const m3::AttendArguments* arguments, const void* maps,
                                        int workers, void* stream_handle) {
  m3::UnionLaunch with;
  with.a = *arguments;
  std::memcpy(&with.queries, maps, 3 * sizeof(CUtensorMap));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  switch (arguments->tile_tokens) {
    case 4: return m3::launch_plain_union<1>(with, workers, stream);
    case 8: return m3::launch_plain_union<2>(with, workers, stream);
    default: return cudaErrorInvalidValue;
  }
}
