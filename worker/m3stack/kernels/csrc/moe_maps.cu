// Encodes the tensor maps of the expert kernels; the driver call is found at run time, so nothing links
// against the driver library.
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

// A map of `rank` dims, innermost first; `strides` are bytes of dims 1 and up. Elements of two bytes are
// bf16, others are bytes; boxes 128 bytes wide are copied with the 128-byte swizzle, others as they stand.
// Returns 0, a cudaError_t, or minus a CUresult.
extern "C" int m3_expert_map(void* map, void* address, int element_bytes, int rank, const uint64_t* sizes,
                             const uint64_t* strides, const uint32_t* box) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
    if (error != cudaSuccess) return error;
    if (status != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    const uint32_t steps[5] = {1, 1, 1, 1, 1};
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    const bool is_wide = element_bytes == 2;
    const CUresult result = encode(
        static_cast<CUtensorMap*>(map), is_wide ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
        rank, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box[0] * element_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return -int(result);
}
