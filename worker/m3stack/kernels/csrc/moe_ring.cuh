// Expert products by warpgroups: weights and sorted tokens come through a ring in shared memory.
//
// A tile is 128 rows of a weight times up to `kMost` tokens of one expert. A warp copies both for all
// tiles of its block, ahead of two warpgroups that own 64 rows each. Weights are the left operand, so
// that a product is as wide as an expert has tokens: bf16 ones are multiplied where they stand, MXFP8
// ones are decoded into registers. A lane takes 16 bytes that stand side by side, which fixes which of
// the product's columns they are; tokens and hidden rows stand in that order (`column_at`).
// Of the up product, rows of gates and ups of the same channels fall to the same lane.
#pragma once
#include "moe_products.cuh"
#include "moe_weights.cuh"

namespace m3 {

constexpr int kChunk = 64;      // columns of tokens side by side
constexpr int kTileRows = 128;  // of a weight
constexpr int kConsumers = 2;
constexpr int kRingThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kNeighbours = 4;  // blocks that read a weight's rows one after another
constexpr int kMostShared = 225 * 1024;  // of a processor

enum Mode { kUp = 0, kDown = 1 };

struct RingArgs {
    const uint8_t* scales;  // [E, rows, width / 32], 0 to 134; null for bf16
    const uint8_t* own_scales;
    const int32_t* experts;     // [blocks], -1 where a block is not used; these come last
    const int32_t* firsts;      // [blocks], first sorted row
    const int32_t* counts;      // [blocks], rows
    const int32_t* pairs;       // [num_pairs], pair of a sorted row
    const float* pair_weights;  // [num_pairs], by pair
    __nv_bfloat16* out;         // up: [rows, outputs] sorted, MXFP8 in `column_at`'s order; down: by pair
    float alpha;
    float limit;
    float factor;               // of the routed experts
    int32_t num_pairs;          // row num_pairs + t is token t's of the shared expert
    int32_t num_tokens;         // of the shared expert; 0 without
    int32_t width;              // of a weight row
    int32_t outputs;            // channels: half the rows of an up product
    int32_t max_blocks;         // of the routed experts
    int32_t own_block;          // tokens of a block of the shared expert
    int32_t box_tokens;         // of one copy; all copies of a tile stay within its `kMost`
};

struct RingLaunch {
    CUtensorMap tokens, own_tokens, weights, own_weights;
    RingArgs a;
};

template <bool MXFP8, int MOST, int CLUSTER, Mode MODE>
struct Form {
    static constexpr bool kCoded = MXFP8;
    static constexpr int kMost = MOST, kCluster = CLUSTER;
    static constexpr Mode kMode = MODE;
    // rows of 128 bytes where there is room: the copy engine takes as long for shorter ones
    static constexpr bool kIsWide = MXFP8 && MOST <= 64;
    static constexpr int kColumns = kIsWide ? 2 * kChunk : kChunk;  // of a stage
    static constexpr int kWeightBytes = kTileRows * kColumns * (MXFP8 ? 1 : 2);
    static constexpr int kTokenBytes = MOST * kChunk * 2;  // of 64 columns
    static constexpr int kStageBytes = kWeightBytes + kColumns / kChunk * kTokenBytes;
    // where few tokens leave registers free, a second block decodes while the first waits
    static constexpr int kBlocks = MOST <= 32 ? 2 : 1;  // of a processor
    static constexpr int kStages = (kMostShared / kBlocks - 2 * kConsumers * 4 * MOST) / kStageBytes;
    static constexpr int kTileChannels = MODE == kUp ? 64 : 128;
};

template <typename F>
struct __align__(1024) RingShared {
    uint8_t stages[F::kStages][F::kStageBytes];
    int rows[kConsumers][F::kMost];
    float weights[kConsumers][F::kMost];
    uint64_t full[F::kStages], empty[F::kStages];
};

// One block's place among tiles: which rows of the weight, which tokens.
struct Tile {
    int expert;       // -1: the shared one
    int first_token;  // in its map of tokens
    int first, count; // rows of the output, up; sorted rows, down
    int row_tile;
};

template <typename F>
struct Walk {
    int row_tiles, shared_blocks, num_blocks;

    __device__ __forceinline__ explicit Walk(const RingArgs& a) {
        row_tiles = (a.outputs / F::kTileChannels + F::kCluster - 1) / F::kCluster;
        shared_blocks = a.num_tokens == 0 ? 0 : (a.num_tokens + a.own_block - 1) / a.own_block;
        num_blocks = shared_blocks + a.max_blocks;
    }

    // false past the last tile; blocks of a cluster get neighbouring rows of the same tokens
    __device__ __forceinline__ bool find(const RingArgs& a, int number, int rank, Tile& tile) const {
        const int in_group = kNeighbours * row_tiles;
        const int first = number / in_group * kNeighbours;
        if (first >= num_blocks) return false;
        const int size = min(num_blocks - first, kNeighbours), inside = number % in_group;
        // the last group may be smaller than its tile numbers
        if (inside >= size * row_tiles) return false;
        const int block = first + inside % size;
        tile.row_tile = inside / size * F::kCluster + rank;
        if (block < shared_blocks) {
            tile.expert = -1;
            tile.first_token = block * a.own_block;
            tile.first = a.num_pairs + tile.first_token;
            tile.count = min(a.own_block, a.num_tokens - tile.first_token);
        } else {
            tile.expert = a.experts[block - shared_blocks];
            // blocks that are not used come last
            if (tile.expert < 0 && block == first) return false;
            tile.first = tile.first_token = a.firsts[block - shared_blocks];
            tile.count = tile.expert < 0 ? 0 : a.counts[block - shared_blocks];
        }
        return true;
    }
};

// The column of a weight that stands at a place of the order in which MXFP8 is decoded.
__device__ __forceinline__ int column_at(int place) {
    const int p = place % kChunk;
    return place - p + p % 8 / 2 * 16 + p / 16 * 4 + p % 2 * 2 + p / 8 % 2;
}

// ---- the copying lane ----
// What is copied for the stages of a tile.
template <typename F>
struct Copies {
    const CUtensorMap *weights, *tokens;
    int first_rows, second_rows;  // coordinates of a weight's groups of rows
    int first_token, boxes, box_tokens;

    __device__ __forceinline__ Copies(const RingLaunch& launch, const Tile& tile, int rank) {
        const bool is_own = tile.expert < 0;
        weights = is_own ? &launch.own_weights : &launch.weights;
        tokens = is_own ? &launch.own_tokens : &launch.tokens;
        const int expert = is_own ? 0 : tile.expert, outputs = launch.a.outputs;
        if constexpr (F::kCoded) {
            const int rows = outputs * (F::kMode == kUp ? 2 : 1);
            first_rows = (expert * rows + tile.row_tile * F::kTileChannels) / 8;
            second_rows = first_rows + (F::kMode == kUp ? outputs / 8 : 8);
        } else {
            first_rows = tile.row_tile * 8;
            second_rows = expert;
        }
        first_token = tile.first_token;
        // each block of a cluster copies one at least: what it waits for then holds back the others too,
        // whose warps would else come a second time before its own have come once
        box_tokens = launch.a.box_tokens;
        boxes = max((tile.count + box_tokens - 1) / box_tokens, F::kCluster);
    }

    __device__ __forceinline__ void copy_weights(RingShared<F>& shared, int stage, int column) const {
        uint64_t* full = &shared.full[stage];
        barrier_arrive_expect(full, F::kWeightBytes + boxes * box_tokens * F::kColumns * 2);
        uint8_t* to = shared.stages[stage];
        if constexpr (F::kIsWide) {
            copy_rows(to, weights, full, column, 0, first_rows);
            copy_rows(to + F::kWeightBytes / 2, weights, full, column, 0, second_rows);
        } else if constexpr (F::kCoded) {
            copy_rows(to, weights, full, column, first_rows, 0);
            copy_rows(to + F::kWeightBytes / 2, weights, full, column, second_rows, 0);
        } else {
            copy_rows(to, weights, full, column, first_rows, second_rows);
        }
    }

    // of a cluster, each block copies every other box for both
    __device__ __forceinline__ void copy_tokens(RingShared<F>& shared, int stage, int column, int rank) const {
        uint8_t* to = shared.stages[stage] + F::kWeightBytes;
        uint64_t* full = &shared.full[stage];
#pragma unroll 1
        for (int box = rank; box < boxes; box += F::kCluster) {
            const int token = box * box_tokens;
            uint8_t* at = to + token * kChunk * 2;
            if constexpr (F::kIsWide) {
                copy_tile(at + F::kTokenBytes, tokens, full, column + kChunk, first_token + token);
            }
            if constexpr (F::kCluster == 1) copy_tile(at, tokens, full, column, first_token + token);
            else copy_tile_to_both(at, tokens, full, column, first_token + token);
        }
    }
};

// Copies what all tiles of the block need.
template <typename F>
__device__ __forceinline__ void produce(const RingLaunch& launch, RingShared<F>& shared, const Walk<F>& walk, int first,
                                        int step, int rank) {
    const int width = launch.a.width;
    Ring<F::kStages> ring;
    Tile tile;
    bool is_first = true;
    for (int number = first; walk.find(launch.a, number, rank, tile); number += step) {
        if (tile.count == 0) continue;
        const Copies<F> copies(launch, tile, rank);
        int ahead = 0;
        if (is_first) {
            // weights do not depend on the kernel before this one
            ahead = min(width, F::kStages * F::kColumns);
#pragma unroll 1
            for (int column = 0; column < ahead; column += F::kColumns) {
                copies.copy_weights(shared, column / F::kColumns, column);
            }
            wait_for_previous_kernel();
            is_first = false;
        }
#pragma unroll 1
        for (int column = 0; column < width; column += F::kColumns) {
            if (column >= ahead) {
                barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
                copies.copy_weights(shared, ring.stage, column);
            }
            copies.copy_tokens(shared, ring.stage, column, rank);
            ring.advance();
        }
    }
    if constexpr (F::kCluster > 1) {
        // the other block's releases must find this one
        for (int i = 0; i < F::kStages; ++i) {
            barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            ring.advance();
        }
    }
}

// ---- products ----
// A stage has been read: by a lane for each block of the cluster.
template <typename F>
__device__ __forceinline__ void release(RingShared<F>& shared, int stage) {
    const int lane = threadIdx.x % 32;
    if constexpr (F::kCluster == 1) {
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
    } else {
        if (lane < F::kCluster) barrier_arrive_at(&shared.empty[stage], lane);
    }
}

// products wider than 256 tokens are two halves
template <int N, int SIZE>
__device__ __forceinline__ void multiply_shared(float (&d)[SIZE], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (N <= 256) {
        mma_shared<0, N>(d, a, b, accumulate);
    } else {
        mma_shared<0, N / 2>(d, a, b, accumulate);
        mma_shared<N / 4, N / 2>(d, a, b + (N / 2 * kChunk * 2 >> 4), accumulate);
    }
}

template <int N, int SIZE>
__device__ __forceinline__ void multiply_registers(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    if constexpr (N <= 256) {
        mma_registers<0, N>(d, a, b, accumulate);
    } else {
        mma_registers<0, N / 2>(d, a, b, accumulate);
        mma_registers<N / 4, N / 2>(d, a, b + (N / 2 * kChunk * 2 >> 4), accumulate);
    }
}

// bf16: both operands stand in shared memory.
template <typename F, int N>
__device__ __forceinline__ void multiply_plain(float (&d)[N / 2], int chunks, RingShared<F>& shared,
                                               Ring<F::kStages>& ring) {
    const int group = threadIdx.x / kWarpgroup - 1;
    int before = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        const uint32_t at = shared_address(shared.stages[ring.stage]);
        const uint64_t a = describe_rows(at + group * 64 * kChunk * 2), b = describe_rows(at + F::kWeightBytes);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_shared<N>(d, a + 2 * k, b + 2 * k, 1);
        mma_commit();
        // the next products are queued before these end
        mma_wait<1>();
        if (chunk > 0) release<F>(shared, before);
        before = ring.stage;
        ring.advance();
    }
    mma_wait<0>();
    release<F>(shared, before);
    mma_settle<N / 2>(d);
}

// A lane's scales of its two rows, a word for 128 columns, loaded two words ahead.
struct Scales {
    const uint8_t *low, *high;
    uint32_t low_words[2], high_words[2];
    int words;

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low_words[i] = i < words ? load_scales(low + 4 * i) : 0;
            high_words[i] = i < words ? load_scales(high + 4 * i) : 0;
        }
    }

    __device__ __forceinline__ void next(int word, uint32_t& low_word, uint32_t& high_word) {
        low_word = low_words[0], high_word = high_words[0];
        low_words[0] = low_words[1], high_words[0] = high_words[1];
        if (word + 2 < words) {
            low_words[1] = load_scales(low + 4 * (word + 2));
            high_words[1] = load_scales(high + 4 * (word + 2));
        }
    }
};

// Two 64 x 16 left operands, half of a stage's.
struct Operands {
    uint32_t a[2][4];

    __device__ __forceinline__ void take(uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1,
                                         uint32_t low_factor, uint32_t high_factor) {
        const uint32_t low[2] = {low0, low1}, high[2] = {high0, high1};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            a[k][0] = times(widened_even(low[k]), low_factor);
            a[k][1] = times(widened_even(high[k]), high_factor);
            a[k][2] = times(widened_odd(low[k]), low_factor);
            a[k][3] = times(widened_odd(high[k]), high_factor);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) mma_settle_operand(a[k]);
    }
};

// MXFP8: a lane decodes 16 bytes of each of its rows.
template <typename F, int N>
__device__ __forceinline__ void multiply_coded(float (&d)[N / 2], int chunks, uint32_t low_at, uint32_t high_at,
                                               Scales scales, RingShared<F>& shared, Ring<F::kStages>& ring) {
    scales.start();
    Operands left[2];
    int before = 0;
    for (int base = 0; base < chunks; base += 2) {
        uint32_t low_word, high_word;
        scales.next(base / 2, low_word, high_word);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t selector = byte_selector(threadIdx.x % 4 / 2 + 2 * i);
            const uint32_t low_factor = factor_of(__byte_perm(low_word, 0, selector));
            const uint32_t high_factor = factor_of(__byte_perm(high_word, 0, selector));
            const bool is_new = i == 0 || !F::kIsWide;
            if (is_new) barrier_wait(&shared.full[ring.stage], ring.parity);
            const uint32_t at = shared_address(shared.stages[ring.stage]);
            // the other half of a swizzled row is 64 bytes off, in either direction
            const uint32_t half_row = F::kIsWide ? i * 64 : 0;
            const uint4 low = load_shared(at + (low_at ^ half_row)), high = load_shared(at + (high_at ^ half_row));
            const uint64_t b = describe_rows(at + F::kWeightBytes + (F::kIsWide ? i * F::kTokenBytes : 0));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // products of these registers have ended; those of the other two run on
                left[half].take(half ? low.z : low.x, half ? low.w : low.y, half ? high.z : high.x,
                                half ? high.w : high.y, low_factor, high_factor);
                mma_fence();
#pragma unroll
                for (int k = 0; k < 2; ++k) multiply_registers<N>(d, left[half].a[k], b + 4 * half + 2 * k, 1);
                mma_commit();
                mma_wait<1>();
                if (half == 0 && is_new && base + i > 0) release<F>(shared, before);
            }
            if (i == 1 || !F::kIsWide) {
                before = ring.stage;
                ring.advance();
            }
        }
    }
    mma_wait<0>();
    release<F>(shared, before);
    mma_settle<N / 2>(d);
}

__device__ __forceinline__ float activated(float gate, float up, const RingArgs& a) {
    gate = min_nan(gate, a.limit);
    up = max_nan(min_nan(up, a.limit), -a.limit);
    return (up + 1.0f) * gate * sigmoid_fast(a.alpha * gate);
}

// Stores what a lane has: rows lane / 4 (low) and lane / 4 + 8 (high) of its warp.
template <typename F, int N>
__device__ __forceinline__ void store(const float (&d)[N / 2], const RingArgs& a, const Tile& tile, int channel,
                                      const int* rows, const float* weights) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        if (8 * j >= tile.count) break;
        const int token = 8 * j + lane % 4 * 2;
        if constexpr (F::kMode == kUp) {
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
                *reinterpret_cast<uint32_t*>(row + channel) =
                    pack_bf16(d[4 * j + side] * weight, d[4 * j + 2 + side] * weight);
            }
        }
    }
}

// Where a lane's two rows stand: in a stage, and among the channels of the output.
template <typename F>
struct Lane {
    uint32_t low_at, high_at;  // MXFP8
    int low, high;             // rows of an expert's weight, from the tile's first channel on
    int channel;               // from the tile's first on, in the output's order

    __device__ __forceinline__ explicit Lane(int outputs) {
        const int warp = (threadIdx.x / kWarpgroup - 1) * 4 + threadIdx.x % kWarpgroup / 32;
        const int lane = threadIdx.x % 32, row = lane / 4;
        if constexpr (F::kMode == kUp) {
            channel = warp * 8 + row;
            low = F::kCoded ? column_at(channel) : channel;
            high = low + outputs;
            low_at = place_of(low, lane);
            high_at = low_at + F::kWeightBytes / 2;
        } else {
            channel = low = warp * 16 + row * 2;
            high = low + 1;
            low_at = place_of(low, lane);
            high_at = place_of(high, lane);
        }
    }

    // Where a lane's 16 bytes of an MXFP8 row of the tile stand. Of 8 rows side by side the order is such
    // that lanes side by side read other banks: even ones first, or by bits 1, 2 and 0 of their number.
    static __device__ __forceinline__ uint32_t place_of(int row, int lane) {
        const int half = row / 64 * F::kWeightBytes / 2, group = row % 64 / 8 * 8, r = row % 8;
        if constexpr (F::kIsWide) {
            const int at = r / 2 % 2 * 4 + r / 4 * 2 + r % 2;
            return half + (group + at) * 128 + ((lane % 4 ^ at) & 3) * 16 + at / 4 * 64;
        }
        return half + (group + r % 2 * 4 + r / 2) * 64 + lane % 4 * 16;
    }
};

// A function for each number of tokens, sums included: as one variable they would be merged, and spilled.
template <typename F, int N>
__device__ __forceinline__ void run(const RingArgs& a, const Tile& tile, const Lane<F>& lane, const Scales& scales,
                                    RingShared<F>& shared, Ring<F::kStages>& ring) {
    const int group = threadIdx.x / kWarpgroup - 1, chunks = a.width / kChunk;
    // set, for what is not set would have to be kept since the tile before
    float d[N / 2] = {};
    if constexpr (F::kCoded) multiply_coded<F, N>(d, chunks, lane.low_at, lane.high_at, scales, shared, ring);
    else multiply_plain<F, N>(d, chunks, shared, ring);
    // the table of tokens has been written
    if constexpr (F::kMode == kDown) named_barrier(1 + group, kWarpgroup);
    // the last block of a cluster may have no rows
    const int first = tile.row_tile * F::kTileChannels;
    if (first >= a.outputs) return;
    store<F, N>(d, a, tile, first + lane.channel, shared.rows[group], shared.weights[group]);
}

template <typename F>
__device__ __forceinline__ void consume(const RingArgs& a, RingShared<F>& shared, const Walk<F>& walk, int first,
                                        int step, int rank) {
    const int group = threadIdx.x / kWarpgroup - 1, in_group = threadIdx.x % kWarpgroup;
    const Lane<F> lane(a.outputs);
    Ring<F::kStages> ring;
    Tile tile;
    for (int number = first; walk.find(a, number, rank, tile); number += step) {
        if (tile.count == 0) continue;
        const bool is_own = tile.expert < 0;
        Scales scales = {};
        if constexpr (F::kCoded) {
            const int64_t expert_rows = static_cast<int64_t>(F::kMode == kUp ? 2 : 1) * a.outputs;
            const int64_t base = (is_own ? 0 : tile.expert * expert_rows) + tile.row_tile * F::kTileChannels;
            const uint8_t* from = is_own ? a.own_scales : a.scales;
            scales.low = from + (base + lane.low) * (a.width / kGroup);
            scales.high = from + (base + lane.high) * (a.width / kGroup);
            // without rows, see `run`, there are none
            scales.words = tile.row_tile * F::kTileChannels < a.outputs ? a.width / 128 : 0;
        }
        if constexpr (F::kMode == kDown) {
            // of the tile before, the table has been read
            named_barrier(1 + group, kWarpgroup);
            for (int token = in_group; token < tile.count; token += kWarpgroup) {
                const int row = is_own ? tile.first + token : a.pairs[tile.first + token];
                shared.rows[group][token] = row;
                shared.weights[group][token] = is_own ? 1.0f : a.pair_weights[row] * a.factor;
            }
        }
        if constexpr (F::kMost <= 64) {
            if (tile.count <= 16) run<F, 16>(a, tile, lane, scales, shared, ring);
            else if (F::kMost == 32 || tile.count <= 32) run<F, 32>(a, tile, lane, scales, shared, ring);
            else run<F, F::kMost>(a, tile, lane, scales, shared, ring);
        } else {
            // about as many as the compiler finds registers for
            if (tile.count <= 64) run<F, 64>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 128) run<F, 128>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 192) run<F, 192>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 256) run<F, 256>(a, tile, lane, scales, shared, ring);
            else if (tile.count <= 272) run<F, 272>(a, tile, lane, scales, shared, ring);
            else run<F, 288>(a, tile, lane, scales, shared, ring);
        }
    }
}

// nobody writes to a block that has left
template <typename F>
__device__ __forceinline__ void leave() {
    if constexpr (F::kCluster > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

template <typename F>
__global__ void __launch_bounds__(kRingThreads, F::kBlocks) ring_kernel(const __grid_constant__ RingLaunch launch) {
    extern __shared__ __align__(128) uint8_t raw[];
    RingShared<F>& shared = aligned_shared<RingShared<F>>(raw);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < F::kStages; ++stage) {
            barrier_init(&shared.full[stage], 1);
            barrier_init(&shared.empty[stage], F::kCluster * kConsumers * kWarpgroup / 32);
        }
        barrier_init_fence();
    }
    int rank = 0;
    if constexpr (F::kCluster > 1) {
        // nobody writes to a block whose barriers are not there yet
        cluster_arrive();
        cluster_wait();
        rank = rank_in_cluster();
    }
    __syncthreads();
    if constexpr (F::kMode == kUp) let_next_kernel_start();
    const Walk<F> walk(launch.a);
    const int first = blockIdx.x / F::kCluster, step = gridDim.x / F::kCluster;
    if (threadIdx.x < kWarpgroup) {
        give_registers<F::kBlocks == 2 ? 24 : 40>();
        if (threadIdx.x == 0) produce<F>(launch, shared, walk, first, step, rank);
        __syncwarp();
        leave<F>();
    } else {
        take_registers<F::kBlocks == 2 ? 104 : 232>();
        consume<F>(launch.a, shared, walk, first, step, rank);
        leave<F>();
    }
}

template <typename F>
cudaError_t launch_form(const RingLaunch& with, int processors, cudaStream_t stream) {
    constexpr int kSharedBytes = sizeof(RingShared<F>) + 1024;
    const void* kernel = reinterpret_cast<const void*>(&ring_kernel<F>);
    static const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (allowed != cudaSuccess) return allowed;
    RingLaunch copy = with;
    void* arguments[] = {&copy};
    return launch_ring(kernel, F::kBlocks * processors / F::kCluster * F::kCluster, kSharedBytes, F::kCluster, F::kMode == kDown,
                       arguments, stream);
}

}  // namespace m3
