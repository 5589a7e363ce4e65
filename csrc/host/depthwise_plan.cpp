#include "device/depthwise_plan.h"

#include <algorithm>

#include "device/sm90_plan.h"

namespace yolo12_fastconv {
namespace {

int64_t block_count(const ConvShape& s, const DepthwisePlan& p) {
  return int64_t(s.batch) * ceil_div(s.out_h, p.unit_rows * p.rows) *
         ceil_div(s.out_w, p.unit_cols * kDepthwiseUnitCols) * ceil_div(s.out_channels, p.channels);
}

// Cycles of the busiest multiprocessor, of an H200, from the end of the kernel before on.
//   chain: what a block takes by itself: 700 for each wait for x, and a warp's instructions one after the other, 4 each.
//   work: what it takes from the blocks beside it: issue slots, or ports, whichever is more. Ports: a look-up in L1 per
//     pixel of x and y (64 bytes or less), x and y through shared memory at 128 bytes a cycle, ldmatrix, and products at
//     half the rate of wgmma.
// Of blocks of 32 channels, against what was measured less 2.1 us for any launch: 7x7 C=384 40x40, batch 32, 5 x 3 units of 7
// rows: 69 800, 66 500; 3x3 C=80 80x80, batch 1, 5 x 1 of 4: 6000, 6300; C=256, 5 x 3 of 4: 7950, 8800.
double cycles(const ConvShape& s, const DepthwisePlan& p) {
  const bool narrow = p.channels < 32;
  const int kernel = s.kernel_h, warps = depthwise_warps(p.channels), resident = p.channels == 8 ? 3 : 2;
  const int in_rows = p.rows + kernel - 1;  // of a unit
  const int in_pixels = (p.unit_rows * p.rows + kernel - 1) * (p.unit_cols + 1) * kDepthwiseUnitCols;
  const int out_pixels = p.unit_rows * p.rows * p.unit_cols * kDepthwiseUnitCols;
  const int loads = ceil_div(in_pixels / 2 * (p.channels / 8), warps * 32),
            stores = ceil_div(out_pixels * p.channels / 16, warps * 32);
  const int rounds = ceil_div(loads, depthwise_pairs_in_flight({p.channels, p.rows}, kernel));
  const double channel = 2 * kernel + 3 * in_rows + p.rows * kernel + 18 * p.rows + 40;
  const int64_t blocks = ceil_div<int64_t>(block_count(s, p), kMultiprocessors);
  // Narrow blocks are set up while the kernel before still runs, if they find room beside its blocks.
  const int set_up = narrow && 2 * blocks <= resident ? 60 : narrow ? 300 : 210;
  const double instructions = set_up + loads * (narrow ? 25 : 55) + p.channels / warps * channel + stores * 45;
  const double channels = double(s.out_channels) / ceil_div(s.out_channels, p.channels);
  const double ports = in_pixels * (1 + channels / 64) + out_pixels * (1 + channels / 32) +
                       channels * (4 * in_rows + 2 * p.rows * kernel);
  const double chain = 700 * rounds + 4 * instructions, work = std::max(instructions * warps / 4, ports);
  return double(ceil_div<int64_t>(blocks, resident)) * chain + double(blocks) * work;
}

// Square maps of one image whose estimates choose a plan that takes at least 2.5 % longer than the fastest of their first
// 18: its channels, rows, and units. Fewer blocks with more of their 16 units in use are better than estimated. us of one
// H200, chosen and fastest.
struct TimedPlan {
  int channels, kernel, size;
  DepthwisePlan plan;
};
constexpr TimedPlan kTimedPlans[] = {
    {64, 3, 80, {16, 4, 5, 2}},  // 3.31, 3.13
    {64, 7, 40, {8, 2, 3, 5}},  // 2.60, 2.42
    {80, 3, 20, {8, 2, 1, 5}},  // 2.19, 1.94
    {80, 3, 40, {8, 2, 5, 3}},  // 2.52, 2.33
    {128, 3, 20, {8, 2, 3, 3}},  // 2.19, 2.08
    {128, 7, 20, {8, 2, 3, 5}},  // 2.42, 2.21
    {256, 3, 40, {16, 4, 5, 2}},  // 3.37, 3.19
    {256, 7, 20, {8, 2, 3, 5}},  // 2.65, 2.35
    {256, 7, 40, {16, 4, 5, 2}},  // 4.10, 3.51
    {768, 3, 20, {8, 2, 3, 5}},  // 3.35, 2.83
    {768, 3, 40, {16, 4, 5, 2}},  // 6.03, 5.05
};

}  // namespace

DepthwisePlan plan_depthwise(const ConvShape& s) {
  for (const TimedPlan& timed : kTimedPlans) {
    if (s.batch == 1 && s.out_channels == timed.channels && s.kernel_h == timed.kernel && s.out_h == timed.size &&
        s.out_w == timed.size) {
      return timed.plan;
    }
  }
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
