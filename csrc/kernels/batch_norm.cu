// Batch norm over the rows of an NHWC tensor, seen as a matrix (rows, channels) of half, bfloat16, float or double.
//   stats:     mean, var (biased) per channel
//   act:       y = act((z - mean) / sqrt(var + eps) * gamma + beta) + residual
//   backward:  du = grad_y * act'(u);  grad_beta = sum du, grad_gamma = sum du * xhat;
//              grad_z = gamma * invstd * (du - (grad_beta + xhat * grad_gamma) / rows)
//   running:   running = (1 - momentum) * running + momentum * batch
// u, act' and xhat are recomputed from z. All arithmetic in float (double for double).
//
// One thread: one 16-byte word of neighbouring channels (one channel where width or alignment do not allow words) in
// every `down`-th row of a segment; the threads of a warp lie along the channels first and then along the rows, so that
// narrow matrices are read in full lines too. Sums are taken in two launches, both in a fixed order: per segment and
// channel to the workspace, then over the segments. How a matrix is cut depends on its shape and alignment alone:
// equal inputs give equal sums on every GPU. The second launch also moves a batch norm's running statistics: a launch of
// its own per layer would cost more than its work.
//
// All of it is bound by memory, on an H200 at 4.3 TB/s; bytes per element of half: stats 2, act 4, backward 4 for the
// sums and 6 for grad_z. A pass begins where the kernel before it has ended, since what that has touched last is still in
// the L2 cache: the first pass over a matrix goes from its last rows to its first, the second from the first to the last.
// Maps of 20x20 and 40x40 take a few microseconds, of which launches are a part: each kernel may start while the one before
// it ends (device/dependent_launch.cuh). The first pass of the backward over a large matrix does not: see kLateStartBytes.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "device/channel_stats.cuh"
#include "device/dependent_launch.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/training_kernels.h"
#include "device/transpose_filter.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;
// Rows in flight per thread.
constexpr int kUnroll = 4;
// Blocks for the sums: those that an H200 holds at once, as many as its registers allow. A second round would begin when
// the first is over and repeat what a block does once: sum over its threads, or compute per-channel values.
constexpr int kStatsResident = 4, kPassResident = 4;  // blocks per multiprocessor
// Rows of a thread at least: fewer segments for the second launch (n, batch 32: 1041 to 991 us).
constexpr int kStatsRows = 2 * kUnroll;
// Bytes of a word. The passes that normalise keep up to five values per channel: for eight channels those would leave no
// registers for the loads in flight.
constexpr int kStatsBytes = 16, kPassBytes = 8;
constexpr int kStatsBlocks = 132 * kStatsResident, kPassBlocks = 132 * kPassResident;

// How a matrix is cut into blocks. Block index = segment * chunks + chunk. A segment is every segments'th group of `down`
// rows, so that all blocks together move through the matrix from one end to the other; none is empty.
struct RowGrid {
  int64_t rows;
  int channels;
  int lanes;  // channels of a thread
  int across, down;  // threads along channels and along rows
  int chunks;  // blocks along channels
  int segments;
  int step;  // rows from one row of a thread to its next: segments * down
  int even, odd;  // rows of every thread, and rows of the matrix that are left then
  bool backwards;  // from the last row to the first

  __host__ __device__ int columns() const { return across * lanes; }  // channels of a block
  __device__ __forceinline__ int rows_from(int first) const { return even + (first < odd); }
  __device__ __forceinline__ int64_t rows_of_segment(int segment) const {
    return int64_t(even) * down + min(max(odd - segment * down, 0), down);
  }
};

RowGrid cut_rows(int64_t rows, int channels, int lanes, int blocks, bool backwards, int least_rows = kUnroll) {
  constexpr int64_t kMostRows =
      INT_MAX - (1 << 24);  // a thread counts in int, up to its loads in flight past the last row
  if (rows > kMostRows) fail("batch_norm: ", rows, " rows, at most ", kMostRows, " are possible; split the batch");
  RowGrid g;
  g.backwards = backwards;
  g.rows = rows;
  g.channels = channels;
  g.lanes = lanes;
  const int words = ceil_div(channels, lanes);
  g.chunks = ceil_div(words, lanes == 1 ? 128 : 32);
  g.across = ceil_div(words, g.chunks);
  g.down = kThreads / g.across;
  const int64_t wanted = std::max(1, blocks / g.chunks);
  // At least one round of loads per thread: less would not pay for the per-channel values.
  const int64_t rows_per_thread = std::max<int64_t>(ceil_div<int64_t>(rows, wanted * g.down), least_rows);
  g.segments = std::max(1, static_cast<int>(ceil_div(rows, rows_per_thread * g.down)));
  g.step = g.segments * g.down;
  g.even = static_cast<int>(rows / g.step);
  g.odd = static_cast<int>(rows % g.step);
  return g;
}

// Elements from one row of z, and of its gradient, to the next.
template <class Args>
__device__ __forceinline__ int pitch_of(const Args& a, const RowGrid& g) {
  return a.z_stride > 0 ? a.z_stride : g.channels;
}

// The part of a matrix that a thread passes through.
struct RowRange {
  int channel;  // the thread's first; past the matrix if it has none
  int local;  // the same, counted from the block's first
  int row, step;  // of the thread: row, row + step, ...
  int count;
  int segment;
  bool active;
};

template <int kLanes>
__device__ __forceinline__ RowRange range_of(const RowGrid& g) {
  RowRange r;
  const int thread = threadIdx.x, chunk = blockIdx.x % g.chunks;
  r.segment = blockIdx.x / g.chunks;
  r.local = thread % g.across * kLanes;
  r.channel = chunk * g.across * kLanes + r.local;
  r.active = thread < g.across * g.down && r.channel < g.channels;
  const int first = r.segment * g.down + thread / g.across;
  r.count = r.active ? g.rows_from(first) : 0;
  r.row = g.backwards ? first + (r.count - 1) * g.step : first;
  r.step = g.backwards ? -g.step : g.step;
  return r;
}

// bfloat16 is the upper half of a float. By words: single elements cost a register each, and grad_z's kernel spilled.
template <int kCount>
__device__ __forceinline__ void widen(Lanes<__nv_bfloat16, kCount> lanes, float (&out)[kCount])
  requires(kCount % 2 == 0)
{
  uint32_t words[kCount / 2];
  memcpy(words, &lanes.word, sizeof(words));
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Calls use(row, load(row)) for row, row + step, ... `left` times; up to kCount loads are issued before the first use.
template <int kCount = kUnroll, class Load, class Use>
__device__ __forceinline__ void for_rows(int row, int step, int left, Load&& load, Use&& use) {
  using Value = decltype(load(row));
  for (; left >= kCount; left -= kCount, row += kCount * step) {
    Value values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = load(row + i * step);
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(row + i * step, values[i]);
  }
  if (left <= 0) return;
  Value values[kCount - 1];
#pragma unroll
  for (int i = 0; i < kCount - 1; ++i) {
    if (i < left) values[i] = load(row + i * step);
  }
#pragma unroll
  for (int i = 0; i < kCount - 1; ++i) {
    if (i < left) use(row + i * step, values[i]);
  }
}

// The first rows of a thread, asked for before the block knows its per-channel values.
template <class Value>
struct Ahead {
  Value values[kUnroll];

  template <class Load>
  __device__ __forceinline__ Ahead(const RowRange& r, Load&& load) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (i < r.count) values[i] = load(r.row + i * r.step);
    }
  }
};

// As for_rows, from the rows that are there already.
template <class Value, class Load, class Use>
__device__ __forceinline__ void for_rows(const Ahead<Value>& ahead, const RowRange& r, Load&& load, Use&& use) {
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    if (i < r.count) use(r.row + i * r.step, ahead.values[i]);
  }
  for_rows(r.row + kUnroll * r.step, r.step, r.count - kUnroll, load, use);
}

// Two sums of one column.
template <class Acc>
struct Sums {
  Acc first, second;
};

// Channels of a block at the most: 32 words of 8, or 128 of one.
constexpr int kBlockChannels = 256;
static_assert(kBlockChannels <= kThreads);

// A block's sums wait here, lane by lane: the threads of a warp write and read neighbouring words. One word more per lane
// moves the lanes to different banks.
constexpr int kScratchPitch = kThreads + 1;
template <class Acc, int kLanes>
using Scratch = Acc[2 * kLanes * kScratchPitch];

// What a thread holds after sum_down: the sums of column `index` of its block, which is channel `channel` of the matrix.
template <class Acc>
struct Column {
  Sums<Acc> sums;
  int index, channel;
  bool active;
};

__host__ __device__ __forceinline__ int channel_of_column(const RowGrid& g, int chunk, int column) {
  return (chunk * g.across + column % g.across) * g.lanes + column / g.across;
}

// Adds first and second over the `down` threads that share channels, always in the same order: every parts'th row by a
// thread, then the parts of a column, which are neighbouring lanes, as a binary tree. One column per thread: block-wide
// steps of halving would need a barrier each, with ever fewer threads at work.
template <int kLanes, class Acc>
__device__ __forceinline__ Column<Acc> sum_down(const RowGrid& g, const Acc (&first)[kLanes],
                                                const Acc (&second)[kLanes], Scratch<Acc, kLanes>& scratch) {
  const int thread = threadIdx.x;
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    scratch[c * kScratchPitch + thread] = first[c];
    scratch[(kLanes + c) * kScratchPitch + thread] = second[c];
  }
  __syncthreads();
  int parts = 1;  // a power of two, so that those of a column are in one warp
  while (parts < 32 && 2 * parts * g.columns() <= kThreads) parts *= 2;
  Column<Acc> out;
  out.index = thread / parts;
  out.channel = channel_of_column(g, blockIdx.x % g.chunks, out.index);
  const bool exists = out.index < g.columns();
  out.active = exists && thread % parts == 0 && out.channel < g.channels;
  Acc sum = 0, more = 0;
  if (exists) {
    const Acc* from = scratch + out.index / g.across * kScratchPitch + out.index % g.across;
#pragma unroll 4
    for (int y = thread % parts; y < g.down; y += parts) {
      sum += from[y * g.across];
      more += from[kLanes * kScratchPitch + y * g.across];
    }
  }
  for (int apart = 1; apart < parts; apart *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    more += __shfl_xor_sync(0xffffffffu, more, apart);
  }
  out.sums = {sum, more};
  return out;
}

// Two values per segment and column, from the first launch to the second.
template <class Acc>
struct Partials {
  Acc* first;
  Acc* second;
  int columns;  // of all chunks

  static __device__ __forceinline__ Partials at(void* workspace, const RowGrid& g) {
    Acc* const data = static_cast<Acc*>(workspace);
    const int columns = g.chunks * g.columns();
    return {data, data + int64_t(g.segments) * columns, columns};
  }
  __device__ __forceinline__ void store(const RowGrid& g, int segment, const Column<Acc>& column, Acc one,
                                        Acc two) const {
    const int64_t i = int64_t(segment) * columns + blockIdx.x % g.chunks * g.columns() + column.index;
    first[i] = one;
    second[i] = two;
  }
};

// Mean and sum of squared deviations of each segment. A thread's sums are of differences from the average of its first
// rows, a block's of differences from one thread's average: a mean far from zero does not cost bits. A single row would not
// do as the origin: it may lie several deviations off, and its square cost up to 1.4e-6 of the variance in float, over 35
// rows with a zero-padded corner first.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads, kStatsResident) void stats_kernel(const BatchNormStatsArgs a, const RowGrid g) {
  using Acc = Accumulator<T>;
  __shared__ Scratch<Acc, kLanes> scratch;
  __shared__ Acc origins[kBlockChannels];
  let_later_kernels_start();
  const RowRange r = range_of<kLanes>(g);
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  Acc origin[kLanes] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  const int rows = r.count;
  wait_for_earlier_kernels();
  const int pitch = pitch_of(a, g);
  const auto load = [&](int row) { return load_lanes<kLanes>(z + int64_t(row) * pitch); };
  Lanes<T, kLanes> words[kUnroll];
  if (rows > 0) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = load(r.row + (i < rows ? i : 0) * r.step);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      Acc value[kLanes];
      widen(words[i], value);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) origin[c] += value[c] * (Acc(1) / kUnroll);
    }
#pragma unroll
    for (int c = 0; c < kLanes; ++c) origin[c] = finite_origin(origin[c]);
  }
  if (threadIdx.x < g.across) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) origins[c * g.across + threadIdx.x] = origin[c];
  }
  __syncthreads();
  if (rows > 0) {
    const auto add = [&](int, Lanes<T, kLanes> word) {
      Acc value[kLanes];
      widen(word, value);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) {
        const Acc d = value[c] - origin[c];
        sum[c] += d;
        squares[c] += d * d;
      }
    };
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (i < rows) add(0, words[i]);
    }
    for_rows(r.row + kUnroll * r.step, r.step, rows - kUnroll, load, add);
    // The thread's mean relative to the block's origin: the difference of two origins is exact, where the mean itself,
    // rounded at the size of the offset, would be 5e-6 of the variance off in float with a mean of 300 deviations.
    const Acc count = static_cast<Acc>(rows), share = Acc(1) / count;
#pragma unroll
    for (int c = 0; c < kLanes; ++c) {
      squares[c] -= sum[c] * (sum[c] * share);
      const Acc d = (origin[c] - origins[c * g.across + threadIdx.x % g.across]) + sum[c] * share;
      sum[c] = count * d;
      squares[c] += sum[c] * d;
    }
  }
  const Column<Acc> column = sum_down<kLanes>(g, sum, squares, scratch);
  if (!column.active) return;
  const Moments<Acc> moments = moments_of(column.sums.first, column.sums.second,
                                          static_cast<Acc>(g.rows_of_segment(r.segment)), origins[column.index]);
  Partials<Acc>::at(a.workspace, g).store(g, r.segment, column, moments.mean, moments.squares);
}

// 8 columns, which are one sector of floats, x 64 segments at a time, and 9 loads in flight per thread: all segments of
// a matrix on an H200. Narrow blocks spread over more multiprocessors, and fit beside the blocks that they wait for. Two of
// them fit a multiprocessor: with more, ptxas spares registers and has a thread wait for its first loads before its last.
constexpr int kFinishAcross = 8, kFinishDown = 64, kFinishThreads = kFinishAcross * kFinishDown, kFinishUnroll = 9;
constexpr int kFinishWarps = kFinishThreads / 32, kFinishResident = 2;
static_assert(32 % kFinishAcross == 0 && kFinishWarps >= kFinishAcross && 32 % kFinishWarps == 0);
static_assert(kFinishDown * kFinishUnroll >= std::max(kStatsBlocks, kPassBlocks));

// The sums over all segments of what use(segment, partials, sums) adds, for the column with the number of the thread's
// warp: in the first warps afterwards, and in a fixed order. Called by whole blocks. What was loaded before and is used
// in use() or later comes with the partials; what is computed from it before keeps them waiting for it.
template <class Acc, class Use>
__device__ __forceinline__ Sums<Acc> sum_segments(const RowGrid& g, const Partials<Acc>& in, Use&& use) {
  __shared__ Acc scratch[2][kFinishAcross][kFinishWarps + 1];
  const int x = threadIdx.x % kFinishAcross, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * kFinishAcross + x;
  Sums<Acc> mine = {};
  const auto add_lanes = [&](int from, int to) {
    for (int apart = from; apart < to; apart *= 2) {
      mine.first += __shfl_xor_sync(0xffffffffu, mine.first, apart);
      mine.second += __shfl_xor_sync(0xffffffffu, mine.second, apart);
    }
  };
  if (column < in.columns) {
    const int first = threadIdx.x / kFinishAcross;
    Sums<Acc> partials[kFinishUnroll];
#pragma unroll
    for (int i = 0; i < kFinishUnroll; ++i) {
      const int segment = first + i * kFinishDown;
      const int64_t at = int64_t(segment) * in.columns + column;
      if (segment < g.segments) partials[i] = {in.first[at], in.second[at]};
    }
#pragma unroll
    for (int i = 0; i < kFinishUnroll; ++i) {
      const int segment = first + i * kFinishDown;
      if (segment < g.segments) use(segment, partials[i], mine);
    }
  }
  add_lanes(kFinishAcross, 32);
  if (lane < kFinishAcross) {
    scratch[0][x][warp] = mine.first;
    scratch[1][x][warp] = mine.second;
  }
  __syncthreads();
  mine = {};
  if (warp < kFinishAcross && lane < kFinishWarps) mine = {scratch[0][warp][lane], scratch[1][warp][lane]};
  add_lanes(1, kFinishWarps);
  return mine;
}

// The channel whose sums the calling thread has after sum_segments; past the matrix if none.
__device__ __forceinline__ int channel_after_sum(const RowGrid& g) {
  const int warp = threadIdx.x / 32, column = blockIdx.x * kFinishAcross + warp;
  if (threadIdx.x % 32 != 0 || warp >= kFinishAcross || column >= g.chunks * g.columns()) return g.channels;
  return channel_of_column(g, column / g.columns(), column % g.columns());
}

// Mean and variance of all rows from those of the segments, relative to the mean of the first segment.
// running.running_mean is null, or the buffers move too, by a momentum that does not depend on the counter.
template <class Acc>
__global__ __launch_bounds__(kFinishThreads, kFinishResident) void finish_stats_kernel(const BatchNormStatsArgs a,
                                                                                       const RowGrid g,
                                                                                       const RunningStatsArgs running) {
  const Partials<Acc> in = Partials<Acc>::at(a.workspace, g);
  const int channel = channel_after_sum(g);
  const bool writes = channel < g.channels;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  OldStats<Acc> old;
  if (writes) old.load(running, channel);
  // Of the warp's own column afterwards, of the thread's before.
  const int before = blockIdx.x * kFinishAcross + threadIdx.x % kFinishAcross;
  const int after = blockIdx.x * kFinishAcross + threadIdx.x / 32;
  const Acc origin = before < in.columns ? in.first[before] : Acc(0);
  const Acc own_origin = writes ? in.first[after] : Acc(0);
  const Sums<Acc> sums = sum_segments<Acc>(g, in, [&](int segment, const Sums<Acc>& partial, Sums<Acc>& mine) {
    add_moments(mine.first, mine.second, {partial.first, partial.second}, static_cast<Acc>(g.rows_of_segment(segment)),
                finite_origin(origin));
  });
  if (writes) finish_channel(a, running, old, channel, finite_origin(own_origin), sums.first, sums.second);
}

// Of a channel with variance `var`.
template <class Acc>
__device__ __forceinline__ Acc invstd_of(const Affine& affine, Acc var) {
  return affine.mean.data == nullptr ? Acc(1) : Acc(1) / sqrt(var + Acc(affine.eps));
}

// A channel's values. Vectors in Acc, as in every module under autocast, are loaded together: load_channel() branches on
// the dtype, and four of them one after the other wait for memory four times.
template <class Acc>
struct ChannelValues {
  Acc mean, var, gamma, beta;

  __device__ __forceinline__ ChannelValues(const Affine& a, int channel) {
    constexpr DType kOwn = std::is_same_v<Acc, double> ? DType::kFloat64 : DType::kFloat32;
    const auto own = [](const ChannelVector& v) { return v.data == nullptr || v.dtype == kOwn; };
    if (own(a.mean) && own(a.var) && own(a.gamma) && own(a.beta)) {
      const auto load = [channel](const ChannelVector& v, Acc absent) {
        return v.data != nullptr ? static_cast<const Acc*>(v.data)[channel] : absent;
      };
      mean = load(a.mean, Acc(0)), var = load(a.var, Acc(1)), gamma = load(a.gamma, Acc(1)),
      beta = load(a.beta, Acc(0));
    } else {
      mean = load_channel<Acc>(a.mean, channel, Acc(0)), var = load_channel<Acc>(a.var, channel, Acc(1));
      gamma = load_channel<Acc>(a.gamma, channel, Acc(1)), beta = load_channel<Acc>(a.beta, channel, Acc(0));
    }
  }
};

// Per-channel values of a block in shared memory: each is computed once, by one thread, and read by `down` of them.
// u = (z - mean) * scale + beta. With the mean subtracted first, a mean that dwarfs the spread costs nothing;
// z * scale + shift would cancel.
template <class Acc>
struct NormTable {
  Acc mean[kBlockChannels], scale[kBlockChannels], beta[kBlockChannels];

  __device__ __forceinline__ void set(int i, const Affine& affine, int channel) {
    const bool normed = affine.mean.data != nullptr;
    const ChannelValues<Acc> of(affine, channel);
    mean[i] = of.mean - load_channel<Acc>(affine.bias, channel, Acc(0));
    scale[i] = normed ? of.gamma * (Acc(1) / sqrt(of.var + Acc(affine.eps))) : Acc(1);
    beta[i] = normed ? of.beta : Acc(0);
  }
};

// Calls set(i, channel) for the block's channels, each by one thread, then waits for all.
template <int kLanes, class Set>
__device__ __forceinline__ void fill_table(const RowGrid& g, Set&& set) {
  const int i = threadIdx.x, channel = blockIdx.x % g.chunks * (g.across * kLanes) + i;
  if (i < g.across * kLanes && channel < g.channels) set(i, channel);
  __syncthreads();
}

// A thread's part of the table, in registers.
template <class Acc, int kLanes>
struct Norm {
  Acc mean[kLanes], scale[kLanes], beta[kLanes];
  __device__ __forceinline__ Norm(const NormTable<Acc>& table, int first) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) {
      mean[c] = table.mean[first + c];
      scale[c] = table.scale[first + c];
      beta[c] = table.beta[first + c];
    }
  }
};

// u = act(u), and grad *= act'(u). The activation is asked for once per word: a branch for each element would keep their
// long chains of operations from overlapping.
template <class T, int kLanes>
__device__ __forceinline__ void activate_all(Accumulator<T> (&u)[kLanes], Act act) {
  if (act != Act::kSilu) return;
#pragma unroll
  for (int c = 0; c < kLanes; ++c) u[c] = activate<T>(u[c], Act::kSilu);
}
template <class T, int kLanes>
__device__ __forceinline__ void multiply_by_gradient(Accumulator<T> (&grad)[kLanes], const Accumulator<T> (&u)[kLanes],
                                                     Act act) {
  if (act != Act::kSilu) return;
#pragma unroll
  for (int c = 0; c < kLanes; ++c) grad[c] *= activate_gradient<T>(u[c], Act::kSilu);
}

template <class T, int kLanes>
struct ActWords {
  Lanes<T, kLanes> z, residual;
};

template <class T, int kLanes>
__global__ __launch_bounds__(kThreads, kPassResident) void act_kernel(const BatchNormActArgs a, const RowGrid g,
                                                                      const int64_t y_stride) {
  using Acc = Accumulator<T>;
  using Words = ActWords<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  let_later_kernels_start();
  const RowRange r = range_of<kLanes>(g);
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  const T* const residual = static_cast<const T*>(a.residual) + r.channel;
  T* const y = static_cast<T*>(a.y) + r.channel;
  const bool adds = a.residual != nullptr;
  const int pitch = pitch_of(a, g);
  const auto load = [&](int row) {
    Words words = {load_lanes<kLanes>(z + int64_t(row) * pitch), {}};
    if (adds) words.residual = load_lanes<kLanes>(residual + int64_t(row) * a.residual_stride);
    return words;
  };
  wait_for_earlier_kernels();
  const Ahead<Words> ahead(r, load);
  fill_table<kLanes>(g, [&](int i, int channel) { table.set(i, a.affine, channel); });
  if (!r.active) return;
  const Norm<Acc, kLanes> norm(table, r.local);
  for_rows(ahead, r, load, [&](int row, const Words& words) {
    Acc u[kLanes];
    widen(words.z, u);
#pragma unroll
    for (int c = 0; c < kLanes; ++c) u[c] = (u[c] - norm.mean[c]) * norm.scale[c] + norm.beta[c];
    activate_all<T>(u, a.act);
    if (adds) {
      Acc more[kLanes];
      widen(words.residual, more);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) u[c] += more[c];
    }
    store_lanes(y + row * y_stride, narrow<T>(u));
  });
}

template <class T, int kLanes>
struct GradWords {
  Lanes<T, kLanes> grad_y, z;
};

// grad = du, d = z - mean
template <class T, int kLanes>
__device__ __forceinline__ void differentiate(const GradWords<T, kLanes>& words,
                                              const Norm<Accumulator<T>, kLanes>& norm, Act act,
                                              Accumulator<T> (&grad)[kLanes], Accumulator<T> (&d)[kLanes]) {
  widen(words.grad_y, grad);
  widen(words.z, d);
  Accumulator<T> u[kLanes];
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    d[c] -= norm.mean[c];
    u[c] = d[c] * norm.scale[c] + norm.beta[c];
  }
  multiply_by_gradient<T>(grad, u, act);
}

// Sums of du and of du * (z - mean) per segment; the factor invstd of xhat waits for the second launch.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads, kPassResident) void backward_sums_kernel(const BatchNormBackwardArgs a,
                                                                                const RowGrid g,
                                                                                const FilterTiles filter) {
  using Acc = Accumulator<T>;
  using Words = GradWords<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  __shared__ Scratch<Acc, kLanes> scratch;
  let_later_kernels_start();
  // The blocks behind those of the matrix make a filter: a launch less in the chain that ends with the gradient of x.
  if (const int tile = static_cast<int>(blockIdx.x) - g.segments * g.chunks; tile >= 0) {
    wait_for_earlier_kernels();
    transpose_filter_tile<T, T>(filter, tile);
    return;
  }
  const RowRange r = range_of<kLanes>(g);
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  const T* const grad_y = static_cast<const T*>(a.grad_y) + r.channel;
  const int pitch = pitch_of(a, g);
  const auto load = [&](int row) {
    return Words{load_lanes<kLanes>(grad_y + int64_t(row) * a.grad_y_stride),
                 load_lanes<kLanes>(z + int64_t(row) * pitch)};
  };
  wait_for_earlier_kernels();
  const Ahead<Words> ahead(r, load);
  fill_table<kLanes>(g, [&](int i, int channel) { table.set(i, a.affine, channel); });
  Acc sum[kLanes] = {}, weighted[kLanes] = {};
  if (r.active) {
    const Norm<Acc, kLanes> norm(table, r.local);
    for_rows(ahead, r, load, [&](int, const Words& words) {
      Acc grad[kLanes], d[kLanes];
      differentiate<T>(words, norm, a.act, grad, d);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) {
        sum[c] += grad[c];
        weighted[c] += grad[c] * d[c];
      }
    });
  }
  const Column<Acc> column = sum_down<kLanes>(g, sum, weighted, scratch);
  if (!column.active) return;
  Partials<Acc>::at(a.workspace, g).store(g, r.segment, column, column.sums.first, column.sums.second);
}

template <class Acc>
__global__ __launch_bounds__(kFinishThreads, kFinishResident) void finish_sums_kernel(const BatchNormBackwardArgs a,
                                                                                      const RowGrid g) {
  const Partials<Acc> in = Partials<Acc>::at(a.workspace, g);
  const int channel = channel_after_sum(g);
  const bool writes = channel < g.channels;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  // Asked for before the sums, which take as long to come; computed with after them, or they would wait for it.
  const Acc var = writes ? load_channel<Acc>(a.affine.var, channel, Acc(1)) : Acc(1);
  const Sums<Acc> sums = sum_segments<Acc>(g, in, [](int, const Sums<Acc>& partial, Sums<Acc>& mine) {
    mine.first += partial.first;
    mine.second += partial.second;
  });
  if (!writes) return;
  static_cast<Acc*>(a.grad_beta)[channel] = sums.first;
  static_cast<Acc*>(a.grad_gamma)[channel] = sums.second * invstd_of(a.affine, var);
}

// grad_z = scale * du - (offset + slope * (z - mean)), offset and slope from the sums; both 0 for fixed statistics.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads, kPassResident) void backward_kernel(const BatchNormBackwardArgs a,
                                                                           const RowGrid g) {
  using Acc = Accumulator<T>;
  using Words = GradWords<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  __shared__ __align__(16) Acc offsets[kBlockChannels], slopes[kBlockChannels];
  let_later_kernels_start();
  const RowRange r = range_of<kLanes>(g);
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  const T* const grad_y = static_cast<const T*>(a.grad_y) + r.channel;
  T* const grad_z = static_cast<T*>(a.grad_z) + r.channel;
  const int pitch = pitch_of(a, g);
  const auto load = [&](int row) {
    return Words{load_lanes<kLanes>(grad_y + int64_t(row) * a.grad_y_stride),
                 load_lanes<kLanes>(z + int64_t(row) * pitch)};
  };
  wait_for_earlier_kernels();
  const Ahead<Words> ahead(r, load);
  fill_table<kLanes>(g, [&](int i, int channel) {
    Acc grad_beta = 0, grad_gamma = 0;
    if (a.batch_stats) {
      grad_beta = static_cast<const Acc*>(a.grad_beta)[channel];
      grad_gamma = static_cast<const Acc*>(a.grad_gamma)[channel];
    }
    table.set(i, a.affine, channel);
    const Acc factor = table.scale[i] / static_cast<Acc>(g.rows);
    offsets[i] = a.batch_stats ? factor * grad_beta : Acc(0);
    const Acc var = load_channel<Acc>(a.affine.var, channel, Acc(1));
    slopes[i] = a.batch_stats ? factor * invstd_of(a.affine, var) * grad_gamma : Acc(0);
  });
  if (!r.active) return;
  const Norm<Acc, kLanes> norm(table, r.local);
  Acc offset[kLanes], slope[kLanes];
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    offset[c] = offsets[r.local + c];
    slope[c] = slopes[r.local + c];
  }
  for_rows(ahead, r, load, [&](int row, const Words& words) {
    Acc grad[kLanes], d[kLanes];
    differentiate<T>(words, norm, a.act, grad, d);
#pragma unroll
    for (int c = 0; c < kLanes; ++c) grad[c] = norm.scale[c] * grad[c] - (offset[c] + slope[c] * d[c]);
    store_lanes(grad_z + int64_t(row) * pitch, narrow<T>(grad));
  });
}

// One block, because every channel needs the counter after its one increment.
template <class Acc>
__global__ __launch_bounds__(1024) void running_stats_kernel(const RunningStatsArgs a) {
  __shared__ int64_t batches;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (threadIdx.x == 0 && a.num_batches_tracked != nullptr) batches = ++*a.num_batches_tracked;
  __syncthreads();
  // nn.BatchNorm2d without a momentum and without a counter leaves its buffers alone.
  if (a.momentum < 0 && a.num_batches_tracked == nullptr) return;
  const Acc factor = a.momentum < 0 ? Acc(1) / static_cast<Acc>(batches) : static_cast<Acc>(a.momentum);
  const auto move = [&](void* running, int channel, Acc batch) {
    const Acc old = load_channel<Acc>({running, a.running_dtype}, channel, Acc(0));
    store_channel(running, a.running_dtype, channel, blend(old, batch, factor));
  };
  for (int c = threadIdx.x; c < a.channels; c += blockDim.x) {
    move(a.running_mean, c, static_cast<const Acc*>(a.mean)[c]);
    move(a.running_var, c, static_cast<const Acc*>(a.var)[c] * static_cast<Acc>(a.unbias));
  }
}

// Calls launch(TypeTag<T>, std::integral_constant<int, lanes>): words of kBytes, or single elements.
template <int kBytes, class Launch>
void with_lanes(DType dtype, bool words, Launch&& launch) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (words) {
      launch(tag, std::integral_constant<int, kBytes / static_cast<int>(sizeof(T))>{});
    } else {
      launch(tag, std::integral_constant<int, 1>{});
    }
  });
}

bool words_fit(int bytes, DType dtype, int channels, std::initializer_list<const void*> pointers,
               std::initializer_list<int64_t> strides) {
  const int lanes = bytes / size_of(dtype);
  return channels % lanes == 0 &&
         std::all_of(pointers.begin(), pointers.end(), [&](const void* p) { return is_aligned(p, bytes); }) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride % lanes == 0; });
}

unsigned int blocks_of(const RowGrid& g) { return checked_grid(int64_t(g.segments) * g.chunks, "batch_norm"); }
unsigned int finish_blocks_of(const RowGrid& g) { return ceil_div(g.chunks * g.columns(), kFinishAcross); }

// Bytes of z from which the first pass of the backward starts when the kernels before it have ended. Started beside them, its
// blocks end unevenly, the first after 68 % of the time and not 91 %, and grad_z's blocks, which take their places, do too:
// 419 MB on an H200 248 and 364 us, and 196 and 298 if started late. That costs about 1 us without work. Blocks of 19 to 39 MB
// in a graph: 3.4 to 5.9 us less a block, forward and backward.
constexpr int64_t kLateStartBytes = 16 << 20;

// A pass of the backward; `first`: nothing of this batch norm's backward was launched before it. more: its other arguments.
template <auto kKernel, class... More>
void launch_backward(const char* name, unsigned int blocks, const BatchNormBackwardArgs& a, const RowGrid& g,
                     DType dtype, bool first, cudaStream_t stream, const More&... more) {
  if (first && a.rows * a.channels * size_of(dtype) >= kLateStartBytes) {
    kKernel<<<blocks, kThreads, 0, stream>>>(a, g, more...);
    check_launch(name);
  } else {
    launch_dependent<kKernel>(name, blocks, kThreads, 0, stream, a, g, more...);
  }
}

void launch_act(const BatchNormActArgs& a, int64_t y_stride, DType dtype, bool backwards, cudaStream_t stream) {
  const int64_t residual_stride = a.residual == nullptr ? 0 : a.residual_stride;
  const bool words =
      words_fit(kPassBytes, dtype, a.channels, {a.z, a.residual, a.y}, {a.z_stride, residual_stride, y_stride});
  with_lanes<kPassBytes>(dtype, words, [&](auto tag, auto lanes) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = decltype(lanes)::value;
    const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kPassBlocks, backwards);
    launch_dependent<act_kernel<T, kLanes>>("batch_norm_act", blocks_of(g), kThreads, 0, stream, a, g, y_stride);
  });
}

}  // namespace

int64_t batch_norm_workspace_bytes(int64_t rows, int channels, DType dtype) {
  const auto partials = [&](int lanes) {
    const RowGrid g = cut_rows(rows, channels, lanes, std::max(kStatsBlocks, kPassBlocks), true);
    return int64_t(2) * g.segments * g.chunks * g.columns();
  };
  // Whether words fit depends on pointers too: room for either cut.
  const int size = size_of(dtype);
  return std::max({partials(kStatsBytes / size), partials(kPassBytes / size), partials(1)}) *
         (dtype == DType::kFloat64 ? 8 : 4);
}

void batch_norm_stats(const BatchNormStatsArgs& a, const RunningStatsArgs* running, DType dtype, cudaStream_t stream) {
  // A cumulative average needs the counter before it needs the average.
  const bool together = running != nullptr && running->momentum >= 0;
  const RunningStatsArgs moved = together ? *running : RunningStatsArgs{};
  with_lanes<kStatsBytes>(
      dtype, words_fit(kStatsBytes, dtype, a.channels, {a.z}, {a.z_stride}), [&](auto tag, auto lanes) {
        using T = typename decltype(tag)::type;
        constexpr int kLanes = decltype(lanes)::value;
        const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kStatsBlocks, true, kStatsRows);
        launch_dependent<stats_kernel<T, kLanes>>("batch_norm_stats", blocks_of(g), kThreads, 0, stream, a, g);
        launch_dependent<finish_stats_kernel<Accumulator<T>>>("batch_norm_stats, second pass", finish_blocks_of(g),
                                                              kFinishThreads, 0, stream, a, g, moved);
      });
  if (running != nullptr && !together) update_running_stats(*running, stream);
}

void batch_norm_act(const BatchNormActArgs& a, DType dtype, cudaStream_t stream) {
  launch_act(a, a.channels, dtype, true, stream);
}

void batch_norm_act_strided(const BatchNormActArgs& a, int64_t y_stride, DType dtype, cudaStream_t stream) {
  launch_act(a, y_stride, dtype, true, stream);
}

void batch_norm_stats_act(const BatchNormStatsArgs& a, const RunningStatsArgs* running, const BatchNormActArgs& act,
                          int64_t y_stride, DType dtype, cudaStream_t stream) {
  batch_norm_stats(a, running, dtype, stream);
  launch_act(act, y_stride, dtype, false, stream);
}

void batch_norm_backward(const BatchNormBackwardArgs& a, DType dtype, cudaStream_t stream) {
  batch_norm_backward_and_filter(a, nullptr, dtype, stream);
}

void batch_norm_backward_and_filter(const BatchNormBackwardArgs& a, const TransposeFilterArgs* filter, DType dtype,
                                    cudaStream_t stream) {
  if (a.batch_stats && (a.grad_beta == nullptr || a.grad_gamma == nullptr || a.affine.mean.data == nullptr)) {
    fail("batch_norm_backward: batch statistics need mean, grad_beta and grad_gamma");
  }
  const bool words = words_fit(kPassBytes, dtype, a.channels, {a.grad_y, a.z, a.grad_z}, {a.z_stride, a.grad_y_stride});
  const bool sums = a.grad_beta != nullptr && a.grad_gamma != nullptr;
  const bool beside = sums && filter != nullptr && filter->in_dtype == dtype && filter->out_dtype == dtype;
  if (filter != nullptr && !beside) transpose_filter(*filter, stream);
  with_lanes<kPassBytes>(dtype, words, [&](auto tag, auto lanes) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = decltype(lanes)::value;
    if (sums) {
      const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kPassBlocks, true);
      const FilterTiles tiles = beside ? FilterTiles(*filter) : FilterTiles();
      const unsigned int blocks = checked_grid(int64_t(g.segments) * g.chunks + tiles.count(), "batch_norm");
      launch_backward<backward_sums_kernel<T, kLanes>>("batch_norm_backward, sums", blocks, a, g, dtype, true, stream,
                                                       tiles);
      launch_dependent<finish_sums_kernel<Accumulator<T>>>("batch_norm_backward, sums, second pass",
                                                           finish_blocks_of(g), kFinishThreads, 0, stream, a, g);
    }
    if (a.grad_z != nullptr) {
      const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kPassBlocks, !sums);
      launch_backward<backward_kernel<T, kLanes>>("batch_norm_backward", blocks_of(g), a, g, dtype, !sums, stream);
    }
  });
}

void update_running_stats(const RunningStatsArgs& a, cudaStream_t stream) {
  const int threads = std::min(1024, round_up(a.channels, 32));
  if (a.stats_dtype == DType::kFloat64) {
    launch_dependent<running_stats_kernel<double>>("update_running_stats", 1, threads, 0, stream, a);
  } else if (a.stats_dtype == DType::kFloat32) {
    launch_dependent<running_stats_kernel<float>>("update_running_stats", 1, threads, 0, stream, a);
  } else {
    fail("update_running_stats: statistics are float32 or float64, got ", name_of(a.stats_dtype));
  }
}

}  // namespace yolo12_fastconv
