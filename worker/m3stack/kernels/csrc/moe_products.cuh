// Warpgroup products of 64 rows of weights and N tokens, and the copies that feed them: names over PTX.
//
// Tiles of 64 bf16 columns stand in shared memory as rows of 128 bytes with the 128-byte swizzle.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "async_copy.cuh"

namespace m3 {

constexpr int kWarpgroup = 128;

// The dynamic shared memory of a kernel as a struct whose tiles start at multiples of 1,024 bytes.
template <typename Shared>
__device__ __forceinline__ Shared& aligned_shared(uint8_t* raw) {
    return *reinterpret_cast<Shared*>(raw + (-shared_address(raw) & 1023));
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

// ---- tensor copies; coordinates innermost first ----
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map));
}

__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}

// the same place of both blocks of a cluster, each with its own barrier
__device__ __forceinline__ void copy_tile_to_both(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
        : "memory");
}

// columns from x, groups of rows from w, of matrix v
__device__ __forceinline__ void copy_rows(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %6, %6, %4, %5}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(w), "r"(v), "r"(0)
        : "memory");
}

// An arrival at the same barrier of a block of the cluster: what this thread has read may be written over.
// Not `.release.cluster`, which would wait for all its writes to reach the whole GPU.
// Nothing is handed over that it wrote, so no write has to be seen: CUTLASS's ClusterBarrier::arrive(cta_id).
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                     remote_address(shared_address(barrier), rank))
                 : "memory");
}

__device__ __forceinline__ uint32_t rank_in_cluster() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
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

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// ---- small arithmetic ----
// a minimum that keeps NaN, as clamp does
__device__ __forceinline__ float min_nan(float x, float y) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

__device__ __forceinline__ float sigmoid_fast(float x) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}

// ---- products ----
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Orders the compiler's reads of sums after a wait, without an instruction.
template <int kCount, int kSize>
__device__ __forceinline__ void mma_settle(float (&values)[kSize]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Keeps the compiler from making an operand between products, which would run them one by one.
__device__ __forceinline__ void mma_settle_operand(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Rows of 64 bf16 along the reduced axis: 8 rows are 1,024 bytes apart; 16 columns further is plus 2.
__device__ __forceinline__ uint64_t describe_rows(uint32_t address) {
    return (uint64_t((address & 0x3ffff) >> 4)) | (uint64_t(1) << 16) | (uint64_t(64) << 32) | (uint64_t(1) << 62);
}

// sums d[AT], d[AT + 1], ... as operands
#define M3_F8(i) "+f"(d[AT + i]), "+f"(d[AT + i + 1]), "+f"(d[AT + i + 2]), "+f"(d[AT + i + 3]), "+f"(d[AT + i + 4]), \
    "+f"(d[AT + i + 5]), "+f"(d[AT + i + 6]), "+f"(d[AT + i + 7])
#define M3_D8 M3_F8(0)
#define M3_N8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define M3_D16 M3_D8, M3_F8(8)
#define M3_N16 M3_N8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define M3_D24 M3_D16, M3_F8(16)
#define M3_N24 M3_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define M3_D32 M3_D24, M3_F8(24)
#define M3_N32 M3_N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define M3_D40 M3_D32, M3_F8(32)
#define M3_N40 M3_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define M3_D48 M3_D40, M3_F8(40)
#define M3_N48 M3_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define M3_D56 M3_D48, M3_F8(48)
#define M3_N56 M3_N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define M3_D64 M3_D56, M3_F8(56)
#define M3_N64 M3_N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define M3_D72 M3_D64, M3_F8(64)
#define M3_N72 M3_N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define M3_D80 M3_D72, M3_F8(72)
#define M3_N80 M3_N72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define M3_D88 M3_D80, M3_F8(80)
#define M3_N88 M3_N80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define M3_D96 M3_D88, M3_F8(88)
#define M3_N96 M3_N88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define M3_D104 M3_D96, M3_F8(96)
#define M3_N104 M3_N96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define M3_D112 M3_D104, M3_F8(104)
#define M3_N112 M3_N104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define M3_D120 M3_D112, M3_F8(112)
#define M3_N120 M3_N112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define M3_D128 M3_D120, M3_F8(120)
#define M3_N128 M3_N120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define M3_D68 M3_D64, "+f"(d[AT + 64]), "+f"(d[AT + 65]), "+f"(d[AT + 66]), "+f"(d[AT + 67])
#define M3_N68 M3_N64 ", %64, %65, %66, %67"

#define M3_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {"

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] * b[N x 16]^T; the sums are d[AT] and on
#define M3_SHARED(n, half, a_at, b_at, p_at)                                                            \
    template <int AT, int N, int SIZE>                                                                  \
    __device__ __forceinline__ std::enable_if_t<N == n> mma_shared(float (&d)[SIZE], uint64_t a, uint64_t b, \
                                                                   int accumulate) {                    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\n" M3_WGMMA(n) M3_N##half          \
                     "}, %" #a_at ", %" #b_at ", p, 1, 1, 0, 0;\n}"                                      \
                     : M3_D##half                                                                       \
                     : "l"(a), "l"(b), "r"(accumulate));                                                \
    }
#define M3_REGISTERS(n, half, a0, a1, a2, a3, b_at, p_at)                                               \
    template <int AT, int N, int SIZE>                                                                  \
    __device__ __forceinline__ std::enable_if_t<N == n> mma_registers(float (&d)[SIZE], const uint32_t (&a)[4], \
                                                                      uint64_t b, int accumulate) {     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\n" M3_WGMMA(n) M3_N##half          \
                     "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at ", p, 1, 1, 0;\n}"           \
                     : M3_D##half                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));            \
    }

M3_SHARED(32, 16, 16, 17, 18)
M3_SHARED(64, 32, 32, 33, 34)
M3_SHARED(96, 48, 48, 49, 50)
M3_SHARED(128, 64, 64, 65, 66)
M3_SHARED(136, 68, 68, 69, 70)
M3_SHARED(144, 72, 72, 73, 74)
M3_SHARED(160, 80, 80, 81, 82)
M3_SHARED(192, 96, 96, 97, 98)
M3_SHARED(208, 104, 104, 105, 106)
M3_SHARED(224, 112, 112, 113, 114)
M3_SHARED(240, 120, 120, 121, 122)
M3_SHARED(256, 128, 128, 129, 130)
M3_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13)
M3_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21)
M3_REGISTERS(48, 24, 24, 25, 26, 27, 28, 29)
M3_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
M3_REGISTERS(96, 48, 48, 49, 50, 51, 52, 53)
M3_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)
M3_REGISTERS(136, 68, 68, 69, 70, 71, 72, 73)
M3_REGISTERS(144, 72, 72, 73, 74, 75, 76, 77)
M3_REGISTERS(160, 80, 80, 81, 82, 83, 84, 85)
M3_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101)
M3_REGISTERS(208, 104, 104, 105, 106, 107, 108, 109)
M3_REGISTERS(224, 112, 112, 113, 114, 115, 116, 117)
M3_REGISTERS(240, 120, 120, 121, 122, 123, 124, 125)
M3_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133)

#undef M3_F8
#undef M3_WGMMA
#undef M3_SHARED
#undef M3_REGISTERS

// in the stream's order: these kernels wait for nothing by themselves
inline cudaError_t launch_plain(const void* kernel, dim3 blocks, int threads, size_t shared_bytes, void** arguments,
                                cudaStream_t stream) {
    return cudaLaunchKernel(kernel, blocks, dim3(threads), arguments, shared_bytes, stream);
}

// one block on each processor, in clusters; `early`: may start while the kernel before it ends
inline cudaError_t launch_ring(const void* kernel, int blocks, size_t shared_bytes, int cluster, bool early,
                               void** arguments, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(3 * kWarpgroup);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = early ? 2 : 1;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace m3
