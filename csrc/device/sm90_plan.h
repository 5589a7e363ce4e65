// How the sm90 implicit GEMM (kernels/implicit_gemm_sm90.cuh) runs a convolution: decided by arithmetic on the host from
// the shape alone, testable without a GPU.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "args.h"
#include "dispatch.h"

namespace yolo12_fastconv {

// The largest current GPU (H100 SXM, H200), for which estimates are made and work is cut.
constexpr int kMultiprocessors = 132;

// How the pixels of x reach shared memory.
enum class PixelMode : int {
  kRows = 0,  // 1x1: x is a matrix of pixels; a tile is 64 rows of it
  kWindow = 1,  // a tile is 8x8 outputs; its input window is loaded once and serves all filter taps
  kTaps = 2,  // a tile is 64 outputs in a row; each filter tap loads its pixels (im2col mode of the copy engine)
};

struct Sm90Plan {
  int element_bytes = 2;  // of x, weights and y: 2, or 4 for float with products in TF32
  int channels = 0;  // output channels of a tile
  int workers = 0;  // warpgroups that compute, each a tile of 64 pixels of its own
  int row_bytes = 0;  // a block of input channels, in bytes: 128, 64 or 32
  int parts = 1;  // rows: blocks of input channels in a pixel stage
  PixelMode mode = PixelMode::kRows;
  bool resident = false;  // weights of the tile's channels stay in shared memory
  int pixel_stages = 0;  // of a ring
  int weight_stages = 0;
  int split = 1;  // blocks of a cluster among which the input channels of a tile are dealt out
  bool paired = false;  // two blocks with neighbouring tiles of channels copy each half of the pixels for both
  bool rest = false;  // the tiles that are left when all blocks have the same number of them are dealt out in parts
  bool one_ring = false;  // the tiles of all workers pass through one ring of pixel stages, and are computed in turn
  // Plans of kernels/implicit_gemm_sm90_shared.cu. The estimates do not tell them from those without.
  bool shares() const { return paired || rest || one_ring; }
  int rings() const { return one_ring ? 1 : workers; }  // of pixel stages
  bool operator==(const Sm90Plan&) const = default;
};

constexpr int kSm90Channels[] = {16, 32, 48, 64, 80, 96, 128, 192, 256};
constexpr int kSm90SharedBytes = 227 * 1024;
// A block takes more than half of a multiprocessor. Two blocks of the next kernel would else start early
// (device/dependent_launch.cuh) on the multiprocessors that this one leaves idle, and share them while others have none:
// one image took 2.5 % longer (n, m and x, 350, 566 and 1145 us), though their set-up was hidden.
constexpr int kSm90LeastSharedBytes = 115 * 1024;
constexpr int kSm90MaxTaps = 25;
constexpr int kSm90MaxSplit = 4;
// Tiles whose reduction the blocks of a cluster may share, by kernels of their own: the widths that win most by it. Wider
// ones would need the room of their stages for the sums.
constexpr bool sm90_can_split(int channels, int element_bytes) {
  return element_bytes == 2 && (channels == 16 || channels == 32 || channels == 64 || channels == 128);
}
constexpr int kSm90MaxWeightStages = 256;

// What fits the registers of a multiprocessor.
constexpr int sm90_max_workers(int channels) { return channels <= 96 ? 4 : channels <= 192 ? 3 : 2; }
// Output channels that leave a warp at once, through shared memory. In float rows of 64 or 128 bytes, that are swizzled:
// without, lanes that write two floats each would get in each other's way.
constexpr int sm90_store_channels(int channels, int element_bytes) {
  if (element_bytes == 4) return channels % 32 == 0 ? 32 : 16;
  return channels % 64 == 0 ? 64 : channels == 32 ? 32 : channels == 16 ? 16 : channels == 80 ? 80 : 48;
}

// Size of the input window of 8x8 outputs, per residue of the stride.
struct Sm90Window {
  int w, h;
};
inline Sm90Window sm90_window(const ConvShape& s) {
  return {8 + (s.kernel_w - 1) * s.dilation_w / s.stride_w, 8 + (s.kernel_h - 1) * s.dilation_h / s.stride_h};
}

// Bytes of a pixel stage, a multiple of the swizzle's period.
inline int sm90_pixel_stage_bytes(const ConvShape& s, const Sm90Plan& p) {
  const Sm90Window window = sm90_window(s);
  const int pixels = p.mode == PixelMode::kWindow ? window.w * window.h : 64;
  return (pixels + 7) / 8 * 8 * p.row_bytes * p.parts;
}

// Filter taps, or (rows) blocks of channels of a pixel stage, whose weights share a stage: what one copy can bring, in at
// most 32 KB, since its warp needs 200 to 250 cycles for each copy. Taps of a row, or all taps of a residue of the stride
// (whose stages differ in size, so not where all of them stay in shared memory).
inline int sm90_group_taps(const ConvShape& s, const Sm90Plan& p) {
  constexpr int kMostTaps = 4, kMostBytes = 32 * 1024;
  int taps = 1;
  if (p.mode == PixelMode::kRows) {
    if (s.in_channels * p.element_bytes % p.row_bytes == 0) taps = p.parts;
  } else if (p.mode == PixelMode::kWindow) {
    if (s.stride_h == 1 && s.stride_w == 1) {
      taps = s.kernel_w;
    } else if (!p.resident && s.dilation_h == 1 && s.dilation_w == 1 && s.stride_h * s.stride_w <= 4) {
      taps = ceil_div(s.kernel_h, s.stride_h) * ceil_div(s.kernel_w, s.stride_w);
    }
  }
  return taps <= kMostTaps && taps * p.channels * p.row_bytes <= kMostBytes ? taps : 1;
}
// Weight stages that a pixel stage's block of channels is multiplied with.
inline int sm90_weight_groups(const ConvShape& s, const Sm90Plan& p) {
  const int together = sm90_group_taps(s, p), taps = s.kernel_h * s.kernel_w * p.parts;
  if (together == 1) return taps;
  if (p.mode == PixelMode::kWindow && (s.stride_h > 1 || s.stride_w > 1)) {
    return std::min(s.stride_h, s.kernel_h) * std::min(s.stride_w, s.kernel_w);
  }
  return taps / together;
}
inline int sm90_weight_stage_bytes(const ConvShape& s, const Sm90Plan& p) {
  return sm90_group_taps(s, p) * p.channels * p.row_bytes;
}

// Split reductions: a warp's sums of 16 pixels as another block of the cluster sends them, and the place for all that a
// block is sent, behind a barrier for each of its warps. Warp w of every worker is finished by block w % split.
constexpr int kSm90ExchangeBarrierBytes = 128;
inline int sm90_sums_bytes(const Sm90Plan& p) { return 16 * p.channels * 4; }
inline int sm90_exchange_bytes(const Sm90Plan& p) {
  if (p.split == 1) return 0;
  return kSm90ExchangeBarrierBytes + p.workers * ceil_div(4, p.split) * (p.split - 1) * sm90_sums_bytes(p);
}

// The parts of shared memory in the order in which they lie.
struct Sm90Layout {
  int pixels, output, exchange, affine, barriers, rings, bytes;  // offsets; weights begin at 0
};
inline Sm90Layout sm90_layout(const ConvShape& s, const Sm90Plan& p) {
  Sm90Layout l;
  l.pixels = p.weight_stages * sm90_weight_stage_bytes(s, p);
  l.output = l.pixels + p.rings() * p.pixel_stages * sm90_pixel_stage_bytes(s, p);
  l.output = (l.output + 1023) / 1024 * 1024;
  l.exchange = l.output + p.workers * 4 * 2 * 16 * sm90_store_channels(p.channels, p.element_bytes) * p.element_bytes;
  l.affine = l.exchange + sm90_exchange_bytes(p);
  l.barriers = l.affine + p.channels * 8;
  l.rings = l.barriers + 8 * (8 * p.workers + 1);  // behind two for each warp that computes, and one for the block
  // 1x1: as many as if each of its parts had a stage (see launch() of the kernel).
  const int weight_barriers = p.weight_stages * (p.mode == PixelMode::kRows ? sm90_group_taps(s, p) : 1);
  l.bytes = std::max(kSm90LeastSharedBytes, l.rings + 2 * 8 * (p.rings() * p.pixel_stages + weight_barriers));
  return l;
}

// Streamed weights: by how many blocks of input channels each worker starts after the one before. Workers that read the
// same weights one after the other finish their tiles one after the other, and the epilogue of one runs under the
// products of the rest. It costs up to a tile's time at the end, so it takes several tiles per worker.
inline int sm90_lag_blocks(const Sm90Plan& p, int blocks, int64_t tiles, int64_t columns) {
  return p.resident || blocks < p.workers || tiles < 5 * columns * p.workers ? 0 : blocks / p.workers;
}

// A block of input channels, in bytes, in every plan of a convolution.
int sm90_row_bytes(const ConvShape& shape, int element_bytes);
// Pixel stages that the input channels take.
inline int sm90_blocks(const ConvShape& s, const Sm90Plan& p) {
  return ceil_div(s.in_channels * p.element_bytes, p.row_bytes * p.parts);
}
// The same of each block of a cluster; the last one may have fewer.
inline int sm90_split_blocks(const ConvShape& s, const Sm90Plan& p) { return ceil_div(sm90_blocks(s, p), p.split); }
// Tiles of pixels, and blocks (or clusters) per tile of channels among which they are dealt out.
inline int64_t sm90_tiles(const ConvShape& s, const Sm90Plan& p) {
  return p.mode == PixelMode::kWindow ? int64_t(s.batch) * ceil_div(s.out_h, 8) * ceil_div(s.out_w, 8)
                                      : ceil_div<int64_t>(s.out_pixels(), 64);
}
// Split: a tile per worker, since what is sent waits in shared memory until the receiver is ready, which it is once.
inline int64_t sm90_columns(const ConvShape& s, const Sm90Plan& p) {
  if (p.split > 1) return ceil_div<int64_t>(sm90_tiles(s, p), p.workers);
  return std::min<int64_t>(std::max(1, kMultiprocessors / ceil_div(s.out_channels, p.channels)), sm90_tiles(s, p));
}

// Paired blocks run in a cluster. Each copies half of every stage of pixels (rows or taps) into the shared memory of both (multicast), so that
// pixels cross L2 half as often; a stage is filled again when the workers of both have read it.
//
// The rest of the tiles. On 132 multiprocessors, 66, 44, 33 or 22 blocks share the tiles of the same channels, and of YOLO12's
// maps at batch 32, of 2^k * 25 tiles, each gets as many, but for 1 %: for these a whole round of tiles would pass. So a block
// gets some channels (a part) of one of them, whose reduction its workers share.
inline int sm90_rest_parts(const Sm90Plan& p) { return p.channels / sm90_store_channels(p.channels, p.element_bytes); }
// Workers that share a part; each has as many stages of it.
inline int sm90_rest_sharers(const Sm90Plan& p, int stages) {
  int sharers = std::min(p.workers, sm90_rest_parts(p));
  while (stages % sharers != 0) --sharers;
  return sharers;
}
// Whether the loop over pairs of stages applies: half, whole rows of 128 bytes, stages of x and of the weights that correspond.
inline bool sm90_multiplies_pairs(const ConvShape& s, const Sm90Plan& p) {
  return p.element_bytes == 2 && p.row_bytes == 128 && s.in_channels * 2 % (128 * p.parts) == 0 && p.split == 1 &&
         p.mode != PixelMode::kWindow && p.parts <= (p.mode == PixelMode::kRows && p.resident ? 2 : 1) &&
         sm90_group_taps(s, p) == p.parts;
}
// Workers that take their tiles in turn read one ring in the order of the tiles: half as many stages for each as in rings of their
// own are as far ahead, so that a third worker fits beside the weights. It has to hold a tile: a worker begins when the one before
// it has asked for its last product, and is then less than a round of the ring behind.
inline bool sm90_joins_rings(const ConvShape& s, const Sm90Plan& p) {
  return sm90_multiplies_pairs(s, p) && p.mode == PixelMode::kRows && p.resident && p.channels >= 128 && p.workers > 1;
}
// Whether blocks may copy pixels for each other.
inline bool sm90_pairs_blocks(const ConvShape& s, const Sm90Plan& p) {
  return sm90_multiplies_pairs(s, p) && p.channels >= 128 && ceil_div(s.out_channels, p.channels) % 2 == 0;
}
// Whether the kernel deals out the rest of `tiles` among `columns` blocks: where its loop over pairs of stages applies (half,
// whole rows of 128 bytes), where each block gets a part at most, and where whole tiles would take another round.
inline bool sm90_deals_rest(const ConvShape& s, const Sm90Plan& p, int64_t tiles, int64_t columns) {
  const int parts = sm90_rest_parts(p);
  const int64_t each = tiles / columns, rest = tiles % columns;
  return sm90_multiplies_pairs(s, p) && p.channels >= 128 && parts > 1 && rest > 0 && rest * parts <= columns &&
         each >= p.workers && (p.resident || each % p.workers == 0);
}

// All plans that the kernel can run the convolution with; none where it can't. Takes for granted: half, bfloat16, or float
// that may be rounded to TF32, and rows of x aligned to 16 bytes. Which is best is up to device/tile_costs.h.
std::vector<Sm90Plan> sm90_plans(const ConvShape& shape, int element_bytes);
std::string sm90_name(const Sm90Plan& plan);

}  // namespace yolo12_fastconv
