// Dense convolution as an implicit GEMM on Hopper's tensor cores for small grids, where a layer is a chain of latencies:
// 1x1, and 3x3 with stride 1 or 2, in half and bfloat16.
//
//   y[m, k] = act(scale[k] * sum over t, c of x[pixel(m, t), c] * w[k, t, c] + shift[k]) + residual[m, k]
//
// The same tiles, windows and products as in implicit_gemm_sm90.cuh, with all that repeats taken out: a worker has one
// tile, everything that a block reads has a place of its own in shared memory and is asked for at the start, and the number
// of products between two waits is known to the compiler. What is left to a block is: ask, wait, multiply, finish, store.
//
// Results go to y from registers. A thread has two neighbouring channels of every eight columns of a tile, which would be
// stores of four bytes; so the columns are dealt out to the channels in another order. Of every 32 columns (16, where 32 do
// not divide the tile), column 8 i + 2 t + e is channel 8 t + 2 i + e (4 t + 2 i + e), so that thread t of four stores
// eight (four) adjacent channels, and the four of them 64 (32) bytes. The copy engine does that: the map of the weights has
// e, t, i and the groups as dimensions of their own.
//
// Reductions that do not fit shared memory have a ring of places, which the two warps without a tile fill again: what a block
// waits for then is only what it could not have asked for at the start.
//
// Where the tile's width does not divide the output channels, the last tile begins earlier. Two blocks then store the same
// values to the channels that they share.
#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/built_for_hopper.h"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "device/kernels.h"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/sm90_once_plan.h"
#include "device/sm90_results.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

// What follows the convolution, where it is one of the usual sets of vectors, all of one dtype: then a channel takes a few
// instructions and one wait for memory.
enum class Vectors : int { kAny, kBias, kNorm };

struct OnceArgs {
  CUtensorMap x, weight;
  Affine affine;
  Vectors vectors;
  DType vector_dtype;
  float eps;
  Act act;
  int parts, stages, workers, tiles, out_channels;  // stages: parts that have a place; fewer in a ring
  int tap_channels;  // of the weights, from one tap to the next
  int offset_pixels, offset_affine, offset_barriers;
  int out_h, out_w, pad_h, pad_w;
  int64_t pixels;
  FastDivide by_channel_tiles, by_tiles_w, by_tiles_h;
  void* y;
  int64_t y_stride;
  const void* residual;
  int64_t residual_stride;
};

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// A filter tap's place: its plane of the window, and the row there that the tile's first pixel meets.
template <OnceMode kMode>
constexpr int tap_row(int tap) {
  constexpr OncePixels kPixels = once_pixels(kMode);
  const int r = tap / 3, s = tap % 3;
  if (kMode == OnceMode::kRows) return 0;
  if (kMode == OnceMode::kWindow) return r * 10 + s;
  return (r % 2 * 2 + s % 2) * kPixels.rows + r / 2 * 9 + s / 2;
}

template <class T, int kChannels, int kRowBytes, OnceMode kMode, bool kRing>
struct OnceKernel {
  static constexpr OncePixels kPixels = once_pixels(kMode);
  static constexpr int kSteps = kRowBytes / 32, kTaps = once_taps(kMode), kGroups = once_groups(kMode);
  static constexpr int kGroupTaps = kTaps / kGroups, kTapBytes = kChannels * kRowBytes;
  static constexpr int kPlaneBytes = kPixels.rows * kRowBytes, kPartBytes = kPixels.planes * kPlaneBytes;
  static constexpr int kWindow = kMode == OnceMode::kWindow ? 10 : 9;  // pixels a side
  static constexpr int kWords = kChannels / 8;  // of two channels, that a thread has of a pixel
  static constexpr int kStoreChannels = once_store_channels(kChannels);  // of four threads at once
  static constexpr int kBoxTaps = kChannels == kStoreChannels ? kGroupTaps : 1;  // of a copy of weights
  static constexpr int kMaxThreads = once_threads(once_max_workers(kChannels));
  static_assert(kTapBytes * kGroupTaps % 256 == 0);

  // First output pixel of a tile.
  struct Position {
    int n = 0, p = 0, q = 0, pixel = 0;
  };
  static __device__ __forceinline__ Position position_of(const OnceArgs& args, int tile) {
    Position at;
    if constexpr (kMode == OnceMode::kRows) {
      at.pixel = tile * 64;
    } else {
      int row;
      args.by_tiles_w.divide(tile, row, at.q);
      args.by_tiles_h.divide(row, at.n, at.p);
      at.q *= 8;
      at.p *= 8;
    }
    return at;
  }

  // Parts whose places are filled at the start.
  static __device__ __forceinline__ int first_parts(const OnceArgs& args) { return kRing ? args.stages : args.parts; }

  // A whole warp: asks for a part of the pixels of a worker's tile.
  static __device__ __forceinline__ void load_part(const OnceArgs& args, uint32_t leads, int channel, int left, int top,
                                                   const Position& at, uint32_t to, uint32_t barrier) {
    barrier_expect(leads, barrier, kPixels.planes * kPixels.pixels * kRowBytes);
    if constexpr (kMode == OnceMode::kRows) {
      load_box(leads, to, &args.x, barrier, channel, at.pixel, 0, 0);
    } else {
#pragma unroll
      for (int plane = 0; plane < kPixels.planes; ++plane) {
        load_box(leads, to + plane * kPlaneBytes, &args.x, barrier, channel, left + plane % 2, top + plane / 2, at.n);
      }
    }
  }
  static constexpr int kStride = kMode == OnceMode::kStrided ? 2 : 1;

  // The first ones, with a barrier for each.
  static __device__ __forceinline__ void load_tile(const OnceArgs& args, uint32_t leads, const Position& at,
                                                   uint32_t to, uint32_t barrier) {
    const int left = at.q * kStride - args.pad_w, top = at.p * kStride - args.pad_h;
    wait_for_earlier_kernels(left ^ top ^ at.n ^ at.pixel ^ to ^ barrier);
    const int parts = first_parts(args);
    int channel = 0;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      load_part(args, leads, channel, left, top, at, to, barrier);
      channel += kRowBytes / 2;
      to += kPartBytes;
      barrier += 8;
    }
  }

  static __device__ __forceinline__ void load_part_weights(const OnceArgs& args, uint32_t leads, int channel,
                                                           int first_pair, uint32_t to, uint32_t barrier) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      barrier_expect(leads, barrier, kGroupTaps * kTapBytes);
#pragma unroll
      for (int i = 0; i < kGroupTaps; i += kBoxTaps) {
        if constexpr (kChannels == kStoreChannels) {
          load_box_5d(leads, to, &args.weight, barrier, channel, 0, 0, first_pair, group * kGroupTaps);
        } else {
          load_box_5d(leads, to, &args.weight, barrier, channel + (group * kGroupTaps + i) * args.tap_channels, 0, 0,
                      first_pair, 0);
        }
        to += kBoxTaps * kTapBytes;
      }
      barrier += 8;
    }
  }

  // All of them; in a ring those behind the first ones when the products have read what is in their place.
  static __device__ __forceinline__ void load_weights(const OnceArgs& args, uint32_t leads, int first_channel,
                                                      uint32_t to, uint32_t barrier, uint32_t empty) {
    const int first_pair = first_channel / 2;
    wait_for_earlier_kernels(first_pair ^ to ^ barrier);
    const int parts = first_parts(args);
    int channel = 0;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      load_part_weights(args, leads, channel, first_pair, to + part * kTaps * kTapBytes, barrier + 8 * kGroups * part);
      channel += kRowBytes / 2;
    }
    if constexpr (kRing) {
      int place = 0;
      uint32_t parity = 0;
#pragma unroll 1
      for (int part = parts; part < args.parts; ++part) {
        barrier_wait(empty + 8 * place, parity);
        load_part_weights(args, leads, channel, first_pair, to + place * kTaps * kTapBytes,
                          barrier + 8 * kGroups * place);
        channel += kRowBytes / 2;
        if (++place == args.stages) {
          place = 0;
          parity ^= 1;
        }
      }
    }
  }

  // A ring's pixels behind the first ones, of all workers that have a tile, by one warp.
  static __device__ __forceinline__ void load_more_pixels(const OnceArgs& args, uint32_t leads, int first_tile,
                                                          int workers, uint32_t to, uint32_t barriers, uint32_t empty) {
    int place = 0, channel = args.stages * (kRowBytes / 2);
    uint32_t parity = 0;
#pragma unroll 1
    for (int part = args.stages; part < args.parts; ++part) {
      barrier_wait(empty + 8 * place, parity);
#pragma unroll 1
      for (int worker = 0; worker < workers; ++worker) {
        const Position at = position_of(args, first_tile + worker);
        const int index = worker * args.stages + place;
        load_part(args, leads, channel, at.q * kStride - args.pad_w, at.p * kStride - args.pad_h, at,
                  to + index * kPartBytes, barriers + 8 * index);
      }
      channel += kRowBytes / 2;
      if (++place == args.stages) {
        place = 0;
        parity ^= 1;
      }
    }
  }

  // The products of one part.
  static __device__ __forceinline__ void multiply_part(float (&sum)[kChannels / 2], uint32_t a, uint32_t b,
                                                       uint32_t pixel_barrier, uint32_t weight_barrier,
                                                       uint32_t parity) {
    const uint32_t pixel_layout = descriptor_layout(kRowBytes, (kMode == OnceMode::kRows ? 8 : kWindow) * kRowBytes);
    const uint32_t weight_layout = descriptor_layout(kRowBytes, 8 * kRowBytes);
    barrier_wait(pixel_barrier, parity);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      barrier_wait(weight_barrier + 8 * group, parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kGroupTaps; ++i) {
        const int tap = group * kGroupTaps + i;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          wgmma<T, kChannels>(sum, descriptor(pixel_layout, a + tap_row<kMode>(tap) * (kRowBytes / 16) + 2 * k),
                              descriptor(weight_layout, b + tap * (kTapBytes / 16) + 2 * k));
        }
      }
      wgmma_commit();
    }
  }

  static __device__ __forceinline__ void multiply(const OnceArgs& args, float (&sum)[kChannels / 2], uint32_t pixels,
                                                  uint32_t weights, uint32_t pixel_barrier, uint32_t weight_barrier,
                                                  uint32_t empty, uint32_t leads) {
    uint32_t a = descriptor_start(pixels), b = descriptor_start(weights);
    int part = 0;
    if constexpr (kRing) {
      const uint32_t first_a = a, first_b = b, first_pixels = pixel_barrier, first_weights = weight_barrier;
      uint32_t parity = 0, before = empty, current = empty;
      int place = 0;
      do {
        multiply_part(sum, a, b, pixel_barrier, weight_barrier, parity);
        wgmma_wait<kGroups>();  // the part before has been read
        barrier_arrive_if(before, leads & (part > 0));
        before = current;
        a += kPartBytes / 16;
        b += kTaps * kTapBytes / 16;
        pixel_barrier += 8;
        weight_barrier += 8 * kGroups;
        current += 8;
        if (++place == args.stages) {
          place = 0;
          parity ^= 1;
          a = first_a;
          b = first_b;
          pixel_barrier = first_pixels;
          weight_barrier = first_weights;
          current = empty;
        }
      } while (++part < args.parts);
    } else {
      do {
        multiply_part(sum, a, b, pixel_barrier, weight_barrier, 0);
        a += kPartBytes / 16;
        b += kTaps * kTapBytes / 16;
        pixel_barrier += 8;
        weight_barrier += 8 * kGroups;
      } while (++part < args.parts);
    }
  }

  using Results = uint32_t[2][kWords];  // of two pixels

  template <bool kSilu>
  static __device__ __forceinline__ void finish(const float (&sum)[kChannels / 2], const float4 (&affine)[kWords],
                                                Results& out) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float u = fmaf(sum[4 * i + 2 * h], affine[i].x, affine[i].y);
        float v = fmaf(sum[4 * i + 2 * h + 1], affine[i].z, affine[i].w);
        if constexpr (kSilu) {
          u = silu_of_half(u);
          v = silu_of_half(v);
        }
        out[h][i] = round_pair<T>(u, v);
      }
    }
  }

  static constexpr int kVector = once_store_bytes(kChannels) / 4;  // words; the next ones are kStoreChannels further on
  using Vector = std::conditional_t<kVector == 4, uint4, uint2>;

  static __device__ __forceinline__ void load_vectors(const T* from, uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; i += kVector) {
      const Vector bits = *reinterpret_cast<const Vector*>(from + i / kVector * kStoreChannels);
      memcpy(words + i, &bits, sizeof(Vector));
    }
  }
  static __device__ __forceinline__ void store_vectors(T* to, const uint32_t (&words)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; i += kVector) {
      Vector bits;
      memcpy(&bits, words + i, sizeof(Vector));
      *reinterpret_cast<Vector*>(to + i / kVector * kStoreChannels) = bits;
    }
  }

  // Four warps of a worker, its tile.
  static __device__ __forceinline__ void compute(const OnceArgs& args, uint32_t base, int worker, const Position& at,
                                                 int first_channel, int threads) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int channel = lane % 4 * (2 * kVector);  // of the tile, and of each kStoreChannels
    int64_t pixel[2];
    bool exists[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kMode == OnceMode::kRows) {
        pixel[h] = at.pixel + 16 * warp + lane / 4 + 8 * h;
        exists[h] = pixel[h] < args.pixels;
      } else {
        const int p = at.p + 2 * warp + h, q = at.q + lane / 4;
        pixel[h] = (int64_t(at.n) * args.out_h + p) * args.out_w + q;
        exists[h] = p < args.out_h && q < args.out_w;
      }
    }
    const uint32_t barriers = base + args.offset_barriers;
    // Addresses, and the residual, before there is anything to multiply.
    const int64_t first = first_channel + channel;
    T* to[2];
    Results added = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to[h] = static_cast<T*>(args.y) + pixel[h] * args.y_stride + first;
      asm volatile("" : "+l"(to[h]));
      if (args.residual != nullptr && exists[h]) {
        load_vectors(static_cast<const T*>(args.residual) + pixel[h] * args.residual_stride + first, added[h]);
      }
    }
    float sum[kChannels / 2] = {};
    const int parts = first_parts(args);
    multiply(args, sum, base + args.offset_pixels + worker * parts * kPartBytes, base,
             barriers + 8 * parts * (kGroups + worker), barriers, barriers + 8 * parts * (kGroups + args.workers),
             lane == 0);
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");  // scale and shift are there
    float4 affine[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int first_of_word = i / kVector * kStoreChannels + i % kVector * 2;
      affine[i] = load_shared(base + args.offset_affine + (channel + first_of_word) * 8);
    }
    wgmma_wait<0>();
    Results out;
    if (args.act == Act::kSilu) {
      finish<true>(sum, affine, out);
    } else {
      finish<false>(sum, affine, out);
    }
    if (args.residual != nullptr) {  // as in stock, the activated value is rounded before
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) out[h][i] = sum_of_pairs<T>(out[h][i], added[h][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (exists[h]) store_vectors(to[h], out[h]);
    }
  }

  // Scale and shift of the block's channels, by one warp.
  static __device__ __forceinline__ void fold_channels(const OnceArgs& args, char* shared, int first_channel,
                                                       int lane) {
    auto* affine = reinterpret_cast<ScaleShift<float>*>(shared + args.offset_affine);
    const bool halved = args.act == Act::kSilu;  // for silu_of_half
    const float factor = halved ? 0.5f : 1.0f;
    constexpr int kTogether = ceil_div(kChannels, 32);
    const int last = first_channel + kChannels - 1;
    const auto fold_all = [&]<class P>(P) {
      const auto load = [&](const ChannelVector& v, float (&value)[kTogether]) {
        P bits[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          bits[i] = static_cast<const P*>(v.data)[min(first_channel + lane + 32 * i, last)];
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) value[i] = convert<float>(bits[i]);
      };
      ScaleShift<float> folded[kTogether];
      if (args.vectors == Vectors::kBias) {
        float bias[kTogether];
        load(args.affine.bias, bias);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) folded[i] = {1.0f, bias[i]};
      } else {
        float var[kTogether], gamma[kTogether], mean[kTogether], beta[kTogether];
        load(args.affine.var, var);
        load(args.affine.gamma, gamma);
        load(args.affine.mean, mean);
        load(args.affine.beta, beta);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float scale = gamma[i] * inverse_root(var[i] + args.eps);
          folded[i] = {scale, beta[i] - mean[i] * scale};
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int channel = lane + 32 * i;
        if (channel < kChannels) affine[channel] = {folded[i].scale * factor, folded[i].shift * factor};
      }
    };
    if (args.vectors == Vectors::kAny) {
#pragma unroll 1
      for (int channel = lane; channel < kChannels; channel += 32) {
        affine[channel] = fold_for_epilogue(args.affine, first_channel + channel, args.out_channels, halved);
      }
    } else if (args.vector_dtype == DType::kFloat32) {
      fold_all(0.0f);
    } else {
      fold_all(T());
    }
  }
};

template <class T, int kChannels, int kRowBytes, OnceMode kMode, bool kRing>
__global__ __launch_bounds__((OnceKernel<T, kChannels, kRowBytes, kMode, kRing>::kMaxThreads),
                             1) void implicit_gemm_sm90_once_kernel(const __grid_constant__ OnceArgs args) {
#if YOLO12_HAS_WGMMA
  using Kernel = OnceKernel<T, kChannels, kRowBytes, kMode, kRing>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const uint32_t leads = lane == 0;
  const int threads = once_threads(args.workers);
  let_later_kernels_start();
  int column, channel_tile;
  args.by_channel_tiles.divide(static_cast<int>(blockIdx.x), column, channel_tile);
  const int first_channel = min(channel_tile * kChannels, args.out_channels - kChannels);
  const uint32_t barriers = base + args.offset_barriers;
  const int parts = Kernel::first_parts(args);
  const uint32_t pixel_barriers = barriers + 8 * parts * Kernel::kGroups,
                 empty = pixel_barriers + 8 * parts * args.workers;
  if (warp < 4 * args.workers) {
    const int worker = warp / 4, tile = column * args.workers + worker;
    const typename Kernel::Position at = Kernel::position_of(args, tile);
    if (warp % 4 == 0) {
      // Its barriers, then its copies: by the warp that starts them, so that they need not wait for the block.
      const uint32_t filled = pixel_barriers + 8 * parts * worker;
      if (leads) {
        prefetch_tensor_map(&args.x);
#pragma unroll 1
        for (int i = 0; i < parts; ++i) barrier_init(filled + 8 * i, 1);
        barrier_init_fence();
      }
      __syncwarp();
      if (tile < args.tiles) {
        Kernel::load_tile(args, leads, at, base + args.offset_pixels + worker * parts * Kernel::kPartBytes, filled);
      }
    }
    asm volatile("bar.sync 0, %0;" ::"r"(threads) : "memory");  // all barriers are set up
    wait_for_earlier_kernels();
    if (tile < args.tiles) {
      Kernel::compute(args, base, worker, at, first_channel, threads);
    } else {
      asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
    }
  } else if (warp == 4 * args.workers) {
    if (leads) {
      if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
      prefetch_tensor_map(&args.weight);
#pragma unroll 1
      for (int i = 0; i < parts * Kernel::kGroups; ++i) barrier_init(barriers + 8 * i, 1);
      if constexpr (kRing) {
        const int arrivals = 4 * min(args.workers, args.tiles - column * args.workers);
#pragma unroll 1
        for (int i = 0; i < parts; ++i) barrier_init(empty + 8 * i, arrivals);
      }
      barrier_init_fence();
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"r"(threads) : "memory");
    Kernel::load_weights(args, leads, first_channel, base, barriers, empty);
    asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
  } else {
    if constexpr (kRing) {
      asm volatile("bar.sync 0, %0;" ::"r"(threads) : "memory");
    } else {
      asm volatile("bar.arrive 0, %0;" ::"r"(threads) : "memory");
    }
    wait_for_earlier_kernels();
    Kernel::fold_channels(args, shared, first_channel, lane);
    asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
    if constexpr (kRing) {
      const int first_tile = column * args.workers;
      Kernel::load_more_pixels(args, leads, first_tile, min(args.workers, args.tiles - first_tile),
                               base + args.offset_pixels, pixel_barriers, empty);
    }
  }
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

constexpr const char* kName = "implicit_gemm_sm90_once";

// Strides of x whose sizes of one get the stride that a dense tensor would have.
Strides strides_of_pixels(const ConvArgs& a) {
  Strides x = a.x_strides;
  const ConvShape& s = a.shape;
  if (s.in_w == 1) x.w = round_up(s.in_channels, 8);
  if (s.in_h == 1) x.h = x.w * s.in_w;
  if (s.batch == 1) x.n = x.h * s.in_h;
  return x;
}

CUtensorMap pixel_map(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan) {
  const ConvShape& s = a.shape;
  const Strides x = strides_of_pixels(a);
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements * 2); };
  const auto channels = static_cast<cuuint32_t>(plan.row_bytes / 2);
  const auto c = static_cast<cuuint64_t>(s.in_channels);
  if (s.pointwise()) {
    const auto pixels = static_cast<cuuint64_t>(s.in_pixels());
    const cuuint64_t all = bytes(x.w) * pixels;
    return tensor_map(kName, "x", map_type(dtype), a.x, {c, pixels, 1, 1}, {bytes(x.w), all, all}, {channels, 64, 1, 1},
                      {1, 1, 1, 1}, plan.row_bytes);
  }
  const auto step = static_cast<cuuint32_t>(s.stride_h);
  const cuuint32_t side = step == 1 ? 10 : 9;  // a box is counted in elements before striding
  return tensor_map(
      kName, "x", map_type(dtype), a.x,
      {c, static_cast<cuuint64_t>(s.in_w), static_cast<cuuint64_t>(s.in_h), static_cast<cuuint64_t>(s.batch)},
      {bytes(x.w), bytes(x.h), bytes(x.n)}, {channels, side * step, side * step, 1}, {1, step, step, 1},
      plan.row_bytes);
}

// (K, R * S, C), rows of C padded to 16 bytes, as (c, e, t, i, group): see the top. In a tile of one group, taps take the
// groups' place; else a row is all taps, one behind the other.
CUtensorMap weight_map(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = tensor_map_encoder<Encode>(kName, "cuTensorMapEncodeTiled");
  const ConvShape& s = a.shape;
  const int taps = s.kernel_h * s.kernel_w, group = once_store_channels(plan.channels);
  const bool single = plan.channels == group;
  const auto c = static_cast<cuuint64_t>(s.in_channels), pairs = static_cast<cuuint64_t>(s.out_channels / 2);
  const cuuint64_t tap = cuuint64_t(round_up(s.in_channels, 8)) * 2, filter = tap * taps;
  const cuuint64_t fifth = single ? taps : plan.channels / group;
  const cuuint64_t size[5] = {single || taps == 1 ? c : filter / 2, 2, 4, pairs, fifth};
  const cuuint64_t stride[4] = {filter, filter * (group / 4), filter * 2, single ? tap : filter * group};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(plan.row_bytes / 2), 2, 4, static_cast<cuuint32_t>(group / 8),
                             static_cast<cuuint32_t>(!single     ? plan.channels / group
                                                     : taps == 1 ? 1
                                                                 : 3)};
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult status = encode(&map, map_type(dtype), 5, const_cast<void*>(a.weight), size, stride, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, map_swizzle(plan.row_bytes),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_tensor_map(status, kName, "weight");
  return map;
}

void describe_vectors(OnceArgs& k, const Affine& a, DType dtype) {
  const auto given = [](const ChannelVector& v) { return v.data != nullptr; };
  const bool none = !given(a.gamma) && !given(a.beta) && !given(a.mean) && !given(a.var);
  const bool all = given(a.gamma) && given(a.beta) && given(a.mean) && given(a.var) && a.gamma.dtype == a.var.dtype &&
                   a.beta.dtype == a.var.dtype && a.mean.dtype == a.var.dtype;
  k.affine = a;
  k.eps = static_cast<float>(a.eps);
  k.vector_dtype = none ? a.bias.dtype : a.var.dtype;
  const bool fast = k.vector_dtype == dtype || k.vector_dtype == DType::kFloat32;
  k.vectors = fast && none && given(a.bias)   ? Vectors::kBias
              : fast && all && !given(a.bias) ? Vectors::kNorm
                                              : Vectors::kAny;
}

template <class T, int kChannels, int kRowBytes, OnceMode kMode, bool kRing>
void launch(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const int stages = once_stages(s, plan);
  const OnceLayout layout = once_layout(s, plan, stages);
  const int channel_tiles = ceil_div(s.out_channels, kChannels);
  OnceArgs k;
  k.x = pixel_map(a, dtype, plan);
  k.weight = weight_map(a, dtype, plan);
  describe_vectors(k, a.affine, dtype);
  k.act = a.act;
  k.parts = once_parts(s, plan);
  k.stages = stages;
  k.workers = plan.workers;
  k.tiles = static_cast<int>(once_tiles(s));
  k.out_channels = s.out_channels;
  k.tap_channels = round_up(s.in_channels, 8);
  k.offset_pixels = layout.pixels;
  k.offset_affine = layout.affine;
  k.offset_barriers = layout.barriers;
  k.out_h = s.out_h;
  k.out_w = s.out_w;
  k.pad_h = s.pad_h;
  k.pad_w = s.pad_w;
  k.pixels = s.out_pixels();
  k.by_channel_tiles = FastDivide(channel_tiles);
  k.by_tiles_w = FastDivide(ceil_div(s.out_w, 8));
  k.by_tiles_h = FastDivide(ceil_div(s.out_h, 8));
  k.y = a.y;
  k.y_stride = a.y_stride;
  k.residual = a.residual;
  k.residual_stride = a.residual_strides.w;
  constexpr auto kKernel = implicit_gemm_sm90_once_kernel<T, kChannels, kRowBytes, kMode, kRing>;
  allow_shared_bytes(kKernel, layout.bytes);
  launch_dependent<kKernel>(kName, checked_grid(once_blocks(s, plan), kName), once_threads(plan.workers), layout.bytes,
                            stream, k);
}

template <class T, int kChannels, int kRowBytes>
void choose_mode(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream) {
  const auto start = [&]<OnceMode kMode>(std::integral_constant<OnceMode, kMode>) {
    const bool ring = once_stages(a.shape, plan) < once_parts(a.shape, plan);
    if constexpr (is_built_for_hopper() && once_has_kernel(kChannels, kRowBytes, kMode)) {
      if (!ring) return launch<T, kChannels, kRowBytes, kMode, false>(a, dtype, plan, stream);
    }
    if constexpr (is_built_for_hopper() && once_has_ring(kChannels, kRowBytes, kMode)) {
      if (ring) return launch<T, kChannels, kRowBytes, kMode, true>(a, dtype, plan, stream);
    }
    fail(kName, ": no kernel for tiles of ", kChannels, " channels over rows of ", kRowBytes, " bytes");
  };
  switch (once_mode(a.shape)) {
    case OnceMode::kRows: return start(std::integral_constant<OnceMode, OnceMode::kRows>());
    case OnceMode::kWindow: return start(std::integral_constant<OnceMode, OnceMode::kWindow>());
    case OnceMode::kStrided: return start(std::integral_constant<OnceMode, OnceMode::kStrided>());
  }
}

template <class T, int kChannels>
void choose_row(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream) {
  switch (plan.row_bytes) {
    case 32: return choose_mode<T, kChannels, 32>(a, dtype, plan, stream);
    case 64: return choose_mode<T, kChannels, 64>(a, dtype, plan, stream);
    default: return choose_mode<T, kChannels, 128>(a, dtype, plan, stream);
  }
}

template <class T>
void choose(const ConvArgs& a, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream) {
  switch (plan.channels) {
    case 16: return choose_row<T, 16>(a, dtype, plan, stream);
    case 32: return choose_row<T, 32>(a, dtype, plan, stream);
    case 48: return choose_row<T, 48>(a, dtype, plan, stream);
    case 64: return choose_row<T, 64>(a, dtype, plan, stream);
    case 96: return choose_row<T, 96>(a, dtype, plan, stream);
    case 128: return choose_row<T, 128>(a, dtype, plan, stream);
    default: fail(kName, ": no kernel for tiles of ", plan.channels, " channels");
  }
}

}  // namespace

bool fits_implicit_gemm_sm90_once(const ConvArgs& a, const Sm90OncePlan& plan) {
  const int bytes = once_store_bytes(plan.channels);
  const auto aligned = [bytes](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0 && stride * 2 % bytes == 0;
  };
  const Strides x = strides_of_pixels(a);
  const bool even = x.h == x.w * a.shape.in_w && x.n == x.h * a.shape.in_h;
  return aligned(a.y, a.y_stride) && (a.residual == nullptr || aligned(a.residual, a.residual_strides.w)) &&
         (even || !a.shape.pointwise());
}

void implicit_gemm_sm90_once(const ConvArgs& args, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat16: return choose<__half>(args, dtype, plan, stream);
    case DType::kBFloat16: return choose<__nv_bfloat16>(args, dtype, plan, stream);
    default: fail(kName, ": no kernel for ", name_of(dtype));
  }
}

}  // namespace yolo12_fastconv
