// Copies between layouts and dtypes: a logical (N, C, H, W) tensor of any strides into dense NHWC rows of `out_channels`
// >= C elements, zero behind C. What kernels that want aligned NHWC rows are fed with where a caller hands over something
// else: NCHW activations, odd channel counts, float32 under autocast, and weights, (K, R, S, C) from (K, C, R, S).
//
// One thread: one 16-byte chunk of the output. Neighbouring threads take neighbouring chunks of a pixel when the input's
// channels are adjacent (NHWC), and neighbouring pixels when its columns are (NCHW), so that reads are coalesced in both;
// writes are whole 32-byte sectors only in the first case, which costs less than uncoalesced reads would.
//
// Two cases that training meets at every layer have kernels of their own: tensors that already lie in the order of the
// output and only change their dtype (channels_last weights, the first layer's picture), and 3x3 to 5x5 weights in
// PyTorch's default layout, where a channel's taps are adjacent: those are turned in shared memory.
#include <cstdint>
#include <cstring>

#include "device/dependent_launch.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
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

constexpr int kCastLanes = 8;

// count elements, those of the last incomplete group of kCastLanes one by one.
template <class In, class Out>
__global__ __launch_bounds__(kThreads) void cast_kernel(const In* in, Out* out, int64_t count) {
  let_later_kernels_start();
  const int64_t first = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kCastLanes;
  wait_for_earlier_kernels();
  if (first + kCastLanes <= count) {
    constexpr int kInLanes = kLanesOf16Bytes<In>, kOutLanes = kLanesOf16Bytes<Out>;
    In from[kCastLanes];
    Out to[kCastLanes];
#pragma unroll
    for (int e = 0; e < kCastLanes; e += kInLanes) {
      const Lanes<In, kInLanes> lanes = load_lanes<kInLanes>(in + first + e);
      memcpy(from + e, &lanes, sizeof(lanes));
    }
#pragma unroll
    for (int e = 0; e < kCastLanes; ++e) to[e] = convert<Out>(from[e]);
#pragma unroll
    for (int e = 0; e < kCastLanes; e += kOutLanes) {
      Lanes<Out, kOutLanes> lanes;
      memcpy(&lanes, to + e, sizeof(lanes));
      store_lanes(out + first + e, lanes);
    }
  } else {
    for (int64_t i = first; i < count; ++i) out[i] = convert<Out>(in[i]);
  }
}

// A block: kTileChannels channels of one output channel's filter.
constexpr int kTileChannels = 64, kMostTaps = 25;

template <class In, class Out>
__global__ __launch_bounds__(kThreads) void turn_taps_kernel(const __grid_constant__ PackArgs a) {
  constexpr int kLanes = 16 / sizeof(Out), kChunks = kTileChannels / kLanes;
  __shared__ Out tile[kTileChannels * kMostTaps];
  let_later_kernels_start();
  const int taps = a.h * a.w, tiles = ceil_div(a.out_channels, kTileChannels);
  const int n = blockIdx.x / tiles, channel = blockIdx.x % tiles * kTileChannels;
  const int count = min(kTileChannels, a.channels - channel) * taps;  // below zero in a tile of padding alone
  const In* in = static_cast<const In*>(a.in) + n * a.in_strides.n + int64_t(channel) * taps;
  wait_for_earlier_kernels();
#pragma unroll 4
  for (int i = threadIdx.x; i < kTileChannels * taps; i += kThreads) tile[i] = convert<Out>(i < count ? in[i] : In(0));
  __syncthreads();
  for (int i = threadIdx.x; i < kChunks * taps; i += kThreads) {
    const int tap = i / kChunks, first = i % kChunks * kLanes;
    if (channel + first >= a.out_channels) continue;
    union {
      uint4 bits;
      Out element[kLanes];
    } out;
#pragma unroll
    for (int e = 0; e < kLanes; ++e) out.element[e] = tile[(first + e) * taps + tap];
    Out* row = static_cast<Out*>(a.out) + (int64_t(n) * taps + tap) * a.out_channels;
    *reinterpret_cast<uint4*>(row + channel + first) = out.bits;
  }
}

// Whether the input lies as the output will.
bool only_casts(const PackArgs& a) {
  const auto fits = [](int64_t size, int64_t stride, int64_t expected) { return size == 1 || stride == expected; };
  const Strides& s = a.in_strides;
  const int64_t c = a.channels;
  return a.out_channels == a.channels && fits(c, s.c, 1) && fits(a.w, s.w, c) && fits(a.h, s.h, c * a.w) &&
         fits(a.batch, s.n, c * a.w * a.h) && is_aligned(a.in, 16) && is_aligned(a.out, 16);
}

bool turns_taps(const PackArgs& a) {
  const Strides& s = a.in_strides;
  const int taps = a.h * a.w;
  return a.channels > 1 && taps > 1 && taps <= kMostTaps && s.c == taps && (a.w == 1 || s.w == 1) &&
         (a.h == 1 || s.h == a.w) && a.out_channels % (16 / size_of(a.out_dtype)) == 0 && is_aligned(a.out, 16);
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
      if (only_casts(args)) {
        const int64_t count = plan.pixels * args.channels;
        launch_dependent<cast_kernel<In, Out>>(
            "pack", checked_grid(ceil_div<int64_t>(count, kThreads * kCastLanes), "pack"), kThreads, 0, stream,
            static_cast<const In*>(args.in), static_cast<Out*>(args.out), count);
        return;
      }
      if (turns_taps(args)) {
        const int64_t tiles = args.batch * ceil_div(args.out_channels, kTileChannels);
        launch_dependent<turn_taps_kernel<In, Out>>("pack", checked_grid(tiles, "pack"), kThreads, 0, stream, args);
        return;
      }
      launch_dependent<pack_kernel<In, Out>>("pack", static_cast<unsigned>(blocks), kThreads, 0, stream, plan);
    });
  });
}

}  // namespace yolo12_fastconv
