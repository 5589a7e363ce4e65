// Tensor maps of the copy engine, on the host.
#pragma once

#include <cuda.h>

#include "launch.cuh"

namespace yolo12_fastconv {

// cuTensorMapEncodeTiled lives in the driver's library, which is not linked.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder(const char* kernel) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    fail(kernel, ": the driver has no cuTensorMapEncodeTiled; update it, or set YOLO12_FASTCONV_TARGET=sm80");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(address);
}

// A tensor of half or bfloat16 in four dimensions, the innermost one dense; boxes of `box` elements of which every `step`th
// is copied, in rows that are swizzled within `row_bytes` (128, 64 or 32).
inline CUtensorMap tensor_map(const char* kernel, const char* which, DType dtype, const void* data,
                              const cuuint64_t (&size)[4], const cuuint64_t (&stride_bytes)[3],
                              const cuuint32_t (&box)[4], const cuuint32_t (&step)[4], int row_bytes) {
  static const auto encode = tensor_map_encoder(kernel);
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, 4, const_cast<void*>(data), size, stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) fail(kernel, ": tensor map of ", which, ": driver error ", static_cast<int>(status));
  return map;
}

}  // namespace yolo12_fastconv
