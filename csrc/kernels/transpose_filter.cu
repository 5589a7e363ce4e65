// The filter that turns a convolution with stride 1 into the gradient of its input: channels swapped within each group,
// taps reversed, rounded to the compute dtype on the way (device/gradient_kernels.h).
//
// Dense: 32 x 32 channels of one tap through shared memory, so that reads run along the input channels, which are
// adjacent in channels_last weights, and writes along the output channels. Groups: one thread per element.
#include "device/dependent_launch.cuh"
#include "device/gradient_kernels.h"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kSide = 32, kRows = 8, kThreads = kSide * kRows;

template <class In, class Out>
__global__ __launch_bounds__(kThreads) void transpose_filter_kernel(const TransposeFilterArgs a, const int tiles_c,
                                                                    const int tiles_k) {
  __shared__ Out tile[kSide][kSide + 2];
  const int lane = threadIdx.x % kSide, row = threadIdx.x / kSide, taps = a.kernel_h * a.kernel_w;
  const int tap = blockIdx.x % taps, rest = blockIdx.x / taps;
  const int first_c = rest % tiles_c * kSide, first_k = rest / tiles_c % tiles_k * kSide;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  const In* const in =
      static_cast<const In*>(a.in) + tap / a.kernel_w * a.in_strides.h + tap % a.kernel_w * a.in_strides.w;
#pragma unroll
  for (int i = row; i < kSide; i += kRows) {
    const int k = first_k + i, c = first_c + lane;
    if (k < a.out_channels && c < a.in_channels)
      tile[i][lane] = convert<Out>(in[k * a.in_strides.n + c * a.in_strides.c]);
  }
  __syncthreads();
  Out* const out = static_cast<Out*>(a.out);
#pragma unroll
  for (int i = row; i < kSide; i += kRows) {
    const int c = first_c + i, k = first_k + lane;
    if (k < a.out_channels && c < a.in_channels) {
      out[(int64_t(c) * taps + taps - 1 - tap) * a.out_channels + k] = tile[lane][i];
    }
  }
}

template <class In, class Out>
__global__ __launch_bounds__(kThreads) void transpose_grouped_filter_kernel(const TransposeFilterArgs a,
                                                                            const int64_t elements) {
  const int64_t element = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (element >= elements) return;
  const int taps = a.kernel_h * a.kernel_w;
  const int k = static_cast<int>(element % a.out_channels);
  const int64_t row = element / a.out_channels, channel = row / taps;
  const int tap = taps - 1 - static_cast<int>(row % taps);
  const int64_t group = channel / a.in_channels, c = channel % a.in_channels;
  const In* const in = static_cast<const In*>(a.in) + (group * a.out_channels + k) * a.in_strides.n +
                       c * a.in_strides.c + tap / a.kernel_w * a.in_strides.h + tap % a.kernel_w * a.in_strides.w;
  static_cast<Out*>(a.out)[element] = convert<Out>(*in);
}

}  // namespace

void transpose_filter(const TransposeFilterArgs& a, cudaStream_t stream) {
  const int taps = a.kernel_h * a.kernel_w;
  const int64_t elements = int64_t(a.groups) * a.in_channels * a.out_channels * taps;
  if (elements == 0) return;
  with_type(a.in_dtype, [&](auto in) {
    with_type(a.out_dtype, [&](auto out) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      if (a.groups == 1) {
        const int tiles_c = ceil_div(a.in_channels, kSide), tiles_k = ceil_div(a.out_channels, kSide);
        launch_dependent<transpose_filter_kernel<In, Out>>(
            "transpose_filter", checked_grid(int64_t(tiles_c) * tiles_k * taps, "transpose_filter"), kThreads, 0,
            stream, a, tiles_c, tiles_k);
      } else {
        launch_dependent<transpose_grouped_filter_kernel<In, Out>>(
            "transpose_filter", checked_grid(ceil_div<int64_t>(elements, kThreads), "transpose_filter"), kThreads, 0,
            stream, a, elements);
      }
    });
  });
}

}  // namespace yolo12_fastconv
