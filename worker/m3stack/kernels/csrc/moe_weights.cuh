// Weights as experts store them: loaded past L1, MXFP8 decoded in registers.
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

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
    return product;
}

// two e4m3 as bf16: their bits at the exponent's low end are the value times 2^-120
__device__ __forceinline__ uint32_t widened(uint32_t four, uint32_t which) {
    const uint32_t spread = __byte_perm(four, 0, which);
    return ((spread >> 4) & 0x07f007f0u) | (spread & 0x80008000u);
}

// 2^120 times the scale as two bf16
__device__ __forceinline__ uint32_t factor_of(uint32_t byte) {
    return (byte == 255 ? 0x7fc0u : (byte + 120) << 7) * 0x10001u;
}

}  // namespace m3
