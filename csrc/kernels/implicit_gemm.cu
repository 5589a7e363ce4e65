// Dense convolution (groups = 1) as an implicit GEMM on tensor cores, target sm80 (mma.sync, cp.async): every GPU from
// compute capability 8.0 up.
//
//   y[m, k] = act(scale[k] * sum over t, c of x[pixel(m, t), c] * w[k, t, c] + shift[k]) + residual[m, k]
//
// m: output pixel (n, p, q). t: filter tap (r, s), at most 16 x 16. x: NHWC, element strides, channel stride 1, rows
// 16-byte aligned (a channel slice of a wider tensor is fine); pixels outside the image read as zero. w: packed, (K, R * S,
// C rounded up to 16 bytes), the rest unread. y: NHWC, dense. half or bfloat16 in and out, float sums; float in and out with
// TF32 products.
//
// One block computes a tile of pixels x channels. The reduction runs over 16-byte chunks of (tap, channel), tap by tap,
// kStages tiles of it in flight. Rows are XOR-swizzled in shared memory so that ldmatrix and the copies are free of bank
// conflicts.
//
// Large tiles (128 pixels) are for many pixels. Copying a row of 16 bytes takes the bit test of its tap, one address
// and the copy: which taps of a pixel lie inside the image is found once per pixel, and a thread finds the tap of its
// chunk anew only when it leaves the old one. Layers without taps, and of few taps of whole chunks, have loops of their own
// without branches, so that copies lie between products.
//
// Small tiles are for one image, where a layer is a chain of latencies: launch, first tile from L2 (500 cycles),
// products, epilogue.
// - 20x20 pixels x 128 channels are 8 tiles of 128x64, and 104 of 32x32 on 132 multiprocessors.
// - A warp that does all products of a 32x32 tile over 3x3x128 waits for 72 of them, one after the other. Here the warps
//   of a block share the reduction: of each stage, warp group g takes the 32-byte steps g, g + kGroups, ... The sums of the
//   groups meet in shared memory and are added in the order of g, so that results do not depend on timing.
// - 5 stages of a 32x32 tile in flight are 40 KB, more than the 500 cycles x 64 bytes that L2 can deliver meanwhile; a short
//   reduction is in flight as a whole.
// - The block is launched while the kernel before still runs (dependent_launch.cuh), with all index arithmetic done.
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "device/async_copy.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/gemm_tiles.h"
#include "device/kernels.h"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/tensor_core.cuh"

// Below 8.0 the kernel's body is empty, and the constants of its tiles are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

// How a kernel finds what it copies: see TileLoader, PointwiseLoader, TapLoader.
enum class GemmLoads { kAny, kPointwise, kTaps };

template <class Element, GemmTile kTile>
struct GemmConfig {
  using T = Element;
  static constexpr int kPixels = kTile.pixels, kChannels = kTile.channels, kChunks = kTile.chunks;
  static constexpr int kStages = kTile.stages, kGroups = kTile.groups;
  static constexpr int kWarpPixels = kPixels / kTile.warps_pixels;  // one warp's part of the tile
  static constexpr int kWarpChannels = kChannels / kTile.warps_channels;
  static constexpr int kWarpColumns = kTile.warps_channels, kGroupWarps = kTile.warps_pixels * kTile.warps_channels;
  static constexpr int kThreads = 32 * kGroupWarps * kGroups;
  static constexpr int kLanes = 16 / sizeof(T);  // elements in a chunk
  static constexpr int kFragmentsPixels = kWarpPixels / 16, kFragmentsChannels = kWarpChannels / 8;
  static constexpr int kSteps = kChunks / 2 / kGroups;  // a warp's steps of 32 bytes in a stage
  // Large tiles of half read operands ahead, over the ends of stages, and write sums from registers to y. Each thread then
  // has adjacent channels, of which kStoreFragments fragments hold a pair each: see stored_channel().
  static constexpr bool kAhead = kGroups == 1 && sizeof(T) == 2;
  // Warps of 64 x 64 read a whole step ahead, the others rows of 16 pixels (see StepsAhead, RowsAhead).
  static constexpr bool kWide = kTile.wide_warps();
  static constexpr bool kFewTaps = kAhead && kChunks == 8;  // has PointwiseLoader and TapLoader, too
  static constexpr int kStoreFragments = kWarpChannels % 32 == 0 ? 4 : 2;

  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kStageBytes = (kPixels + kChannels) * kRowBytes;
  // 16 warps a multiprocessor, if they fit its shared memory, which bounds the registers, where sums of a warp leave room for
  // operands. Fewer do not hide each other's latencies: with 172 registers and 8 warps, 3x3 over 512 channels took a quarter
  // longer.
  static constexpr int kFittingBlocks =
      kTile.window ? (kThreads < 256 ? 400 / kThreads : 2) : 227 * 1024 / (kStages * kStageBytes + 1024);
  static constexpr int kBlocks = sizeof(T) != 2 || kWarpPixels * kWarpChannels > 2048 ? 1
                                 : kFittingBlocks < 512 / kThreads                    ? kFittingBlocks
                                                                                      : 512 / kThreads;
  // The finished tile goes through shared memory on its way out: rounded, or as the float sums of each group. The padding
  // shifts each row by 4 (half) or 8 (float) banks, so that a quarter warp's fragments fall into different ones.
  static constexpr int kOutRowBytes = kChannels * int(sizeof(T)) + (sizeof(T) == 2 ? 16 : 32);
  static constexpr int kSumRow = kChannels + 8;  // floats
  static constexpr int kOutBytes = kAhead ? 0 : kGroups == 1 ? kPixels * kOutRowBytes : kGroups * kPixels * kSumRow * 4;
  static constexpr int kAffineBytes = kChannels * int(sizeof(ScaleShift<float>));
  static constexpr int kTableBytes = kPixels * 6;  // see TapLoader

  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  static constexpr int kPixelPasses = (kPixels + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr int kChannelPasses = (kChannels + kRowsPerPass - 1) / kRowsPerPass;

  // Stages that a reduction never fills are not asked for: more blocks fit a multiprocessor.
  static constexpr int shared_bytes(int64_t tiles, GemmLoads loads) {
    const int pipeline = static_cast<int>(tiles < kStages ? tiles : kStages) * kStageBytes;
    return kAffineBytes + (loads == GemmLoads::kTaps ? kTableBytes : 0) + (pipeline > kOutBytes ? pipeline : kOutBytes);
  }

  static_assert(kChunks == 4 || kChunks == 8, "the swizzle is written for rows of 64 and 128 bytes");
  static_assert(kSteps >= 1 && kChunks / 2 % kGroups == 0 && kAffineBytes % 128 == 0);
  static_assert(kRowsPerPass % 8 == 0, "all rows of a thread have the same swizzle");
  static_assert(kWarpPixels % 16 == 0 && kWarpChannels % 16 == 0);
  static_assert(shared_bytes(kStages, GemmLoads::kTaps) <= 99 * 1024, "sm_86 and sm_89 have 99 KB a block");
};

struct GemmArgs {
  const void* x;
  int x_images;
  int64_t x_stride_n;
  int x_stride_h, x_stride_w;
  const void* weight;
  void* y;
  const void* residual;
  int64_t residual_stride;  // between pixels
  bool residual_vectors;  // 16-byte loads are aligned
  Affine affine;
  Act act;
  int64_t pixels;  // N * P * Q
  int out_channels;
  int64_t y_stride;
  int in_channels;
  int chunks;  // ceil(C / lanes) * R * S
  bool whole_chunks;  // C is a multiple of lanes
  bool adjacent;  // 1x1: pixels of y and of x are the same, evenly spaced
  int kernel_h, kernel_w, in_h, in_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  FastDivide by_chunks_per_tap, by_kernel_w, by_out_w, by_out_h, by_channel_tiles;
};

// Byte offset of a 16-byte chunk in a swizzled tile.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  const int mask = kChunks == 8 ? row & 7 : (row >> 1) & 3;
  return (row * kChunks + (chunk ^ mask)) * 16;
}

// The channel, counted from the tile's first, whose weights lie in row `row` of shared memory. A thread gets columns 2t and
// 2t + 1 (t = lane % 4) of each fragment of 8 channels; rows are dealt out so that its columns of kStoreFragments fragments
// are adjacent channels, which it writes with one store.
template <class Config>
__host__ __device__ constexpr int stored_channel(int row) {
  if constexpr (!Config::kAhead) {
    return row;
  } else {
    constexpr int kFragments = Config::kStoreFragments, kRows = 8 * kFragments;
    return row / kRows * kRows + row % 8 / 2 * 2 * kFragments + row % kRows / 8 * 2 + row % 2;
  }
}

// Copies tiles of the reduction to shared memory, one after the other: any convolution.
template <class Config>
class TileLoader {
 public:
  // first_pixel, first_channel: of the tile of the output. Reads no global memory.
  __device__ __forceinline__ TileLoader(const GemmArgs& args, uint32_t shared, char*, int64_t first_pixel,
                                        int first_channel)
      : args_(args), chunk_(threadIdx.x % Config::kChunks), row_(threadIdx.x / Config::kChunks) {
    shared_ = shared + swizzled<Config::kChunks>(row_, chunk_);
    if (args_.adjacent) {
      x_ = static_cast<const T*>(args_.x) + (first_pixel + row_) * args_.x_stride_w;
#pragma unroll
      for (int i = 0; i < Config::kPixelPasses; ++i) {
        offset_[i] = i * Config::kRowsPerPass * args_.x_stride_w;
        inside_[i] = first_pixel + row_ + i * Config::kRowsPerPass < args_.pixels ? 1u << 16 | 1u : 0u;
      }
    } else {
      find_pixels(first_pixel);
    }
    const int64_t weight_row = int64_t(args_.chunks) * Config::kLanes;
    const int channel = first_channel + stored_channel<Config>(row_);
    weight_ = static_cast<const T*>(args_.weight) + channel * weight_row + chunk_ * Config::kLanes;
    channels_left_ = args_.out_channels - channel;
    find_tap();
  }

  // Starts the copies of the next tile of the reduction, into stage `stage`. A copy of 0 bytes writes zeros and does not
  // touch its address, which may lie outside of the tensor.
  __device__ __forceinline__ void load(int stage) {
    const uint32_t to = shared_ + stage * Config::kStageBytes;
    if (args_.whole_chunks) {
      copy_rows<true>(to);
    } else {
      copy_rows<false>(to);
    }

    constexpr int kTileLanes = Config::kChunks * Config::kLanes;
    chunk_ += Config::kChunks;
    weight_ += kTileLanes;
    channel_ += kTileLanes;
    source_ += kTileLanes;
    if (channel_ >= args_.in_channels) {
      find_tap();
    } else {
      bytes_ = chunk_bytes();
    }
  }

 private:
  using T = typename Config::T;

  // Offsets of this thread's pixels count from the tile's first image, which keeps them in 32 bits (checked on the host).
  __device__ __forceinline__ void find_pixels(int64_t first_pixel) {
    const int64_t image_pixels = int64_t(args_.by_out_h.divisor) * args_.by_out_w.divisor;
    const int64_t first_image = first_pixel / image_pixels;
    const int start = static_cast<int>(first_pixel - first_image * image_pixels);
    x_ = static_cast<const T*>(args_.x) + first_image * args_.x_stride_n;
#pragma unroll
    for (int i = 0; i < Config::kPixelPasses; ++i) {
      const int row = row_ + i * Config::kRowsPerPass;
      int image, p, q, image_row;
      args_.by_out_w.divide(start + row, image_row, q);
      args_.by_out_h.divide(image_row, image, p);
      const int top = p * args_.stride_h - args_.pad_h, left = q * args_.stride_w - args_.pad_w;
      offset_[i] = image * static_cast<int>(args_.x_stride_n) + top * args_.x_stride_h + left * args_.x_stride_w;
      inside_[i] = 0;
      if (first_pixel + row >= args_.pixels) continue;  // behind the last pixel, no tap is inside
      for (int r = 0; r < args_.kernel_h; ++r) {
        const bool in = static_cast<unsigned>(top + r * args_.dilation_h) < static_cast<unsigned>(args_.in_h);
        inside_[i] |= uint32_t(in) << r;
      }
      for (int s = 0; s < args_.kernel_w; ++s) {
        const bool in = static_cast<unsigned>(left + s * args_.dilation_w) < static_cast<unsigned>(args_.in_w);
        inside_[i] |= uint32_t(in) << (16 + s);
      }
    }
  }

  template <int kRows>
  __device__ __forceinline__ bool is_past(int pass) const {
    return kRows % Config::kRowsPerPass != 0 && row_ + pass * Config::kRowsPerPass >= kRows;
  }

  // kWhole: all chunks are of 16 bytes, a copy has that many or none.
  template <bool kWhole>
  __device__ __forceinline__ void copy_rows(uint32_t pixels) {
    constexpr int kPassBytes = Config::kRowsPerPass * Config::kRowBytes;
    const auto copy = [&](uint32_t to, const T* from, bool valid) {
      if constexpr (kWhole) {
        copy_chunk_async(to, from, valid && bytes_ != 0);
      } else {
        copy_async(to, from, valid ? bytes_ : 0);
      }
    };
#pragma unroll
    for (int i = 0; i < Config::kPixelPasses; ++i) {
      if (is_past<Config::kPixels>(i)) break;
      copy(pixels + i * kPassBytes, source_ + offset_[i], (tap_ & ~inside_[i]) == 0);
    }
    // The rows of a thread lie in places that are alike.
    static_assert(!Config::kAhead || Config::kRowsPerPass % (8 * Config::kStoreFragments) == 0 ||
                  Config::kRowsPerPass == 16 || Config::kRowsPerPass == 8);
    const uint32_t channels = pixels + Config::kPixels * Config::kRowBytes;
#pragma unroll
    for (int i = 0; i < Config::kChannelPasses; ++i) {
      if (is_past<Config::kChannels>(i)) break;
      const int channel = stored_channel<Config>(i * Config::kRowsPerPass);  // more than that of the thread's first row
      copy(channels + i * kPassBytes, weight_ + channel * (args_.chunks * Config::kLanes), channel < channels_left_);
    }
  }

  __device__ __forceinline__ int chunk_bytes() const {
    return min(args_.in_channels - channel_, Config::kLanes) * int(sizeof(T));
  }

  // Tap and channel of chunk_.
  __device__ __forceinline__ void find_tap() {
    bytes_ = 0;
    if (chunk_ >= args_.chunks) return;
    int tap, channel_chunk, r, s;
    args_.by_chunks_per_tap.divide(chunk_, tap, channel_chunk);
    args_.by_kernel_w.divide(tap, r, s);
    channel_ = channel_chunk * Config::kLanes;
    source_ = x_ + (r * args_.dilation_h * args_.x_stride_h + s * args_.dilation_w * args_.x_stride_w + channel_);
    tap_ = 1u << r | 1u << (16 + s);
    bytes_ = chunk_bytes();
  }

  const GemmArgs& args_;
  int chunk_, row_;  // this thread's chunk of the reduction, and its first row of the tile
  uint32_t shared_;
  const T* x_;
  const T* source_;  // x_, shifted to the tap and channel of chunk_
  int channel_ = 0, bytes_;
  uint32_t tap_ = 0;  // bits r and 16 + s; inside_: those that lie inside the image
  const T* weight_;
  int channels_left_;
  int offset_[Config::kPixelPasses];
  uint32_t inside_[Config::kPixelPasses];
};

// Starts the copy of a chunk, or of zeros unless `valid`; none unless `copied`. No branch, across which ptxas would not move
// products.
__device__ __forceinline__ void copy_chunk_predicated(uint32_t to_shared, const void* from, bool copied, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred copied, ignored;\n"
      "setp.ne.s32 copied, %2, 0;\n"
      "setp.eq.s32 ignored, %3, 0;\n"
      "@copied cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}\n" ::"r"(to_shared),
      "l"(from), "r"(int(copied)), "r"(int(valid))
      : "memory");
#endif
}

// Starts the copy of a chunk, or of zeros unless set has a bit of `bits`.
__device__ __forceinline__ void copy_chunk_if(uint32_t to_shared, const void* from, uint32_t set, uint32_t bits) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      ".reg .b32 both;\n"
      "and.b32 both, %2, %3;\n"
      "setp.eq.s32 ignored, both, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}\n" ::"r"(to_shared),
      "l"(from), "r"(set), "r"(bits)
      : "memory");
#endif
}

// Starts the copy of a chunk, or of zeros unless left > kPosition; none unless `copied`. Two instructions.
template <int kPosition>
__device__ __forceinline__ void copy_chunk_before(uint32_t to_shared, const void* from, bool copied, int left) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "{\n"
      ".reg .pred copied, ignored;\n"
      "setp.ne.s32 copied, %2, 0;\n"
      "setp.le.s32 ignored, %3, %4;\n"
      "@copied cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}\n" ::"r"(to_shared),
      "l"(from), "r"(int(copied)), "r"(left), "n"(kPosition)
      : "memory");
#endif
}

template <class Function, int... kIndex>
__device__ __forceinline__ void repeat(const Function& function, std::integer_sequence<int, kIndex...>) {
  (function(std::integral_constant<int, kIndex>()), ...);
}

// A thread's weights for the loaders below: a row of the tile in each pass, next to each other in stages.
template <class Config>
class WeightLoader {
 public:
  __device__ __forceinline__ WeightLoader(const GemmArgs& args, uint32_t shared, int first_channel)
      : row_lanes_(args.chunks * Config::kLanes) {
    const int row = threadIdx.x / Config::kChunks, chunk = threadIdx.x % Config::kChunks;
    const int channel = first_channel + stored_channel<Config>(row);
    shared_ = shared + Config::kPixels * Config::kRowBytes + swizzled<Config::kChunks>(row, chunk);
    weight_ =
        static_cast<const typename Config::T*>(args.weight) + int64_t(channel) * row_lanes_ + chunk * Config::kLanes;
    channels_left_ = args.out_channels - channel;
  }

  // copied: whether the stage is one of the reduction; inside: whether the thread's chunk of it is.
  __device__ __forceinline__ void load(int stage, bool copied, bool inside) {
    static_assert(Config::kChannels % Config::kRowsPerPass == 0);
    const uint32_t to = shared_ + stage * Config::kStageBytes;
    const int left = inside ? channels_left_ : 0;
    repeat(
        [&](auto pass) {
          constexpr int kChannel = stored_channel<Config>(pass * Config::kRowsPerPass);
          copy_chunk_before<kChannel>(to + pass * Config::kRowsPerPass * Config::kRowBytes,
                                      weight_ + kChannel * row_lanes_, copied, left);
        },
        std::make_integer_sequence<int, Config::kChannelPasses>());
    weight_ += Config::kChunks * Config::kLanes;
  }

 private:
  uint32_t shared_;
  const typename Config::T* weight_;
  int row_lanes_, channels_left_;
};

// Loads of a 1x1 convolution over evenly spaced pixels and whole chunks: rows of x are a constant apart.
template <class Config>
class PointwiseLoader {
 public:
  __device__ __forceinline__ PointwiseLoader(const GemmArgs& args, uint32_t shared, char*, int64_t first_pixel,
                                             int first_channel)
      : weights_(args, shared, first_channel), stride_(args.x_stride_w) {
    const int row = threadIdx.x / Config::kChunks;
    shared_ = shared + swizzled<Config::kChunks>(row, chunk_);
    x_ = static_cast<const T*>(args.x) + (first_pixel + row) * stride_ + chunk_ * Config::kLanes;
    const int64_t pixels = args.pixels - first_pixel;
    pixels_left_ = static_cast<int>(pixels < Config::kPixels ? pixels : Config::kPixels) - row;
    chunks_left_ = args.chunks - chunk_;
  }

  __device__ __forceinline__ void load(int stage) {
    static_assert(Config::kPixels % Config::kRowsPerPass == 0);
    const uint32_t to = shared_ + stage * Config::kStageBytes;
    const bool copied = chunks_left_ + chunk_ > 0, inside = chunks_left_ > 0;
    const int left = inside ? pixels_left_ : 0;
    repeat(
        [&](auto pass) {
          constexpr int kRow = pass * Config::kRowsPerPass;
          copy_chunk_before<kRow>(to + kRow * Config::kRowBytes, x_ + kRow * stride_, copied, left);
        },
        std::make_integer_sequence<int, Config::kPixelPasses>());
    weights_.load(stage, copied, inside);
    x_ += kTileLanes;
    chunks_left_ -= Config::kChunks;
  }

  // The last chunk of an odd number of channels was copied whole, which stays inside of 16 aligned bytes; what lies behind
  // the last channel becomes zero. By the threads that copied it, when the copies have arrived. Rare, so short.
  __device__ __forceinline__ void clear_tail(const GemmArgs& args, char* stage) const {
    if (chunk_ != (args.chunks - 1) % Config::kChunks) return;
    char* const copied = stage + swizzled<Config::kChunks>(threadIdx.x / Config::kChunks, chunk_);
#pragma unroll 1
    for (int pass = 0; pass < Config::kPixelPasses + Config::kChannelPasses; ++pass) {
      T* const row = reinterpret_cast<T*>(copied + pass * Config::kRowsPerPass * Config::kRowBytes);
#pragma unroll 1
      for (int e = args.in_channels % Config::kLanes; e < Config::kLanes; ++e) row[e] = convert<T>(0.0f);
    }
  }

 private:
  using T = typename Config::T;
  static constexpr int kTileLanes = Config::kChunks * Config::kLanes;
  WeightLoader<Config> weights_;
  const int chunk_ = threadIdx.x % Config::kChunks;
  uint32_t shared_;
  const T* x_;
  int stride_, pixels_left_, chunks_left_;
};

// Loads of few_taps(). Where pixels lie, and which of their taps are inside the image, is found by one thread each and kept
// in shared memory: in registers it would be 16 of each thread, which warps of 64 x 64 do not have.
// A thread goes from tap to tap by addition.
template <class Config>
class TapLoader {
 public:
  // tables: kTableBytes of shared memory. Ends with a barrier.
  __device__ __forceinline__ TapLoader(const GemmArgs& args, uint32_t shared, char* tables, int64_t first_pixel,
                                       int first_channel)
      : args_(args), weights_(args, shared, first_channel) {
    // Offsets count from the tile's first image, which keeps them in 32 bits (checked on the host).
    const int64_t image_pixels = int64_t(args.by_out_h.divisor) * args.by_out_w.divisor;
    const int64_t first_image = first_pixel / image_pixels;
    const int start = static_cast<int>(first_pixel - first_image * image_pixels);
    int* const offsets = reinterpret_cast<int*>(tables);
    uint16_t* const insides = reinterpret_cast<uint16_t*>(tables + Config::kPixels * 4);
    for (int i = threadIdx.x; i < Config::kPixels; i += Config::kThreads) {
      int image, p, q, image_row;
      args.by_out_w.divide(start + i, image_row, q);
      args.by_out_h.divide(image_row, image, p);
      const int top = p * args.stride_h - args.pad_h, left = q * args.stride_w - args.pad_w;
      uint32_t inside = 0, tap = 1;
      for (int r = 0; r < args.kernel_h; ++r) {
        const bool in_h = static_cast<unsigned>(top + r * args.dilation_h) < static_cast<unsigned>(args.in_h);
        for (int s = 0; s < args.kernel_w; ++s, tap <<= 1) {
          const bool in_w = static_cast<unsigned>(left + s * args.dilation_w) < static_cast<unsigned>(args.in_w);
          if (in_h && in_w) inside |= tap;
        }
      }
      // The rows of a thread are adjacent.
      const int place = i % Config::kRowsPerPass * Config::kPixelPasses + i / Config::kRowsPerPass;
      offsets[place] = image * static_cast<int>(args.x_stride_n) + top * args.x_stride_h + left * args.x_stride_w;
      insides[place] = static_cast<uint16_t>(first_pixel + i < args.pixels ? inside : 0);
    }
    const int row = threadIdx.x / Config::kChunks, chunk = threadIdx.x % Config::kChunks;
    shared_ = shared + swizzled<Config::kChunks>(row, chunk);
    offsets_ = offsets + row * Config::kPixelPasses;
    insides_ = reinterpret_cast<const uint32_t*>(insides + row * Config::kPixelPasses);
    taps_ = (1u << (args.kernel_h * args.kernel_w)) - 1;
    const int column_step = args.dilation_w * args.x_stride_w;
    tap_step_ = column_step - args.in_channels;
    filter_row_step_ = args.dilation_h * args.x_stride_h - args.kernel_w * column_step;
    channel_ = chunk * Config::kLanes;
    source_ = static_cast<const T*>(args.x) + first_image * args.x_stride_n + channel_;
    __syncthreads();
  }

  __device__ __forceinline__ void load(int stage) {
    static_assert(Config::kPixels % Config::kRowsPerPass == 0 && Config::kPixelPasses % 4 == 0);
    const uint32_t to = shared_ + stage * Config::kStageBytes;
    const uint32_t tap = tap_ & taps_, odd_tap = tap << 16;
#pragma unroll
    for (int i = 0; i < Config::kPixelPasses; i += 4) {
      const int4 offset = *reinterpret_cast<const int4*>(offsets_ + i);
      const uint2 inside = *reinterpret_cast<const uint2*>(insides_ + i / 2);
      constexpr int kPassBytes = Config::kRowsPerPass * Config::kRowBytes;
      copy_chunk_if(to + i * kPassBytes, source_ + offset.x, inside.x, tap);
      copy_chunk_if(to + (i + 1) * kPassBytes, source_ + offset.y, inside.x, odd_tap);
      copy_chunk_if(to + (i + 2) * kPassBytes, source_ + offset.z, inside.y, tap);
      copy_chunk_if(to + (i + 3) * kPassBytes, source_ + offset.w, inside.y, odd_tap);
    }
    weights_.load(stage, true, tap != 0);
    // Without branches, across which ptxas would not move products.
    channel_ += kTileLanes;
    const bool next_tap = channel_ >= args_.in_channels;
    column_ += next_tap;
    const bool next_row = column_ == args_.kernel_w;
    source_ += kTileLanes + (next_tap ? tap_step_ : 0) + (next_row ? filter_row_step_ : 0);
    channel_ -= next_tap ? args_.in_channels : 0;
    tap_ <<= next_tap;
    column_ = next_row ? 0 : column_;
  }

 private:
  using T = typename Config::T;

  static constexpr int kTileLanes = Config::kChunks * Config::kLanes;

  const GemmArgs& args_;
  WeightLoader<Config> weights_;
  uint32_t shared_;
  const int* offsets_;
  const uint32_t* insides_;  // two rows in each
  const T* source_;  // x, shifted to the tap and channel of the thread's chunk
  int channel_, column_ = 0, tap_step_, filter_row_step_;
  uint32_t tap_ = 1, taps_;  // a bit of the tap of the thread's chunk; bits of all
};

template <class Config>
struct Accumulators {
  float value[Config::kFragmentsPixels][Config::kFragmentsChannels][4];
};

// Operands of one step of 32 bytes.
template <class Config>
struct Fragments {
  uint32_t a[Config::kFragmentsPixels][4], b[Config::kFragmentsChannels / 2][4];

  // pixels, channels: this lane's addresses in the first 16 rows of each operand, for load_matrices. The swizzle repeats
  // after 8 rows.
  __device__ __forceinline__ void load(uint32_t pixels, uint32_t channels) {
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) load_matrices(a[i], pixels + i * 16 * Config::kRowBytes);
#pragma unroll
    for (int j = 0; j < Config::kFragmentsChannels / 2; ++j) {
      load_matrices(b[j], channels + j * 16 * Config::kRowBytes);
    }
  }

  __device__ __forceinline__ void multiply(Accumulators<Config>& sum) {
    if constexpr (sizeof(typename Config::T) == 4) {
#pragma unroll
      for (auto& fragment : a) {
#pragma unroll
        for (uint32_t& bits : fragment) bits = round_to_tf32(bits);
      }
#pragma unroll
      for (auto& fragment : b) {
#pragma unroll
        for (uint32_t& bits : fragment) bits = round_to_tf32(bits);
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kFragmentsChannels; ++j) {
        multiply_add<typename Config::T>(sum.value[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

// Where a warp works in the tile.
template <class Config>
struct WarpPlace {
  int group, row, column;  // of the reduction; first pixel, first channel

  __device__ __forceinline__ explicit WarpPlace(int warp)
      : group(warp / Config::kGroupWarps),
        row(warp % Config::kGroupWarps / Config::kWarpColumns * Config::kWarpPixels),
        column(warp % Config::kWarpColumns * Config::kWarpChannels) {}

  // This lane's rows and 16-byte chunk in a step, as load_matrices wants them.
  __device__ __forceinline__ int pixel() const { return row + threadIdx.x % 16; }
  __device__ __forceinline__ int pixel_chunk() const { return threadIdx.x % 32 / 16; }
  __device__ __forceinline__ int channel() const { return column + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8; }
  __device__ __forceinline__ int channel_chunk() const { return threadIdx.x / 8 % 2; }
};

// Step `step` of 32 bytes of the stage at `stage`. A step moves a chunk by two, which is one exclusive or of its address.
template <class Config>
__device__ __forceinline__ void load_step(Fragments<Config>& fragments, uint32_t stage, const WarpPlace<Config>& place,
                                          int step) {
  constexpr int kChunks = Config::kChunks;
  fragments.load(stage + (swizzled<kChunks>(place.pixel(), place.pixel_chunk()) ^ step * 32),
                 stage + Config::kPixels * Config::kRowBytes +
                     (swizzled<kChunks>(place.channel(), place.channel_chunk()) ^ step * 32));
}

// One stage's products: this warp's part of the tile and of the stage. The operands of a step are on their way from
// shared memory while the step before is multiplied. start_copies: of the stage that is refilled. After the first products,
// since all warps come from a barrier and would leave the tensor cores idle together; before them where a block is a chain
// of latencies.
template <class Config, class StartCopies>
__device__ __forceinline__ void multiply_stage(Accumulators<Config>& sum, uint32_t stage,
                                               const WarpPlace<Config>& place, const StartCopies& start_copies) {
  constexpr bool kCopiesFirst = Config::kGroups > 1;
  Fragments<Config> fragments[2];
  if constexpr (kCopiesFirst) start_copies();
  load_step(fragments[0], stage, place, place.group);
#pragma unroll
  for (int i = 0; i < Config::kSteps; ++i) {
    if (i + 1 < Config::kSteps) {
      load_step(fragments[(i + 1) % 2], stage, place, place.group + (i + 1) * Config::kGroups);
    }
    fragments[i % 2].multiply(sum);
    if (i == 0 && !kCopiesFirst) start_copies();
  }
}

// kSilu: scale and shift are half of the block's for half outputs (see silu_of_half).
template <class T, bool kSilu>
__device__ __forceinline__ float finish(float sum, const ScaleShift<float>& affine) {
  const float u = fmaf(sum, affine.scale, affine.shift);
  if constexpr (!kSilu) {
    return u;
  } else if constexpr (sizeof(T) == 2) {
    return silu_of_half(u);
  } else {
    return activate<T>(u, Act::kSilu);
  }
}

template <class T>
__device__ __forceinline__ void store_pair(char* shared, float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(shared) = __floats2half2_rn(first, second);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(shared) = __floats2bfloat162_rn(first, second);
  } else {
    *reinterpret_cast<float2*>(shared) = make_float2(first, second);
  }
}

// Scale, shift and activation on the accumulators, then the rounded tile into shared memory.
template <class Config, bool kSilu>
__device__ __forceinline__ void finish_tile(const Accumulators<Config>& sum, const ScaleShift<float>* affine, char* out,
                                            const WarpPlace<Config>& place) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Config::kFragmentsChannels; ++j) {
    const int column = place.column + j * 8 + lane % 4 * 2;
    const ScaleShift<float> first = affine[column], second = affine[column + 1];
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row + i * 16 + half * 8 + lane / 4;
        store_pair<T>(out + row * Config::kOutRowBytes + column * int(sizeof(T)),
                      finish<T, kSilu>(sum.value[i][j][half * 2], first),
                      finish<T, kSilu>(sum.value[i][j][half * 2 + 1], second));
      }
    }
  }
}

// The float sums of one group of the reduction into shared memory.
template <class Config>
__device__ __forceinline__ void put_sums(const Accumulators<Config>& sum, float* out, const WarpPlace<Config>& place) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kFragmentsChannels; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.group * Config::kPixels + place.row + i * 16 + half * 8 + lane / 4;
        *reinterpret_cast<float2*>(out + row * Config::kSumRow + place.column + j * 8 + lane % 4 * 2) =
            make_float2(sum.value[i][j][half * 2], sum.value[i][j][half * 2 + 1]);
      }
    }
  }
}

template <class T>
union Chunk {
  uint4 bits;
  T element[16 / sizeof(T)];
};

// A finished chunk of the tile from shared memory: rounded already, or to be summed over the groups.
template <class Config, bool kSilu>
__device__ __forceinline__ Chunk<typename Config::T> take_chunk(const char* out, const ScaleShift<float>* affine,
                                                                int row, int column) {
  using T = typename Config::T;
  Chunk<T> value;
  if constexpr (Config::kGroups == 1) {
    value.bits = *reinterpret_cast<const uint4*>(out + row * Config::kOutRowBytes + column * int(sizeof(T)));
  } else {
    const float* sums = reinterpret_cast<const float*>(out) + row * Config::kSumRow + column;
#pragma unroll
    for (int e = 0; e < Config::kLanes; e += 4) {
      float4 total = *reinterpret_cast<const float4*>(sums + e);
#pragma unroll
      for (int group = 1; group < Config::kGroups; ++group) {
        const float4 part = *reinterpret_cast<const float4*>(sums + group * Config::kPixels * Config::kSumRow + e);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      value.element[e] = convert<T>(finish<T, kSilu>(total.x, affine[column + e]));
      value.element[e + 1] = convert<T>(finish<T, kSilu>(total.y, affine[column + e + 1]));
      value.element[e + 2] = convert<T>(finish<T, kSilu>(total.z, affine[column + e + 2]));
      value.element[e + 3] = convert<T>(finish<T, kSilu>(total.w, affine[column + e + 3]));
    }
  }
  return value;
}

// The tile from shared to global memory, 16 bytes at a time where rows of y are 16-byte aligned (y itself is), but for the
// last channels of an odd width; plus the residual. As in stock, the activated value is rounded before the residual is
// added.
// pixel_of(row): which pixel of y a row of the tile is; negative: none.
template <class Config, bool kSilu, class PixelOf>
__device__ __forceinline__ void write_tile(const GemmArgs& args, const char* out, const ScaleShift<float>* affine,
                                           const PixelOf& pixel_of, int first_channel) {
  using T = typename Config::T;
  constexpr int kRowChunks = Config::kChannels / Config::kLanes;
  const bool aligned = args.y_stride % Config::kLanes == 0;
  // Of most layers and tiles: whole chunks, no residual, a thread's chunks all in one column.
  if constexpr (Config::kThreads % kRowChunks == 0 && Config::kGroups == 1) {
    if (aligned && args.residual == nullptr && args.out_channels % Config::kLanes == 0) {
      constexpr int kRowStep = Config::kThreads / kRowChunks;
      const int column = threadIdx.x % kRowChunks * Config::kLanes, first_row = threadIdx.x / kRowChunks;
      if (first_channel + column >= args.out_channels) return;
      T* const y = static_cast<T*>(args.y) + first_channel + column;
      out += first_row * Config::kOutRowBytes + column * int(sizeof(T));
#pragma unroll
      for (int i = 0; i < (Config::kPixels + kRowStep - 1) / kRowStep; ++i) {
        const int row = first_row + i * kRowStep;
        if (Config::kPixels % kRowStep != 0 && row >= Config::kPixels) break;
        const int64_t pixel = pixel_of(row);
        if (pixel < 0) continue;
        *reinterpret_cast<uint4*>(y + pixel * args.y_stride) =
            *reinterpret_cast<const uint4*>(out + i * kRowStep * Config::kOutRowBytes);
      }
      return;
    }
  }
#pragma unroll 4
  for (int index = threadIdx.x; index < Config::kPixels * kRowChunks; index += Config::kThreads) {
    const int row = index / kRowChunks, column = index % kRowChunks * Config::kLanes;
    const int64_t pixel = pixel_of(row);
    const int channel = first_channel + column;
    if (pixel < 0 || channel >= args.out_channels) continue;
    Chunk<T> value = take_chunk<Config, kSilu>(out, affine, row, column);
    T* y = static_cast<T*>(args.y) + pixel * args.y_stride + channel;
    const T* residual = static_cast<const T*>(args.residual) + pixel * args.residual_stride + channel;
    if (aligned && channel + Config::kLanes <= args.out_channels) {
      if (args.residual != nullptr) {
        Chunk<T> added;
        if (args.residual_vectors) {
          added.bits = *reinterpret_cast<const uint4*>(residual);
        } else {
#pragma unroll
          for (int e = 0; e < Config::kLanes; ++e) added.element[e] = residual[e];
        }
#pragma unroll
        for (int e = 0; e < Config::kLanes; ++e) {
          value.element[e] = convert<T>(convert<float>(value.element[e]) + convert<float>(added.element[e]));
        }
      }
      *reinterpret_cast<uint4*>(y) = value.bits;
    } else {
#pragma unroll
      for (int e = 0; e < Config::kLanes; ++e) {
        if (channel + e >= args.out_channels) break;
        const float added = args.residual != nullptr ? convert<float>(residual[e]) : 0.0f;
        y[e] = args.residual != nullptr ? convert<T>(convert<float>(value.element[e]) + added) : value.element[e];
      }
    }
  }
}

template <class Config, bool kSilu, class PixelOf>
__device__ __forceinline__ void finish_and_write(const GemmArgs& args, const Accumulators<Config>& sum,
                                                 const ScaleShift<float>* affine, char* out,
                                                 const WarpPlace<Config>& place, const PixelOf& pixel_of,
                                                 int first_channel) {
  if constexpr (Config::kGroups == 1) {
    finish_tile<Config, kSilu>(sum, affine, out, place);
  } else {
    put_sums<Config>(sum, reinterpret_cast<float*>(out), place);
  }
  __syncthreads();
  write_tile<Config, kSilu>(args, out, affine, pixel_of, first_channel);
}

template <class Config, class PixelOf>
__device__ __forceinline__ void epilogue(const GemmArgs& args, const Accumulators<Config>& sum,
                                         const ScaleShift<float>* affine, char* out, const WarpPlace<Config>& place,
                                         const PixelOf& pixel_of, int first_channel) {
  if (args.act == Act::kSilu) {
    finish_and_write<Config, true>(args, sum, affine, out, place, pixel_of, first_channel);
  } else {
    finish_and_write<Config, false>(args, sum, affine, out, place, pixel_of, first_channel);
  }
}

// Scale, shift, activation, residual and store of a thread's sums, straight from registers: 64 bytes, two sectors of L2, of
// a pixel by four threads (32 where a warp's channels are no multiple of 32). As in stock, the activated value is rounded
// before the residual is added. pixel_of(row): which pixel of y a row of the tile is; negative: none.
// kPlain: whole stores and no residual, as of most layers. Code of its own, since what it leaves out is most of the other, and
// instructions that are jumped over are fetched all the same.
template <class Config, bool kSilu, bool kPlain, class PixelOf>
__device__ __forceinline__ void store_sums(const GemmArgs& args, const Accumulators<Config>& sum,
                                           const ScaleShift<float>* affine, const WarpPlace<Config>& place,
                                           const PixelOf& pixel_of, int first_channel) {
  using T = typename Config::T;
  constexpr int kFragments = Config::kStoreFragments, kWidth = 2 * kFragments;  // channels of a store
  using Vector = std::conditional_t<kFragments == 4, uint4, uint2>;
  union Values {
    Vector bits;
    T element[kWidth];
  };
  const int lane = threadIdx.x % 32;
  [[maybe_unused]] const bool aligned = args.y_stride % Config::kLanes == 0;
#pragma unroll
  for (int group = 0; group < Config::kFragmentsChannels / kFragments; ++group) {
    const int column = place.column + group * 8 * kFragments + lane % 4 * kWidth, channel = first_channel + column;
    if (channel >= args.out_channels) continue;
    const bool whole = kPlain || (aligned && channel + kWidth <= args.out_channels);
    ScaleShift<float> folded[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; e += 2) {
      *reinterpret_cast<float4*>(folded + e) = *reinterpret_cast<const float4*>(affine + column + e);
    }
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t pixel = pixel_of(place.row + i * 16 + half * 8 + lane / 4);
        if (pixel < 0) continue;
        Values value;
#pragma unroll
        for (int e = 0; e < kWidth; e += 2) {
          const float* const pair = sum.value[i][group * kFragments + e / 2] + half * 2;
          store_pair<T>(reinterpret_cast<char*>(value.element + e), finish<T, kSilu>(pair[0], folded[e]),
                        finish<T, kSilu>(pair[1], folded[e + 1]));
        }
        T* const y = static_cast<T*>(args.y) + pixel * args.y_stride + channel;
        const T* const residual = static_cast<const T*>(args.residual) + pixel * args.residual_stride + channel;
        if (whole) {
          if (!kPlain && args.residual != nullptr) {
            Values added;
            if (args.residual_vectors) {
              added.bits = *reinterpret_cast<const Vector*>(residual);
            } else {
#pragma unroll
              for (int e = 0; e < kWidth; ++e) added.element[e] = residual[e];
            }
#pragma unroll
            for (int e = 0; e < kWidth; ++e) {
              value.element[e] = convert<T>(convert<float>(value.element[e]) + convert<float>(added.element[e]));
            }
          }
          *reinterpret_cast<Vector*>(y) = value.bits;
        } else {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            if (channel + e >= args.out_channels) break;
            const float added = args.residual != nullptr ? convert<float>(residual[e]) : 0.0f;
            y[e] = args.residual != nullptr ? convert<T>(convert<float>(value.element[e]) + added) : value.element[e];
          }
        }
      }
    }
  }
}

// kPlain: with code of its own for plain stores.
template <class Config, bool kPlain, class PixelOf>
__device__ __forceinline__ void store_tile(const GemmArgs& args, const Accumulators<Config>& sum,
                                           const ScaleShift<float>* affine, const WarpPlace<Config>& place,
                                           const PixelOf& pixel_of, int first_channel) {
  const auto store = [&](auto silu, auto plain) {
    store_sums<Config, decltype(silu)::value, decltype(plain)::value>(args, sum, affine, place, pixel_of,
                                                                      first_channel);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  const bool silu = args.act == Act::kSilu;
  if (kPlain && args.residual == nullptr && args.y_stride % Config::kLanes == 0 &&
      args.out_channels % Config::kLanes == 0) {
    silu ? store(kYes, kYes) : store(kNo, kYes);
  } else {
    silu ? store(kYes, kNo) : store(kNo, kNo);
  }
}

// Operands of a warp that multiplies 16 of its pixels after the other, on their way from shared memory two such rows ahead,
// over the ends of stages: in half the registers of two whole steps.
template <class Config>
struct RowsAhead {
  static constexpr int kRows = Config::kFragmentsPixels, kUnits = Config::kSteps * kRows;  // of a stage
  static constexpr int kPairs = Config::kFragmentsChannels / 2;
  static_assert(kRows >= 2 && Config::kSteps % 2 == 0);
  uint32_t a[3][4], b[2][kPairs][4];

  __device__ __forceinline__ void load_row(int to, uint32_t stage, const WarpPlace<Config>& place, int unit) {
    load_matrices(a[to], stage + (swizzled<Config::kChunks>(place.pixel(), place.pixel_chunk()) ^ unit / kRows * 32) +
                             unit % kRows * 16 * Config::kRowBytes);
  }
  __device__ __forceinline__ void load_pair(uint32_t stage, const WarpPlace<Config>& place, int step, int pair) {
    load_matrices(b[step % 2][pair],
                  stage + Config::kPixels * Config::kRowBytes +
                      (swizzled<Config::kChunks>(place.channel(), place.channel_chunk()) ^ step * 32) +
                      pair * 16 * Config::kRowBytes);
  }

  __device__ __forceinline__ void begin(uint32_t stage, const WarpPlace<Config>& place) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) load_pair(stage, place, 0, pair);
    load_row(0, stage, place, 0);
    load_row(1, stage, place, 1);
  }

  // The products of a stage. next: the stage after it; wait_for_next: until that is there for all threads, which are then
  // done with reading this one. start_copies: into the stage before this one.
  template <class Wait, class StartCopies>
  __device__ __forceinline__ void multiply(Accumulators<Config>& sum, uint32_t stage, uint32_t next,
                                           const WarpPlace<Config>& place, const Wait& wait_for_next,
                                           const StartCopies& start_copies) {
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int step = unit / kRows, row = unit % kRows, ahead = unit + 2;
      if (unit == kUnits - 2) wait_for_next();
      load_row(2, ahead < kUnits ? stage : next, place, ahead % kUnits);
      // Channels of the next step, shared out among this one's rows; of the next stage, among the last two rows.
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        if (step + 1 < Config::kSteps) {
          if (pair * kRows / kPairs == row) load_pair(stage, place, step + 1, pair);
        } else if (pair * 2 / kPairs == unit - (kUnits - 2)) {
          load_matrices(b[(step + 1) % 2][pair], next + Config::kPixels * Config::kRowBytes +
                                                     swizzled<Config::kChunks>(place.channel(), place.channel_chunk()) +
                                                     pair * 16 * Config::kRowBytes);
        }
      }
#pragma unroll
      for (int j = 0; j < Config::kFragmentsChannels; ++j) {
        multiply_add<typename Config::T>(sum.value[row][j], a[0], b[step % 2][j / 2][j % 2 * 2],
                                         b[step % 2][j / 2][j % 2 * 2 + 1]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) a[0][e] = a[1][e], a[1][e] = a[2][e];
      if (unit == 0) start_copies();
    }
  }
};

// Operands a whole step ahead, over the ends of stages; interface as RowsAhead.
template <class Config>
struct StepsAhead {
  static_assert(Config::kSteps % 2 == 0);
  Fragments<Config> fragments[2];

  __device__ __forceinline__ void begin(uint32_t stage, const WarpPlace<Config>& place) {
    load_step(fragments[0], stage, place, 0);
  }

  template <class Wait, class StartCopies>
  __device__ __forceinline__ void multiply(Accumulators<Config>& sum, uint32_t stage, uint32_t next,
                                           const WarpPlace<Config>& place, const Wait& wait_for_next,
                                           const StartCopies& start_copies) {
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const bool last = step + 1 == Config::kSteps;
      if (last) wait_for_next();
      load_step(fragments[(step + 1) % 2], last ? next : stage, place, last ? 0 : step + 1);
      fragments[step % 2].multiply(sum);
      if (step == 0) start_copies();
    }
  }
};

template <class Config, GemmLoads kLoads>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void implicit_gemm_kernel(const __grid_constant__ GemmArgs args) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  let_later_kernels_start();
  // Channel tiles of the same pixels run next to each other, so that x comes from L2 after the first.
  int pixel_tile, channel_tile;
  args.by_channel_tiles.divide(static_cast<int>(blockIdx.x), pixel_tile, channel_tile);
  const int64_t first_pixel = int64_t(pixel_tile) * Config::kPixels;
  const int first_channel = channel_tile * Config::kChannels;
  const WarpPlace<Config> place(threadIdx.x / 32);

  auto* affine = reinterpret_cast<ScaleShift<float>*>(shared);
  using Loader =
      std::conditional_t<kLoads == GemmLoads::kPointwise, PointwiseLoader<Config>,
                         std::conditional_t<kLoads == GemmLoads::kTaps, TapLoader<Config>, TileLoader<Config>>>;
  char* const tables = shared + Config::kAffineBytes;
  char* out = tables + (kLoads == GemmLoads::kTaps ? Config::kTableBytes : 0);
  const uint32_t pipeline = shared_address(out);
  Loader loader(args, pipeline, tables, first_pixel, first_channel);
  const int tiles = (args.chunks + Config::kChunks - 1) / Config::kChunks;
  static_assert(Config::kChannels <= Config::kThreads, "a thread folds one channel");
  const int folded_channel = first_channel + static_cast<int>(threadIdx.x);
  const int folded_channels = min(args.out_channels, first_channel + Config::kChannels);
  wait_for_earlier_kernels();
  ChannelBits bits;
  // Not in float, where a tile of 64 x 16 would spill and layers are longer.
  constexpr bool kLoadsEarly = sizeof(typename Config::T) == 2;
  if constexpr (kLoadsEarly) bits = load_for_epilogue(args.affine, folded_channel, folded_channels);
#pragma unroll
  for (int stage = 0; stage < Config::kStages - 1; ++stage) {
    if (stage < tiles) loader.load(stage);
    commit_async_copies();  // also an empty group, which keeps the count that wait_for_async_copies relies on
  }
  const bool halved = args.act == Act::kSilu && sizeof(typename Config::T) == 2;  // see finish()
  if constexpr (kLoadsEarly) {
    if (threadIdx.x < Config::kChannels) {
      affine[threadIdx.x] = fold_for_epilogue(args.affine, bits, folded_channel, folded_channels, halved);
    }
  } else {
    for (int c = threadIdx.x; c < Config::kChannels; c += Config::kThreads) {
      affine[c] = fold_for_epilogue(args.affine, first_channel + c, args.out_channels, halved);
    }
  }

  const auto pixel_of = [&](int row) {
    const int64_t pixel = first_pixel + row;
    return pixel < args.pixels ? pixel : -1;
  };
  // Until the next stage is there for all threads, and all are done with the one that is refilled next.
  const auto wait_for = [&]([[maybe_unused]] int tile, [[maybe_unused]] int stage) {
    wait_for_async_copies<Config::kStages - 2>();
    if constexpr (kLoads == GemmLoads::kPointwise) {
      if (tile == tiles - 1 && !args.whole_chunks) loader.clear_tail(args, out + stage * Config::kStageBytes);
    }
    __syncthreads();
  };
  Accumulators<Config> sum = {};
  int stage = 0, free_stage = Config::kStages - 1, tile = 0;
  const auto start_copies = [&] {
    // Behind the last stage the loaders copy nothing or zeros, which is less than a branch between the products.
    if (kLoads != GemmLoads::kAny || tile + Config::kStages - 1 < tiles) loader.load(free_stage);
    commit_async_copies();
  };
  if constexpr (Config::kAhead) {
    std::conditional_t<Config::kWide, StepsAhead<Config>, RowsAhead<Config>> ahead;
    wait_for(0, 0);
    ahead.begin(pipeline, place);
    for (; tile < tiles; ++tile) {
      const int following = stage + 1 == Config::kStages ? 0 : stage + 1;
      // Behind the last stage operands are read, too, but not used.
      const int next = tile + 1 < tiles ? following : stage;
      ahead.multiply(
          sum, pipeline + stage * Config::kStageBytes, pipeline + next * Config::kStageBytes, place,
          [&] { wait_for(tile + 1, next); }, start_copies);
      free_stage = stage;
      stage = following;
    }
    if constexpr (kLoads == GemmLoads::kTaps) wait_for_async_copies<0>();  // a block does not end before its copies
    // In a TileLoader's kernel both would spill 4 bytes.
    store_tile<Config, kLoads != GemmLoads::kAny>(args, sum, affine, place, pixel_of, first_channel);
  } else {
    for (; tile < tiles; ++tile) {
      wait_for(tile, stage);
      multiply_stage<Config>(sum, pipeline + stage * Config::kStageBytes, place, start_copies);
      free_stage = stage;
      stage = stage + 1 == Config::kStages ? 0 : stage + 1;
    }
    wait_for_async_copies<0>();
    __syncthreads();  // the pipeline's memory becomes the output tile
    epilogue<Config>(args, sum, affine, out, place, pixel_of, first_channel);
  }
#endif
}

// 3x3, stride 1, padding 1: a window of pixels lies in shared memory for all nine taps. Of a tile of 256 pixels x 64
// channels that is a sixth of the copies, of which L2 could not deliver more.
//
// Output pixels are counted as if every row had one more pixel and every image one more row, zeros all: m = (image (H + 1) +
// p) (W + 1) + q. Then the tap (r, s) of every m is m + (r - 1) (W + 1) + s - 1, and a tile is any 128 or 256 adjacent m,
// of which 1 / W + 1 / H are computed in vain. The reduction runs over blocks of 64 bytes of channels: a window of each,
// two of them in shared memory, and weights in stages of one filter row.
template <class Element, GemmTile kTile>
struct WindowConfig : GemmConfig<Element, kTile> {
  using Base = GemmConfig<Element, kTile>;
  static constexpr int kTaps = 3;  // of a filter row
  static constexpr int kBlockLanes = Base::kChunks * Base::kLanes;  // channels of a block
  static constexpr int kWeightRows = kTaps * Base::kChannels;
  static constexpr int kStageBytes = kWeightRows * Base::kRowBytes;
  static constexpr int kWeightPasses = (kWeightRows + Base::kRowsPerPass - 1) / Base::kRowsPerPass;
  // A window's copies are started with the first filter rows of the block before; those of the last row would come late.
  static constexpr int kWindowParts = kTaps + 2 - Base::kStages;

  static constexpr int window_rows(int width) { return Base::kPixels + 2 * width + 4; }
  static constexpr int table_bytes(int width) { return (window_rows(width) + Base::kPixels + 32) / 32 * 128; }
  static constexpr int shared_bytes(int width, int channels) { return window_bytes(kTile, width, channels); }

  static_assert(Base::kChunks == 4 && Base::kGroups == 1 && (Base::kStages == 2 || Base::kStages == 3));
};

// Copies windows and weights.
template <class Config>
class WindowLoader {
  using T = typename Config::T;

 public:
  // rows: offsets of the window's rows in x, in 16 bytes, negative: zeros. Reads no global memory.
  __device__ __forceinline__ WindowLoader(const GemmArgs& args, int first_channel, const T* x, const int* rows,
                                          int window_rows, uint32_t weights, uint32_t windows)
      : args_(args), rows_(rows), window_rows_(window_rows), weight_row_(args.chunks / 9 * Config::kLanes) {
    const int swizzle = swizzled<Config::kChunks>(row_, chunk_);
    weights_ = weights + swizzle;
    windows_ = windows + swizzle;
    x_ = x + chunk_ * Config::kLanes;
    weight_ = static_cast<const T*>(args.weight) + int64_t(first_channel) * 9 * weight_row_ + chunk_ * Config::kLanes;
    channels_left_ = args.out_channels - first_channel;
    if constexpr (!kEvenPasses) {
#pragma unroll
      for (int i = 0; i < Config::kWeightPasses; ++i) {
        const int row = row_ + i * Config::kRowsPerPass, tap = row / Config::kChannels;
        const int k = stored_channel<Config>(row % Config::kChannels);
        weight_offset_[i] = row < Config::kWeightRows && k < channels_left_ ? (k * 9 + tap) * weight_row_ : -1;
      }
    } else {
      weight_ += stored_channel<Config>(row_) * 9 * weight_row_;
      channels_left_ -= stored_channel<Config>(row_);
    }
  }

  // Filter row r of a block of channels, into stage `stage`; none behind the last block.
  __device__ __forceinline__ void load_weights(int block, int r, int stage) {
    const T* const from = weight_ + r * Config::kTaps * weight_row_ + block * Config::kBlockLanes;
    const uint32_t to = weights_ + stage * Config::kStageBytes;
    const bool copied = block * Config::kBlockLanes < args_.in_channels;
    const bool inside = block * Config::kBlockLanes + chunk_ * Config::kLanes < args_.in_channels;
#pragma unroll
    for (int i = 0; i < Config::kWeightPasses; ++i) {
      if (Config::kWeightRows % Config::kRowsPerPass != 0 && row_ + i * Config::kRowsPerPass >= Config::kWeightRows) {
        break;
      }
      if constexpr (kEvenPasses) {
        const int tap = i * Config::kRowsPerPass / Config::kChannels;
        const int k = stored_channel<Config>(i * Config::kRowsPerPass % Config::kChannels);
        copy_chunk_predicated(to + i * kPassBytes, from + (k * 9 + tap) * weight_row_, copied,
                              inside && k < channels_left_);
      } else {
        copy_chunk_predicated(to + i * kPassBytes, from + weight_offset_[i], copied, inside && weight_offset_[i] >= 0);
      }
    }
  }

  // Part `part` of `parts` of the window of a block of channels; none if part >= parts, or behind the last block. Offsets
  // of kBatch rows are read before the first of them is used.
  __device__ __forceinline__ void load_window(int block, int part, int parts) {
    constexpr int kBatch = 5;
    const int passes = (window_rows_ + Config::kRowsPerPass - 1) / Config::kRowsPerPass;
    const int channel = block * Config::kBlockLanes + chunk_ * Config::kLanes;
    // The second half of the last block is not multiplied if it is empty.
    const bool copied = part < parts && args_.in_channels - (channel & ~(2 * Config::kLanes - 1)) > 0;
    // Narrow warps, which serve few channels and so few blocks, lose more by copies of nothing than by a branch.
    if (!Config::kWide && !copied) return;
    const int first = passes * part / parts, last = copied ? passes * (part + 1) / parts : 0;
    const bool inside = channel < args_.in_channels;
    const T* const from = x_ + block * Config::kBlockLanes;
    const uint32_t to = windows_ + block % 2 * window_rows_ * Config::kRowBytes;
    const auto copy_batch = [&](int pass) {
      int chunks[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        chunks[i] = rows_[min(row_ + (pass + i) * Config::kRowsPerPass, window_rows_ - 1)];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool there = pass + i < last && row_ + (pass + i) * Config::kRowsPerPass < window_rows_;
        copy_chunk_predicated(to + (pass + i) * kPassBytes, from + int64_t(chunks[i]) * Config::kLanes, there,
                              inside && chunks[i] >= 0);
      }
    };
    copy_batch(first);  // with the maps of a picture of 640 pixels most often all
#pragma unroll 1
    for (int pass = first + kBatch; pass < last; pass += kBatch) copy_batch(pass);
  }

 private:
  static constexpr int kPassBytes = Config::kRowsPerPass * Config::kRowBytes;
  // Tap and channel of a thread's rows of weights differ by constants.
  static constexpr bool kEvenPasses = Config::kChannels % Config::kRowsPerPass == 0;

  const GemmArgs& args_;
  const int* rows_;
  int window_rows_, weight_row_, channels_left_;  // weight_row_: elements between taps
  const int chunk_ = threadIdx.x % Config::kChunks, row_ = threadIdx.x / Config::kChunks;
  uint32_t weights_, windows_;
  const T* x_;
  const T* weight_;
  int weight_offset_[kEvenPasses ? 1 : Config::kWeightPasses];
};

// The products of one filter row and one block of channels, of which kSteps steps are multiplied; the first of them has been
// read. window: this lane's first row for tap s = 0. next_...: where the operands behind these begin; wait_for_next: see
// RowsAhead.
template <class Config, int kSteps, class Wait, class StartCopies>
__device__ __forceinline__ void multiply_filter_row(Accumulators<Config>& sum, Fragments<Config> (&fragments)[2],
                                                    uint32_t windows, int window_row, uint32_t weights,
                                                    uint32_t next_window, uint32_t next_weights,
                                                    const WarpPlace<Config>& place, const Wait& wait_for_next,
                                                    const StartCopies& start_copies) {
  constexpr int kAll = Config::kTaps * kSteps;
  const uint32_t channels = swizzled<Config::kChunks>(place.channel(), place.channel_chunk());
#pragma unroll
  for (int i = 0; i < kAll; ++i) {
    const int tap = (i + 1) / kSteps, step = (i + 1) % kSteps;
    if (i + 1 < kAll) {
      fragments[(i + 1) % 2].load(
          windows + (swizzled<Config::kChunks>(window_row + tap, place.pixel_chunk()) ^ step * 32),
          weights + tap * Config::kChannels * Config::kRowBytes + (channels ^ step * 32));
    } else {
      wait_for_next();
      fragments[(i + 1) % 2].load(next_window, next_weights + channels);
    }
    fragments[i % 2].multiply(sum);
    if (i == 0) start_copies();  // see multiply_stage
  }
  if (kAll % 2 == 1) fragments[0] = fragments[1];
}

template <class Config>
__global__ __launch_bounds__(Config::kThreads,
                             Config::kBlocks) void window_gemm_kernel(const __grid_constant__ GemmArgs args) {
#if __CUDA_ARCH__ >= 800
  using T = typename Config::T;
  extern __shared__ __align__(128) char shared[];
  let_later_kernels_start();
  int pixel_tile, channel_tile;
  args.by_channel_tiles.divide(static_cast<int>(blockIdx.x), pixel_tile, channel_tile);
  const int first_channel = channel_tile * Config::kChannels;
  const WarpPlace<Config> place(threadIdx.x / 32);
  const int width = args.in_w + 1, window_rows = Config::window_rows(args.in_w);
  const int blocks = (args.in_channels + Config::kBlockLanes - 1) / Config::kBlockLanes;

  auto* affine = reinterpret_cast<ScaleShift<float>*>(shared);
  int* const rows = reinterpret_cast<int*>(shared + Config::kAffineBytes);  // of the window: offsets in x, in 16 bytes
  int* const pixels = rows + window_rows;  // of the tile: pixels of y
  const uint32_t weights = shared_address(shared + Config::kAffineBytes + Config::table_bytes(args.in_w));
  const uint32_t windows = weights + Config::kStages * Config::kStageBytes;

  // Offsets count from the window's first image, which keeps them in 32 bits (checked on the host).
  const int first = pixel_tile * Config::kPixels, first_row = first - width - 1;
  const int first_image = args.by_out_h.divide(args.by_out_w.divide(max(first_row, 0)));
  for (int i = threadIdx.x; i < window_rows + Config::kPixels; i += Config::kThreads) {
    const int m = i < window_rows ? first_row + i : first + i - window_rows;
    int image, image_row, p, q;
    args.by_out_w.divide(max(m, 0), image_row, q);
    args.by_out_h.divide(image_row, image, p);
    const bool inside = m >= 0 && q < args.in_w && p < args.in_h && image < args.x_images;
    const int offset =
        i < window_rows
            ? ((image - first_image) * static_cast<int>(args.x_stride_n) + p * args.x_stride_h + q * args.x_stride_w) /
                  Config::kLanes
            : (image * args.in_h + p) * args.in_w + q;
    rows[i] = inside ? offset : -1;
  }
  const T* const x = static_cast<const T*>(args.x) + first_image * args.x_stride_n;
  WindowLoader<Config> loader(args, first_channel, x, rows, window_rows, weights, windows);
  const int folded_channel = first_channel + static_cast<int>(threadIdx.x);
  const int folded_channels = min(args.out_channels, first_channel + Config::kChannels);
  static_assert(Config::kChannels <= Config::kThreads, "a thread folds one channel");
  __syncthreads();
  wait_for_earlier_kernels();
  const ChannelBits bits = load_for_epilogue(args.affine, folded_channel, folded_channels);
  loader.load_window(0, 0, 1);
#pragma unroll
  for (int stage = 0; stage < Config::kStages - 1; ++stage) {
    loader.load_weights(0, stage, stage);  // at most two of the first block's three
    commit_async_copies();
  }
  if (threadIdx.x < Config::kChannels) {
    affine[threadIdx.x] = fold_for_epilogue(args.affine, bits, folded_channel, folded_channels, args.act == Act::kSilu);
  }

  // Until the next stage is there for all threads, and all are done with what is refilled next.
  const auto wait = [] {
    wait_for_async_copies<Config::kStages - 2>();
    __syncthreads();
  };
  const auto first_rows = [&](int block, int r) {  // this lane's address in a window
    return windows + block % 2 * window_rows * Config::kRowBytes +
           swizzled<Config::kChunks>(place.pixel() + r * width, place.pixel_chunk());
  };
  Accumulators<Config> sum = {};
  Fragments<Config> fragments[2];
  wait();
  fragments[0].load(first_rows(0, 0), weights + swizzled<Config::kChunks>(place.channel(), place.channel_chunk()));
  int stage = 0, free_stage = Config::kStages - 1;
  int next_block = 0, next_r = Config::kStages - 1;  // of the weights that are copied next
  for (int block = 0; block < blocks; ++block) {
    const uint32_t window = windows + block % 2 * window_rows * Config::kRowBytes;
    const bool both_steps = args.in_channels - block * Config::kBlockLanes > Config::kBlockLanes / 2;
    for (int r = 0; r < Config::kTaps; ++r) {
      const auto start_copies = [&] {
        loader.load_weights(next_block, next_r, free_stage);
        loader.load_window(block + 1, r, Config::kWindowParts);
        commit_async_copies();
        if (++next_r == Config::kTaps) next_r = 0, ++next_block;
      };
      const int following = stage + 1 == Config::kStages ? 0 : stage + 1;
      const uint32_t filter_row = weights + stage * Config::kStageBytes;
      const uint32_t next_filter_row = weights + following * Config::kStageBytes;
      const int window_row = place.pixel() + r * width;
      // Behind the last filter row operands are read, too, but not used.
      const uint32_t next_window = r + 1 < Config::kTaps ? first_rows(block, r + 1)
                                   : block + 1 < blocks  ? first_rows(block + 1, 0)
                                                         : first_rows(block, 0);
      if (both_steps) {
        multiply_filter_row<Config, 2>(sum, fragments, window, window_row, filter_row, next_window, next_filter_row,
                                       place, wait, start_copies);
      } else {
        multiply_filter_row<Config, 1>(sum, fragments, window, window_row, filter_row, next_window, next_filter_row,
                                       place, wait, start_copies);
      }
      free_stage = stage;
      stage = following;
    }
  }
  store_tile<Config, true>(args, sum, affine, place, [&](int row) { return int64_t(pixels[row]); }, first_channel);
#endif
}

template <class Config>
GemmArgs gemm_args(const ConvArgs& a) {
  const ConvShape& s = a.shape;
  const int chunks_per_tap = ceil_div(s.in_channels, Config::kLanes);
  GemmArgs g;
  g.x = a.x;
  g.x_images = s.batch;
  g.x_stride_n = a.x_strides.n;
  g.x_stride_h = static_cast<int>(a.x_strides.h);
  g.x_stride_w = static_cast<int>(a.x_strides.w);
  g.weight = a.weight;
  g.y = a.y;
  g.y_stride = a.y_stride;
  g.residual = a.residual;
  g.residual_stride = a.residual_strides.w;
  g.residual_vectors = reinterpret_cast<uintptr_t>(a.residual) % 16 == 0 && a.residual_strides.w % Config::kLanes == 0;
  g.affine = a.affine;
  g.act = a.act;
  g.pixels = s.out_pixels();
  g.out_channels = s.out_channels;
  g.in_channels = s.in_channels;
  g.chunks = chunks_per_tap * s.kernel_h * s.kernel_w;
  g.whole_chunks = s.in_channels % Config::kLanes == 0;
  g.adjacent = s.pointwise() && a.x_strides.h == s.in_w * a.x_strides.w && a.x_strides.n == s.in_h * a.x_strides.h;
  g.kernel_h = s.kernel_h;
  g.kernel_w = s.kernel_w;
  g.in_h = s.in_h;
  g.in_w = s.in_w;
  g.stride_h = s.stride_h;
  g.stride_w = s.stride_w;
  g.pad_h = s.pad_h;
  g.pad_w = s.pad_w;
  g.dilation_h = s.dilation_h;
  g.dilation_w = s.dilation_w;
  g.by_chunks_per_tap = FastDivide(chunks_per_tap);
  g.by_kernel_w = FastDivide(s.kernel_w);
  g.by_out_w = FastDivide(s.out_w);
  g.by_out_h = FastDivide(s.out_h);
  g.by_channel_tiles = FastDivide(ceil_div(s.out_channels, Config::kChannels));
  return g;
}

// Offsets inside a tile are 32-bit numbers; it spans this many images at most.
void check_offsets(const ConvArgs& a, int64_t images, int64_t pixels) {
  const ConvShape& s = a.shape;
  const int64_t span = images * a.x_strides.n + (int64_t(s.in_h) + 2 * s.pad_h) * a.x_strides.h +
                       (int64_t(s.in_w) + 2 * s.pad_w) * a.x_strides.w;
  if (span >= int64_t(1) << 31 || pixels >= int64_t(1) << 31) {
    fail("implicit_gemm: ", s.batch, "x", s.in_h, "x", s.in_w, " with image stride ", a.x_strides.n,
         " exceeds 32-bit offsets inside a tile; the tile menu sends such shapes to direct");
  }
}

template <class Config>
void launch(const ConvArgs& a, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const int64_t plane = int64_t(s.out_h) * s.out_w;
  const int64_t pixel_tiles = ceil_div<int64_t>(s.out_pixels(), Config::kPixels);
  check_offsets(a, (Config::kPixels + plane - 1) / plane + 1, plane + Config::kPixels);
  if (s.kernel_h > kMaxGemmKernel || s.kernel_w > kMaxGemmKernel) {
    fail("implicit_gemm: kernel ", s.kernel_h, "x", s.kernel_w, " is larger than ", kMaxGemmKernel,
         "; the tile menu sends it to direct");
  }
  const GemmArgs g = gemm_args<Config>(a);
  const unsigned int blocks = checked_grid(pixel_tiles * g.by_channel_tiles.divisor, "implicit_gemm");
  const auto start = [&](auto loads) {
    constexpr GemmLoads kLoads = decltype(loads)::value;
    const int shared_bytes = Config::shared_bytes(ceil_div(g.chunks, Config::kChunks), kLoads);
    allow_shared_bytes(implicit_gemm_kernel<Config, kLoads>, shared_bytes);
    launch_dependent<implicit_gemm_kernel<Config, kLoads>>("implicit_gemm", blocks, Config::kThreads, shared_bytes,
                                                           stream, g);
  };
  if constexpr (Config::kFewTaps) {
    if (g.adjacent) return start(std::integral_constant<GemmLoads, GemmLoads::kPointwise>());
    if (few_taps(s)) return start(std::integral_constant<GemmLoads, GemmLoads::kTaps>());
  }
  if constexpr (Config::kWide) {
    fail("implicit_gemm: this tile is for few taps of whole chunks");
  } else {
    start(std::integral_constant<GemmLoads, GemmLoads::kAny>());
  }
}

template <class Config>
void launch_window(const ConvArgs& a, const GemmTile& tile, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  if (!fits_window(s, tile)) fail("implicit_gemm: no window of ", s.in_h, "x", s.in_w, " is possible");
  const int64_t plane = (int64_t(s.in_h) + 1) * (s.in_w + 1);
  const int64_t tiles = ceil_div<int64_t>(s.batch * plane, Config::kPixels);
  check_offsets(a, Config::window_rows(s.in_w) / plane + 2, (tiles + 2) * Config::kPixels);
  GemmArgs g = gemm_args<Config>(a);
  g.by_out_w = FastDivide(s.in_w + 1);
  g.by_out_h = FastDivide(s.in_h + 1);
  const int shared_bytes = Config::shared_bytes(s.in_w, s.in_channels);
  allow_shared_bytes(window_gemm_kernel<Config>, shared_bytes);
  const unsigned int blocks = checked_grid(tiles * g.by_channel_tiles.divisor, "implicit_gemm");
  launch_dependent<window_gemm_kernel<Config>>("implicit_gemm", blocks, Config::kThreads, shared_bytes, stream, g);
}

template <class T, size_t kIndex>
void launch_tile(const ConvArgs& args, cudaStream_t stream) {
  constexpr GemmTile kTile = kGemmTiles[kIndex];
  if constexpr (kTile.half_only() && sizeof(T) != 2) {
    fail("implicit_gemm: this tile is for half");
  } else if constexpr (kTile.window) {
    launch_window<WindowConfig<T, kTile>>(args, kTile, stream);
  } else {
    launch<GemmConfig<T, kTile>>(args, stream);
  }
}

template <class T, size_t... kIndex>
void choose(const ConvArgs& args, const GemmTile& tile, cudaStream_t stream, std::index_sequence<kIndex...>) {
  const bool found = ((tile == kGemmTiles[kIndex] && (launch_tile<T, kIndex>(args, stream), true)) || ...);
  if (!found) fail("implicit_gemm: no kernel for tile ", tile.pixels, "x", tile.channels, "x", tile.chunks);
}

}  // namespace

void implicit_gemm(const ConvArgs& args, DType dtype, const GemmTile& tile, cudaStream_t stream) {
  if (args.shape.groups != 1) fail("implicit_gemm: groups=", args.shape.groups, ", only 1 is dense");
  constexpr std::make_index_sequence<std::size(kGemmTiles)> tiles;
  switch (dtype) {
    case DType::kFloat16: return choose<__half>(args, tile, stream, tiles);
    case DType::kBFloat16: return choose<__nv_bfloat16>(args, tile, stream, tiles);
    case DType::kFloat32: return choose<float>(args, tile, stream, tiles);
    default: fail("implicit_gemm: no tensor-core kernel for ", name_of(dtype));
  }
}

}  // namespace yolo12_fastconv
