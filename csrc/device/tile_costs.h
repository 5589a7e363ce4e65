// What a dense convolution costs on the sm80 and on the sm90 kernel: the estimates by which the menu chooses. One scale
// for both, so that the lower estimate is the choice.
#pragma once

#include "sm90_once_plan.h"
#include "sm90_plan.h"
#include "tile_menu.h"

namespace yolo12_fastconv {

// Cycles of a multiprocessor of an H200 (1.755 GHz) and its rates per cycle. `scripts/tune.py fit` reads and writes these
// lines. They are fitted to 15324 timings of 328 layers in half, batch 1 and 32, each with up to 48 kernels: those
// that they pick take 2.0 % longer than the fastest ones, a sum in which every model and batch counts the same.
struct TileCosts {
  // Both kernels.
  double l2_bytes = 43;  // from L2, besides resident weights
  double hbm_bytes = 42.4;  // from and to device memory
  double cached_megabytes = 76;  // of x, w and y that are not device memory's concern, but L2's
  double overlap = 3.42;  // of products, transfers and memory, which share the time: exponent of their norm
  // sm90: set-up.
  double set_up = 2540;  // from the end of the kernel before to the first stage in shared memory; fitted 3120, now less
  // sm90: the loops.
  double pixel_bytes = 44.1;  // resident: from L2
  double first_weight_bytes = 765;  // resident: weights, before any product
  double pixel_stage = 247;  // resident: a worker's instructions per pixel stage
  double weight_stage = 129;  //   and per weight stage
  double streamed_pixel_stage = 137;  // streamed: per pixel stage
  double streamed_weight_stage = 350;  //   and per weight stage
  double crowd = 0.116;  // of the four: more for each worker beside it
  double latency = 1390;  // of a stage that is filled again; of a ring all but one are under way at once
  double tile = 1130;  // epilogue of a tile
  double channel = 11.6;  //   and per channel
  double unaligned = 1.57;  //   times this where y can't be stored in boxes
  double shared_read = 24.7;  // A of a wgmma through shared memory; B adds a quarter per channel
  double lagging_finish = 0.0776;  // streamed, workers one after the other: share of the epilogue that shows
  double shared_finish = 0.363;  // streamed, workers in step: of each other's stores
  double split = 1500;  // clusters that share a reduction: set-up and exchange
  double split_bytes = 16;  //   and sums that a block gets, per cycle
  // sm90, the kernel for small grids.
  double once_set_up = 2580;  // as set_up, and the end
  double once_bytes = 141;  // from L2, for a block
  double once_l2_bytes = 56;  //   and for all of them, per multiprocessor
  double once_copy = 53;  // from one copy of a warp to the next
  double once_shared_read = 16.8;  // as shared_read
  double once_output = 10.9;  // per worker and channel
  double once_overlap = 1.67;  // as overlap
  // sm80.
  double gemm_set_up = 314;  // as set_up
  double gemm_alone = 259;  // more where a block of the next kernel does not fit beside this one's
  double gemm_block = 2330;  // a block's first copies and its sums' way to y
  double gemm_stage = 42.7;  // wait, barrier, first ldmatrix
  double gemm_step = 443;  // products that wait for the products before
  double gemm_outputs = 4.33;  // finished outputs per cycle
  double gemm_shared_bytes = 25.7;  // through shared memory
  double gemm_products = 1630;  // mma.sync in half; wgmma does 2048
  // sm80, tiles whose warps do not share the reduction. Fitted to 132 layers of n, m and x at batch 32 by themselves.
  double tile_set_up = 2240;  // as set_up
  double tile_products = 1760;  // of multiplications in half; mma.sync does 1264 at most, tile_overlap counts the rest
  double tile_block = 3350;  // a block's first copies and last stores
  double tile_wide_block = 4650;  //   of wide warps
  double tile_window = 894;  //   in windows
  double tile_stage = 395;  // wait, barrier, copies, first ldmatrix
  double tile_window_stage = 903;  //   in windows
  double tile_step = 84.9;  // of 32 bytes
  double tile_wide_step = 43.7;  //   of wide warps
  double tile_taps = 9.62;  // what a stage costs more if its copies look for taps
  double tile_outputs = 18.3;  // finished outputs per cycle
  double tile_hbm_bytes = 178;  // from and to device memory, and L2
  double tile_overlap = 0.902;
  double tile_wave = 0.361;  // what an empty place of the last round costs of a filled one
};

// Whole time of the kernel, from the end of the one before. Float in TF32 has not been timed: twice the products, bytes and
// stores of half, at half's rates.
double sm90_cycles(const ConvShape& shape, const Sm90Plan& plan, const TileCosts& costs = {});
double sm90_once_cycles(const ConvShape& shape, const Sm90OncePlan& plan, const TileCosts& costs = {});
double gemm_cycles(const ConvShape& shape, DType dtype, const GemmTile& tile, const TileCosts& costs = {},
                   int capability = 90);

}  // namespace yolo12_fastconv
