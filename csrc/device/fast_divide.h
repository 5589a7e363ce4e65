// Division of 31-bit numbers by a divisor known on the host: one multiply-high and a shift instead of ~20 instructions.
#pragma once

#include <cstdint>

namespace yolo12_fastconv {

#ifdef __CUDACC__
#define YOLO12_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define YOLO12_HOST_DEVICE inline
#endif

// Exact for 0 <= n < 2^31 and 1 <= d < 2^31 (Granlund and Montgomery 1994: multiplier ceil(2^(31+l) / d), l = ceil(log2
// d), which fits 32 bits).
struct FastDivide {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  FastDivide() = default;
  explicit FastDivide(int d) : divisor(static_cast<uint32_t>(d)) {
    if (divisor == 1) return;
    uint32_t log = 0;
    while ((uint64_t(1) << log) < divisor) ++log;
    multiplier = static_cast<uint32_t>(((uint64_t(1) << (31 + log)) + divisor - 1) / divisor);
    shift = log - 1;
  }

  YOLO12_HOST_DEVICE int divide(int n) const {
    if (divisor == 1) return n;
#ifdef __CUDA_ARCH__
    return static_cast<int>(__umulhi(static_cast<uint32_t>(n), multiplier) >> shift);
#else
    return static_cast<int>(static_cast<uint32_t>((uint64_t(uint32_t(n)) * multiplier) >> 32) >> shift);
#endif
  }
  YOLO12_HOST_DEVICE void divide(int n, int& quotient, int& remainder) const {
    quotient = divide(n);
    remainder = n - quotient * static_cast<int>(divisor);
  }
};

}  // namespace yolo12_fastconv
