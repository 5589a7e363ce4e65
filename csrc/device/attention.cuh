// What the kernels of area attention share: rows of a head in shared memory, their fragments, and packed results.
#pragma once

#include "async_copy.cuh"
#include "attention.h"
#include "lanes.cuh"
#include "launch.cuh"
#include "tensor_core.cuh"

namespace yolo12_fastconv {

// All of the memory that L1 and shared memory have in common: otherwise the driver may leave room for half of the blocks.
template <class Kernel>
void prefer_shared_memory(Kernel* kernel) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "shared memory carve-out");
}

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kRowBytes = kHeadDim * 2;  // of one of query, key, value, out
constexpr int kPieces = kRowBytes / 16;

// Where the rows of an area and head begin, of which `group` counts the heads of the first area, then of the next.
struct SequencePlace {
  int head;
  // In rows of the map and elements of logsumexp. 2^31 of those would be 400 GB of qkv.
  int first_row, first_logsumexp;

  __device__ __forceinline__ SequencePlace(const AttentionShape& s, int group) {
    const int sequence = group / s.heads;
    head = group - sequence * s.heads;
    first_row = sequence * s.length;
    const int picture = sequence / s.areas, area = sequence - picture * s.areas;
    first_logsumexp = ((picture * s.heads + head) * s.areas + area) * s.length;
  }
};

// Rows of 64 bytes in shared memory, in pieces of 16. The order of the pieces changes every second row, so that neither
// eight rows of one piece nor two rows of all pieces meet in a bank.
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return row * kRowBytes + ((piece ^ (row / 2 % 4)) * 16);
}

// d = a * b + c, see multiply_add.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
#endif
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  const float pair[2] = {first, second};
  return narrow<T>(pair).word;
}

template <class T>
__device__ __forceinline__ void unpack_pair(float (&pair)[2], uint32_t word) {
  widen(Lanes<T, 2>{word}, pair);
}

// The first operand of a product over the channels of a head: 16 rows. Which channel is which term of the sum is free, if
// both operands agree: lane l has 16 neighbouring bytes of rows l / 4 and l / 4 + 8, channels 8 (l % 4) and on.
struct RowFragment {
  uint32_t steps[2][4];

  __device__ __forceinline__ void set(const uint4& low, const uint4& high) {
    steps[0][0] = low.x, steps[0][1] = high.x, steps[0][2] = low.y, steps[0][3] = high.y;
    steps[1][0] = low.z, steps[1][1] = high.z, steps[1][2] = low.w, steps[1][3] = high.w;
  }
};

// d = rows * columns^T + c over the channels of a head, with 8 rows of the second operand as load_shared gives them.
template <class T>
__device__ __forceinline__ void multiply_rows(float (&d)[4], const RowFragment& rows, const uint4& columns,
                                              const float (&c)[4]) {
  multiply<T>(d, rows.steps[0], columns.x, columns.y, c);
  multiply<T>(d, rows.steps[1], columns.z, columns.w, d);
}

// 16 bytes of a row in global memory, zeros where not valid.
__device__ __forceinline__ uint4 load_piece(const void* from, bool valid) {
  return valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ uint4 scaled(const uint4& piece, float scale) {
  float v[8];
  widen(Lanes<T, 8>{piece}, v);
#pragma unroll
  for (float& x : v) x *= scale;
  return narrow<T>(v).word;
}

// From products with 4 column tiles of 8 (lane l: columns 2 (l % 4) and the next of every tile, packed in a word) to 8
// neighbouring columns of the row, those of tile l % 4.
__device__ __forceinline__ uint4 gather_columns(uint32_t (&w)[4]) {
  const int lane = threadIdx.x % 32;
  const auto exchange = [lane](uint32_t& low, uint32_t& high, int mask) {
    const bool upper = lane & mask;
    const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? low : high, mask);
    (upper ? low : high) = got;
  };
  exchange(w[0], w[1], 1);
  exchange(w[2], w[3], 1);
  exchange(w[0], w[2], 2);
  exchange(w[1], w[3], 2);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

}  // namespace yolo12_fastconv
