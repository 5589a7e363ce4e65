#include "device/depthwise_plan.h"

#include <algorithm>

#include "device/sm90_plan.h"

namespace yolo12_fastconv {
namespace {

// Blocks that a multiprocessor holds: by registers for wide tiles, by threads and registers for narrow ones.
int resident_blocks(const DepthwisePlan& p) { return p.channels == 32 ? 2 : 3; }

int64_t block_count(const ConvShape& s, const DepthwisePlan& p) {
  return int64_t(s.batch) * ceil_div(s.out_h, p.unit_rows * p.rows) * ceil_div(s.out_w, p.unit_cols * kDepthwiseUnitCols) *
         ceil_div(s.out_channels, p.channels);
}

// Cycles of the busiest multiprocessor, of an H200.
//   work: what a block takes of its ports, no matter how many run beside it. L1: a look-up per pixel of x and y (64 bytes
//     or less), x and y through shared memory at 128 bytes a cycle, ldmatrix. Products at half the rate of wgmma.
//   chain: what a block waits. 1000 for memory, barriers and set-up, and 350 for the products of a warp's channel.
// 32-channel blocks of 7x7 at 40x40, batch 32: 6 per multiprocessor, estimated at 55 500, measured 70 000.
double cycles(const ConvShape& s, const DepthwisePlan& p) {
  const double kernel = s.kernel_h;
  const double in_pixels = (p.unit_rows * p.rows + kernel - 1) * (p.unit_cols + 1) * kDepthwiseUnitCols;
  const double out_pixels = p.unit_rows * p.rows * p.unit_cols * kDepthwiseUnitCols;
  const double channels = double(s.out_channels) / ceil_div(s.out_channels, p.channels);
  const double multiply = 4 * (p.rows + kernel - 1) + 2 * p.rows * kernel;
  const double work = in_pixels * (1 + channels / 64) + out_pixels * (1 + channels / 32) + channels * multiply;
  const double chain = 1000 + 350 * (p.channels == 8 ? 1 : 2);
  const int64_t blocks = ceil_div<int64_t>(block_count(s, p), kMultiprocessors);
  return double(blocks) * work + double(ceil_div<int64_t>(blocks, resident_blocks(p))) * chain;
}

}  // namespace

DepthwisePlan plan_depthwise(const ConvShape& s) {
  DepthwisePlan best;
  double least = 0;
  for (const DepthwiseTile& tile : kDepthwiseTiles) {
    const int all_cols = ceil_div(s.out_w, kDepthwiseUnitCols), all_rows = ceil_div(s.out_h, tile.rows);
    for (int cols = 1; cols <= std::min(5, all_cols); ++cols) {
      for (int rows = std::min(kDepthwiseUnits / cols, all_rows); rows >= 1; --rows) {
        const DepthwisePlan plan = {tile.channels, tile.rows, cols, rows};
        if (depthwise_chunks(plan, s.kernel_h) > depthwise_capacity(tile.rows, s.kernel_h)) continue;
        const double estimate = cycles(s, plan);
        if (best.channels != 0 && estimate >= least) continue;
        best = plan;
        least = estimate;
      }
    }
  }
  return best;
}

}  // namespace yolo12_fastconv
