// How the sm90 kernel for small grids (kernels/implicit_gemm_sm90_once.cu) runs a convolution: decided on the host from the
// shape alone.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "sm90_plan.h"

namespace yolo12_fastconv {

// A tile of 64 pixels for each worker (a warpgroup), and a place in shared memory for everything that a block reads, so that
// nothing is ever waited for but the first use of what was asked for at the start. Where it does not fit, a ring of places
// for the parts of the input channels.
struct Sm90OncePlan {
  int channels = 0;  // output channels of a tile; 0: no plan
  int workers = 0;
  int row_bytes = 0;  // a part of the input channels: 128, 64 or 32
  bool operator==(const Sm90OncePlan&) const = default;
};

enum class OnceMode : int { kRows = 0, kWindow = 1, kStrided = 2 };  // 1x1; 3x3; 3x3 with stride 2

constexpr int kOnceChannels[] = {16, 32, 48, 64, 96, 128};
// Parts of the input channels that have a place at once. Each has barriers.
constexpr int kOnceMaxParts = 16;

// What fits the registers of a multiprocessor.
constexpr int once_max_workers(int channels) { return channels <= 64 ? 4 : channels <= 96 ? 3 : 2; }
// Beside the workers' warps, of which one copies the pixels, one that copies weights and one that folds batch norm.
constexpr int once_threads(int workers) { return 128 * workers + 64; }
// Channels that four threads store at once, and bytes of each: neighbours, so that no sector of memory is written in parts.
// With all channels of a thread adjacent, tiles of 48, 64, 96 and 128 channels took up to 1 us longer.
constexpr int once_store_channels(int channels) { return channels % 32 == 0 ? 32 : 16; }
constexpr int once_store_bytes(int channels) { return once_store_channels(channels) / 2; }
// What is compiled.
constexpr bool once_has_kernel(int channels, int row_bytes, OnceMode mode) {
  if (row_bytes == 32) return mode != OnceMode::kRows && channels <= 32;
  return channels < 128 || (row_bytes == 128 && mode == OnceMode::kRows);
}
// The same with a ring.
constexpr bool once_has_ring(int channels, int row_bytes, OnceMode mode) {
  if (mode == OnceMode::kRows) return row_bytes == 128 && channels >= 32;
  return row_bytes == 64 && (channels == 32 || channels == 64);
}

// Of a worker's pixels for one part of the input channels: planes (residues of the stride), their pixels, and the rows that
// they take, whole periods of the swizzle.
struct OncePixels {
  int planes, pixels, rows;
};
constexpr OncePixels once_pixels(OnceMode mode) {
  return mode == OnceMode::kRows     ? OncePixels{1, 64, 64}
         : mode == OnceMode::kWindow ? OncePixels{1, 100, 104}
                                     : OncePixels{4, 81, 88};
}
constexpr int once_taps(OnceMode mode) { return mode == OnceMode::kRows ? 1 : 9; }
// Copies of a part's weights: a row of the filter each.
constexpr int once_groups(OnceMode mode) { return mode == OnceMode::kRows ? 1 : 3; }

inline OnceMode once_mode(const ConvShape& s) {
  return s.pointwise() ? OnceMode::kRows : s.stride_h == 1 ? OnceMode::kWindow : OnceMode::kStrided;
}
inline int once_parts(const ConvShape& s, const Sm90OncePlan& p) { return ceil_div(s.in_channels * 2, p.row_bytes); }
inline int64_t once_tiles(const ConvShape& s) {
  return s.pointwise() ? ceil_div<int64_t>(s.out_pixels(), 64)
                       : int64_t(s.batch) * ceil_div(s.out_h, 8) * ceil_div(s.out_w, 8);
}
inline int64_t once_blocks(const ConvShape& s, const Sm90OncePlan& p) {
  return ceil_div<int64_t>(once_tiles(s), p.workers) * ceil_div(s.out_channels, p.channels);
}

// The parts of shared memory in the order in which they lie; weights begin at 0.
struct OnceLayout {
  int pixels, affine, barriers, bytes;
};
// With places for `stages` parts: barriers for their weights, for each worker's pixels and, in a ring, for empty places.
inline OnceLayout once_layout(const ConvShape& s, const Sm90OncePlan& p, int stages) {
  const OnceMode mode = once_mode(s);
  const OncePixels pixels = once_pixels(mode);
  const bool ring = stages < once_parts(s, p);
  OnceLayout l;
  l.pixels = round_up(stages * once_taps(mode) * p.channels * p.row_bytes, 1024);
  l.affine = l.pixels + p.workers * stages * pixels.planes * pixels.rows * p.row_bytes;
  l.barriers = l.affine + p.channels * 8;
  l.bytes = std::max(kSm90LeastSharedBytes, l.barriers + 8 * stages * (once_groups(mode) + p.workers + ring));
  return l;
}
// Parts of the input channels that have a place at once: all of them, or as many as fit a ring; 0: no such kernel. Rings of
// windows for two workers and more have two places, and took up to twice as long as those for one.
inline int once_stages(const ConvShape& s, const Sm90OncePlan& p) {
  const OnceMode mode = once_mode(s);
  int stages = std::min(once_parts(s, p), kOnceMaxParts);
  while (stages > 0 && once_layout(s, p, stages).bytes > kSm90SharedBytes) --stages;
  const bool exists = stages == once_parts(s, p) ? once_has_kernel(p.channels, p.row_bytes, mode)
                                                 : stages > 2 && (s.pointwise() || p.workers == 1) &&
                                                       once_has_ring(p.channels, p.row_bytes, mode);
  return exists ? stages : 0;
}

// All plans for the convolution in half and bfloat16; none where this kernel can't run it, or where its blocks would not all
// run at once. Which is best is up to device/tile_costs.h.
std::vector<Sm90OncePlan> sm90_once_plans(const ConvShape& shape);
std::string sm90_once_name(const ConvShape& shape, const Sm90OncePlan& plan);

}  // namespace yolo12_fastconv
