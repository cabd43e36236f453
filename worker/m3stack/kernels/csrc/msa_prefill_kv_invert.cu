// Turns "which blocks did a row choose" into "which rows chose a block", in a fixed order.
//
// A bucket is (group, sequence, block). Rows are taken in chunks of 128 that never cross sequences;
// within a chunk a bucket's rows are bits of a 128-bit word in shared memory, so counting and ranking
// need no order among threads. Counts are prefixed over chunks and buckets; the rows of a bucket come
// out ascending. Long buckets are cut into pieces, the work items of the attention.
#include "msa_prefill_kv_major.cuh"

namespace m3 {

// Neighbouring rows of one sequence; the position of the first is -1 where rows have no key.
struct Chunk {
  int sequence, first, rows, position;
};

__device__ Chunk load_chunk(const InvertArguments& v, int index) {
  __shared__ int2 place;
  const int end = v.first_token + v.num_tokens;
  if (threadIdx.x < 32) {
    const int2 found = locate_tile(v.base, index, kChunkRows, v.first_token, end);
    if (threadIdx.x == 0) place = found;
  }
  __syncthreads();
  if (place.x < 0) return Chunk{0, 0, 0, -1};
  const int last = sequence_rows(v.base, place.x).y;
  const int length = place.x < v.base.num_sequences ? v.base.seq_lens[place.x] : 0;
  return Chunk{place.x, place.y, min(kChunkRows, min(last, end) - place.y),
               length > 0 ? length - (last - place.y) : -1};
}

// The block of edge i of a chunk (row i / 16, slot i % 16), or -1. A block after the row counts as
// none: it has no key for the row.
__device__ __forceinline__ int edge_block(const InvertArguments& v, const Chunk& chunk, int group,
                                          int edge) {
  const int slot = edge % kChosen, row = edge / kChosen;
  if (slot >= v.base.num_blocks || chunk.position < 0) return -1;
  const int64_t at = int64_t(group) * v.base.num_tokens + chunk.first + row;
  const int block = v.base.blocks[at * v.base.num_blocks + slot];
  return block <= (chunk.position + row) / kPage ? block : -1;
}

__device__ void mark_edges(const InvertArguments& v, const Chunk& chunk, int group, int window,
                           int width, uint4* words) {
  for (int i = threadIdx.x; i < width; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  for (int edge = threadIdx.x; edge < chunk.rows * kChosen; edge += blockDim.x) {
    const int found = edge_block(v, chunk, group, edge) - window, row = edge / kChosen;
    if (found >= 0 && found < width)
      atomicOr(reinterpret_cast<unsigned*>(words + found) + row / 32, 1u << (row & 31));
  }
  __syncthreads();
}

__device__ __forceinline__ int64_t chunk_counts(const InvertArguments& v, int chunk, int group) {
  return (int64_t(chunk) * v.base.num_groups + group) * v.max_blocks;
}

__global__ void __launch_bounds__(kInvertThreads) count_edges(const InvertArguments v) {
  if (union_arm_chosen(v.base)) return;
  extern __shared__ uint4 words[];
  const int group = blockIdx.y;
  const Chunk chunk = load_chunk(v, blockIdx.x);
  if (chunk.position < 0) return;
  int* counts = v.counts + chunk_counts(v, blockIdx.x, group);
  for (int window = 0; window < v.max_blocks; window += kWindow) {
    const int width = min(kWindow, v.max_blocks - window);
    mark_edges(v, chunk, group, window, width, words);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      const uint4 w = words[i];
      counts[window + i] = __popc(w.x) + __popc(w.y) + __popc(w.z) + __popc(w.w);
    }
    __syncthreads();
  }
}

// First chunk of a sequence and the one after its last; called by a whole warp.
__device__ int2 chunk_range(const InvertArguments& v, int sequence) {
  const int lane = threadIdx.x & 31;
  int before = 0, own = 0;
  for (int base = 0; base <= sequence; base += 32) {
    const int other = base + lane;
    if (other > sequence) continue;
    const int2 rows = sequence_rows(v.base, other);
    const int count = max(0, min(rows.y, v.first_token + v.num_tokens) -
                                 max(rows.x, v.first_token) + kChunkRows - 1) / kChunkRows;
    if (other == sequence) own = count;
    else before += count;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    own += __shfl_xor_sync(~0u, own, step);
  }
  return make_int2(before, before + own);
}

__device__ int2 block_scan_pair(int2 value, int2* total) {
  __shared__ int2 warp_sums[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int2 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(~0u, sum.x, step), y = __shfl_up_sync(~0u, sum.y, step);
    if (lane >= step) sum = make_int2(sum.x + x, sum.y + y);
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before = make_int2(0, 0), all = make_int2(0, 0);
  for (int i = 0; i < (blockDim.x >> 5); ++i) {
    if (i < warp) before = make_int2(before.x + warp_sums[i].x, before.y + warp_sums[i].y);
    all = make_int2(all.x + warp_sums[i].x, all.y + warp_sums[i].y);
  }
  __syncthreads();
  *total = all;
  return make_int2(before.x + sum.x - value.x, before.y + sum.y - value.y);
}

// Prefixes a bucket's counts over chunks, in place, and the buckets' sizes and pieces over a slice of
// 1,024 buckets. Grid: slices of a sequence, sequences, groups.
__global__ void __launch_bounds__(kSlice) scan_buckets(const InvertArguments v) {
  if (union_arm_chosen(v.base)) return;
  __shared__ int2 chunks;
  const int sequence = blockIdx.y, group = blockIdx.z;
  if (threadIdx.x < 32) {
    const int2 range = chunk_range(v, sequence);
    if (threadIdx.x == 0) chunks = v.base.seq_lens[sequence] > 0 ? range : make_int2(0, 0);
  }
  __syncthreads();
  const int block = blockIdx.x * kSlice + threadIdx.x;
  int size = 0;
  if (block < v.max_blocks) {
    for (int chunk = chunks.x; chunk < chunks.y; ++chunk) {
      int& entry = v.counts[chunk_counts(v, chunk, group) + block];
      const int count = entry;
      entry = size;
      size += count;
    }
  }
  const int2 own = make_int2(size, (size + kPieceTokens - 1) / kPieceTokens);
  int2 total;
  const int2 before = block_scan_pair(own, &total);
  const int slice = (group * gridDim.y + sequence) * gridDim.x + blockIdx.x;
  if (block < v.max_blocks)
    v.buckets[(int64_t(group) * gridDim.y + sequence) * v.max_blocks + block] =
        make_int4(before.x, before.y, size, 0);
  if (threadIdx.x == 0) v.slices[slice] = total;
}

// Prefixes the slices; the last entry is all edges and all pieces.
__global__ void __launch_bounds__(1024) scan_slices(const InvertArguments v) {
  if (union_arm_chosen(v.base)) return;
  int2 before = make_int2(0, 0), total;
  for (int base = 0; base < v.num_slices; base += blockDim.x) {
    const int slice = base + threadIdx.x;
    const int2 own = slice < v.num_slices ? v.slices[slice] : make_int2(0, 0);
    const int2 start = block_scan_pair(own, &total);
    if (slice < v.num_slices) v.slices[slice] = make_int2(before.x + start.x, before.y + start.y);
    before = make_int2(before.x + total.x, before.y + total.y);
  }
  if (threadIdx.x == 0) v.slices[v.num_slices] = before;
}

__device__ __forceinline__ int slice_of(const InvertArguments& v, int group, int sequence,
                                        int block) {
  const int per_sequence = (v.max_blocks + kSlice - 1) / kSlice;
  return (group * v.base.num_sequences + sequence) * per_sequence + block / kSlice;
}

// A slot without a block weighs nothing in the sum of its row.
__device__ void mark_absent(const InvertArguments& v, const Chunk& chunk, int group) {
  for (int edge = threadIdx.x; edge < chunk.rows * kChosen; edge += blockDim.x) {
    if (edge_block(v, chunk, group, edge) >= 0) continue;
    const int64_t slot = int64_t(chunk.first - v.first_token) * kChosen + edge;
    float* lse = v.partial_lse + slot * v.base.num_heads + group * kHeads;
    for (int i = 0; i < kHeads; ++i) lse[i] = -INFINITY;
  }
}

// Places every edge: rows below it in its chunk, in earlier chunks and in earlier buckets.
__device__ void place_edges(const InvertArguments& v, int chunk_index, int group, uint4* words) {
  const Chunk chunk = load_chunk(v, chunk_index);
  mark_absent(v, chunk, group);
  if (chunk.position < 0) return;
  const int* counts = v.counts + chunk_counts(v, chunk_index, group);
  const int64_t row_of_buckets =
      (int64_t(group) * v.base.num_sequences + chunk.sequence) * v.max_blocks;
  for (int window = 0; window < v.max_blocks; window += kWindow) {
    const int width = min(kWindow, v.max_blocks - window);
    mark_edges(v, chunk, group, window, width, words);
    for (int edge = threadIdx.x; edge < chunk.rows * kChosen; edge += blockDim.x) {
      const int block = edge_block(v, chunk, group, edge), row = edge / kChosen;
      if (block < window || block >= window + width) continue;
      const auto* word = reinterpret_cast<const unsigned*>(words + (block - window));
      int rank = __popc(word[row / 32] & ((1u << (row & 31)) - 1));
      for (int i = 0; i < row / 32; ++i) rank += __popc(word[i]);
      const int place = v.slices[slice_of(v, group, chunk.sequence, block)].x +
                        v.buckets[row_of_buckets + block].x + counts[block] + rank;
      v.edges[place] = (chunk.first + row) * kChosen + edge % kChosen;
    }
    __syncthreads();
  }
}

__device__ void list_pieces(const InvertArguments& v, int64_t bucket) {
  const int64_t per_group = int64_t(v.base.num_sequences) * v.max_blocks;
  if (bucket >= per_group * v.base.num_groups) return;
  const int group = int(bucket / per_group);
  const int sequence = int(bucket % per_group / v.max_blocks);
  const int block = int(bucket % v.max_blocks);
  const int4 local = v.buckets[bucket];
  if (local.z == 0) return;
  const int2 start = v.slices[slice_of(v, group, sequence, block)];
  const int2 rows = sequence_rows(v.base, sequence);
  const int length = v.base.seq_lens[sequence];
  const int page = v.base.page_table[int64_t(sequence) * v.base.table_pitch + block];
  KeyPiece piece;
  piece.page = page;
  piece.group = group;
  piece.block = block;
  piece.written = min(kPage, length - block * kPage);
  piece.position_offset = length - rows.y;
  piece.unused = 0;
  for (int taken = 0, i = 0; taken < local.z; taken += kPieceTokens, ++i) {
    piece.first_edge = start.x + local.x + taken;
    piece.num_edges = min(kPieceTokens, local.z - taken);
    v.pieces[start.y + local.y + i] = piece;
  }
}

__global__ void __launch_bounds__(kInvertThreads) place_all(const InvertArguments v) {
  if (union_arm_chosen(v.base)) return;
  extern __shared__ uint4 words[];
  const int chunk_groups = v.num_chunks * v.base.num_groups;
  if (blockIdx.x < chunk_groups)
    place_edges(v, blockIdx.x / v.base.num_groups, blockIdx.x % v.base.num_groups, words);
  else
    list_pieces(v, int64_t(blockIdx.x - chunk_groups) * kInvertThreads + threadIdx.x);
}

}  // namespace m3

extern "C" int m3_prefill_invert(const m3::InvertArguments* arguments, void* stream_handle) {
  using namespace m3;
  const InvertArguments& v = *arguments;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int bytes = min(kWindow, v.max_blocks) * int(sizeof(uint4));
  for (const auto kernel : {count_edges, place_all}) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  const int groups = v.base.num_groups, sequences = v.base.num_sequences;
  const int64_t buckets = int64_t(groups) * sequences * v.max_blocks;
  count_edges<<<dim3(v.num_chunks, groups), kInvertThreads, bytes, stream>>>(v);
  scan_buckets<<<dim3((v.max_blocks + kSlice - 1) / kSlice, sequences, groups), kSlice, 0,
                 stream>>>(v);
  scan_slices<<<1, 1024, 0, stream>>>(v);
  const int listing = int((buckets + kInvertThreads - 1) / kInvertThreads);
  place_all<<<v.num_chunks * groups + listing, kInvertThreads, bytes, stream>>>(v);
  return cudaGetLastError();
}
