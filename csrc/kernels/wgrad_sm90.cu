// Gradient of a dense convolution's weight on Hopper's tensor cores (wgmma, bulk tensor copies): half and bfloat16, compute
// capability 9.0 only.
//   dw[k, r, s, c] = sum over output pixels m of grad_z[m, k] * x[pixel(m, r, s), c]
// 1x1 with stride 1, and 3x3 with stride 1 or 2 and any padding. Both operands lie in memory with the reduction, pixels,
// outside and channels inside; wgmma reads 16-bit operands transposed, so they go to shared memory as they are.
//
// A block sums over a slice of the pixels for a tile of dw. A warp of it fills a ring of stages, which all of its
// warpgroups read:
//   rows (1x1):   consecutive pixels; each warpgroup has 64 output channels, all have the same input channels.
//   window (3x3): 8 columns of outputs x 8 or 10 rows, and the window of x below them, one per residue of the stride. Each
//                 warpgroup has a row of the filter. Its three taps are one product: columns of x that are one pixel apart
//                 are blocks of channels 128 bytes apart, which the descriptor of an operand can say. So x crosses L2 once
//                 for nine taps. With stride 2, two products: taps 0 and 2 lie in the same residue.
//                 48 input channels are three blocks of 16, which lie one behind the other in each row of the window: so
//                 those of three rows have one distance, and a warpgroup has a column of the filter in one product.
//                 96 output channels are the columns of the sums: each warpgroup has two taps of 32 input channels as rows.
// Pixels outside of the image, and of grad_z outside of the map, are zeros of the copy engine. Where x is infinite or NaN
// next to the map's lower or right edge, such a zero makes NaN of a tap that reads past the edge; of that input channel
// other taps are NaN then anyway.
//
// Sums are float and leave for the workspace, [slice][k][tap][c]; add_wgrad_slices() adds the slices, in an order
// that depends on the shape alone, and rounds once to dw's dtype.
#include <algorithm>

#include "device/built_for_hopper.h"
#include "device/dependent_launch.cuh"
#include "device/gradient_kernels.h"
#include "device/hopper.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/stage_ring.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "wgrad_sm90";

struct KernelArgs {
  CUtensorMap grad, x;
  bool window;
  int warpgroups, stages, stage_bytes, filled_bytes;
  int grad_offset, grad_copies, grad_copy_channels, grad_copy_bytes;  // of a stage, behind x
  int x_copies, x_copy_channels, x_copy_bytes;
  int rounds;  // of steps over 16 pixels in a stage, as many as are unrolled
  bool five_steps;  // else four
  int grad_row_bytes, grad_group_bytes, grad_step;  // from eight pixels to the next; steps in 16 bytes
  int x_row_bytes, x_group_bytes, x_block_bytes, x_step;
  int filter_row_bytes;  // window: from a row of the filter to the next that reads the same residue
  int pixels;  // of a stage
  int tiles_w, tiles_h, tile_rows;  // window: stages of an image
  int stride, pad_h, pad_w;
  int pixel_stages, slices, filter_tiles, channel_tiles, tile_channels;
  int out_channels, in_channels, taps, pitch;
  float* workspace;
  int64_t slice_floats;
};

struct BlockWork {
  int first_filter, first_channel, slice, first_stage, end_stage;
};

// The products of a warpgroup. 1x1, or the three taps of a filter's row; these with stride 2, as taps 0 and 2 and tap 1; the
// three taps of a filter's column; and with the operands turned, two taps as rows.
enum class Products { kRow, kSplitRow, kColumn, kTurned };

template <Products kProducts>
__device__ __forceinline__ BlockWork work_of_block(const KernelArgs& args) {
  BlockWork work;
  const int tiles = args.filter_tiles * args.channel_tiles, tile = static_cast<int>(blockIdx.x) % tiles;
  // Blocks of one slice run together and find each other's pixels in L2.
  work.slice = static_cast<int>(blockIdx.x) / tiles;
  work.first_filter = tile % args.filter_tiles *
                      (kProducts == Products::kTurned ? kWgradTurnedWidth
                       : args.window                  ? 64
                                                      : 64 * args.warpgroups);
  work.first_channel = tile / args.filter_tiles * args.tile_channels;
  work.first_stage = static_cast<int>(int64_t(work.slice) * args.pixel_stages / args.slices);
  work.end_stage = static_cast<int>(int64_t(work.slice + 1) * args.pixel_stages / args.slices);
  return work;
}

// By a whole warp; `leads`: 1 in one lane.
template <Products kProducts>
__device__ __forceinline__ void load_stages(const KernelArgs& args, uint32_t leads, StageRing ring, uint32_t stages,
                                            const BlockWork& work) {
  int q = 0, p = 0, n = 0;
  if (args.window) {
    q = work.first_stage % args.tiles_w;
    p = work.first_stage / args.tiles_w % args.tiles_h;
    n = work.first_stage / args.tiles_w / args.tiles_h;
  }
  wait_for_earlier_kernels();
  for (int i = work.first_stage; i < work.end_stage; ++i) {
    barrier_wait(ring.emptied(), ring.parity ^ 1);
    const uint32_t filled = ring.filled(), to = stages + ring.stage * args.stage_bytes;
    barrier_expect(leads, filled, args.filled_bytes);
    if (args.window) {
      const int column = q * 8, row = p * args.tile_rows;
      load_box(leads, to + args.grad_offset, &args.grad, filled, work.first_filter, column, row, n);
      if constexpr (kProducts == Products::kTurned) {
        for (int copy = 1; copy < args.grad_copies; ++copy) {
          load_box(leads, to + args.grad_offset + copy * args.grad_copy_bytes, &args.grad, filled,
                   work.first_filter + copy * args.grad_copy_channels, column, row, n);
        }
      }
      const int left = column * args.stride - args.pad_w, top = row * args.stride - args.pad_h;
      if constexpr (kProducts == Products::kColumn) {
        load_box_5d(leads, to, &args.x, filled, 0, left, work.first_channel / 16, top, n);
      }
      for (int plane = 0; kProducts != Products::kColumn && plane < args.x_copies;
           ++plane) {  // one, or four: residues (y, x)
        load_box(leads, to + plane * args.x_copy_bytes, &args.x, filled, work.first_channel, left + (plane & 1),
                 top + (plane >> 1), n);
      }
      if (++q == args.tiles_w) {
        q = 0;
        if (++p == args.tiles_h) {
          p = 0;
          ++n;
        }
      }
    } else {
      const int pixel = i * args.pixels;
      for (int copy = 0; copy < args.grad_copies; ++copy) {
        load_box(leads, to + args.grad_offset + copy * args.grad_copy_bytes, &args.grad, filled,
                 work.first_filter + copy * args.grad_copy_channels, pixel, 0, 0);
      }
      for (int copy = 0; copy < args.x_copies; ++copy) {
        load_box(leads, to + copy * args.x_copy_bytes, &args.x, filled,
                 work.first_channel + copy * args.x_copy_channels, pixel, 0, 0);
      }
    }
    ring.advance();
  }
}

// A warpgroup's sums: all in one product, or (kSplitRow) those of the taps 0 and 2, and of tap 1.
template <int kWidth, Products kProducts>
struct Sums {
  float all[kWidth / 2] = {};
};
template <int kWidth>
struct Sums<kWidth, Products::kSplitRow> {
  float outer[kWidth / 3] = {}, inner[kWidth / 6] = {};
};

// Of the nine taps in the order in which they lie in a window, or in the four residues' windows with stride 2: so that the
// second block of a product lies behind the first.
constexpr int kTaps = 9;
__device__ __forceinline__ int turned_tap(const KernelArgs& args, int position) {
  const uint64_t order = args.stride == 1 ? 0x876543210 : 0x453718620;
  return static_cast<int>(order >> 4 * position & 15);
}

template <class T, int kWidth, Products kProducts>
class Worker {
  static constexpr bool kSplit = kProducts == Products::kSplitRow;

 public:
  __device__ __forceinline__ Worker(const KernelArgs& args, StageRing ring, uint32_t stages, int warpgroup)
      : args_(args), ring_(ring), signals_(threadIdx.x % 32 == 0) {
    grad_layout_ = descriptor_layout(args.grad_row_bytes, args.grad_group_bytes);
    x_layout_ = descriptor_layout(args.x_row_bytes, args.x_group_bytes);
    first_inner_ = 0;
    if constexpr (kProducts == Products::kTurned) {
      const auto at = [&](int position) {
        const int tap = turned_tap(args, position), r = tap / 3, s = tap % 3, residues = args.stride - 1;
        return (r & residues) * 2 * args.x_copy_bytes + (s & residues) * args.x_copy_bytes +
               (r >> residues) * args.filter_row_bytes + (s >> residues) * args.x_row_bytes;
      };
      const int first = 2 * warpgroup;  // of the last, the second block is the first one again, and not stored
      first_x_ = transposed_start(stages + at(first), at(min(first + 1, kTaps - 1)) - at(first));
      first_grad_ = transposed_start(stages + args.grad_offset, args.grad_copy_bytes);
      return;
    }
    if constexpr (kProducts == Products::kColumn) {
      first_x_ = transposed_start(stages + warpgroup * args.x_row_bytes, args.x_block_bytes);
      first_grad_ = transposed_start(stages + args.grad_offset, 0);
      return;
    }
    // Fewer than 64 output channels: the blocks behind them are the first one again, and not stored.
    first_grad_ = transposed_start(stages + args.grad_offset + (args.window ? 0 : warpgroup * args.grad_copy_bytes), 0);
    if (kSplit) {  // rows 0 and 2 of the filter read the residue 0 of the rows of x, row 1 the other
      const uint32_t plane =
          stages + (warpgroup & 1) * 2 * args.x_copy_bytes + (warpgroup >> 1) * args.filter_row_bytes;
      first_x_ = transposed_start(plane, args.x_block_bytes);
      first_inner_ = transposed_start(plane + args.x_copy_bytes, 0);
    } else {
      first_x_ = transposed_start(stages + (args.window ? warpgroup * args.filter_row_bytes : 0), args.x_block_bytes);
    }
  }

  __device__ __forceinline__ void sum_stages(Sums<kWidth, kProducts>& sums, int count) {
    if (args_.five_steps) {
      sum_stages_by<5>(sums, count);
    } else {
      sum_stages_by<4>(sums, count);
    }
  }

 private:
  // Loops that run at least once, as the compiler has to see to keep the products asynchronous.
  template <int kSteps>
  __device__ __forceinline__ void sum_stages_by(Sums<kWidth, kProducts>& sums, int count) {
    uint32_t emptied = 0, releases = 0;
    do {
      barrier_wait(ring_.filled(), ring_.parity);
      const uint32_t stage = static_cast<uint32_t>(ring_.stage * args_.stage_bytes) >> 4;
      uint32_t grad = first_grad_ + stage, x = first_x_ + stage;
      [[maybe_unused]] uint32_t inner = first_inner_ + stage;
      int round = 0;
      do {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          if constexpr (kSplit) {
            wgmma<T, kWidth / 3 * 2, true>(sums.outer, descriptor(grad_layout_, grad), descriptor(x_layout_, x));
            wgmma<T, kWidth / 3, true>(sums.inner, descriptor(grad_layout_, grad), descriptor(x_layout_, inner));
            inner += args_.x_step;
          } else if constexpr (kProducts == Products::kTurned) {
            wgmma<T, kWidth, true>(sums.all, descriptor(x_layout_, x), descriptor(grad_layout_, grad));
          } else {
            wgmma<T, kWidth, true>(sums.all, descriptor(grad_layout_, grad), descriptor(x_layout_, x));
          }
          grad += args_.grad_step;
          x += args_.x_step;
        }
        wgmma_commit();
      } while (++round < args_.rounds);
      wgmma_wait<1>();
      // What is still in flight reads this stage; the one before is free.
      barrier_arrive_if(emptied, releases);
      emptied = ring_.emptied();
      releases = signals_;
      ring_.advance();
    } while (--count > 0);
    wgmma_wait<0>();
  }

  const KernelArgs& args_;
  StageRing ring_;
  uint32_t grad_layout_, x_layout_, first_grad_, first_x_, first_inner_;
  uint32_t signals_;  // one lane a warp
};

// Sums of kColumns columns; `tap_of` and `channel_of`: of a column.
template <int kColumns, class TapOf, class ChannelOf>
__device__ __forceinline__ void store_sums(const KernelArgs& args, float* slice, const float (&sum)[kColumns / 2],
                                           int first_filter, const BlockWork& work, TapOf tap_of,
                                           ChannelOf channel_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = first_filter + 16 * warp + lane / 4 + 8 * h;
    if (k >= args.out_channels) continue;
    float* const row = slice + int64_t(k) * args.taps * args.pitch;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int c = work.first_channel + channel_of(8 * j) + 2 * (lane % 4);
      if (c >= args.in_channels) continue;
      // The pitch is even: what lies behind an odd last channel is nobody's.
      *reinterpret_cast<float2*>(row + tap_of(8 * j) * args.pitch + c) = {sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]};
    }
  }
}

// Sums of the taps at two positions, of 32 input channels each, in columns of output channels.
template <int kColumns>
__device__ __forceinline__ void store_turned_sums(const KernelArgs& args, float* slice,
                                                  const float (&sum)[kColumns / 2], int first_position,
                                                  const BlockWork& work) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int position = first_position + warp / 2, filter_floats = args.taps * args.pitch;
  if (position >= kTaps) return;
  const int tap = turned_tap(args, position);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int c = work.first_channel + 16 * (warp % 2) + lane / 4 + 8 * h;
    if (c >= args.in_channels) continue;
    float* const column = slice + tap * args.pitch + c;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int k = work.first_filter + 8 * j + 2 * (lane % 4);
      if (k < args.out_channels) column[int64_t(k) * filter_floats] = sum[4 * j + 2 * h];
      if (k + 1 < args.out_channels) column[int64_t(k + 1) * filter_floats] = sum[4 * j + 2 * h + 1];
    }
  }
}

template <int kWidth, Products kProducts>
constexpr int kMaxThreads =
    (kProducts == Products::kTurned ? kWgradTurnedWarpgroups : wgrad_max_warpgroups(kWidth)) * 128 + 32;

template <class T, int kWidth, Products kProducts>
__global__ __launch_bounds__(kMaxThreads<kWidth, kProducts>,
                             1) void wgrad_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const StageRing ring = {base + args.stages * args.stage_bytes, args.stages};
  let_later_kernels_start();
  if (threadIdx.x == 0) {
    if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
    prefetch_tensor_map(&args.grad);
    prefetch_tensor_map(&args.x);
    for (int i = 0; i < args.stages; ++i) {
      barrier_init(ring.barriers + 8 * i, 1);
      barrier_init(ring.barriers + 8 * (args.stages + i), 4 * args.warpgroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const BlockWork work = work_of_block<kProducts>(args);
  if (warp >= 4 * args.warpgroups) {
    load_stages<kProducts>(args, threadIdx.x % 32 == 0, ring, base, work);
    return;
  }
  const int warpgroup = warp / 4;
  Sums<kWidth, kProducts> sums;
  Worker<T, kWidth, kProducts>(args, ring, base, warpgroup).sum_stages(sums, work.end_stage - work.first_stage);
  wait_for_earlier_kernels();  // they may still read the workspace
  float* const slice = args.workspace + work.slice * args.slice_floats;
  constexpr int kTapColumns = kWidth % 3 == 0 ? kWidth / 3 : kWidth;
  if constexpr (kProducts == Products::kTurned) {
    store_turned_sums<kWidth>(args, slice, sums.all, 2 * warpgroup, work);
  } else if constexpr (kProducts == Products::kColumn) {
    store_sums<kWidth>(
        args, slice, sums.all, work.first_filter, work,
        [warpgroup](int column) { return column / kTapColumns * 3 + warpgroup; },
        [](int column) { return column % kTapColumns; });
  } else if constexpr (kProducts == Products::kSplitRow) {
    const int tap = 3 * warpgroup;
    const auto channel = [](int column) { return column % kTapColumns; };
    store_sums<kWidth / 3 * 2>(
        args, slice, sums.outer, work.first_filter, work, [tap](int column) { return tap + column / kTapColumns * 2; },
        channel);
    store_sums<kWidth / 3>(args, slice, sums.inner, work.first_filter, work, [tap](int) { return tap + 1; }, channel);
  } else if (args.window) {
    const int tap = 3 * warpgroup;
    store_sums<kWidth>(
        args, slice, sums.all, work.first_filter, work, [tap](int column) { return tap + column / kTapColumns; },
        [](int column) { return column % kTapColumns; });
  } else {
    store_sums<kWidth>(
        args, slice, sums.all, work.first_filter + 64 * warpgroup, work, [](int) { return 0; },
        [](int column) { return column; });
  }
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

// Sizes of one get the stride that a dense tensor would have.
Strides effective_strides(const ConvShape& s, Strides x) {
  if (s.in_w == 1) x.w = round_up(s.in_channels, 8);
  if (s.in_h == 1) x.h = x.w * s.in_w;
  if (s.batch == 1) x.n = x.h * s.in_h;
  return x;
}

template <class T, int kWidth, Products kProducts>
void launch(const WgradArgs& a, DType dtype, const WgradPlan& plan, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const Strides x = effective_strides(s, a.x_strides);
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements) * sizeof(T); };
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto box = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint64_t grad_row = bytes(s.out_pixels() > 1 ? a.grad_z_stride : round_up(s.out_channels, 8));
  const int grad_channels = plan.grad_row_bytes / 2, x_channels = plan.x_row_bytes / 2;
  const int tile_rows = plan.pixels / 8;

  KernelArgs k;
  k.window = plan.window;
  k.warpgroups = plan.warpgroups;
  k.stages = plan.stages;
  k.stage_bytes = wgrad_stage_bytes(s, plan);
  k.grad_offset = wgrad_grad_offset(s, plan);
  k.grad_copy_channels = grad_channels;
  k.grad_copy_bytes = plan.pixels * plan.grad_row_bytes;
  k.x_copy_channels = x_channels;
  k.grad_row_bytes = plan.grad_row_bytes;
  k.x_row_bytes = plan.x_row_bytes;
  k.grad_group_bytes = 8 * plan.grad_row_bytes;
  k.grad_step = 2 * k.grad_group_bytes / 16;
  k.five_steps = plan.pixels == 80;
  k.rounds = k.five_steps ? 1 : plan.pixels / 64;
  k.pixels = plan.pixels;
  k.tile_rows = tile_rows;
  k.tiles_w = ceil_div(s.out_w, 8);
  k.tiles_h = ceil_div(s.out_h, tile_rows);
  k.stride = s.stride_w;
  k.pad_h = s.pad_h;
  k.pad_w = s.pad_w;
  if (plan.window) {
    const auto step = box(s.stride_w);
    const WgradWindow window = wgrad_window(s, plan);
    k.grad = tensor_map(kName, "grad_z", map_type(dtype), a.grad_z,
                        {size(s.out_channels), size(s.out_w), size(s.out_h), size(s.batch)},
                        {grad_row, grad_row * s.out_w, grad_row * s.out_w * s.out_h},
                        {box(grad_channels), 8, box(tile_rows), 1}, {1, 1, 1, 1}, plan.grad_row_bytes);
    if constexpr (kProducts == Products::kColumn) {
      k.x = tensor_map(kName, "x", map_type(dtype), a.x,
                       {size(x_channels), size(s.in_w), size(s.in_channels / x_channels), size(s.in_h), size(s.batch)},
                       {bytes(x.w), bytes(x_channels), bytes(x.h), bytes(x.n)},
                       {box(x_channels), box(window.w), box(window.blocks), box(window.h), 1}, {1, 1, 1, 1, 1},
                       plan.x_row_bytes);
    } else {
      k.x = tensor_map(
          kName, "x", map_type(dtype), a.x, {size(s.in_channels), size(s.in_w), size(s.in_h), size(s.batch)},
          {bytes(x.w), bytes(x.h), bytes(x.n)}, {box(x_channels), box(window.w) * step, box(window.h) * step, 1},
          {1, step, step, 1}, plan.x_row_bytes);
    }
    k.grad_copies = wgrad_grad_copies(plan);
    k.x_copies = window.planes;
    k.x_copy_bytes = window.plane_bytes;
    k.filter_row_bytes = window.w * plan.x_row_bytes;
    k.x_group_bytes = window.w * window.blocks * plan.x_row_bytes;
    // Taps are a pixel apart; blocks of 16 channels, and the rows of taps behind them, as many pixels as a window is wide.
    k.x_block_bytes = (kProducts == Products::kColumn ? window.w : 1) * plan.x_row_bytes;
    k.filled_bytes =
        k.grad_copies * k.grad_copy_bytes + window.planes * window.w * window.blocks * window.h * plan.x_row_bytes;
  } else {
    const auto pixels = size(s.out_pixels());
    // From whichever dimension has more than one pixel: the others' strides mean nothing.
    const cuuint64_t x_row = bytes(s.in_w > 1 ? x.w : s.in_h > 1 ? x.h : x.n);
    k.grad = tensor_map(kName, "grad_z", map_type(dtype), a.grad_z, {size(s.out_channels), pixels, 1, 1},
                        {grad_row, grad_row * pixels, grad_row * pixels}, {box(grad_channels), box(plan.pixels), 1, 1},
                        {1, 1, 1, 1}, plan.grad_row_bytes);
    k.x = tensor_map(kName, "x", map_type(dtype), a.x, {size(s.in_channels), pixels, 1, 1},
                     {x_row, x_row * pixels, x_row * pixels}, {box(x_channels), box(plan.pixels), 1, 1}, {1, 1, 1, 1},
                     plan.x_row_bytes);
    k.grad_copies = wgrad_grad_copies(plan);
    k.x_copies = ceil_div(plan.channels, x_channels);
    k.x_copy_bytes = plan.pixels * plan.x_row_bytes;
    k.filter_row_bytes = 0;
    k.x_group_bytes = 8 * plan.x_row_bytes;
    k.x_block_bytes = k.x_copy_bytes;
    k.filled_bytes = k.grad_copies * k.grad_copy_bytes + k.x_copies * k.x_copy_bytes;
  }
  k.x_step = 2 * k.x_group_bytes / 16;
  k.pixel_stages = static_cast<int>(wgrad_pixel_stages(s, plan));
  k.slices = plan.slices;
  k.filter_tiles = wgrad_filter_tiles(s, plan);
  k.channel_tiles = wgrad_channel_tiles(s, plan);
  k.tile_channels = plan.channels;
  k.out_channels = s.out_channels;
  k.in_channels = s.in_channels;
  k.taps = s.kernel_h * s.kernel_w;
  k.pitch = wgrad_pitch(s);
  k.workspace = static_cast<float*>(a.workspace);
  k.slice_floats = wgrad_slice_floats(s);

  constexpr auto kKernel = wgrad_sm90_kernel<T, kWidth, kProducts>;
  const int shared_bytes = k.stages * k.stage_bytes + std::max(2 * 8 * k.stages, wgrad_tail_bytes(plan));
  allow_shared_bytes(kKernel, shared_bytes);
  const unsigned int grid = checked_grid(int64_t(k.filter_tiles) * k.channel_tiles * k.slices, kName);
  launch_dependent<kKernel>(kName, grid, 128 * k.warpgroups + 32, shared_bytes, stream, k);
}

template <class T>
void choose(const WgradArgs& a, DType dtype, const WgradPlan& plan, cudaStream_t stream) {
  if constexpr (is_built_for_hopper()) {
    if (plan.turned) {
      return launch<T, kWgradTurnedWidth, Products::kTurned>(a, dtype, plan, stream);
    } else if (plan.window && a.shape.stride_w == 2) {
      switch (plan.width) {
        case 48: return launch<T, 48, Products::kSplitRow>(a, dtype, plan, stream);
        case 96: return launch<T, 96, Products::kSplitRow>(a, dtype, plan, stream);
        case 192: return launch<T, 192, Products::kSplitRow>(a, dtype, plan, stream);
        default: break;
      }
    } else if (plan.width == kWgradColumnWidth) {
      return launch<T, kWgradColumnWidth, Products::kColumn>(a, dtype, plan, stream);
    } else {
      switch (plan.width) {
        case 16: return launch<T, 16, Products::kRow>(a, dtype, plan, stream);
        case 32: return launch<T, 32, Products::kRow>(a, dtype, plan, stream);
        case 48: return launch<T, 48, Products::kRow>(a, dtype, plan, stream);
        case 64: return launch<T, 64, Products::kRow>(a, dtype, plan, stream);
        case 80: return launch<T, 80, Products::kRow>(a, dtype, plan, stream);
        case 96: return launch<T, 96, Products::kRow>(a, dtype, plan, stream);
        case 128: return launch<T, 128, Products::kRow>(a, dtype, plan, stream);
        case 192: return launch<T, 192, Products::kRow>(a, dtype, plan, stream);
        case 256: return launch<T, 256, Products::kRow>(a, dtype, plan, stream);
        default: break;
      }
    }
  }
  fail(kName, ": this build has no kernel for sums of ", plan.width, " columns");
}

}  // namespace

bool is_wgrad_sm90_built() { return is_built_for_hopper(); }

void wgrad_sm90(const WgradArgs& a, DType dtype, const WgradPlan& plan, cudaStream_t stream) {
  if (dtype == DType::kFloat16) {
    choose<__half>(a, dtype, plan, stream);
  } else if (dtype == DType::kBFloat16) {
    choose<__nv_bfloat16>(a, dtype, plan, stream);
  } else {
    fail(kName, ": no kernel for ", name_of(dtype));
  }
  add_wgrad_slices(a, DType::kFloat32, wgrad_pitch(a.shape), plan.slices, stream);
}

}  // namespace yolo12_fastconv
