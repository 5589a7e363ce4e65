// A way to spare registers in kernels that are full of sums.
#pragma once

namespace yolo12_fastconv {

// threadIdx.x, read anew: the compiler computes what is derived from it where it is used, instead of once before a loop
// that has no register left to keep it in.
__device__ __forceinline__ int reread_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace yolo12_fastconv
