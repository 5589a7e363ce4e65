// Sums of half or bfloat16 values and of their squares on tensor cores (mma.sync, compute capability 8.0 and later).
#pragma once

#include <cstdint>

#include "sm90_results.cuh"
#include "tensor_core.cuh"

namespace yolo12_fastconv {

// d += a * b over 16 bytes of k: m16n8k8. Fragments as in multiply_add(), of which these are the first half.
template <class T>
__device__ __forceinline__ void multiply_add_half(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
#endif
}

// Along the rows of 16 x 16 (or 8) values that lie in registers as the first operand of m16n8k16 (or m16n8k8): products with
// ones are the sums, the diagonal of the products of all pairs of rows the squares. Exact products, float sums: 5
// instructions for 256 values. The tensor core cuts off what a sum has no bits for: few products in a row, for a bound of
// 2^-23 each. Squares 8 columns at a time: the second operand of 16 would be two registers that are no neighbours in the
// first, copies.
template <class T>
class RowMoments {
 public:
  __device__ __forceinline__ void add(const uint32_t (&values)[4]) {
    multiply_add<T>(sums_, values, ones(), ones());
    add_squares(values[0], values[1]);
    add_squares(values[2], values[3]);
  }
  __device__ __forceinline__ void add(uint32_t low, uint32_t high) {
    multiply_add_half<T>(sums_, low, high, ones());
    add_squares(low, high);
  }

  // Row lane / 4 (half 0) and 8 + lane / 4 (half 1): the sum in all lanes of the row, the squares in its owner.
  __device__ __forceinline__ float sum(int half) const { return sums_[2 * half]; }
  __device__ __forceinline__ float squares(int half) const {
    const bool odd = threadIdx.x & 4;
    return half == 0 ? (odd ? low_[1] : low_[0]) : (odd ? high_[3] : high_[2]);
  }
  static __device__ __forceinline__ bool owns() { return threadIdx.x % 4 == threadIdx.x % 32 / 8; }

 private:
  static __device__ __forceinline__ uint32_t ones() { return round_pair<T>(1.0f, 1.0f); }
  __device__ __forceinline__ void add_squares(uint32_t low, uint32_t high) {
    multiply_add_half<T>(low_, low, high, low);
    multiply_add_half<T>(high_, low, high, high);
  }

  float sums_[4] = {}, low_[4] = {}, high_[4] = {};
};

// Of an 8 x 8 matrix, of which lane l has elements (l / 4, 2 (l % 4)) and the next: those of its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t elements) {
  uint32_t transposed = 0;
#if __CUDA_ARCH__ >= 750
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(elements));
#endif
  return transposed;
}

// a * b + c of both elements of a word.
template <class T>
__device__ __forceinline__ uint32_t multiply_add_pairs(uint32_t a, uint32_t b, uint32_t c) {
  PairOf<T> pair[3];
  memcpy(&pair[0], &a, 4);
  memcpy(&pair[1], &b, 4);
  memcpy(&pair[2], &c, 4);
  pair[0] = __hfma2(pair[0], pair[1], pair[2]);
  memcpy(&a, &pair[0], 4);
  return a;
}

}  // namespace yolo12_fastconv
