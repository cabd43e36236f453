// What the blocks of the ring share, and which tiles each of them computes.
//
// Blocks by themselves take the next tile when they come to it, for the memory does not serve all alike.
// Clusters go in step, each by its own stride: what several read of a token then finds it in L2.
#pragma once
#include "moe_products.cuh"

namespace m3 {

constexpr int kChunk = 64;      // columns of tokens side by side
constexpr int kTileRows = 128;  // of a weight
constexpr int kConsumers = 2;
constexpr int kRingThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kMostLone = 33;   // blocks of a lone token, in any order
constexpr int kTurns = 2;       // tiles told ahead
constexpr int kMostShared = 225 * 1024;  // of a processor

enum Mode { kUp = 0, kDown = 1 };

struct RingArgs {
    const uint8_t* scales;  // [E, rows, width / 32], 0 to 134; null for bf16
    const uint8_t* own_scales;
    const int32_t* experts;     // [blocks], negative where a block is not used; these come last, see `kMostLone`
    const int32_t* firsts;      // [blocks], first sorted row
    const int32_t* counts;      // [blocks], rows
    const int32_t* pairs;       // [num_pairs], pair of a sorted row
    const float* pair_weights;  // [num_pairs], by pair
    int32_t* next_tile;         // counts the tiles taken beyond each block's first; 0 before a launch
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
    static constexpr bool kTakesTurns = CLUSTER == 1;
    // blocks that read a weight's rows one after another: the shared expert has several of small ones
    static constexpr int kNeighbours = MOST <= 32 ? 8 : 4;
    static constexpr int kTileChannels = MODE == kUp ? 64 : 128;
};

template <typename F>
struct __align__(1024) RingShared {
    uint8_t stages[F::kStages][F::kStageBytes];
    int rows[kConsumers][F::kMost];
    float weights[kConsumers][F::kMost];
    uint64_t full[F::kStages], empty[F::kStages];
    int numbers[kTurns];  // of tiles to come
    uint64_t told[kTurns], heard[kTurns];
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
        const int in_group = F::kNeighbours * row_tiles;
        const int first = number / in_group * F::kNeighbours;
        if (first >= num_blocks) return false;
        const int size = min(num_blocks - first, F::kNeighbours), inside = number % in_group;
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
            // of many, blocks that are not used come last
            if (tile.expert < 0 && block == first && num_blocks > kMostLone) return false;
            tile.first = tile.first_token = a.firsts[block - shared_blocks];
            tile.count = tile.expert < 0 ? 0 : a.counts[block - shared_blocks];
        }
        return true;
    }
};

// ---- whose turn it is ----
// A reader's way through the numbers of tiles: the copying lane, or a warp that multiplies.
template <typename F>
struct Turns {
    int number, step;
    Ring<kTurns> ring;

    __device__ __forceinline__ Turns(int first, int step_) : number(first), step(step_) {}

    // `hears`: by one lane of those that read together, when all of them have
    template <typename Hears>
    __device__ __forceinline__ void advance(RingShared<F>& shared, const Hears& hears) {
        if constexpr (F::kTakesTurns) {
            barrier_wait(&shared.told[ring.stage], ring.parity);
            number = shared.numbers[ring.stage];
            if (hears()) barrier_arrive(&shared.heard[ring.stage]);
            ring.advance();
        } else {
            number += step;
        }
    }
};

// Tells a block its tiles, by one lane of it, up to the first number without one.
template <typename F>
__device__ __forceinline__ void tell(const RingArgs& a, RingShared<F>& shared, const Walk<F>& walk, int first, int step) {
    Ring<kTurns> ring;
    Tile tile;
    for (int number = first; walk.find(a, number, 0, tile);) {
        number = step + atomicAdd(a.next_tile, 1);
        barrier_wait(&shared.heard[ring.stage], ring.parity ^ 1);
        shared.numbers[ring.stage] = number;
        barrier_arrive(&shared.told[ring.stage]);
        ring.advance();
    }
}

}  // namespace m3
