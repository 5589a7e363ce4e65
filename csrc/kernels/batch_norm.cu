// Batch norm over the rows of an NHWC tensor, seen as a dense matrix (rows, channels) of half, bfloat16, float or double.
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
// equal inputs give equal sums on every GPU.
//
// All of it is bound by memory, on an H200 at 4.3 TB/s; bytes per element of half: stats 2, act 4, backward 4 for the
// sums and 6 for grad_z. The second pass over a matrix runs through the segments backwards: what the first pass read
// last is still in the L2 cache.
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;
// Rows in flight per thread.
constexpr int kUnroll = 4;
// Blocks for the sums: two to four rounds on the largest GPUs. For element-wise kernels more, as nothing follows them.
constexpr int kSumBlocks = 1024, kElementBlocks = 4096;

// How a matrix is cut into blocks. Block index = segment * chunks + chunk.
struct RowGrid {
  int64_t rows;
  int channels;
  int across, down;  // threads along channels and along rows
  int chunks;  // blocks along channels
  int64_t segment_rows;
  int segments;
};

RowGrid cut_rows(int64_t rows, int channels, int lanes, int blocks) {
  RowGrid g;
  g.rows = rows;
  g.channels = channels;
  const int words = ceil_div(channels, lanes);
  g.chunks = ceil_div(words, lanes == 1 ? 128 : 32);
  g.across = ceil_div(words, g.chunks);
  g.down = kThreads / g.across;
  const int64_t wanted = std::max(1, blocks / g.chunks);
  // Whole rounds of loads per thread, and at least one: less would not pay for the per-channel values.
  const int64_t rows_per_thread = round_up<int64_t>(ceil_div<int64_t>(rows, wanted * g.down), kUnroll);
  g.segment_rows = rows_per_thread * g.down;
  g.segments = static_cast<int>(ceil_div(rows, g.segment_rows));
  return g;
}

// The part of a matrix that a thread passes through.
struct RowRange {
  int channel;  // the thread's first; past the matrix if it has none
  int local;  // the same, counted from the block's first
  int64_t row, end;  // of the thread: row, row + step, ...
  int64_t segment_row;  // first of the block
  int segment;
  bool active;
};

template <int kLanes>
__device__ __forceinline__ RowRange range_of(const RowGrid& g, bool backwards) {
  RowRange r;
  const int thread = threadIdx.x, chunk = blockIdx.x % g.chunks, position = blockIdx.x / g.chunks;
  r.segment = backwards ? g.segments - 1 - position : position;
  r.local = thread % g.across * kLanes;
  r.channel = chunk * g.across * kLanes + r.local;
  r.segment_row = r.segment * g.segment_rows;
  r.row = r.segment_row + thread / g.across;
  r.end = min(g.rows, r.segment_row + g.segment_rows);
  r.active = thread < g.across * g.down && r.channel < g.channels;
  return r;
}

// Calls use(load(row)) for row, row + step, ... < end; kUnroll loads are issued before the first use.
template <class Load, class Use>
__device__ __forceinline__ void for_rows(int64_t row, int64_t end, int step, Load&& load, Use&& use) {
  using Value = decltype(load(row));
  for (; row + (kUnroll - 1) * step < end; row += kUnroll * step) {
    Value values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) values[i] = load(row + i * step);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) use(row + i * step, values[i]);
  }
  for (; row < end; row += step) use(row, load(row));
}

// Adds first and second over the `down` threads that share channels; the result is in the thread of row 0. The order is
// that of a binary tree. `scratch` holds 2 * kBlock * kLanes values.
template <int kBlock, int kLanes, class Acc>
__device__ __forceinline__ void sum_down(Acc (&first)[kLanes], Acc (&second)[kLanes], int across, int down,
                                         Acc* scratch) {
  const int thread = threadIdx.x, y = thread / across;
  Acc* const mine = scratch + thread * kLanes;
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    mine[c] = first[c];
    mine[kBlock * kLanes + c] = second[c];
  }
  int half = 1;
  while (half < down) half *= 2;
  for (half /= 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half && y + half < down) {
      const Acc* const other = mine + half * across * kLanes;
#pragma unroll
      for (int c = 0; c < kLanes; ++c) {
        mine[c] += other[c];
        mine[kBlock * kLanes + c] += other[kBlock * kLanes + c];
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    first[c] = mine[c];
    second[c] = mine[kBlock * kLanes + c];
  }
}

// Two values per segment and channel, from the first launch to the second.
template <class Acc>
struct Partials {
  Acc* first;
  Acc* second;
  static __host__ __device__ Partials at(void* workspace, int segments, int channels) {
    Acc* const data = static_cast<Acc*>(workspace);
    return {data, data + int64_t(segments) * channels};
  }
};

// What is subtracted before summing: any value near the mean serves, an infinite or missing one would spread.
template <class Acc>
__device__ __forceinline__ Acc finite_origin(Acc value) {
  return value - value == Acc(0) ? value : Acc(0);
}

// Rows whose average is the origin of a segment. One row may lie several deviations off, and its square costs bits of
// the variance: up to 1.4e-6 of it was seen in float, over 35 rows with a zero-padded corner first.
constexpr int kOriginRows = 4;

// Mean and sum of squared deviations of each segment. The sums are of differences from the average of a few of its rows:
// a mean far from zero does not cost bits.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void stats_kernel(const BatchNormStatsArgs a, const RowGrid g) {
  using Acc = Accumulator<T>;
  __shared__ Acc scratch[2 * kThreads * kLanes];
  const RowRange r = range_of<kLanes>(g, false);
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  Acc origin[kLanes] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  if (r.active) {
    // Spread over the segment; a segment shorter than that repeats rows.
    const int64_t apart = (r.end - r.segment_row) / kOriginRows;
#pragma unroll
    for (int i = 0; i < kOriginRows; ++i) {
      Acc value[kLanes];
      widen(load_lanes<kLanes>(z + (r.segment_row + i * apart) * g.channels), value);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) origin[c] += value[c] * (Acc(1) / kOriginRows);
    }
#pragma unroll
    for (int c = 0; c < kLanes; ++c) origin[c] = finite_origin(origin[c]);
    for_rows(
        r.row, r.end, g.down, [&](int64_t row) { return load_lanes<kLanes>(z + row * g.channels); },
        [&](int64_t, Lanes<T, kLanes> word) {
          Acc value[kLanes];
          widen(word, value);
#pragma unroll
          for (int c = 0; c < kLanes; ++c) {
            const Acc d = value[c] - origin[c];
            sum[c] += d;
            squares[c] += d * d;
          }
        });
  }
  sum_down<kThreads>(sum, squares, g.across, g.down, scratch);
  if (!r.active || threadIdx.x >= g.across) return;
  const Partials<Acc> out = Partials<Acc>::at(a.workspace, g.segments, g.channels);
  const Acc count = static_cast<Acc>(r.end - r.segment_row);
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    const int64_t i = int64_t(r.segment) * g.channels + r.channel + c;
    out.first[i] = origin[c] + sum[c] / count;
    out.second[i] = squares[c] - sum[c] * (sum[c] / count);
  }
}

// 32 channels x 32 segments at a time.
constexpr int kFinishAcross = 32, kFinishDown = 32, kFinishThreads = kFinishAcross * kFinishDown;

// Mean and variance of all rows from those of the segments (Chan et al.), relative to the mean of the first segment.
template <class Acc>
__global__ __launch_bounds__(kFinishThreads) void finish_stats_kernel(const BatchNormStatsArgs a, const RowGrid g) {
  __shared__ Acc scratch[2 * kFinishThreads];
  const Partials<Acc> in = Partials<Acc>::at(a.workspace, g.segments, g.channels);
  const int channel = blockIdx.x * kFinishAcross + threadIdx.x % kFinishAcross;
  Acc origin = 0, sum[1] = {}, squares[1] = {};
  if (channel < g.channels) {
    origin = finite_origin(in.first[channel]);
    struct Partial {
      Acc mean, squares;
    };
    for_rows(
        threadIdx.x / kFinishAcross, g.segments, kFinishDown,
        [&](int64_t segment) {
          const int64_t i = segment * g.channels + channel;
          return Partial{in.first[i], in.second[i]};
        },
        [&](int64_t segment, const Partial& partial) {
          const Acc count = static_cast<Acc>(min(g.segment_rows, g.rows - segment * g.segment_rows));
          const Acc d = partial.mean - origin;
          sum[0] += count * d;
          squares[0] += partial.squares + count * d * d;
        });
  }
  sum_down<kFinishThreads>(sum, squares, kFinishAcross, kFinishDown, scratch);
  if (channel >= g.channels || threadIdx.x >= kFinishAcross) return;
  const Acc count = static_cast<Acc>(g.rows);
  const Acc var = (squares[0] - sum[0] * (sum[0] / count)) / count;
  static_cast<Acc*>(a.mean)[channel] = origin + sum[0] / count;
  static_cast<Acc*>(a.var)[channel] = var < Acc(0) ? Acc(0) : var;  // keeps NaN, unlike max
}

template <class Acc>
__device__ __forceinline__ Acc invstd_of(const Affine& affine, int channel) {
  if (affine.mean.data == nullptr) return Acc(1);
  return Acc(1) / sqrt(load_channel<Acc>(affine.var, channel, Acc(1)) + Acc(affine.eps));
}

// Per-channel values of a block in shared memory: each is computed once, by one thread, and read by `down` of them.
constexpr int kBlockChannels = 256;
static_assert(kBlockChannels <= kThreads);

// u = (z - mean) * scale + beta. With the mean subtracted first, a mean that dwarfs the spread costs nothing;
// z * scale + shift would cancel.
template <class Acc>
struct NormTable {
  Acc mean[kBlockChannels], scale[kBlockChannels], beta[kBlockChannels];

  __device__ __forceinline__ void set(int i, const Affine& affine, int channel) {
    const bool normed = affine.mean.data != nullptr;
    mean[i] = load_channel<Acc>(affine.mean, channel, Acc(0)) - load_channel<Acc>(affine.bias, channel, Acc(0));
    scale[i] = normed ? load_channel<Acc>(affine.gamma, channel, Acc(1)) * invstd_of<Acc>(affine, channel) : Acc(1);
    beta[i] = normed ? load_channel<Acc>(affine.beta, channel, Acc(0)) : Acc(0);
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
__global__ __launch_bounds__(kThreads) void act_kernel(const BatchNormActArgs a, const RowGrid g) {
  using Acc = Accumulator<T>;
  using Word = Lanes<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  fill_table<kLanes>(g, [&](int i, int channel) { table.set(i, a.affine, channel); });
  const RowRange r = range_of<kLanes>(g, true);
  if (!r.active) return;
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  T* const y = static_cast<T*>(a.y) + r.channel;
  const Norm<Acc, kLanes> norm(table, r.local);
  const auto normalise = [&](Word word, Acc(&u)[kLanes]) {
    widen(word, u);
#pragma unroll
    for (int c = 0; c < kLanes; ++c) u[c] = (u[c] - norm.mean[c]) * norm.scale[c] + norm.beta[c];
    activate_all<T>(u, a.act);
  };
  if (a.residual == nullptr) {
    for_rows(
        r.row, r.end, g.down, [&](int64_t row) { return load_lanes<kLanes>(z + row * g.channels); },
        [&](int64_t row, Word word) {
          Acc u[kLanes];
          normalise(word, u);
          store_lanes(y + row * g.channels, narrow<T>(u));
        });
  } else {
    const T* const residual = static_cast<const T*>(a.residual) + r.channel;
    struct Words {
      Word z, residual;
    };
    for_rows(
        r.row, r.end, g.down,
        [&](int64_t row) {
          return Words{load_lanes<kLanes>(z + row * g.channels),
                       load_lanes<kLanes>(residual + row * a.residual_stride)};
        },
        [&](int64_t row, const Words& words) {
          Acc u[kLanes], more[kLanes];
          normalise(words.z, u);
          widen(words.residual, more);
#pragma unroll
          for (int c = 0; c < kLanes; ++c) u[c] += more[c];
          store_lanes(y + row * g.channels, narrow<T>(u));
        });
  }
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
__global__ __launch_bounds__(kThreads) void backward_sums_kernel(const BatchNormBackwardArgs a, const RowGrid g) {
  using Acc = Accumulator<T>;
  using Words = GradWords<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  fill_table<kLanes>(g, [&](int i, int channel) { table.set(i, a.affine, channel); });
  __shared__ Acc scratch[2 * kThreads * kLanes];
  const RowRange r = range_of<kLanes>(g, false);
  Acc sum[kLanes] = {}, weighted[kLanes] = {};
  if (r.active) {
    const T* const z = static_cast<const T*>(a.z) + r.channel;
    const T* const grad_y = static_cast<const T*>(a.grad_y) + r.channel;
    const Norm<Acc, kLanes> norm(table, r.local);
    for_rows(
        r.row, r.end, g.down,
        [&](int64_t row) {
          return Words{load_lanes<kLanes>(grad_y + row * a.grad_y_stride), load_lanes<kLanes>(z + row * g.channels)};
        },
        [&](int64_t, const Words& words) {
          Acc grad[kLanes], d[kLanes];
          differentiate<T>(words, norm, a.act, grad, d);
#pragma unroll
          for (int c = 0; c < kLanes; ++c) {
            sum[c] += grad[c];
            weighted[c] += grad[c] * d[c];
          }
        });
  }
  sum_down<kThreads>(sum, weighted, g.across, g.down, scratch);
  if (!r.active || threadIdx.x >= g.across) return;
  const Partials<Acc> out = Partials<Acc>::at(a.workspace, g.segments, g.channels);
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    const int64_t i = int64_t(r.segment) * g.channels + r.channel + c;
    out.first[i] = sum[c];
    out.second[i] = weighted[c];
  }
}

template <class Acc>
__global__ __launch_bounds__(kFinishThreads) void finish_sums_kernel(const BatchNormBackwardArgs a, const RowGrid g) {
  __shared__ Acc scratch[2 * kFinishThreads];
  const Partials<Acc> in = Partials<Acc>::at(a.workspace, g.segments, g.channels);
  const int channel = blockIdx.x * kFinishAcross + threadIdx.x % kFinishAcross;
  Acc sum[1] = {}, weighted[1] = {};
  if (channel < g.channels) {
    struct Partial {
      Acc sum, weighted;
    };
    for_rows(
        threadIdx.x / kFinishAcross, g.segments, kFinishDown,
        [&](int64_t segment) {
          const int64_t i = segment * g.channels + channel;
          return Partial{in.first[i], in.second[i]};
        },
        [&](int64_t, const Partial& partial) {
          sum[0] += partial.sum;
          weighted[0] += partial.weighted;
        });
  }
  sum_down<kFinishThreads>(sum, weighted, kFinishAcross, kFinishDown, scratch);
  if (channel >= g.channels || threadIdx.x >= kFinishAcross) return;
  static_cast<Acc*>(a.grad_beta)[channel] = sum[0];
  static_cast<Acc*>(a.grad_gamma)[channel] = weighted[0] * invstd_of<Acc>(a.affine, channel);
}

// grad_z = scale * du - (offset + slope * (z - mean)), offset and slope from the sums; both 0 for fixed statistics.
template <class T, int kLanes>
__global__ __launch_bounds__(kThreads) void backward_kernel(const BatchNormBackwardArgs a, const RowGrid g) {
  using Acc = Accumulator<T>;
  using Words = GradWords<T, kLanes>;
  __shared__ __align__(16) NormTable<Acc> table;
  __shared__ __align__(16) Acc offsets[kBlockChannels], slopes[kBlockChannels];
  fill_table<kLanes>(g, [&](int i, int channel) {
    table.set(i, a.affine, channel);
    offsets[i] = slopes[i] = Acc(0);
    if (a.batch_stats) {
      const Acc factor = table.scale[i] / static_cast<Acc>(g.rows);
      offsets[i] = factor * static_cast<const Acc*>(a.grad_beta)[channel];
      slopes[i] = factor * invstd_of<Acc>(a.affine, channel) * static_cast<const Acc*>(a.grad_gamma)[channel];
    }
  });
  const RowRange r = range_of<kLanes>(g, true);
  if (!r.active) return;
  const T* const z = static_cast<const T*>(a.z) + r.channel;
  const T* const grad_y = static_cast<const T*>(a.grad_y) + r.channel;
  T* const grad_z = static_cast<T*>(a.grad_z) + r.channel;
  const Norm<Acc, kLanes> norm(table, r.local);
  Acc offset[kLanes], slope[kLanes];
#pragma unroll
  for (int c = 0; c < kLanes; ++c) {
    offset[c] = offsets[r.local + c];
    slope[c] = slopes[r.local + c];
  }
  for_rows(
      r.row, r.end, g.down,
      [&](int64_t row) {
        return Words{load_lanes<kLanes>(grad_y + row * a.grad_y_stride), load_lanes<kLanes>(z + row * g.channels)};
      },
      [&](int64_t row, const Words& words) {
        Acc grad[kLanes], d[kLanes];
        differentiate<T>(words, norm, a.act, grad, d);
#pragma unroll
        for (int c = 0; c < kLanes; ++c) grad[c] = norm.scale[c] * grad[c] - (offset[c] + slope[c] * d[c]);
        store_lanes(grad_z + row * g.channels, narrow<T>(grad));
      });
}

template <class Acc>
__device__ __forceinline__ void blend(void* running, DType dtype, int channel, Acc batch, Acc factor) {
  const Acc old = load_channel<Acc>({running, dtype}, channel, Acc(0));
  const Acc value = (Acc(1) - factor) * old + factor * batch;
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(running)[channel] = convert<__half>(value); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(running)[channel] = convert<__nv_bfloat16>(value); break;
    case DType::kFloat32: static_cast<float*>(running)[channel] = convert<float>(value); break;
    default: static_cast<double*>(running)[channel] = convert<double>(value); break;
  }
}

// One block, because every channel needs the counter after its one increment.
template <class Acc>
__global__ __launch_bounds__(1024) void running_stats_kernel(const RunningStatsArgs a) {
  __shared__ int64_t batches;
  if (threadIdx.x == 0 && a.num_batches_tracked != nullptr) batches = ++*a.num_batches_tracked;
  __syncthreads();
  // nn.BatchNorm2d without a momentum and without a counter leaves its buffers alone.
  if (a.momentum < 0 && a.num_batches_tracked == nullptr) return;
  const Acc factor = a.momentum < 0 ? Acc(1) / static_cast<Acc>(batches) : static_cast<Acc>(a.momentum);
  for (int c = threadIdx.x; c < a.channels; c += blockDim.x) {
    blend(a.running_mean, a.running_dtype, c, static_cast<const Acc*>(a.mean)[c], factor);
    blend(a.running_var, a.running_dtype, c, static_cast<const Acc*>(a.var)[c] * static_cast<Acc>(a.unbias), factor);
  }
}

// Calls launch(TypeTag<T>, std::integral_constant<int, lanes>): words of 16 bytes, or single elements.
template <class Launch>
void with_lanes(DType dtype, bool words, Launch&& launch) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (words) {
      launch(tag, std::integral_constant<int, kLanesOf16Bytes<T>>{});
    } else {
      launch(tag, std::integral_constant<int, 1>{});
    }
  });
}

bool words_fit(DType dtype, int channels, std::initializer_list<const void*> pointers,
               std::initializer_list<int64_t> strides) {
  const int lanes = 16 / size_of(dtype);
  return channels % lanes == 0 &&
         std::all_of(pointers.begin(), pointers.end(), [](const void* p) { return is_aligned(p, 16); }) &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride % lanes == 0; });
}

unsigned int blocks_of(const RowGrid& g) { return checked_grid(int64_t(g.segments) * g.chunks, "batch_norm"); }

}  // namespace

int64_t batch_norm_workspace_bytes(int64_t rows, int channels, DType dtype) {
  const int lanes = 16 / size_of(dtype);  // whether words fit depends on pointers too: room for either cut
  const int segments =
      std::max(cut_rows(rows, channels, lanes, kSumBlocks).segments, cut_rows(rows, channels, 1, kSumBlocks).segments);
  return int64_t(2) * segments * channels * (dtype == DType::kFloat64 ? 8 : 4);
}

void batch_norm_stats(const BatchNormStatsArgs& a, DType dtype, cudaStream_t stream) {
  with_lanes(dtype, words_fit(dtype, a.channels, {a.z}, {}), [&](auto tag, auto lanes) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = decltype(lanes)::value;
    const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kSumBlocks);
    stats_kernel<T, kLanes><<<blocks_of(g), kThreads, 0, stream>>>(a, g);
    check_launch("batch_norm_stats");
    finish_stats_kernel<Accumulator<T>><<<ceil_div(a.channels, kFinishAcross), kFinishThreads, 0, stream>>>(a, g);
    check_launch("batch_norm_stats, second pass");
  });
}

void batch_norm_act(const BatchNormActArgs& a, DType dtype, cudaStream_t stream) {
  const int64_t residual_stride = a.residual == nullptr ? 0 : a.residual_stride;
  const bool words = words_fit(dtype, a.channels, {a.z, a.residual, a.y}, {residual_stride});
  with_lanes(dtype, words, [&](auto tag, auto lanes) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = decltype(lanes)::value;
    const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kElementBlocks);
    act_kernel<T, kLanes><<<blocks_of(g), kThreads, 0, stream>>>(a, g);
    check_launch("batch_norm_act");
  });
}

void batch_norm_backward(const BatchNormBackwardArgs& a, DType dtype, cudaStream_t stream) {
  if (a.batch_stats && (a.grad_beta == nullptr || a.grad_gamma == nullptr || a.affine.mean.data == nullptr)) {
    fail("batch_norm_backward: batch statistics need mean, grad_beta and grad_gamma");
  }
  const bool words = words_fit(dtype, a.channels, {a.grad_y, a.z, a.grad_z}, {a.grad_y_stride});
  with_lanes(dtype, words, [&](auto tag, auto lanes) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = decltype(lanes)::value;
    if (a.grad_beta != nullptr && a.grad_gamma != nullptr) {
      const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kSumBlocks);
      backward_sums_kernel<T, kLanes><<<blocks_of(g), kThreads, 0, stream>>>(a, g);
      check_launch("batch_norm_backward, sums");
      finish_sums_kernel<Accumulator<T>><<<ceil_div(a.channels, kFinishAcross), kFinishThreads, 0, stream>>>(a, g);
      check_launch("batch_norm_backward, sums, second pass");
    }
    if (a.grad_z != nullptr) {
      const RowGrid g = cut_rows(a.rows, a.channels, kLanes, kElementBlocks);
      backward_kernel<T, kLanes><<<blocks_of(g), kThreads, 0, stream>>>(a, g);
      check_launch("batch_norm_backward");
    }
  });
}

void update_running_stats(const RunningStatsArgs& a, cudaStream_t stream) {
  const int threads = std::min(1024, round_up(a.channels, 32));
  if (a.stats_dtype == DType::kFloat64) {
    running_stats_kernel<double><<<1, threads, 0, stream>>>(a);
  } else if (a.stats_dtype == DType::kFloat32) {
    running_stats_kernel<float><<<1, threads, 0, stream>>>(a);
  } else {
    fail("update_running_stats: statistics are float32 or float64, got ", name_of(a.stats_dtype));
  }
  check_launch("update_running_stats");
}

}  // namespace yolo12_fastconv
