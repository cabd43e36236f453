// Weights as experts store them: loaded past L1, MXFP8 decoded in registers.
//
// Integer units run at half the rate of the others and decoding keeps them busiest, so of the four
// bytes of a word the even two are shifted by the multiplier, and no check is made for what kept
// weights never hold: NaN codes, and scales above 134.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace m3 {

constexpr int kGroup = 32;  // values that share a scale

// 16 bytes past L1, which a weight read once would only flush
__device__ __forceinline__ uint4 load_weights(const uint8_t* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

// four scales, with their neighbours on the way
__device__ __forceinline__ uint32_t load_scales(const uint8_t* from) {
    uint32_t value;
    asm volatile("ld.global.nc.L2::256B.u32 %0, [%1];" : "=r"(value) : "l"(from));
    return value;
}

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

// Bytes 0 and 2 of four e4m3 as bf16: at the exponent's low end their bits are the value times 2^-120.
__device__ __forceinline__ uint32_t widened_even(uint32_t four) {
    // the sign goes from bit 7 by way of bit 11 to bit 15
    return (four & 0x00800080u) * 240 + (four & 0x00ff00ffu) * 16;
}

// Bytes 1 and 3.
__device__ __forceinline__ uint32_t widened_odd(uint32_t four) {
    return ((four & 0x7f007f00u) >> 4) | (four & 0x80008000u);
}

// 2^120 times the scale as two bf16
__device__ __forceinline__ uint32_t factor_of(uint32_t byte) {
    return byte * 0x00800080u + 120 * 0x00800080u;
}

// A byte of a word by a selector of `byte_selector`.
__device__ __forceinline__ uint32_t byte_selector(int place) {
    return 0x4440u + place;
}

// Eight tokens' values in the order in which four bytes at a time are decoded: 0, 2, then 1, 3.
__device__ __forceinline__ uint4 in_order(uint4 x) {
    return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
                      __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
}

}  // namespace m3
