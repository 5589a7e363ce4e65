// Gradient of a convolution's weight, where cuDNN's is less exact than the error rule allows (docs/kernel-notes.md).
//   depthwise:  dw[c,r,s]   = sum over n,p,q of grad_z[n,p,q,c] * x[n,h,w,c]
//   dense:      dw[k,c,r,s] = sum over n,p,q of grad_z[n,p,q,k] * x[n,h,w,c]
// with h = p*stride_h + r*dilation_h - pad_h, w likewise, and x = 0 outside of the image.
// x is NHWC with any strides of n, h and w (slices), grad_z a matrix (pixels, K) with any row stride, dw has any strides
// and any of the four dtypes.
//
// All kernels cut the outputs into slices and leave one sum per slice and element of dw in the workspace, as
// [slice][k][r][s][c]; a second launch adds the slices. No atomics: the order of all sums depends on shape and alignment
// alone. Sums are float (double for double), and none is long. A chain of n additions of random products is off by
// about 2.5e-8 * sqrt(n / 2) of its result: 4e-6 for 51200 pixels in one, which is where cuDNN stands. Here a chain has
// 64 (depthwise) or 128 (dense) products, a second one in registers adds those of the slice, and the slices are added as
// a tree: 2e-7 in all.
//
// - wgrad_depthwise_taps_kernel, half and bfloat16, square filters with stride 1, an even number of channels: a thread has
//   two channels and all taps. A column of x and one value of grad_z bring 49 FMAs per channel for 7x7. Chains are those
//   of a slice, some thousand products, which adds 1e-6 to a result that stock rounds to half.
//   Of 7x7 it has what wgrad_depthwise_sm90.cu and wgrad_depthwise_mma.cu do not: channels that are no multiple of 8, GPUs
//   without tensor cores.
// - wgrad_depthwise_kernel, the rest in half, bfloat16 and float; 3, 5 or 7 taps in a row, stride_w 1 or 2. One thread: two channels
//   (one, where width or alignment do not allow words) and one row of taps. It runs along rows of outputs with a window
//   of x in registers: an output costs one load of x, one of grad_z and S FMAs per channel. The threads of a block take
//   all rows of taps of the same outputs, so that what they share comes from L1. Nothing is shared otherwise: no
//   barrier. Bound by issue: for 7 taps in half 14 of about 38 instructions per output are
//   FMAs, the rest conversions, addresses and moves of the window. L1 gives 2 lines per 14 FMAs of a warp, 60 % of what
//   it can.
// - wgrad_dense_kernel, float without TF32 and double; any kernel, stride, padding and dilation, groups = 1. A GEMM of
//   64 output channels x 64 columns (tap, channel), 16 pixels at a time by asynchronous copies; both operands lie in
//   memory as shared memory wants them, channels innermost. One thread: 4 x 8 sums, twice for the two chains, which is
//   why it isn't 8 x 8. 32 FMAs per 3 16-byte loads of shared memory: bound by FMAs.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/gradient_kernels.h"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"

namespace yolo12_fastconv {
namespace {

// ---- depthwise ----

constexpr int kThreads = 256;
// Blocks resident on a multiprocessor: 64 registers a thread spill 20 to 200 bytes from 5 taps on.
constexpr int resident_blocks(int taps) { return taps == 3 ? 4 : 3; }
// One round on the largest GPUs; more slices would cost more in the workspace than they balance.
constexpr int depthwise_blocks(int taps) { return kMultiprocessors * resident_blocks(taps); }
// Outputs of a row in one chain of sums. Shorter ones only to have enough work for a small tensor.
constexpr int kLongStrip = 64, kShortStrip = 16;
constexpr int kMaxKernelRows = 7;

// How outputs and channels are cut. A unit is a strip of a row of outputs; a slice is a run of units.
// Thread = (group * kernel_h + r) * across + word; block = block of slices * chunks + chunk.
struct DepthwiseCut {
  int across;  // threads along channels
  int chunks;  // blocks along channels
  int groups;  // slices per block
  int strip;
  int units, slice_units, slices;
  FastDivide strips, out_h;
};

int64_t unit_count(const ConvShape& s, int strip) { return int64_t(s.batch) * s.out_h * ceil_div(s.out_w, strip); }

DepthwiseCut cut_depthwise(const ConvShape& s, int lanes) {
  DepthwiseCut g;
  const int words = ceil_div(s.out_channels, lanes);
  g.chunks = ceil_div(words, 32);
  g.across = ceil_div(words, g.chunks);
  g.groups = kThreads / (g.across * s.kernel_h);
  const int wanted = std::max(1, depthwise_blocks(s.kernel_w) / g.chunks) * g.groups;
  g.strip = unit_count(s, kLongStrip) >= wanted ? kLongStrip : kShortStrip;
  g.units = static_cast<int>(unit_count(s, g.strip));
  g.slice_units = std::max(1, ceil_div(g.units, wanted));
  g.slices = ceil_div(g.units, g.slice_units);
  g.strips = FastDivide(ceil_div(s.out_w, g.strip));
  g.out_h = FastDivide(s.out_h);
  return g;
}

// kCount pixels of a row, from column `column` on; zero outside of the row.
template <int kCount, int kLanes, class T>
__device__ __forceinline__ void load_pixels(const T* row, int column, int columns, int64_t stride,
                                            Accumulator<T> (*out)[kLanes]) {
  Lanes<T, kLanes> words[kCount];
  const T* from = row + column * stride;
  if (column >= 0 && column + kCount <= columns) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i] = load_lanes<kLanes>(from);
      from += stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      words[i].word = {};
      if (static_cast<unsigned>(column + i) < static_cast<unsigned>(columns)) words[i] = load_lanes<kLanes>(from);
      from += stride;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) widen(words[i], out[i]);
}

// What a thread has of one row of taps: a sum per tap and channel, and the pixels of x that the next output shares with
// those before it.
template <class T, int kLanes, int kTaps, int kStride>
struct TapRow {
  using Acc = Accumulator<T>;
  static constexpr int kKept = kTaps - kStride;
  static_assert(kKept > 0);
  Acc sum[kTaps][kLanes];
  Acc kept[kKept][kLanes];

  // The next kCount outputs: `column` is that of the first pixel of x beyond the kept ones.
  template <int kCount>
  __device__ __forceinline__ void add(const T* grad, int64_t grad_stride, const T* x, int column, int columns,
                                      int64_t x_stride) {
    Acc g[kCount][kLanes], window[kKept + kCount * kStride][kLanes];
    load_pixels<kCount * kStride, kLanes>(x, column, columns, x_stride, window + kKept);
    load_pixels<kCount, kLanes>(grad, 0, kCount, grad_stride, g);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) window[i][c] = kept[i][c];
    }
#pragma unroll
    for (int q = 0; q < kCount; ++q) {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
#pragma unroll
        for (int c = 0; c < kLanes; ++c) sum[s][c] += g[q][c] * window[q * kStride + s][c];
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) kept[i][c] = window[kCount * kStride + i][c];
    }
  }
};

template <class T, int kLanes, int kTaps, int kStride>
__global__ __launch_bounds__(kThreads, kLanes == 2 && sizeof(T) == 4 && kTaps == 7 && kStride == 2
                                           ? 2  // its words of x are twice as wide: 80 registers spill
                                           : resident_blocks(kTaps)) void wgrad_depthwise_kernel(const WgradArgs a,
                                                                                                 const DepthwiseCut g) {
  using Row = TapRow<T, kLanes, kTaps, kStride>;
  using Acc = Accumulator<T>;
  constexpr int kUnroll = 4;  // outputs whose loads are in flight together
  const ConvShape& s = a.shape;
  const int thread = threadIdx.x, chunk = blockIdx.x % g.chunks, block = blockIdx.x / g.chunks;
  const int r = thread / g.across % s.kernel_h;
  const int slice = block * g.groups + thread / (g.across * s.kernel_h);
  const int channel = (chunk * g.across + thread % g.across) * kLanes;
  if (thread >= g.across * s.kernel_h * g.groups || slice >= g.slices || channel >= s.out_channels) return;

  const T* const x = static_cast<const T*>(a.x) + channel;
  const T* const grad_z = static_cast<const T*>(a.grad_z) + channel;
  Acc total[kTaps][kLanes] = {};
  const int end = static_cast<int>(min(int64_t(g.units), (int64_t(slice) + 1) * g.slice_units));
  for (int unit = slice * g.slice_units; unit < end; ++unit) {
    int row, strip, n, p;
    g.strips.divide(unit, row, strip);
    g.out_h.divide(row, n, p);
    const int h = p * s.stride_h + r * s.dilation_h - s.pad_h;
    if (static_cast<unsigned>(h) >= static_cast<unsigned>(s.in_h)) continue;
    int q = strip * g.strip;
    const int end_q = min(s.out_w, q + g.strip);
    const T* const x_row = x + n * a.x_strides.n + h * a.x_strides.h;
    const T* grad = grad_z + (int64_t(row) * s.out_w + q) * a.grad_z_stride;
    int w = q * kStride - s.pad_w;

    Row taps;
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) taps.sum[t][c] = Acc(0);
    }
    load_pixels<Row::kKept, kLanes>(x_row, w, s.in_w, a.x_strides.w, taps.kept);
    w += Row::kKept;
    for (; q + kUnroll <= end_q; q += kUnroll) {
      taps.template add<kUnroll>(grad, a.grad_z_stride, x_row, w, s.in_w, a.x_strides.w);
      grad += kUnroll * a.grad_z_stride;
      w += kUnroll * kStride;
    }
    for (; q < end_q; ++q) {
      taps.template add<1>(grad, a.grad_z_stride, x_row, w, s.in_w, a.x_strides.w);
      grad += a.grad_z_stride;
      w += kStride;
    }
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
#pragma unroll
      for (int c = 0; c < kLanes; ++c) total[t][c] += taps.sum[t][c];
    }
  }

  const int64_t first_tap = (int64_t(slice) * s.kernel_h + r) * kTaps;
  Acc* const out = static_cast<Acc*>(a.workspace) + first_tap * s.out_channels + channel;
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
#pragma unroll
    for (int c = 0; c < kLanes; ++c) out[int64_t(t) * s.out_channels + c] = total[t][c];
  }
}

// ---- depthwise with stride 1 in half: all taps per thread -----------------------------------------------------------

// A thread has two channels and all taps of kRows rows of outputs at a time. It runs along the columns of x: a column
// brings kRows + kTaps - 1 values of x and kRows of grad_z per channel, and kRows * kTaps^2 FMAs, with the last kTaps
// columns of grad_z in registers. The next column is on its way while one is computed.
constexpr int kTapThreads = 128;
constexpr int tap_rows(int taps) { return taps == 3 ? 4 : taps == 5 ? 2 : 1; }
constexpr int tap_blocks(int taps) { return taps == 3 ? 4 : 3; }  // resident; more would spill

// A unit is kRows rows of outputs below a strip of columns of x. The groups of a block take neighbouring units at the same
// time, whose rows of x overlap, and add up their sums at the end: a slice is a block.
// Thread = group * across + word; block = slice * chunks + chunk.
struct TapCut {
  int across, chunks, groups, strip, strips;
  int units, slice_units, slices;
  FastDivide by_strips, by_row_groups, by_chunks, by_across;
};

TapCut cut_taps(const ConvShape& s) {
  const int rows = tap_rows(s.kernel_w);
  TapCut g;
  const int words = ceil_div(s.out_channels, 2);
  g.chunks = ceil_div(words, 32);
  g.across = ceil_div(words, g.chunks);
  g.groups = kTapThreads / g.across;
  const int row_groups = s.batch * ceil_div(s.out_h, rows);
  const int wanted = std::max(1, kMultiprocessors * tap_blocks(s.kernel_w) / g.chunks);
  // As many strips as share the work out evenly; each costs the columns of grad_z beside it.
  double least = 0;
  g.slices = 0;
  for (int strips = 1; strips <= 4; strips *= 2) {
    const int strip = ceil_div(s.in_w, strips), units = row_groups * strips;
    const int rounds = ceil_div(units, g.groups * wanted);
    const double columns = double(rounds) * (strip + 8);
    if (strips > 1 && (columns >= least || strip < 8)) continue;
    least = columns;
    g.strip = strip;
    g.strips = strips;
    g.units = units;
    g.slice_units = rounds * g.groups;
    g.slices = ceil_div(units, g.slice_units);
  }
  g.by_chunks = FastDivide(g.chunks);
  g.by_across = FastDivide(g.across);
  g.by_strips = FastDivide(g.strips);
  g.by_row_groups = FastDivide(std::max(1, ceil_div(s.out_h, rows)));
  return g;
}

// Two channels, or zeros and no access to `from`.
template <class T>
__device__ __forceinline__ Lanes<T, 2> load_pair_if(bool valid, const T* from) {
  Lanes<T, 2> pair;
  pair.word = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.global.b32 %0, [%1];\n"
      "}\n"
      : "+r"(pair.word)
      : "l"(from), "r"(static_cast<int>(valid)));
  return pair;
}

// A thread's place in its block, read from the hardware each time: 98 sums leave no register to keep it in.
struct TapPlace {
  int chunk, slice, group, word, channel;
  bool works;
  __device__ __forceinline__ TapPlace(const TapCut& g, int channels) {
    unsigned block, thread;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    g.by_chunks.divide(static_cast<int>(block), slice, chunk);
    g.by_across.divide(static_cast<int>(thread), group, word);
    channel = (chunk * g.across + word) * 2;
    works = group < g.groups && channel < channels;
  }
};

// The same if a bit is set: one instruction besides the load, where a bool would take three.
template <class T>
__device__ __forceinline__ Lanes<T, 2> load_pair_if_bit(unsigned bits, unsigned bit, const T* from) {
  Lanes<T, 2> pair;
  pair.word = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %2, %3;\n"
      "setp.ne.b32 p, t, 0;\n"
      "@p ld.global.b32 %0, [%1];\n"
      "}\n"
      : "+r"(pair.word)
      : "l"(from), "r"(bits), "r"(bit));
  return pair;
}

template <class T, int kTaps>
__global__ __launch_bounds__(kTapThreads, tap_blocks(kTaps)) void wgrad_depthwise_taps_kernel(const WgradArgs a,
                                                                                              const TapCut g) {
  constexpr int kRows = tap_rows(kTaps), kInRows = kRows + kTaps - 1;
  __shared__ float2 shared[kTaps * kTaps * 32];
  const ConvShape& s = a.shape;
  const int x_row = static_cast<int>(a.x_strides.h), x_pixel = static_cast<int>(a.x_strides.w),
            grad_pixel = static_cast<int>(a.grad_z_stride);
  float sum[kTaps][kTaps][2] = {};
  for (int round = 0; round < g.slice_units; round += g.groups) {
    const TapPlace at(g, s.out_channels);
    const int unit = at.slice * g.slice_units + round + at.group, channel = at.channel;
    if (!at.works || unit >= g.units) break;
    int rows, strip, n, p;
    g.by_strips.divide(unit, rows, strip);
    g.by_row_groups.divide(rows, n, p);
    p *= kRows;
    const int first = strip * g.strip, end = min(s.in_w, first + g.strip), top = p - s.pad_h;
    const T* x = static_cast<const T*>(a.x) + channel + n * a.x_strides.n + top * a.x_strides.h + first * a.x_strides.w;
    // Tap s of column c meets column c + pad - s of grad_z.
    const T* grad = static_cast<const T*>(a.grad_z) + channel +
                    ((int64_t(n) * s.out_h + p) * s.out_w + first + s.pad_w) * a.grad_z_stride;
    unsigned valid = 0;
#pragma unroll
    for (int i = 0; i < kInRows; ++i) {
      valid |= static_cast<unsigned>(static_cast<unsigned>(top + i) < static_cast<unsigned>(s.in_h)) << i;
    }
    // Column q, `offset` from where `grad` points.
    const auto load_grad = [&](Lanes<T, 2>(&column)[kRows], int q, int offset) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool in_map = static_cast<unsigned>(q) < static_cast<unsigned>(s.out_w) && (i == 0 || p + i < s.out_h);
        column[i] = load_pair_if(in_map, grad + (i * s.out_w + offset) * grad_pixel);
      }
    };
    const auto load_x = [&](unsigned rows, int i) { return load_pair_if_bit(rows, 1u << i, x + i * x_row); };
    Lanes<T, 2> x_words[kInRows], grad_words[kRows];
    float grads[kRows][kTaps][2];  // column c + pad at place c - first, modulo kTaps
#pragma unroll
    for (int t = 1; t < kTaps; ++t) {
      load_grad(grad_words, first + s.pad_w - t, -t);
#pragma unroll
      for (int i = 0; i < kRows; ++i) widen(grad_words[i], grads[i][kTaps - t]);
    }
#pragma unroll
    for (int j = 0; j < kInRows; ++j) x_words[j] = load_x(valid, j);
    load_grad(grad_words, first + s.pad_w, 0);
    for (int c = first; c < end; c += kTaps) {
#pragma unroll
      for (int u = 0; u < kTaps; ++u) {
        if (c + u >= end) break;
#pragma unroll
        for (int i = 0; i < kRows; ++i) widen(grad_words[i], grads[i][u]);
        x += x_pixel;
        grad += grad_pixel;
        const unsigned rows = c + u + 1 < end ? valid : 0;
        load_grad(grad_words, c + u + 1 + s.pad_w, 0);
#pragma unroll
        for (int j = 0; j < kInRows; ++j) {
          float value[2];
          widen(x_words[j], value);
          x_words[j] = load_x(rows, j);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const int r = j - i;
            if (r < 0 || r >= kTaps) continue;
#pragma unroll
            for (int t = 0; t < kTaps; ++t) {
#pragma unroll
              for (int e = 0; e < 2; ++e) sum[r][t][e] += value[e] * grads[i][(u - t + kTaps) % kTaps][e];
            }
          }
        }
      }
    }
  }

  // The groups one after the other.
  const TapPlace at(g, s.out_channels);
  for (int turn = 0; turn < g.groups; ++turn) {
    if (turn == at.group && at.works) {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          float2& total = shared[(r * kTaps + t) * 32 + at.word];
          const float2 before = turn == 0 ? float2{0.0f, 0.0f} : total;
          total = {before.x + sum[r][t][0], before.y + sum[r][t][1]};
        }
      }
    }
    __syncthreads();
  }
  float* const out = static_cast<float*>(a.workspace) + int64_t(at.slice) * kTaps * kTaps * s.out_channels;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTaps * kTaps * g.across; i += kTapThreads) {
    const int tap = i / g.across, c = (at.chunk * g.across + i % g.across) * 2;
    if (c < s.out_channels) {
      *reinterpret_cast<float2*>(out + int64_t(tap) * s.out_channels + c) = shared[tap * 32 + i % g.across];
    }
  }
}

// ---- dense ----

constexpr int kTile = 64;  // output channels, and columns
constexpr int kDepth = 16;  // pixels of a stage
constexpr int kStages = 3;
constexpr int kDenseThreads = 128;
constexpr int kSide = 4, kRuns = 2;  // sums of a thread: kSide output channels x kRuns runs of 4 columns
constexpr int kFlushStages = 8;  // stages in one chain of sums
// Two rounds of what is resident on the largest GPUs.
constexpr int kDenseBlocks = 2 * 4 * kMultiprocessors;
constexpr int64_t kDenseWorkspaceBytes = int64_t(64) << 20;

struct DenseCut {
  int columns;  // (tap, channel)
  int channel_tiles, column_tiles;
  int64_t pixels, slice_pixels;
  int slices;
};

DenseCut cut_dense(const ConvShape& s, int64_t sum_bytes) {
  DenseCut g;
  g.columns = s.kernel_h * s.kernel_w * s.in_channels;
  g.channel_tiles = ceil_div(s.out_channels, kTile);
  g.column_tiles = ceil_div(g.columns, kTile);
  g.pixels = s.out_pixels();
  const int64_t tiles = int64_t(g.channel_tiles) * g.column_tiles;
  const int64_t affordable = kDenseWorkspaceBytes / (int64_t(s.out_channels) * g.columns * sum_bytes);
  const int64_t wanted = std::max<int64_t>(1, std::min(ceil_div<int64_t>(kDenseBlocks, tiles), affordable));
  g.slice_pixels = round_up<int64_t>(std::max<int64_t>(1, ceil_div(g.pixels, wanted)), kDepth * kFlushStages);
  g.slices = static_cast<int>(ceil_div(g.pixels, g.slice_pixels));
  return g;
}

// A pixel of the output, as its place in the image, that moves on by a fixed number of pixels.
struct OutputPixel {
  int n, p, q;

  __device__ __forceinline__ OutputPixel(const ConvShape& s, int64_t pixel) {
    const int64_t row = pixel / s.out_w;
    q = static_cast<int>(pixel - row * s.out_w);
    n = static_cast<int>(row / s.out_h);
    p = static_cast<int>(row - int64_t(n) * s.out_h);
  }
  // By `step`, itself split into images, rows and columns.
  __device__ __forceinline__ void advance(const ConvShape& s, const OutputPixel& step) {
    q += step.q;
    p += step.p;
    n += step.n;
    if (q >= s.out_w) {
      q -= s.out_w;
      ++p;
    }
    if (p >= s.out_h) {
      p -= s.out_h;
      ++n;
    }
  }
};

// A thread's share of the copies into the stages of one operand: kLanes neighbouring columns of every kRows-th pixel.
template <int kLanes>
struct CopyShare {
  static constexpr int kWords = kTile / kLanes, kRows = kDenseThreads / kWords;
  static_assert(kDepth % kRows == 0);
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) % kWords * kLanes; }
  static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / kWords; }
};

template <class T, int kGradLanes, int kXLanes>
__global__ __launch_bounds__(kDenseThreads, sizeof(T) == 4 ? 4 : 2) void wgrad_dense_kernel(const WgradArgs a,
                                                                                            const DenseCut g) {
  constexpr int kColumns = 4 * kRuns;
  __shared__ __align__(16) T grads[kStages][kDepth * kTile];
  __shared__ __align__(16) T pixels[kStages][kDepth * kTile];
  const ConvShape& s = a.shape;
  // Tiles of the same pixels run together, and find them in L2.
  const int tiles = g.channel_tiles * g.column_tiles, tile = blockIdx.x % tiles, slice = blockIdx.x / tiles;
  const int first_channel = tile % g.channel_tiles * kTile, first_column = tile / g.channel_tiles * kTile;
  const int64_t first_pixel = slice * g.slice_pixels, end_pixel = min(g.pixels, first_pixel + g.slice_pixels);
  const int stages = static_cast<int>((end_pixel - first_pixel + kDepth - 1) / kDepth);

  // What this thread copies: the columns stay, the pixels move on.
  using GradCopy = CopyShare<kGradLanes>;
  using XCopy = CopyShare<kXLanes>;
  int64_t grad_pixel = first_pixel + GradCopy::row(), x_pixel = first_pixel + XCopy::row();
  const bool grad_inside = first_channel + GradCopy::column() < s.out_channels;
  const T* grad = static_cast<const T*>(a.grad_z) + first_channel + GradCopy::column() + grad_pixel * a.grad_z_stride;
  const int column = first_column + XCopy::column();
  const int tap = column / s.in_channels;
  const int tap_h = tap / s.kernel_w * s.dilation_h - s.pad_h, tap_w = tap % s.kernel_w * s.dilation_w - s.pad_w;
  const T* const x = static_cast<const T*>(a.x) + column % s.in_channels;
  OutputPixel place(s, x_pixel);
  const OutputPixel step(s, XCopy::kRows);

  const auto copy_stage = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kDepth / GradCopy::kRows; ++i) {
      const bool valid = grad_inside && grad_pixel < end_pixel;
      T* const to = grads[stage] + (GradCopy::row() + i * GradCopy::kRows) * kTile + GradCopy::column();
      copy_bytes_async<kGradLanes * sizeof(T)>(to, valid ? grad : a.grad_z, valid);
      grad_pixel += GradCopy::kRows;
      grad += GradCopy::kRows * a.grad_z_stride;
    }
#pragma unroll
    for (int i = 0; i < kDepth / XCopy::kRows; ++i) {
      const int h = place.p * s.stride_h + tap_h, w = place.q * s.stride_w + tap_w;
      const bool valid = column < g.columns && x_pixel < end_pixel &&
                         static_cast<unsigned>(h) < static_cast<unsigned>(s.in_h) &&
                         static_cast<unsigned>(w) < static_cast<unsigned>(s.in_w);
      const T* const from = x + place.n * a.x_strides.n + h * a.x_strides.h + w * a.x_strides.w;
      T* const to = pixels[stage] + (XCopy::row() + i * XCopy::kRows) * kTile + XCopy::column();
      copy_bytes_async<kXLanes * sizeof(T)>(to, valid ? from : a.x, valid);
      x_pixel += XCopy::kRows;
      place.advance(s, step);
    }
  };

  const int channel_run = static_cast<int>(threadIdx.x) / (kTile / kColumns) * kSide;
  const int column_run = static_cast<int>(threadIdx.x) % (kTile / kColumns) * 4;
  T sum[kSide][kColumns] = {}, total[kSide][kColumns] = {};
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < stages) copy_stage(i);
    commit_async_copies();
  }
  int slot = 0;
  for (int stage = 0; stage < stages; ++stage) {
    wait_for_async_copies<kStages - 2>();
    __syncthreads();  // this stage is here, and nobody reads the one before any more
    if (stage + kStages - 1 < stages) copy_stage(slot == 0 ? kStages - 1 : slot - 1);
    commit_async_copies();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      T left[kSide], right[kColumns];
      load_run(grads[slot] + i * kTile + channel_run, left);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        load_run(pixels[slot] + i * kTile + column_run + run * (kTile / kRuns), right + 4 * run);
      }
#pragma unroll
      for (int k = 0; k < kSide; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sum[k][c] += left[k] * right[c];
      }
    }
    slot = slot + 1 == kStages ? 0 : slot + 1;
    if (std::is_same_v<T, float> && (stage + 1) % kFlushStages == 0) {
#pragma unroll
      for (int k = 0; k < kSide; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          total[k][c] += sum[k][c];
          sum[k][c] = T(0);
        }
      }
    }
  }

  T* const out = static_cast<T*>(a.workspace) + int64_t(slice) * s.out_channels * g.columns;
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    const int channel = first_channel + channel_run + k;
    if (channel >= s.out_channels) break;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int to = first_column + column_run + c / 4 * (kTile / kRuns) + c % 4;
      if (to < g.columns) out[int64_t(channel) * g.columns + to] = total[k][c] + sum[k][c];
    }
  }
}

// ---- host ----

bool depthwise_served(const ConvShape& s, DType dtype) {
  return dtype != DType::kFloat64 && s.groups == s.in_channels && s.in_channels == s.out_channels &&
         s.kernel_h <= kMaxKernelRows && (s.kernel_w == 3 || s.kernel_w == 5 || s.kernel_w == 7) &&
         (s.stride_w == 1 || s.stride_w == 2) && s.dilation_w == 1 && unit_count(s, kShortStrip) <= INT_MAX;
}

bool dense_served(const ConvShape& s, DType dtype) {
  return size_of(dtype) >= 4 && s.groups == 1 && int64_t(s.kernel_h) * s.kernel_w * s.in_channels <= INT_MAX - kTile;
}

// Whether runs of `lanes` channels of both inputs may be loaded at once. The stride of a dimension of size 1 is never used.
bool grad_in_lanes(const WgradArgs& a, int lanes, int element_bytes) {
  return a.shape.out_channels % lanes == 0 && is_aligned(a.grad_z, lanes * element_bytes) &&
         (a.shape.out_pixels() <= 1 || a.grad_z_stride % lanes == 0);
}
bool x_in_lanes(const WgradArgs& a, int lanes, int element_bytes) {
  const ConvShape& s = a.shape;
  return s.in_channels % lanes == 0 && is_aligned(a.x, lanes * element_bytes) &&
         (s.batch == 1 || a.x_strides.n % lanes == 0) && (s.in_h == 1 || a.x_strides.h % lanes == 0) &&
         (s.in_w == 1 || a.x_strides.w % lanes == 0);
}

constexpr int kDepthwiseLanes = 2;

// Whether the kernel with all taps in a thread serves it, if pairs of channels can be loaded and these distances fit 32 bits.
bool short_distances(const WgradArgs& a) {
  return std::abs(a.x_strides.h) < (1 << 27) && std::abs(a.x_strides.w) < (1 << 27) &&
         a.grad_z_stride * a.shape.out_w < (1 << 27);
}
bool taps_served(const ConvShape& s, DType dtype) {
  return size_of(dtype) == 2 && s.square_depthwise() && s.stride_h == 1 && s.out_channels % 2 == 0 &&
         (s.kernel_h == 3 || s.kernel_h == 5 || s.kernel_h == 7) &&
         int64_t(s.batch) * s.out_h * 4 + 4096 * kTapThreads <= INT_MAX;
}

template <class T, int kTaps>
void launch_taps(const WgradArgs& a, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const TapCut g = cut_taps(s);
  if (g.slices > 0) {
    const unsigned int blocks = checked_grid(int64_t(g.slices) * g.chunks, "wgrad, depthwise");
    wgrad_depthwise_taps_kernel<T, kTaps><<<blocks, kTapThreads, 0, stream>>>(a, g);
    check_launch("wgrad, depthwise");
  }
  add_wgrad_slices(a, g.slices, stream);
}

template <class T, int kLanes, int kTaps>
void launch_depthwise(const WgradArgs& a, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const DepthwiseCut g = cut_depthwise(s, kLanes);
  if (g.slices > 0) {
    const unsigned int blocks = checked_grid(int64_t(ceil_div(g.slices, g.groups)) * g.chunks, "wgrad, depthwise");
    const int threads = round_up(g.across * s.kernel_h * g.groups, 32);
    with_bool(s.stride_w == 2, [&](auto two) {
      constexpr int kStride = decltype(two)::value ? 2 : 1;
      wgrad_depthwise_kernel<T, kLanes, kTaps, kStride><<<blocks, threads, 0, stream>>>(a, g);
    });
    check_launch("wgrad, depthwise");
  }
  add_wgrad_slices(a, g.slices, stream);
}

template <class T>
void launch_depthwise(const WgradArgs& a, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(T));
  if constexpr (kBytes == 2) {
    constexpr DType kDType = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    if (wgrad_depthwise_mma_serves(a, kDType)) {
      return wgrad_depthwise_mma(a, kDType, stream);
    }
    if (taps_served(a.shape, DType::kFloat16) && short_distances(a) && grad_in_lanes(a, 2, kBytes) &&
        x_in_lanes(a, 2, kBytes)) {
      switch (a.shape.kernel_w) {
        case 3: return launch_taps<T, 3>(a, stream);
        case 5: return launch_taps<T, 5>(a, stream);
        default: return launch_taps<T, 7>(a, stream);
      }
    }
  }
  with_bool(grad_in_lanes(a, kDepthwiseLanes, kBytes) && x_in_lanes(a, kDepthwiseLanes, kBytes), [&](auto words) {
    constexpr int kLanes = decltype(words)::value ? kDepthwiseLanes : 1;
    switch (a.shape.kernel_w) {
      case 3: return launch_depthwise<T, kLanes, 3>(a, stream);
      case 5: return launch_depthwise<T, kLanes, 5>(a, stream);
      default: return launch_depthwise<T, kLanes, 7>(a, stream);
    }
  });
}

template <class T>
void launch_dense(const WgradArgs& a, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(T)), kWords = kLanesOf16Bytes<T>;
  const ConvShape& s = a.shape;
  const DenseCut g = cut_dense(s, kBytes);
  if (g.slices > 0) {
    const unsigned int blocks = checked_grid(int64_t(g.slices) * g.channel_tiles * g.column_tiles, "wgrad, dense");
    with_bool(grad_in_lanes(a, kWords, kBytes), [&](auto grad_words) {
      with_bool(x_in_lanes(a, kWords, kBytes), [&](auto x_words) {
        constexpr int kGradLanes = decltype(grad_words)::value ? kWords : 1;
        constexpr int kXLanes = decltype(x_words)::value ? kWords : 1;
        wgrad_dense_kernel<T, kGradLanes, kXLanes><<<blocks, kDenseThreads, 0, stream>>>(a, g);
      });
    });
    check_launch("wgrad, dense");
  }
  add_wgrad_slices(a, std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32, s.in_channels, g.slices, stream);
}

}  // namespace

bool has_wgrad(const ConvShape& s, DType dtype, bool allow_tf32) {
  return depthwise_served(s, dtype) || (dense_served(s, dtype) && !(dtype == DType::kFloat32 && allow_tf32));
}

int64_t wgrad_workspace_bytes(const ConvShape& s, DType dtype) {
  if (!depthwise_served(s, dtype)) {
    return cut_dense(s, size_of(dtype)).slices * int64_t(s.out_channels) * s.kernel_h * s.kernel_w * s.in_channels *
           size_of(dtype);
  }
  // Whether words fit depends on pointers too: room for either cut.
  int slices = std::max(cut_depthwise(s, kDepthwiseLanes).slices, cut_depthwise(s, 1).slices);
  if (taps_served(s, dtype)) slices = std::max(slices, cut_taps(s).slices);
  slices = std::max(slices, wgrad_depthwise_mma_slices(s, dtype));
  slices = std::max(slices, wgrad_depthwise_sm90_slices(s, dtype));
  return int64_t(slices) * s.kernel_h * s.kernel_w * s.out_channels * static_cast<int>(sizeof(float));
}

void wgrad(const WgradArgs& a, DType dtype, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  if (depthwise_served(s, dtype)) {
    with_type(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (!std::is_same_v<T, double>) launch_depthwise<T>(a, stream);
    });
  } else if (dense_served(s, dtype)) {
    dtype == DType::kFloat64 ? launch_dense<double>(a, stream) : launch_dense<float>(a, stream);
  } else {
    fail("wgrad: no kernel for ", name_of(dtype), ", ", s.kernel_h, "x", s.kernel_w, ", stride ", s.stride_h, "x",
         s.stride_w, ", dilation ", s.dilation_h, "x", s.dilation_w, ", groups ", s.groups, ", channels ",
         s.in_channels, " -> ", s.out_channels);
  }
}

}  // namespace yolo12_fastconv
