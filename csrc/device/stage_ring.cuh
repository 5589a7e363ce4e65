// The ring of stages of a warpgroup's copies, in which products wait for copies and copies for products.
#pragma once

#include <cstdint>

namespace yolo12_fastconv {

// Its barriers: filled[stages], then emptied[stages]; and a place in it, with the parity of the barrier phase there.
struct StageRing {
  uint32_t barriers;
  int stages;
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ uint32_t filled() const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t emptied() const { return barriers + (stages + stage) * 8; }
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace yolo12_fastconv
