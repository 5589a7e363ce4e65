// Mean and variance per channel from the statistics that a convolution's blocks have left (device/tile_stats.h), and the
// running statistics that move by them. The sm90 kernels leave at most one part per multiprocessor, one round of loads; the
// first layer and depthwise layers up to some hundreds. The sum is in an order that depends on the number of parts alone.
#include "device/channel_stats.cuh"
#include "device/dependent_launch.cuh"
#include "device/kernels.h"
#include "device/launch_limits.cuh"
#include "device/tile_stats.h"

namespace yolo12_fastconv {
namespace {

// 8 channels, two sectors of a part, x 32 parts at a time; 5 loads in flight per thread: all parts on 160 multiprocessors.
// kResident: with more blocks on one, ptxas spares registers and has a thread wait for its first loads before its last.
constexpr int kAcross = 8, kDown = 32, kThreads = kAcross * kDown, kUnroll = 5;
constexpr int kWarps = kThreads / 32, kResident = 4;

// Chan et al., relative to the mean of the first part.
__global__ __launch_bounds__(kThreads, kResident) void tile_stats_kernel(const BatchNormStatsArgs a, const TileStats in,
                                                                         const RunningStatsArgs running) {
  __shared__ float2 scratch[kWarps][kAcross];
  const int x = threadIdx.x % kAcross, channel = blockIdx.x * kAcross + x;
  const bool exists = channel < a.channels, writes = exists && threadIdx.x < kAcross;
  const float2* const moments = in.moments + channel;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  OldStats<float> old;
  if (writes) old.load(running, channel);
  const float first_mean = exists ? moments[0].x : 0.0f;
  float2 part[kUnroll];
  float count[kUnroll];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = first + i * kDown;
      const bool has = exists && at < in.parts;
      part[i] = has ? moments[int64_t(at) * a.channels] : float2{};
      count[i] = has ? in.counts[at] : 0.0f;
    }
  };
  int first = threadIdx.x / kAcross;
  load(first);
  const float origin = finite_origin(first_mean);  // known with the first parts, not before they are asked for
  float sum = 0, squares = 0;
  while (true) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) add_moments(sum, squares, {part[i].x, part[i].y}, count[i], origin);
    first += kUnroll * kDown;
    if (first >= in.parts) break;
    load(first);
  }
#pragma unroll
  for (int apart = kAcross; apart < 32; apart *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    squares += __shfl_xor_sync(0xffffffffu, squares, apart);
  }
  if (threadIdx.x % 32 < kAcross) scratch[threadIdx.x / 32][x] = {sum, squares};
  __syncthreads();
  if (!writes) return;
  sum = squares = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum += scratch[warp][x].x;
    squares += scratch[warp][x].y;
  }
  finish_channel(a, running, old, channel, origin, sum, squares);
}

}  // namespace

void tile_stats_finish(const BatchNormStatsArgs& args, const TileStats& stats, const RunningStatsArgs* running,
                       cudaStream_t stream) {
  // A cumulative average needs the counter before it needs the average.
  const bool together = running != nullptr && running->momentum >= 0;
  launch_dependent<tile_stats_kernel>("tile_stats_finish", checked_grid(ceil_div(args.channels, kAcross), "tile_stats"),
                                      kThreads, 0, stream, args, stats, together ? *running : RunningStatsArgs{});
  if (running != nullptr && !together) update_running_stats(*running, stream);
}

}  // namespace yolo12_fastconv
