// The first convolution of a network: 3x3 over C <= 4 input channels, stride 1 or 2 in either axis, any padding, groups 1,
// on tensor cores (mma.sync, compute capability 8.0 and later).
//
//   y[n, p, q, k] = act(scale[k] * sum over r, s, c of x[n, c, p * stride_h + r - pad_h, q * stride_w + s - pad_w]
//                                                     * w[k, c, r, s] + shift[k]) + residual[n, p, q, k]
//
// x: any strides, in the compute dtype or in float, rounded here as a cast before the convolution would round it; pixels
// outside of the image are zero. w: any strides and dtype, rounded to the compute dtype. y: NHWC, pixels y_stride apart, half,
// bfloat16 or float: then x and w are rounded to TF32. Float sums.
//
// The layer is all memory traffic (3 -> 16 at 640x640 reads 2.5 MB and writes 3.3 MB per picture, for 44 M products). So x
// is read in the form it comes in, without a copy in between, and a lane's results go straight to y:
// - A warp computes tiles of 4 (or 2) rows x 32 pixels on its own. Its window of x lies in shared memory as rows of adjacent
//   pixels of kSlots elements. Warps wait for nobody after the set-up: while some wait for x, others compute and write.
// - kSlots = 3: the 3 pixels of a filter row are 9 adjacent elements, and with stride 2 every window of a row starts at
//   the same parity, so that 5 aligned words cover it. The reduction runs over such pairs of elements: 3 rows of 5 make
//   15 pairs, where two m16n8k16 take 16. A register of the first operand is one 32-bit load. x is read by 16-byte loads.
// - kSlots = 4, for all other cases: 3 rows of 6 pairs, three m16n8k16, x and y by elements, any strides.
// - In TF32 a register holds one element, and the reduction runs over 27 (36) of them in 4 (5) m16n8k8.
// - The element too much in each 5 words belongs to a neighbouring pixel. A weight of zero would not do: it may be NaN or
//   infinite. The lane that loads it masks it.
// - Which channel a column of the second operand stands for is free to choose. Lane t of four gets the same 2 * kFragments
//   channels of a pixel from all its fragments: 16 bytes (8 for K <= 16) that it writes by itself, eight pixels of 64 (32)
//   bytes per instruction, with no way through shared memory. In float, twice that: two instructions of 64 bytes.
// - For training (StemStatsConfig: half and bfloat16, kSlots = 3) a block leaves the statistics of its outputs too.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "device/channel_stats.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/row_moments.cuh"
#include "device/stats_kernels.h"
#include "device/tensor_core.cuh"
#include "device/thread_index.cuh"

// Below 8.0 the kernel's body is empty, and the constants of its tiles are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTilePixels = 32;  // a row of a warp's outputs
constexpr int kMatrices = kTilePixels / 16;
constexpr int kWindowPixels = 2 * (kTilePixels - 1) + 3;
constexpr int kChunkPixels = 8;  // of x, that one lane fetches at a time
constexpr int kChunks = (kChunkPixels - 1 + kWindowPixels + kChunkPixels - 1) / kChunkPixels;  // of a row

// kFragmentCount: 8-channel columns of products that a warp sums at once. kIsPlanar, for kSlots = 3: whether x has the
// pixels of a channel adjacent, or the channels of a pixel.
// kRows: of a tile. Four, or two where that gives more warps something to do: a picture alone.
template <class Element, class Input, int kSlotCount, int kFragmentCount, bool kIsPlanar, int kRows = 4>
struct StemConfig {
  using T = Element;
  using In = Input;
  static constexpr int kSlots = kSlotCount, kFragments = kFragmentCount;
  static constexpr bool kPlanar = kIsPlanar, kStats = false;
  static constexpr int kTileRows = kRows, kInRows = 2 * (kTileRows - 1) + 3;
  static constexpr int kUnits = (kInRows * kChunks + 31) / 32;  // chunks of a lane
  static constexpr bool kFast = kSlots == 3;
  static constexpr int kWordElements = 4 / int(sizeof(T));  // a pair of half
  static constexpr int kRowPairs = (3 * kSlots + kWordElements - 1) / kWordElements, kPairs = 3 * kRowPairs;
  static constexpr int kSteps = (kPairs + 7) / 8;
  // Windows start at a multiple of it in x, so that the loads are aligned.
  static constexpr int kAlignment = kFast ? kChunkPixels : 1;
  // One pixel more than are used keeps the rows of single elements aligned to 16 bytes.
  static constexpr int kRowPixels = kFast ? kChunks * kChunkPixels : kWindowPixels + 1;
  static constexpr int kRowElements = kRowPixels * kSlots;
  static constexpr int kTileBytes = kInRows * kRowElements * int(sizeof(T));
  static constexpr int kLaneChannels = 2 * kFragments, kGroupChannels = 8 * kFragments;
  // Channels that a lane writes at once. Its next run lies behind the other lanes' ones: a store of 16 bytes by every other 16
  // bytes would fill each sector of L2 by halves, in two turns.
  static constexpr int kRun = std::min(kLaneChannels, kLanesOf16Bytes<T>);
  // Where element e of a lane's channels lies in the group. quad_lane: of four.
  static __device__ __forceinline__ int channel(int quad_lane, int e) {
    return e / kRun * (4 * kRun) + quad_lane * kRun + e % kRun;
  }
  // As many as the registers allow without spills: 36 a lane for the chunks in flight (72 of floats), 48 or 32 more for a
  // group's sums and their scales.
  static constexpr int kBlocksPerMultiprocessor =
      sizeof(T) == 4 && kFragments == 4 ? 3 : (sizeof(In) == 2 && kFragments == 2 ? 5 : 4);

  static_assert(kSlots == 3 || kSlots == 4);
  static_assert(kTileBytes % 16 == 0);
};

struct StemArgs {
  const void* x;
  Strides x_strides;
  const void* weight;
  Strides weight_strides;
  DType weight_dtype;
  void* y;
  const void* residual;
  Strides residual_strides;
  Affine affine;
  Act act;
  int in_channels, in_h, in_w, out_channels, out_h, out_w;
  int64_t y_stride;
  int stride_h, stride_w, pad_h, pad_w;
  int groups;  // of kGroupChannels output channels
  int tiles;
  FastDivide by_tiles_q, by_tiles_p;
};

// With statistics of the outputs, for training: half and bfloat16, without activation and residual.
struct StemStatsArgs : StemArgs {
  TileStats stats;
};
template <class T, class In, int kFragments, bool kPlanar>
struct StemStatsConfig : StemConfig<T, In, 3, kFragments, kPlanar> {
  static constexpr bool kStats = true;
  static constexpr int kBlocksPerMultiprocessor = 4;  // five spill 16 bytes
};
template <class Config>
using ArgsOf = std::conditional_t<Config::kStats, StemStatsArgs, StemArgs>;

// A pair of neighbouring elements in a window of one filter row or, in `first` < 0 or `first` + 1 >= 3 * kSlots, what the
// aligned words have beside it. In float, one element.
template <class Config>
struct Pair {
  int row, word;  // filter row; word of the window
  int first;  // element of the window, counted from its first pixel

  // parity: elements of the first word in front of the window
  __device__ __forceinline__ Pair(int index, int parity)
      : row(index / Config::kRowPairs), word(index % Config::kRowPairs), first(Config::kWordElements * word - parity) {}
  __device__ __forceinline__ bool holds(int half) const {
    return row < 3 && first + half >= 0 && first + half < 3 * Config::kSlots;
  }
};

// An element as the products take it.
template <class T, class From>
__device__ __forceinline__ T as_operand(From value) {
  const T rounded = convert<T>(value);
  if constexpr (std::is_same_v<T, float>) {
    return __uint_as_float(round_to_tf32(__float_as_uint(rounded)));
  } else {
    return rounded;
  }
}

// The weights as the second operand's registers: of column 8 f + g, in fragments[f][step][lane], lane = 4 g + t, the pairs
// 8 step + t (x) and 8 step + 4 + t (y). The loads of a group are all on their way before the first is waited for.
template <class Config, class Weight>
__device__ __forceinline__ void set_up_weights(const StemArgs& args, int parity, uint2* fragments) {
  using T = typename Config::T;
  constexpr int kGroupPairs = Config::kFragments * Config::kSteps * 64, kPasses = kGroupPairs / kThreads;
  static_assert(kGroupPairs % kThreads == 0);
  const Strides& stride = args.weight_strides;
#pragma unroll 1
  for (int group = 0; group < args.groups; ++group) {
    auto* pairs = reinterpret_cast<uint32_t*>(fragments) + group * kGroupPairs;
    Weight weights[kPasses][Config::kWordElements];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = threadIdx.x + pass * kThreads;
      const int lane = i / 2 % 32, column = lane / 4;
      const int step = i / 64 % Config::kSteps, fragment = i / 64 / Config::kSteps;
      const int channel = group * Config::kGroupChannels + Config::channel(column / 2, fragment * 2 + column % 2);
      const Pair<Config> pair(8 * step + i % 2 * 4 + lane % 4, parity);
#pragma unroll
      for (int half = 0; half < Config::kWordElements; ++half) {
        const int s = (pair.first + half) / Config::kSlots, c = (pair.first + half) % Config::kSlots;
        weights[pass][half] = convert<Weight>(0.0f);
        if (pair.holds(half) && c < args.in_channels && channel < args.out_channels) {
          weights[pass][half] = static_cast<const Weight*>(
              args.weight)[channel * stride.n + c * stride.c + pair.row * stride.h + s * stride.w];
        }
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      T rounded[Config::kWordElements];
#pragma unroll
      for (int i = 0; i < Config::kWordElements; ++i) rounded[i] = as_operand<T>(weights[pass][i]);
      memcpy(&pairs[threadIdx.x + pass * kThreads], rounded, sizeof(rounded));
    }
  }
}

// Output tile `index`, and where in x its window begins.
struct Tile {
  int n, p, q;
  int top, left;

  // rows: of a tile; left_padding: columns of the window in front of x's first one, for the first tile of a row
  __device__ __forceinline__ Tile(const StemArgs& args, int rows, int left_padding, int index) {
    int tile_q, tile_p, row;
    args.by_tiles_q.divide(index, row, tile_q);
    args.by_tiles_p.divide(row, n, tile_p);
    p = tile_p * rows;
    q = tile_q * kTilePixels;
    top = p * args.stride_h - args.pad_h;
    left = q * args.stride_w - left_padding;
  }
};

__device__ __forceinline__ bool is_inside(const StemArgs& args, int h, int w) {
  return static_cast<unsigned>(h) < static_cast<unsigned>(args.in_h) &&
         static_cast<unsigned>(w) < static_cast<unsigned>(args.in_w);
}

// A tile's window from x to shared memory by one warp. All its loads are on their way before the first is waited for.
template <class Config>
__device__ __forceinline__ void copy_chunks(const StemArgs& args, const Tile& tile, typename Config::T* window) {
  using T = typename Config::T;
  using In = typename Config::In;
  constexpr int kElements = kChunkPixels * Config::kSlots, kLanes = kLanesOf16Bytes<In>, kRun = kLanesOf16Bytes<T>;
  const int lane = reread_thread_index() % 32;
  const int rows = (Config::kTileRows - 1) * args.stride_h + 3;
  const In* image = static_cast<const In*>(args.x) + tile.n * args.x_strides.n;
  In fetched[Config::kUnits][kElements];
#pragma unroll
  for (int u = 0; u < Config::kUnits; ++u) {
    const int unit = lane + 32 * u;
    const int row = unit / kChunks;
    const int h = tile.top + row, w = tile.left + unit % kChunks * kChunkPixels;
    // in_w is a multiple of kChunkPixels: no chunk is half inside.
    const bool inside = row < rows && is_inside(args, h, w);
    const In* chunk = image + h * args.x_strides.h + w * args.x_strides.w;
#pragma unroll
    for (int e = 0; e < kElements; e += kLanes) {
      const In* from = Config::kPlanar ? chunk + e / kChunkPixels * args.x_strides.c + e % kChunkPixels : chunk + e;
      Lanes<In, kLanes> lanes = {};
      if (inside) lanes = load_lanes<kLanes>(from);
      memcpy(&fetched[u][e], &lanes, sizeof(lanes));
    }
  }
#pragma unroll
  for (int u = 0; u < Config::kUnits; ++u) {
    const int unit = lane + 32 * u;
    const int row = unit / kChunks;
    T* to = window + row * Config::kRowElements + unit % kChunks * kElements;
#pragma unroll
    for (int e = 0; e < kElements; e += kRun) {
      In values[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int pixel = (e + i) / Config::kSlots, channel = (e + i) % Config::kSlots;
        values[i] = fetched[u][Config::kPlanar ? channel * kChunkPixels + pixel : e + i];
      }
      Lanes<T, kRun> lanes;
      if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (float& x : values) x = as_operand<float>(x);
      }
      if constexpr (std::is_same_v<T, In>) {
        memcpy(&lanes, values, sizeof(lanes));
      } else {
        lanes = narrow<T>(values);
      }
      if (row < rows) store_lanes(to + e, lanes);
    }
  }
}

// The same for any strides and sizes, lanes on neighbouring pixels.
template <class Config>
__device__ __forceinline__ void copy_elements(const StemArgs& args, const Tile& tile, typename Config::T* window) {
  using T = typename Config::T;
  using In = typename Config::In;
  constexpr int kSlots = Config::kSlots;
  const In* image = static_cast<const In*>(args.x) + tile.n * args.x_strides.n;
  const int rows = (Config::kTileRows - 1) * args.stride_h + 3;
  const int columns = (kTilePixels - 1) * args.stride_w + 3;
#pragma unroll 3
  for (int i = reread_thread_index() % 32; i < rows * kWindowPixels; i += 32) {
    const int row = i / kWindowPixels, column = i % kWindowPixels;
    const int h = tile.top + row, w = tile.left + column;
    const bool inside = column < columns && is_inside(args, h, w);
    const In* pixel = image + h * args.x_strides.h + w * args.x_strides.w;
    T values[kSlots];
#pragma unroll
    for (int c = 0; c < kSlots; ++c) {
      values[c] = inside && c < args.in_channels ? as_operand<T>(pixel[c * args.x_strides.c]) : convert<T>(0.0f);
    }
    memcpy(window + row * Config::kRowElements + column * kSlots, values, sizeof(values));
  }
}

// silu_of_half() is exact enough for half, sigmoid<true>() for TF32.
template <class T>
constexpr bool kHalvesForSilu = sizeof(T) == 2;

template <class Config>
struct Accumulators {
  float value[kMatrices][Config::kFragments][4];
};

// A lane's finished channels of a group of output pixel (tile.n, p, q), which is the pixel'th of y. first: the lane's first
// channel.
template <class Config>
__device__ __forceinline__ void write_channels(const StemArgs& args, const Tile& tile, int p, int q, int64_t pixel,
                                               int first, const float (&values)[Config::kLaneChannels]) {
  using T = typename Config::T;
  constexpr int kCount = Config::kLaneChannels, kRun = Config::kRun;
  T* y = static_cast<T*>(args.y) + pixel * args.y_stride + first;
  T rounded[kCount];
  if constexpr (std::is_same_v<T, float>) {
    memcpy(rounded, values, sizeof(rounded));
  } else {
    const Lanes<T, kCount> lanes = narrow<T>(values);
    memcpy(rounded, &lanes, sizeof(rounded));
  }
  if constexpr (Config::kFast) {
#pragma unroll
    for (int e = 0; e < kCount; e += kRun) {
      if (first + Config::channel(0, e) >= args.out_channels) break;
      Lanes<T, kRun> lanes;
      memcpy(&lanes, rounded + e, sizeof(lanes));
      store_lanes(y + Config::channel(0, e), lanes);
    }
  } else {
    const Strides& stride = args.residual_strides;
    const T* residual = static_cast<const T*>(args.residual) + tile.n * stride.n + p * stride.h + q * stride.w + first;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int c = Config::channel(0, e);
      if (first + c >= args.out_channels) break;
      y[c] =
          args.residual == nullptr ? rounded[e] : convert<T>(convert<float>(rounded[e]) + convert<float>(residual[c]));
    }
  }
}

// What a lane writes of a group in a row of a tile: of pixel 16 m + 8 half + lane / 4, two channels of each fragment.
template <class Config>
using Words = uint32_t[kMatrices][2][Config::kFragments];

// Statistics of what a warp writes, in shared memory. Halves of differences from an origin are summed, half so that none
// overflows: of a lane's words, transposed, the tensor cores give sums and squares. The origin of a channel is chosen from
// the first 32 pixels: zero, or their mean if that is beyond four deviations. So differences are exact but for the few values
// below half of such a mean. In registers the sums would be 16 a lane for 64 channels.
template <class Config>
struct WarpStats {
  using T = typename Config::T;
  static constexpr int kFragments = Config::kFragments;

  // Per group. Fragments f and f + 1, column c of eight: {sum, sum of f + 1, squares, squares of f + 1} in sums[f / 2][c].
  struct Group {
    float4 sums[kFragments / 2][8];
    T origins[4][2 * kFragments];  // minus half of each, in the order of a lane's channels
  };

  // What element e of a lane's channels is in `sums`: a column, and f % 2.
  static __device__ __forceinline__ int column(int quad_lane, int e) { return 2 * quad_lane + e % 2; }

  // first: of the warp, whose origins are chosen before they are summed.
  static __device__ __forceinline__ void add(Group& group, const Words<Config>& words, bool first) {
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
#pragma unroll 1
    for (bool settled = !first;; settled = true) {
      Lanes<T, 2 * kFragments> loaded = load_lanes<2 * kFragments>(group.origins[lane % 4]);
      uint32_t origins[kFragments];
      memcpy(origins, &loaded, sizeof(origins));
#pragma unroll
      for (int f = 0; f < kFragments; f += 2) {
        RowMoments<T> moments;  // a row: a channel
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          uint32_t values[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int half = i / 2, fragment = f + i % 2;
            values[i] = transpose_matrix(
                multiply_add_pairs<T>(words[m][half][fragment], round_pair<T>(0.5f, 0.5f), origins[fragment]));
          }
          moments.add(values);
        }
        if (!moments.owns()) continue;
        float4& sums = group.sums[f / 2][column];
        if (settled) {
          float4 all = sums;
          all.x += moments.sum(0);
          all.y += moments.sum(1);
          all.z += moments.squares(0);
          all.w += moments.squares(1);
          sums = all;
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Not if either is infinite or missing.
            const float sum = moments.sum(half), mean = sum / kTilePixels;
            group.origins[column / 2][2 * (f + half) + column % 2] =
                convert<T>(17 * sum * mean > 16 * moments.squares(half) ? -mean : 0.0f);
          }
        }
      }
      if (settled) break;
      __syncwarp();
    }
  }

  // A channel's mean relative to -2 * `origin`, and its squared deviations, of `count` pixels.
  static __device__ __forceinline__ Moments<float> moments_of(const Group& group, int quad_lane, int e, float count,
                                                              float origin) {
    const float4 sums = group.sums[e / 4][column(quad_lane, e)];
    const float sum = e / 2 % 2 ? sums.y : sums.x, squares = e / 2 % 2 ? sums.w : sums.z, share = sum / count;
    // The difference of two origins is exact, where the mean itself would be rounded at the size of the offset.
    return {2 * share - 2 * (convert<float>(group.origins[quad_lane][e]) - origin), 4 * (squares - sum * share)};
  }
};

// Scale, shift and activation on a group's sums for tile row p, and the way out. words: for statistics.
template <class Config>
__device__ __forceinline__ void finish(const StemArgs& args, const Tile& tile, int p, int group,
                                       const ScaleShift<float>* affine, const Accumulators<Config>& sum,
                                       Words<Config>& words) {
  const int lane = threadIdx.x % 32;
  const int channel = group * Config::kGroupChannels + Config::channel(lane % 4, 0);
  const int64_t row = (int64_t(tile.n) * args.out_h + p) * args.out_w;
  const bool silu = !Config::kStats && args.act == Act::kSilu;
  ScaleShift<float> a[Config::kLaneChannels];
#pragma unroll
  for (int e = 0; e < Config::kLaneChannels; e += 2) {
    const float4 two = *reinterpret_cast<const float4*>(affine + channel + Config::channel(0, e));
    a[e] = {two.x, two.y};
    a[e + 1] = {two.z, two.w};
  }
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = tile.q + m * 16 + half * 8 + lane / 4;
      float values[Config::kLaneChannels];
#pragma unroll
      for (int e = 0; e < Config::kLaneChannels; ++e) {
        values[e] = fmaf(sum.value[m][e / 2][half * 2 + e % 2], a[e].scale, a[e].shift);
      }
      if (silu) {
#pragma unroll
        for (int e = 0; e < Config::kLaneChannels; ++e) {
          values[e] =
              kHalvesForSilu<typename Config::T> ? silu_of_half(values[e]) : values[e] * sigmoid<true>(values[e]);
        }
      }
      if (q < args.out_w) write_channels<Config>(args, tile, p, q, row + q, channel, values);
      if constexpr (Config::kStats) {
        const auto rounded = narrow<typename Config::T>(values);
        memcpy(words[m][half], &rounded, sizeof(rounded));
      }
    }
  }
}

// The block's statistics from its warps'. counted: of the calling warp, 0 where it had no tile.
template <class Config>
__device__ __forceinline__ void store_stats(const StemStatsArgs& args, const typename WarpStats<Config>::Group* stats,
                                            int counted) {
  __shared__ float counts[kWarps];
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = static_cast<float>(counted);
  __syncthreads();
  const int channels = args.groups * Config::kGroupChannels, part = static_cast<int>(blockIdx.x);
  float all = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) all += counts[warp];
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < channels; i += kThreads) {
    const int group = i / Config::kGroupChannels, e = i % Config::kLaneChannels;
    const int quad_lane = i % Config::kGroupChannels / Config::kLaneChannels;
    const int channel = group * Config::kGroupChannels + Config::channel(quad_lane, e);
    if (channel >= args.out_channels) continue;
    const float origin = convert<float>(stats[group].origins[quad_lane][e]);  // the first warp has a tile
    float sum = 0.0f, squares = 0.0f;
    for (int warp = 0; warp < kWarps && counts[warp] > 0; ++warp) {
      const auto& of_warp = stats[warp * args.groups + group];
      add_moments(sum, squares, WarpStats<Config>::moments_of(of_warp, quad_lane, e, counts[warp], origin),
                  counts[warp], 0.0f);
    }
    const Moments<float> moments = moments_of(sum, squares, all, -2 * origin);
    args.stats.moments[int64_t(part) * args.out_channels + channel] = {moments.mean, moments.squares};
  }
  if (threadIdx.x == 0) args.stats.counts[part] = all;
}

template <class Config>
__global__ __launch_bounds__(kThreads, Config::kBlocksPerMultiprocessor) void stem_kernel(
    const __grid_constant__ ArgsOf<Config> args) {
#if __CUDA_ARCH__ >= 800
  using T = typename Config::T;
  constexpr int kSlots = Config::kSlots, kSteps = Config::kSteps, kFragments = Config::kFragments;
  extern __shared__ __align__(16) unsigned char shared[];
  let_later_kernels_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* window = reinterpret_cast<T*>(shared + warp * Config::kTileBytes);
  uint2* fragments = reinterpret_cast<uint2*>(shared + kWarps * Config::kTileBytes);
  auto* affine = reinterpret_cast<ScaleShift<float>*>(fragments + args.groups * kFragments * kSteps * 32);
  using Group = typename WarpStats<Config>::Group;
  auto* const stats = reinterpret_cast<Group*>(affine + args.groups * Config::kGroupChannels);  // of each warp
  int counted = 0;  // pixels of which the warp has statistics
  // Where the first output's pixels begin in the window, in elements.
  const int left_padding = round_up(args.pad_w, Config::kAlignment);
  const int start = (left_padding - args.pad_w) * kSlots;
  const int parity = start % Config::kWordElements;
  wait_for_earlier_kernels();

  const int channels = args.groups * Config::kGroupChannels, own = static_cast<int>(threadIdx.x);
  const bool halved = kHalvesForSilu<T> && args.act == Act::kSilu;
  // Asked for before the weights are, and waited for with them.
  const ChannelBits bits = load_for_epilogue(args.affine, own, args.out_channels);
  switch (args.weight_dtype) {
    case DType::kFloat16: set_up_weights<Config, __half>(args, parity, fragments); break;
    case DType::kBFloat16: set_up_weights<Config, __nv_bfloat16>(args, parity, fragments); break;
    case DType::kFloat32: set_up_weights<Config, float>(args, parity, fragments); break;
    default: set_up_weights<Config, double>(args, parity, fragments); break;
  }
  if constexpr (Config::kStats) {
    const int words = kWarps * args.groups * static_cast<int>(sizeof(Group) / 4);
    for (int i = own; i < words; i += kThreads) reinterpret_cast<uint32_t*>(stats)[i] = 0;
  }
  if (own < channels) affine[own] = fold_for_epilogue(args.affine, bits, own, args.out_channels, halved);
#pragma unroll 1
  for (int c = own + kThreads; c < channels; c += kThreads) {
    affine[c] = fold_for_epilogue(args.affine, c, args.out_channels, halved);
  }
  __syncthreads();

  const int words_per_pixel = (Config::kFast ? 2 : args.stride_w) * kSlots / Config::kWordElements;

  for (int index = static_cast<int>(blockIdx.x) * kWarps + warp; index < args.tiles;
       index += static_cast<int>(gridDim.x) * kWarps) {
    const Tile tile(args, Config::kTileRows, left_padding, index);
    if constexpr (Config::kFast) {
      copy_chunks<Config>(args, tile, window);
    } else {
      copy_elements<Config>(args, tile, window);
    }
    __syncwarp();

    // This lane's words of the window, the same for every output: pairs 4 i + lane % 4. The ones beyond the last pair count
    // as zero, and are read from where the first is. Not kept while x is fetched, which takes most registers.
    const int quad_lane = reread_thread_index() % 4;
    constexpr int kRowWords = Config::kRowElements / Config::kWordElements;
    int word[2 * kSteps];
    uint32_t mask[2 * kSteps];
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const Pair<Config> pair(4 * i + quad_lane, parity);
      word[i] = start / Config::kWordElements + (pair.row < 3 ? pair.row * kRowWords + pair.word : 0);
      mask[i] = Config::kWordElements == 1 ? (pair.holds(0) ? ~0u : 0u)
                                           : (pair.holds(0) ? 0xffffu : 0u) | (pair.holds(1) ? 0xffff0000u : 0u);
    }
#pragma unroll 1
    for (int r = 0; r < Config::kTileRows; ++r) {
      if (tile.p + r >= args.out_h) break;
      const uint32_t* row = reinterpret_cast<const uint32_t*>(window) + r * args.stride_h * kRowWords;
      uint32_t a[kMatrices][kSteps][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t pair = row[word[i] + (m * 16 + half * 8 + lane / 4) * words_per_pixel];
            a[m][i / 2][i % 2 * 2 + half] = pair & mask[i];
          }
        }
      }
#pragma unroll 1
      for (int group = 0; group < args.groups; ++group) {
        Accumulators<Config> sum = {};
        const uint2* b = fragments + group * kFragments * kSteps * 32 + lane;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint2 weights = b[(f * kSteps + step) * 32];
#pragma unroll
            for (int m = 0; m < kMatrices; ++m) multiply_add<T>(sum.value[m][f], a[m][step], weights.x, weights.y);
          }
        }
        Words<Config> words;
        finish<Config>(args, tile, tile.p + r, group, affine, sum, words);
        if constexpr (Config::kStats) {
          WarpStats<Config>::add(stats[warp * args.groups + group], words, counted == 0);
        }
      }
      if constexpr (Config::kStats) counted += kTilePixels;
    }
    __syncwarp();  // all lanes are done with the window
  }
  if constexpr (Config::kStats) store_stats<Config>(args, stats, counted);
#endif
}

// How the outputs are cut into tiles, and blocks that stay: each sets up the weights once.
template <class Config>
struct Grid {
  int tiles_q, tiles_p, tiles, blocks;
  explicit Grid(const ConvShape& s)
      : tiles_q(ceil_div(s.out_w, kTilePixels)), tiles_p(ceil_div(s.out_h, Config::kTileRows)) {
    const int64_t all = int64_t(s.batch) * tiles_p * tiles_q;
    if (all >= 1 << 30) fail("stem: ", all, " tiles; the tile menu sends such shapes elsewhere");
    tiles = static_cast<int>(all);
    blocks = std::min(ceil_div(tiles, kWarps), multiprocessor_count() * Config::kBlocksPerMultiprocessor);
  }
};

template <class Config>
void launch(const ConvArgs& a, ArgsOf<Config> s, cudaStream_t stream) {
  const Grid<Config> grid(a.shape);
  s.groups = ceil_div(s.out_channels, Config::kGroupChannels);
  s.tiles = grid.tiles;
  s.by_tiles_q = FastDivide(grid.tiles_q);
  s.by_tiles_p = FastDivide(grid.tiles_p);
  const int channels = s.groups * Config::kGroupChannels;
  int bytes = kWarps * Config::kTileBytes +
              channels * (Config::kSteps * 4 * int(sizeof(uint2)) + int(sizeof(ScaleShift<float>)));
  if constexpr (Config::kStats) {
    bytes += kWarps * s.groups * int(sizeof(typename WarpStats<Config>::Group));
  }
  constexpr auto kKernel = stem_kernel<Config>;
  allow_shared_bytes(kKernel, bytes);
  launch_dependent<kKernel>("stem", static_cast<unsigned>(grid.blocks), kThreads, bytes, stream, s);
}

enum class Kind { kPlanar, kInterleaved, kGeneral };

// The fast kernels take 3 channels with a horizontal stride of 2, x in aligned vectors of 8 pixels that are wholly inside
// of the image or outside, and no residual, and write whole vectors.
Kind kind_of(const ConvArgs& a, DType x_dtype) {
  const ConvShape& s = a.shape;
  const Strides& x = a.x_strides;
  const auto aligned = [&](int size, int64_t stride) { return size == 1 || stride % (16 / size_of(x_dtype)) == 0; };
  if (s.in_channels != 3 || s.stride_w != 2 || a.residual != nullptr ||
      s.out_channels % (s.out_channels <= 16 ? 4 : 8) != 0 || s.in_w % kChunkPixels != 0 || !is_aligned(a.x, 16) ||
      !aligned(s.batch, x.n) || !aligned(s.in_h, x.h)) {
    return Kind::kGeneral;
  }
  if (x.c == 1 && x.w == 3) return Kind::kInterleaved;
  return x.w == 1 && aligned(s.in_channels, x.c) ? Kind::kPlanar : Kind::kGeneral;
}

template <class T, class In>
void choose(const ConvArgs& a, const StemArgs& s, DType x_dtype, cudaStream_t stream) {
  const Kind kind = kind_of(a, x_dtype);
  if (kind == Kind::kGeneral) return launch<StemConfig<T, In, 4, 4, true>>(a, s, stream);
  with_bool(a.shape.out_channels <= 16, [&](auto few_channels) {
    constexpr int kFragments = decltype(few_channels)::value ? 2 : 4;
    with_bool(kind == Kind::kPlanar, [&](auto planar) {
      // Two blocks for each multiprocessor at most: as many more share the work of their warps.
      const int64_t blocks = int64_t(s.out_h) * s.out_w * a.shape.batch / (4 * kTilePixels * kWarps);
      if (blocks <= 2 * multiprocessor_count()) {
        launch<StemConfig<T, In, 3, kFragments, planar(), 2>>(a, s, stream);
      } else {
        launch<StemConfig<T, In, 3, kFragments, planar(), 4>>(a, s, stream);
      }
    });
  });
}

// Calls use(config) with the kernel that takes statistics. Tiles of four rows also where there are few of them.
template <class T, class Use>
void with_stats_config(const ConvArgs& a, DType x_dtype, Use&& use) {
  with_bool(x_dtype == DType::kFloat32, [&](auto float_x) {
    using In = std::conditional_t<decltype(float_x)::value, float, T>;
    with_bool(a.shape.out_channels <= 16, [&](auto few_channels) {
      constexpr int kFragments = decltype(few_channels)::value ? 2 : 4;
      with_bool(kind_of(a, x_dtype) == Kind::kPlanar,
                [&](auto planar) { use(StemStatsConfig<T, In, kFragments, planar()>()); });
    });
  });
}

StemArgs stem_args(const ConvArgs& a, DType x_dtype, DType weight_dtype, DType dtype) {
  const ConvShape& shape = a.shape;
  const auto one_or_two = [](int stride) { return stride == 1 || stride == 2; };
  if (shape.kernel_h != 3 || shape.kernel_w != 3 || !one_or_two(shape.stride_h) || !one_or_two(shape.stride_w) ||
      shape.dilation_h != 1 || shape.dilation_w != 1 || shape.groups != 1 || shape.in_channels > 4) {
    fail("stem: no kernel for ", shape.in_channels, " channels, kernel ", shape.kernel_h, "x", shape.kernel_w,
         ", stride ", shape.stride_h, "x", shape.stride_w, ", groups ", shape.groups);
  }
  if (x_dtype != dtype && x_dtype != DType::kFloat32) {
    fail("stem: no kernel for x in ", name_of(x_dtype), " and y in ", name_of(dtype));
  }
  StemArgs s = {};
  s.x = a.x;
  s.x_strides = a.x_strides;
  s.weight = a.weight;
  s.weight_strides = a.weight_strides;
  s.weight_dtype = weight_dtype;
  s.y = a.y;
  s.residual = a.residual;
  s.residual_strides = a.residual_strides;
  s.affine = a.affine;
  s.act = a.act;
  s.in_channels = shape.in_channels;
  s.in_h = shape.in_h;
  s.in_w = shape.in_w;
  s.out_channels = shape.out_channels;
  s.y_stride = a.y_stride;
  s.out_h = shape.out_h;
  s.out_w = shape.out_w;
  s.stride_h = shape.stride_h;
  s.stride_w = shape.stride_w;
  s.pad_h = shape.pad_h;
  s.pad_w = shape.pad_w;
  return s;
}

}  // namespace

void stem(const ConvArgs& a, DType x_dtype, DType weight_dtype, DType dtype, cudaStream_t stream) {
  const StemArgs s = stem_args(a, x_dtype, weight_dtype, dtype);
  if (dtype == DType::kFloat32) return choose<float, float>(a, s, x_dtype, stream);
  with_half_type(dtype, "stem", [&](auto type) {
    using T = typename decltype(type)::type;
    if (x_dtype == dtype) {
      choose<T, T>(a, s, x_dtype, stream);
    } else {
      choose<T, float>(a, s, x_dtype, stream);
    }
  });
}

int stem_parts(const ConvArgs& a, DType x_dtype, DType dtype) {
  // Rows of whole tiles: an origin from a few pixels is no good, and masks would cost an instruction a word.
  if (size_of(dtype) != 2 || kind_of(a, x_dtype) == Kind::kGeneral || a.shape.out_w % kTilePixels != 0) return 0;
  int parts = 0;
  // The same for both dtypes.
  with_stats_config<__half>(a, x_dtype, [&](auto config) { parts = Grid<decltype(config)>(a.shape).blocks; });
  return parts;
}

void stem_stats(const ConvArgs& a, DType x_dtype, DType weight_dtype, DType dtype, const TileStats& stats,
                cudaStream_t stream) {
  if (a.act != Act::kIdentity || stem_parts(a, x_dtype, dtype) != stats.parts) {
    fail("stem: no statistics of ", name_of(dtype), " or after an activation");
  }
  const StemStatsArgs s = {stem_args(a, x_dtype, weight_dtype, dtype), stats};
  with_half_type(dtype, "stem", [&](auto type) {
    using T = typename decltype(type)::type;
    with_stats_config<T>(a, x_dtype, [&](auto config) { launch<decltype(config)>(a, s, stream); });
  });
}

}  // namespace yolo12_fastconv
