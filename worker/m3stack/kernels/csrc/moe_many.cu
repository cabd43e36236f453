// MXFP8 products of many tokens: weights in registers times tokens in shared memory, by warpgroups.
//
// A tile is 128 rows of a weight times up to 256 tokens of one expert. Two warpgroups own 64 rows
// each; a third one's first lane copies the tokens, which both read. Weights come straight from
// memory into the registers that the product reads them from, so a lane's 16 bytes side by side fix
// which of the product's columns they are, and tokens stand in that order (`gather`). Blocks walk
// over tiles for good, and warpgroups drift apart, so one stores while the other multiplies.
#include "moe_weights.cuh"
#include "msa_prefill_hopper.cuh"

namespace m3 {

constexpr int kBlockTokens = 256, kBoxTokens = 64;
constexpr int kChunk = 64;  // columns of a stage
constexpr int kStages = 6;
constexpr int kStageBytes = kBlockTokens * kChunk * 2;
constexpr int kConsumers = 2;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kSharedBlocks = 2;  // neighbouring blocks that read a weight's rows one after another

enum Mode { kUp = 0, kDown = 1 };

struct ManyArgs {
  const void* elements;         // e4m3 [E, rows, width] without NaN codes
  const uint8_t* scales;        // [E, rows, width / 32], 0 to 134
  const void* shared_elements;  // the shared expert's, or null
  const uint8_t* shared_scales;
  const int32_t* experts;       // [blocks], -1 where a block is not used
  const int32_t* firsts;        // [blocks], first sorted row
  const int32_t* counts;        // [blocks], rows
  const int32_t* pairs;         // [num_pairs], pair of a sorted row
  const float* weights;         // [num_pairs], by pair
  __nv_bfloat16* out;           // up: [rows, outputs] sorted and in the order of columns that the
                                // down product reads; down: [rows, outputs] by pair
  float alpha;
  float limit;
  float factor;                 // of the routed experts
  int32_t num_pairs;            // row num_pairs + t is token t's shared one
  int32_t num_tokens;           // of the shared expert; 0 without
  int32_t width;
  int32_t outputs;              // channels: half the rows of an up product
  int32_t max_blocks;           // of the routed experts
};

struct __align__(1024) ManyShared {
  uint8_t tokens[kStages][kStageBytes];
  int rows[kConsumers][kBlockTokens];
  float weights[kConsumers][kBlockTokens];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(ManyShared) + 1024;

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] * b, a in registers, b by descriptor, row-wise
__device__ __forceinline__ void mma_32(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
               "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void mma_64(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <int N>
__device__ __forceinline__ void mma(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
  if constexpr (N == 32) mma_32(d, a, b, accumulate);
  if constexpr (N == 64) mma_64(d, a, b, accumulate);
  if constexpr (N == 128) mma_registers(d, a, b, accumulate);
}

// One block's place among tiles: which rows of the weight, which tokens.
struct Tile {
  int expert;  // -1: the shared one
  int first, count, row_tile;
};

struct Walk {
  int row_tiles, shared_blocks, num_blocks;

  __device__ __forceinline__ Walk(const ManyArgs& a, int tile_rows) {
    row_tiles = (a.outputs + tile_rows - 1) / tile_rows;
    shared_blocks = (a.num_tokens + kBlockTokens - 1) / kBlockTokens;
    num_blocks = shared_blocks + a.max_blocks;
  }

  // false past the last tile
  __device__ __forceinline__ bool find(const ManyArgs& a, int number, Tile& tile) const {
    const int in_group = kSharedBlocks * row_tiles;
    const int first = number / in_group * kSharedBlocks;
    if (first >= num_blocks) return false;
    const int size = min(num_blocks - first, kSharedBlocks), inside = number % in_group;
    // the last group may be smaller than its tile numbers
    if (inside >= size * row_tiles) return false;
    const int block = first + inside % size;
    tile.row_tile = inside / size;
    if (block < shared_blocks) {
      tile.expert = -1;
      tile.first = a.num_pairs + block * kBlockTokens;
      tile.count = min(kBlockTokens, a.num_tokens - block * kBlockTokens);
    } else {
      tile.expert = a.experts[block - shared_blocks];
      tile.first = a.firsts[block - shared_blocks];
      tile.count = tile.expert < 0 ? 0 : a.counts[block - shared_blocks];
      // blocks that are not used come last
      if (tile.expert < 0 && block == first) return false;
    }
    return true;
  }
};

struct Held {
  uint4 low, high;
  uint32_t low_scales, high_scales;
};

struct WeightRows {
  const uint8_t *low, *high, *low_scales, *high_scales;

  __device__ __forceinline__ void load(Held& to, int chunk) const {
    to.low = load_weights(low + chunk * kChunk);
    to.high = load_weights(high + chunk * kChunk);
    to.low_scales = __ldg(reinterpret_cast<const uint16_t*>(low_scales) + chunk);
    to.high_scales = __ldg(reinterpret_cast<const uint16_t*>(high_scales) + chunk);
  }
};

// Two neighbouring bytes of four e4m3 as bf16, see `widened_even`.
__device__ __forceinline__ uint32_t widened(uint32_t four, uint32_t which) {
  const uint32_t spread = __byte_perm(four, 0, which);
  return ((spread >> 4) & 0x07f007f0u) | (spread & 0x80008000u);
}

// The four 64 x 16 left operands of a chunk.
struct Operands {
  uint32_t a[4][4];

  // Keeps the compiler from making an operand between products, which would run them one by one.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
    }
  }

  __device__ __forceinline__ void take(const Held& held) {
    const int shift = 8 * (threadIdx.x % 4 / 2);
    const uint32_t low_factor = factor_of(held.low_scales >> shift & 255);
    const uint32_t high_factor = factor_of(held.high_scales >> shift & 255);
    const uint32_t low[4] = {held.low.x, held.low.y, held.low.z, held.low.w};
    const uint32_t high[4] = {held.high.x, held.high.y, held.high.z, held.high.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      a[k][0] = times(widened(low[k], 0x1404), low_factor);
      a[k][1] = times(widened(high[k], 0x1404), high_factor);
      a[k][2] = times(widened(low[k], 0x3424), low_factor);
      a[k][3] = times(widened(high[k], 0x3424), high_factor);
    }
  }
};

// Orders the compiler's reads of the sums after the wait, without an instruction.
template <int kCount>
__device__ __forceinline__ void settle(float (&sums)[64]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Multiplies a tile's rows with its first N0 and its next N1 tokens.
template <int N0, int N1>
__device__ __forceinline__ void multiply(float (&d0)[64], float (&d1)[64], const WeightRows& rows, int chunks,
                                         ManyShared& shared, Ring<kStages>& ring) {
  // the same for all N: the compiler merges their registers, and more do not fit
  constexpr int kSlots = 4;
  Held held[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (i < chunks) rows.load(held[i], i);
  }
  const bool signals = threadIdx.x % 32 == 0;
  Operands left[2];
  left[0].take(held[0]);
  for (int base = 0; base < chunks; base += kSlots) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int chunk = base + i;
      if (chunk >= chunks) break;
      barrier_wait(&shared.full[ring.stage], ring.parity);
      const uint64_t b = describe_rows(shared_address(shared.tokens[ring.stage]));
      left[i % 2].settle();
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        mma<N0>(d0, left[i % 2].a[k], b + 2 * k, chunk + k > 0);
        if constexpr (N1 > 0) mma<N1>(d1, left[i % 2].a[k], b + 2 * k + (128 * 128 >> 4), chunk + k > 0);
      }
      mma_commit();
      // while these run, the next chunk is made ready; the other warpgroup fills what gap remains
      left[(i + 1) % 2].take(held[(i + 1) % kSlots]);
      mma_wait<0>();
      // the registers of this chunk are free
      if (chunk + kSlots < chunks) rows.load(held[i], chunk + kSlots);
      if (signals) barrier_arrive(&shared.empty[ring.stage]);
      ring.advance();
    }
  }
  settle<N0 / 2>(d0);
  if constexpr (N1 > 0) settle<N1 / 2>(d1);
}

__device__ __forceinline__ float activated(float gate, float up, const ManyArgs& a) {
  // comparisons that keep NaN, as clamp does
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : (up < -a.limit ? -a.limit : up);
  return (up + 1.0f) * gate / (1.0f + __expf(-a.alpha * gate));
}

// Stores what a lane has of N tokens: rows lane / 4 (low) and lane / 4 + 8 (high) of its warp.
template <Mode MODE, int N>
__device__ __forceinline__ void store(const float (&d)[64], const ManyArgs& a, const Tile& tile, int first_token,
                                      int channel, const int* rows, const float* weights) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int token = first_token + 8 * j + lane % 4 * 2;
    if (first_token + 8 * j >= tile.count) break;
    if constexpr (MODE == kUp) {
      const float even = activated(d[4 * j], d[4 * j + 2], a), odd = activated(d[4 * j + 1], d[4 * j + 3], a);
      // neighbours trade, so that each stores two channels of one token
      const bool is_right = lane & 4;
      const float got = __shfl_xor_sync(~0u, is_right ? even : odd, 4);
      const uint32_t two = is_right ? pack_bf16(got, odd) : pack_bf16(even, got);
      const int mine = token + is_right;
      if (mine < tile.count) {
        __nv_bfloat16* row = a.out + static_cast<int64_t>(tile.first + mine) * a.outputs;
        *reinterpret_cast<uint32_t*>(row + (channel & ~1)) = two;
      }
    } else {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (token + side >= tile.count) continue;
        const float weight = weights[token + side];
        __nv_bfloat16* row = a.out + static_cast<int64_t>(rows[token + side]) * a.outputs;
        *reinterpret_cast<uint32_t*>(row + channel) = pack_bf16(d[4 * j + side] * weight, d[4 * j + 2 + side] * weight);
      }
    }
  }
}

// What a lane does for a tile.
struct Work {
  WeightRows rows;
  int chunks, channel;
};

// A function for each number of tokens, sums included: as one variable they would be merged, and spilled.
template <Mode MODE, int N0, int N1>
__device__ __forceinline__ void run(const ManyArgs& a, const Tile& tile, const Work& work,
                                    ManyShared& shared, Ring<kStages>& ring) {
  const int group = threadIdx.x / kWarpgroup - 1;
  float d0[64], d1[64];
  multiply<N0, N1>(d0, d1, work.rows, work.chunks, shared, ring);
  // the table of tokens has been written
  if constexpr (MODE == kDown) warpgroup_sync(1 + group);
  store<MODE, N0>(d0, a, tile, 0, work.channel, shared.rows[group], shared.weights[group]);
  if constexpr (N1 > 0) store<MODE, N1>(d1, a, tile, N0, work.channel, shared.rows[group], shared.weights[group]);
}

// The column of a weight that stands at a place of the tokens' order.
__device__ __forceinline__ int column_at(int place) {
  const int p = place % kChunk, quarter = p % 8 / 2;
  return place - p + quarter * 16 + p / 16 * 4 + p / 8 % 2 * 2 + p % 2;
}

template <Mode MODE>
__device__ __forceinline__ void consume(const ManyArgs& a, ManyShared& shared, const Walk& walk) {
  const int group = threadIdx.x / kWarpgroup - 1, in_group = threadIdx.x % kWarpgroup;
  const int warp = in_group / 32, lane = threadIdx.x % 32;
  Ring<kStages> ring;
  Tile tile;
  for (int number = blockIdx.x; walk.find(a, number, tile); number += gridDim.x) {
    if (tile.count == 0) continue;
    const bool is_shared = tile.expert < 0;
    // up: a lane's gate and up row give the channel that stands at this place of the hidden order;
    // down: two neighbouring channels
    const int place = tile.row_tile * 64 + group * 32 + warp * 8 + lane / 4;
    const int channel = MODE == kUp ? place : tile.row_tile * 128 + group * 64 + warp * 16 + lane / 4 * 2;
    const int64_t base = is_shared ? 0 : static_cast<int64_t>(tile.expert) * (MODE == kUp ? 2 : 1) * a.outputs;
    const int64_t low_row = base + (MODE == kUp ? column_at(place) : channel);
    const int64_t high_row = low_row + (MODE == kUp ? a.outputs : 1);
    const auto* elements = static_cast<const uint8_t*>(is_shared ? a.shared_elements : a.elements);
    const uint8_t* scales = is_shared ? a.shared_scales : a.scales;
    WeightRows rows;
    rows.low = elements + low_row * a.width + lane % 4 * 16;
    rows.high = elements + high_row * a.width + lane % 4 * 16;
    rows.low_scales = scales + low_row * (a.width / kGroup);
    rows.high_scales = scales + high_row * (a.width / kGroup);

    if constexpr (MODE == kDown) {
      // of the tile before, the table has been read
      warpgroup_sync(1 + group);
#pragma unroll
      for (int i = 0; i < kBlockTokens / kWarpgroup; ++i) {
        const int token = in_group + i * kWarpgroup;
        if (token < tile.count) {
          const int row = is_shared ? tile.first + token : a.pairs[tile.first + token];
          shared.rows[group][token] = row;
          shared.weights[group][token] = is_shared ? 1.0f : a.weights[row] * a.factor;
        }
      }
    }
    const Work work{rows, a.width / kChunk, channel};
    if (tile.count <= 32) run<MODE, 32, 0>(a, tile, work, shared, ring);
    else if (tile.count <= 64) run<MODE, 64, 0>(a, tile, work, shared, ring);
    else if (tile.count <= 128) run<MODE, 128, 0>(a, tile, work, shared, ring);
    else if (tile.count <= 192) run<MODE, 128, 64>(a, tile, work, shared, ring);
    else run<MODE, 128, 128>(a, tile, work, shared, ring);
  }
}

// One lane copies the tokens of all tiles.
__device__ __forceinline__ void produce(const CUtensorMap* map, const ManyArgs& a, ManyShared& shared,
                                        const Walk& walk) {
  Ring<kStages> ring;
  Tile tile;
  int filled = 0;
  for (int number = blockIdx.x; walk.find(a, number, tile); number += gridDim.x) {
    if (tile.count == 0) continue;
    const int boxes = (tile.count + kBoxTokens - 1) / kBoxTokens;
    for (int chunk = 0; chunk < a.width / kChunk; ++chunk) {
      if (filled >= kStages) barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      ++filled;
      barrier_expect(&shared.full[ring.stage], boxes * kBoxTokens * kChunk * 2);
      for (int box = 0; box < boxes; ++box) {
        copy_tile_3d(shared.tokens[ring.stage] + box * kBoxTokens * kChunk * 2, map, &shared.full[ring.stage],
                     chunk * kChunk, tile.first + box * kBoxTokens, 0);
      }
      ring.advance();
    }
  }
}

template <Mode MODE>
__global__ void __launch_bounds__(kThreads, 1)
    many_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ ManyArgs a) {
  extern __shared__ uint8_t raw[];
  ManyShared& shared = aligned_shared<ManyShared>(raw);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], kConsumers * kWarpgroup / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Walk walk(a, MODE == kUp ? 64 : 128);
  if (threadIdx.x < kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 0) produce(&map, a, shared, walk);
  } else {
    take_registers<240>();
    consume<MODE>(a, shared, walk);
  }
}

template <Mode MODE>
cudaError_t launch(const CUtensorMap& map, const ManyArgs& a, int processors, cudaStream_t stream) {
  static const cudaError_t allowed = cudaFuncSetAttribute(
      many_kernel<MODE>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (allowed != cudaSuccess) return allowed;
  many_kernel<MODE><<<processors, kThreads, kSharedBytes, stream>>>(map, a);
  return cudaGetLastError();
}

// Tokens of sorted rows, columns in the order of the products: 4-byte words are moved whole.
__global__ void gather_kernel(const uint4* x, const int32_t* pairs, uint4* out, int64_t x_row, int num_pairs,
                              int top_k, int width) {
  const int64_t row = blockIdx.x;
  const int token = row < num_pairs ? pairs[row] / top_k : static_cast<int>(row) - num_pairs;
  constexpr int kVectors = kChunk / 8, kWords = kChunk / 2;
  for (int span = threadIdx.x; span < width / kChunk; span += blockDim.x) {
    uint32_t in[kWords], moved[kWords];
    const uint4* from = x + (token * x_row + static_cast<int64_t>(span) * kChunk) / 8;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 four = __ldg(from + i);
      in[4 * i] = four.x, in[4 * i + 1] = four.y, in[4 * i + 2] = four.z, in[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      // see column_at
      const int quarter = word % 4;
      moved[word] = in[quarter * (kWords / 4) + word / 8 * 2 + word / 4 % 2];
    }
    uint4* to = out + (row * width + static_cast<int64_t>(span) * kChunk) / 8;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      to[i] = make_uint4(moved[4 * i], moved[4 * i + 1], moved[4 * i + 2], moved[4 * i + 3]);
    }
  }
}

}  // namespace m3

// mode: 0 up, 1 down; `map` is a host address of the tokens' tensor map
extern "C" int m3_many(const m3::ManyArgs* a, const void* map, int mode, int processors, cudaStream_t stream) {
  using namespace m3;
  const auto& tokens = *static_cast<const CUtensorMap*>(map);
  if (mode == kUp) return launch<kUp>(tokens, *a, processors, stream);
  if (mode == kDown) return launch<kDown>(tokens, *a, processors, stream);
  return cudaErrorInvalidValue;
}

// bf16 x [tokens, width], dense columns; out [rows, width]
extern "C" int m3_gather(const void* x, const int32_t* pairs, void* out, int64_t x_row, int num_rows, int num_pairs,
                         int top_k, int width, cudaStream_t stream) {
  using namespace m3;
  gather_kernel<<<num_rows, 96, 0, stream>>>(static_cast<const uint4*>(x), pairs, static_cast<uint4*>(out), x_row,
                                             num_pairs, top_k, width);
  return cudaGetLastError();
}
