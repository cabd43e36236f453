// What the two halves of the KV-block-major arm share: the inversion's arguments and work items.
#pragma once

#include "msa_prefill_attend.cuh"

namespace m3 {

constexpr int kChunkRows = 128;    // rows whose choices are counted together
constexpr int kWindow = 8192;      // blocks whose bit words fit into shared memory
constexpr int kSlice = 1024;       // buckets scanned by one thread block
constexpr int kInvertThreads = 512;
constexpr int kPieceTokens = 64;   // most rows of one work item

// One block of keys and some of the rows that chose it.
struct alignas(16) KeyPiece {
  int page, group, block, written;
  int first_edge, num_edges, position_offset, unused;  // position of row t: t + offset
};

struct InvertArguments {
  AttendArguments base;
  int* counts;           // [chunks, G, J]
  int4* buckets;         // [G, S, J]: first edge and piece inside the slice, edges
  int2* slices;          // [slices + 1]: first edge and piece
  int* edges;            // [tokens * G * 16]: row * 16 + slot, ascending inside a bucket
  KeyPiece* pieces;
  __nv_bfloat16* partial;  // [tokens, 16, H, D]
  float* partial_lse;      // [tokens, 16, H], base 2
  int first_token, num_tokens;  // the rows of the step treated here
  int max_blocks, num_chunks, num_slices;
};

}  // namespace m3
