// Results of the sm90 kernels on their way from float sums to half tensors: pairs of values, and swizzled buffers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace yolo12_fastconv {

// Of bits: two halves or bfloat16s.
template <class T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  PairOf<T> pair;
  if constexpr (std::is_same_v<T, __half>) {
    pair = __floats2half2_rn(first, second);
  } else {
    pair = __floats2bfloat162_rn(first, second);
  }
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <class T>
__device__ __forceinline__ uint32_t sum_of_pairs(uint32_t a, uint32_t b) {
  PairOf<T> pair[2];
  memcpy(&pair[0], &a, 4);
  memcpy(&pair[1], &b, 4);
  pair[0] = __hadd2(pair[0], pair[1]);
  memcpy(&a, &pair[0], 4);
  return a;
}

// Byte offset of a 16-byte chunk in the rows of a buffer, swizzled as the tensor map is that it is stored by.
template <int kRowBytes>
__device__ __forceinline__ int buffer_offset(int row, int chunk) {
  const int mask = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? (row >> 1) & 3 : kRowBytes == 32 ? (row >> 2) & 1 : 0;
  return row * kRowBytes + (chunk ^ mask) * 16;
}

}  // namespace yolo12_fastconv
