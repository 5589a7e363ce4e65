// Depthwise convolution: one kernel per channel (groups = C = K), 3x3, 5x5 or 7x7, stride 1 or 2, dilation 1.
//   y[n,p,q,k] = act(scale[k] * sum over r,s of x[n, p*stride + r - pad, q*stride + s - pad, k] * w[k,r,s] + shift[k])
//                + residual[n,p,q,k]
// x NHWC with any strides of n, h and w (channel slices), y NHWC and dense, all of T: half, bfloat16, float or double.
// Sums in float (double for double), taps in the order r, s.
//
// A block takes 128 bytes of channels, up to 20 output columns and a segment of output rows of one image. Input rows
// pass through a ring in shared memory: while one step of kRows output rows is computed, the rows that the next step
// adds are on their way. One thread owns a lane (2 channels of half for 7x7, 4 for 3x3) and kRows x kCols outputs: all
// taps of its lane stay in registers as floats, every input element is read from shared memory and converted once per
// thread and feeds up to kRows * kCols sums.
//
// Bounds on an H200: 2 * sizeof(T) bytes per output at 4.3 TB/s, and R * S FMAs per output at 29.6 T/s (132
// multiprocessors, 128 lanes, 1.755 GHz). 3x3 is bound by memory; 7x7 in half by FMAs, twice over: a 7x7 thread of
// 4 x 5 outputs issues 1960 FMAs for 110 loads and 220 conversions.
#include <algorithm>

#include "device/async_copy.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/thread_index.cuh"

namespace yolo12_fastconv {
namespace {

template <class T, int kKernelSize, int kStrideLength, int kRowsPerStep>
struct DepthwiseTile {
  using Element = T;
  using Acc = Accumulator<T>;
  static constexpr int kKernel = kKernelSize, kTaps = kKernel * kKernel, kStride = kStrideLength;
  static constexpr int kPixelBytes = 128;  // of one pixel in shared memory: a constant, so that offsets are immediates
  static constexpr int kChunk = kPixelBytes / sizeof(T);
  // 49 taps leave room for one word of channels (98 registers of half taps), 9 taps for two.
  static constexpr int kLaneBytes = std::max<int>(kKernel == 3 ? 8 : 4, sizeof(T));
  static constexpr int kLaneChannels = kLaneBytes / sizeof(T);
  // Output columns and rows of one thread. 5 columns in 4 groups divide the usual map widths 20, 40 and 80.
  static constexpr int kCols = kStride == 1 ? 5 : 2, kRows = kRowsPerStep;
  static constexpr int kColumnGroups = 4;
  static constexpr int kThreads = kPixelBytes / kLaneBytes * kColumnGroups;
  // Input rows of one step, of them new in each further step, and all that are in shared memory at a time.
  static constexpr int kInRows = (kRows - 1) * kStride + kKernel, kNewRows = kRows * kStride;
  static constexpr int kRingRows = kInRows + kNewRows;
  static constexpr int kInCols = (kCols - 1) * kStride + kKernel;
  static constexpr int kRowBytes = ((kCols * kColumnGroups - 1) * kStride + kKernel) * kPixelBytes;
  static constexpr int kTapBytes =
      kPixelBytes + kLaneBytes;  // taps are written column by column: skewed over the banks
  static constexpr int kRingBytes = kRingRows * kRowBytes, kTapsBytes = kTaps * kTapBytes;
  static constexpr int kSharedBytes = kRingBytes + kTapsBytes + 2 * kChunk * static_cast<int>(sizeof(Acc));
  // Whether there are registers for a step's residual while it is computed. Otherwise each element waits for memory.
  static constexpr bool kEarlyResidual = sizeof(T) == 4 && kKernel == 7;
  // Resident blocks that the registers should allow: 12 warps for 7x7 in half, that is 168 registers per thread, and 16 in
  // float, whose taps take 49 instead of 98.
  static constexpr int kResident = (sizeof(T) == 4 && kKernel == 7 ? 512 : 384) / kThreads;
  static_assert(kKernel % 2 == 1 && (kStride == 1 || kStride == 2));
  static_assert(kSharedBytes <= 64 * 1024, "compute capability 7.5 has 64 KiB");
  static_assert((kRingBytes + kTapsBytes) % sizeof(Acc) == 0);
};

// How the work is cut into blocks; block index = ((n * segments + segment) * strips + strip) * chunks + chunk.
struct DepthwiseGrid {
  int chunk, chunks;  // channels of a block
  int groups, strips;  // column groups of a block, blocks across the width
  int steps, segments;  // steps of kRows rows of a block, blocks down the height
  bool aligned;  // 16-byte loads of x, whole lanes of y and residual
};

// Starts copying `count` input rows from h on into the ring, from `slot` on. Zeros stand for the padding.
template <class Tile>
__device__ __forceinline__ void fill_rows(const ConvArgs& a, const DepthwiseGrid& g, int n, int h, int first_column,
                                          int first_channel, unsigned char* ring, int slot, int count) {
  using T = typename Tile::Element;
  const T* const image = static_cast<const T*>(a.x) + n * a.x_strides.n + first_channel;
  const int channels = min(g.chunk, a.shape.out_channels - first_channel);
  const int columns = (g.groups * Tile::kCols - 1) * Tile::kStride + Tile::kKernel;
  const int w = first_column * Tile::kStride - a.shape.pad_w;
  const int thread = reread_thread_index();
  if (g.aligned) {
    constexpr int kUnit = kLanesOf16Bytes<T>;
    const int units = g.chunk / kUnit;
    const int channel = thread % units * kUnit;
    const int column_step = static_cast<int>(blockDim.x) / units;
    int column = thread / units;
    if (column >= column_step) return;  // the threads that a whole number of pixels leaves over
    for (; column < columns; column += column_step) {
      const bool inside = static_cast<unsigned>(w + column) < static_cast<unsigned>(a.shape.in_w) && channel < channels;
      const T* from = image + (w + column) * a.x_strides.w + channel;
      unsigned char* to = ring + column * Tile::kPixelBytes + channel * static_cast<int>(sizeof(T));
      for (int i = 0; i < count; ++i) {
        const bool valid = inside && static_cast<unsigned>(h + i) < static_cast<unsigned>(a.shape.in_h);
        const int row = slot + i < Tile::kRingRows ? slot + i : slot + i - Tile::kRingRows;
        copy_chunk_async(to + row * Tile::kRowBytes, valid ? from + (h + i) * a.x_strides.h : image, valid);
      }
    }
  } else {
    for (int e = thread; e < columns * g.chunk; e += blockDim.x) {
      const int column = e / g.chunk, channel = e % g.chunk;
      const bool inside = static_cast<unsigned>(w + column) < static_cast<unsigned>(a.shape.in_w) && channel < channels;
      const T* from = image + (w + column) * a.x_strides.w + channel;
      unsigned char* to = ring + column * Tile::kPixelBytes + channel * static_cast<int>(sizeof(T));
      for (int i = 0; i < count; ++i) {
        const bool valid = inside && static_cast<unsigned>(h + i) < static_cast<unsigned>(a.shape.in_h);
        const int row = slot + i < Tile::kRingRows ? slot + i : slot + i - Tile::kRingRows;
        *reinterpret_cast<T*>(to + row * Tile::kRowBytes) = valid ? from[(h + i) * a.x_strides.h] : convert<T>(0.0f);
      }
    }
  }
}

// The taps of the block's channels, [tap][channel], zero behind the last channel.
template <class Tile>
__device__ __forceinline__ void fill_taps(const ConvArgs& a, int chunk, int first_channel, int channels,
                                          unsigned char* taps) {
  using T = typename Tile::Element;
  const T* weight = static_cast<const T*>(a.weight);
  for (int e = threadIdx.x; e < chunk * Tile::kTaps; e += blockDim.x) {
    const int channel = e / Tile::kTaps, tap = e % Tile::kTaps;
    const int64_t offset = (first_channel + channel) * a.weight_strides.n + tap / Tile::kKernel * a.weight_strides.h +
                           tap % Tile::kKernel * a.weight_strides.w;
    *reinterpret_cast<T*>(taps + tap * Tile::kTapBytes + channel * static_cast<int>(sizeof(T))) =
        channel < channels ? weight[offset] : convert<T>(0.0f);
  }
}

// float: expf, to 2 ulp, and rcp.approx, to 1, with subnormals. An IEEE division would be 10 instructions and a branch more
// per output, of which a 3x3 one has 9 FMAs.
template <class T, class Acc>
__device__ __forceinline__ Acc silu(Acc u) {
  if constexpr (std::is_same_v<T, float>) {
    float sigmoid;
    asm("rcp.approx.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + expf(-u)));
    return u * sigmoid;
  } else {
    return activate<T>(u, Act::kSilu);
  }
}

template <class Tile>
using RowSums = typename Tile::Acc[Tile::kCols][Tile::kLaneChannels];

// Scale, shift and activation of one row of a thread's sums. The activation is asked for once, not per element.
template <class Tile>
__device__ __forceinline__ void finish_row(RowSums<Tile>& sum, const typename Tile::Acc* scale,
                                           const typename Tile::Acc* shift, Act act) {
#pragma unroll
  for (int q = 0; q < Tile::kCols; ++q) {
#pragma unroll
    for (int c = 0; c < Tile::kLaneChannels; ++c) sum[q][c] = sum[q][c] * scale[c] + shift[c];
  }
  if (act != Act::kSilu) return;
#pragma unroll
  for (int q = 0; q < Tile::kCols; ++q) {
#pragma unroll
    for (int c = 0; c < Tile::kLaneChannels; ++c) sum[q][c] = silu<typename Tile::Element>(sum[q][c]);
  }
}

// The residual of a thread's outputs in one row.
template <class Tile>
using RowResidual = Lanes<typename Tile::Element, Tile::kLaneChannels>[Tile::kCols];

// Adds the residual and stores; `columns` and `channels` say how much of the row lies inside the image. early: the residual,
// if it has been loaded.
template <class Tile>
__device__ __forceinline__ void store_row(RowSums<Tile>& sum, typename Tile::Element* to, int step,
                                          const typename Tile::Element* residual, int64_t residual_step, int columns,
                                          int channels, bool aligned, const RowResidual<Tile>* early) {
  using T = typename Tile::Element;
  using Acc = typename Tile::Acc;
  constexpr int kLaneChannels = Tile::kLaneChannels;
#pragma unroll
  for (int q = 0; q < Tile::kCols; ++q) {
    if (q >= columns) return;
    if (aligned) {
      if (residual != nullptr) {
        Acc more[kLaneChannels];
        widen(early != nullptr ? (*early)[q] : load_lanes<kLaneChannels>(residual), more);
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) sum[q][c] += more[c];
      }
      store_lanes(to, narrow<T>(sum[q]));
    } else {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        if (c >= channels) break;
        to[c] = convert<T>(residual != nullptr ? sum[q][c] + convert<Acc>(residual[c]) : sum[q][c]);
      }
    }
    to += step;
    if (residual != nullptr) residual += residual_step;
  }
}

// What a step adds to its outputs, on its way while they are computed.
template <class Tile>
__device__ __forceinline__ void load_residual(const ConvArgs& a, const DepthwiseGrid& g,
                                              RowResidual<Tile> (&lanes)[Tile::kRows], int n, int row, int end_row,
                                              int first_column, int first_channel) {
  using T = typename Tile::Element;
  const int per_pixel = g.chunk / Tile::kLaneChannels, thread = reread_thread_index();
  const int channel = first_channel + thread % per_pixel * Tile::kLaneChannels;
  const int column = first_column + thread / per_pixel * Tile::kCols;
  const Strides& stride = a.residual_strides;
  const T* const from = static_cast<const T*>(a.residual) + n * stride.n + row * stride.h + column * stride.w + channel;
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
    for (int q = 0; q < Tile::kCols; ++q) {
      if (row + p < end_row && column + q < a.shape.out_w && channel < a.shape.out_channels) {
        lanes[p][q] = load_lanes<Tile::kLaneChannels>(from + p * stride.h + q * stride.w);
      }
    }
  }
}

// Epilogue of one step: row by row, which keeps less in registers than all at once.
template <class Tile>
__device__ __forceinline__ void finish_step(const ConvArgs& a, const DepthwiseGrid& g,
                                            RowSums<Tile> (&sum)[Tile::kRows], const typename Tile::Acc* scales,
                                            const typename Tile::Acc* shifts, int n, int row, int end_row,
                                            int first_column, int first_channel, const RowResidual<Tile>* early) {
  using T = typename Tile::Element;
  const int lanes = g.chunk / Tile::kLaneChannels, thread = reread_thread_index();
  const int channel = thread % lanes * Tile::kLaneChannels;
  const int column = first_column + thread / lanes * Tile::kCols;
  const int columns = a.shape.out_w - column;
  const int channels = min(g.chunk, a.shape.out_channels - first_channel) - channel;
  if (channels <= 0) return;
  const int64_t pixel = (int64_t(n) * a.shape.out_h + row) * a.shape.out_w + column;
  T* y = static_cast<T*>(a.y) + pixel * a.shape.out_channels + first_channel + channel;
  const T* residual = static_cast<const T*>(a.residual);
  if (residual != nullptr) {
    residual +=
        n * a.residual_strides.n + row * a.residual_strides.h + column * a.residual_strides.w + first_channel + channel;
  }
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
    if (row + p >= end_row) return;
    finish_row<Tile>(sum[p], scales + channel, shifts + channel, a.act);
    store_row<Tile>(sum[p], y, a.shape.out_channels, residual, a.residual_strides.w, columns, channels, g.aligned,
                    Tile::kEarlyResidual ? early + p : nullptr);
    if (residual != nullptr) residual += a.residual_strides.h;
    y += int64_t(a.shape.out_w) * a.shape.out_channels;
  }
}

template <class Tile>
__global__ __launch_bounds__(Tile::kThreads, Tile::kResident) void depthwise_kernel(const ConvArgs a,
                                                                                    const DepthwiseGrid g) {
  using T = typename Tile::Element;
  using Acc = typename Tile::Acc;
  constexpr int kLaneChannels = Tile::kLaneChannels, kRows = Tile::kRows, kCols = Tile::kCols;
  constexpr int kKernel = Tile::kKernel, kStride = Tile::kStride;
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* const ring = shared;
  unsigned char* const taps = shared + Tile::kRingBytes;
  Acc* const scales = reinterpret_cast<Acc*>(shared + Tile::kRingBytes + Tile::kTapsBytes);
  Acc* const shifts = scales + Tile::kChunk;

  const ConvShape& s = a.shape;
  int block = blockIdx.x;
  const int first_channel = block % g.chunks * g.chunk;
  block /= g.chunks;
  const int first_column = block % g.strips * (g.groups * kCols);
  block /= g.strips;
  const int first_row = block % g.segments * (g.steps * kRows);
  const int n = block / g.segments;
  const int end_row = min(s.out_h, first_row + g.steps * kRows);
  const int channels = min(g.chunk, s.out_channels - first_channel);

  fill_rows<Tile>(a, g, n, first_row * kStride - s.pad_h, first_column, first_channel, ring, 0, Tile::kInRows);
  commit_async_copies();
  fill_taps<Tile>(a, g.chunk, first_channel, channels, taps);
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    const ScaleShift<Acc> folded = fold<Acc>(a.affine, first_channel + c);
    scales[c] = folded.scale;
    shifts[c] = folded.shift;
  }
  __syncthreads();

  const int lanes = g.chunk / kLaneChannels;
  const int channel = static_cast<int>(threadIdx.x) % lanes * kLaneChannels;
  const int group = static_cast<int>(threadIdx.x) / lanes;
  Acc tap[Tile::kTaps][kLaneChannels];
#pragma unroll
  for (int t = 0; t < Tile::kTaps; ++t) {
    const T* from = reinterpret_cast<const T*>(taps + t * Tile::kTapBytes) + channel;
    widen(load_lanes<kLaneChannels>(from), tap[t]);
  }
  const unsigned char* const window =
      ring + group * kCols * kStride * Tile::kPixelBytes + channel * static_cast<int>(sizeof(T));

  int slot = 0;  // of the first input row of the step
  for (int row = first_row; row < end_row; row += kRows) {
    wait_for_async_copies<0>();
    __syncthreads();  // this step's rows are here, and nobody reads the rows before them any more
    if (row + kRows < end_row) {
      const int free_slot =
          slot + Tile::kInRows < Tile::kRingRows ? slot + Tile::kInRows : slot + Tile::kInRows - Tile::kRingRows;
      fill_rows<Tile>(a, g, n, row * kStride - s.pad_h + Tile::kInRows, first_column, first_channel, ring, free_slot,
                      Tile::kNewRows);
      commit_async_copies();
    }

    RowResidual<Tile> residual[Tile::kEarlyResidual ? kRows : 1];
    if constexpr (Tile::kEarlyResidual) {
      if (a.residual != nullptr && g.aligned) {
        load_residual<Tile>(a, g, residual, n, row, end_row, first_column, first_channel);
      }
    }
    Acc sum[kRows][kCols][kLaneChannels] = {};
#pragma unroll
    for (int i = 0; i < Tile::kInRows; ++i) {
      const int ring_row = slot + i < Tile::kRingRows ? slot + i : slot + i - Tile::kRingRows;
      const unsigned char* const from = window + ring_row * Tile::kRowBytes;
#pragma unroll
      for (int j = 0; j < Tile::kInCols; ++j) {
        Acc x[kLaneChannels];
        widen(load_lanes<kLaneChannels>(reinterpret_cast<const T*>(from + j * Tile::kPixelBytes)), x);
#pragma unroll
        for (int p = 0; p < kRows; ++p) {
#pragma unroll
          for (int q = 0; q < kCols; ++q) {
            const int r = i - p * kStride, t = j - q * kStride;
            if (r < 0 || r >= kKernel || t < 0 || t >= kKernel) continue;
#pragma unroll
            for (int c = 0; c < kLaneChannels; ++c) sum[p][q][c] += x[c] * tap[r * kKernel + t][c];
          }
        }
      }
    }

    finish_step<Tile>(a, g, sum, scales, shifts, n, row, end_row, first_column, first_channel, residual);
    slot += slot + Tile::kNewRows < Tile::kRingRows ? Tile::kNewRows : Tile::kNewRows - Tile::kRingRows;
  }
}

// Whether every row of channels starts at a multiple of `bytes`; the stride of a dimension of size 1 is never used.
template <class T>
bool rows_aligned(const void* data, const Strides& strides, int n, int h, int w, int bytes) {
  const int64_t elements = bytes / static_cast<int>(sizeof(T));
  return is_aligned(data, bytes) && (n == 1 || strides.n % elements == 0) && (h == 1 || strides.h % elements == 0) &&
         (w == 1 || strides.w % elements == 0);
}

template <class Tile>
DepthwiseGrid cut(const ConvArgs& a, int blocks_wanted) {
  using T = typename Tile::Element;
  const ConvShape& s = a.shape;
  DepthwiseGrid g;
  g.aligned = s.out_channels % kLanesOf16Bytes<T> == 0 &&
              rows_aligned<T>(a.x, a.x_strides, s.batch, s.in_h, s.in_w, 16) && is_aligned(a.y, Tile::kLaneBytes) &&
              (a.residual == nullptr ||
               rows_aligned<T>(a.residual, a.residual_strides, s.batch, s.out_h, s.out_w, Tile::kLaneBytes));
  g.chunks = ceil_div(s.out_channels, Tile::kChunk);
  g.chunk = round_up(ceil_div(s.out_channels, g.chunks), g.aligned ? kLanesOf16Bytes<T> : Tile::kLaneChannels);
  g.strips = ceil_div(s.out_w, Tile::kColumnGroups * Tile::kCols);
  g.groups = ceil_div(ceil_div(s.out_w, g.strips), Tile::kCols);
  // Long segments read fewer rows twice and set up fewer taps; short ones fill the device.
  const int64_t columns = int64_t(s.batch) * g.chunks * g.strips;
  const int all_steps = ceil_div(s.out_h, Tile::kRows);
  const int segments = static_cast<int>(std::min<int64_t>(all_steps, ceil_div<int64_t>(blocks_wanted, columns)));
  g.steps = ceil_div(all_steps, segments);
  g.segments = ceil_div(all_steps, g.steps);
  return g;
}

template <class Tile>
void launch(const ConvArgs& a, int multiprocessors, cudaStream_t stream) {
  // 1024 threads' worth of blocks per multiprocessor: two to three rounds of what is resident.
  const DepthwiseGrid g = cut<Tile>(a, multiprocessors * 1024 / Tile::kThreads);
  const int64_t blocks = int64_t(a.shape.batch) * g.chunks * g.strips * g.segments;
  const int threads = g.chunk / Tile::kLaneChannels * g.groups;
  allow_shared_bytes(depthwise_kernel<Tile>, Tile::kSharedBytes);
  // Otherwise the driver may leave shared memory for fewer blocks than the registers allow.
  check_cuda(cudaFuncSetAttribute(depthwise_kernel<Tile>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "shared memory carve-out");
  depthwise_kernel<Tile><<<checked_grid(blocks, "depthwise"), threads, Tile::kSharedBytes, stream>>>(a, g);
  check_launch("depthwise");
}

template <class T, int kKernel>
void launch_kernel_size(const ConvArgs& a, cudaStream_t stream) {
  const int multiprocessors = multiprocessor_count();
  if (a.shape.stride_h == 2) return launch<DepthwiseTile<T, kKernel, 2, 2>>(a, multiprocessors, stream);
  // Double and 5x5 are not worth a second, taller tile: no YOLO12 layer uses them.
  if constexpr (sizeof(T) < 8 && kKernel != 5) {
    using Tall = DepthwiseTile<T, kKernel, 1, 4>;
    const int64_t tall_blocks = int64_t(a.shape.batch) * ceil_div(a.shape.out_channels, Tall::kChunk) *
                                ceil_div(a.shape.out_w, Tall::kColumnGroups * Tall::kCols) *
                                ceil_div(a.shape.out_h, Tall::kRows);
    if (tall_blocks >= 2 * multiprocessors) return launch<Tall>(a, multiprocessors, stream);
  }
  launch<DepthwiseTile<T, kKernel, 1, 2>>(a, multiprocessors, stream);
}

}  // namespace

void depthwise(const ConvArgs& a, DType dtype, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const bool served = s.square_depthwise() && (s.stride_h == 1 || s.stride_h == 2) &&
                      (a.x_strides.c == 1 || s.in_channels == 1) &&
                      (a.residual == nullptr || a.residual_strides.c == 1 || s.in_channels == 1);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (served && s.kernel_h == 3) return launch_kernel_size<T, 3>(a, stream);
    if (served && s.kernel_h == 5) return launch_kernel_size<T, 5>(a, stream);
    if (served && s.kernel_h == 7) return launch_kernel_size<T, 7>(a, stream);
    fail("depthwise: no kernel for ", s.kernel_h, "x", s.kernel_w, ", stride ", s.stride_h, "x", s.stride_w,
         ", dilation ", s.dilation_h, "x", s.dilation_w, ", groups ", s.groups, ", channels ", s.in_channels, " -> ",
         s.out_channels, ", channel stride ", a.x_strides.c);
  });
}

}  // namespace yolo12_fastconv
