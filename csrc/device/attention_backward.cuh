// What the kernels of area attention's backward pass share. The formulas are in kernels/attention_backward.cu.
#pragma once

#include "attention.cuh"
#include "thread_index.cuh"

namespace yolo12_fastconv {

constexpr int kStep = 16;  // rows of the other side, at a time
// Weights are computed 2^kShift times too large: those of long areas are subnormal in half, and 1/400 times a small
// gradient even more so.
constexpr float kShift = 4.0f;

// The rows of one area and head.
template <class T>
struct SequenceRows : SequencePlace {
  const AttentionBackwardArgs& args;

  __device__ __forceinline__ SequenceRows(const AttentionBackwardArgs& a, int group)
      : SequencePlace(a.shape, group), args(a) {}

  // kPart: 0 query, 1 key, 2 value
  __device__ __forceinline__ const T* qkv_row(int row, int part) const {
    return static_cast<const T*>(args.qkv) + int64_t(first_row + row) * args.qkv_stride + (head * 3 + part) * kHeadDim;
  }
  __device__ __forceinline__ const T* grad_out_row(int row) const {
    return static_cast<const T*>(args.grad_out) + int64_t(first_row + row) * args.grad_out_stride + head * kHeadDim;
  }
  __device__ __forceinline__ const T* out_row(int row) const {
    return static_cast<const T*>(args.out) + (int64_t(first_row + row) * args.shape.heads + head) * kHeadDim;
  }
  __device__ __forceinline__ const T* grad_values_row(int row) const {
    return static_cast<const T*>(args.grad_values) + int64_t(first_row + row) * args.grad_values_stride +
           head * kHeadDim;
  }
  __device__ __forceinline__ T* grad_row(int row, int part) const {
    return static_cast<T*>(args.grad_qkv) + (int64_t(first_row + row) * args.shape.heads + head) * 3 * kHeadDim +
           part * kHeadDim;
  }
  // -logsumexp of a query as an addend of logits, in powers of two and shifted
  __device__ __forceinline__ float minus_logsumexp(int row) const {
    return fmaf(args.logsumexp[first_logsumexp + row], -kLog2e, kShift);
  }

  // The product of a row of grad_out with its row of out, of which four neighbouring lanes have 16 bytes each.
  __device__ __forceinline__ static float mean(const uint4& grad, const uint4& out) {
    float x[8], y[8], sum = 0.0f;
    widen(Lanes<T, 8>{grad}, x);
    widen(Lanes<T, 8>{out}, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    return sum;
  }
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kTiles][4][4]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sums[t][n][0] = sums[t][n][1] = sums[t][n][2] = sums[t][n][3] = 0.0f;
  }
}

// sums += left * right: left has 16 columns, right 16 rows of which this lane's addresses for the two halves are given.
template <class T, int kTiles>
__device__ __forceinline__ void accumulate(float (&sums)[kTiles][4][4], const uint32_t (&left)[kTiles][4],
                                           const uint32_t (&right)[2]) {
  uint32_t r[2][4];
  load_transposed(r[0], right[0]);
  load_transposed(r[1], right[1]);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      multiply<T>(sums[t][n], left[t], r[n / 2][n % 2 * 2], r[n / 2][n % 2 * 2 + 1], sums[t][n]);
    }
  }
}

// Sums times `factor` to one part of grad_qkv, rows before `end`.
template <class T, bool kValues, int kTiles>
__device__ __forceinline__ void store_rows(const float (&sums)[kTiles][4][4], const SequenceRows<T>& rows, int first,
                                           int end, int part, float factor) {
  const int lane = reread_thread_index() % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + t * 16 + h * 8 + lane / 4;
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) words[n] = pack_pair<T>(sums[t][n][2 * h] * factor, sums[t][n][2 * h + 1] * factor);
      uint4 piece = gather_columns(words);
      if (row >= end) continue;
      if (kValues && rows.args.grad_values != nullptr) {
        float a[8], b[8];
        widen(Lanes<T, 8>{piece}, a);
        widen(Lanes<T, 8>{load_piece(rows.grad_values_row(row) + lane % 4 * 8, true)}, b);
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] += b[i];
        piece = narrow<T>(a).word;
      }
      *reinterpret_cast<uint4*>(rows.grad_row(row, part) + lane % 4 * 8) = piece;
    }
  }
}

// Gradients of keys and values, which have factors that were left out of the sums.
template <class T, int kTiles>
__device__ __forceinline__ void store_key_rows(const float (&grad_keys)[kTiles][4][4],
                                               const float (&grad_values)[kTiles][4][4], const SequenceRows<T>& rows,
                                               int first, int end) {
  const float unshift = exp2f(-kShift);
  store_rows<T, false>(grad_keys, rows, first, end, 1, unshift * kLn2);  // queries are multiplied by scale / ln 2
  store_rows<T, true>(grad_values, rows, first, end, 2, unshift);
}

template <class T, int kTiles>
__device__ __forceinline__ void store_query_rows(const float (&grad_queries)[kTiles][4][4], const SequenceRows<T>& rows,
                                                 int first, int end) {
  store_rows<T, false>(grad_queries, rows, first, end, 0, exp2f(-kShift) * rows.args.shape.scale);
}

// Logits and grad_w of a step, both with their initial values.
template <int kTiles>
struct Products {
  float logits[kTiles][2][4], grad_weights[kTiles][2][4];

  // Weights and grad_logits, as the left operands of products.
  template <class T>
  __device__ __forceinline__ void differentiate(uint32_t (&weights)[kTiles][4], uint32_t (&grads)[kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i / 2, e = i % 2 * 2;
        const float first = exp2_fast(logits[t][j][e]), second = exp2_fast(logits[t][j][e + 1]);
        weights[t][i] = pack_pair<T>(first, second);
        grads[t][i] = pack_pair<T>(first * grad_weights[t][j][e], second * grad_weights[t][j][e + 1]);
      }
    }
  }
};

}  // namespace yolo12_fastconv
