// How the tensor core depthwise kernel (kernels/depthwise_mma.cu) cuts a convolution into blocks: decided by arithmetic
// on the host from the shape alone, testable without a GPU.
#pragma once

#include "args.h"
#include "dispatch.h"

namespace yolo12_fastconv {

// A block has `channels` channels of unit_cols x unit_rows units (16 at most) of 8 columns x `rows` rows of outputs.
struct DepthwisePlan {
  int channels = 0, rows = 0;
  int unit_cols = 0, unit_rows = 0;
  bool operator==(const DepthwisePlan&) const = default;
};

// Channels and rows: one kernel per pair, filter size and dtype. 7 rows: 2 x 21 are 40 and 1 x 21 are 20, but a map 20 wide
// has 3 columns of units, of which 5 rows of 4 fill 15 of 16. The narrow ones are for grids that wide ones leave small.
struct DepthwiseTile {
  int channels, rows;
};
constexpr DepthwiseTile kDepthwiseTiles[] = {{32, 7}, {32, 4}, {16, 4}, {8, 4}, {8, 2}};
constexpr int kDepthwiseUnits = 16, kDepthwiseUnitCols = 8;

// A row of x in shared memory is unit_cols + 1 chunks of 16 bytes, and every `rows` rows (a segment) so many chunks are left
// out: unit m's rows then begin at bank 4 m + constant, and ldmatrix reads any 8 neighbouring units at once.
constexpr int depthwise_segment_pad(const DepthwisePlan& p) {
  return (p.unit_cols + 8 * p.rows - p.rows * (p.unit_cols + 1) % 8) % 8;
}
// Chunks that x takes in shared memory, per channel.
constexpr int depthwise_chunks(const DepthwisePlan& p, int kernel) {
  const int rows = p.unit_rows * p.rows + kernel - 1;
  return rows * (p.unit_cols + 1) + (rows - 1) / p.rows * depthwise_segment_pad(p);
}
// Chunks that there are: enough for 5 x 3 and 4 x 4 units, and for 3 x 5 of 4 rows and less.
constexpr int depthwise_capacity(int rows, int kernel) {
  return (3 * rows + kernel - 1) * 6 + (rows > 4 ? 16 : rows > 2 ? 20 : 36);
}

// Warps that load, compute and write: one per channel, or two.
constexpr int depthwise_warps(int channels) { return channels == 8 ? 8 : 16; }
// Pairs of pixels that a thread has on their way: all that it loads of 5 x 3 units, or half of it where 32 channels leave no
// registers for more.
constexpr int depthwise_pairs_in_flight(const DepthwiseTile& t, int kernel) {
  const int pairs = (3 * t.rows + kernel - 1) * 24 * (t.channels / 8), threads = 32 * depthwise_warps(t.channels);
  return ceil_div(pairs, (t.channels == 32 ? 2 : 1) * threads);
}

// The plan with the lowest estimate, for a stride-1 convolution of one filter per channel, 3x3, 5x5 or 7x7.
DepthwisePlan plan_depthwise(const ConvShape& shape);

}  // namespace yolo12_fastconv
