// Runs CUDA kernels on a CPU: a fiber for each thread, an OS thread for each block, random order.
//
// Whatever CUDA leaves open is drawn at random: which thread runs next, and when an asynchronous copy
// lands. So a missing barrier shows as a wrong result of some run, a wait that nobody ends as a failure.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

constexpr int kStackBytes = 96 * 1024, kDynamicBytes = 232 * 1024;
constexpr int kStuckRounds = 200000;  // rounds without any progress, after which a kernel counts as stuck

struct Block;

struct Fiber {
    jmp_buf state;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
    dim3 index;
    int thread = 0;
    bool has_started = false, has_ended = false;
    unsigned collective = 0;                           // warp-wide operations so far
    std::vector<std::vector<std::function<void()>>> groups{1};  // copies of each group, the open one last
};

struct Warp {
    uint64_t slot[2][32][6];
    unsigned arrived[2] = {0, 0};
    unsigned turns = 0;
};

struct NamedBarrier {
    int arrived = 0;
    unsigned turns = 0;
};

struct Cluster {
    std::mutex mutex;
    std::vector<Block*> blocks;
    int arrived = 0, threads = 0;
    unsigned turns = 0;
};

struct Block {
    Cluster* cluster = nullptr;
    dim3 index, size, grid;
    int rank = 0;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    std::map<int, NamedBarrier> barriers;
    int all_arrived = 0, all_or = 0, last_or = 0;
    std::atomic<int> alive{0};  // threads that have not ended
    unsigned all_turns = 0;
    std::vector<std::function<void()>> landing;        // asynchronous copies under way
    // (block, thread) of what arrived from all blocks in the open phase of a barrier here
    std::map<const char*, std::set<std::pair<int, int>>> arrivals;
    char* anchor = nullptr;
    std::mt19937 random;
    jmp_buf scheduler;
    Fiber* running = nullptr;
    bool progress = false;
    std::function<void()> kernel;
};

inline std::mutex barrier_mutex;  // of every asynchronous barrier: copies come from other blocks
inline thread_local Block* block = nullptr;
inline thread_local char anchor_of_block = 0;
alignas(128) inline thread_local uint8_t dynamic_shared[kDynamicBytes];

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "%s: block %u\n", what, block->index.x);
    std::abort();
}

inline Fiber& self() { return *block->running; }

inline void yield() {
    Fiber& fiber = self();
    if (_setjmp(fiber.state) == 0) _longjmp(block->scheduler, 1);
}

template <class Condition>
void wait_until(Condition condition) {
    while (!condition()) yield();
    block->progress = true;
}

inline void check_all() {
    if (block->alive > 0 && block->all_arrived == block->alive) {
        block->all_arrived = 0;
        block->last_or = block->all_or;
        block->all_or = 0;
        ++block->all_turns;
    }
}

inline int sync_threads(int value = 0) {
    const unsigned turn = block->all_turns;
    block->all_or |= value;
    ++block->all_arrived;
    check_all();
    wait_until([&] { return block->all_turns != turn; });
    return block->last_or;
}

inline void named_barrier(int id, int threads) {
    NamedBarrier& barrier = block->barriers[id];
    const unsigned turn = barrier.turns;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.turns;
    }
    wait_until([&] { return barrier.turns != turn; });
}

// what every lane of the warp has brought to the same operation
inline const uint64_t (*exchange(const uint64_t (&mine)[6]))[6] {
    Fiber& fiber = self();
    Warp& warp = block->warps[fiber.thread / 32];
    const unsigned turn = fiber.collective++, side = turn % 2;
    std::memcpy(warp.slot[side][fiber.thread % 32], mine, sizeof mine);
    if (++warp.arrived[side] == 32) {
        warp.arrived[side] = 0;
        warp.turns = turn + 1;
    }
    wait_until([&] { return int(warp.turns - turn) > 0; });
    return warp.slot[side];
}

inline void finish_fiber() {
    Fiber& fiber = self();
    fiber.has_ended = true;
    --block->alive;
    check_all();
    block->progress = true;
    _longjmp(block->scheduler, 1);
}

inline void fiber_entry() {
    block->kernel();
    finish_fiber();
}

inline void run_block() {
    block->anchor = &anchor_of_block;
    std::memset(dynamic_shared, 0xFF, sizeof dynamic_shared);  // NaN, and numbers out of bounds
    std::vector<int> order(block->fibers.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = int(i);
    int idle = 0;
    while (block->alive > 0) {
        block->progress = false;
        // a random rotation of warps and lanes costs less than a shuffle and mixes as well over rounds
        const size_t first = block->random() % order.size(), step = block->random() % 2 ? 1 : order.size() - 1;
        for (size_t i = 0; i < order.size(); ++i) {
            Fiber& fiber = *block->fibers[(first + i * step) % order.size()];
            if (fiber.has_ended) continue;
            block->running = &fiber;
            if (_setjmp(block->scheduler) == 0) {
                if (fiber.has_started) _longjmp(fiber.state, 1);
                fiber.has_started = true;
                setcontext(&fiber.start);
            }
        }
        while (!block->landing.empty() && block->random() % 3 != 0) {
            const size_t at = block->random() % block->landing.size();
            std::swap(block->landing[at], block->landing.back());
            auto land = std::move(block->landing.back());
            block->landing.pop_back();
            land();
            block->progress = true;
        }
        if (block->progress) {
            idle = 0;
        } else if (++idle > kStuckRounds) {
            fail("a kernel is stuck");
        } else {
            std::this_thread::yield();
        }
    }
    while (!block->landing.empty()) {
        block->landing.back()();
        block->landing.pop_back();
    }
}

inline unsigned seed = 1;

inline void run_cluster(const std::function<void()>& kernel, dim3 grid, int threads, int first, int size) {
    Cluster cluster;
    cluster.threads = threads * size;
    std::vector<std::unique_ptr<Block>> blocks;
    for (int rank = 0; rank < size; ++rank) {
        auto one = std::make_unique<Block>();
        const unsigned number = first + rank;
        one->cluster = &cluster;
        one->index = dim3(number % grid.x, number / grid.x);
        one->size = dim3(threads);
        one->grid = grid;
        one->rank = rank;
        one->kernel = kernel;
        one->alive = threads;
        one->random.seed(seed++);
        one->warps.resize((threads + 31) / 32);
        cluster.blocks.push_back(one.get());
        blocks.push_back(std::move(one));
    }
    std::atomic<int> ready{0}, ended{0};
    std::vector<std::thread> running;
    for (auto& one : blocks)
        running.emplace_back([&, now = one.get()] {
            block = now;
            block->anchor = &anchor_of_block;
            for (int thread = 0; thread < threads; ++thread) {
                auto fiber = std::make_unique<Fiber>();
                fiber->thread = thread;
                fiber->index = dim3(thread, 0, 0);
                fiber->stack = std::make_unique<char[]>(kStackBytes);
                getcontext(&fiber->start);
                fiber->start.uc_stack.ss_sp = fiber->stack.get();
                fiber->start.uc_stack.ss_size = kStackBytes;
                fiber->start.uc_link = nullptr;
                makecontext(&fiber->start, fiber_entry, 0);
                block->fibers.push_back(std::move(fiber));
            }
            ++ready;
            while (ready < size) std::this_thread::yield();
            run_block();
            // others may still write here
            ++ended;
            while (ended < size) std::this_thread::yield();
        });
    for (auto& one : running) one.join();
}

using Run = std::function<void(void**, dim3, int, int)>;
inline std::map<const void*, Run> kernels;

template <class Args>
void add(void (*kernel)(Args)) {
    kernels[reinterpret_cast<const void*>(kernel)] = [kernel](void** params, dim3 grid, int threads, int cluster) {
        const Args args = *static_cast<const Args*>(params[0]);
        const int blocks = int(grid.x * grid.y * grid.z);
        for (int first = 0; first < blocks; first += cluster)
            run_cluster([&] { kernel(args); }, grid, threads, first, cluster);
    };
}

}  // namespace emulator

// CUDA's words
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static thread_local
#define threadIdx (::emulator::self().index)
#define blockIdx (::emulator::block->index)
#define blockDim (::emulator::block->size)
#define gridDim (::emulator::block->grid)

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1;
enum { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributeNonPortableClusterSizeAllowed };
inline cudaError_t cudaFuncSetAttribute(const void*, int attribute, int value) {
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > 227 * 1024 ? cudaErrorInvalidValue : 0;
}

struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class T> T min(T x, T y) { return y < x ? y : x; }
template <class T> T max(T x, T y) { return x < y ? y : x; }
inline uint32_t max(uint32_t x, unsigned long y) { return x < y ? uint32_t(y) : x; }

template <class To, class From>
To bits_as(From from) {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half2 { uint32_t bits; };
inline __nv_bfloat16 __float2bfloat16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if (x != x) return {0x7FFF};
    return {uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline __half2 __floats2half2_rn(float, float) { std::abort(); }

inline void __syncthreads() { emulator::sync_threads(); }
inline int __syncthreads_or(int value) { return emulator::sync_threads(value != 0); }
inline void __syncwarp() {
    const uint64_t nothing[6] = {};
    emulator::exchange(nothing);
}

template <class T>
T shuffled(T value, int source) {
    uint64_t mine[6] = {};
    std::memcpy(mine, &value, sizeof value);
    T result;
    std::memcpy(&result, emulator::exchange(mine)[source & 31], sizeof result);
    return result;
}
template <class T> T __shfl_xor_sync(uint32_t, T value, int hop) { return shuffled(value, (emulator::self().thread % 32) ^ hop); }
template <class T> T __shfl_sync(uint32_t, T value, int source) { return shuffled(value, source); }
inline uint32_t __ballot_sync(uint32_t, bool value) {
    const uint64_t mine[6] = {value};
    const auto all = emulator::exchange(mine);
    uint32_t mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= uint32_t(all[lane][0]) << lane;
    return mask;
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
    const uint64_t mine[6] = {value};
    const auto all = emulator::exchange(mine);
    uint32_t least = ~0u;
    for (int lane = 0; lane < 32; ++lane) least = min(least, uint32_t(all[lane][0]));
    return least;
}
template <class T> T atomicAdd(T* to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }
inline int atomicMax(int* to, int value) {
    const int old = *to;
    *to = max(old, value);
    return old;
}
