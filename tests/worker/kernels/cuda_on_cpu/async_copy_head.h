// `async_copy.cuh` for the emulator: the same names, without PTX. What follows it is the real header's rest.
#pragma once
#include "emulator.h"

namespace m3 {

using emulator::named_barrier;

// an address in shared memory: the distance from the block's anchor, the same in every block
inline uint32_t shared_address(const void* pointer) {
    return uint32_t(int32_t(static_cast<const char*>(pointer) - emulator::block->anchor));
}
inline char* pointer_of(uint32_t address, emulator::Block* block) { return block->anchor + int32_t(address); }

struct AsyncBarrier {  // the 64 bits of one
    int16_t left, arrivals;
    int32_t bytes_and_phase;  // bytes still to come times two, and the phase
};
static_assert(sizeof(AsyncBarrier) == 8);

inline void settle_barrier(AsyncBarrier& barrier) {
    if (barrier.left == 0 && (barrier.bytes_and_phase & ~1) == 0) {
        barrier.left = barrier.arrivals;
        barrier.bytes_and_phase ^= 1;
    }
}
inline void change_barrier(char* at, int arrivals, int bytes) {
    const std::lock_guard lock(emulator::barrier_mutex);
    AsyncBarrier& barrier = *reinterpret_cast<AsyncBarrier*>(at);
    barrier.left -= arrivals;
    barrier.bytes_and_phase += 2 * bytes;
    settle_barrier(barrier);
}
inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    const std::lock_guard lock(emulator::barrier_mutex);
    *reinterpret_cast<AsyncBarrier*>(barrier) = {int16_t(arrivals), int16_t(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint64_t* barrier) { change_barrier(reinterpret_cast<char*>(barrier), 1, 0); }
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    change_barrier(reinterpret_cast<char*>(barrier), 1, int(bytes));
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    emulator::wait_until([&] {
        const std::lock_guard lock(emulator::barrier_mutex);
        return (uint32_t(reinterpret_cast<AsyncBarrier*>(barrier)->bytes_and_phase) & 1) != parity;
    });
}
inline void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }

// addresses in another block carry its rank above them: no offset of a block reaches that far
constexpr uint32_t kRankShift = 26;
inline uint32_t remote_address(uint32_t local, uint32_t rank) {
    return (local & ((1u << kRankShift) - 1)) | (rank << kRankShift);
}
inline char* remote_pointer(uint32_t address) {
    const int32_t offset = int32_t(address << (32 - kRankShift)) >> (32 - kRankShift);
    return emulator::block->cluster->blocks[address >> kRankShift]->anchor + offset;
}
template <class T>
void store_remote(uint32_t to, T value, uint32_t barrier) {
    char* const target = remote_pointer(to);
    char* const counted = remote_pointer(barrier);
    emulator::block->landing.push_back([=] {
        {
            const std::lock_guard lock(emulator::barrier_mutex);
            std::memcpy(target, &value, sizeof value);
        }
        change_barrier(counted, 0, -int(sizeof value));
    });
}
inline thread_local std::map<int, unsigned> cluster_turn;  // of each thread, when it arrived
inline void cluster_arrive() {
    emulator::Cluster& cluster = *emulator::block->cluster;
    const std::lock_guard lock(cluster.mutex);
    cluster_turn[emulator::self().thread] = cluster.turns;
    if (++cluster.arrived == cluster.threads) {
        cluster.arrived = 0;
        ++cluster.turns;
    }
}
inline void cluster_wait() {
    emulator::Cluster& cluster = *emulator::block->cluster;
    const unsigned turn = cluster_turn[emulator::self().thread];
    emulator::wait_until([&] {
        const std::lock_guard lock(cluster.mutex);
        return cluster.turns != turn;
    });
}

inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    if (bytes % 16 != 0 || uintptr_t(to) % 16 != 0) std::abort();
    emulator::block->landing.push_back([=] {
        std::memcpy(to, from, bytes);
        change_barrier(reinterpret_cast<char*>(barrier), 0, -int(bytes));
    });
}
inline void copy16_or_zero(uint32_t to, const void* from, bool keep) {
    char* const target = pointer_of(to, emulator::block);
    emulator::self().groups.back().push_back([=] {
        if (keep)
            std::memcpy(target, from, 16);
        else
            std::memset(target, 0, 16);
    });
}
inline void copies_commit() { emulator::self().groups.emplace_back(); }
template <int kLeft>
void copies_wait() {
    auto& groups = emulator::self().groups;  // the last one is open
    while (int(groups.size()) - 1 > kLeft) {
        for (auto& copy : groups.front()) copy();
        groups.erase(groups.begin());
    }
}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

inline float bf16_of(uint64_t pair, int high) { return __uint_as_float(high ? uint32_t(pair) & 0xFFFF0000u : uint32_t(pair) << 16); }

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint64_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto all = emulator::exchange(mine);
    const int lane = emulator::self().thread % 32, g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {
            const int owner = k % 8 / 2, upper = k / 8, side = e / 2, column = 2 * t + e % 2;
            c[e] += bf16_of(all[g * 4 + owner][side + 2 * upper], k % 2) * bf16_of(all[column * 4 + owner][4 + upper], k % 2);
        }
}
inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint64_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto all = emulator::exchange(mine);
    const int lane = emulator::self().thread % 32, g = lane / 4, t = lane % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 32; ++k) {
            const int owner = k % 16 / 4, upper = k / 16, side = e / 2, column = 2 * t + e % 2, shift = 8 * (k % 4);
            c[e] += int8_t(all[g * 4 + owner][side + 2 * upper] >> shift) * int8_t(all[column * 4 + owner][4 + upper] >> shift);
        }
}
// eight rows of 16 bytes from each group of eight lanes; lane (g, t) gets elements 2t and 2t+1 of row g
inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    const uint64_t mine[6] = {address};
    const auto all = emulator::exchange(mine);
    const int lane = emulator::self().thread % 32, g = lane / 4, t = lane % 4;
    for (int matrix = 0; matrix < 4; ++matrix)
        std::memcpy(&r[matrix], pointer_of(uint32_t(all[matrix * 8 + g][0]), emulator::block) + 4 * t, 4);
}
inline void load_transposed(uint32_t (&r)[4], uint32_t address) {
    const uint64_t mine[6] = {address};
    const auto all = emulator::exchange(mine);
    const int lane = emulator::self().thread % 32, g = lane / 4, t = lane % 4;
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i)
            std::memcpy(&pair[i], pointer_of(uint32_t(all[matrix * 8 + 2 * t + i][0]), emulator::block) + 2 * g, 2);
        std::memcpy(&r[matrix], pair, 4);
    }
}
inline uint4 load_shared(uint32_t address) {
    uint4 value;
    std::memcpy(&value, pointer_of(address, emulator::block), 16);
    return value;
}
inline float max_nan(float x, float y) { return x != x || y != y ? __int_as_float(0x7fffffff) : x < y ? y : x; }

inline cudaError_t launch(const void* kernel, dim3 grid, int threads, size_t, int cluster, void** args, cudaStream_t) {
    emulator::kernels.at(kernel)(args, grid, threads, cluster);
    return cudaSuccess;
}

}  // namespace m3
