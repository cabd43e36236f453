// Which blocks the rows of a tile chose together, and which row chose which; counts how far they agree.
#include "msa_prefill_attend.cuh"

namespace m3 {

constexpr int kNothing = 0x7fffffff;

template <int kTokens>
__device__ int4 describe_tile(const AttendArguments& a, int2 place) {
  if (place.x < 0) return make_int4(0, 0, -1, 0);
  const int2 rows = sequence_rows(a, place.x);
  const int length = place.x < a.num_sequences ? a.seq_lens[place.x] : 0;
  const int position = length > 0 ? length - (rows.y - place.y) : -1;
  return make_int4(place.y, min(kTokens, rows.y - place.y), position, length);
}

// One thread a (token, slot). Lists are sorted first, so any order of blocks is accepted.
template <int kTokens>
__global__ void __launch_bounds__(kTokens * kChosen) build_unions(const AttendArguments a) {
  __shared__ int lists[kTokens][kChosen], firsts[kTokens][kChosen + 1];
  __shared__ int4 shared_tile;
  __shared__ int sequence, size, edges;
  const int tile_index = blockIdx.x, group = blockIdx.y;
  if (threadIdx.x < 32) {
    const int2 place = locate_tile(a, tile_index, kTokens, 0, a.num_tokens);
    if (threadIdx.x == 0) {
      shared_tile = describe_tile<kTokens>(a, place);
      sequence = place.x;
      size = edges = 0;
      if (group == 0) a.tiles[tile_index] = shared_tile;
    }
  }
  __syncthreads();
  const int4 tile = shared_tile;
  const int token = threadIdx.x / kChosen, slot = threadIdx.x % kChosen;
  int block = kNothing;
  if (token < tile.y && slot < a.num_blocks && tile.z >= 0) {
    const int64_t row = int64_t(group) * a.num_tokens + tile.x + token;
    const int chosen = a.blocks[row * a.num_blocks + slot];
    // a block after the row has no key for it, and its table entry may be no address
    if (chosen >= 0 && chosen <= (tile.z + token) / kPage) block = chosen;
  }
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kChosen; ++i) {
    const int other = __shfl_sync(~0u, block, i, kChosen);
    rank += other < block || (other == block && i < slot);
  }
  lists[token][rank] = block;
  __syncthreads();
  block = lists[token][slot];
  unsigned members = 0;
  int lower[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    int at = 0;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) at += lists[i][at + step - 1] < block ? step : 0;
    at += lists[i][at] < block;
    lower[i] = at;
    if (at < kChosen && lists[i][at] == block) members |= 1u << i;
  }
  const bool present = block != kNothing;
  const bool first = present && (members & ((1u << token) - 1)) == 0;
  const unsigned half_mask = 0xffffu << (threadIdx.x & 16);
  const unsigned first_bits = (__ballot_sync(~0u, first) & half_mask) >> (threadIdx.x & 16);
  firsts[token][slot + 1] = __popc(first_bits & ((2u << slot) - 1));
  if (slot == 0) firsts[token][0] = 0;
  const unsigned held = __ballot_sync(~0u, present);
  if ((threadIdx.x & 31) == 0) atomicAdd(&edges, __popc(held));
  __syncthreads();
  if (first) {
    int place = 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) place += firsts[i][lower[i]];
    const int64_t list = (int64_t(group) * a.num_tiles + tile_index) * (kTokens * kChosen);
    const int page = a.page_table[int64_t(sequence) * a.table_pitch + block];
    a.unions[list + place] = make_int2(page, block | (members << kMemberShift));
    atomicAdd(&size, 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    a.union_sizes[group * a.num_tiles + tile_index] = size;
    // where nothing is to be decided, the sums over runs are counted at once
    unsigned long long* counters =
        a.arm == kMeasured ? a.selections + 2 * (tile_index % kCounters) : a.totals;
    atomicAdd(&counters[0], static_cast<unsigned long long>(size));
    atomicAdd(&counters[1], static_cast<unsigned long long>(edges));
  }
}

}  // namespace m3

// Builds the unions of all tiles and counts what they agree on.
extern "C" int m3_prefill_build_unions(const m3::AttendArguments* arguments,
                                       void* stream_handle) {
  using namespace m3;
  const AttendArguments& a = *arguments;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (a.arm == kMeasured) {
    const cudaError_t error =
        cudaMemsetAsync(a.selections, 0, kCounters * 2 * sizeof(*a.selections), stream);
    if (error != cudaSuccess) return error;
  }
  const auto kernel = a.tile_tokens == 8 ? build_unions<8> : build_unions<4>;
  void* launched[] = {const_cast<AttendArguments*>(&a)};
  return launch_plain(reinterpret_cast<const void*>(kernel), dim3(a.num_tiles, a.num_groups),
                      a.tile_tokens * kChosen, 0, launched, stream);
}
