// What a launcher asks the current device, and the bound on a grid.
#pragma once

#include <climits>

#include "launch.cuh"

namespace yolo12_fastconv {

inline int multiprocessor_count() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  return count;
}

// A kernel gets more than 48 KiB of dynamic shared memory only after asking.
template <class Kernel>
void allow_shared_bytes(Kernel* kernel, int bytes) {
  if (bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory size");
  }
}

// The x dimension of a grid, the only one that holds more than 65535 blocks.
inline unsigned int checked_grid(int64_t blocks, const char* kernel) {
  if (blocks > INT_MAX) fail(kernel, ": ", blocks, " blocks, a grid holds ", INT_MAX, "; split the batch");
  return static_cast<unsigned int>(blocks);
}

}  // namespace yolo12_fastconv
