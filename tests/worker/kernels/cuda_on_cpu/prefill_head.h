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

enum class Values { kBf16, kF16 };

inline float value_of_f16(uint32_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(1024 + mantissa), exponent - 25);
    if (exponent == 31) size = __uint_as_float(mantissa ? 0x7fffffff : 0x7f800000);
    return bits & 0x8000 ? -size : size;
}
inline uint32_t f16_of(float x) {
    const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    if (x != x) return 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < std::ldexp(1.0f, -14)) return sign | uint32_t(std::nearbyint(std::ldexp(size, 24)));
    int exponent;
    std::frexp(size, &exponent);
    // a mantissa that rounds up to the next power of two carries into the exponent
    return sign | ((uint32_t(exponent + 13) << 10) + uint32_t(std::nearbyint(std::ldexp(size, 11 - exponent))));
}
inline uint32_t pack_f16(float low, float high) { return f16_of(low) | f16_of(high) << 16; }
inline float low_of_bf16(uint32_t pair) { return bf16_of(pair, 0); }
inline float high_of_bf16(uint32_t pair) { return bf16_of(pair, 1); }

template <Values kValues>
float number_of(uint32_t bits) {
    return kValues == Values::kBf16 ? __uint_as_float(bits << 16) : value_of_f16(bits);
}

// a number of a tile, and the right operand's at a place of the reduced axis, in a column of the product
template <Values kValues>
float tile_number(uint64_t descriptor, int row, int column) {
    uint16_t bits;
    const uint32_t address = uint32_t(descriptor << 4) + uint32_t(row * 128 + 2 * column);
    std::memcpy(&bits, pointer_of(swizzled(address), emulator::block), 2);
    return number_of<kValues>(bits);
}
template <Values kValues>
float right_number(uint64_t b, int k, int column) {
    if (!(b & kAreColumns)) return tile_number<kValues>(b, column, k);
    return tile_number<kValues>((b & ~kAreColumns) + (column / 64 * kHalfBytes >> 4), k, column % 64);
}

// d[64 x 128] = (accumulate ? d : 0) + rows * b; rows: of the left operand, a lane's two
template <Values kValues>
void multiply_wide(float (&d)[64], const float (&rows)[2][16], uint64_t b, int accumulate) {
    const int lane = emulator::self().thread % 32;
    for (int i = 0; i < 64; ++i) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = i / 2 % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += rows[row][k] * right_number<kValues>(b, k, column);
        d[i] = (accumulate ? d[i] : 0) + sum;
    }
}
template <Values kValues = Values::kBf16>
void mma_shared(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    products().back().push_back([&d, a, b, accumulate] {
        const int thread = emulator::self().thread, first = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
        float rows[2][16];
        for (int row = 0; row < 2; ++row)
            for (int k = 0; k < 16; ++k) rows[row][k] = tile_number<kValues>(a, first + 8 * row, k);
        multiply_wide<kValues>(d, rows, b, accumulate);
    });
}
template <Values kValues = Values::kBf16>
void mma_registers_columns(float (&d)[64], const uint32_t* a, uint64_t b, int accumulate) {
    const uint64_t mine[6] = {a[0], a[1], a[2], a[3]};
    const auto all = emulator::exchange(mine);
    const int row = emulator::self().thread % 32 / 4;
    std::array<std::array<float, 16>, 2> rows;
    for (int k = 0; k < 16; ++k)
        for (int side = 0; side < 2; ++side)
            rows[side][k] =
                number_of<kValues>(uint32_t(all[row * 4 + k % 8 / 2][side + k / 8 * 2]) >> k % 2 * 16 & 0xffff);
    products().back().push_back([&d, rows, b, accumulate] {
        float copied[2][16];
        std::memcpy(copied, rows.data(), sizeof copied);
        multiply_wide<kValues>(d, copied, b, accumulate);
    });
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
inline uint2 widen_e4m3(uint32_t four) {
    float wide[4];
    for (int i = 0; i < 4; ++i) wide[i] = value_of_e4m3(four >> 8 * i & 255);
    return make_uint2(pack_f16(wide[0], wide[1]), pack_f16(wide[2], wide[3]));
}

}  // namespace m3
