// What every launcher needs: the element type behind a DType, and the check after a launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "dispatch.h"

namespace yolo12_fastconv {

template <class T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>) with the element type of `dtype`: __half, __nv_bfloat16, float or double.
template <class Function>
void with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16: return function(TypeTag<__half>{});
    case DType::kBFloat16: return function(TypeTag<__nv_bfloat16>{});
    case DType::kFloat32: return function(TypeTag<float>{});
    case DType::kFloat64: return function(TypeTag<double>{});
  }
  fail("no element type for dtype code ", static_cast<int>(dtype));
}

// Likewise for the two half types; `who` names the caller in the error for any other.
template <class Function>
void with_half_type(DType dtype, const char* who, Function&& function) {
  switch (dtype) {
    case DType::kFloat16: return function(TypeTag<__half>{});
    case DType::kBFloat16: return function(TypeTag<__nv_bfloat16>{});
    default: fail(who, ": no kernel for ", name_of(dtype));
  }
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(what, ": ", cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

}  // namespace yolo12_fastconv
