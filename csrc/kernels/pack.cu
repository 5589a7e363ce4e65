// Copies between layouts and dtypes: a logical (N, C, H, W) tensor of any strides into dense NHWC rows of `out_channels`
// >= C elements, zero behind C. What kernels that want aligned NHWC rows are fed with where a caller hands over something
// else: NCHW activations, odd channel counts, float32 under autocast, and weights, (K, R, S, C) from (K, C, R, S).
//
// One thread: one 16-byte chunk of the output. Neighbouring threads take neighbouring chunks of a pixel when the input's
// channels are adjacent (NHWC), and neighbouring pixels when its columns are (NCHW), so that reads are coalesced in both;
// writes are whole 32-byte sectors only in the first case, which costs less than uncoalesced reads would.
#include <cstdint>

#include "device/dependent_launch.cuh"
#include "device/kernels.h"
#include "device/launch.cuh"
#include "device/numeric.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;

struct PackPlan {
  PackArgs args;
  int64_t items;  // output chunks
  bool channels_inner;  // order of chunks over threads
  int64_t pixels;
  int chunks;  // per pixel
};

template <class In, class Out>
__global__ __launch_bounds__(kThreads) void pack_kernel(const __grid_constant__ PackPlan plan) {
  constexpr int kLanes = 16 / sizeof(Out);
  const PackArgs& a = plan.args;
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (item >= plan.items) return;
  const int64_t pixel = plan.channels_inner ? item / plan.chunks : item % plan.pixels;
  const int chunk = static_cast<int>(plan.channels_inner ? item % plan.chunks : item / plan.pixels);
  const int64_t row = pixel / a.w;
  const int64_t n = row / a.h;
  const In* in = static_cast<const In*>(a.in) + n * a.in_strides.n + (row - n * a.h) * a.in_strides.h +
                 (pixel - row * a.w) * a.in_strides.w;
  union {
    uint4 bits;
    Out element[kLanes];
  } out;
#pragma unroll
  for (int e = 0; e < kLanes; ++e) {
    const int channel = chunk * kLanes + e;
    out.element[e] = channel < a.channels ? convert<Out>(in[channel * a.in_strides.c]) : convert<Out>(0.0f);
  }
  Out* destination = static_cast<Out*>(a.out) + pixel * a.out_channels + chunk * kLanes;
  if (a.out_channels % kLanes == 0) {
    *reinterpret_cast<uint4*>(destination) = out.bits;
  } else {
#pragma unroll
    for (int e = 0; e < kLanes; ++e) {
      if (chunk * kLanes + e < a.out_channels) destination[e] = out.element[e];
    }
  }
}

}  // namespace

void pack(const PackArgs& args, cudaStream_t stream) {
  PackPlan plan;
  plan.args = args;
  plan.pixels = args.batch * args.h * args.w;
  plan.chunks = ceil_div(args.out_channels, 16 / size_of(args.out_dtype));
  plan.items = plan.pixels * plan.chunks;
  plan.channels_inner = args.in_strides.c == 1 || args.in_strides.w != 1;
  const int64_t blocks = ceil_div<int64_t>(plan.items, kThreads);
  if (blocks >= int64_t(1) << 31)
    fail("pack: ", plan.pixels, " pixels of ", args.out_channels, " channels in one launch");
  if (blocks == 0) return;
  with_type(args.in_dtype, [&](auto in) {
    with_type(args.out_dtype, [&](auto out) {
      using In = typename decltype(in)::type;
      using Out = typename decltype(out)::type;
      launch_dependent<pack_kernel<In, Out>>("pack", static_cast<unsigned>(blocks), kThreads, 0, stream, plan);
    });
  });
}

}  // namespace yolo12_fastconv
