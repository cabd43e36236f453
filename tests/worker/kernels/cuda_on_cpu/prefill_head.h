// `msa_prefill_hopper.cuh` for the emulator: the same names, without PTX. Products run when they are
// waited for, as those of the experts do.
#pragma once
#include "moe_products.cuh"

struct alignas(16) int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}
template <class T> T __shfl_sync(uint32_t, T value, int source, int width) {
    return shuffled(value, emulator::self().thread % 32 / width * width + source % width);
}
template <class T> T __shfl_up_sync(uint32_t, T value, int hop) {
    const int lane = emulator::self().thread % 32;
    return shuffled(value, lane < hop ? lane : lane - hop);
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }

namespace m3 {

constexpr int kPage = 128, kDim = 128, kHalfBytes = kPage * 128, kPageBytes = 2 * kHalfBytes;
constexpr float kLog2e = 1.4426950408889634f;

inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { barrier_arrive_expect(barrier, bytes); }
inline void warpgroup_sync(int id) { named_barrier(id, kWarpgroup); }
inline void publish_shared_writes() {}
inline void clear(float& value) { value = 0; }
inline uint32_t pinned(uint32_t value) { return value; }

inline void copy_tile_3d(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
    copy_box(to, map, barrier, {x, y, z, 0, 0}, false);
}
inline void copy_tile_4d(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, int w) {
    copy_box(to, map, barrier, {x, y, z, w, 0}, false);
}

// an address in units of 16 bytes; of columns, with a bit that tells them from rows
constexpr uint64_t kAreColumns = uint64_t(1) << 32;
inline uint64_t describe_columns(uint32_t address) { return (address >> 4) | kAreColumns; }

// the right operand's value at a place of the reduced axis, in a column of the product
inline float right_value(uint64_t b, int k, int column) {
    if (!(b & kAreColumns)) return tile_value(b, column, k);
    return tile_value((b & ~kAreColumns) + (column / 64 * kHalfBytes >> 4), k, column % 64);
}

// d[64 x 128] = (accumulate ? d : 0) + rows * b; rows: of the left operand, a lane's two
inline void multiply_wide(float (&d)[64], const float (&rows)[2][16], uint64_t b, int accumulate) {
    const int lane = emulator::self().thread % 32;
    for (int i = 0; i < 64; ++i) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = i / 2 % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[row][k] * right_value(b, k, column);
        d[i] = (accumulate ? d[i] : 0) + sum;
    }
}
inline void mma_shared(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    products().back().push_back([&d, a, b, accumulate] {
        const int thread = emulator::self().thread, first = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
        float rows[2][16];
        for (int row = 0; row < 2; ++row)
            for (int k = 0; k < 16; ++k) rows[row][k] = tile_value(a, first + 8 * row, k);
        multiply_wide(d, rows, b, accumulate);
    });
}
inline void mma_registers(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    const uint64_t mine[6] = {a[0], a[1], a[2], a[3]};
    const auto all = emulator::exchange(mine);
    const int row = emulator::self().thread % 32 / 4;
    std::array<std::array<float, 16>, 2> rows;
    for (int k = 0; k < 16; ++k)
        for (int side = 0; side < 2; ++side)
            rows[side][k] = bf16_of(all[row * 4 + k % 8 / 2][side + k / 8 * 2], k % 2);
    products().back().push_back([&d, rows, b, accumulate] {
        float copied[2][16];
        std::memcpy(copied, rows.data(), sizeof copied);
        multiply_wide(d, copied, b, accumulate);
    });
}
inline void mma_registers_columns(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    mma_registers(d, a, b, accumulate);
}

// by one argument, as the prefill kernels name it
template <int kSize>
void mma_settle(float (&)[kSize]) {}
inline float max_or_nan(float x, float y) { return max_nan(x, y); }
inline float exp2_fast(float x) { return std::exp2(x); }

inline float value_of_e4m3(uint32_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
    return (byte & 0x7f) == 0x7f ? __int_as_float(0x7fffffff) : byte & 0x80 ? -size : size;
}
inline void widen_e4m3(uint32_t four, uint32_t scale, uint32_t& low, uint32_t& high) {
    float wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = value_of_e4m3(four >> 8 * i & 255) * bf16_of(scale, 0);
    low = pack_bf16(wide[0], wide[1]);
    high = pack_bf16(wide[2], wide[3]);
}

}  // namespace m3
