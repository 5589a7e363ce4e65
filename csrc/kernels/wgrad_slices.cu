// Second launch of a weight's gradient: the sum of its slices. It reads from L2 what the launch before
// it has written, up to 17 MB, by the whole GPU; one block of that launch would take 20 us for 2 MB. Of little work, its time is
// rounds of loads that wait for each other: so a thread has all of its slices on their way at once.
#include <climits>

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/gradient_kernels.h"
#include "device/lanes.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "wgrad, sum of slices";
constexpr int kThreads = 256;
// Blocks of a multiprocessor. Left to itself, ptxas counts on eight, spares registers for them, and has a thread wait for its
// first loads before it asks for its last.
constexpr int kResident = 4;
// Many slices: from how many elements on a thread has more of them, so that all blocks are there at once. 132 slices on an
// H200: 128x128 2.7 us with more threads, 2.9 to 3.5 with fewer; 256x128 3.1 and 2.4 to 2.6.
constexpr int kManyElements = 4 * 8192;

struct SliceArgs {
  const void* workspace;
  int slices, elements;  // of a slice, those behind the last channel of a pitch too
  int channels;
  FastDivide pitch, taps, kernel_w;
  void* out;
  Strides strides;
  DType dtype;
};

template <class Acc, int kLanes>
struct alignas(kLanes * sizeof(Acc)) Run {
  Acc of[kLanes];
};

// A block has kThreads / kDown runs of elements; a thread every kDown-th slice of one, kUnroll of them in flight.
template <class Acc, int kLanes, int kDown, int kUnroll>
__global__ __launch_bounds__(kThreads, kResident) void add_slices_kernel(const SliceArgs a) {
  using Run = Run<Acc, kLanes>;
  constexpr int kAcross = kThreads / kDown, kElements = kAcross * kLanes;
  constexpr int kPartThreads = kAcross < 32 ? 32 : kAcross;  // a part: what a warp adds by itself
  __shared__ Run scratch[kThreads / kPartThreads][kAcross];
  const int across = threadIdx.x % kAcross, run = blockIdx.x * kAcross + across, runs = a.elements / kLanes;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  Run sum = {};
  if (run < runs) {
    const int first = threadIdx.x / kAcross;
    const int64_t step = int64_t(kDown) * runs;
    const Run* in = static_cast<const Run*>(a.workspace) + int64_t(first) * runs + run;
#pragma unroll 1
    for (int left = a.slices - first; left > 0; left -= kUnroll * kDown, in += kUnroll * step) {
      Run slice[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) slice[i] = i * kDown < left ? in[i * step] : Run{};
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int c = 0; c < kLanes; ++c) sum.of[c] += slice[i].of[c];
      }
    }
  }
#pragma unroll
  for (int apart = kAcross; apart < 32; apart *= 2) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) sum.of[c] += __shfl_xor_sync(0xffffffffu, sum.of[c], apart);
  }
  if (threadIdx.x % kPartThreads < kAcross) scratch[threadIdx.x / kPartThreads][across] = sum;
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kElements; i += kThreads) {
    const int element = blockIdx.x * kElements + i;
    if (element >= a.elements) break;
    int row, channel, k, tap, y, x;
    a.pitch.divide(element, row, channel);
    if (channel >= a.channels) continue;
    a.taps.divide(row, k, tap);
    a.kernel_w.divide(tap, y, x);
    const int64_t to = k * a.strides.n + channel * a.strides.c + y * a.strides.h + x * a.strides.w;
    Acc value = 0;
#pragma unroll
    for (int part = 0; part < kThreads / kPartThreads; ++part) value += scratch[part][i / kLanes].of[i % kLanes];
    switch (a.dtype) {
      case DType::kFloat16: static_cast<__half*>(a.out)[to] = convert<__half>(value); break;
      case DType::kBFloat16: static_cast<__nv_bfloat16*>(a.out)[to] = convert<__nv_bfloat16>(value); break;
      case DType::kFloat32: static_cast<float*>(a.out)[to] = convert<float>(value); break;
      default: static_cast<double*>(a.out)[to] = convert<double>(value); break;
    }
  }
}

template <class Acc, int kLanes, int kDown, int kUnroll>
void launch(const SliceArgs& a, cudaStream_t stream) {
  constexpr int kElements = kThreads / kDown * kLanes;
  launch_dependent<add_slices_kernel<Acc, kLanes, kDown, kUnroll>>(
      kName, checked_grid(ceil_div(a.elements, kElements), kName), kThreads, 0, stream, a);
}

}  // namespace

void add_wgrad_slices(const WgradArgs& args, DType sums_dtype, int pitch, int slices, cudaStream_t stream) {
  const ConvShape& s = args.shape;
  const int taps = s.kernel_h * s.kernel_w;
  const int64_t elements = s.groups > 1 ? int64_t(taps) * s.out_channels : int64_t(s.out_channels) * taps * pitch;
  if (elements > INT_MAX - 4 * kThreads) fail(kName, ": ", elements, " elements");
  const Strides& to = args.grad_weight_strides;
  SliceArgs a;
  a.workspace = args.workspace;
  a.slices = slices;
  a.elements = static_cast<int>(elements);
  a.channels = s.groups > 1 ? s.out_channels : s.in_channels;
  a.pitch = FastDivide(s.groups > 1 ? s.out_channels : pitch);
  a.taps = FastDivide(taps);
  a.kernel_w = FastDivide(s.kernel_w);
  a.out = args.grad_weight;
  a.strides = s.groups > 1 ? Strides{0, to.n, to.h, to.w} : to;
  a.dtype = args.grad_weight_dtype;
  if (sums_dtype == DType::kFloat64) {
    launch<double, 1, 32, 5>(a, stream);
  } else if (elements % 4 != 0 || !is_aligned(args.workspace, 16)) {
    launch<float, 1, 32, 5>(a, stream);
  } else if (slices <= 8) {
    launch<float, 4, 1, 8>(a, stream);
  } else if (slices <= 32) {
    launch<float, 4, 4, 8>(a, stream);
  } else if (elements >= kManyElements) {
    launch<float, 4, 16, 9>(a, stream);
  } else {
    launch<float, 4, 32, 5>(a, stream);
  }
}

void add_wgrad_slices(const WgradArgs& args, int slices, cudaStream_t stream) {
  add_wgrad_slices(args, DType::kFloat32, args.shape.in_channels, slices, stream);
}

}  // namespace yolo12_fastconv
