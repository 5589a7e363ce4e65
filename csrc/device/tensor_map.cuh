// Tensor maps of the copy engine, on the host.
#pragma once

#include <cuda.h>

#include "launch.cuh"

namespace yolo12_fastconv {

// cuTensorMapEncode* live in the driver's library, which is not linked.
template <class Function>
Function tensor_map_encoder(const char* kernel, const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    fail(kernel, ": the driver has no ", name, "; update it, or set YOLO12_FASTCONV_TARGET=sm80");
  }
  return reinterpret_cast<Function>(address);
}

inline void check_tensor_map(CUresult status, const char* kernel, const char* which) {
  if (status != CUDA_SUCCESS) fail(kernel, ": tensor map of ", which, ": driver error ", static_cast<int>(status));
}

inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kFloat16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

// Rows of `row_bytes` are swizzled within themselves: 128, 64 or 32; others are not.
inline CUtensorMapSwizzle map_swizzle(int row_bytes) {
  switch (row_bytes) {
    case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

// A tensor in up to five dimensions, the innermost one dense; boxes of `box` elements of which every `step`th is copied,
// in rows of `row_bytes`.
template <int kDimensions>
CUtensorMap tensor_map(const char* kernel, const char* which, CUtensorMapDataType type, const void* data,
                       const cuuint64_t (&size)[kDimensions], const cuuint64_t (&stride_bytes)[kDimensions - 1],
                       const cuuint32_t (&box)[kDimensions], const cuuint32_t (&step)[kDimensions], int row_bytes) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = tensor_map_encoder<Encode>(kernel, "cuTensorMapEncodeTiled");
  CUtensorMap map;
  const CUresult status = encode(&map, type, kDimensions, const_cast<void*>(data), size, stride_bytes, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, map_swizzle(row_bytes),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_tensor_map(status, kernel, which);
  return map;
}

}  // namespace yolo12_fastconv
