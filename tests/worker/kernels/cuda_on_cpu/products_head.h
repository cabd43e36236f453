// `moe_products.cuh` for the emulator: the same names, without PTX. Products run when they are waited
// for, at the latest time that CUDA allows, so a stage given back too early shows as a wrong result.
#pragma once
#include <array>
#include <type_traits>

#include "async_copy.cuh"

struct alignas(64) CUtensorMap {
    const uint8_t* address;
    int32_t element_bytes, rank;
    uint64_t sizes[5], strides[4];
    uint32_t box[5];
};
static_assert(sizeof(CUtensorMap) == 128);

inline int __float_as_int(float x) { return bits_as<int>(x); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t both = x | uint64_t(y) << 32;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

namespace m3 {

constexpr int kWarpgroup = 128;

template <typename Shared>
Shared& aligned_shared(uint8_t* raw) {
    return *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
}

template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// where a byte of a tile of 128-byte rows stands
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// a box from these coordinates into this block's shared memory, zeros for what is outside
inline void land_box(const CUtensorMap& map, uint32_t to, emulator::Block* block, const int (&start)[5]) {
    uint32_t done = 0;
    const int bytes = map.element_bytes, rank = map.rank;
    const bool is_swizzled = map.box[0] * map.element_bytes == 128;
    int64_t boxes[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < rank; ++i) boxes[i] = map.box[i];
    for (int64_t v = 0; v < boxes[4]; ++v)
        for (int64_t w = 0; w < boxes[3]; ++w)
            for (int64_t z = 0; z < boxes[2]; ++z)
                for (int64_t y = 0; y < boxes[1]; ++y)
                    for (int64_t x = 0; x < boxes[0]; ++x) {
                        const int64_t at[5] = {start[0] + x, start[1] + y, start[2] + z, start[3] + w, start[4] + v};
                        bool inside = true;
                        int64_t offset = at[0] * bytes;
                        for (int i = 0; i < rank; ++i) {
                            inside = inside && at[i] >= 0 && uint64_t(at[i]) < map.sizes[i];
                            if (i > 0) offset += at[i] * int64_t(map.strides[i - 1]);
                        }
                        const uint32_t target = is_swizzled ? swizzled(to + done) : to + done;
                        if (inside) std::memcpy(pointer_of(target, block), map.address + offset, bytes);
                        else std::memset(pointer_of(target, block), 0, bytes);
                        done += bytes;
                    }
}

inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, const int (&start)[5], bool to_both) {
    const uint32_t address = shared_address(to), counted = shared_address(barrier);
    std::vector<emulator::Block*> targets{emulator::block};
    if (to_both) targets = emulator::block->cluster->blocks;
    uint32_t bytes = map->element_bytes;
    for (int i = 0; i < map->rank; ++i) bytes *= map->box[i];
    for (emulator::Block* target : targets)
        emulator::block->landing.push_back([copied = *map, address, counted, target, bytes, start = std::to_array(start)] {
            const int from[5] = {start[0], start[1], start[2], start[3], start[4]};
            land_box(copied, address, target, from);
            change_barrier(pointer_of(counted, target), 0, -int(bytes));
        });
}

inline void copy_tile(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    copy_box(to, map, barrier, {x, y, 0, 0, 0}, false);
}
inline void copy_tile_to_both(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    copy_box(to, map, barrier, {x, y, 0, 0, 0}, true);
}
inline void copy_rows(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int w, int v) {
    copy_box(to, map, barrier, {x, 0, 0, w, v}, false);
}
// Lands an arrival of a thread of any block. It must find the target alive, and must not be a thread's
// second one in a phase, which would stand for another's that is still to come.
inline void land_arrival(char* at, emulator::Block* target, std::pair<int, int> from) {
    if (target->alive == 0) emulator::fail("an arrival at a block that has left");
    const std::lock_guard lock(emulator::barrier_mutex);
    AsyncBarrier& barrier = *reinterpret_cast<AsyncBarrier*>(at);
    auto& arrivals = target->arrivals[at];
    if (!arrivals.insert(from).second) emulator::fail("a thread's second arrival in one phase");
    --barrier.left;
    settle_barrier(barrier);
    if (barrier.left == barrier.arrivals) arrivals.clear();
}
// lands after `rounds` of the sending block, or when that ends
inline void arrive_after(int rounds, char* at, emulator::Block* target, std::pair<int, int> from) {
    if (rounds > 0 && emulator::block->alive > 0) {
        emulator::block->landing.push_back([=] { arrive_after(rounds - 1, at, target, from); });
    } else {
        land_arrival(at, target, from);
    }
}
inline void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
    emulator::Block& own = *emulator::block;
    emulator::Block* const target = own.cluster->blocks[rank];
    char* const at = remote_pointer(remote_address(shared_address(barrier), rank));
    // one in eight from another block takes long
    const int rounds = rank != uint32_t(own.rank) && own.random() % 8 == 0 ? own.random() % 400 : own.random() % 3;
    const std::pair<int, int> from{own.rank, emulator::self().thread};
    own.landing.push_back([=] { arrive_after(rounds, at, target, from); });
}
inline uint32_t rank_in_cluster() { return uint32_t(emulator::block->rank); }
template <int>
void take_registers() {}
template <int>
void give_registers() {}

inline uint32_t pack_bf16(float low, float high) {
    return __float2bfloat16(low).bits | uint32_t(__float2bfloat16(high).bits) << 16;
}
inline float min_nan(float x, float y) { return x != x || y != y ? __int_as_float(0x7fffffff) : x < y ? x : y; }
inline float sigmoid_fast(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// each thread's products that have not been waited for, by group, the open one last
using Products = std::vector<std::vector<std::function<void()>>>;
inline thread_local std::map<int, Products> products_of;
inline Products& products() {
    Products& mine = products_of[emulator::self().thread];
    if (mine.empty()) mine.emplace_back();
    return mine;
}
inline void mma_fence() {}
inline void mma_commit() { products().emplace_back(); }
template <int kPending>
void mma_wait() {
    Products& mine = products();
    while (int(mine.size()) - 1 > kPending) {
        for (auto& product : mine.front()) product();
        mine.erase(mine.begin());
    }
    // a warp waits as one
    __syncwarp();
}
template <int kCount, int kSize>
void mma_settle(float (&)[kSize]) {}
inline void mma_settle_operand(uint32_t (&)[4]) {}

// an address in units of 16 bytes, as the unit's own descriptors have it
inline uint64_t describe_rows(uint32_t address) { return address >> 4; }

// the bf16 at a row and column of a tile
inline float tile_value(uint64_t descriptor, int row, int column) {
    const uint32_t address = uint32_t(descriptor << 4) + uint32_t(row * 128 + 2 * column);
    uint16_t bits;
    std::memcpy(&bits, pointer_of(swizzled(address), emulator::block), 2);
    return __uint_as_float(uint32_t(bits) << 16);
}

// rows: of the left operand, a lane's two
template <int AT, int N, int SIZE>
void multiply_rows(float (&d)[SIZE], const float (&rows)[2][16], uint64_t b) {
    const int lane = emulator::self().thread % 32;
    for (int j = 0; j < N / 8; ++j)
        for (int side = 0; side < 2; ++side) {
            float values[16];
            for (int k = 0; k < 16; ++k) values[k] = tile_value(b, 8 * j + lane % 4 * 2 + side, k);
            for (int row = 0; row < 2; ++row) {
                float sum = 0;
                for (int k = 0; k < 16; ++k) sum += rows[row][k] * values[k];
                d[AT + 4 * j + 2 * row + side] += sum;
            }
        }
}

template <int AT, int N, int SIZE>
void mma_shared(float (&d)[SIZE], uint64_t a, uint64_t b, int) {
    products().back().push_back([&d, a, b] {
        const int thread = emulator::self().thread, first = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
        float rows[2][16];
        for (int row = 0; row < 2; ++row)
            for (int k = 0; k < 16; ++k) rows[row][k] = tile_value(a, first + 8 * row, k);
        multiply_rows<AT, N>(d, rows, b);
    });
}

template <int AT, int N, int SIZE>
void mma_registers(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b, int) {
    const uint64_t mine[6] = {a[0], a[1], a[2], a[3]};
    const auto all = emulator::exchange(mine);
    const int row = emulator::self().thread % 32 / 4;
    std::array<std::array<float, 16>, 2> rows;
    for (int k = 0; k < 16; ++k)
        for (int side = 0; side < 2; ++side)
            rows[side][k] = bf16_of(all[row * 4 + k % 8 / 2][side + k / 8 * 2], k % 2);
    products().back().push_back([&d, rows, b] {
        float copied[2][16];
        std::memcpy(copied, rows.data(), sizeof copied);
        multiply_rows<AT, N>(d, copied, b);
    });
}

inline cudaError_t launch_plain(const void* kernel, dim3 blocks, int threads, size_t shared_bytes, void** arguments,
                                cudaStream_t stream) {
    return launch(kernel, blocks, threads, shared_bytes, 1, arguments, stream);
}
inline cudaError_t launch_ring(const void* kernel, int blocks, size_t shared_bytes, int cluster, bool, void** arguments,
                               cudaStream_t stream) {
    return launch(kernel, dim3(blocks), 3 * kWarpgroup, shared_bytes, cluster, arguments, stream);
}

}  // namespace m3
