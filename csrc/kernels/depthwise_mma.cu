// Depthwise convolution on tensor cores: one kernel per channel (groups = C = K), 3x3, 5x5 or 7x7, stride 1, dilation 1,
// half or bfloat16 with float sums. From compute capability 8.0 on.
//   y[n,p,q,k] = round(act(scale[k] * sum over r,s of x[n, p + r - pad, q + s - pad, k] * w[k,r,s] + shift[k]))
//                + residual[n,p,q,k]
// x and residual NHWC with any strides of n, h and w that keep pixels aligned to 16 bytes, y NHWC and dense.
//
// A filter row as a matrix. Eight neighbouring outputs of one image row and channel are 14 inputs times a banded matrix
//   B_r[k][j] = w[r, k - j]   (0 outside the filter; 16 x 8),
// so a product m16n8k16 per filter row makes 16 x 8 outputs, whatever 16 groups of eight inputs the rows of A are. A unit
// is 8 columns x kRows rows of outputs; the 16 units of a block lie side by side and below each other (5 x 3 in a map 40
// wide), and A holds the same row of each. A row of x is loaded once and multiplied by all B_r: it adds to kKernel rows
// of sums. With rows of outputs along A instead, each product would need its own A: 4 cycles of shared memory apiece,
// 28 per 128 outputs of a 7x7, which alone is the time that their bytes take in memory. Here it is 7.4.
//
// Steps of a block (16 units, or fewer; 32, 16 or 8 channels):
//   1. x to shared memory as [channel][row][column]: two pixels of 8 channels in registers, paired by 8 PRMTs;
//   2. a warp, for a channel: B from a table of pairs of taps, kRows + kKernel - 1 ldmatrix.x4, kRows * kKernel products;
//      scale, shift and activation, rounded, and over the channel's x, which no other warp reads: output (row, column) of
//      the tile where x had (row, column); for training, the channel's mean and squared deviations in the block;
//   3. back to pixels as in step 1, and the channels of a pixel at a time to y.
// Blocks of 32 channels for large grids: two per multiprocessor hide each other's loads, and memory is read 64 bytes at a
// time, for which L1 looks up half as many lines as for 32. Narrow ones, of 16 and 8, for grids that would leave
// multiprocessors idle: there the time is that of one block's steps one after the other, so they have little to do, a warp
// per channel, all loads at once, and all addresses computed while the kernel before still runs. The host weighs them
// (device/depthwise_plan.h).
// No access to shared memory has bank conflicts but for those of steps 1 and 3 across a segment's end (see
// depthwise_segment_pad).
//
// Zeros of B meet inputs that an output does not depend on, and zero times an infinite or NaN input is NaN: sums that
// came out NaN are added up again, from the inputs under the filter only (repair).
#include <iterator>

#include "device/dependent_launch.cuh"
#include "device/depthwise_plan.h"
#include "device/fast_divide.h"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/row_moments.cuh"
#include "device/stats_kernels.h"
#include "device/tensor_core.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kUnitCols = kDepthwiseUnitCols;

template <class T, int kKernelSize, int kTileChannels, int kUnitRows>
struct MmaTile {
  using Element = T;
  static constexpr int kKernel = kKernelSize, kRows = kUnitRows, kChannels = kTileChannels;

  // Narrow blocks, which are there to be short, have a warp more for the taps and one for scale and shift: fetching these
  // takes 100 to 300 instructions, by which a warp's x would be late. In wide blocks many warps share the time, and
  // registers are dearer: 16 warps of 64 fill half a multiprocessor.
  static constexpr bool kNarrow = kChannels < 32;
  static constexpr int kWarps = depthwise_warps(kChannels), kHelpers = kNarrow ? 2 : 0,
                       kThreads = (kWarps + kHelpers) * 32;
  static constexpr int kTapWarp = kWarps, kAffineWarp = kWarps + kHelpers - 1;  // wide: taps by all but the last
  static constexpr int kWarpChannels = kChannels / kWarps;

  static constexpr int kGroups = kChannels / 8;  // a thread loads and stores 8 channels of a pixel
  static constexpr int kLoadStep = kWarps * 32 / kGroups;  // pairs of pixels that all threads load at once
  static constexpr int kStoreStep = kThreads / kGroups;

  static constexpr int kChannelChunks = depthwise_capacity(kRows, kKernel);
  static constexpr int kChannelBytes = kChannelChunks * 16;
  // Spreads the groups of channels, which a warp accesses at a time, over the banks.
  static constexpr int kGroupSkewBytes = 128 / kGroups;
  static constexpr int kInputBytes = kChannels * kChannelBytes + kGroups * kGroupSkewBytes;

  static constexpr int kInFlight = depthwise_pairs_in_flight({kChannels, kRows}, kKernel);

  // Pairs of taps (w[s - 1], w[s]) for s = 0..kKernel, then a pair of zeros; per channel and filter row.
  static constexpr int kPairs = kKernel + 2;
  static constexpr int kTapRows = kChannels * kKernel;
  static constexpr int kTapPasses =
      kNarrow ? ceil_div(kTapRows, 32) : 1;  // by kTapWarp, or in wide blocks by all but the last
  static_assert(!kNarrow || kWarpChannels == 1, "kAffineReady");
  static_assert(kNarrow || kTapRows <= kThreads - 32, "the last warp has the affine parameters");

  static constexpr int kTapsOffset = kInputBytes;
  static constexpr int kAffineOffset = kTapsOffset + kTapRows * kPairs * 4;
  static constexpr int kSharedBytes = kAffineOffset + kChannels * 2 * 4;

  // Blocks per multiprocessor that registers are counted for. Where it has less shared memory than on 9.0 and 10.0, one block
  // of 7x7 fills it; and 16 channels with 56 registers, which suffice on 9.0, would spill 16 bytes on 8.6.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
  static constexpr int kResident = kChannels == 8 ? 3 : kNarrow || kSharedBytes > 82 * 1024 ? 1 : 2;
  static constexpr bool kNanBySums = false;  // 24 to 32 bytes spilled on 8.0 and 8.6
#else
  static constexpr int kResident = kChannels == 8 ? 3 : 2;
  static constexpr bool kNanBySums = !kNarrow;  // narrow blocks spilled 4 to 8 bytes
#endif
  static_assert(kKernel % 2 == 1 && kUnitCols + kKernel - 1 <= 16, "B has 16 rows");
  static_assert(kChannels % kWarps == 0 && kChannels <= 32, "a lane of a warp folds each");
  static_assert(kSharedBytes <= 99 * 1024, "a block of 8.6 and 8.9 has no more");
};

// How the work is cut into blocks; block index = ((n * tiles_h + tile_h) * tiles_w + tile_w) * chunks + chunk.
struct Tiling {
  int unit_cols, unit_rows;  // units of a block
  int segment_pad;  // see depthwise_segment_pad()
  FastDivide by_unit_cols, by_tiles_w, by_tiles_h, by_chunks;
  FastDivide by_row_pairs;  // pairs of pixels of a row in shared memory
};

struct BlockPosition {
  int n, row, column, channel;  // first outputs
  int channels;
};

template <class Tile>
__device__ __forceinline__ BlockPosition block_position(const ConvShape& s, const Tiling& g) {
  BlockPosition at;
  int block = blockIdx.x;
  g.by_chunks.divide(block, block, at.channel);
  g.by_tiles_w.divide(block, block, at.column);
  g.by_tiles_h.divide(block, at.n, at.row);
  at.channel *= Tile::kChannels;
  at.column *= g.unit_cols * kUnitCols;
  at.row *= g.unit_rows * Tile::kRows;
  at.channels = min(Tile::kChannels, s.out_channels - at.channel);
  return at;
}

// Barriers of some of the warps; __syncthreads() is number 0. Whoever arrives does not wait.
constexpr int kInputReady = 1, kAffineReady = 2;

template <int kBarrier>
__device__ __forceinline__ void sync_warps(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}
template <int kBarrier>
__device__ __forceinline__ void arrive_at(int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kBarrier), "r"(threads) : "memory");
}

// What depends on all of an address, for wait_for_earlier_kernels().
__device__ __forceinline__ uint32_t fold_address(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return static_cast<uint32_t>(bits) ^ static_cast<uint32_t>(bits >> 32);
}

// The table of pairs of taps. A thread loads filter rows: one, or in narrow blocks all those of a lane at once.
template <class Tile>
class TapLoader {
 public:
  __device__ __forceinline__ TapLoader(const BlockPosition& at, uint32_t* table)
      : table_(table), first_(Tile::kNarrow ? threadIdx.x % 32 : threadIdx.x), rows_(at.channels * Tile::kKernel) {}

  __device__ __forceinline__ void prepare(const ConvArgs& a, const BlockPosition& at) {
#pragma unroll
    for (int i = 0; i < Tile::kTapPasses; ++i) {
      const int row = first_ + i * 32;
      from_[i] = static_cast<const uint16_t*>(a.weight) + (at.channel + row / kKernel) * a.weight_strides.n +
                 row % kKernel * a.weight_strides.h;
    }
  }

  __device__ __forceinline__ uint32_t prepared() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < Tile::kTapPasses; ++i) all ^= fold_address(from_[i]);
    return all;
  }

  __device__ __forceinline__ void issue(const ConvArgs& a) {
#pragma unroll
    for (int i = 0; i < Tile::kTapPasses; ++i) {
      if (first_ + i * 32 >= rows_) continue;
#pragma unroll
      for (int s = 0; s < kKernel; ++s) taps_[i][s] = from_[i][s * a.weight_strides.w];
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < Tile::kTapPasses; ++i) {
      const int row = first_ + i * 32;
      if (row >= rows_) continue;
      uint32_t* const to = table_ + row * Tile::kPairs;
      to[0] = uint32_t(taps_[i][0]) << 16;
#pragma unroll
      for (int s = 1; s < kKernel; ++s) to[s] = taps_[i][s - 1] | uint32_t(taps_[i][s]) << 16;
      to[kKernel] = taps_[i][kKernel - 1];
      to[kKernel + 1] = 0;
    }
  }

 private:
  static constexpr int kKernel = Tile::kKernel;
  uint32_t* table_;
  int first_, rows_;
  const uint16_t* from_[Tile::kTapPasses];
  uint16_t taps_[Tile::kTapPasses][kKernel];
};

// Scale and shift of each channel. By kAffineWarp.
template <class Tile>
__device__ __forceinline__ void fill_affine(const ConvArgs& a, const BlockPosition& at, ScaleShift<float>* affine) {
  const int channel = static_cast<int>(threadIdx.x) - Tile::kAffineWarp * 32;
  if (channel < 0 || channel >= at.channels) return;
  affine[channel] = fold_for_epilogue(a.affine, at.channel + channel, a.shape.out_channels, a.act == Act::kSilu);
}

template <class Tile>
__device__ __forceinline__ int channel_offset(int channel) {
  return channel * Tile::kChannelBytes + channel / 8 * Tile::kGroupSkewBytes;
}

// Two pixels of 8 channels to 8 rows of the channels. `to` is the first one's.
template <class Tile>
__device__ __forceinline__ void store_pixel_pair(unsigned char* to, const uint4& left, const uint4& right) {
  const uint32_t l[4] = {left.x, left.y, left.z, left.w}, r[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(to + 2 * i * Tile::kChannelBytes) = __byte_perm(l[i], r[i], 0x5410);
    *reinterpret_cast<uint32_t*>(to + (2 * i + 1) * Tile::kChannelBytes) = __byte_perm(l[i], r[i], 0x7632);
  }
}

// 16 bytes, or zeros and no access to `from`: one predicated load, where the compiler would branch around it.
__device__ __forceinline__ uint4 load_if(bool valid, const void* from) {
  uint4 value = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
  return value;
}

// The rows of x that the block's outputs need, all columns of its units: zeros where B's rows reach behind the filter,
// since what lay there before might be NaN. A thread loads kInFlight pairs of pixels at a time, of 8 channels.
template <class Tile>
class InputLoader {
 public:
  using T = typename Tile::Element;

  __device__ __forceinline__ InputLoader(const ConvArgs& a, const Tiling& g, const BlockPosition& at,
                                         unsigned char* input)
      : args_(a), tiling_(g) {
    const int thread = threadIdx.x, channel = thread % Tile::kGroups * 8;
    const int rows = min(g.unit_rows * Tile::kRows, a.shape.out_h - at.row) + Tile::kKernel - 1;
    pair_ = thread / Tile::kGroups;
    pairs_ = channel < at.channels ? rows * static_cast<int>(g.by_row_pairs.divisor) : 0;
    image_ = static_cast<const T*>(a.x) + at.n * a.x_strides.n + at.channel + channel;
    first_h_ = at.row - a.shape.pad_h;
    first_w_ = at.column - a.shape.pad_w;
    input_ = input + channel_offset<Tile>(channel);
  }

  __device__ __forceinline__ bool more() const { return pair_ < pairs_; }

  // Addresses of the next pairs: some 40 instructions each, which need no memory.
  __device__ __forceinline__ void prepare() {
    const int columns = tiling_.unit_cols * kUnitCols + Tile::kKernel - 1;
    valid_ = 0;
#pragma unroll
    for (int i = 0; i < Tile::kInFlight; ++i, pair_ += Tile::kLoadStep) {
      int row, column;
      tiling_.by_row_pairs.divide(pair_, row, column);
      column *= 2;
      const int h = first_h_ + row, w = first_w_ + column;
      const bool inside = more() && static_cast<unsigned>(h) < static_cast<unsigned>(args_.shape.in_h);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const bool valid = inside && column + side < columns &&
                           static_cast<unsigned>(w + side) < static_cast<unsigned>(args_.shape.in_w);
        valid_ |= static_cast<unsigned>(valid) << (2 * i + side);
      }
      from_[i] = image_ + h * args_.x_strides.h + w * args_.x_strides.w;
      to_[i] = more() ? pair_ * 4 + row / Tile::kRows * tiling_.segment_pad * 16 : -1;
    }
  }

  __device__ __forceinline__ uint32_t prepared() const {
    uint32_t all = valid_;
#pragma unroll
    for (int i = 0; i < Tile::kInFlight; ++i) all ^= fold_address(from_[i]) ^ static_cast<uint32_t>(to_[i]);
    return all;
  }

  __device__ __forceinline__ void issue() {
#pragma unroll
    for (int i = 0; i < Tile::kInFlight; ++i) {
      pixels_[i][0] = load_if((valid_ >> (2 * i) & 1) != 0, from_[i]);
      pixels_[i][1] = load_if((valid_ >> (2 * i + 1) & 1) != 0, from_[i] + args_.x_strides.w);
    }
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < Tile::kInFlight; ++i) {
      if (to_[i] >= 0) store_pixel_pair<Tile>(input_ + to_[i], pixels_[i][0], pixels_[i][1]);
    }
  }

 private:
  const ConvArgs& args_;
  const Tiling& tiling_;
  const T* image_;
  unsigned char* input_;
  int first_h_, first_w_;
  int pair_, pairs_;  // the next one
  unsigned valid_;  // a bit per pixel
  const T* from_[Tile::kInFlight];
  int to_[Tile::kInFlight];  // bytes behind input_, or -1
  uint4 pixels_[Tile::kInFlight][2];
};

__device__ __forceinline__ int row_bytes(const Tiling& g) { return (g.unit_cols + 1) * 16; }
__device__ __forceinline__ int pad_bytes(const Tiling& g) { return g.segment_pad * 16; }

// Where the first row of a unit begins in a channel.
template <class Tile>
__device__ __forceinline__ int unit_offset(const Tiling& g, int unit) {
  const int units = g.unit_cols * g.unit_rows;
  if (unit >= units) unit = units >= 8 ? unit - 8 : 0;  // an idle row of A: any unit, best one in the same banks
  int unit_row, unit_col;
  g.by_unit_cols.divide(unit, unit_row, unit_col);
  return unit_row * (Tile::kRows * row_bytes(g) + pad_bytes(g)) + unit_col * 16;
}

// The row that this lane names to ldmatrix: lanes 0-15 give columns 0-7 of a unit, 16-31 columns 8-15.
template <class Tile>
__device__ __forceinline__ int matrix_row(const Tiling& g) {
  const int lane = threadIdx.x % 32;
  return unit_offset<Tile>(g, lane % 16) + lane / 16 * 16;
}

// Zeros to the rows under the image that units reach into. What lay there before might be NaN: no output depends on it,
// but sums would be repaired for it.
template <class Tile>
__device__ __forceinline__ void clear_rows_below(const ConvShape& s, const Tiling& g, const BlockPosition& at,
                                                 unsigned char* input) {
  constexpr int kStep = Tile::kWarps * 32 / Tile::kChannels;
  const int all_rows = g.unit_rows * Tile::kRows, rows = s.out_h - at.row;
  const int chunks = g.unit_cols + 1, count = (all_rows - rows) * chunks;
  const int channel = threadIdx.x % Tile::kChannels;
  for (int i = threadIdx.x / Tile::kChannels; i < count; i += kStep) {
    int row, pair;
    g.by_row_pairs.divide(i * 4, row, pair);  // a chunk is four pairs
    row += rows + Tile::kKernel - 1;
    const int chunk = row * chunks + row / Tile::kRows * g.segment_pad + pair / 4;
    *reinterpret_cast<uint4*>(input + channel_offset<Tile>(channel) + chunk * 16) = make_uint4(0, 0, 0, 0);
  }
}

template <class Tile>
using UnitSums = float[Tile::kRows][4];

// This lane's words of B for each filter row: (w[r, d], w[r, d + 1]) for d = 2 (lane % 4) - lane / 4, and for d + 8.
template <class Tile>
__device__ __forceinline__ void load_bands(uint32_t (&bands)[Tile::kKernel][2], const uint32_t* table) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int s = 2 * (lane % 4) - lane / 4 + 8 * half + 1;
    const int pair = s >= 0 && s <= Tile::kKernel ? s : Tile::kKernel + 1;
#pragma unroll
    for (int r = 0; r < Tile::kKernel; ++r) bands[r][half] = table[r * Tile::kPairs + pair];
  }
}

// All sums of the 16 units for one channel. `rows` is the address that this lane gives ldmatrix for the first row.
template <class Tile>
__device__ __forceinline__ void convolve(UnitSums<Tile>& sums, uint32_t rows, const Tiling& g, const uint32_t* table) {
  constexpr int kInRows = Tile::kRows + Tile::kKernel - 1;
  uint32_t bands[Tile::kKernel][2];
  load_bands<Tile>(bands, table);
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) sums[p][0] = sums[p][1] = sums[p][2] = sums[p][3] = 0.0f;
  uint32_t x[2][4];
  load_matrices(x[0], rows);
#pragma unroll
  for (int i = 0; i < kInRows; ++i) {
    if (i + 1 < kInRows) {  // the next row is on its way while this one is multiplied
      rows += row_bytes(g) + ((i + 1) % Tile::kRows == 0 ? pad_bytes(g) : 0);
      load_matrices(x[(i + 1) % 2], rows);
    }
#pragma unroll
    for (int r = 0; r < Tile::kKernel; ++r) {
      const int p = i - r;
      if (p < 0 || p >= Tile::kRows) continue;
      multiply_add<typename Tile::Element>(sums[p], x[i % 2], bands[r][0], bands[r][1]);
    }
  }
}

// Whether a sum of any lane may be NaN: infinite ones of both signs count too. The same answer in all lanes.
template <class Tile>
__device__ __forceinline__ bool any_nan(const UnitSums<Tile>& sums) {
  float all = 0.0f;
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
    all += (sums[p][0] + sums[p][1]) + (sums[p][2] + sums[p][3]);
  }
  return __any_sync(0xffffffff, all != all);
}

// Replaces NaN among the sums of the channel whose inputs begin at `input`. Works on a copy with rolled loops: indexing
// `sums` itself would move it to local memory for good.
template <class Tile>
__device__ __forceinline__ void repair(UnitSums<Tile>& sums, const unsigned char* input, const Tiling& g,
                                       const uint32_t* table) {
  using T = typename Tile::Element;
  const int lane = threadIdx.x % 32;
  UnitSums<Tile> copy;
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
    for (int e = 0; e < 4; ++e) copy[p][e] = sums[p][e];
  }
#pragma unroll 1
  for (int i = 0; i < Tile::kRows * 4; ++i) {
    const int p = i / 4, e = i % 4;
    if (copy[p][e] == copy[p][e]) continue;
    const unsigned char* const unit = input + unit_offset<Tile>(g, lane / 4 + e / 2 * 8);
    float sum = 0.0f;
#pragma unroll 1
    for (int tap = 0; tap < Tile::kKernel * Tile::kKernel; ++tap) {
      const int r = tap / Tile::kKernel, s = tap % Tile::kKernel, row = p + r;
      const unsigned char* const from = unit + row * row_bytes(g) + row / Tile::kRows * pad_bytes(g);
      const T* const x = reinterpret_cast<const T*>(from) + lane % 4 * 2 + e % 2 + s;
      const T* const w = reinterpret_cast<const T*>(table + r * Tile::kPairs + s) + 1;
      sum = fmaf(convert<float>(*x), convert<float>(*w), sum);
    }
    copy[p][e] = sum;
  }
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[p][e] = copy[p][e];
  }
}

template <class Tile>
__device__ __forceinline__ void finish(UnitSums<Tile>& sums, float scale, float shift, Act act) {
#pragma unroll
  for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[p][e] = fmaf(sums[p][e], scale, shift);
  }
  if (act == Act::kSilu) {  // scale and shift are halved then
#pragma unroll
    for (int p = 0; p < Tile::kRows; ++p) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[p][e] = silu_of_half(sums[p][e]);
    }
  }
}

// The results of the channel whose inputs begin at `input`, rounded, over these.
template <class Tile>
__device__ __forceinline__ void stage_results(const UnitSums<Tile>& results, unsigned char* input, const Tiling& g) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    unsigned char* const to = input + unit_offset<Tile>(g, lane / 4 + u * 8) + lane % 4 * 4;
#pragma unroll
    for (int p = 0; p < Tile::kRows; ++p) {
      *reinterpret_cast<uint32_t*>(to + p * row_bytes(g)) =
          round_pair<typename Tile::Element>(results[p][2 * u], results[p][2 * u + 1]);
    }
  }
}

// What of a unit lies in the map, for this lane: rows, and a mask over words of its two columns.
struct UnitPart {
  int rows;
  uint32_t columns;
};
template <class Tile>
__device__ __forceinline__ UnitPart part_of_unit(const ConvShape& s, const Tiling& g, const BlockPosition& at,
                                                 int unit) {
  int unit_row, unit_col;
  g.by_unit_cols.divide(unit, unit_row, unit_col);
  const int columns = s.out_w - at.column - unit_col * kUnitCols - static_cast<int>(threadIdx.x) % 4 * 2;
  return {unit < g.unit_cols * g.unit_rows ? s.out_h - at.row - unit_row * Tile::kRows : 0,
          columns >= 2 ? ~0u : (columns == 1 ? 0xffffu : 0u)};
}

// Outputs of the block inside of the map, per channel.
template <class Tile>
__device__ __forceinline__ int pixels_of_block(const ConvShape& s, const Tiling& g, const BlockPosition& at) {
  int pixels = min(g.unit_rows * Tile::kRows, s.out_h - at.row) * min(g.unit_cols * kUnitCols, s.out_w - at.column);
  asm volatile("" : "+r"(pixels));  // anew at each use: what follows from it spilled 4 to 16 bytes
  return pixels;
}

// Of both, in all lanes.
__device__ __forceinline__ float2 sums_of_warp(float a, float b) {
  const bool second = threadIdx.x & 16;  // of which this half of the warp adds
  float sum = (second ? b : a) + __shfl_xor_sync(0xffffffffu, second ? a : b, 16);
#pragma unroll
  for (int apart = 1; apart < 16; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  const float other = __shfl_xor_sync(0xffffffffu, sum, 16);
  return second ? float2{other, sum} : float2{sum, other};
}

// Sums of a channel's results in the block and of their squares, as rounded, in all lanes.
template <class Tile>
__device__ __forceinline__ float2 channel_sums(const UnitSums<Tile>& results, const ConvShape& s, const Tiling& g,
                                               const BlockPosition& at) {
  constexpr int kRows = Tile::kRows;
  const int lane = threadIdx.x % 32, units = g.unit_cols * g.unit_rows;
  uint32_t words[kRows][2];
#pragma unroll
  for (int p = 0; p < kRows; ++p) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      words[p][u] = round_pair<typename Tile::Element>(results[p][2 * u], results[p][2 * u + 1]);
    }
  }
  // Not all in the map; or a narrow block, for whose branch 4 bytes spilled.
  if (Tile::kNarrow || pixels_of_block<Tile>(s, g, at) < g.unit_rows * Tile::kRows * g.unit_cols * kUnitCols) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const UnitPart part = part_of_unit<Tile>(s, g, at, lane / 4 + u * 8);
#pragma unroll
      for (int p = 0; p < kRows; ++p) words[p][u] = p < part.rows ? words[p][u] & part.columns : 0;
    }
  }
  RowMoments<typename Tile::Element> moments;  // a row of A: outputs of a unit
#pragma unroll
  for (int p = 0; p + 1 < kRows; p += 2) {
    const uint32_t rows[4] = {words[p][0], words[p][1], words[p + 1][0], words[p + 1][1]};
    moments.add(rows);
  }
  if constexpr (kRows % 2 == 1) moments.add(words[kRows - 1][0], words[kRows - 1][1]);
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const bool counts = moments.owns() && lane / 4 + u * 8 < units;
    sum += counts ? moments.sum(u) : 0.0f;
    squares += counts ? moments.squares(u) : 0.0f;
  }
  return sums_of_warp(sum, squares);
}

// The same of deviations from `origin`, exact, from what stage_results() has put to `output`.
template <class Tile>
__device__ __forceinline__ float2 channel_deviations(float origin, const ConvShape& s, const Tiling& g,
                                                     const BlockPosition& at, const unsigned char* output) {
  using T = typename Tile::Element;
  const int lane = threadIdx.x % 32;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
  for (int u = 0; u < 2; ++u) {
    const int unit = lane / 4 + u * 8;
    const UnitPart part = part_of_unit<Tile>(s, g, at, unit);
    const unsigned char* from = output + unit_offset<Tile>(g, unit) + lane % 4 * 4;
#pragma unroll 1
    for (int p = 0; p < min(Tile::kRows, part.rows); ++p, from += row_bytes(g)) {
      float value[2];
      widen(load_lanes<2>(reinterpret_cast<const T*>(from)), value);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float d = part.columns >> 16 * e & 1 ? value[e] - origin : 0.0f;
        sum += d;
        squares = fmaf(d, d, squares);
      }
    }
  }
  return sums_of_warp(sum, squares);
}

template <class T>
__device__ __forceinline__ uint4 add_rounded(const uint4& value, const uint4& added) {
  constexpr int kCount = kLanesOf16Bytes<T>;
  float a[kCount], b[kCount];
  widen(Lanes<T, kCount>{value}, a);
  widen(Lanes<T, kCount>{added}, b);
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] += b[i];
  return narrow<T>(a).word;
}

// Two pixels of 8 channels from 8 rows of the channels. `from` is the first one's.
template <class Tile>
__device__ __forceinline__ void load_pixel_pair(uint4& left, uint4& right, const unsigned char* from) {
  uint32_t words[8], l[4], r[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = *reinterpret_cast<const uint32_t*>(from + i * Tile::kChannelBytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    l[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    r[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
  left = make_uint4(l[0], l[1], l[2], l[3]);
  right = make_uint4(r[0], r[1], r[2], r[3]);
}

// The block's outputs to y, a pair of pixels and 8 channels at a time. As in stock, the activated value is rounded
// before the residual is added.
template <class Tile>
class OutputWriter {
 public:
  using T = typename Tile::Element;

  __device__ __forceinline__ OutputWriter(const ConvArgs& a, const Tiling& g, const BlockPosition& at,
                                          const unsigned char* output)
      : args_(a), tiling_(g) {
    const int thread = threadIdx.x, channel = thread % Tile::kGroups * 8;
    const int rows = min(g.unit_rows * Tile::kRows, a.shape.out_h - at.row);
    columns_ = min(g.unit_cols * kUnitCols, a.shape.out_w - at.column);
    pair_ = thread / Tile::kGroups;
    pairs_ = channel < at.channels ? rows * static_cast<int>(g.by_row_pairs.divisor) : 0;
    const int64_t first_pixel = (int64_t(at.n) * a.shape.out_h + at.row) * a.shape.out_w + at.column;
    y_ = static_cast<T*>(a.y) + first_pixel * a.shape.out_channels + at.channel + channel;
    residual_ = static_cast<const T*>(a.residual) + at.n * a.residual_strides.n + at.row * a.residual_strides.h +
                at.column * a.residual_strides.w + at.channel + channel;
    output_ = output + channel_offset<Tile>(channel);
  }

  // Where the next pair is.
  __device__ __forceinline__ void prepare() {
    tiling_.by_row_pairs.divide(pair_, row_, column_);
    column_ *= 2;
    from_ = output_ + pair_ * 4 + row_ / Tile::kRows * pad_bytes(tiling_);
    to_ = y_ + (int64_t(row_) * args_.shape.out_w + column_) * args_.shape.out_channels;
  }

  __device__ __forceinline__ uint32_t prepared() const {
    return fold_address(to_) ^ fold_address(from_) ^ static_cast<uint32_t>(column_);
  }

  // All pairs, from the prepared one on.
  template <bool kResidual>
  __device__ __forceinline__ void write() {
#pragma unroll 1
    while (pair_ < pairs_) {
      const bool valid[2] = {column_ < columns_, column_ + 1 < columns_};
      uint4 added[2];
      if constexpr (kResidual) {
        const T* const from = residual_ + row_ * args_.residual_strides.h + column_ * args_.residual_strides.w;
        added[0] = load_if(valid[0], from);
        added[1] = load_if(valid[1], from + args_.residual_strides.w);
      }
      uint4 value[2];
      load_pixel_pair<Tile>(value[0], value[1], from_);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if constexpr (kResidual) value[side] = add_rounded<T>(value[side], added[side]);
        if (valid[side]) *reinterpret_cast<uint4*>(to_ + side * args_.shape.out_channels) = value[side];
      }
      pair_ += Tile::kStoreStep;
      prepare();
    }
  }

 private:
  const ConvArgs& args_;
  const Tiling& tiling_;
  T* y_;
  const T* residual_;
  const unsigned char* output_;
  int columns_, pair_, pairs_;
  int row_, column_;
  const unsigned char* from_;
  T* to_;
};

struct NoStats {};

__device__ __forceinline__ int part_of_block(const Tiling& g) {
  return g.by_chunks.divide(static_cast<int>(blockIdx.x));
}

// By one lane. channel: of the block.
__device__ __forceinline__ void store_moments(const TileStats& stats, const Tiling& g, const BlockPosition& at,
                                              int channel, int all_channels, float2 moments) {
  if (threadIdx.x % 32 != 0) return;
  stats.moments[int64_t(part_of_block(g)) * all_channels + at.channel + channel] = moments;
}

// Stats: NoStats, or TileStats for training, without activation and residual: a block leaves the statistics of its outputs.
template <class Tile, class Stats>
__global__ __launch_bounds__(Tile::kThreads, Tile::kResident) void depthwise_mma_kernel(const ConvArgs a,
                                                                                        const Tiling g,
                                                                                        const Stats stats) {
  constexpr bool kStats = std::is_same_v<Stats, TileStats>;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const affine = reinterpret_cast<ScaleShift<float>*>(shared + Tile::kAffineOffset);
  uint32_t* const table = reinterpret_cast<uint32_t*>(shared + Tile::kTapsOffset);
  let_later_kernels_start();
  const BlockPosition at = block_position<Tile>(a.shape, g);
  const int warp = threadIdx.x / 32;
  TapLoader<Tile> taps(at, table);
  InputLoader<Tile> loader(a, g, at, shared);
  OutputWriter<Tile> writer(a, g, at, shared);
  int first_row = 0;
  if constexpr (Tile::kNarrow) taps.prepare(a, at);
  loader.prepare();
  if constexpr (Tile::kNarrow) {
    // All addresses behind the end of the kernel before. In wide blocks they would occupy registers that are needed.
    first_row = matrix_row<Tile>(g);
    writer.prepare();
    wait_for_earlier_kernels(taps.prepared() ^ loader.prepared() ^ writer.prepared() ^ uint32_t(first_row));
  } else {
    wait_for_earlier_kernels();
  }

  if (__builtin_expect(warp < Tile::kWarps, true)) {
    loader.issue();
    if constexpr (!Tile::kNarrow) {  // while x is on its way
      taps.prepare(a, at);
      taps.issue(a);
      taps.store();
      fill_affine<Tile>(a, at, affine);
    }
    clear_rows_below<Tile>(a.shape, g, at, shared);
    loader.store();
    while (loader.more()) {
      loader.prepare();
      loader.issue();
      loader.store();
    }
  } else if (warp == Tile::kTapWarp) {
    taps.issue(a);
    taps.store();
  } else {
    fill_affine<Tile>(a, at, affine);
  }
  if constexpr (!Tile::kNarrow) {
    __syncthreads();
    first_row = matrix_row<Tile>(g);
  } else if (warp <= Tile::kTapWarp) {
    sync_warps<kInputReady>((Tile::kWarps + 1) * 32);
  } else {
    arrive_at<kAffineReady>((at.channels + 1) * 32);  // a warp for each channel waits for it
  }

#pragma unroll 1
  for (int i = 0; i < Tile::kWarpChannels; ++i) {
    const int channel = warp + i * Tile::kWarps;
    if (warp >= Tile::kWarps || channel >= at.channels) break;
    unsigned char* const input = shared + channel_offset<Tile>(channel);
    const uint32_t* const filter = table + channel * Tile::kKernel * Tile::kPairs;
    UnitSums<Tile> sums;
    [[maybe_unused]] float2 all;
    if constexpr (kStats && Tile::kNanBySums) {
      // NaN shows in the statistics' sum, of all that is written: 28 additions less than any_nan().
#pragma unroll 1
      for (bool again = false;; again = true) {
        convolve<Tile>(sums, shared_address(input) + first_row, g, filter);
        if (again) repair<Tile>(sums, input, g, filter);
        finish<Tile>(sums, affine[channel].scale, affine[channel].shift, Act::kIdentity);
        all = channel_sums<Tile>(sums, a.shape, g, at);
        if (all.x == all.x || again) break;
      }
      __syncwarp();  // no lane reads x of this channel any more
      stage_results<Tile>(sums, input, g);
    } else {
      convolve<Tile>(sums, shared_address(input) + first_row, g, filter);
      if (any_nan<Tile>(sums)) repair<Tile>(sums, input, g, filter);
      if constexpr (Tile::kNarrow) sync_warps<kAffineReady>((at.channels + 1) * 32);
      finish<Tile>(sums, affine[channel].scale, affine[channel].shift, kStats ? Act::kIdentity : a.act);
      __syncwarp();  // no lane reads x of this channel any more
      stage_results<Tile>(sums, input, g);
      if constexpr (kStats) all = channel_sums<Tile>(sums, a.shape, g, at);
    }
    if constexpr (kStats) {
      const float share = __fdividef(1.0f, static_cast<float>(pixels_of_block<Tile>(a.shape, g, at)));
      float mean = all.x * share, squares = all.y - all.x * mean;
      // Beyond two deviations: else the squares are at most 5 times what is left without the mean.
      if (5 * all.x * mean > 4 * all.y) {
        const float2 more = channel_deviations<Tile>(mean, a.shape, g, at, input);
        squares = more.y - more.x * (more.x * share);
        mean += more.x * share;
      }
      store_moments(stats, g, at, channel, a.shape.out_channels, {mean, squares});
    }
  }
  if constexpr (kStats) {
    if (at.channel == 0 && threadIdx.x == 0) {
      stats.counts[part_of_block(g)] = static_cast<float>(pixels_of_block<Tile>(a.shape, g, at));
    }
  }
  __syncthreads();

  if constexpr (!Tile::kNarrow) writer.prepare();
  if (!kStats && a.residual != nullptr) {
    writer.template write<true>();
  } else {
    writer.template write<false>();
  }
}

struct TilesOfMap {
  int w, h;
  TilesOfMap(const ConvShape& s, const DepthwisePlan& plan)
      : w(ceil_div(s.out_w, plan.unit_cols * kUnitCols)), h(ceil_div(s.out_h, plan.unit_rows * plan.rows)) {}
};

template <class T, int kKernel, int kChannels, int kRows, class Stats>
void launch(const ConvArgs& a, const DepthwisePlan& plan, const Stats& stats, cudaStream_t stream) {
  using Tile = MmaTile<T, kKernel, kChannels, kRows>;
  const ConvShape& s = a.shape;
  const TilesOfMap tiles(s, plan);
  const int chunks = ceil_div(s.out_channels, kChannels);
  Tiling g;
  g.unit_cols = plan.unit_cols;
  g.unit_rows = plan.unit_rows;
  g.segment_pad = depthwise_segment_pad(plan);
  g.by_unit_cols = FastDivide(g.unit_cols);
  g.by_tiles_w = FastDivide(tiles.w);
  g.by_tiles_h = FastDivide(tiles.h);
  g.by_chunks = FastDivide(chunks);
  g.by_row_pairs = FastDivide((g.unit_cols + 1) * kUnitCols / 2);
  constexpr auto kKernelFunction = depthwise_mma_kernel<Tile, Stats>;
  allow_shared_bytes(kKernelFunction, Tile::kSharedBytes);
  const int64_t blocks = int64_t(s.batch) * tiles.h * tiles.w * chunks;
  launch_dependent<kKernelFunction>("depthwise_mma", checked_grid(blocks, "depthwise_mma"), Tile::kThreads,
                                    Tile::kSharedBytes, stream, a, g, stats);
}

// The kernel of the plan's tile, one of kDepthwiseTiles.
template <class T, int kKernel, class Stats, size_t kIndex = 0>
void launch_planned(const ConvArgs& a, const DepthwisePlan& plan, const Stats& stats, cudaStream_t stream) {
  if constexpr (kIndex < std::size(kDepthwiseTiles)) {
    constexpr DepthwiseTile kTile = kDepthwiseTiles[kIndex];
    if (plan.channels == kTile.channels && plan.rows == kTile.rows) {
      return launch<T, kKernel, kTile.channels, kTile.rows>(a, plan, stats, stream);
    }
    launch_planned<T, kKernel, Stats, kIndex + 1>(a, plan, stats, stream);
  } else {
    fail("depthwise_mma: no kernel for blocks of ", plan.channels, " channels, units of ", plan.rows, " rows");
  }
}

template <class Stats>
void run(const ConvArgs& a, DType dtype, const DepthwisePlan& plan, const Stats& stats, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const bool served = s.square_depthwise() && s.stride_h == 1 && s.out_channels % 8 == 0;
  with_half_type(dtype, "depthwise_mma", [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (served && s.kernel_h == 3) return launch_planned<T, 3>(a, plan, stats, stream);
    // No layer of YOLO12: not worth kernels with statistics.
    if constexpr (std::is_same_v<Stats, NoStats>) {
      if (served && s.kernel_h == 5) return launch_planned<T, 5>(a, plan, stats, stream);
    }
    if (served && s.kernel_h == 7) return launch_planned<T, 7>(a, plan, stats, stream);
    fail("depthwise_mma: no kernel for ", s.kernel_h, "x", s.kernel_w, ", stride ", s.stride_h, "x", s.stride_w,
         ", dilation ", s.dilation_h, "x", s.dilation_w, ", groups ", s.groups, ", channels ", s.in_channels, " -> ",
         s.out_channels);
  });
}

}  // namespace

void depthwise_mma(const ConvArgs& a, DType dtype, const DepthwisePlan& plan, cudaStream_t stream) {
  run(a, dtype, plan, NoStats(), stream);
}

int depthwise_mma_parts(const ConvShape& shape, const DepthwisePlan& plan) {
  if (shape.kernel_h == 5) return 0;
  const TilesOfMap tiles(shape, plan);
  return static_cast<int>(checked_grid(int64_t(shape.batch) * tiles.h * tiles.w, "depthwise_mma"));
}

void depthwise_mma_stats(const ConvArgs& a, DType dtype, const DepthwisePlan& plan, const TileStats& stats,
                         cudaStream_t stream) {
  if (a.act != Act::kIdentity || a.residual != nullptr) {
    fail("depthwise_mma: statistics are of the bare convolution, without activation and residual");
  }
  run(a, dtype, plan, stats, stream);
}

}  // namespace yolo12_fastconv
