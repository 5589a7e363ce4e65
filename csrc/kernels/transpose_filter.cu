// The filter that turns a convolution with stride 1 into the gradient of its input: channels swapped within each group,
// taps reversed, rounded to the compute dtype on the way (device/gradient_kernels.h), by a launch of its own.
#include "device/dependent_launch.cuh"
#include "device/launch.cuh"
#include "device/transpose_filter.cuh"

namespace yolo12_fastconv {
namespace {

template <class In, class Out>
__global__ __launch_bounds__(kFilterThreads) void transpose_filter_kernel(const FilterTiles tiles) {
  let_later_kernels_start();
  wait_for_earlier_kernels();
  transpose_filter_tile<In, Out>(tiles, blockIdx.x);
}

}  // namespace

void transpose_filter(const TransposeFilterArgs& a, cudaStream_t stream) {
  const FilterTiles tiles(a);
  if (tiles.elements == 0) return;
  with_type(a.in_dtype, [&](auto in) {
    with_type(a.out_dtype, [&](auto out) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      launch_dependent<transpose_filter_kernel<In, Out>>(
          "transpose_filter", checked_grid(tiles.count(), "transpose_filter"), kFilterThreads, 0, stream, tiles);
    });
  });
}

}  // namespace yolo12_fastconv
