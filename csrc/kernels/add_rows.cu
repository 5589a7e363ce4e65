// Sums of two or three NHWC maps, rounded after each addition as separate additions would be. Bound by memory.
//
// A thread loads kItems words of each map before it adds; neighbouring threads have neighbouring words of a pixel. The
// blocks go through the maps from the last row to the first: what the kernel before has written last is in L2.
#include <algorithm>
#include <climits>

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/training_kernels.h"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;  // 8 or 12 loads of 16 bytes in flight per thread

struct AddPlan {
  AddRowsArgs args;
  FastDivide words;  // per row
  int items;  // words of all rows
};

template <class T, int kLanes, int kMaps>
__global__ __launch_bounds__(kThreads) void add_rows_kernel(const __grid_constant__ AddPlan plan) {
  const AddRowsArgs& a = plan.args;
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int first = block * (kThreads * kItems) + static_cast<int>(threadIdx.x);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  Lanes<T, kLanes> value[kItems][kMaps];
  int row[kItems], channel[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    // The last block's threads behind the end read the last word again and store nothing.
    plan.words.divide(min(first + i * kThreads, plan.items - 1), row[i], channel[i]);
    channel[i] *= kLanes;
#pragma unroll
    for (int m = 0; m < kMaps; ++m) {
      value[i][m] = load_lanes<kLanes>(static_cast<const T*>(a.in[m]) + row[i] * a.in_stride[m] + channel[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i * kThreads >= plan.items) break;
    Lanes<T, kLanes> total = value[i][0];
#pragma unroll
    for (int m = 1; m < kMaps; ++m) {
      Accumulator<T> sum[kLanes], more[kLanes];
      widen<T, kLanes>(total, sum);
      widen<T, kLanes>(value[i][m], more);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) sum[c] += more[c];
      total = narrow<T, kLanes>(sum);
    }
    store_lanes<T, kLanes>(static_cast<T*>(a.out) + row[i] * a.out_stride + channel[i], total);
  }
}

template <class T, int kLanes>
void launch(const AddRowsArgs& args, cudaStream_t stream) {
  // Words of a launch are counted in 31 bits: large batches take several.
  const int words = args.channels / kLanes;
  const int64_t most = (INT_MAX - int64_t(kThreads) * kItems) / words;
  for (int64_t done = 0; done < args.rows; done += most) {
    AddPlan plan = {args, FastDivide(words), 0};
    plan.args.rows = std::min(most, args.rows - done);
    plan.items = static_cast<int>(plan.args.rows * words);
    for (int m = 0; m < args.count; ++m) plan.args.in[m] = static_cast<const T*>(args.in[m]) + done * args.in_stride[m];
    plan.args.out = static_cast<T*>(args.out) + done * args.out_stride;
    const auto blocks = static_cast<unsigned>(ceil_div(plan.items, kThreads * kItems));
    if (args.count == 2) {
      launch_dependent<add_rows_kernel<T, kLanes, 2>>("add_rows", blocks, kThreads, 0, stream, plan);
    } else {
      launch_dependent<add_rows_kernel<T, kLanes, 3>>("add_rows", blocks, kThreads, 0, stream, plan);
    }
  }
}

}  // namespace

void add_rows(const AddRowsArgs& args, DType dtype, cudaStream_t stream) {
  if (args.count != 2 && args.count != 3) fail("add_rows: ", args.count, " maps; it adds 2 or 3");
  if (args.rows == 0 || args.channels == 0) return;
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = kLanesOf16Bytes<T>;
    bool wide = args.channels % kLanes == 0 && args.out_stride % kLanes == 0 && is_aligned(args.out, 16);
    for (int m = 0; m < args.count; ++m) {
      wide = wide && args.in_stride[m] % kLanes == 0 && is_aligned(args.in[m], 16);
    }
    wide ? launch<T, kLanes>(args, stream) : launch<T, 1>(args, stream);
  });
}

}  // namespace yolo12_fastconv
