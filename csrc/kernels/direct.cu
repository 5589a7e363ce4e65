// Direct convolution, for what the other families do not take: any kernel size, stride, padding, dilation, groups and
// channel counts, any strides of x and weight, and float32 sums without TF32.
//   y[n,p,q,k] = act(scale[k] * sum over r,s,c of x[n, c, p*stride_h + r*dilation_h - pad_h, ...] * w[k,c,r,s] + shift[k])
//                + residual[n,p,q,k]
// x and weight are rounded to the compute dtype T first, as autocast does; products and sums are float (double for
// double). y is NHWC, dense, of T. No atomics, and sums in an order that depends on the shape alone.
//
// Two kernels.
// - direct_tiled_kernel, an implicit GEMM: pixels x output channels of a group x (input channel, tap), through shared
//   memory in double-buffered slices of 16 of the last. One thread: a register tile of 8 x 8 or 4 x 4 sums, and its
//   share of the loads. Where a pixel and an element of the slice meet in x follows from two small tables, so the inner
//   loop has no division. x is read 16 bytes at a time if its layout allows, else element by element, the lanes of a
//   warp along whichever dimension is contiguous.
// - direct_pixels_kernel, for grouped convolutions with few output channels per group, where a tile would be mostly
//   empty. One thread: one output channel and 4 neighbouring pixels of a row.
//
// Bound on an H200: 29.6 T FMA/s (60 TFLOPS) in float. An 8 x 8 tile issues 64 FMAs for 4 16-byte loads of shared
// memory, a 4 x 4 tile 16 for 2, so the first is bound by FMAs and the second by both.
#include <algorithm>
#include <climits>
#include <type_traits>

#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/thread_index.cuh"

namespace yolo12_fastconv {
namespace {

template <class T, int kPixelCount, int kChannelCount, int kThreadTile>
struct DirectTile {
  using Element = T;
  using Acc = Accumulator<T>;
  static constexpr int kPixels = kPixelCount, kChannels = kChannelCount, kDepth = 16;
  static constexpr int kSide = kThreadTile;  // sums of a thread: kSide pixels x kSide channels, in runs of 4
  static constexpr int kRuns = kSide / 4;
  static constexpr int kColumns = kChannels / kSide;
  static constexpr int kThreads = kPixels / kSide * kColumns;
  // One more run per row: the transposing stores meet fewer of their own banks, and rows stay aligned to 16 bytes.
  static constexpr int kPixelPitch = kPixels + 4, kChannelPitch = kChannels + 4;
  static constexpr int kWeightLoads = kChannels * kDepth / kThreads;
  static_assert(kSide % 4 == 0 && kThreads % kDepth == 0 && kThreads <= 256);
  static_assert(kThreads % kPixels == 0);
};

struct DirectPlan {
  int group_in, group_out;  // channels per group
  int depth;  // R * S * group_in
  int block_channels;  // channels of the innermost run of the reduction: (block, r, s, channel of the block)
  int64_t pixel_tiles;
  int channel_tiles;  // per group
  DType x_dtype, weight_dtype;
  bool along_channels;  // element loads of x: neighbouring lanes on neighbouring channels, else pixels
  bool aligned_y;  // runs of 4 channels of y may be stored at once
};

// Where a pixel's window starts in the first channel of the group, and where an element of the reduction lies in the window.
struct alignas(16) Place {
  int64_t offset;
  int h, w;
};
// A row no tensor has, whatever is added to it.
constexpr int kNowhere = INT_MIN / 2;

__device__ __forceinline__ Place window_of(const ConvArgs& a, int64_t pixel, int channel) {
  const ConvShape& s = a.shape;
  if (pixel >= int64_t(s.batch) * s.out_h * s.out_w) return {0, kNowhere, kNowhere};
  const int64_t row = pixel / s.out_w;
  const int q = static_cast<int>(pixel - row * s.out_w);
  const int n = static_cast<int>(row / s.out_h);
  const int p = static_cast<int>(row - int64_t(n) * s.out_h);
  const int h = p * s.stride_h - s.pad_h, w = q * s.stride_w - s.pad_w;
  return {n * a.x_strides.n + channel * a.x_strides.c + h * a.x_strides.h + w * a.x_strides.w, h, w};
}

// Fills in one element of the reduction; behind the last, one that lies outside of every image, with weight offset -1.
__device__ __forceinline__ void locate(const ConvArgs& a, const DirectPlan& plan, int element, Place& in_window,
                                       int64_t& weight_offset) {
  if (element >= plan.depth) {
    in_window = {0, kNowhere, kNowhere};
    weight_offset = -1;
    return;
  }
  const int tap_and_block = element / plan.block_channels;
  const int taps = a.shape.kernel_h * a.shape.kernel_w;
  const int block = tap_and_block / taps, tap = tap_and_block - block * taps;
  const int channel = block * plan.block_channels + element - tap_and_block * plan.block_channels;
  const int r = tap / a.shape.kernel_w, s = tap - r * a.shape.kernel_w;
  const int h = r * a.shape.dilation_h, w = s * a.shape.dilation_w;
  in_window = {channel * a.x_strides.c + h * a.x_strides.h + w * a.x_strides.w, h, w};
  weight_offset = channel * a.weight_strides.c + r * a.weight_strides.h + s * a.weight_strides.w;
}

__device__ __forceinline__ bool inside(const ConvShape& s, const Place& window, const Place& in_window) {
  return static_cast<unsigned>(window.h + in_window.h) < static_cast<unsigned>(s.in_h) &&
         static_cast<unsigned>(window.w + in_window.w) < static_cast<unsigned>(s.in_w);
}

// Loads kCount elements of From, rounded to T, zero where the offset is negative; offset_of(i) is called once for each,
// in order. The loads come before the first use, so that all are in flight together.
template <class T, class From, int kCount, class OffsetOf>
__device__ __forceinline__ void gather_from(const void* data, OffsetOf&& offset_of, Accumulator<T> (&out)[kCount]) {
  From raw[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t offset = offset_of(i);
    raw[i] = offset >= 0 ? static_cast<const From*>(data)[offset] : convert<From>(0.0f);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = convert<Accumulator<T>>(convert<T>(raw[i]));
}

template <class T, int kCount, class OffsetOf>
__device__ __forceinline__ void gather(const void* data, DType dtype, OffsetOf&& offset_of,
                                       Accumulator<T> (&out)[kCount]) {
  switch (dtype) {
    case DType::kFloat16: return gather_from<T, __half>(data, offset_of, out);
    case DType::kBFloat16: return gather_from<T, __nv_bfloat16>(data, offset_of, out);
    case DType::kFloat32: return gather_from<T, float>(data, offset_of, out);
    default: return gather_from<T, double>(data, offset_of, out);
  }
}

// One thread's share of a slice of x, on its way from global to shared memory: single elements.
template <class Tile>
struct ElementLoads {
  using Acc = typename Tile::Acc;
  static constexpr int kLoads = Tile::kPixels * Tile::kDepth / Tile::kThreads;
  Acc values[kLoads];

  // The thread's first element, and the step to its next.
  struct Walk {
    int pixel, element, pixel_step, element_step;
  };
  static __device__ __forceinline__ Walk walk(bool along_channels) {
    const int thread = reread_thread_index();
    if (along_channels) return {thread / Tile::kDepth, thread % Tile::kDepth, Tile::kThreads / Tile::kDepth, 0};
    return {thread % Tile::kPixels, thread / Tile::kPixels, 0, Tile::kThreads / Tile::kPixels};
  }
  __device__ __forceinline__ void load(const ConvArgs& a, const DirectPlan& plan, const Place* windows,
                                       const Place* elements) {
    const Walk first = walk(plan.along_channels);
    const Place* window = windows + first.pixel;
    const Place* in_window = elements + first.element;
    const auto next_offset = [&](int) -> int64_t {
      const int64_t offset = inside(a.shape, *window, *in_window) ? window->offset + in_window->offset : -1;
      window += first.pixel_step;
      in_window += first.element_step;
      return offset;
    };
    gather<typename Tile::Element>(a.x, plan.x_dtype, next_offset, values);
  }
  __device__ __forceinline__ void store(const DirectPlan& plan, Acc* slice) const {
    const Walk first = walk(plan.along_channels);
    Acc* to = slice + first.element * Tile::kPixelPitch + first.pixel;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *to = values[i];
      to += first.element_step * Tile::kPixelPitch + first.pixel_step;
    }
  }
};

// The same in words of 16 bytes, for x of T with neighbouring, aligned channels.
template <class Tile>
struct WordLoads {
  using T = typename Tile::Element;
  using Acc = typename Tile::Acc;
  static constexpr int kLanes = kLanesOf16Bytes<T>, kWords = Tile::kDepth / kLanes;
  static constexpr int kTotal = Tile::kPixels * kWords, kLoads = (kTotal + Tile::kThreads - 1) / Tile::kThreads;
  Lanes<T, kLanes> words[kLoads];

  __device__ __forceinline__ void load(const ConvArgs& a, const DirectPlan&, const Place* windows,
                                       const Place* elements) {
    const int thread = reread_thread_index();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = thread + i * Tile::kThreads;
      words[i].word = {0, 0, 0, 0};
      if (kTotal % Tile::kThreads != 0 && index >= kTotal) continue;
      const Place window = windows[index / kWords], in_window = elements[index % kWords * kLanes];
      if (inside(a.shape, window, in_window)) {
        words[i] = load_lanes<kLanes>(static_cast<const T*>(a.x) + window.offset + in_window.offset);
      }
    }
  }
  __device__ __forceinline__ void store(const DirectPlan&, Acc* slice) const {
    const int thread = reread_thread_index();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = thread + i * Tile::kThreads;
      if (kTotal % Tile::kThreads != 0 && index >= kTotal) continue;
      Acc values[kLanes];
      widen(words[i], values);
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        slice[(index % kWords * kLanes + j) * Tile::kPixelPitch + index / kWords] = values[j];
      }
    }
  }
};

// A sum of more products than 16 times this is cut into parts, whose sums wait in y for the next: rounding errors then
// grow with the root of a part's length instead of the whole's. Over 4608 products (3x3, 512 channels) the largest error
// was 4.3e-6 of the output's scale in one sum, cuDNN's 4e-7.
constexpr int kPartSlices = 32;

// Adds what earlier parts left in y to this thread's sums, or leaves the sums there.
template <class Tile, bool kStore>
__device__ __forceinline__ void exchange_parts(const ConvArgs& a, typename Tile::Acc (&sum)[Tile::kSide][Tile::kSide],
                                               int64_t first_pixel, int first_channel, int channels) {
  using Acc = typename Tile::Acc;
  const int thread = reread_thread_index();
  const int pixel_run = thread / Tile::kColumns * 4, channel_run = thread % Tile::kColumns * 4;
  constexpr int kPixelStep = Tile::kPixels / Tile::kRuns, kChannelStep = Tile::kChannels / Tile::kRuns;
#pragma unroll
  for (int i = 0; i < Tile::kSide; ++i) {
    const int64_t pixel = first_pixel + pixel_run + i / 4 * kPixelStep + i % 4;
    if (pixel >= int64_t(a.shape.batch) * a.shape.out_h * a.shape.out_w) continue;
    Acc* const y = static_cast<Acc*>(a.y) + pixel * a.y_stride + first_channel;
#pragma unroll
    for (int j = 0; j < Tile::kSide; ++j) {
      const int channel = channel_run + j / 4 * kChannelStep + j % 4;
      if (channel >= channels) continue;
      if constexpr (kStore) {
        y[channel] = sum[i][j];
      } else {
        sum[i][j] += y[channel];
      }
    }
  }
}

template <class Tile, class Loads>
__global__ __launch_bounds__(Tile::kThreads, 2) void direct_tiled_kernel(const ConvArgs a, const DirectPlan plan) {
  using T = typename Tile::Element;
  using Acc = typename Tile::Acc;
  constexpr int kSide = Tile::kSide, kDepth = Tile::kDepth;
  __shared__ __align__(16) Acc x_slices[2][kDepth * Tile::kPixelPitch];
  __shared__ __align__(16) Acc weight_slices[2][kDepth * Tile::kChannelPitch];
  __shared__ Place windows[Tile::kPixels];
  __shared__ Place elements[2][kDepth];
  __shared__ int64_t weight_offsets[2][kDepth];
  __shared__ Acc scales[Tile::kChannels], shifts[Tile::kChannels];

  const int thread = threadIdx.x;
  int64_t block = blockIdx.x;
  const int channel_tile = static_cast<int>(block % plan.channel_tiles);
  block /= plan.channel_tiles;
  const int64_t first_pixel = block % plan.pixel_tiles * Tile::kPixels;
  const int group = static_cast<int>(block / plan.pixel_tiles);
  const int first_in_group = channel_tile * Tile::kChannels;
  const int first_channel = group * plan.group_out + first_in_group;
  const int channels = min(Tile::kChannels, plan.group_out - first_in_group);

  for (int i = thread; i < Tile::kPixels; i += Tile::kThreads)
    windows[i] = window_of(a, first_pixel + i, group * plan.group_in);
  for (int i = thread; i < channels; i += Tile::kThreads) {
    const ScaleShift<Acc> folded = fold<Acc>(a.affine, first_channel + i);
    scales[i] = folded.scale;
    shifts[i] = folded.shift;
  }
  if (thread < 2 * kDepth) {
    locate(a, plan, thread, elements[thread / kDepth][thread % kDepth],
           weight_offsets[thread / kDepth][thread % kDepth]);
  }
  __syncthreads();

  Loads x_loads;
  Acc weights[Tile::kWeightLoads];
  const auto load_slices = [&](int buffer) {
    x_loads.load(a, plan, windows, elements[buffer]);
    const int loader = reread_thread_index();
    const int64_t in_filter = weight_offsets[buffer][loader % kDepth];
    int channel = loader / kDepth;
    int64_t offset = (first_channel + channel) * a.weight_strides.n + in_filter;
    const auto next_offset = [&](int) -> int64_t {
      const int64_t current = in_filter >= 0 && channel < channels ? offset : -1;
      channel += Tile::kThreads / kDepth;
      offset += Tile::kThreads / kDepth * a.weight_strides.n;
      return current;
    };
    gather<T>(a.weight, plan.weight_dtype, next_offset, weights);
  };
  const auto store_slices = [&](int buffer) {
    x_loads.store(plan, x_slices[buffer]);
    const int loader = reread_thread_index();
    Acc* const to = weight_slices[buffer] + loader % kDepth * Tile::kChannelPitch + loader / kDepth;
#pragma unroll
    for (int i = 0; i < Tile::kWeightLoads; ++i) to[i * (Tile::kThreads / kDepth)] = weights[i];
  };

  load_slices(0);
  store_slices(0);
  __syncthreads();

  // Runs of 4 a thread owns lie half a tile apart: the threads of a warp then read neighbouring runs.
  const int pixel_run = thread / Tile::kColumns * 4, channel_run = thread % Tile::kColumns * 4;
  constexpr int kPixelStep = Tile::kPixels / Tile::kRuns, kChannelStep = Tile::kChannels / Tile::kRuns;
  Acc sum[kSide][kSide] = {};
  const int slices = (plan.depth + kDepth - 1) / kDepth;
  for (int slice = 0; slice < slices; ++slice) {
    const int buffer = slice % 2;
    const bool more = slice + 1 < slices;
    if (more) load_slices(1 - buffer);

    const Acc* const x = x_slices[buffer] + pixel_run;
    const Acc* const w = weight_slices[buffer] + channel_run;
#pragma unroll
    for (int e = 0; e < kDepth; ++e) {
      Acc left[kSide], right[kSide];
#pragma unroll
      for (int run = 0; run < Tile::kRuns; ++run) {
        load_run(x + e * Tile::kPixelPitch + run * kPixelStep, left + run * 4);
        load_run(w + e * Tile::kChannelPitch + run * kChannelStep, right + run * 4);
      }
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) sum[i][j] += left[i] * right[j];
      }
    }

    if constexpr (std::is_same_v<T, Acc>) {  // half y cannot hold parts, and its own rounding hides their error
      if (slice % kPartSlices == kPartSlices - 1 || !more) {
        if (slice >= kPartSlices) exchange_parts<Tile, false>(a, sum, first_pixel, first_channel, channels);
        if (more) {
          exchange_parts<Tile, true>(a, sum, first_pixel, first_channel, channels);
#pragma unroll
          for (int i = 0; i < kSide; ++i) {
#pragma unroll
            for (int j = 0; j < kSide; ++j) sum[i][j] = Acc(0);
          }
        }
      }
    }

    if (more) store_slices(1 - buffer);
    // This slice's tables were last read when it was loaded, one barrier ago: they become those of the slice after next.
    if (thread < kDepth) {
      const int64_t element = int64_t(slice + 2) * kDepth + thread;
      locate(a, plan, static_cast<int>(element < plan.depth ? element : plan.depth), elements[buffer][thread],
             weight_offsets[buffer][thread]);
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const int64_t pixel = first_pixel + pixel_run + i / 4 * kPixelStep + i % 4;
    if (pixel >= int64_t(a.shape.batch) * a.shape.out_h * a.shape.out_w) continue;
    const T* residual = static_cast<const T*>(a.residual);
    if (residual != nullptr) {
      const int64_t row = pixel / a.shape.out_w;
      residual += row / a.shape.out_h * a.residual_strides.n + row % a.shape.out_h * a.residual_strides.h +
                  pixel % a.shape.out_w * a.residual_strides.w;
    }
#pragma unroll
    for (int run = 0; run < Tile::kRuns; ++run) {
      const int channel = channel_run + run * kChannelStep;
      Acc u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (channel + j >= channels) continue;
        u[j] = activate<T>(sum[i][run * 4 + j] * scales[channel + j] + shifts[channel + j], a.act);
        if (residual != nullptr) u[j] += convert<Acc>(residual[(first_channel + channel + j) * a.residual_strides.c]);
      }
      T* const y = static_cast<T*>(a.y) + pixel * a.y_stride + first_channel + channel;
      constexpr int kWidth = sizeof(T) == 8 ? 2 : 4;
      if (plan.aligned_y && channel < channels) {
#pragma unroll
        for (int j = 0; j < 4; j += kWidth) {
          Acc part[kWidth];
#pragma unroll
          for (int l = 0; l < kWidth; ++l) part[l] = u[j + l];
          store_lanes(y + j, narrow<T>(part));
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (channel + j < channels) y[j] = convert<T>(u[j]);
        }
      }
    }
  }
}

constexpr int kRowPixels = 4, kRowThreads = 128;

template <class T>
__global__ __launch_bounds__(kRowThreads) void direct_pixels_kernel(const ConvArgs a, const DirectPlan plan) {
  using Acc = Accumulator<T>;
  const ConvShape& s = a.shape;
  int64_t rest = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  const int k = static_cast<int>(rest % s.out_channels);
  rest /= s.out_channels;
  const int parts = (s.out_w + kRowPixels - 1) / kRowPixels;
  const int q = static_cast<int>(rest % parts) * kRowPixels;
  rest /= parts;
  const int p = static_cast<int>(rest % s.out_h);
  rest /= s.out_h;
  if (rest >= s.batch) return;
  const int n = static_cast<int>(rest);

  const int64_t first_channel = k / plan.group_out * plan.group_in;
  const int64_t image = n * a.x_strides.n + first_channel * a.x_strides.c;
  Acc sum[kRowPixels] = {};
  for (int r = 0; r < s.kernel_h; ++r) {
    const int h = p * s.stride_h - s.pad_h + r * s.dilation_h;
    if (h < 0 || h >= s.in_h) continue;
    for (int t = 0; t < s.kernel_w; ++t) {
      int64_t offsets[kRowPixels];
#pragma unroll
      for (int i = 0; i < kRowPixels; ++i) {
        const int w = (q + i) * s.stride_w - s.pad_w + t * s.dilation_w;
        const bool valid = w >= 0 && w < s.in_w && q + i < s.out_w;
        offsets[i] = valid ? image + h * a.x_strides.h + w * a.x_strides.w : -1;
      }
      int64_t weight = k * a.weight_strides.n + r * a.weight_strides.h + t * a.weight_strides.w;
      for (int c = 0; c < plan.group_in; ++c) {
        Acc x[kRowPixels], w[1];
        gather<T>(a.x, plan.x_dtype, [&](int i) { return offsets[i]; }, x);
        gather<T>(a.weight, plan.weight_dtype, [&](int) { return weight; }, w);
#pragma unroll
        for (int i = 0; i < kRowPixels; ++i) {
          sum[i] += x[i] * w[0];
          if (offsets[i] >= 0) offsets[i] += a.x_strides.c;
        }
        weight += a.weight_strides.c;
      }
    }
  }

  const ScaleShift<Acc> folded = fold<Acc>(a.affine, k);
  const int64_t pixel = (int64_t(n) * s.out_h + p) * s.out_w + q;
#pragma unroll
  for (int i = 0; i < kRowPixels; ++i) {
    if (q + i >= s.out_w) break;
    Acc u = activate<T>(sum[i] * folded.scale + folded.shift, a.act);
    if (a.residual != nullptr) {
      const Strides& strides = a.residual_strides;
      u += convert<Acc>(
          static_cast<const T*>(a.residual)[n * strides.n + k * strides.c + p * strides.h + (q + i) * strides.w]);
    }
    static_cast<T*>(a.y)[(pixel + i) * a.y_stride + k] = convert<T>(u);
  }
}

template <class T>
void launch_pixels(const ConvArgs& a, const DirectPlan& plan, cudaStream_t stream) {
  const int64_t parts = int64_t(a.shape.batch) * a.shape.out_h * ceil_div(a.shape.out_w, kRowPixels);
  const int64_t blocks = ceil_div<int64_t>(parts * a.shape.out_channels, kRowThreads);
  direct_pixels_kernel<T><<<checked_grid(blocks, "direct"), kRowThreads, 0, stream>>>(a, plan);
  check_launch("direct");
}

template <class T>
bool words_fit(const ConvArgs& a, const DirectPlan& plan, DType dtype) {
  const ConvShape& s = a.shape;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const Strides& x = a.x_strides;
  return plan.x_dtype == dtype && x.c == 1 && plan.group_in % kLanes == 0 && is_aligned(a.x, 16) &&
         (s.batch == 1 || x.n % kLanes == 0) && (s.in_h == 1 || x.h % kLanes == 0) &&
         (s.in_w == 1 || x.w % kLanes == 0);
}

template <class Tile>
int64_t count_blocks(const ConvArgs& a, const DirectPlan& plan) {
  return ceil_div<int64_t>(a.shape.out_pixels(), Tile::kPixels) * ceil_div(plan.group_out, Tile::kChannels) *
         a.shape.groups;
}

template <class Tile>
void launch_tiled(const ConvArgs& a, DirectPlan plan, DType dtype, cudaStream_t stream) {
  plan.pixel_tiles = ceil_div<int64_t>(a.shape.out_pixels(), Tile::kPixels);
  plan.channel_tiles = ceil_div(plan.group_out, Tile::kChannels);
  const unsigned int grid = checked_grid(count_blocks<Tile>(a, plan), "direct");
  if constexpr (sizeof(typename Tile::Element) < 8) {
    if (words_fit<typename Tile::Element>(a, plan, dtype)) {
      direct_tiled_kernel<Tile, WordLoads<Tile>><<<grid, Tile::kThreads, 0, stream>>>(a, plan);
      return check_launch("direct");
    }
  }
  direct_tiled_kernel<Tile, ElementLoads<Tile>><<<grid, Tile::kThreads, 0, stream>>>(a, plan);
  check_launch("direct");
}

DirectPlan make_plan(const ConvArgs& a, DType x_dtype, DType weight_dtype, DType dtype) {
  const ConvShape& s = a.shape;
  DirectPlan plan = {};
  plan.group_in = s.in_channels / s.groups;
  plan.group_out = s.out_channels / s.groups;
  const int64_t depth = int64_t(plan.group_in) * s.kernel_h * s.kernel_w;
  if (depth > INT_MAX - 64) fail("direct: ", depth, " weights per output channel, at most ", INT_MAX - 64);
  plan.depth = static_cast<int>(depth);
  // With 16 channels as the innermost run, a tap's slice is followed by the same channels of the next tap: in a weight
  // of PyTorch's default layout these are the neighbours, already in the cache.
  plan.block_channels = plan.group_in % 16 == 0 ? 16 : plan.group_in;
  plan.x_dtype = x_dtype;
  plan.weight_dtype = weight_dtype;
  plan.along_channels = a.x_strides.c == 1 && plan.group_in >= 8;
  const int width = std::min(16, 4 * size_of(dtype));
  plan.aligned_y = plan.group_out % 4 == 0 && a.y_stride % 4 == 0 && is_aligned(a.y, width);
  return plan;
}

}  // namespace

void direct(const ConvArgs& a, DType x_dtype, DType weight_dtype, DType dtype, cudaStream_t stream) {
  const DirectPlan plan = make_plan(a, x_dtype, weight_dtype, dtype);
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.shape.groups > 1 && plan.group_out < 8) return launch_pixels<T>(a, plan, stream);
    if constexpr (sizeof(T) < 8) {  // in double, 256 pixels do not fit into shared memory
      if (plan.group_out <= 16) return launch_tiled<DirectTile<T, 256, 16, 4>>(a, plan, dtype, stream);
    }
    if (plan.group_out <= 32) return launch_tiled<DirectTile<T, 128, 32, 4>>(a, plan, dtype, stream);
    if constexpr (std::is_same_v<T, float>) {
      // The wide tile is twice as fast per multiply-add where it fills the device and is not half empty.
      using Wide = DirectTile<T, 128, 128, 8>;
      if (plan.group_out > 64 && count_blocks<Wide>(a, plan) >= multiprocessor_count()) {
        return launch_tiled<Wide>(a, plan, dtype, stream);
      }
    }
    launch_tiled<DirectTile<T, 64, 64, 4>>(a, plan, dtype, stream);
  });
}

}  // namespace yolo12_fastconv
