// Copies from global to shared memory that run while the threads compute (cp.async, from compute capability 8.0 on).
// Before 8.0 the same functions copy at once.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace yolo12_fastconv {

// 16 bytes into shared memory (an address as the instructions take it), of which only the first `bytes` are read: the rest
// becomes zero. Past L1, which is better left to shared memory. Both addresses are aligned to 16 bytes. From 8.0 on only.
__device__ __forceinline__ void copy_async(unsigned int to_shared, const void* from, int bytes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(bytes) : "memory");
#endif
}

// A chunk is 16 bytes, or zeros and no access to `from` where not valid: six instructions less than a size that is not a
// constant. Past L1. From 8.0 on only.
__device__ __forceinline__ void copy_chunk_async(unsigned int to_shared, const void* from, bool valid) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.s32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}\n" ::"r"(to_shared),
      "l"(from), "r"(int(valid))
      : "memory");
#endif
}

// The same for a pointer, which costs a conversion of the address. On every GPU.
__device__ __forceinline__ void copy_chunk_async(void* to_shared, const void* from, bool valid) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  copy_chunk_async(static_cast<unsigned int>(__cvta_generic_to_shared(to_shared)), from, valid);
#else
  *static_cast<uint4*>(to_shared) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}

// The same with single elements too: 4, 8 or 16 bytes, both addresses aligned to them.
template <int kBytes>
__device__ __forceinline__ void copy_bytes_async(void* to_shared, const void* from, bool valid) {
  if constexpr (kBytes == 16) {
    copy_chunk_async(to_shared, from, valid);
  } else {
    static_assert(kBytes == 4 || kBytes == 8);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                     static_cast<unsigned int>(__cvta_generic_to_shared(to_shared))),
                 "l"(from), "n"(kBytes), "r"(valid ? kBytes : 0)
                 : "memory");
#else
    using Word = std::conditional_t<kBytes == 4, unsigned int, unsigned long long>;
    *static_cast<Word*>(to_shared) = valid ? *static_cast<const Word*>(from) : Word(0);
#endif
  }
}

// Closes the group of copies issued since the last call.
__device__ __forceinline__ void commit_async_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups are unfinished. Other threads see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void wait_for_async_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace yolo12_fastconv
