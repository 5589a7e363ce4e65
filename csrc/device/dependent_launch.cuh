// Programmatic dependent launch (compute capability 9.0 and later): a kernel starts while the one before it in the
// stream still runs, sets up what does not depend on it, and waits before it touches global memory. Between short
// kernels that hides the launch and the set-up.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "launch.cuh"

namespace yolo12_fastconv {

// Until every earlier kernel of the stream has finished and its writes are visible. A kernel launched by
// launch_dependent() calls it in every block before its first access to global memory: reads (anything may have been
// written just before, weights and statistics too) and writes (the memory may have been freed by a kernel that still
// reads it).
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, but not before `prepared` is known, which depends on what should be computed by then. Otherwise ptxas puts the
// wait first, since it needs no register, and computes addresses while memory could already be read.
__device__ __forceinline__ void wait_for_earlier_kernels([[maybe_unused]] uint32_t prepared) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p griddepcontrol.wait;\n"
      "@!p griddepcontrol.wait;\n"
      "}\n" ::"r"(prepared)
      : "memory");
#endif
}

// The next kernel of the stream may start once all blocks have called this or ended. Its results do not depend on when.
__device__ __forceinline__ void let_later_kernels_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the code that the current device runs for this kernel was compiled for 9.0 or later, so that it does wait: PTX
// of 8.0, translated by the driver for a newer device, would not. Asked once per kernel and device.
template <auto kKernel>
bool waits_for_earlier_kernels() {
  constexpr int kMostDevices = 64;
  enum : signed char { kUnknown, kNo, kYes };
  static std::array<std::atomic<signed char>, kMostDevices> known{};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMostDevices) return false;
  signed char state = known[device].load(std::memory_order_relaxed);
  if (state == kUnknown) {
    cudaFuncAttributes attributes;
    int major = 0;
    check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)), "cudaFuncGetAttributes");
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    state = major >= 9 && attributes.ptxVersion >= 90 ? kYes : kNo;
    known[device].store(state, std::memory_order_relaxed);
  }
  return state == kYes;
}

// Launches kKernel(arguments...) so that it may overlap the end of the kernel before it, in clusters of `cluster` blocks.
template <auto kKernel, class... Arguments>
void launch_clusters(const char* name, unsigned int cluster, unsigned int grid, unsigned int threads,
                     size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2];
  unsigned int count = 0;
  if (waits_for_earlier_kernels<kKernel>()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&config, kKernel, arguments...), name);
}

// The same without clusters.
template <auto kKernel, class... Arguments>
void launch_dependent(const char* name, unsigned int grid, unsigned int threads, size_t shared_bytes,
                      cudaStream_t stream, const Arguments&... arguments) {
  launch_clusters<kKernel>(name, 1, grid, threads, shared_bytes, stream, arguments...);
}

}  // namespace yolo12_fastconv
