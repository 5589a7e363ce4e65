// The sm_90a instructions that the sm90 implicit GEMM is made of: mbarrier, clusters, bulk tensor copies (TMA), wgmma, stmatrix.
// All addresses of shared memory are 32-bit, as the instructions take them. Empty bodies for other architectures: the
// kernel that calls them has one too.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define YOLO12_HAS_WGMMA 1
#else
#define YOLO12_HAS_WGMMA 0
#endif

namespace yolo12_fastconv {

// ---- mbarrier -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
#if YOLO12_HAS_WGMMA
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// Makes initialised barriers visible to the copy engine; the other threads still need a __syncthreads().
__device__ __forceinline__ void barrier_init_fence() {
#if YOLO12_HAS_WGMMA
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if YOLO12_HAS_WGMMA
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
#endif
}

// The same if `condition` is not 0, without a branch.
__device__ __forceinline__ void barrier_arrive_if(uint32_t barrier, uint32_t condition) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(condition)
      : "memory");
#endif
}

// Arrives, and adds `bytes` that copies still have to deliver to the current phase. In the lane where `leads` is not 0, as
// are the copies below: a warp that runs its loops as a whole keeps addresses in uniform registers, where a single lane
// would have each copy start in a loop over lanes.
__device__ __forceinline__ void barrier_expect(uint32_t leads, uint32_t barrier, int bytes) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      "}\n" ::"r"(barrier),
      "r"(bytes), "r"(leads)
      : "memory");
#endif
}

// The same on a barrier of another block of the cluster, whose address address_in_block() gives. Relaxed: with .release a fence
// of all memory goes before it. What it says, that wgmma has read a stage, wgmma_wait() has made sure of.
__device__ __forceinline__ void barrier_arrive_in_block_if(uint32_t barrier, uint32_t condition) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(condition)
      : "memory");
#endif
}

// Waits until the phase of this parity has completed. On a fresh barrier, parity 1 passes and parity 0 waits.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if YOLO12_HAS_WGMMA
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

// ---- clusters -------------------------------------------------------------------------------------------------------

// Without a launch in clusters each block is one of its own: rank 0, and its own index.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank = 0;
#if YOLO12_HAS_WGMMA
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
#endif
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_index() {
  uint32_t index = 0;
#if YOLO12_HAS_WGMMA
  asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
#endif
  return static_cast<int>(index);
}

// Every thread of a cluster's blocks arrives once, and may then wait until all have. After barrier_init_fence(), the
// barriers that other blocks have set up are there behind the wait.
__device__ __forceinline__ void cluster_arrive() {
#if YOLO12_HAS_WGMMA
  asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if YOLO12_HAS_WGMMA
  asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
#endif
}

// `address` in this block's shared memory as the same place in that of block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
#if YOLO12_HAS_WGMMA
  asm("mapa.shared::cluster.u32 %0, %0, %1;\n" : "+r"(address) : "r"(rank));
#endif
  return address;
}

// Four floats to an address of another block; its barrier counts the 16 bytes when they are there, without a fence.
__device__ __forceinline__ void store_in_block(uint32_t to, const float* values, uint32_t barrier) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(to),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
      : "memory");
#endif
}

// ---- bulk tensor copies ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
#if YOLO12_HAS_WGMMA
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
#endif
}

// The box of `map` at these coordinates into shared memory; its bytes count on `barrier`.
__device__ __forceinline__ void load_box(uint32_t leads, uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];\n"
      "}\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(leads)
      : "memory");
#endif
}

// The same into the same place of both blocks of a cluster of two, where the bytes count on the barriers of the same place.
__device__ __forceinline__ void load_box_for_both(uint32_t leads, uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                                  int c0, int c1, int c2, int c3) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %8;\n"
      "}\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(leads), "h"(static_cast<uint16_t>(3))
      : "memory");
#endif
}

// The same of a map with five dimensions.
__device__ __forceinline__ void load_box_5d(uint32_t leads, uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %8, 0;\n"
      "@p cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], "
      "[%2];\n"
      "}\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(leads)
      : "memory");
#endif
}

// Im2col mode: pixels from (c1, c2, c3) on in the order of the map's bounding box, all shifted by (right, down).
__device__ __forceinline__ void load_pixels(uint32_t leads, uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3, int right, int down) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %9, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2], {%7, %8};\n"
      "}\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(right)),
      "h"(static_cast<uint16_t>(down)), "r"(leads)
      : "memory");
#endif
}

// Shared memory into the box of `map` at these coordinates; what lies outside of the tensor is not written. In the lane where
// `leads` is not 0.
__device__ __forceinline__ void store_box(uint32_t leads, const CUtensorMap* map, uint32_t from, int c0, int c1, int c2,
                                          int c3) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n"
      "@p cp.async.bulk.commit_group;\n"
      "}\n" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(leads)
      : "memory");
#endif
}

// Waits until the copy engine has read the shared memory of all but the last `kPending` stores of this thread.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
#if YOLO12_HAS_WGMMA
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
#endif
}

// Orders this thread's ordinary writes to shared memory before what the copy engine reads next.
__device__ __forceinline__ void fence_for_copy_engine() {
#if YOLO12_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements from registers to shared memory, the inverse of load_matrices.
__device__ __forceinline__ void store_matrices(uint32_t row_address, const uint32_t (&registers)[4]) {
#if YOLO12_HAS_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row_address),
               "r"(registers[0]), "r"(registers[1]), "r"(registers[2]), "r"(registers[3])
               : "memory");
#endif
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
#if YOLO12_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if YOLO12_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if YOLO12_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
#endif
}

#define YOLO12_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define YOLO12_REGISTERS_2 YOLO12_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define YOLO12_REGISTERS_3 YOLO12_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define YOLO12_REGISTERS_4 YOLO12_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define YOLO12_REGISTERS_5 YOLO12_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define YOLO12_REGISTERS_6 YOLO12_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define YOLO12_REGISTERS_8 \
  YOLO12_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define YOLO12_REGISTERS_9 YOLO12_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define YOLO12_REGISTERS_12                  \
  YOLO12_REGISTERS_9                         \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define YOLO12_REGISTERS_16                                                                      \
  YOLO12_REGISTERS_12                                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define YOLO12_SUMS_AT(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define YOLO12_SUMS_1 YOLO12_SUMS_AT(0)
#define YOLO12_SUMS_2 YOLO12_SUMS_1, YOLO12_SUMS_AT(8)
#define YOLO12_SUMS_3 YOLO12_SUMS_2, YOLO12_SUMS_AT(16)
#define YOLO12_SUMS_4 YOLO12_SUMS_3, YOLO12_SUMS_AT(24)
#define YOLO12_SUMS_5 YOLO12_SUMS_4, YOLO12_SUMS_AT(32)
#define YOLO12_SUMS_6 YOLO12_SUMS_5, YOLO12_SUMS_AT(40)
#define YOLO12_SUMS_8 YOLO12_SUMS_6, YOLO12_SUMS_AT(48), YOLO12_SUMS_AT(56)
#define YOLO12_SUMS_9 YOLO12_SUMS_8, YOLO12_SUMS_AT(64)
#define YOLO12_SUMS_12 YOLO12_SUMS_9, YOLO12_SUMS_AT(72), YOLO12_SUMS_AT(80), YOLO12_SUMS_AT(88)
#define YOLO12_SUMS_16 YOLO12_SUMS_12, YOLO12_SUMS_AT(96), YOLO12_SUMS_AT(104), YOLO12_SUMS_AT(112), YOLO12_SUMS_AT(120)

// groups: channels / 16; ia, ib: numbers of the operands behind the sums. Only 16-bit operands have the two last flags,
// which transpose them.
#define YOLO12_WGMMA(channels, groups, types, flags, ia, ib)                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #channels types " {" YOLO12_REGISTERS_##groups "}, %" ia ", %" ib \
                                                                                                  ", " flags ";\n"   \
               : YOLO12_SUMS_##groups                                                                                \
               : "l"(a), "l"(b))

#define YOLO12_WGMMA_HALVES(channels, groups, types, ia, ib)        \
  if constexpr (kTransposed) {                                      \
    YOLO12_WGMMA(channels, groups, types, "1, 1, 1, 1, 1", ia, ib); \
  } else if constexpr (kTransposedB) {                              \
    YOLO12_WGMMA(channels, groups, types, "1, 1, 1, 0, 1", ia, ib); \
  } else {                                                          \
    YOLO12_WGMMA(channels, groups, types, "1, 1, 1, 0, 0", ia, ib); \
  }

#define YOLO12_WGMMA_CASE(channels, groups, ia, ib)                                          \
  if constexpr (kChannels == channels) {                                                     \
    if constexpr (std::is_same_v<T, __half>) {                                               \
      YOLO12_WGMMA_HALVES(channels, groups, "k16.f32.f16.f16", ia, ib)                       \
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                 \
      YOLO12_WGMMA_HALVES(channels, groups, "k16.f32.bf16.bf16", ia, ib)                     \
    } else {                                                                                 \
      static_assert(!kTransposed && !kTransposedB, "wgmma transposes 16-bit operands only"); \
      YOLO12_WGMMA(channels, groups, "k8.f32.tf32.tf32", "1, 1, 1", ia, ib);                 \
    }                                                                                        \
  }

// d = a * b + d: 64 pixels x kChannels over 32 bytes of input channels (16, or 8 as TF32), asynchronously, by the four
// warps of a warpgroup. Both operands lie in shared memory, rows of input channels, as their descriptors say. Warp w holds
// rows 16 w to 16 w + 15: lane l has elements (l / 4 + 8 h, 8 j + 2 (l % 4) + e) in d[4 j + 2 h + e].
// kTransposed: both operands lie as 16 rows of the reduction, as pixels do, and the channels inside (transposed_start());
// kTransposedB: only b does.
template <class T, int kChannels, bool kTransposed = false, bool kTransposedB = kTransposed>
__device__ __forceinline__ void wgmma(float (&d)[kChannels / 2], uint64_t a, uint64_t b){
#if YOLO12_HAS_WGMMA
    YOLO12_WGMMA_CASE(16, 1, "8", "9") YOLO12_WGMMA_CASE(32, 2, "16", "17") YOLO12_WGMMA_CASE(48, 3, "24", "25")
        YOLO12_WGMMA_CASE(64, 4, "32", "33") YOLO12_WGMMA_CASE(80, 5, "40", "41") YOLO12_WGMMA_CASE(96, 6, "48", "49")
            YOLO12_WGMMA_CASE(128, 8, "64", "65") YOLO12_WGMMA_CASE(144, 9, "72", "73")
                YOLO12_WGMMA_CASE(192, 12, "96", "97") YOLO12_WGMMA_CASE(256, 16, "128", "129")
#endif
}

#undef YOLO12_WGMMA_CASE
#undef YOLO12_WGMMA_HALVES
#undef YOLO12_WGMMA
#undef YOLO12_SUMS_AT

// Descriptor of an operand of wgmma: rows that are swizzled within `row_bytes` (128, 64 or 32), groups of eight rows
// `group_bytes` apart. The swizzle is a function of the address bits, so that a matrix may start at any row. The upper
// half is the layout, the lower half the address in units of 16 bytes.
__device__ __forceinline__ uint32_t descriptor_layout(int row_bytes, int group_bytes) {
  const uint32_t code = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : 3;
  return code << 30 | static_cast<uint32_t>(group_bytes) >> 4;
}
__device__ __forceinline__ uint32_t descriptor_start(uint32_t address) { return 1u << 16 | address >> 4; }
__device__ __forceinline__ uint64_t descriptor(uint32_t layout, uint32_t start) {
  return static_cast<uint64_t>(layout) << 32 | start;
}

// Lower half of the descriptor of a transposed operand: `block_bytes` lie between blocks of as many channels as a
// swizzled row holds. Any multiple of 16: blocks may overlap, as the taps of a filter's row do, a pixel apart. The groups
// of the upper half are of eight rows of the reduction.
__device__ __forceinline__ uint32_t transposed_start(uint32_t address, int block_bytes) {
  return static_cast<uint32_t>(block_bytes) >> 4 << 16 | address >> 4;
}

}  // namespace yolo12_fastconv
