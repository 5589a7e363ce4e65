// wgmma with both operands transposed: rows of the reduction in shared memory, as pixels lie, and the channels inside.
#pragma once

#include "hopper.cuh"

namespace yolo12_fastconv {

#define YOLO12_SUMS_AT(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define YOLO12_WGMMA(columns, groups, types, ia, ib)                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns types " {" YOLO12_REGISTERS_##groups "}, %" ia ", %" ib   \
                                                                                                 ", 1, 1, 1, 1, 1;\n" \
               : YOLO12_SUMS_##groups                                                                                 \
               : "l"(a), "l"(b))
#define YOLO12_WGMMA_CASE(columns, groups, ia, ib)                \
  if constexpr (kColumns == columns) {                            \
    if constexpr (std::is_same_v<T, __half>) {                    \
      YOLO12_WGMMA(columns, groups, "k16.f32.f16.f16", ia, ib);   \
    } else {                                                      \
      YOLO12_WGMMA(columns, groups, "k16.f32.bf16.bf16", ia, ib); \
    }                                                             \
  }

// d = a^T * b + d: 64 x kColumns over 16 rows, asynchronously, by the four warps of a warpgroup; d as in wgmma(). Half and
// bfloat16 only.
template <class T, int kColumns>
__device__ __forceinline__ void wgmma_transposed(float (&d)[kColumns / 2], uint64_t a, uint64_t b){
#if YOLO12_HAS_WGMMA
    YOLO12_WGMMA_CASE(16, 1, "8", "9") YOLO12_WGMMA_CASE(32, 2, "16", "17") YOLO12_WGMMA_CASE(48, 3, "24", "25")
        YOLO12_WGMMA_CASE(64, 4, "32", "33") YOLO12_WGMMA_CASE(80, 5, "40", "41") YOLO12_WGMMA_CASE(96, 6, "48", "49")
            YOLO12_WGMMA_CASE(128, 8, "64", "65") YOLO12_WGMMA_CASE(192, 12, "96", "97")
                YOLO12_WGMMA_CASE(256, 16, "128", "129")
#endif
}

#undef YOLO12_WGMMA_CASE
#undef YOLO12_WGMMA
#undef YOLO12_SUMS_AT

// Lower half of the descriptor of a transposed operand: `block_bytes` lie between blocks of as many channels as a
// swizzled row holds. Any multiple of 16: blocks may overlap, as the taps of a filter's row do, a pixel apart. The upper
// half is descriptor_layout(), whose groups are of eight rows of the reduction.
__device__ __forceinline__ uint32_t transposed_start(uint32_t address, int block_bytes) {
  return static_cast<uint32_t>(block_bytes) >> 4 << 16 | address >> 4;
}

}  // namespace yolo12_fastconv
