// Dense convolution (groups = 1) as an implicit GEMM on Hopper's tensor cores, target sm90 (wgmma, bulk tensor copies):
// compute capability 9.0 only.
//
//   y[m, k] = act(scale[k] * sum over t, c of x[pixel(m, t), c] * w[k, t, c] + shift[k]) + residual[m, k]
//
// m: output pixel (n, p, q). t: filter tap (r, s). x: NHWC, element strides, channel stride 1, rows 16-byte aligned (a
// channel slice of a wider tensor is fine); pixels outside the image read as zero. w: packed, (K, R * S, C rounded up
// to 16 bytes), the rest unread. y: NHWC, pixels y_stride apart. half or bfloat16 in and out, float sums; float in and out
// with products in TF32.
//
// One block per multiprocessor computes tiles of 64 pixels x kChannels output channels, always of the same channels.
// Each of its workers (a warpgroup) has a tile of its own, and a warp of its own that keeps its ring of pixel stages
// full; so one worker's epilogue runs under the products of the others. The weights either stay in shared memory for
// the life of the block, or run through a ring that all workers read in step (device/sm90_plan.h says which, and why).
// A pixel stage holds one block of input channels of
//   rows:   64 pixels (1x1)
//   window: the input window of 8x8 outputs, one per residue of the stride; a filter tap is an offset of whole rows
//           into it, which the swizzled operands of wgmma allow, so x crosses L2 once instead of R * S times
//   taps:   64 pixels as one filter tap sees them (im2col mode of the copy engine)
// The copy engine writes zeros for padding and for channels behind C. Sums are added in an order that
// depends on the shape and the number of multiprocessors alone.
//
// Where tiles are few, the blocks of a cluster share the input channels of the same tiles (`split`), and each finishes
// some of their pixels with the sums that the others send into its shared memory.
//
// kStats: a variant for training, without activation and residual, leaves the mean and the squared deviations of what each
// block has stored (device/tile_stats.h), so that batch norm need not read y for its statistics. In half and bfloat16 (in
// float, tiles of 96 and 192 channels spilled), in tiles of up to 128 channels.
//
// kRest, kPaired: variants for plans with `rest`, `paired` and `one_ring` (device/sm90_plan.h), with no other loops than those over
// pairs of stages, for which there would be no registers.
//
// Compiled in four parts: implicit_gemm_sm90_plain.cu, implicit_gemm_sm90_float.cu, implicit_gemm_sm90_stats.cu,
// implicit_gemm_sm90_shared.cu.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "device/built_for_hopper.h"
#include "device/channel_stats.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/sm90_plan.h"
#include "device/sm90_results.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"
#include "device/tile_stats.h"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {

// The part in float: products in TF32.
void implicit_gemm_sm90_float(const ConvArgs& args, const Sm90Plan& plan, cudaStream_t stream);

namespace {

constexpr int kTilePixels = 64;

// Filter taps that share a pixel stage, and where that stage's pixels lie relative to the tile's first one.
struct Plane {
  int16_t right, down;
  int16_t first_group, last_group;
};
// Filter taps, or (rows) blocks of input channels, whose weights share a stage: one copy.
struct TapGroup {
  int16_t channel;  // of the first one, relative to the first channel of the block
  uint8_t r, s;  // its row and column
  uint8_t map, first_tap, taps;
};

constexpr int kMostWeightMaps = 4;

struct KernelArgs {
  CUtensorMap x, y, residual_map;
  CUtensorMap weight[kMostWeightMaps];
  CUtensorMap rest_weight;  // boxes of the channels of a part; streamed
  Affine affine;
  Act act;
  TileStats stats;
  PixelMode mode;
  int planes, groups, workers;  // weight stages of a block of channels
  int out_channels, blocks, last_block_steps;  // stages that the input channels take; wgmma steps in the last one
  int row_bytes, group_bytes;  // group: eight rows of a pixel stage as wgmma reads it
  int pixel_stages, pixel_stage_bytes, pixel_filled_bytes;
  int weight_stages, weight_stage_bytes, tap_bytes;
  int block_channels, block_columns;  // from one block of channels to the next, as the maps of x and the weights count
  int pixel_copies, copy_channels, copy_bytes;  // rows: of a pixel stage
  int pixel_stage_step, weight_stage_step;  // the same in 16 bytes, as descriptors count
  int block_steps;  // wgmma steps in a full block of channels
  bool resident, store_boxes;
  // Where stages of x and of the weights correspond: blocks of channels in a stage, and stages of a tile (multiply_pairs()).
  int pair_parts, pair_stages;  // 0: they do not
  int next_ring;  // pixel stages from a worker's ring to the next one's; 0: all workers share one
  FastDivide by_ring;  // stages of a ring
  bool in_turn;  // the products of a tile wait for those of the tile before, which another worker has
  int half_bytes, half_pixels,
      half_columns;  // kPaired: from the half of a pixel stage that one block copies to the other's
  int rest_tiles, rest_first, rest_sharers;  // kRest: of a column of channels, the first one, workers that share a part
  int store_lanes;  // without boxes: channels that are stored at once
  int tiles, columns;  // pixel tiles; blocks (or clusters) per channel tile
  // Tiles of a column, and what its workers need to take them in turn; of the first `longer_columns` one tile more.
  int column_tiles, longer_columns, rounds, longer_rounds;
  int split, split_blocks;  // blocks of a cluster, and of the input channels that each has
  int lag_blocks;  // streamed: by so many blocks of channels a worker starts after the last
  int offset_pixels, offset_output, offset_exchange, offset_affine, offset_barriers, offset_rings;
  int out_h, out_w, stride_h, stride_w, pad_h, pad_w;
  int64_t pixels;
  int tile_channels;
  FastDivide by_tiles_w, by_tiles_h, by_out_w, by_out_h, by_channel_tiles;
  void* y_data;
  int64_t y_stride;
  const void* residual;
  int64_t residual_stride;
  bool residual_vectors;  // 16-byte loads are aligned
  bool residual_boxes;  // and boxes of y are stored
  Plane plane[kSm90MaxTaps];
  TapGroup group[kSm90MaxTaps];
  int tap_offset[kSm90MaxTaps];  // where the rows that a tap reads begin in its pixel stage, in 16 bytes
};

template <int kChannels>
constexpr int kMaxThreads = sm90_max_workers(kChannels) * 160 + 32;

// First output pixel of a tile. n, p and q only where the mode needs them: not in rows.
struct TilePosition {
  int n = 0, p = 0, q = 0;
  int pixel = 0;  // not of a window
};

__device__ __forceinline__ TilePosition window_position(const KernelArgs& args, int tile) {
  TilePosition t;
  int row;
  args.by_tiles_w.divide(tile, row, t.q);
  args.by_tiles_h.divide(row, t.n, t.p);
  t.q *= 8;
  t.p *= 8;
  return t;
}

// skipped: pixels between the first one of the tile and the position.
__device__ __forceinline__ TilePosition row_position(int tile, int skipped = 0) {
  TilePosition t;
  t.pixel = tile * kTilePixels + skipped;
  return t;
}

__device__ __forceinline__ TilePosition taps_position(const KernelArgs& args, int tile, int skipped = 0) {
  TilePosition t = row_position(tile, skipped);
  int row;
  args.by_out_w.divide(t.pixel, row, t.q);
  args.by_out_h.divide(row, t.n, t.p);
  return t;
}

// A place in a ring of stages, and the parity of the barrier phase that it stands for.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The barriers of one ring: filled[stages], then emptied[stages].
struct Ring {
  uint32_t barriers;
  int stages;
  __device__ __forceinline__ uint32_t filled(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t emptied(int stage) const { return barriers + (stages + stage) * 8; }
};

// The part of the work that a block has: `tiles` tiles of the same output channels, every args.columns-th one from
// `column` on, so that no block has more than one tile more than another. Its workers take them in turn.
struct BlockWork {
  int first_channel, column, tiles;
  int rounds;  // of tiles for all workers
  int rank, first_block, blocks;  // in the cluster; its share of the blocks of input channels
};

// Parts of a tile's channels that leave a warp at once.
template <class T, int kChannels>
constexpr int kStoreParts = kChannels / sm90_store_channels(kChannels, sizeof(T));

// kRest: what a block has of the tiles that are left when all blocks have the same number of them.
struct RestWork {
  int tile, part;  // of its channels
  bool any;
};

template <int kParts>
__device__ __forceinline__ RestWork rest_of_block(const KernelArgs& args, const BlockWork& work) {
  int column = work.column;
  asm volatile("" : "+r"(column));  // not worth a register over all products: 192 and 256 channels spilled
  const int tile = column / kParts;
  return {args.rest_first + tile, column % kParts, tile < args.rest_tiles};
}

template <bool kSplit, bool kPaired>
__device__ __forceinline__ BlockWork work_of_block(const KernelArgs& args) {
  BlockWork work;
  int index = static_cast<int>(blockIdx.x), channel_tile;
  work.rank = work.first_block = 0;
  work.blocks = args.blocks;
  if constexpr (kSplit) {
    index = cluster_index();
    work.rank = cluster_rank();
    work.first_block = work.rank * args.split_blocks;
    work.blocks = min(args.split_blocks, args.blocks - work.first_block);
  }
  if constexpr (kPaired) work.rank = cluster_rank();
  args.by_channel_tiles.divide(index, work.column, channel_tile);
  work.first_channel = channel_tile * args.tile_channels;
  const bool longer = work.column < args.longer_columns;
  work.tiles = args.column_tiles + longer;
  work.rounds = longer ? args.longer_rounds : args.rounds;
  return work;
}

template <bool kPaired = false>
__device__ __forceinline__ TilePosition position_of(const KernelArgs& args, int tile, int rank = 0) {
  const int skipped = kPaired ? rank * args.half_pixels : 0;
  return args.mode == PixelMode::kWindow ? window_position(args, tile)
         : args.mode == PixelMode::kTaps ? taps_position(args, tile, skipped)
                                         : row_position(tile, skipped);
}

// All of the block: its barriers are set up. Called once by each warp, wherever it first uses one.
__device__ __forceinline__ void wait_for_set_up() { asm volatile("bar.sync 0;" ::: "memory"); }

// load_pixels() into the same place of both blocks of a cluster of two.
__device__ __forceinline__ void load_pixels_for_both(uint32_t leads, uint32_t to, const CUtensorMap* map,
                                                     uint32_t barrier, int c0, int c1, int c2, int c3, int right,
                                                     int down) {
#if YOLO12_HAS_WGMMA
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %9, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %10;\n"
      "}\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(right)),
      "h"(static_cast<uint16_t>(down)), "r"(leads), "h"(static_cast<uint16_t>(3))
      : "memory");
#endif
}

// kPaired: the half of a pixel stage that block `rank` of the cluster copies for both. left, top: of taps, of the half.
__device__ __forceinline__ void load_half(const KernelArgs& args, uint32_t leads, uint32_t filled, uint32_t to,
                                          int channel, const TilePosition& t, int left, int top, const Plane& plane,
                                          int column, int rank) {
  to += rank * args.half_bytes;
  if (args.mode == PixelMode::kTaps) {
    load_pixels_for_both(leads, to, &args.x, filled, channel, left, top, t.n, plane.right, plane.down);
  } else {
    load_box_for_both(leads, to, &args.x, filled, channel, t.pixel, column + rank * args.half_columns, 0);
  }
}

// A warp per worker: fills the worker's ring of pixel stages, tile after tile. One ring: the first worker's warp fills it, with the
// tiles of all in the order of their turns. `leads`: 1 in one lane, 0 in the others.
template <int kRestParts, bool kPaired>
__device__ __forceinline__ void load_pixels_of(const KernelArgs& args, uint32_t leads, Ring ring, uint32_t stages,
                                               int worker, const BlockWork& work) {
  RingPosition at;
  bool first = true;
  // In front of each copy instruction, so that all that leads to the first copy is done, and its code fetched, by then.
  const auto wait_once = [&](uint32_t prepared) {
    if (first) wait_for_earlier_kernels(prepared);
    first = false;
  };
  const bool one_ring = kRestParts > 0 && args.next_ring == 0;
  const int tile_step = one_ring ? 1 : args.workers, begin = one_ring && worker > 0 ? work.tiles : worker;
  for (int i = begin; i < work.tiles; i += tile_step) {
    const TilePosition t = position_of<kPaired>(args, i * args.columns + work.column, work.rank);
    const int left = t.q * args.stride_w - args.pad_w, top = t.p * args.stride_h - args.pad_h;
    int block = work.first_block + worker * args.lag_blocks;
    for (int step = 0; step < work.blocks; ++step) {
      const int channel = block * args.block_channels, column = block * args.block_columns;
#pragma unroll 1
      for (int j = 0; j < args.planes; ++j) {
        const Plane plane = args.plane[j];
        if (first) wait_for_set_up();
        if (kPaired && first) cluster_wait();
        barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
        const uint32_t filled = ring.filled(at.stage), to = stages + at.stage * args.pixel_stage_bytes;
        barrier_expect(leads, filled, args.pixel_filled_bytes);
        if constexpr (kPaired) {
          wait_once(column ^ channel ^ to ^ t.pixel ^ left ^ top ^ t.n ^ plane.right ^ plane.down);
          load_half(args, leads, filled, to, channel, t, left, top, plane, column, work.rank);
        } else if (args.mode == PixelMode::kWindow) {
          const int right = left + plane.right, down = top + plane.down;
          wait_once(channel ^ right ^ down ^ t.n ^ to);
          load_box(leads, to, &args.x, filled, channel, right, down, t.n);
        } else {
#pragma unroll 1
          for (int copy = 0; copy < args.pixel_copies; ++copy) {
            const uint32_t part = to + copy * args.copy_bytes;
            const int from = channel + copy * args.copy_channels;
            if (args.mode == PixelMode::kTaps) {
              wait_once(part ^ from ^ left ^ top ^ t.n ^ plane.right ^ plane.down);
              load_pixels(leads, part, &args.x, filled, from, left, top, t.n, plane.right, plane.down);
            } else {
              wait_once(part ^ from ^ t.pixel ^ column);
              load_box(leads, part, &args.x, filled, from, t.pixel, column, 0);
            }
          }
        }
        at.advance(args.pixel_stages);
      }
      if (++block == args.blocks) block = 0;
    }
  }
  if (first) wait_for_set_up();  // a worker without tiles
  if (kPaired && first) cluster_wait();
  if (one_ring && worker > 0) return;
  const auto leave = [&] {
    // The other block's warps arrive on this block's barriers: not after its end.
    for (int i = 0; kPaired && i < args.pixel_stages; ++i) {
      barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
      at.advance(args.pixel_stages);
    }
  };
  if constexpr (kRestParts > 0) {
    const RestWork rest = rest_of_block<kRestParts>(args, work);
    if (!rest.any || worker >= args.rest_sharers) return leave();
    const TilePosition t = position_of<kPaired>(args, rest.tile, work.rank);
    const int left = t.q * args.stride_w - args.pad_w, top = t.p * args.stride_h - args.pad_h;
    const int stage_step = one_ring ? 1 : args.rest_sharers;
    int block = 0, j = worker;
    for (int stage = worker; stage < args.pair_stages; stage += stage_step) {
      for (; j >= args.planes; j -= args.planes) ++block;
      const Plane plane = args.plane[j];
      j += stage_step;
      const int channel = block * args.block_channels, column = block * args.block_columns;
      barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
      const uint32_t filled = ring.filled(at.stage), to = stages + at.stage * args.pixel_stage_bytes;
      barrier_expect(leads, filled, args.pixel_filled_bytes);
      if constexpr (kPaired) load_half(args, leads, filled, to, channel, t, left, top, plane, column, work.rank);
#pragma unroll 1
      for (int copy = 0; !kPaired && copy < args.pixel_copies; ++copy) {
        const uint32_t part = to + copy * args.copy_bytes;
        const int from = channel + copy * args.copy_channels;
        if (args.mode == PixelMode::kTaps) {
          load_pixels(leads, part, &args.x, filled, from, left, top, t.n, plane.right, plane.down);
        } else {
          load_box(leads, part, &args.x, filled, from, t.pixel, column, 0);
        }
      }
      at.advance(args.pixel_stages);
    }
  }
  leave();
}

// A warp: fills the weight stages, in the order in which the workers read them: once, or again for every round of
// tiles and for what the last worker lags behind the first. Calls `when_ahead` once, when it would wait for workers or has
// nothing left to do.
template <int kRestParts, int kRestChannels, class Function>
__device__ __forceinline__ void load_weights(const KernelArgs& args, uint32_t leads, Ring ring, uint32_t stages,
                                             const BlockWork& work, Function&& when_ahead) {
  RingPosition at;
  const int steps = (args.resident ? 1 : work.rounds) * work.blocks + (args.workers - 1) * args.lag_blocks;
  int ahead = min(ring.stages, steps * args.groups);  // copies until then
  bool first = true;
  int block = work.first_block;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < args.groups; ++i) {
      const TapGroup group = args.group[i];
      const int channel = block * args.block_channels + group.channel, column = block * args.block_columns + group.s;
      if (first) wait_for_set_up();
      barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
      const uint32_t filled = ring.filled(at.stage);
      barrier_expect(leads, filled, group.taps * args.tap_bytes);
      if (first) {
        wait_for_earlier_kernels(channel ^ column ^ work.first_channel ^ group.r ^ group.map);
        first = false;
      }
      load_box(leads, stages + at.stage * args.weight_stage_bytes, &args.weight[group.map], filled, channel,
               work.first_channel, column, group.r);
      at.advance(args.weight_stages);
      if (--ahead == 0) when_ahead();
    }
    if (++block == args.blocks) block = 0;
  }
  if constexpr (kRestParts > 0) {
    const RestWork rest = rest_of_block<kRestParts>(args, work);
    if (args.resident || !rest.any) return;
    constexpr int kBytes = kRestChannels * 128;
    int group = 0;
    block = 0;
    for (int left = args.pair_stages / args.rest_sharers; left > 0; --left) {
      barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
      const uint32_t filled = ring.filled(at.stage);
      barrier_expect(leads, filled, args.rest_sharers * kBytes);
      for (int i = 0; i < args.rest_sharers; ++i) {
        const TapGroup tap = args.group[group];
        load_box(leads, stages + at.stage * args.weight_stage_bytes + i * kBytes, &args.rest_weight, filled,
                 block * args.block_channels, work.first_channel + rest.part * kRestChannels, tap.s, tap.r);
        if (++group == args.groups) group = 0, ++block;
      }
      at.advance(args.weight_stages);
    }
  }
}

// Mean and sum of squared deviations of what a warp stores, by channel, from the buffer that the copy engine reads too. The
// values are rounded by then: they are those that batch norm reads. Of 16 channels, transposed on their way to registers, the
// tensor cores give the sums (products with ones) and the squares (the diagonal of the products of all pairs): 20 instructions
// for 256 values, where adding them up in float takes 45.
//
// Summed are halves of differences from an origin, half so that no difference overflows. The origin of a channel is
// chosen from the warp's first full tile: zero, or the mean if that is beyond four deviations. So differences are exact but
// for the few values below half of such a mean, which are rounded to the operands' bits, and the sums of squares are at most
// 17 times what is left when the mean is taken off. If the first tile is unlike the others, the spread between them is part
// of what is summed, which bounds both.
template <class T, int kChannels>
class WarpMoments {
 public:
  // The warp's pixels of a tile, for one part of its channels. rows: a bit for each that exists, at least one.
  __device__ __forceinline__ void add(int part, const char* buffer, uint32_t rows) {
    if (rows == kAllRows) {
      if (rows_ < kSettled) settle(part, buffer);
      add_tile(part, buffer);
    } else {
      add_rows(part, buffer, rows);
    }
  }

  // After the last part of a tile.
  __device__ __forceinline__ void count(uint32_t rows) {
    rows_ += __popc(rows);
    if (rows == kAllRows) rows_ |= kSettled;
  }

  // {mean, squared deviations} of all channels to shared memory, then how many pixels they are of.
  __device__ __forceinline__ void store(float2* to) const {
    const int lane = threadIdx.x % 32;
    const float all = count(), share = all > 0 ? 1.0f / all : 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const int group = slot * 4 + lane % 4;
        if (group >= kGroups) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = sum_[part][slot][h];
          to[part * kStoreChannels + group * 16 + h * 8 + lane / 4] = {
              fmaf(2 * sum, share, -2 * origin(part, slot, h)), 4 * fmaf(-sum * share, sum, squares_[part][slot][h])};
        }
      }
    }
    if (lane == 0) to[kChannels].x = all;
  }

 private:
  static constexpr uint32_t kAllRows = 0xffff, kSettled = 1u << 30;
  static constexpr int kStoreChannels = sm90_store_channels(kChannels, sizeof(T));
  static constexpr int kParts = kChannels / kStoreChannels;
  static constexpr int kRowBytes = kStoreChannels * int(sizeof(T));
  static constexpr int kGroups = kStoreChannels / 16;  // of 16 channels: lanes l with l % 4 == group % 4 keep them
  static constexpr int kSlots = ceil_div(kGroups, 4);
  static_assert(sizeof(T) == 2);
  using Pair = PairOf<T>;

  static __device__ __forceinline__ uint32_t bits_of(Pair pair) {
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
  }
  static __device__ __forceinline__ Pair pair_of(uint32_t bits) {
    Pair pair;
    memcpy(&pair, &bits, 4);
    return pair;
  }
  static __device__ __forceinline__ float2 floats_of(uint32_t bits) {
    if constexpr (std::is_same_v<T, __half>) {
      return __half22float2(pair_of(bits));
    } else {
      return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
  }

  // Channels l / 4 and 8 + l / 4 of a group in lane l, as an operand of channels x pixels: values[0] and [2] are the first
  // channel's pixels 2 (l % 4) and the next, and those 8 behind, [1] and [3] the second's.
  static __device__ __forceinline__ void load(uint32_t (&values)[4], const char* buffer, int group) {
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // addresses are not worth a register over all products: 192 channels spilled
    const int at = buffer_offset<kRowBytes>(lane % 16, lane / 16);
    uint32_t loaded[4];
    // Two chunks further: swizzled or not, as buffers begin at multiples of the swizzle's period.
    load_transposed(loaded, shared_address(buffer) + (kSwizzled ? at ^ group * 32 : at + group * 32));
    values[0] = loaded[0];
    values[1] = loaded[2];
    values[2] = loaded[1];
    values[3] = loaded[3];
  }
  static constexpr bool kSwizzled = kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32;

  // Calls use(slot, group) for all groups, kUnroll of them in straight code: what runs once is not worth its fetching.
  template <int kUnroll, class Function>
  static __device__ __forceinline__ void for_groups(Function&& use) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll kUnroll
      for (int group = slot * 4; group < (slot + 1 < kSlots ? slot * 4 + 4 : kGroups); ++group) use(slot, group);
    }
  }

  static __device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    multiply_add<T>(d, a, b0, b1);
  }

  // Sums over the pixels, of both channels: of the values in all lanes, of their squares in lane l / 4 / 2 of each four, from
  // where all have it.
  static __device__ __forceinline__ void sums_of(const uint32_t (&values)[4], float (&sum)[2], float (&squares)[2]) {
    const uint32_t ones = round_pair<T>(1.0f, 1.0f);
    const int lane = threadIdx.x % 32;
    float sums[4], first[4], second[4];
    product(sums, values, ones, ones);
    product(first, values, values[0], values[2]);
    product(second, values, values[1], values[3]);
    sum[0] = sums[0];
    sum[1] = sums[2];
    const bool odd = lane & 4;
    squares[0] = __shfl_sync(0xffffffffu, odd ? first[1] : first[0], lane / 8, 4);
    squares[1] = __shfl_sync(0xffffffffu, odd ? second[3] : second[2], lane / 8, 4);
  }

  __device__ __forceinline__ float count() const { return static_cast<float>(rows_ & (kSettled - 1)); }
  static __device__ __forceinline__ bool keeps(int group) { return threadIdx.x % 4 == group % 4; }

  // Minus half of the origin: of the group's channels in all lanes, of those that a lane keeps.
  __device__ __forceinline__ uint32_t origins_of(int part, int slot, int group) const {
    return __shfl_sync(0xffffffffu, origins_[part][slot], group % 4, 4);
  }
  __device__ __forceinline__ float origin(int part, int slot, int h) const {
    const float2 both = floats_of(origins_[part][slot]);
    return h == 0 ? both.x : both.y;
  }

  // An origin of 16 rows, and what has been summed so far relative to it.
  __device__ __forceinline__ void settle(int part, const char* buffer) {
    for_groups<1>([&](int slot, int group) {
      uint32_t values[4];
      load(values, buffer, group);
      float sum[2], squares[2], chosen[2];
      sums_of(values, sum, squares);
      // sum^2 / 16 of the squares' sum is the mean's: more than 16 of 17 parts. Not if either is infinite or missing.
#pragma unroll
      for (int h = 0; h < 2; ++h) chosen[h] = 17 * sum[h] * sum[h] > 256 * squares[h] ? sum[h] / -32 : 0.0f;
      const uint32_t origins = round_pair<T>(chosen[0], chosen[1]);
      if (!keeps(group)) return;
      const float2 now = floats_of(origins);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float moved = (h == 0 ? now.x : now.y) - origin(part, slot, h);
        squares_[part][slot][h] += moved * (2 * sum_[part][slot][h] + count() * moved);
        sum_[part][slot][h] += count() * moved;
      }
      origins_[part][slot] = origins;
    });
  }

  __device__ __forceinline__ void add_tile(int part, const char* buffer) {
    // All groups at once, but of 80 channels, which spilled.
    for_groups<kSlots == 1 ? kGroups : 1>([&](int slot, int group) {
      uint32_t values[4];
      load(values, buffer, group);
      const uint32_t origins = origins_of(part, slot, group);
      const Pair half = pair_of(round_pair<T>(0.5f, 0.5f));
      const Pair origin[2] = {pair_of(__byte_perm(origins, 0, 0x1010)), pair_of(__byte_perm(origins, 0, 0x3232))};
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = bits_of(__hfma2(pair_of(values[i]), half, origin[i % 2]));
      float sum[2], squares[2];
      sums_of(values, sum, squares);
      if (keeps(group)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sum_[part][slot][h] += sum[h];
          squares_[part][slot][h] += squares[h];
        }
      }
    });
  }

  // Some rows of a tile, in float. Before any others, their mean is the origin.
  __device__ __forceinline__ void add_rows(int part, const char* buffer, uint32_t rows) {
    const uint32_t own = rows >> threadIdx.x % 4 * 2;
    const bool exists[4] = {bool(own & 1), bool(own & 2), bool(own & 0x100), bool(own & 0x200)};
    const auto sum_of_four = [](float value) {
      value += __shfl_xor_sync(0xffffffffu, value, 1);
      return value + __shfl_xor_sync(0xffffffffu, value, 2);
    };
    for_groups<1>([&](int slot, int group) {
      uint32_t values[4];
      load(values, buffer, group);
      float value[2][4];  // of a channel
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 both = floats_of(values[i]);
        value[i % 2][i / 2 * 2] = both.x;
        value[i % 2][i / 2 * 2 + 1] = both.y;
      }
      if (rows_ == 0) {
        float mean[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) sum += exists[i] ? value[h][i] : 0.0f;
          mean[h] = finite_origin(sum_of_four(sum) / static_cast<float>(__popc(rows)));
        }
        if (keeps(group)) origins_[part][slot] = round_pair<T>(mean[0] / -2, mean[1] / -2);
      }
      const float2 origins = floats_of(origins_of(part, slot, group));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float d = exists[i] ? fmaf(0.5f, value[h][i], h == 0 ? origins.x : origins.y) : 0.0f;
          sum += d;
          squares = fmaf(d, d, squares);
        }
        sum = sum_of_four(sum);
        squares = sum_of_four(squares);
        if (keeps(group)) {
          sum_[part][slot][h] += sum;
          squares_[part][slot][h] += squares;
        }
      }
    });
  }

  float sum_[kParts][kSlots][2] = {}, squares_[kParts][kSlots][2] = {};
  uint32_t origins_[kParts][kSlots] = {};
  uint32_t rows_ = 0;  // that the warp has read, and kSettled once a full tile was among them
};

struct NoMoments {};

// Whether the copy engine may bring the residual, to where the results of a warp wait for their way to y: all that the
// epilogue then does is to add. Of float, not in tiles whose registers spilled then.
template <class T, int kChannels, bool kStats>
constexpr bool kResidualBoxes = (sizeof(T) == 2 || kChannels <= 64 || kChannels == 128) && !kStats;

// What a warp does with its 16 pixels of a finished tile.
template <class T, int kChannels, bool kStats>
class TileWriter {
 public:
  static constexpr int kStoreChannels = sm90_store_channels(kChannels, sizeof(T));
  static constexpr int kRowBytes = kStoreChannels * int(sizeof(T));
  static constexpr int kBufferBytes = 16 * kRowBytes;

  // warp: of the block, and known to be the same in all lanes, so that the stores' operands are in uniform registers.
  __device__ __forceinline__ TileWriter(const KernelArgs& args, char* shared, int first_channel, int warp)
      : args_(args),
        affine_(reinterpret_cast<const float4*>(shared + args.offset_affine)),
        buffers_(shared + args.offset_output + warp * 2 * kBufferBytes),
        residual_barriers_(shared_address(shared) + args.offset_barriers + 16 * warp),
        first_channel_(first_channel),
        warp_(warp % 4) {}

  // Asks for the residual of a part of the tile that is to be written next: into the buffer that its results replace, after
  // the copy engine has read what was stored from there.
  __device__ __forceinline__ void load_residual(const TilePosition& tile, int part) const {
    if constexpr (kResidualBoxes<T, kChannels, kStats>) {
      if (args_.residual_boxes && threadIdx.x % 32 == 0) {
        wait_stores_read<1>();
        const uint32_t barrier = residual_barriers_ + 8 * (steps_ & 1);
        barrier_expect(1, barrier, kBufferBytes);
        move_box<true>(1, tile, part, steps_ & 1, barrier);
      }
    }
  }

  // Scale, shift, activation, residual; then through shared memory to y.
  template <bool kSilu>
  __device__ __forceinline__ void write(const float (&sum)[kChannels / 2], const TilePosition& tile) {
    const int lane = threadIdx.x % 32, warp = warp_;
    uint32_t rows = 0;
    if constexpr (kStats) rows = rows_of(tile, warp);
    // Two parts: stored together, behind one fence.
    const bool together =
        kPairs && args_.store_boxes && !args_.residual_boxes && first_channel_ + kStoreChannels < args_.out_channels;
#pragma unroll
    for (int part = 0; part < kChannels / kStoreChannels; ++part) {
      const int channel = first_channel_ + part * kStoreChannels;
      if (channel < args_.out_channels) {
        char* buffer = buffers_ + (steps_ & 1) * kBufferBytes;
        const uint32_t step = steps_++;
        if (kResidualBoxes<T, kChannels, kStats> && args_.residual_boxes) {
          barrier_wait(residual_barriers_ + 8 * (step & 1), step >> 1 & 1);
          if constexpr (!kResidualBoxes<T, kChannels, kStats>) {
          } else if constexpr (sizeof(T) == 2) {
            finish_halves<kSilu, true>(sum, part * kStoreChannels, lane, buffer, affine_);
          } else {
            finish_floats<kSilu, true>(sum, part * kStoreChannels, lane, buffer);
          }
        } else {
          if (part % 2 == 0 || !together) {
            wait_stores_read<kPairs ? 0 : 1>();
            __syncwarp();
          }
          if constexpr (sizeof(T) == 2) {
            finish_halves<kSilu, false>(sum, part * kStoreChannels, lane, buffer, affine_);
          } else {
            finish_floats<kSilu, false>(sum, part * kStoreChannels, lane, buffer);
          }
          if constexpr (!kStats) {
            if (args_.residual != nullptr) add_residual(buffer, tile, warp, lane, channel);
          }
        }
        if (together && part % 2 == 0) {
          // with the next part
        } else if (args_.store_boxes) {
          fence_for_copy_engine();
          __syncwarp();
          if (together) move_box<false>(lane == 0, tile, part - 1, (step + 1) & 1, 0);
          move_box<false>(lane == 0, tile, part, step & 1, 0);
          if (part + 1 < kChannels / kStoreChannels && channel + kStoreChannels < args_.out_channels) {
            load_residual(tile, part + 1);
          }
        } else {
          copy_rows(buffer, tile, warp, lane, channel);
        }
        if constexpr (kStats) {
          if (rows != 0) moments_.add(part, buffer, rows);
        }
      }
    }
    if constexpr (kStats) moments_.count(rows);
  }

  // kRest: a part of a tile whose reduction the first `sharers` workers of the block have shared. Their sums are added in the
  // order of the workers, by the first one, which then writes as above.
  template <bool kSilu>
  __device__ __forceinline__ void write_part(float (&sum)[kStoreChannels / 2], const TilePosition& tile, int part,
                                             int worker, int sharers) {
    const int lane = threadIdx.x % 32, channel = first_channel_ + part * kStoreChannels;
    wait_stores_read<0>();
    __syncwarp();
    if (worker > 0) {
#pragma unroll
      for (int i = 0; i < kStoreChannels / 8; ++i) {
        *reinterpret_cast<float4*>(buffers_ + (32 * i + lane) * 16) = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2],
                                                                       sum[4 * i + 3]};
      }
    }
    if (sharers > 1) asm volatile("bar.sync 1, %0;" ::"r"(128 * sharers) : "memory");
    if (worker > 0) return;
    const char* from = buffers_;
#pragma unroll 1
    for (int other = 1; other < sharers; ++other) {
      from += 4 * 2 * kBufferBytes;
#pragma unroll
      for (int i = 0; i < kStoreChannels / 8; ++i) {
        const float4 more = *reinterpret_cast<const float4*>(from + (32 * i + lane) * 16);
        sum[4 * i] += more.x;
        sum[4 * i + 1] += more.y;
        sum[4 * i + 2] += more.z;
        sum[4 * i + 3] += more.w;
      }
    }
    finish_halves<kSilu, false>(sum, 0, lane, buffers_, affine_ + part * kStoreChannels / 2);
    if (args_.residual != nullptr) add_residual(buffers_, tile, warp_, lane, channel);
    if (args_.store_boxes) {
      fence_for_copy_engine();
      __syncwarp();
      move_box<false>(lane == 0, tile, part, 0, 0);
    } else {
      copy_rows(buffers_, tile, warp_, lane, channel);
    }
  }

  // The moments of all that the block has written, to args.stats. Called once, by all warps that compute; the buffers are
  // free afterwards.
  __device__ __forceinline__ void write_stats(const char* shared, int column) {
    constexpr int kPitch = 2 * kBufferBytes / int(sizeof(float2));  // from one warp's moments to the next one's
    static_assert(kPitch > kChannels);
    const int threads = 128 * args_.workers;
    if (threadIdx.x % 32 == 0) wait_stores_read<0>();
    __syncwarp();
    moments_.store(reinterpret_cast<float2*>(buffers_));
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    const float2* const warps = reinterpret_cast<const float2*>(shared + args_.offset_output);
    for (int c = threadIdx.x; c < kChannels && first_channel_ + c < args_.out_channels; c += threads) {
      // Relative to the mean of the first warp, which has a pixel: differences of means are exact, a mean is not.
      const float origin = finite_origin(warps[c].x);
      float pixels = 0.0f, sum = 0.0f, squares = 0.0f;
#pragma unroll 4
      for (int warp = 0; warp < 4 * args_.workers; ++warp) {
        const float2 moments = warps[warp * kPitch + c];
        const float count = warps[warp * kPitch + kChannels].x, d = moments.x - origin;
        pixels += count;
        sum += count * d;
        squares += moments.y + count * d * d;
      }
      const float share = sum / pixels;
      args_.stats.moments[int64_t(column) * args_.out_channels + first_channel_ + c] = {origin + share,
                                                                                        squares - sum * share};
      if (first_channel_ + c == 0) args_.stats.counts[column] = pixels;
    }
  }

 private:
  static constexpr int kChunk = kLanesOf16Bytes<T>;

  // Whether both buffers are filled before they are stored. Moments read them one by one.
  static constexpr bool kPairs = kChannels == 2 * kStoreChannels && !kStats;

  // The warp's pixels of a part, between a buffer and the residual (kLoad) or y. In the lane where `leads` is not 0.
  template <bool kLoad>
  __device__ __forceinline__ void move_box(uint32_t leads, const TilePosition& tile, int part, int buffer,
                                           uint32_t barrier) const {
    const int channel = first_channel_ + part * kStoreChannels;
    const bool window = args_.mode == PixelMode::kWindow;
    const int c1 = window ? tile.q : tile.pixel + 16 * warp_, c2 = window ? tile.p + 2 * warp_ : 0;
    const uint32_t address = shared_address(buffers_) + buffer * kBufferBytes;
    if constexpr (kLoad) {
      load_box(leads, address, &args_.residual_map, barrier, channel, c1, c2, tile.n);
    } else {
      store_box(leads, &args_.y, address, channel, c1, c2, tile.n);
    }
  }

  // kStoreChannels of the sums, from `first` on, into a buffer; scale_shift: of the channels of the first sum. kAdds: to the residual, which lies there. As in stock, the
  // activated value is rounded before that.
  template <bool kSilu, bool kAdds, int kSums>
  __device__ __forceinline__ void finish_halves(const float (&sum)[kSums], int first, int lane, char* buffer,
                                                const float4* scale_shift) const {
    // Stores behind all that is loaded: a store to shared memory keeps later loads of scale and shift from moving up. Tiles
    // of 96 channels, and of 80 with moments, have no registers for it.
    constexpr bool kTight = kChannels == 96 || (kStats && kChannels == 80);
    constexpr int kPairs16 = kStoreChannels / 16, kBatch = kTight ? 1 : kPairs16;
#pragma unroll
    for (int from = 0; from < kPairs16; from += kBatch) {
      uint32_t packed[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = first + (from + i) * 16 + j * 8;
          const float4 affine = scale_shift[column / 2 + lane % 4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* d = sum + column / 2 + 2 * h;
            float u = fmaf(d[0], affine.x, affine.y), v = fmaf(d[1], affine.z, affine.w);
            if constexpr (kSilu) {
              u = silu_of_half(u);
              v = silu_of_half(v);
            }
            packed[i][2 * j + h] = round_pair<T>(u, v);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t at = shared_address(buffer) + offset(lane % 16, (from + i) * 2 + lane / 16);
        if constexpr (kAdds) {
          uint32_t residual[4];
          load_matrices(residual, at);
#pragma unroll
          for (int word = 0; word < 4; ++word) packed[i][word] = sum_of_pairs<T>(packed[i][word], residual[word]);
        }
        store_matrices(at, packed[i]);
      }
    }
  }

  // The same in float. Of a row eight channels lie in four lanes, two in each: 32 bytes, two chunks. Half a warp writes at
  // once, four rows. If all wrote the same eight channels, two rows each would share their banks, since the swizzle does
  // no more than swap their chunks. So one of the two writes channels of `far` while the other writes those of `near`.
  // Their scale and shift lie in different banks too.
  template <bool kSilu, bool kAdds>
  __device__ __forceinline__ void finish_floats(const float (&sum)[kChannels / 2], int first, int lane,
                                                char* buffer) const {
    constexpr int kFar = kRowBytes == 128 ? 3 : 1;
    const bool swapped = lane & (kRowBytes == 128 ? 4 : 8);
#pragma unroll
    for (int i = 0; i < kStoreChannels / 8; ++i) {
      const int near = i % 2 == 0 ? i / 2 : i / 2 ^ kFar, far = near ^ kFar;
      const int j = swapped ? far : near;
      const float4 affine = affine_[first / 2 + j * 4 + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float *a = sum + first / 2 + near * 4 + 2 * h, *b = sum + first / 2 + far * 4 + 2 * h;
        float2 y = {fmaf(swapped ? b[0] : a[0], affine.x, affine.y), fmaf(swapped ? b[1] : a[1], affine.z, affine.w)};
        if constexpr (kSilu) y = {y.x * sigmoid<true>(y.x), y.y * sigmoid<true>(y.y)};  // closer than TF32's 2^-11
        float2& at = *reinterpret_cast<float2*>(buffer + offset(lane / 4 + 8 * h, 2 * j + lane % 4 / 2) + lane % 2 * 8);
        at = kAdds ? make_float2(y.x + at.x, y.y + at.y) : y;
      }
    }
  }

  static __device__ __forceinline__ int offset(int row, int chunk) { return buffer_offset<kRowBytes>(row, chunk); }

  // Which of the warp's 16 rows are pixels of the map: a bit each.
  __device__ __forceinline__ uint32_t rows_of(const TilePosition& tile, int warp) const {
    const auto bits = [](int64_t count) { return count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1; };
    if (args_.mode != PixelMode::kWindow) return bits(args_.pixels - (tile.pixel + 16 * warp));
    const uint32_t row = bits(args_.out_w - tile.q) & 0xff;
    const int p = tile.p + 2 * warp;
    return (p < args_.out_h ? row : 0) | (p + 1 < args_.out_h ? row << 8 : 0);
  }

  // The output pixel in a row of this warp's buffer, or -1 behind the map.
  __device__ __forceinline__ int64_t pixel_of(const TilePosition& tile, int warp, int row) const {
    if (args_.mode == PixelMode::kWindow) {
      const int p = tile.p + 2 * warp + row / 8, q = tile.q + row % 8;
      return p < args_.out_h && q < args_.out_w ? (int64_t(tile.n) * args_.out_h + p) * args_.out_w + q : -1;
    }
    const int64_t pixel = int64_t(tile.pixel) + 16 * warp + row;
    return pixel < args_.pixels ? pixel : -1;
  }

  // Where no boxes of the residual are loaded.
  __device__ __forceinline__ void add_residual(char* buffer, const TilePosition& tile, int warp, int lane,
                                               int channel) const {
    constexpr int kRowChunks = kStoreChannels / kChunk;
    __syncwarp();
#pragma unroll 1
    for (int index = lane; index < 16 * kRowChunks; index += 32) {
      const int row = index / kRowChunks, chunk = index % kRowChunks;
      const int64_t pixel = pixel_of(tile, warp, row);
      const int first = channel + chunk * kChunk;
      if (pixel < 0 || first >= args_.out_channels) continue;
      const T* from = static_cast<const T*>(args_.residual) + pixel * args_.residual_stride + first;
      T added[kChunk];
      if (args_.residual_vectors && first + kChunk <= args_.out_channels) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from);
        memcpy(added, &bits, 16);
      } else {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) added[e] = first + e < args_.out_channels ? from[e] : convert<T>(0.0f);
      }
      uint4* at = reinterpret_cast<uint4*>(buffer + offset(row, chunk));
      uint4 bits = *at;
      T value[kChunk];
      memcpy(value, &bits, 16);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) value[e] = convert<T>(convert<float>(value[e]) + convert<float>(added[e]));
      memcpy(&bits, value, 16);
      *at = bits;
    }
  }

  // Where y can't be stored in boxes.
  __device__ __forceinline__ void copy_rows(const char* buffer, const TilePosition& tile, int warp, int lane,
                                            int channel) const {
    __syncwarp();
    if (sizeof(T) == 2 && args_.store_lanes == 4) {
      copy_out<8 / sizeof(T)>(buffer, tile, warp, lane, channel);
    } else if (args_.store_lanes == 2) {
      copy_out<2>(buffer, tile, warp, lane, channel);
    } else {
      copy_out<1>(buffer, tile, warp, lane, channel);
    }
  }

  // Rows of y that are not 16-byte aligned: as wide as they are aligned, kLanes channels at once.
  template <int kLanes>
  __device__ __forceinline__ void copy_out(const char* buffer, const TilePosition& tile, int warp, int lane,
                                           int channel) const {
    using Word = typename Lanes<T, kLanes>::Word;
    constexpr int kRowWords = kStoreChannels / kLanes;
    const int words = min(kStoreChannels, args_.out_channels - channel) / kLanes;
#pragma unroll 2
    for (int index = lane; index < 16 * kRowWords; index += 32) {
      const int row = index / kRowWords, word = index % kRowWords, c = word * kLanes;
      const int64_t pixel = pixel_of(tile, warp, row);
      if (pixel < 0 || word >= words) continue;
      *reinterpret_cast<Word*>(static_cast<T*>(args_.y_data) + pixel * args_.y_stride + channel + c) =
          *reinterpret_cast<const Word*>(buffer + offset(row, c / kChunk) + c % kChunk * sizeof(T));
    }
  }

  const KernelArgs& args_;
  const float4* affine_;  // {scale, shift} of two channels
  char* buffers_;
  uint32_t residual_barriers_;  // one for each buffer
  int first_channel_, warp_;
  uint32_t steps_ = 0;  // parts written, each through the other buffer than the last
  [[no_unique_address]] std::conditional_t<kStats, WarpMoments<T, kChannels>, NoMoments> moments_;
};

// Whether a kernel has multiply_pairs(). Not split, as a kernel of its own.
template <class T, bool kSplit>
constexpr bool kHasPairLoops = sizeof(T) == 2 && !kSplit;

// Turns of the workers: named barriers 2 and up, one a worker, on which it waits and the one before it arrives.
__device__ __forceinline__ void wait_for_turn(int worker) {
  asm volatile("bar.sync %0, 256;" ::"r"(2 + worker) : "memory");
}
__device__ __forceinline__ void give_turn_if(uint32_t condition, int worker) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p bar.arrive %0, 256;\n"
      "}\n" ::"r"(2 + worker),
      "r"(condition)
      : "memory");
}

// One ring, whose last stages are those of a part: a worker may wait for one of them when all before have been filled, which the
// worker with the last tile knows. Else the parity of a stage could be that of the round before. Named barrier 6: behind the turns.
__device__ __forceinline__ bool ring_ends_in_parts(const KernelArgs& args) {
  return args.next_ring == 0 && args.rest_tiles > 0;
}
__device__ __forceinline__ void let_parts_begin(const KernelArgs& args) {
  asm volatile("bar.arrive 6, %0;" ::"r"(128 * args.workers) : "memory");
}
__device__ __forceinline__ void wait_for_parts(const KernelArgs& args) {
  asm volatile("bar.sync 6, %0;" ::"r"(128 * args.workers) : "memory");
}

// The products of one warpgroup's tiles. With few channels a group of products takes 100 to 150 cycles, and what a warp
// does from one group to the next (a wait, a signal, descriptors) takes 4 to 10 an instruction. In a loop over filter taps
// with a choice of steps inside, 90 instructions, each tap took 240 to 300 cycles whatever its products; so did the warp
// that copied each tap's weights. Now taps that are few bytes share a stage, and the steps of a stage are unrolled.
template <class T, int kChannels, bool kPairLoops, bool kOnlyPairs, bool kPaired>
class Worker {
 public:
  __device__ __forceinline__ Worker(const KernelArgs& args, Ring pixel_ring, Ring weight_ring, uint32_t pixel_stages,
                                    uint32_t weight_stages)
      : args_(args),
        pixel_ring_(pixel_ring),
        weight_ring_(weight_ring),
        first_pixels_(descriptor_start(pixel_stages)),
        first_weights_(descriptor_start(weight_stages)),
        pixel_layout_(descriptor_layout(args.row_bytes, args.group_bytes)),
        weight_layout_(descriptor_layout(args.row_bytes, 8 * args.row_bytes)),
        signals_(threadIdx.x % 32 == 0) {
    if constexpr (kPaired) other_block_ = address_in_block(0, cluster_rank() ^ 1) - address_in_block(0, cluster_rank());
  }

  // Products of a tile, from block `first` of the input channels to the one before `end`, round: all if it is the same,
  // never none. Resident weights lie in shared memory in
  // the order of use, with `wait` if they may still be on their way; streamed ones come through their ring.
  // next: the worker whose turn it is when all products of the tile are under way; -1: none.
  template <bool kStreamed>
  __device__ __forceinline__ void multiply_tile(float (&sum)[kChannels / 2], int first, int end, bool wait, int next) {
    if constexpr (kPairLoops) {
      if (args_.pair_parts == 1) return multiply_pairs<kStreamed, 1>(sum, wait, next);
      if (kOnlyPairs || args_.pair_parts == 2) return multiply_pairs<kStreamed, 2>(sum, wait, next);
    }
    if constexpr (!kOnlyPairs) {
      switch (args_.block_steps) {
        case 4: return multiply_blocks<kStreamed, 4>(sum, first, end, wait);
        case 2: return multiply_blocks<kStreamed, 2>(sum, first, end, wait);
        default: return multiply_blocks<kStreamed, 1>(sum, first, end, wait);
      }
    }
  }

  // Products of a part of a tile, kRestChannels from `part` times as many on: those of every sharers-th stage, from `index` on.
  // Streamed weights lie in their stages one behind the other, a box for each of these workers.
  template <int kRestChannels, bool kStreamed>
  __device__ __forceinline__ void multiply_part(float (&sum)[kRestChannels / 2], int part, int index, int sharers) {
    if (args_.pair_parts == 1) {
      multiply_part_stages<kRestChannels, kStreamed, 1>(sum, part, index, sharers);
    } else if constexpr (!kStreamed) {
      multiply_part_stages<kRestChannels, false, 2>(sum, part, index, sharers);
    }
  }

  // One ring: the stage that is filled as the `index`-th comes next.
  __device__ __forceinline__ void seek(int index) {
    int turns;
    args_.by_ring.divide(index, turns, pixel_at_.stage);
    pixel_at_.parity = turns & 1;
  }

  // Lets the weights of this many blocks pass.
  __device__ __forceinline__ void skip(int blocks) { skip_stages(blocks * args_.groups); }

  __device__ __forceinline__ void skip_stages(int stages) {
    for (int i = 0; i < stages; ++i) {
      barrier_wait(weight_ring_.filled(weight_at_.stage), weight_at_.parity);
      barrier_arrive_if(weight_ring_.emptied(weight_at_.stage), signals_);
      weight_at_.advance(weight_ring_.stages);
    }
  }

 private:
  // After wgmma_wait(): the stage may be filled again. kPaired: with halves from both blocks, so both are told.
  __device__ __forceinline__ void release_pixels(uint32_t emptied) {
    barrier_arrive_if(emptied, release_pixels_);
    if constexpr (kPaired) barrier_arrive_in_block_if(emptied + other_block_, release_pixels_);
  }

  // Rows or taps, blocks of 128 bytes of channels, kParts of them in a stage of x and in one of the weights: nothing is
  // looked up from one stage to the next.
  template <bool kStreamed, int kParts>
  __device__ __forceinline__ void multiply_pairs(float (&sum)[kChannels / 2], bool wait, int next) {
    if constexpr (!kStreamed) weight_at_ = {};
    const uint32_t emptied =
        multiply_stages<kChannels, kStreamed, kParts>(sum, first_weights_, 1, wait, args_.pair_stages, 1);
    if constexpr (!kStreamed) give_turn_if(next >= 0, next);
    finish_stages<kStreamed>(emptied);
  }

  template <int kRestChannels, bool kStreamed, int kParts>
  __device__ __forceinline__ void multiply_part_stages(float (&sum)[kRestChannels / 2], int part, int index,
                                                       int sharers) {
    constexpr int kBox = kRestChannels * 128 / 16;  // in 16 bytes
    const uint32_t weights =
        first_weights_ + (kStreamed ? index * kBox : index * (kParts * kChannels * 128 / 16) + part * kBox);
    const int passed = args_.next_ring == 0 ? sharers : 1;
    finish_stages<kStreamed>(multiply_stages<kRestChannels, kStreamed, kParts>(sum, weights, sharers, false,
                                                                               args_.pair_stages / sharers, passed));
  }

  // Products of `stages` stages of x, every passed-th of the ring, with kSumChannels of the tile's, whose weights begin at
  // `weights` in the first stage: in every one that is streamed, or in every weight_step-th. Returns the last stage of x
  // that is still read; finish_stages() waits for it.
  template <int kSumChannels, bool kStreamed, int kParts>
  __device__ __forceinline__ uint32_t multiply_stages(float (&sum)[kSumChannels / 2], uint32_t weights, int weight_step,
                                                      bool wait, int stages, int passed) {
    constexpr int kPixelPart = kTilePixels * 128 / 16, kWeightPart = kChannels * 128 / 16;  // in 16 bytes
    uint32_t emptied = 0;
    release_pixels_ = release_weights_ = 0;
    // A loop that runs at least once, as the compiler has to see to keep the products asynchronous.
    do {
      const uint32_t pixels = first_pixels_ + pixel_at_.stage * (kParts * kPixelPart);
      const uint32_t from = kStreamed ? weights + weight_at_.stage * (kParts * kWeightPart) : weights;
      if (kStreamed || wait) barrier_wait(weight_ring_.filled(weight_at_.stage), weight_at_.parity);
      barrier_wait(pixel_ring_.filled(pixel_at_.stage), pixel_at_.parity);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<T, kSumChannels>(sum, descriptor(pixel_layout_, pixels + part * kPixelPart + 2 * k),
                                 descriptor(weight_layout_, from + part * kWeightPart + 2 * k));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if constexpr (kStreamed) {
        barrier_arrive_if(weights_emptied_, release_weights_);
        weights_emptied_ = weight_ring_.emptied(weight_at_.stage);
        release_weights_ = signals_;
        weight_at_.advance(weight_ring_.stages);
      } else {
        weights += weight_step * (kParts * kWeightPart);
        ++weight_at_.stage;
      }
      release_pixels(emptied);
      emptied = pixel_ring_.emptied(pixel_at_.stage);
      release_pixels_ = signals_;
      for (int i = 0; i < passed; ++i) pixel_at_.advance(pixel_ring_.stages);
    } while (--stages > 0);
    return emptied;
  }

  template <bool kStreamed>
  __device__ __forceinline__ void finish_stages(uint32_t emptied) {
    wgmma_wait<0>();
    release_pixels(emptied);
    if constexpr (kStreamed) barrier_arrive_if(weights_emptied_, release_weights_);
  }

  template <bool kStreamed, int kSteps>
  __device__ __forceinline__ void multiply_blocks(float (&sum)[kChannels / 2], int first, int end, bool wait) {
    if constexpr (!kStreamed) weight_at_ = {};
    uint32_t emptied = 0;
    release_pixels_ = release_weights_ = 0;
    int block = first;
    // Loops that run at least once, as the compiler has to see to keep the products asynchronous.
    do {
      const bool full = block + 1 < args_.blocks || args_.last_block_steps == kSteps;
      int i = 0;
      do {
        const Plane plane = args_.plane[i];
        const uint32_t pixels = first_pixels_ + pixel_at_.stage * args_.pixel_stage_step;
        barrier_wait(pixel_ring_.filled(pixel_at_.stage), pixel_at_.parity);
        if (full && plane.last_group - plane.first_group == 8) {
#pragma unroll
          for (int group = 0; group < 9; ++group) {
            multiply_group<kStreamed, kSteps, 1>(sum, pixels, plane.first_group + group, wait, emptied);
          }
        } else {
          int g = plane.first_group;
          do {
            const TapGroup group = args_.group[g];
            if (full && group.taps == 1) {
              multiply_group<kStreamed, kSteps, 1>(sum, pixels, group.first_tap, wait, emptied);
            } else if (full && group.taps == 2) {
              multiply_group<kStreamed, kSteps, 2>(sum, pixels, group.first_tap, wait, emptied);
            } else if (full && group.taps == 3) {
              multiply_group<kStreamed, kSteps, 3>(sum, pixels, group.first_tap, wait, emptied);
            } else if (full && group.taps == 4) {
              multiply_group<kStreamed, kSteps, 4>(sum, pixels, group.first_tap, wait, emptied);
            } else {
              multiply_stage<kStreamed, kSteps>(sum, pixels, group, full ? kSteps : args_.last_block_steps, wait,
                                                emptied);
            }
          } while (++g <= plane.last_group);
        }
        if constexpr (!kStreamed) {
          wgmma_wait<1>();
          barrier_arrive_if(emptied, release_pixels_);
        }
        emptied = pixel_ring_.emptied(pixel_at_.stage);
        release_pixels_ = signals_;
        pixel_at_.advance(pixel_ring_.stages);
      } while (++i < args_.planes);
      if (++block == args_.blocks) block = 0;
    } while (block != end);
    wgmma_wait<0>();
    barrier_arrive_if(emptied, release_pixels_);
    if constexpr (kStreamed) barrier_arrive_if(weights_emptied_, release_weights_);
  }

  template <int kSteps>
  __device__ __forceinline__ void multiply_steps(float (&sum)[kChannels / 2], uint32_t pixels, uint32_t weights) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma<T, kChannels>(sum, descriptor(pixel_layout_, pixels + 2 * k), descriptor(weight_layout_, weights + 2 * k));
    }
    wgmma_commit();
  }

  // A weight stage times its parts of the pixel stage.
  template <bool kStreamed, int kSteps, int kTaps>
  __device__ __forceinline__ void multiply_group(float (&sum)[kChannels / 2], uint32_t pixels, int first_tap, bool wait,
                                                 uint32_t emptied) {
    const uint32_t weights = first_weights_ + weight_at_.stage * args_.weight_stage_step;
    if (kStreamed || wait) barrier_wait(weight_ring_.filled(weight_at_.stage), weight_at_.parity);
    wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const uint32_t from = pixels + args_.tap_offset[first_tap + tap];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        wgmma<T, kChannels>(sum, descriptor(pixel_layout_, from + 2 * k),
                            descriptor(weight_layout_, weights + (tap * kChannels * kSteps + k) * 2));
      }
    }
    wgmma_commit();
    leave_stage<kStreamed>(emptied);
  }

  // The same in any other case: `steps` of kSteps times 32 bytes of channels, or as many taps as no kernel has been unrolled for.
  template <bool kStreamed, int kSteps>
  __device__ __forceinline__ void multiply_stage(float (&sum)[kChannels / 2], uint32_t pixels, const TapGroup& group,
                                                 int steps, bool wait, uint32_t emptied) {
    uint32_t weights = first_weights_ + weight_at_.stage * args_.weight_stage_step;
    if (kStreamed || wait) barrier_wait(weight_ring_.filled(weight_at_.stage), weight_at_.parity);
    int tap = 0;
    do {
      const uint32_t from = pixels + args_.tap_offset[group.first_tap + tap];
      if (steps == 1) {
        multiply_steps<1>(sum, from, weights);
      } else if (steps == 2) {
        multiply_steps<2>(sum, from, weights);
      } else if (steps == 3) {
        multiply_steps<3>(sum, from, weights);
      } else {
        multiply_steps<4>(sum, from, weights);
      }
      weights += kChannels * kSteps * 2;
    } while (++tap < group.taps);
    leave_stage<kStreamed>(emptied);
  }

  // Streamed: the stages that the group before read are released.
  template <bool kStreamed>
  __device__ __forceinline__ void leave_stage(uint32_t emptied) {
    if constexpr (kStreamed) {
      wgmma_wait<1>();
      barrier_arrive_if(weights_emptied_, release_weights_);
      barrier_arrive_if(emptied, release_pixels_);
      release_pixels_ = 0;
      weights_emptied_ = weight_ring_.emptied(weight_at_.stage);
      release_weights_ = signals_;
      weight_at_.advance(weight_ring_.stages);
    } else {
      ++weight_at_.stage;
    }
  }

  const KernelArgs& args_;
  Ring pixel_ring_, weight_ring_;
  uint32_t first_pixels_, first_weights_;  // descriptors of the first stages
  uint32_t pixel_layout_, weight_layout_;
  uint32_t signals_;  // one lane a warp
  uint32_t other_block_ = 0;  // kPaired: from an address of this block to the same one of the other
  RingPosition pixel_at_, weight_at_;
  uint32_t weights_emptied_ = 0, release_weights_ = 0, release_pixels_ = 0;
};

// Split reductions: the sums of a warp's 16 pixels go to the block of the cluster that finishes them, and are added in the
// order of the blocks' ranks, its own first.
__device__ __forceinline__ int owner_of_sums(const KernelArgs& args, int warp) {
  return warp < args.split ? warp : warp - args.split;
}

template <int kChannels>
__device__ __forceinline__ void gather_sums(const KernelArgs& args, float (&sum)[kChannels / 2], const BlockWork& work,
                                            int worker, char* shared) {
  constexpr int kSumsBytes = 16 * kChannels * 4, kStep = 32 * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, others = args.split - 1;
  const int turn = warp >= args.split, owner = owner_of_sums(args, warp);
  const int turns = args.split == 4 ? 1 : 2;  // warps of a worker that a block finishes, at most
  const int barrier = args.offset_exchange + (4 * worker + warp) * 8;
  int sums =
      args.offset_exchange + kSm90ExchangeBarrierBytes + lane * 16 + (worker * turns + turn) * others * kSumsBytes;
  if (work.rank != owner) {
    const int slot = work.rank - (work.rank > owner);
    const uint32_t base = shared_address(shared);
    const uint32_t to = address_in_block(base + sums + slot * kSumsBytes, owner);
    const uint32_t filled = address_in_block(base + barrier, owner);
#pragma unroll
    for (int i = 0; i < kChannels / 8; ++i) store_in_block(to + i * kStep, sum + 4 * i, filled);
    return;
  }
  barrier_wait(shared_address(shared) + barrier, 0);
#pragma unroll 1
  for (int other = 0; other < others; ++other) {
#pragma unroll
    for (int i = 0; i < kChannels / 8; ++i) {
      const float4 part = *reinterpret_cast<const float4*>(shared + sums + i * kStep);
      sum[4 * i] += part.x;
      sum[4 * i + 1] += part.y;
      sum[4 * i + 2] += part.z;
      sum[4 * i + 3] += part.w;
    }
    sums += kSumsBytes;
  }
}

// Completes when scale and shift of the block's channels are in shared memory.
__device__ __forceinline__ uint32_t affine_barrier(const KernelArgs& args, const char* shared) {
  return shared_address(shared) + args.offset_rings - 8;
}

template <class T, int kChannels, bool kSplit, bool kStats, bool kRest, class WorkerType>
__device__ __forceinline__ void compute_tiles(const KernelArgs& args, WorkerType worker, int warp,
                                              const BlockWork& work, char* shared) {
  const int index = warp / 4;  // of the worker
  TileWriter<T, kChannels, kStats> writer(args, shared, work.first_channel, warp);
  const auto position_of_tile = [&](int i) {
    const int tile = i * args.columns + work.column;
    return args.mode == PixelMode::kWindow ? window_position(args, tile) : row_position(tile);
  };
  const int lag = index * args.lag_blocks;
  const int last = work.first_block + work.blocks, end = last == args.blocks ? 0 : last;  // split
  const bool finishes = !kSplit || owner_of_sums(args, threadIdx.x / 32 % 4) == work.rank;
  // Of the tile that is written next: where registers allow, known before its products are. Moments leave none.
  constexpr bool kPositionAhead = sizeof(T) == 2 && kChannels <= 128 && !kStats;
  TilePosition position;
  if constexpr (!kStats) {
    position = position_of_tile(index);
    if (finishes && index < work.tiles) writer.load_residual(position, 0);
  }
  worker.skip(lag);
  // Wide tiles with moments have no register for it later.
  constexpr bool kFoldedFirst = kStats && kChannels > 64;
  if (kFoldedFirst) barrier_wait(affine_barrier(args, shared), 0);
  for (int i = index; i < work.tiles; i += args.workers) {
    float sum[kChannels / 2] = {};
    if (args.resident) {
      int next = -1;
      if (kRest && args.next_ring == 0) worker.seek(i * args.pair_stages);
      if (args.in_turn) {
        if (i > 0) wait_for_turn(index);
        if (i + 1 < work.tiles) next = index + 1 < args.workers ? index + 1 : 0;
      }
      worker.template multiply_tile<false>(sum, kSplit ? work.first_block : 0, kSplit ? end : 0, i == index, next);
    } else {
      worker.template multiply_tile<true>(sum, kSplit ? work.first_block : lag, kSplit ? end : lag, true, -1);
    }
    if (kRest && ring_ends_in_parts(args) && i + 1 == work.tiles) let_parts_begin(args);
    if (!kFoldedFirst && i == index) barrier_wait(affine_barrier(args, shared), 0);
    if constexpr (kSplit) gather_sums<kChannels>(args, sum, work, index, shared);
    if (finishes) {
      if constexpr (!kPositionAhead) position = position_of_tile(i);
      if (!kStats && args.act == Act::kSilu) {
        writer.template write<true>(sum, position);
      } else {
        writer.template write<false>(sum, position);
      }
    }
    if constexpr (kSplit) break;  // a tile per worker
    if constexpr (!kStats) {
      if (i + args.workers < work.tiles) {
        position = position_of_tile(i + args.workers);
        writer.load_residual(position, 0);
      }
    }
  }
  // Streamed weights pass every worker, also in a last round that leaves it without a tile.
  if (!args.resident && index + (work.rounds - 1) * args.workers >= work.tiles) worker.skip(work.blocks);
  worker.skip((args.workers - 1) * args.lag_blocks - lag);
  if constexpr (kRest) {
    const RestWork rest = rest_of_block<kStoreParts<T, kChannels>>(args, work);
    if (ring_ends_in_parts(args)) {
      if ((work.tiles - 1 - index) % args.workers != 0) wait_for_parts(args);  // not the worker with the last tile
      worker.seek(work.tiles * args.pair_stages + index);
    }
    if (rest.any) {
      const int sharers = args.rest_sharers;
      if (index < sharers) {
        constexpr int kPart = TileWriter<T, kChannels, kStats>::kStoreChannels;
        float sum[kPart / 2] = {};
        if (args.resident) {
          worker.template multiply_part<kPart, false>(sum, rest.part, index, sharers);
        } else {
          worker.template multiply_part<kPart, true>(sum, rest.part, index, sharers);
        }
        const TilePosition tile = row_position(rest.tile);
        if (args.act == Act::kSilu) {
          writer.template write_part<true>(sum, tile, rest.part, index, sharers);
        } else {
          writer.template write_part<false>(sum, tile, rest.part, index, sharers);
        }
      } else if (!args.resident) {
        worker.skip_stages(args.pair_stages / sharers);
      }
    }
  }
  if constexpr (kStats) {
    writer.write_stats(shared, work.column);
  } else if (threadIdx.x % 32 == 0) {
    wait_stores_read<0>();
  }
}

// Whether the warp that copies weights folds the channels of the block: the warps that compute would have to wait for memory
// before their first products. With more channels, several a lane, it may take longer than all products of a short
// reduction: with it, tiles of 80 and 128 channels were up to 0.7 us slower than before at batch 1. Which part of the change
// that was has not been tried.
constexpr bool folds_beside_products(int channels) { return channels <= 64; }

// Scale and shift of the block's channels into shared memory, by `threads` threads, of which `thread` is one. A thread has
// the values of kTogether channels on their way at once.
template <class T, int kChannels, int kTogether>
__device__ __forceinline__ void fold_channels(const KernelArgs& args, char* shared, int first_channel, int thread,
                                              int threads) {
  auto* affine = reinterpret_cast<ScaleShift<float>*>(shared + args.offset_affine);
  const bool halved = args.act == Act::kSilu && sizeof(T) == 2;  // for silu_of_half
#pragma unroll 1
  for (int c = thread; c < kChannels; c += threads * kTogether) {
    ChannelBits bits[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      bits[i] = load_for_epilogue(args.affine, first_channel + c + threads * i, args.out_channels);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int channel = c + threads * i;
      if (channel < kChannels) {
        affine[channel] = fold_for_epilogue(args.affine, bits[i], first_channel + channel, args.out_channels, halved);
      }
    }
  }
  // Each thread that has written: racecheck does not follow __syncwarp() to the arrival of one for its warp.
  if (thread < kChannels) barrier_arrive(affine_barrier(args, shared));
}

// The barriers of a ring, of whose stages `readers` warps let go.
__device__ __forceinline__ void set_up(Ring ring, int readers) {
  for (int i = 0; i < ring.stages; ++i) {
    barrier_init(ring.filled(i), 1);
    barrier_init(ring.emptied(i), readers);
  }
}

// kSplit: a kernel of its own, since what it adds takes the descriptors of the other's loops out of uniform registers,
// which made them up to 20 % slower.
template <class T, int kChannels, bool kSplit, bool kStats, bool kRest, bool kPaired>
__global__ __launch_bounds__(kMaxThreads<kChannels>,
                             1) void implicit_gemm_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  let_later_kernels_start();
  const Ring weight_ring = {base + args.offset_rings, args.weight_stages};
  const auto pixel_ring = [&](int worker) {
    return Ring{base + args.offset_rings + 16 * (args.weight_stages + worker * args.next_ring), args.pixel_stages};
  };
  // By the warps that have nothing else to do until the first stages are there: meanwhile those that copy compute where
  // from. A ring is set up by one thread: barriers are addressed through uniform registers, so 32 lanes take longer. The
  // copy engine arrives once at filled stages; of each worker that has read one, its four warps do.
  if (warp < 4 * args.workers && lane == 0) {
    const int worker = warp / 4, part = warp % 4;
    if (part == 0) {
      if (warp == 0) prefetch_tensor_map(&args.x);
      if (worker == 0 || args.next_ring > 0) set_up(pixel_ring(worker), kPaired ? 8 : 4);
    } else if (part == 1 && worker == 0) {
      prefetch_tensor_map(&args.weight[0]);
      set_up(weight_ring, 4 * args.workers);
      // affine_barrier(): a thread arrives for each channel, or for all that it has
      const int threads = folds_beside_products(kChannels) ? 32 : 128 * args.workers;
      barrier_init(base + args.offset_rings - 8, min(kChannels, threads));
    } else if (part == 2 && worker == 0) {
      if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
      prefetch_tensor_map(&args.y);
    } else if (kSplit && part == 3) {
      for (int i = 0; i < 4; ++i) {
        const uint32_t sums = base + args.offset_exchange + (4 * worker + i) * 8;
        barrier_init(sums, 1);
        barrier_expect(1, sums, (args.split - 1) * 16 * kChannels * 4);
      }
    }
    if (kResidualBoxes<T, kChannels, kStats> && args.residual_boxes) {
      for (int i = 0; i < 2; ++i) barrier_init(base + args.offset_barriers + 16 * warp + 8 * i, 1);
    }
    barrier_init_fence();
  }
  const BlockWork work = work_of_block<kSplit, kPaired>(args);

  const uint32_t leads = lane == 0;
  const auto pixel_stages = [&](int worker) {
    return base + args.offset_pixels + worker * args.next_ring * args.pixel_stage_bytes;
  };
  if (warp < 4 * args.workers) {
    const int worker = warp / 4;
    wait_for_set_up();
    if constexpr (kSplit || kPaired) cluster_arrive();
    wait_for_earlier_kernels();
    if constexpr (!folds_beside_products(kChannels)) {
      fold_channels<T, kChannels, 1>(args, shared, work.first_channel, threadIdx.x, 128 * args.workers);
    }
    if constexpr (kSplit || kPaired) cluster_wait();  // the barriers of all blocks are set up
    compute_tiles<T, kChannels, kSplit, kStats, kRest>(
        args,
        Worker<T, kChannels, kHasPairLoops<T, kSplit>, kRest, kPaired>(args, pixel_ring(worker), weight_ring,
                                                                       pixel_stages(worker), base),
        warp, work, shared);
  } else if (warp < 5 * args.workers) {
    const int worker = warp - 4 * args.workers;
    if constexpr (kSplit || kPaired) cluster_arrive();
    load_pixels_of<kRest ? kStoreParts<T, kChannels> : 0, kPaired>(args, leads, pixel_ring(worker),
                                                                   pixel_stages(worker), worker, work);
  } else {
    if constexpr (kSplit || kPaired) cluster_arrive();
    load_weights<kRest ? kStoreParts<T, kChannels> : 0, kChannels / kStoreParts<T, kChannels>>(
        args, leads, weight_ring, base, work, [&] {
          if constexpr (folds_beside_products(kChannels)) {
            fold_channels<T, kChannels, ceil_div(kChannels, 32)>(args, shared, work.first_channel, lane, 32);
          }
        });
  }
  if (kSplit && warp >= 4 * args.workers) cluster_wait();
  if (kPaired && warp == 5 * args.workers) cluster_wait();
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

constexpr const char* kName = "implicit_gemm_sm90";

// Of x and the weights. wgmma drops the low 13 bits of a float, which would double the error and make all products too
// small. With this type the copy engine rounds what it loads to the nearest TF32, ties to even (infinities and NaN stay),
// as CUTLASS's and Triton's TF32 kernels rely on; it costs nothing.
CUtensorMapDataType operand_type(DType dtype) {
  return dtype == DType::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : map_type(dtype);
}

// Strides of a tensor whose sizes of one get the stride that a dense tensor would have.
Strides effective_strides(const ConvShape& s, Strides x, int element_bytes) {
  if (s.in_w == 1) x.w = round_up(s.in_channels, 16 / element_bytes);
  if (s.in_h == 1) x.h = x.w * s.in_w;
  if (s.batch == 1) x.n = x.h * s.in_h;
  return x;
}

CUtensorMap pixel_map(const ConvArgs& a, DType dtype, const Sm90Plan& plan, const Strides& x) {
  const ConvShape& s = a.shape;
  const CUtensorMapDataType type = operand_type(dtype);
  const auto bytes = [&](int64_t elements) { return static_cast<cuuint64_t>(elements * plan.element_bytes); };
  const auto channels = static_cast<cuuint32_t>(plan.row_bytes / plan.element_bytes);
  const auto c = static_cast<cuuint64_t>(s.in_channels), w = static_cast<cuuint64_t>(s.in_w),
             h = static_cast<cuuint64_t>(s.in_h), n = static_cast<cuuint64_t>(s.batch);
  if (plan.mode == PixelMode::kRows) {
    const auto pixels = static_cast<cuuint64_t>(s.in_pixels());
    const auto parts = static_cast<cuuint32_t>(sm90_group_taps(s, plan)), halves = plan.paired ? 2u : 1u;
    const cuuint64_t row = bytes(x.w);
    if (parts > 1) {
      return tensor_map(kName, "x", type, a.x, {channels, pixels, c / channels, 1},
                        {row, cuuint64_t(plan.row_bytes), row * pixels}, {channels, kTilePixels, parts / halves, 1},
                        {1, 1, 1, 1}, plan.row_bytes);
    }
    return tensor_map(kName, "x", type, a.x, {c, pixels, 1, 1}, {row, row * pixels, row * pixels},
                      {channels, kTilePixels / halves, 1, 1}, {1, 1, 1, 1}, plan.row_bytes);
  }
  const auto step_w = static_cast<cuuint32_t>(s.stride_w), step_h = static_cast<cuuint32_t>(s.stride_h);
  if (plan.mode == PixelMode::kWindow) {
    const Sm90Window window = sm90_window(s);
    return tensor_map(kName, "x", type, a.x, {c, w, h, n}, {bytes(x.w), bytes(x.h), bytes(x.n)},
                      {channels, window.w * step_w, window.h * step_h, 1}, {1, step_w, step_h, 1}, plan.row_bytes);
  }
  using Encode = decltype(&cuTensorMapEncodeIm2col);
  static const auto encode = tensor_map_encoder<Encode>(kName, "cuTensorMapEncodeIm2col");
  const cuuint64_t size[4] = {c, w, h, n}, stride[3] = {bytes(x.w), bytes(x.h), bytes(x.n)};
  const int lower[2] = {-s.pad_w, -s.pad_h};
  const int upper[2] = {s.pad_w - (s.kernel_w - 1) * s.dilation_w, s.pad_h - (s.kernel_h - 1) * s.dilation_h};
  const cuuint32_t step[4] = {1, step_w, step_h, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, type, 4, const_cast<void*>(a.x), size, stride, lower, upper, channels,
             kTilePixels / (plan.paired ? 2 : 1), step, CU_TENSOR_MAP_INTERLEAVE_NONE, map_swizzle(plan.row_bytes),
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_tensor_map(status, kName, "x");
  return map;
}

// Map of the weights, (K, R * S, C), rows of C padded to 16 bytes: boxes of `channels` output channels for `rows` x `columns` filter taps
// that are `step` apart.
CUtensorMap weight_map(const ConvArgs& a, DType dtype, const Sm90Plan& plan, int rows, int columns, int step_h,
                       int step_w) {
  const ConvShape& s = a.shape;
  const CUtensorMapDataType type = operand_type(dtype);
  const auto c = static_cast<cuuint64_t>(s.in_channels), k = static_cast<cuuint64_t>(s.out_channels);
  const auto block = static_cast<cuuint32_t>(plan.row_bytes / plan.element_bytes),
             channels = static_cast<cuuint32_t>(plan.channels);
  const cuuint64_t tap = round_up(s.in_channels, 16 / plan.element_bytes) * plan.element_bytes, row = tap * s.kernel_w,
                   filter = row * s.kernel_h;
  if (plan.mode == PixelMode::kRows && columns > 1) {  // blocks of channels in the place of columns
    return tensor_map(kName, "weight", type, a.weight, {block, k, c / block, 1},
                      {filter, cuuint64_t(plan.row_bytes), filter}, {block, channels, cuuint32_t(columns), 1},
                      {1, 1, 1, 1}, plan.row_bytes);
  }
  // A box is counted in elements before striding.
  const auto extent = [](int count, int step) { return static_cast<cuuint32_t>((count - 1) * step + 1); };
  return tensor_map(kName, "weight", type, a.weight, {c, k, cuuint64_t(s.kernel_w), cuuint64_t(s.kernel_h)},
                    {filter, tap, row}, {block, channels, extent(columns, step_w), extent(rows, step_h)},
                    {1, 1, cuuint32_t(step_w), cuuint32_t(step_h)}, plan.row_bytes);
}

// Planes, groups and taps in the order in which the products run, and the maps of the weights.
void fill_taps(KernelArgs& k, const ConvArgs& a, DType dtype, const Sm90Plan& plan) {
  const ConvShape& s = a.shape;
  const int together = sm90_group_taps(s, plan);
  int maps = 0, taps = 0;
  k.planes = k.groups = 0;
  const auto add_map = [&](int rows, int columns, int step_h, int step_w) {
    k.weight[maps++] = weight_map(a, dtype, plan, rows, columns, step_h, step_w);
  };
  // `count` taps from (r, c) on; `channel`: of the first one.
  const auto add_group = [&](int channel, int r, int c, int count) {
    k.group[k.groups++] = {static_cast<int16_t>(channel),  static_cast<uint8_t>(r),    static_cast<uint8_t>(c),
                           static_cast<uint8_t>(maps - 1), static_cast<uint8_t>(taps), static_cast<uint8_t>(count)};
  };
  const auto add_plane = [&](int right, int down, int first_group) {
    k.plane[k.planes++] = {static_cast<int16_t>(right), static_cast<int16_t>(down), static_cast<int16_t>(first_group),
                           static_cast<int16_t>(k.groups - 1)};
  };
  if (s.pointwise()) {
    add_map(1, together, 1, 1);
    for (int part = 0; part < plan.parts; ++part) {
      if (part % together == 0) add_group(part * plan.row_bytes / plan.element_bytes, 0, 0, together);
      k.tap_offset[taps++] = part * kTilePixels * plan.row_bytes / 16;
    }
    add_plane(0, 0, 0);
    return;
  }
  if (plan.mode == PixelMode::kTaps) {
    add_map(1, 1, 1, 1);
    for (int r = 0; r < s.kernel_h; ++r) {
      for (int c = 0; c < s.kernel_w; ++c) {
        add_group(0, r, c, 1);
        k.tap_offset[taps++] = 0;
        add_plane(c * s.dilation_w, r * s.dilation_h, k.groups - 1);
      }
    }
    return;
  }
  const Sm90Window window = sm90_window(s);
  const bool strided = s.stride_h > 1 || s.stride_w > 1;
  if (together == 1) add_map(1, 1, 1, 1);
  if (together > 1 && !strided) add_map(1, together, 1, 1);
  for (int y = 0; y < s.stride_h; ++y) {
    for (int x = 0; x < s.stride_w; ++x) {
      const int first_group = k.groups;
      // Those of the residue (y, x), as many rows and columns of them.
      const int rows = ceil_div(s.kernel_h - y, s.stride_h), columns = ceil_div(s.kernel_w - x, s.stride_w);
      if (together > 1 && strided && rows > 0 && columns > 0) {
        add_map(rows, columns, s.stride_h, s.stride_w);
        add_group(0, y, x, rows * columns);
      }
      for (int r = 0; r < s.kernel_h; ++r) {
        for (int c = 0; c < s.kernel_w; ++c) {
          const int down = r * s.dilation_h, right = c * s.dilation_w;
          if (down % s.stride_h != y || right % s.stride_w != x) continue;
          if (together == 1 || (!strided && c == 0)) add_group(0, r, c, together);
          const int row = down / s.stride_h * window.w + right / s.stride_w;
          k.tap_offset[taps++] = row * plan.row_bytes / 16;
        }
      }
      if (k.groups > first_group) add_plane(x, y, first_group);
    }
  }
}

int blocks_of_channel_tile(const ConvShape& s, const Sm90Plan& plan) {
  const int64_t share = std::max(1, multiprocessor_count() / ceil_div(s.out_channels, plan.channels));
  return static_cast<int>(std::min(share, sm90_tiles(s, plan)));
}

// A 1x1 over pixels that are not evenly spaced (a crop of a map), whose blocks of channels are copied one by one.
bool is_uneven(const ConvArgs& a, const Sm90Plan& plan) {
  const Strides x = effective_strides(a.shape, a.x_strides, plan.element_bytes);
  return plan.mode == PixelMode::kRows && (x.h != x.w * a.shape.in_w || x.n != x.h * a.shape.in_h);
}

template <class T, int kChannels, bool kStats, bool kRest = false, bool kPaired = false>
void launch(const ConvArgs& a, DType dtype, const Sm90Plan& wanted, const TileStats& stats, cudaStream_t stream) {
  constexpr int kBytes = sizeof(T), kChunk = kLanesOf16Bytes<T>;
  const ConvShape& s = a.shape;
  const Strides x = effective_strides(s, a.x_strides, kBytes);
  Sm90Plan plan = wanted;
  if (is_uneven(a, plan)) {
    plan.mode = PixelMode::kTaps;
    plan.weight_stages *= sm90_group_taps(s, wanted);
  }
  const PixelMode mode = plan.mode;
  const Sm90Layout layout = sm90_layout(s, plan);
  const Sm90Window window = sm90_window(s);

  KernelArgs k;
  k.x = pixel_map(a, dtype, plan, x);
  fill_taps(k, a, dtype, plan);
  k.store_boxes = a.y_stride % kChunk == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0;
  const int aligned = s.out_channels | static_cast<int>(a.y_stride % 4) |
                      static_cast<int>(reinterpret_cast<uintptr_t>(a.y) / kBytes % 4);
  k.store_lanes = aligned % 4 == 0 ? 4 : aligned % 2 == 0 ? 2 : 1;
  // Of y, or of the residual, which has its pixels: what a warp stores at once.
  const auto output_map = [&](const char* which, const void* data, int64_t pixel_stride) {
    constexpr cuuint32_t kBox = sm90_store_channels(kChannels, kBytes);
    const auto pixel = static_cast<cuuint64_t>(pixel_stride) * kBytes,
               channels = static_cast<cuuint64_t>(s.out_channels);
    if (mode == PixelMode::kWindow) {
      const auto q = static_cast<cuuint64_t>(s.out_w), p = static_cast<cuuint64_t>(s.out_h);
      return tensor_map(kName, which, map_type(dtype), data, {channels, q, p, static_cast<cuuint64_t>(s.batch)},
                        {pixel, pixel * q, pixel * q * p}, {kBox, 8, 2, 1}, {1, 1, 1, 1}, kBox * kBytes);
    }
    const auto pixels = static_cast<cuuint64_t>(s.out_pixels());
    return tensor_map(kName, which, map_type(dtype), data, {channels, pixels, 1, 1},
                      {pixel, pixel * pixels, pixel * pixels}, {kBox, 16, 1, 1}, {1, 1, 1, 1}, kBox * kBytes);
  };
  k.y = k.store_boxes ? output_map("y", a.y, a.y_stride) : k.weight[0];  // else prefetched, not used
  k.residual_vectors = reinterpret_cast<uintptr_t>(a.residual) % 16 == 0 && a.residual_strides.w % kChunk == 0;
  k.residual_boxes =
      kResidualBoxes<T, kChannels, kStats> && k.store_boxes && a.residual != nullptr && k.residual_vectors;
  if (k.residual_boxes) k.residual_map = output_map("residual", a.residual, a.residual_strides.w);
  k.affine = a.affine;
  k.act = a.act;
  k.stats = stats;
  k.mode = mode;
  k.workers = plan.workers;
  const int channel_tiles = ceil_div(s.out_channels, kChannels);
  k.tile_channels = kChannels;
  k.out_channels = s.out_channels;
  k.row_bytes = plan.row_bytes;
  const int stage_channels = plan.parts * plan.row_bytes / kBytes;
  k.blocks = sm90_blocks(s, plan);
  k.last_block_steps =
      plan.parts == 1 ? ceil_div((s.in_channels - (k.blocks - 1) * stage_channels) * kBytes, 32) : plan.row_bytes / 32;
  const bool whole = plan.mode == PixelMode::kRows && sm90_group_taps(s, plan) > 1;
  k.block_channels = whole ? 0 : stage_channels;
  k.block_columns = whole ? plan.parts : 0;
  k.pixel_copies = whole ? 1 : plan.parts;
  k.copy_channels = plan.row_bytes / kBytes;
  k.copy_bytes = kTilePixels * plan.row_bytes;
  k.group_bytes = (mode == PixelMode::kWindow ? window.w : 8) * plan.row_bytes;
  k.pixel_stages = plan.pixel_stages;
  k.next_ring = plan.one_ring ? 0 : plan.pixel_stages;
  k.by_ring = FastDivide(plan.pixel_stages);
  k.pixel_stage_bytes = sm90_pixel_stage_bytes(s, plan);
  k.pixel_filled_bytes = (mode == PixelMode::kWindow ? window.w * window.h : kTilePixels * plan.parts) * plan.row_bytes;
  k.weight_stages = plan.weight_stages;
  k.tap_bytes = kChannels * plan.row_bytes;
  k.weight_stage_bytes = sm90_weight_stage_bytes(s, plan);
  k.pixel_stage_step = k.pixel_stage_bytes / 16;
  k.weight_stage_step = k.weight_stage_bytes / 16;
  k.block_steps = plan.row_bytes / 32;
  k.resident = plan.resident;
  // Weights of a whole stage of x in one stage, and no block of channels that is cut short.
  const bool pairs = kHasPairLoops<T, false> && plan.split == 1 && mode != PixelMode::kWindow &&
                     plan.row_bytes == 128 && k.groups == k.planes && k.last_block_steps == 4 &&
                     plan.parts <= (mode == PixelMode::kRows ? 2 : 1);
  k.pair_parts = pairs ? plan.parts : 0;
  k.pair_stages = k.blocks * k.planes;
  const int tiles_w = ceil_div(s.out_w, 8), tiles_h = ceil_div(s.out_h, 8);
  k.tiles = static_cast<int>(sm90_tiles(s, plan));
  k.split = plan.split;
  k.split_blocks = sm90_split_blocks(s, plan);
  k.columns = plan.split > 1 ? ceil_div(k.tiles, plan.workers) : blocks_of_channel_tile(s, plan);
  k.column_tiles = k.tiles / k.columns;
  k.longer_columns = k.tiles % k.columns;
  constexpr int kParts = kStoreParts<T, kChannels>;
  if constexpr (kRest) {
    k.rest_tiles = plan.rest ? std::exchange(k.longer_columns, 0) : 0;
    k.rest_first = k.column_tiles * k.columns;
    k.rest_sharers = sm90_rest_sharers(plan, k.pair_stages);
    k.half_bytes = k.pixel_filled_bytes / 2;
    k.half_pixels = plan.parts == 1 ? kTilePixels / 2 : 0;
    k.half_columns = plan.parts == 1 ? 0 : 1;
    Sm90Plan part = plan;
    part.channels = kChannels / kParts;
    if (!plan.resident) k.rest_weight = weight_map(a, dtype, part, 1, 1, 1, 1);
  }
  k.rounds = ceil_div(k.column_tiles, plan.workers);
  k.longer_rounds = ceil_div(k.column_tiles + 1, plan.workers);
  // Workers that begin together compute together, then all run their epilogues, with the tensor cores idle: one after the
  // other, 128 channels of 256 took 5 % less. Not where that alone would keep the others from computing: a ring that does
  // not hold a tile (1.3 to 1.8 times as long), many stages of few products (up to 1.1), less than a round of tiles.
  const bool few_products = k.blocks > 2 && 2 * plan.parts * kChannels < 192;
  k.in_turn = plan.one_ring || (pairs && mode == PixelMode::kRows && plan.resident && plan.workers > 1 &&
                                plan.pixel_stages >= k.blocks && !few_products && k.column_tiles >= plan.workers);
  k.lag_blocks = sm90_lag_blocks(plan, k.blocks, k.tiles, k.columns);
  k.offset_pixels = layout.pixels;
  k.offset_output = layout.output;
  k.offset_exchange = layout.exchange;
  k.offset_affine = layout.affine;
  k.offset_barriers = layout.barriers;
  k.offset_rings = layout.rings;
  k.out_h = s.out_h;
  k.out_w = s.out_w;
  k.stride_h = s.stride_h;
  k.stride_w = s.stride_w;
  k.pad_h = s.pad_h;
  k.pad_w = s.pad_w;
  k.pixels = s.out_pixels();
  k.by_channel_tiles = FastDivide(channel_tiles);
  k.by_tiles_w = FastDivide(tiles_w);
  k.by_tiles_h = FastDivide(tiles_h);
  k.by_out_w = FastDivide(s.out_w);
  k.by_out_h = FastDivide(s.out_h);
  k.y_data = a.y;
  k.y_stride = a.y_stride;
  k.residual = a.residual;
  k.residual_stride = a.residual_strides.w;

  const unsigned int grid = checked_grid(int64_t(k.columns) * channel_tiles * plan.split, kName);
  const auto start = [&]<bool kSplit>(std::bool_constant<kSplit>) {
    constexpr auto kKernel = implicit_gemm_sm90_kernel<T, kChannels, kSplit, kStats, kRest, kPaired>;
    // Per device and context: cheap enough (under a microsecond) to repeat instead of remembering per device.
    allow_shared_bytes(kKernel, layout.bytes);
    launch_clusters<kKernel>(kName, kPaired ? 2 : plan.split, grid, 160 * plan.workers + 32, layout.bytes, stream, k);
  };
  if (plan.split == 1) return start(std::false_type());
  if constexpr (!kStats && !kRest && sm90_can_split(kChannels, kBytes)) return start(std::true_type());
  fail(kName, ": no kernel splits tiles of ", kChannels, " channels");
}

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, float>    ? DType::kFloat32
                          : std::is_same_v<T, __half> ? DType::kFloat16
                                                      : DType::kBFloat16;

template <class T, bool kStats>
void choose(const ConvArgs& args, DType dtype, const Sm90Plan& plan, const TileStats& stats, cudaStream_t stream) {
  if constexpr (is_built_for_hopper()) {
    switch (plan.channels) {
      case 16: return launch<T, 16, kStats>(args, dtype, plan, stats, stream);
      case 32: return launch<T, 32, kStats>(args, dtype, plan, stats, stream);
      case 48: return launch<T, 48, kStats>(args, dtype, plan, stats, stream);
      case 64: return launch<T, 64, kStats>(args, dtype, plan, stats, stream);
      case 80: return launch<T, 80, kStats>(args, dtype, plan, stats, stream);
      case 96: return launch<T, 96, kStats>(args, dtype, plan, stats, stream);
      case 128: return launch<T, 128, kStats>(args, dtype, plan, stats, stream);
      case 192:
        if constexpr (!kStats) return launch<T, 192, kStats>(args, dtype, plan, stats, stream);
        break;
      case 256:
        if constexpr (!kStats) return launch<T, 256, kStats>(args, dtype, plan, stats, stream);
        break;
      default: break;
    }
  }
  fail(kName, ": this build has no kernel for tiles of ", plan.channels, " channels");
}

// Elements: the types of x and y that this part is compiled for.
template <bool kStats, class... Elements>
void run(const ConvArgs& args, DType dtype, const Sm90Plan& plan, const TileStats& stats, cudaStream_t stream) {
  if (args.shape.groups != 1) fail(kName, ": groups=", args.shape.groups, ", only 1 is dense");
  const bool found =
      ((dtype == kTypeOf<Elements> && (choose<Elements, kStats>(args, dtype, plan, stats, stream), true)) || ...);
  if (!found) fail(kName, ": no kernel for ", name_of(dtype));
}

}  // namespace
}  // namespace yolo12_fastconv
