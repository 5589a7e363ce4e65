// Gradient of the input of a 3x3 convolution with stride 2 and padding 1 on Hopper's tensor cores (wgmma, bulk tensor
// copies): half and bfloat16, compute capability 9.0 only.
//
// A pixel (2 p + a, 2 q + b) of grad_x, of the parity class (a, b), is a sum over the pixels (p + i, q + j) of grad_z, where
// i <= a and j <= b: over one filter tap, two, two or four. So a block reads the 9x9 window of 8x8 pixels (p, q) once for all
// four classes, and multiplies
//   (p, q)         with the taps of four classes, (1,1) (2,1) (2,2) (1,2)
//   (p + 1, q)     with those of two, (0,1) (0,2)
//   (p, q + 1)     with those of two, (2,0) (1,0)
//   (p + 1, q + 1) with that of one, (0,0)
// No product is with zeros, and grad_z crosses L2 once (1.27 times, with the edges of windows).
//
// The weights of a block's kChannels input channels stay in shared memory, which bounds the output channels that the kernel
// serves: a larger convolution is bound by its products, for which cuDNN is as good. A block's workers (warpgroups) have a
// tile of 64 pixels each and a warp each that loads its windows. Sums are added in an order that depends on the shape alone.
//
// Pixels outside of the map are zeros of the copy engine, and pixels outside of grad_x are not written.
#include <algorithm>
#include <limits>
#include <optional>

#include "device/built_for_hopper.h"
#include "device/dependent_launch.cuh"
#include "device/gradient_kernels.h"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/sm90_plan.h"
#include "device/sm90_results.cuh"
#include "device/stage_ring.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "dgrad_strided_sm90";
constexpr int kTaps = 9, kWindow = 9, kClasses = 4, kMaxStages = 8;

// As many as have registers for twice `channels` sums each: a multiprocessor's quarter holds the warps of a block rounded up
// to four.
constexpr int max_workers(int channels) { return channels > 32 ? 2 : channels > 16 ? 3 : 4; }

constexpr int row_bytes_of(int channels) { return channels > 32 ? 128 : channels > 16 ? 64 : 32; }

// Whether a warp stores its even and its odd columns of grad_x one after the other, from a buffer half as large: so the
// weights of 48 channels and 192 output channels, 162 KB, leave room for two windows a worker.
constexpr bool stores_columns_apart(int channels) { return channels == 48; }

// What is where in shared memory; the weights begin at 0.
struct Layout {
  int workers;
  int blocks;  // of output channels, the length of the reduction
  int tap_bytes, stage_bytes, stages, output_bytes;  // output: of a warp
  int windows, output, barriers, bytes;
};

std::optional<Layout> layout_of(const ConvShape& s, int channels) {
  const int row = row_bytes_of(s.out_channels);
  Layout l;
  l.blocks = ceil_div(s.out_channels * 2, row);
  l.tap_bytes = channels * row;
  l.stage_bytes = round_up(kWindow * kWindow, 8) * row;
  l.output_bytes = (stores_columns_apart(channels) ? 16 : 32) * channels * 2;
  l.windows = round_up(l.blocks * kTaps * l.tap_bytes, 1024);
  for (l.workers = max_workers(channels); l.workers >= 2; --l.workers) {
    const int output = l.workers * 4 * l.output_bytes, barriers = 8 * (2 * kMaxStages * l.workers + 1);
    // Swizzled rows are addressed by their bits: what is stored from begins at a multiple of 1024 too.
    const int left = kSm90SharedBytes - l.windows - output - barriers - 1024;
    l.stages = std::min(kMaxStages, left / (l.workers * l.stage_bytes));
    if (l.stages < 2) continue;
    l.output = round_up(l.windows + l.workers * l.stages * l.stage_bytes, 1024);
    l.barriers = l.output + output;
    l.bytes = std::max(kSm90LeastSharedBytes, l.barriers + barriers);
    return l;
  }
  return std::nullopt;
}

// Input channels of a block: the widest for which the weights fit, as long as that leaves few channels idle.
int tile_channels(const ConvShape& s) {
  int best = 0, least = 0;
  for (const int channels : {64, 48, 32, 16}) {
    if (!layout_of(s, channels).has_value() || (stores_columns_apart(channels) && s.in_w == 1)) continue;
    // grad_z is read once for each tile, and idle channels cost products.
    const int tiles = ceil_div(s.in_channels, channels), cost = tiles * (channels + 32);
    if (best == 0 || cost < least) {
      best = channels;
      least = cost;
    }
  }
  return best;
}

struct KernelArgs {
  CUtensorMap grad, filter, x[2];  // of x: its even and its odd rows, or (columns apart) their even columns
  int workers, blocks, block_channels, tap_bytes, stages, stage_bytes, filled_bytes, output_bytes;
  int row_bytes;
  int windows, output, barriers;
  int tiles, tiles_w, tiles_h, channel_tiles, columns;
  CUtensorMap odd_columns[2];
};

struct Position {
  int q, p, n;
};
__device__ __forceinline__ Position position_of(const KernelArgs& args, int tile) {
  const int row = tile / args.tiles_w, n = row / args.tiles_h;
  return {(tile - row * args.tiles_w) * 8, (row - n * args.tiles_h) * 8, n};
}

// Sums of a warpgroup, by class. Each class is a product of its own: with all four in one, and its halves and quarters in the
// others, ptxas serializes the products (C7511).
template <int kChannels>
struct Sums {
  float of_class[kClasses][kChannels / 2] = {};
};

// Products of a window with the weights of its block of channels. All offsets count 16 bytes, as descriptors do.
template <class T, int kChannels, int kSteps>
__device__ __forceinline__ void multiply_window(Sums<kChannels>& sums, uint32_t window, uint32_t window_layout,
                                                uint32_t weights, uint32_t weight_layout) {
  constexpr int kRow = 2 * kSteps, kTap = kChannels * kRow;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const auto multiply = [&](int tap, int parity_class, int pixel) {
      wgmma<T, kChannels>(sums.of_class[parity_class], descriptor(window_layout, window + pixel * kRow + 2 * k),
                          descriptor(weight_layout, weights + tap * kTap + 2 * k));
    };
    multiply(0, 0, 0);
    multiply(1, 1, 0);
    multiply(2, 2, 0);
    multiply(3, 3, 0);
    multiply(4, 1, kWindow);
    multiply(5, 2, kWindow);
    multiply(7, 3, 1);
    multiply(6, 2, 1);
    multiply(8, 2, kWindow + 1);
  }
  wgmma_commit();
}

template <class T, int kChannels, int kSteps>
__device__ __forceinline__ void multiply_tile(const KernelArgs& args, Sums<kChannels>& sums, StageRing& ring,
                                              uint32_t windows, uint32_t weights) {
  const uint32_t window_layout = descriptor_layout(32 * kSteps, kWindow * 32 * kSteps),
                 weight_layout = descriptor_layout(32 * kSteps, 8 * 32 * kSteps);
  const uint32_t signals = threadIdx.x % 32 == 0;
  uint32_t emptied = 0, releases = 0, weight = descriptor_start(weights);
  int left = args.blocks;
  // A loop that runs at least once, as the compiler has to see to keep the products asynchronous.
  do {
    barrier_wait(ring.filled(), ring.parity);
    multiply_window<T, kChannels, kSteps>(sums, descriptor_start(windows + ring.stage * args.stage_bytes),
                                          window_layout, weight, weight_layout);
    wgmma_wait<1>();
    // What is still in flight reads this stage; the one before is free.
    barrier_arrive_if(emptied, releases);
    emptied = ring.emptied();
    releases = signals;
    ring.advance();
    weight += kTaps * kChannels * kSteps * 2;
  } while (--left > 0);
  wgmma_wait<0>();
  barrier_arrive_if(emptied, releases);
}

// A warp's 16 pixels (p, q) of all classes: two rows of 16 pixels of grad_x from one buffer, for each parity of rows; or of 8
// pixels, for each parity of rows and columns.
template <class T, int kChannels>
__device__ __forceinline__ void write_tile(const KernelArgs& args, const Sums<kChannels>& sums, char* buffer,
                                           const Position& at, int first_channel) {
  constexpr int kRowBytes = kChannels * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  constexpr bool kApart = stores_columns_apart(kChannels);
  const int row = kApart ? lane % 16 : lane % 16 / 8 * 16 + lane % 8 * 2;  // of the buffer
  const auto wait_for_buffer = [&] {
    if (lane == 0) wait_stores_read<0>();
    __syncwarp();
  };
  const auto store = [&](const CUtensorMap* map, int column) {
    fence_for_copy_engine();
    __syncwarp();
    store_box(lane == 0, map, shared_address(buffer), first_channel, column, at.p + 2 * warp, at.n);
  };
#pragma unroll
  for (int a = 0; a < 2; ++a) {
    if constexpr (!kApart) wait_for_buffer();
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      if constexpr (kApart) wait_for_buffer();
      const float* const sum = sums.of_class[a == 0 ? 3 * b : 1 + b];
#pragma unroll
      for (int pair = 0; pair < kChannels / 16; ++pair) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // i / 2: of eight channels, i % 2: of eight pixels
          const float* d = sum + pair * 8 + i / 2 * 4 + i % 2 * 2;
          packed[i] = round_pair<T>(d[0], d[1]);
        }
        store_matrices(shared_address(buffer) + buffer_offset<kRowBytes>(kApart ? row : row + b, pair * 2 + lane / 16),
                       packed);
      }
      if constexpr (kApart) store(b == 0 ? &args.x[a] : &args.odd_columns[a], at.q);
    }
    if constexpr (!kApart) store(&args.x[a], 2 * at.q);
  }
}

template <int kChannels>
constexpr int kMaxThreads = max_workers(kChannels) * 160 + 32;

template <class T, int kChannels>
__global__ __launch_bounds__(kMaxThreads<kChannels>,
                             1) void dgrad_strided_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const uint32_t leads = threadIdx.x % 32 == 0, weights_filled = base + args.barriers;
  const auto ring_of = [&](int worker) {
    return StageRing{base + args.barriers + 8 + 16 * worker * args.stages, args.stages};
  };
  let_later_kernels_start();
  if (threadIdx.x == 0) {
    if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
    prefetch_tensor_map(&args.grad);
    prefetch_tensor_map(&args.filter);
    prefetch_tensor_map(&args.x[0]);
    prefetch_tensor_map(&args.x[1]);
    barrier_init(weights_filled, 1);
    for (int worker = 0; worker < args.workers; ++worker) {
      const uint32_t barriers = ring_of(worker).barriers;
      for (int i = 0; i < args.stages; ++i) {
        barrier_init(barriers + 8 * i, 1);
        barrier_init(barriers + 8 * (args.stages + i), 4);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int column = static_cast<int>(blockIdx.x) / args.channel_tiles;
  const int first_channel = static_cast<int>(blockIdx.x) % args.channel_tiles * kChannels;
  const int worker = warp < 4 * args.workers ? warp / 4 : warp - 4 * args.workers;
  const int first_tile = column + worker * args.columns, step = args.workers * args.columns;
  const uint32_t windows = base + args.windows + worker * args.stages * args.stage_bytes;
  wait_for_earlier_kernels();  // they may still read what is written here
  if (warp < 4 * args.workers) {
    char* const buffer = shared + args.output + warp * args.output_bytes;
    StageRing ring = ring_of(worker);
    barrier_wait(weights_filled, 0);
    for (int tile = first_tile; tile < args.tiles; tile += step) {
      Sums<kChannels> sums;
      switch (args.row_bytes) {
        case 128: multiply_tile<T, kChannels, 4>(args, sums, ring, windows, base); break;
        case 64: multiply_tile<T, kChannels, 2>(args, sums, ring, windows, base); break;
        default: multiply_tile<T, kChannels, 1>(args, sums, ring, windows, base); break;
      }
      write_tile<T, kChannels>(args, sums, buffer, position_of(args, tile), first_channel);
    }
    if (leads) wait_stores_read<0>();
  } else if (worker < args.workers) {
    StageRing ring = ring_of(worker);
    for (int tile = first_tile; tile < args.tiles; tile += step) {
      const Position at = position_of(args, tile);
      for (int block = 0; block < args.blocks; ++block) {
        barrier_wait(ring.emptied(), ring.parity ^ 1);
        barrier_expect(leads, ring.filled(), args.filled_bytes);
        load_box(leads, windows + ring.stage * args.stage_bytes, &args.grad, ring.filled(), block * args.block_channels,
                 at.q, at.p, at.n);
        ring.advance();
      }
    }
  } else {
    // Taps in the order of the products: the filter comes with its taps reversed, 8 - (3 r + s).
    constexpr uint64_t kOrder = 0x852673014;
    barrier_expect(leads, weights_filled, args.blocks * kTaps * args.tap_bytes);
    uint32_t to = base;
    for (int block = 0; block < args.blocks; ++block) {
      for (int i = 0; i < kTaps; ++i) {
        load_box(leads, to, &args.filter, weights_filled, block * args.block_channels, first_channel,
                 static_cast<int>(kOrder >> 4 * i & 15), 0);
        to += args.tap_bytes;
      }
    }
  }
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

template <class T, int kChannels>
void launch(const StridedDgradArgs& a, DType dtype, const Layout& l, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * sizeof(T); };
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto box = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t grad_row = bytes(s.out_pixels() > 1 ? a.grad_z_stride : s.out_channels);
  const cuuint64_t x_row = bytes(s.in_channels), tap = bytes(s.out_channels);
  KernelArgs k;
  k.row_bytes = row_bytes_of(s.out_channels);
  k.block_channels = k.row_bytes / 2;
  k.grad = tensor_map(kName, "grad_z", map_type(dtype), a.grad_z,
                      {size(s.out_channels), size(s.out_w), size(s.out_h), size(s.batch)},
                      {grad_row, grad_row * s.out_w, grad_row * s.out_w * s.out_h},
                      {box(k.block_channels), kWindow, kWindow, 1}, {1, 1, 1, 1}, k.row_bytes);
  k.filter =
      tensor_map(kName, "filter", map_type(dtype), a.filter, {size(s.out_channels), size(s.in_channels), kTaps, 1},
                 {tap * kTaps, tap, tap * kTaps * s.in_channels}, {box(k.block_channels), kChannels, 1, 1},
                 {1, 1, 1, 1}, k.row_bytes);
  constexpr int kColumnStep = stores_columns_apart(kChannels) ? 2 : 1;
  const auto map_of_x = [&](int odd_row, int odd_column) {
    return tensor_map(kName, "grad_x", map_type(dtype),
                      static_cast<T*>(a.grad_x) + (odd_row * int64_t(s.in_w) + odd_column) * s.in_channels,
                      {size(s.in_channels), size(ceil_div(s.in_w - odd_column, kColumnStep)),
                       size((s.in_h + 1 - odd_row) / 2), size(s.batch)},
                      {kColumnStep * x_row, 2 * x_row * s.in_w, x_row * s.in_w * s.in_h},
                      {kChannels, 16 / kColumnStep, 2, 1}, {1, 1, 1, 1}, 2 * kChannels);
  };
  for (int odd = 0; odd < 2; ++odd) {
    k.x[odd] = map_of_x(odd, 0);
    if constexpr (stores_columns_apart(kChannels)) k.odd_columns[odd] = map_of_x(odd, 1);
  }
  k.workers = l.workers;
  k.blocks = l.blocks;
  k.tap_bytes = l.tap_bytes;
  k.stages = l.stages;
  k.stage_bytes = l.stage_bytes;
  k.filled_bytes = kWindow * kWindow * k.row_bytes;
  k.output_bytes = l.output_bytes;
  k.windows = l.windows;
  k.output = l.output;
  k.barriers = l.barriers;
  k.tiles_w = ceil_div(s.out_w, 8);
  k.tiles_h = ceil_div(s.out_h, 8);
  k.tiles = s.batch * k.tiles_h * k.tiles_w;
  k.channel_tiles = ceil_div(s.in_channels, kChannels);
  k.columns = std::min(std::max(1, multiprocessor_count() / k.channel_tiles), k.tiles);
  constexpr auto kKernel = dgrad_strided_sm90_kernel<T, kChannels>;
  allow_shared_bytes(kKernel, l.bytes);
  const unsigned int grid = checked_grid(int64_t(k.columns) * k.channel_tiles, kName);
  launch_dependent<kKernel>(kName, grid, 160 * l.workers + 32, l.bytes, stream, k);
}

template <class T>
void choose(const StridedDgradArgs& a, DType dtype, cudaStream_t stream) {
  const int channels = tile_channels(a.shape);
  if constexpr (is_built_for_hopper()) {
    switch (channels) {
      case 16: return launch<T, 16>(a, dtype, *layout_of(a.shape, 16), stream);
      case 32: return launch<T, 32>(a, dtype, *layout_of(a.shape, 32), stream);
      case 48: return launch<T, 48>(a, dtype, *layout_of(a.shape, 48), stream);
      case 64: return launch<T, 64>(a, dtype, *layout_of(a.shape, 64), stream);
      default: break;
    }
  }
  fail(kName, ": this build has no kernel for tiles of ", channels, " channels");
}

}  // namespace

bool has_strided_dgrad(const ConvShape& s) {
  return is_built_for_hopper() && s.groups == 1 && s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 2 &&
         s.stride_w == 2 && s.pad_h == 1 && s.pad_w == 1 && s.dilation_h == 1 && s.dilation_w == 1 && s.in_h > 1 &&
         s.in_channels % 8 == 0 && s.out_channels % 8 == 0 && s.out_pixels() > 0 &&
         s.in_pixels() < std::numeric_limits<int>::max() && tile_channels(s) > 0;
}

void strided_dgrad(const StridedDgradArgs& a, DType dtype, cudaStream_t stream) {
  with_half_type(dtype, kName, [&](auto type) { choose<typename decltype(type)::type>(a, dtype, stream); });
}

}  // namespace yolo12_fastconv
