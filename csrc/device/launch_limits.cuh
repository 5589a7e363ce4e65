// What a launcher asks the current device, and the bound on a grid.
#pragma once

#include <atomic>
#include <climits>
#include <mutex>
#include <set>
#include <utility>

#include "launch.cuh"

namespace yolo12_fastconv {

// Of the current device. Asked once for each: a launcher asks at every launch.
inline int multiprocessor_count() {
  constexpr int kDevices = 64;  // any further ones are asked every time
  static std::atomic<int> known[kDevices] = {};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  int count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

// A kernel gets more than 48 KiB of dynamic shared memory only after asking. Asked once per kernel and device, for as much
// as it can have: with `bytes` alone, two threads that launch it with different sizes would take each other's away.
template <class Kernel>
void allow_shared_bytes(Kernel* kernel, int bytes) {
  if (bytes <= 48 * 1024) return;
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  const void* const function = reinterpret_cast<const void*>(kernel);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({function, device})) return;
  int most = 0;
  cudaFuncAttributes attributes;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory limit");
  check_cuda(cudaFuncGetAttributes(&attributes, function), "cudaFuncGetAttributes");
  const int dynamic = most - static_cast<int>(attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic),
             "shared memory size");
  allowed.insert({function, device});
}

// The x dimension of a grid, the only one that holds more than 65535 blocks.
inline unsigned int checked_grid(int64_t blocks, const char* kernel) {
  if (blocks > INT_MAX) fail(kernel, ": ", blocks, " blocks, a grid holds ", INT_MAX, "; split the batch");
  return static_cast<unsigned int>(blocks);
}

}  // namespace yolo12_fastconv
