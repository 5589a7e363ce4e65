// The matrix instructions of sm_80: ldmatrix and mma.sync. Addresses of shared memory are 32-bit, as they take them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace yolo12_fastconv {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit ones): lanes 8i..8i+7 give the row addresses of matrix i, and
// lane l receives elements (l / 4, 2 (l % 4)) and the next of each.
__device__ __forceinline__ void load_matrices(uint32_t (&registers)[4], uint32_t row_address) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address)
               : "memory");
#endif
}

// load_matrices of four or two, each transposed: lane l receives elements (2 (l % 4), l / 4) and the next of its column.
__device__ __forceinline__ void load_transposed(uint32_t (&registers)[4], uint32_t row_address) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address)
               : "memory");
#endif
}
__device__ __forceinline__ void load_transposed(uint32_t (&registers)[2], uint32_t row_address) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(row_address)
               : "memory");
#endif
}

// d += a * b over 32 bytes of k: m16n8k16 for half and bfloat16, m16n8k8 for TF32. Fragments as load_matrices gives them.
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// The tensor core drops the low 13 bits of a float operand; rounding first halves the error.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
  uint32_t rounded;
  asm volatile("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(rounded) : "r"(bits));
  return rounded;
#else
  return bits;
#endif
}

}  // namespace yolo12_fastconv
