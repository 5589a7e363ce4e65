// What a dense convolution costs on the sm80 and on the sm90 kernel: the estimates by which the menu chooses. One scale
// for both, so that the lower estimate is the choice.
#pragma once

#include "sm90_plan.h"
#include "tile_menu.h"

namespace yolo12_fastconv {

// Cycles of a multiprocessor of an H200 (1.755 GHz) and its rates per cycle. `scripts/tune.py fit` reads and writes these
// lines. They are fitted to 19234 timings of 262 layers, batch 1 and 32, each with up to 80 kernels: the kernels that
// they pick take 2.0 % longer than the fastest ones, a sum in which every model and batch counts the same.
struct TileCosts {
  // Both kernels.
  double l2_bytes = 42.4;  // from L2, besides resident weights
  double hbm_bytes = 31.5;  // from and to device memory
  double cached_megabytes = 74.7;  // of x, w and y that are not device memory's concern, but L2's
  double overlap = 3.68;  // of products, transfers and memory, which share the time: exponent of their norm
  // sm90: set-up.
  double set_up = 2760;  // from the end of the kernel before to the first stage in shared memory
  // sm90: the loops.
  double pixel_bytes = 40.9;  // resident: from L2
  double first_weight_bytes = 485;  // resident: weights, before any product
  double pixel_stage = 244;  // resident: a worker's instructions per pixel stage
  double weight_stage = 145;  //   and per weight stage
  double streamed_pixel_stage = 129;  // streamed: per pixel stage
  double streamed_weight_stage = 397;  //   and per weight stage
  double crowd = 0.0382;  // of the four: more for each worker beside it
  double latency = 1390;  // of a stage that is filled again; of a ring all but one are under way at once
  double tile = 1160;  // epilogue of a tile
  double channel = 11.5;  //   and per channel
  double unaligned = 1.46;  //   times this where y can't be stored in boxes
  double shared_read = 26.3;  // A of a wgmma through shared memory; B adds a quarter per channel
  double lagging_finish = 0.0774;  // streamed, workers one after the other: share of the epilogue that shows
  double shared_finish = 0.306;  // streamed, workers in step: of each other's stores
  // sm80.
  double gemm_set_up = 283;  // as set_up
  double gemm_alone = 279;  // more where a block of the next kernel does not fit beside this one's
  double gemm_block = 1770;  // a block's first copies and its sums' way to y
  double gemm_stage = 37.6;  // wait, barrier, first ldmatrix
  double gemm_step = 519;  // products that wait for the products before
  double gemm_outputs = 3.28;  // finished outputs per cycle
  double gemm_shared_bytes = 24.9;  // through shared memory
  double gemm_products = 1900;  // mma.sync in half; wgmma does 2048
};

// Whole time of the kernel, from the end of the one before. Float in TF32 has not been timed: twice the products, bytes and
// stores of half, at half's rates.
double sm90_cycles(const ConvShape& shape, const Sm90Plan& plan, const TileCosts& costs = {});
double gemm_cycles(const ConvShape& shape, DType dtype, const GemmTile& tile, const TileCosts& costs = {});

}  // namespace yolo12_fastconv
