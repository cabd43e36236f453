// Hopper's asynchronous instructions as plain functions: barriers, tensor copies, warpgroup MMA.
//
// Layout facts used everywhere: a tile of 64 bf16 columns is 128 bytes wide, copied with the
// 128-byte swizzle; a page of 128 columns is two such halves, one after the other.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace m3 {

constexpr int kPage = 128;               // tokens of a page, and of a selection block
constexpr int kDim = 128;                // head dim
constexpr int kHalfBytes = kPage * 128;  // one 64-column half of a page
constexpr int kPageBytes = 2 * kHalfBytes;
constexpr int kWarpgroup = 128;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The dynamic shared memory of a kernel as a struct whose tiles start at multiples of 1,024 bytes.
template <typename Shared>
__device__ __forceinline__ Shared& aligned_shared(uint8_t* raw) {
  return *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
}

// ---- barriers in shared memory ----
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Named barrier over one warpgroup (ids 1 and up; 0 is __syncthreads).
__device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kWarpgroup) : "memory");
}

// Makes ordinary writes to shared memory visible to products that other threads start later.
__device__ __forceinline__ void publish_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A ring of stages: which stage is next and the parity of its current pass.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- tensor copies ----
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

__device__ __forceinline__ void copy_tile_3d(void* target, const CUtensorMap* map,
                                             uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void copy_tile_4d(void* target, const CUtensorMap* map,
                                             uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(target)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// ---- register budgets ----
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- warpgroup MMA ----
__device__ __forceinline__ void mma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Orders the compiler's register reads after a wait, without an instruction.
template <int kCount>
__device__ __forceinline__ void mma_settle(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Keeps the compiler from computing descriptors ahead of a loop, where they would cost registers.
__device__ __forceinline__ uint32_t pinned(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Rows of 64 contiguous bf16 along the reduced axis (Q, K): 8 rows are 1,024 bytes apart.
__device__ __forceinline__ uint64_t describe_rows(uint32_t address) {
  return (uint64_t((address & 0x3ffff) >> 4)) | (uint64_t(1) << 16) | (uint64_t(64) << 32) |
         (uint64_t(1) << 62);
}

// Rows of 64 contiguous bf16 across the reduced axis (V): the two halves are kHalfBytes apart.
__device__ __forceinline__ uint64_t describe_columns(uint32_t address) {
  return (uint64_t((address & 0x3ffff) >> 4)) | (uint64_t(kHalfBytes >> 4) << 16) |
         (uint64_t(64) << 32) | (uint64_t(1) << 62);
}

#define M3_ACCUMULATORS_64(d)                                                                     \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),             \
      "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),     \
      "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),  \
      "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),  \
      "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),  \
      "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),  \
      "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),  \
      "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),  \
      "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),  \
      "+f"(d[63])

#define M3_REGISTER_LIST_64                                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "              \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// What operands of a product are; e4m3 values are exact in either.
enum class Values { kBf16, kF16 };

#define M3_WGMMA(types, operands)                                             \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32." types " " M3_REGISTER_LIST_64 operands ";\n}"

// d[64 x 128] = (accumulate ? d : 0) + a[64 x 16] * b, a and b by descriptor, b row-wise.
template <Values kValues = Values::kBf16>
__device__ __forceinline__ void mma_shared(float (&d)[64], uint64_t a, uint64_t b,
                                           int accumulate) {
#define M3_PRODUCT(types)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n" M3_WGMMA(types, "%64, %65, p, 1, 1, 0, 0") \
               : M3_ACCUMULATORS_64(d)                                               \
               : "l"(a), "l"(b), "r"(accumulate))
  if constexpr (kValues == Values::kBf16) M3_PRODUCT("bf16.bf16");
  else M3_PRODUCT("f16.f16");
#undef M3_PRODUCT
}

#define M3_PRODUCT(types, order)                                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                          \
               M3_WGMMA(types, "{%64, %65, %66, %67}, %68, p, 1, 1, " order)         \
               : M3_ACCUMULATORS_64(d)                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

// The same with a in registers.
__device__ __forceinline__ void mma_registers(float (&d)[64], const uint32_t* a, uint64_t b,
                                              int accumulate) {
  M3_PRODUCT("bf16.bf16", "0");
}

// d += a * b with a in registers and b column-wise (V).
template <Values kValues = Values::kBf16>
__device__ __forceinline__ void mma_registers_columns(float (&d)[64], const uint32_t* a,
                                                      uint64_t b, int accumulate) {
  if constexpr (kValues == Values::kBf16) M3_PRODUCT("bf16.bf16", "1");
  else M3_PRODUCT("f16.f16", "1");
}
#undef M3_PRODUCT

// ---- small arithmetic ----
// Zero in place, so that what held the value goes on holding it.
__device__ __forceinline__ void clear(float& value) {
  asm volatile("mov.f32 %0, 0f00000000;" : "+f"(value));
}

// Unlike fmaxf it keeps NaN, so that a NaN key spoils its block as the reference says.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ float low_of_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Four e4m3 as two pairs of f16, which hold them exactly. NaN stays NaN.
__device__ __forceinline__ uint2 widen_e4m3(uint32_t four) {
  uint2 wide;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(wide.x), "=r"(wide.y)
      : "r"(four));
  return wide;
}

inline cudaError_t launch_plain(const void* kernel, dim3 blocks, int threads, size_t shared_bytes,
                                void** arguments, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, blocks, dim3(threads), arguments, shared_bytes, stream);
}

}  // namespace m3
