// A tile of the filter that turns a convolution with stride 1 into the gradient of its input (gradient_kernels.h), for the
// kernels that make it: transpose_filter.cu, and batch_norm.cu beside the sums that come before the gradient.
//
// Dense: 32 x 32 channels of one tap through shared memory, so that reads run along the input channels, which are
// adjacent in channels_last weights, and writes along the output channels. Groups: one thread per element.
#pragma once

#include <cstdint>

#include "gradient_kernels.h"
#include "launch_limits.cuh"
#include "numeric.cuh"

namespace yolo12_fastconv {

constexpr int kFilterSide = 32, kFilterRows = 8, kFilterThreads = kFilterSide * kFilterRows;

// A filter and how it is cut into tiles, one per block of kFilterThreads threads.
struct FilterTiles {
  TransposeFilterArgs filter = {};
  int taps = 0, across_c = 0, across_k = 0;
  int64_t elements = 0;

  FilterTiles() = default;
  explicit FilterTiles(const TransposeFilterArgs& a)
      : filter(a),
        taps(a.kernel_h * a.kernel_w),
        across_c(ceil_div(a.in_channels, kFilterSide)),
        across_k(ceil_div(a.out_channels, kFilterSide)),
        elements(int64_t(a.groups) * a.in_channels * a.out_channels * taps) {}

  int64_t count() const {
    return filter.groups > 1 ? ceil_div<int64_t>(elements, kFilterThreads) : int64_t(across_c) * across_k * taps;
  }
};

template <class In, class Out>
__device__ __forceinline__ void transpose_dense_tile(const FilterTiles& tiles, int index) {
  const TransposeFilterArgs& a = tiles.filter;
  __shared__ Out tile[kFilterSide][kFilterSide + 2];
  const int lane = threadIdx.x % kFilterSide, row = threadIdx.x / kFilterSide, taps = tiles.taps;
  const int tap = index % taps, rest = index / taps;
  const int first_c = rest % tiles.across_c * kFilterSide,
            first_k = rest / tiles.across_c % tiles.across_k * kFilterSide;
  const In* const in =
      static_cast<const In*>(a.in) + tap / a.kernel_w * a.in_strides.h + tap % a.kernel_w * a.in_strides.w;
#pragma unroll
  for (int i = row; i < kFilterSide; i += kFilterRows) {
    const int k = first_k + i, c = first_c + lane;
    if (k < a.out_channels && c < a.in_channels)
      tile[i][lane] = convert<Out>(in[k * a.in_strides.n + c * a.in_strides.c]);
  }
  __syncthreads();
  Out* const out = static_cast<Out*>(a.out);
#pragma unroll
  for (int i = row; i < kFilterSide; i += kFilterRows) {
    const int c = first_c + i, k = first_k + lane;
    if (k < a.out_channels && c < a.in_channels) {
      out[(int64_t(c) * taps + taps - 1 - tap) * a.out_channels + k] = tile[lane][i];
    }
  }
}

template <class In, class Out>
__device__ __forceinline__ void transpose_grouped_tile(const FilterTiles& tiles, int index) {
  const TransposeFilterArgs& a = tiles.filter;
  const int64_t element = int64_t(index) * kFilterThreads + threadIdx.x;
  if (element >= tiles.elements) return;
  const int taps = tiles.taps;
  const int k = static_cast<int>(element % a.out_channels);
  const int64_t row = element / a.out_channels, channel = row / taps;
  const int tap = taps - 1 - static_cast<int>(row % taps);
  const int64_t group = channel / a.in_channels, c = channel % a.in_channels;
  const In* const in = static_cast<const In*>(a.in) + (group * a.out_channels + k) * a.in_strides.n +
                       c * a.in_strides.c + tap / a.kernel_w * a.in_strides.h + tap % a.kernel_w * a.in_strides.w;
  static_cast<Out*>(a.out)[element] = convert<Out>(*in);
}

// Called by whole blocks, after wait_for_earlier_kernels().
template <class In, class Out>
__device__ __forceinline__ void transpose_filter_tile(const FilterTiles& tiles, int index) {
  if (tiles.filter.groups > 1) {
    transpose_grouped_tile<In, Out>(tiles, index);
  } else {
    transpose_dense_tile<In, Out>(tiles, index);
  }
}

}  // namespace yolo12_fastconv
