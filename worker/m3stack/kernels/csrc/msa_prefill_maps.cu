// Encodes tensor maps for the copy engine; the driver call is found at run time, so nothing links
// against the driver library.
#include "msa_prefill_hopper.cuh"

// A map of a tensor of `rank` dims, innermost first, copied in boxes of 128 bytes a row with the
// 128-byte swizzle. Elements of two bytes are bf16, others are bytes. `strides` are bytes of dims 1 and
// up. Returns 0, a cudaError_t, or minus a CUresult.
extern "C" int m3_encode_map(void* map, void* address, int element_bytes, int rank,
                             const uint64_t* sizes, const uint64_t* strides, const uint32_t* box) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
  if (error != cudaSuccess) return error;
  if (status != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  const uint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  const CUresult result =
      encode(static_cast<CUtensorMap*>(map),
             element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
             rank, address, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return -int(result);
}
