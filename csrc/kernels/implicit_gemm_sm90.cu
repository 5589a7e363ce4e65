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
#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/hopper.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/sm90_plan.h"
#include "device/tensor_core.cuh"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
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
  CUtensorMap x, y;
  CUtensorMap weight[kMostWeightMaps];
  Affine affine;
  Act act;
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
  int store_lanes;  // without boxes: channels that are stored at once
  int tiles, columns;  // pixel tiles; blocks (or clusters) per channel tile
  int split, split_blocks;  // blocks of a cluster, and of the input channels that each has
  int lag_blocks;  // streamed: by so many blocks of channels a worker starts after the last
  int offset_pixels, offset_output, offset_exchange, offset_affine, offset_barriers;
  int out_h, out_w, stride_h, stride_w, pad_h, pad_w;
  int64_t pixels;
  int tile_channels;
  FastDivide by_tiles_w, by_tiles_h, by_out_w, by_out_h, by_channel_tiles, by_columns, by_workers;
  void* y_data;
  int64_t y_stride;
  const void* residual;
  int64_t residual_stride;
  bool residual_vectors;  // 16-byte loads are aligned
  Plane plane[kSm90MaxTaps];
  TapGroup group[kSm90MaxTaps];
  int tap_offset[kSm90MaxTaps];  // where the rows that a tap reads begin in its pixel stage, in 16 bytes
};

template <int kChannels>
constexpr int kMaxThreads = sm90_max_workers(kChannels) * 160 + 32;

// First output pixel of a tile. n, p and q only where the mode needs them: not in rows.
struct TilePosition {
  int n = 0, p = 0, q = 0;
  int64_t pixel = 0;
};

__device__ __forceinline__ TilePosition window_position(const KernelArgs& args, int tile) {
  TilePosition t;
  int row;
  args.by_tiles_w.divide(tile, row, t.q);
  args.by_tiles_h.divide(row, t.n, t.p);
  t.q *= 8;
  t.p *= 8;
  t.pixel = (int64_t(t.n) * args.out_h + t.p) * args.out_w + t.q;
  return t;
}

__device__ __forceinline__ TilePosition row_position(int tile) {
  TilePosition t;
  t.pixel = int64_t(tile) * kTilePixels;
  return t;
}

__device__ __forceinline__ TilePosition taps_position(const KernelArgs& args, int tile) {
  TilePosition t = row_position(tile);
  int row;
  args.by_out_w.divide(static_cast<int>(t.pixel), row, t.q);
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

template <bool kSplit>
__device__ __forceinline__ BlockWork work_of_block(const KernelArgs& args) {
  BlockWork work;
  int index = static_cast<int>(blockIdx.x), channel_tile, rest;
  work.rank = work.first_block = 0;
  work.blocks = args.blocks;
  if constexpr (kSplit) {
    index = cluster_index();
    work.rank = cluster_rank();
    work.first_block = work.rank * args.split_blocks;
    work.blocks = min(args.split_blocks, args.blocks - work.first_block);
  }
  args.by_channel_tiles.divide(index, work.column, channel_tile);
  work.first_channel = channel_tile * args.tile_channels;
  args.by_columns.divide(args.tiles - work.column + args.columns - 1, work.tiles, rest);
  args.by_workers.divide(work.tiles + args.workers - 1, work.rounds, rest);
  return work;
}

__device__ __forceinline__ TilePosition position_of(const KernelArgs& args, int tile) {
  return args.mode == PixelMode::kWindow ? window_position(args, tile)
         : args.mode == PixelMode::kTaps ? taps_position(args, tile)
                                         : row_position(tile);
}

// A warp per worker: fills the worker's ring of pixel stages, tile after tile. `leads`: 1 in one lane, 0 in the others.
__device__ __forceinline__ void load_pixels_of(const KernelArgs& args, uint32_t leads, Ring ring, uint32_t stages,
                                               int worker, const BlockWork& work) {
  RingPosition at;
  bool waits = true;
  for (int i = worker; i < work.tiles; i += args.workers) {
    const TilePosition t = position_of(args, i * args.columns + work.column);
    const int left = t.q * args.stride_w - args.pad_w, top = t.p * args.stride_h - args.pad_h;
    int block = work.first_block + worker * args.lag_blocks;
    for (int step = 0; step < work.blocks; ++step) {
      const int channel = block * args.block_channels, column = block * args.block_columns;
#pragma unroll 1
      for (int j = 0; j < args.planes; ++j) {
        barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
        const uint32_t filled = ring.filled(at.stage), to = stages + at.stage * args.pixel_stage_bytes;
        barrier_expect(leads, filled, args.pixel_filled_bytes);
        const Plane plane = args.plane[j];
        if (waits) {  // all that leads to the first copy is done by then
          wait_for_earlier_kernels();
          waits = false;
        }
        if (args.mode == PixelMode::kWindow) {
          load_box(leads, to, &args.x, filled, channel, left + plane.right, top + plane.down, t.n);
        } else {
#pragma unroll 1
          for (int copy = 0; copy < args.pixel_copies; ++copy) {
            const uint32_t part = to + copy * args.copy_bytes;
            const int first = channel + copy * args.copy_channels;
            if (args.mode == PixelMode::kTaps) {
              load_pixels(leads, part, &args.x, filled, first, left, top, t.n, plane.right, plane.down);
            } else {
              load_box(leads, part, &args.x, filled, first, static_cast<int>(t.pixel), column, 0);
            }
          }
        }
        at.advance(args.pixel_stages);
      }
      if (++block == args.blocks) block = 0;
    }
  }
}

// A warp: fills the weight stages, in the order in which the workers read them: once, or again for every round of
// tiles and for what the last worker lags behind the first.
__device__ __forceinline__ void load_weights(const KernelArgs& args, uint32_t leads, Ring ring, uint32_t stages,
                                             const BlockWork& work) {
  RingPosition at;
  const int steps = (args.resident ? 1 : work.rounds) * work.blocks + (args.workers - 1) * args.lag_blocks;
  bool waits = true;
  int block = work.first_block;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < args.groups; ++i) {
      const TapGroup group = args.group[i];
      barrier_wait(ring.emptied(at.stage), at.parity ^ 1);
      const uint32_t filled = ring.filled(at.stage);
      barrier_expect(leads, filled, group.taps * args.tap_bytes);
      const int channel = block * args.block_channels + group.channel, column = block * args.block_columns + group.s;
      if (waits) {
        wait_for_earlier_kernels();
        waits = false;
      }
      load_box(leads, stages + at.stage * args.weight_stage_bytes, &args.weight[group.map], filled, channel,
               work.first_channel, column, group.r);
      at.advance(args.weight_stages);
    }
    if (++block == args.blocks) block = 0;
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&bits, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&bits, &pair, 4);
  }
  return bits;
}

// silu(u) for float, off by 4 units in the last place at the most. A division, as in activate(), would be half a unit
// closer, but it branches, so that no two values of a thread are computed at once.
__device__ __forceinline__ float silu_of_float(float u) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + expf(-u)));
  return u * inverse;
}

// What a warp does with its 16 pixels of a finished tile.
template <class T, int kChannels>
class TileWriter {
 public:
  static constexpr int kStoreChannels = sm90_store_channels(kChannels, sizeof(T));
  static constexpr int kRowBytes = kStoreChannels * int(sizeof(T));
  static constexpr int kBufferBytes = 16 * kRowBytes;

  __device__ __forceinline__ TileWriter(const KernelArgs& args, char* shared, int first_channel)
      : args_(args),
        affine_(reinterpret_cast<const float4*>(shared + args.offset_affine)),
        buffers_(shared + args.offset_output + threadIdx.x / 32 * 2 * kBufferBytes),
        first_channel_(first_channel) {}

  // Scale, shift, activation, residual; then through shared memory to y.
  template <bool kSilu>
  __device__ __forceinline__ void write(const float (&sum)[kChannels / 2], const TilePosition& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int part = 0; part < kChannels / kStoreChannels; ++part) {
      const int channel = first_channel_ + part * kStoreChannels;
      if (channel < args_.out_channels) {
        char* buffer = buffers_ + next_ * kBufferBytes;
        next_ ^= 1;
        if (lane == 0) wait_stores_read<1>();
        __syncwarp();
        if constexpr (sizeof(T) == 2) {
          finish_halves<kSilu>(sum, part * kStoreChannels, lane, buffer);
        } else {
          finish_floats<kSilu>(sum, part * kStoreChannels, lane, buffer);
        }
        if (args_.residual != nullptr) add_residual(buffer, tile, warp, lane, channel);
        if (args_.store_boxes) {
          fence_for_copy_engine();
          __syncwarp();
          if (lane == 0) {
            if (args_.mode == PixelMode::kWindow) {
              store_box(&args_.y, shared_address(buffer), channel, tile.q, tile.p + 2 * warp, tile.n);
            } else {
              store_box(&args_.y, shared_address(buffer), channel, static_cast<int>(tile.pixel) + 16 * warp, 0, 0);
            }
          }
        } else {
          __syncwarp();
          if (sizeof(T) == 2 && args_.store_lanes == 4) {
            copy_out<8 / sizeof(T)>(buffer, tile, warp, lane, channel);
          } else if (args_.store_lanes == 2) {
            copy_out<2>(buffer, tile, warp, lane, channel);
          } else {
            copy_out<1>(buffer, tile, warp, lane, channel);
          }
        }
      }
    }
  }

 private:
  static constexpr int kChunk = kLanesOf16Bytes<T>;

  // kStoreChannels of the sums, from `first` on, into a buffer.
  template <bool kSilu>
  __device__ __forceinline__ void finish_halves(const float (&sum)[kChannels / 2], int first, int lane,
                                                char* buffer) const {
#pragma unroll
    for (int pair = 0; pair < kStoreChannels / 16; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = first + pair * 16 + j * 8;
        const float4 affine = affine_[column / 2 + lane % 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* d = sum + column / 2 + 2 * h;
          float u = fmaf(d[0], affine.x, affine.y), v = fmaf(d[1], affine.z, affine.w);
          if constexpr (kSilu) {
            u = silu_of_half(u);
            v = silu_of_half(v);
          }
          packed[2 * j + h] = pack_pair<T>(u, v);
        }
      }
      store_matrices(shared_address(buffer) + offset(lane % 16, pair * 2 + lane / 16), packed);
    }
  }

  // The same in float. Of a row eight channels lie in four lanes, two in each: 32 bytes, two chunks. Half a warp writes at
  // once, four rows. If all wrote the same eight channels, two rows each would share their banks, since the swizzle does
  // no more than swap their chunks. So one of the two writes channels of `far` while the other writes those of `near`.
  // Their scale and shift lie in different banks too.
  template <bool kSilu>
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
        if constexpr (kSilu) y = {silu_of_float(y.x), silu_of_float(y.y)};
        *reinterpret_cast<float2*>(buffer + offset(lane / 4 + 8 * h, 2 * j + lane % 4 / 2) + lane % 2 * 8) = y;
      }
    }
  }

  // Byte offset of a 16-byte chunk in a buffer, swizzled as the map of y is.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int mask = kRowBytes == 128  ? row & 7
                     : kRowBytes == 64 ? (row >> 1) & 3
                     : kRowBytes == 32 ? (row >> 2) & 1
                                       : 0;
    return row * kRowBytes + (chunk ^ mask) * 16;
  }

  // The output pixel in a row of this warp's buffer, or -1 behind the map.
  __device__ __forceinline__ int64_t pixel_of(const TilePosition& tile, int warp, int row) const {
    if (args_.mode == PixelMode::kWindow) {
      const int p = tile.p + 2 * warp + row / 8, q = tile.q + row % 8;
      return p < args_.out_h && q < args_.out_w ? (int64_t(tile.n) * args_.out_h + p) * args_.out_w + q : -1;
    }
    const int64_t pixel = tile.pixel + 16 * warp + row;
    return pixel < args_.pixels ? pixel : -1;
  }

  // As in stock, the activated value is rounded before the residual is added.
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
  int first_channel_;
  int next_ = 0;
};

// The products of one warpgroup's tiles. With few channels a group of products takes 100 to 150 cycles, and what a warp
// does from one group to the next (a wait, a signal, descriptors) takes 4 to 10 an instruction. In a loop over filter taps
// with a choice of steps inside, 90 instructions, each tap took 240 to 300 cycles whatever its products; so did the warp
// that copied each tap's weights. Now taps that are few bytes share a stage, and the steps of a stage are unrolled.
template <class T, int kChannels>
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
        signals_(threadIdx.x % 32 == 0) {}

  // Products of a tile, from block `first` of the input channels to the one before `end`, round: all if it is the same,
  // never none. Resident weights lie in shared memory in
  // the order of use, with `wait` if they may still be on their way; streamed ones come through their ring.
  template <bool kStreamed>
  __device__ __forceinline__ void multiply_tile(float (&sum)[kChannels / 2], int first, int end, bool wait) {
    switch (args_.block_steps) {
      case 4: return multiply_blocks<kStreamed, 4>(sum, first, end, wait);
      case 2: return multiply_blocks<kStreamed, 2>(sum, first, end, wait);
      default: return multiply_blocks<kStreamed, 1>(sum, first, end, wait);
    }
  }

  // Lets the weights of this many blocks pass.
  __device__ __forceinline__ void skip(int blocks) {
    for (int i = 0; i < blocks * args_.groups; ++i) {
      barrier_wait(weight_ring_.filled(weight_at_.stage), weight_at_.parity);
      barrier_arrive_if(weight_ring_.emptied(weight_at_.stage), signals_);
      weight_at_.advance(weight_ring_.stages);
    }
  }

 private:
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
  RingPosition pixel_at_, weight_at_;
  uint32_t weights_emptied_ = 0, release_weights_ = 0, release_pixels_ = 0;
};

// Split reductions: the sums of a warp's 16 pixels go to the block of the cluster that finishes them, and are added in the
// order of the blocks' ranks, its own first. Returns whether it is this block.
template <int kChannels>
__device__ __forceinline__ bool gather_sums(const KernelArgs& args, float (&sum)[kChannels / 2], const BlockWork& work,
                                            int worker, char* shared) {
  constexpr int kSumsBytes = 16 * kChannels * 4, kStep = 32 * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, others = args.split - 1;
  const int turn = warp >= args.split, owner = turn ? warp - args.split : warp;
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
    return false;
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
  return true;
}

template <class T, int kChannels, bool kSplit>
__device__ __forceinline__ void compute_tiles(const KernelArgs& args, Worker<T, kChannels> worker, int index,
                                              const BlockWork& work, char* shared) {
  TileWriter<T, kChannels> writer(args, shared, work.first_channel);
  const int lag = index * args.lag_blocks;
  const int last = work.first_block + work.blocks, end = last == args.blocks ? 0 : last;  // split
  worker.skip(lag);
  for (int i = index; i < work.tiles; i += args.workers) {
    float sum[kChannels / 2] = {};
    if (args.resident) {
      worker.template multiply_tile<false>(sum, kSplit ? work.first_block : 0, kSplit ? end : 0, i == index);
    } else {
      worker.template multiply_tile<true>(sum, kSplit ? work.first_block : lag, kSplit ? end : lag, true);
    }
    bool finishes = true;
    if constexpr (kSplit) finishes = gather_sums<kChannels>(args, sum, work, index, shared);
    if (finishes) {
      const int tile = i * args.columns + work.column;
      const TilePosition position = args.mode == PixelMode::kWindow ? window_position(args, tile) : row_position(tile);
      if (args.act == Act::kSilu) {
        writer.template write<true>(sum, position);
      } else {
        writer.template write<false>(sum, position);
      }
    }
    if constexpr (kSplit) break;  // a tile per worker
  }
  // Streamed weights pass every worker, also in a last round that leaves it without a tile.
  if (!args.resident && index + (work.rounds - 1) * args.workers >= work.tiles) worker.skip(work.blocks);
  worker.skip((args.workers - 1) * args.lag_blocks - lag);
  if (threadIdx.x % 32 == 0) wait_stores_read<0>();
}

// Scale and shift of the block's channels into shared memory, by the warps that compute.
template <class T, int kChannels>
__device__ __forceinline__ void fold_channels(const KernelArgs& args, char* shared, int first_channel) {
  auto* affine = reinterpret_cast<ScaleShift<float>*>(shared + args.offset_affine);
  const int threads = 128 * args.workers;
  for (int c = threadIdx.x; c < kChannels; c += threads) {
    const bool halved = args.act == Act::kSilu && sizeof(T) == 2;  // for silu_of_half
    affine[c] = fold_for_epilogue(args.affine, first_channel + c, args.out_channels, halved);
  }
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// kSplit: a kernel of its own, since what it adds takes the descriptors of the other's loops out of uniform registers,
// which made them up to 20 % slower.
template <class T, int kChannels, bool kSplit>
__global__ __launch_bounds__(kMaxThreads<kChannels>,
                             1) void implicit_gemm_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const BlockWork work = work_of_block<kSplit>(args);

  const Ring weight_ring = {base + args.offset_barriers, args.weight_stages};
  const auto pixel_ring = [&](int worker) {
    return Ring{base + args.offset_barriers + 16 * (args.weight_stages + worker * args.pixel_stages),
                args.pixel_stages};
  };
  let_later_kernels_start();
  if (threadIdx.x == 0) {
    if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
    prefetch_tensor_map(&args.x);
    prefetch_tensor_map(&args.weight[0]);
    prefetch_tensor_map(&args.y);
  }
  // The copy engine arrives once at filled stages; of each worker that has read one, its four warps do. The warp that
  // fills a ring sets it up, in one thread: barriers are addressed through uniform registers, so 32 lanes take longer.
  if (warp >= 4 * args.workers && lane == 0) {
    const int worker = warp - 4 * args.workers;
    const bool weights = worker == args.workers;
    const Ring ring = weights ? weight_ring : pixel_ring(worker);
    for (int i = 0; i < ring.stages; ++i) {
      barrier_init(ring.filled(i), 1);
      barrier_init(ring.emptied(i), weights ? 4 * args.workers : 4);
    }
    if (kSplit && !weights) {
      for (int i = 0; i < 4; ++i) {
        const uint32_t sums = base + args.offset_exchange + (4 * worker + i) * 8;
        barrier_init(sums, 1);
        barrier_expect(1, sums, (args.split - 1) * 16 * kChannels * 4);
      }
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kSplit) cluster_arrive();

  const uint32_t leads = lane == 0;
  const auto pixel_stages = [&](int worker) {
    return base + args.offset_pixels + worker * args.pixel_stages * args.pixel_stage_bytes;
  };
  if (warp < 4 * args.workers) {
    const int worker = warp / 4;
    wait_for_earlier_kernels();
    // While the first stages are on their way.
    fold_channels<T, kChannels>(args, shared, work.first_channel);
    if constexpr (kSplit) cluster_wait();  // the barriers of all blocks are set up
    compute_tiles<T, kChannels, kSplit>(
        args, Worker<T, kChannels>(args, pixel_ring(worker), weight_ring, pixel_stages(worker), base), worker, work,
        shared);
  } else if (warp < 5 * args.workers) {
    const int worker = warp - 4 * args.workers;
    load_pixels_of(args, leads, pixel_ring(worker), pixel_stages(worker), worker, work);
  } else {
    load_weights(args, leads, weight_ring, base, work);
  }
  if (kSplit && warp >= 4 * args.workers) cluster_wait();
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

// cuTensorMapEncode* live in the driver's library, which is not linked.
template <class Function>
Function driver_function(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    fail("implicit_gemm_sm90: the driver has no ", name, "; update it, or set YOLO12_FASTCONV_TARGET=sm80");
  }
  return reinterpret_cast<Function>(address);
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
using EncodeIm2col = decltype(&cuTensorMapEncodeIm2col);

void check_map(CUresult status, const char* which) {
  if (status != CUDA_SUCCESS)
    fail("implicit_gemm_sm90: tensor map of ", which, ": driver error ", static_cast<int>(status));
}

// Of y.
CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kFloat16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

// Of x and the weights. wgmma drops the low 13 bits of a float, which would double the error and make all products too
// small. With this type the copy engine rounds what it loads to the nearest TF32, ties to even (infinities and NaN stay),
// as CUTLASS's and Triton's TF32 kernels rely on; it costs nothing.
CUtensorMapDataType operand_type(DType dtype) {
  return dtype == DType::kFloat32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : map_type(dtype);
}

CUtensorMapSwizzle map_swizzle(int row_bytes) {
  switch (row_bytes) {
    case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

template <int kRank>
CUtensorMap tiled_map(const char* which, CUtensorMapDataType type, const void* data, const cuuint64_t (&size)[kRank],
                      const cuuint64_t (&stride_bytes)[kRank - 1], const cuuint32_t (&box)[kRank],
                      const cuuint32_t (&step)[kRank], CUtensorMapSwizzle swizzle) {
  static const auto encode = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  CUtensorMap map;
  check_map(
      encode(&map, type, kRank, const_cast<void*>(data), size, stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      which);
  return map;
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
  const CUtensorMapSwizzle swizzle = map_swizzle(plan.row_bytes);
  const auto c = static_cast<cuuint64_t>(s.in_channels), w = static_cast<cuuint64_t>(s.in_w),
             h = static_cast<cuuint64_t>(s.in_h), n = static_cast<cuuint64_t>(s.batch);
  if (plan.mode == PixelMode::kRows) {
    const auto pixels = static_cast<cuuint64_t>(s.in_pixels());
    const auto parts = static_cast<cuuint32_t>(sm90_group_taps(s, plan));
    const cuuint64_t row = bytes(x.w);
    if (parts > 1) {
      return tiled_map<4>("x", type, a.x, {channels, pixels, c / channels, 1},
                          {row, cuuint64_t(plan.row_bytes), row * pixels}, {channels, kTilePixels, parts, 1},
                          {1, 1, 1, 1}, swizzle);
    }
    return tiled_map<4>("x", type, a.x, {c, pixels, 1, 1}, {row, row * pixels, row * pixels},
                        {channels, kTilePixels, 1, 1}, {1, 1, 1, 1}, swizzle);
  }
  const auto step_w = static_cast<cuuint32_t>(s.stride_w), step_h = static_cast<cuuint32_t>(s.stride_h);
  if (plan.mode == PixelMode::kWindow) {
    const Sm90Window window = sm90_window(s);
    return tiled_map<4>("x", type, a.x, {c, w, h, n}, {bytes(x.w), bytes(x.h), bytes(x.n)},
                        {channels, window.w * step_w, window.h * step_h, 1}, {1, step_w, step_h, 1}, swizzle);
  }
  static const auto encode = driver_function<EncodeIm2col>("cuTensorMapEncodeIm2col");
  const cuuint64_t size[4] = {c, w, h, n}, stride[3] = {bytes(x.w), bytes(x.h), bytes(x.n)};
  const int lower[2] = {-s.pad_w, -s.pad_h};
  const int upper[2] = {s.pad_w - (s.kernel_w - 1) * s.dilation_w, s.pad_h - (s.kernel_h - 1) * s.dilation_h};
  const cuuint32_t step[4] = {1, step_w, step_h, 1};
  CUtensorMap map;
  check_map(encode(&map, type, 4, const_cast<void*>(a.x), size, stride, lower, upper, channels, kTilePixels, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            "x");
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
  const CUtensorMapSwizzle swizzle = map_swizzle(plan.row_bytes);
  if (plan.mode == PixelMode::kRows && columns > 1) {  // blocks of channels in the place of columns
    return tiled_map<4>("weight", type, a.weight, {block, k, c / block, 1},
                        {filter, cuuint64_t(plan.row_bytes), filter}, {block, channels, cuuint32_t(columns), 1},
                        {1, 1, 1, 1}, swizzle);
  }
  // A box is counted in elements before striding.
  const auto extent = [](int count, int step) { return static_cast<cuuint32_t>((count - 1) * step + 1); };
  return tiled_map<4>("weight", type, a.weight, {c, k, cuuint64_t(s.kernel_w), cuuint64_t(s.kernel_h)},
                      {filter, tap, row}, {block, channels, extent(columns, step_w), extent(rows, step_h)},
                      {1, 1, cuuint32_t(step_w), cuuint32_t(step_h)}, swizzle);
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

template <class T, int kChannels>
void launch(const ConvArgs& a, DType dtype, const Sm90Plan& wanted, cudaStream_t stream) {
  constexpr int kBytes = sizeof(T), kChunk = kLanesOf16Bytes<T>;
  const ConvShape& s = a.shape;
  const Strides x = effective_strides(s, a.x_strides, kBytes);
  Sm90Plan plan = wanted;
  // A 1x1 over pixels that are not evenly spaced (a crop of a map), whose blocks of channels are copied one by one.
  if (plan.mode == PixelMode::kRows && (x.h != x.w * s.in_w || x.n != x.h * s.in_h)) {
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
  if (k.store_boxes) {
    constexpr cuuint32_t kBox = sm90_store_channels(kChannels, kBytes);
    const auto pixel = static_cast<cuuint64_t>(a.y_stride) * kBytes, channels = static_cast<cuuint64_t>(s.out_channels);
    const auto swizzle = map_swizzle(kBox * kBytes);
    if (mode == PixelMode::kWindow) {
      const auto q = static_cast<cuuint64_t>(s.out_w), p = static_cast<cuuint64_t>(s.out_h);
      k.y = tiled_map<4>("y", map_type(dtype), a.y, {channels, q, p, static_cast<cuuint64_t>(s.batch)},
                         {pixel, pixel * q, pixel * q * p}, {kBox, 8, 2, 1}, {1, 1, 1, 1}, swizzle);
    } else {
      const auto pixels = static_cast<cuuint64_t>(s.out_pixels());
      k.y = tiled_map<4>("y", map_type(dtype), a.y, {channels, pixels, 1, 1}, {pixel, pixel * pixels, pixel * pixels},
                         {kBox, 16, 1, 1}, {1, 1, 1, 1}, swizzle);
    }
  } else {
    k.y = k.weight[0];  // prefetched, not used
  }
  k.affine = a.affine;
  k.act = a.act;
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
  k.pixel_stage_bytes = sm90_pixel_stage_bytes(s, plan);
  k.pixel_filled_bytes = (mode == PixelMode::kWindow ? window.w * window.h : kTilePixels * plan.parts) * plan.row_bytes;
  k.weight_stages = plan.weight_stages;
  k.tap_bytes = kChannels * plan.row_bytes;
  k.weight_stage_bytes = sm90_weight_stage_bytes(s, plan);
  k.pixel_stage_step = k.pixel_stage_bytes / 16;
  k.weight_stage_step = k.weight_stage_bytes / 16;
  k.block_steps = plan.row_bytes / 32;
  k.resident = plan.resident;
  const int tiles_w = ceil_div(s.out_w, 8), tiles_h = ceil_div(s.out_h, 8);
  k.tiles = mode == PixelMode::kWindow ? s.batch * tiles_h * tiles_w
                                       : static_cast<int>(ceil_div<int64_t>(s.out_pixels(), kTilePixels));
  k.split = plan.split;
  k.split_blocks = sm90_split_blocks(s, plan);
  k.columns = plan.split > 1 ? ceil_div(k.tiles, plan.workers)
                             : std::min(std::max(1, multiprocessor_count() / channel_tiles), k.tiles);
  k.lag_blocks = sm90_lag_blocks(plan, k.blocks, k.tiles, k.columns);
  k.offset_pixels = layout.pixels;
  k.offset_output = layout.output;
  k.offset_exchange = layout.exchange;
  k.offset_affine = layout.affine;
  k.offset_barriers = layout.barriers;
  k.out_h = s.out_h;
  k.out_w = s.out_w;
  k.stride_h = s.stride_h;
  k.stride_w = s.stride_w;
  k.pad_h = s.pad_h;
  k.pad_w = s.pad_w;
  k.pixels = s.out_pixels();
  k.by_channel_tiles = FastDivide(channel_tiles);
  k.by_columns = FastDivide(k.columns);
  k.by_workers = FastDivide(plan.workers);
  k.by_tiles_w = FastDivide(tiles_w);
  k.by_tiles_h = FastDivide(tiles_h);
  k.by_out_w = FastDivide(s.out_w);
  k.by_out_h = FastDivide(s.out_h);
  k.y_data = a.y;
  k.y_stride = a.y_stride;
  k.residual = a.residual;
  k.residual_stride = a.residual_strides.w;
  k.residual_vectors = reinterpret_cast<uintptr_t>(a.residual) % 16 == 0 && a.residual_strides.w % kChunk == 0;

  const unsigned int grid = checked_grid(int64_t(k.columns) * channel_tiles * plan.split, "implicit_gemm_sm90");
  const auto start = [&]<bool kSplit>(std::bool_constant<kSplit>) {
    constexpr auto kKernel = implicit_gemm_sm90_kernel<T, kChannels, kSplit>;
    // Per device and context: cheap enough (under a microsecond) to repeat instead of remembering per device.
    allow_shared_bytes(kKernel, layout.bytes);
    launch_clusters<kKernel>("implicit_gemm_sm90", plan.split, grid, 160 * plan.workers + 32, layout.bytes, stream, k);
  };
  if (plan.split == 1) return start(std::false_type());
  if constexpr (sm90_can_split(kChannels, kBytes)) return start(std::true_type());
  fail("implicit_gemm_sm90: no kernel splits tiles of ", kChannels, " channels");
}

// Whether machine code for 9.0 is compiled at all. If not, the kernels are left out.
constexpr bool is_built_for_hopper() {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch == 900) return true;
  }
  return false;
}

template <class T>
void choose(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  if constexpr (is_built_for_hopper()) {
    switch (plan.channels) {
      case 16: return launch<T, 16>(args, dtype, plan, stream);
      case 32: return launch<T, 32>(args, dtype, plan, stream);
      case 48: return launch<T, 48>(args, dtype, plan, stream);
      case 64: return launch<T, 64>(args, dtype, plan, stream);
      case 80: return launch<T, 80>(args, dtype, plan, stream);
      case 96: return launch<T, 96>(args, dtype, plan, stream);
      case 128: return launch<T, 128>(args, dtype, plan, stream);
      case 192: return launch<T, 192>(args, dtype, plan, stream);
      case 256: return launch<T, 256>(args, dtype, plan, stream);
      default: break;
    }
  }
  fail("implicit_gemm_sm90: this build has no kernel for tiles of ", plan.channels, " channels");
}

}  // namespace

void implicit_gemm_sm90(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  if (args.shape.groups != 1) fail("implicit_gemm_sm90: groups=", args.shape.groups, ", only 1 is dense");
  switch (dtype) {
    case DType::kFloat16: return choose<__half>(args, dtype, plan, stream);
    case DType::kBFloat16: return choose<__nv_bfloat16>(args, dtype, plan, stream);
    case DType::kFloat32: return choose<float>(args, dtype, plan, stream);
    default: fail("implicit_gemm_sm90: no kernel for ", name_of(dtype));
  }
}

}  // namespace yolo12_fastconv
