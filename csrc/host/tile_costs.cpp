#include "device/tile_costs.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "device/dispatch.h"
#include "device/gemm_tiles.h"

namespace yolo12_fastconv {
namespace {

// Of a multiprocessor, what a block takes: the largest of its shares of shared memory, registers and threads. The next
// kernel of a stream sets up beside this one if both fit (device/dependent_launch.cuh).
double block_share(int shared_bytes, int threads, int registers) {
  constexpr double kSharedBytes = 228 * 1024, kRegisters = 65536, kThreads = 2048;
  return std::max({(shared_bytes + 1024) / kSharedBytes, double(threads) * registers / kRegisters, threads / kThreads});
}

// Transfer cycles of device memory, of which L2 saves what fits into it, as of one image that runs through a model.
double memory_cycles(const ConvShape& s, int element, const TileCosts& c) {
  const int channels = round_up(s.in_channels, 16 / element);
  const double bytes = element * (double(s.in_pixels()) * channels + double(s.out_pixels()) * s.out_channels +
                                  double(s.out_channels) * s.kernel_h * s.kernel_w * channels);
  return std::max(0.0, bytes - c.cached_megabytes * 1e6) / kMultiprocessors / c.hbm_bytes;
}

// Of what goes on at the same time: the longest, and more the closer others come to it.
double overlapped(std::initializer_list<double> cycles, double exponent) {
  double sum = 0;
  for (const double value : cycles) sum += std::pow(value, exponent);
  return std::pow(sum, 1 / exponent);
}

// Shared memory of a multiprocessor.
double shared_kilobytes(int capability) {
  if (capability == 80 || capability == 87) return 164;
  return capability / 10 == 8 || capability >= 120 ? 100 : 228;
}

// Tiles whose warps do not share the reduction, for many pixels. As many blocks as a multiprocessor holds hide each other's
// latencies; nothing else that was measured is near its limit.
double large_tile_cycles(const ConvShape& s, int element, const GemmTile& t, const TileCosts& c, int capability) {
  const int lanes = 16 / element, taps = s.kernel_h * s.kernel_w, threads = 32 * t.warps_pixels * t.warps_channels;
  int64_t pixels = s.out_pixels();
  double stages, steps;  // of a block; steps of 32 bytes of the reduction
  int shared_bytes;
  if (t.window) {
    pixels = int64_t(s.batch) * (s.in_h + 1) * (s.in_w + 1);
    stages = 3.0 * ceil_div(s.in_channels, 4 * lanes);
    steps = double(taps) * ceil_div(s.in_channels, 2 * lanes);
    shared_bytes = window_bytes(t, s.in_w, s.in_channels);
  } else {
    stages = std::ceil(double(taps) * ceil_div(s.in_channels, lanes) / t.chunks);
    steps = stages * (t.chunks / 2);
    const int pipeline = static_cast<int>(std::min<double>(t.stages, stages)) * (t.pixels + t.channels) * t.chunks * 16;
    shared_bytes = t.channels * 8 + std::max(pipeline, element == 2 ? 0 : t.pixels * (t.channels * element + 16));
  }
  // What the kernels' launch bounds leave a thread, or its sums, operands and 60 others.
  const int warp_pixels = t.pixels / t.warps_pixels, warp_channels = t.channels / t.warps_channels;
  const bool bounded = element == 2 && warp_pixels * warp_channels <= 2048;
  const int registers = bounded
                            ? (t.window && threads < 256 ? 160 : 128)
                            : std::min(255, warp_pixels * warp_channels / 32 + (warp_pixels + warp_channels) / 2 + 60);
  const int64_t blocks = ceil_div<int64_t>(pixels, t.pixels) * ceil_div(s.out_channels, t.channels);
  const double share = std::max(block_share(shared_bytes, threads, registers),
                                (shared_bytes + 1024) / shared_kilobytes(capability) / 1024);
  const double turns = std::ceil(double(blocks) / kMultiprocessors);  // blocks that the busiest multiprocessor gets
  const double resident = std::clamp(std::floor(1 / share), 1.0, turns);
  const double full = std::ceil(turns / resident) * resident;
  const double rounds = turns + c.tile_wave * (full - turns);
  const double outputs = double(t.pixels) * t.channels;
  const double products = steps * outputs * 16 / c.tile_products;
  const bool wide = t.wide_warps();
  const double block = t.window ? c.tile_window : wide ? c.tile_wide_block : c.tile_block;
  const double stage = t.window ? c.tile_window_stage : c.tile_stage + (taps > 1 ? c.tile_taps : 0);
  const double chain = (stages * stage + steps * (wide ? c.tile_wide_step : c.tile_step) + block) / resident;
  const auto norm = [&](double a, double b) {
    return std::pow(std::pow(a, c.tile_overlap) + std::pow(b, c.tile_overlap), 1 / c.tile_overlap);
  };
  const double channels = round_up(s.in_channels, lanes);
  const double bytes = element * (double(s.in_pixels()) * channels + double(s.out_pixels()) * s.out_channels +
                                  double(s.out_channels) * taps * channels);
  return c.tile_set_up + norm(rounds * (norm(products, chain) + outputs * element / 2 / c.tile_outputs),
                              bytes / kMultiprocessors / c.tile_hbm_bytes);
}

}  // namespace

double sm90_cycles(const ConvShape& s, const Sm90Plan& p, const TileCosts& c) {
  const int taps = s.kernel_h * s.kernel_w, blocks = sm90_split_blocks(s, p);
  const int channel_tiles = ceil_div(s.out_channels, p.channels);
  const double share = double(blocks) / sm90_blocks(s, p);  // of the input channels
  const double row = share * round_up(s.in_channels * p.element_bytes, 16);
  double pixel_bytes, pixel_stages;  // per tile
  if (p.mode == PixelMode::kWindow) {
    const Sm90Window window = sm90_window(s);
    const double planes = std::min(s.stride_h, s.kernel_h) * std::min(s.stride_w, s.kernel_w);
    pixel_bytes = planes * window.w * window.h * row;
    pixel_stages = planes * blocks;
  } else {
    pixel_bytes = 64.0 * taps * row;
    pixel_stages = double(taps) * blocks;
  }
  const double weight_bytes = double(p.channels) * taps * row,
               weight_stages = double(sm90_weight_groups(s, p)) * blocks;
  const int64_t tiles = sm90_tiles(s, p), columns = sm90_columns(s, p);
  const int64_t column_tiles = ceil_div<int64_t>(tiles, columns);
  const int64_t full_rounds = column_tiles / p.workers;
  const int rest = static_cast<int>(column_tiles % p.workers);  // tiles of the last round, if it is not full
  const double waves = ceil_div(channel_tiles, kMultiprocessors);
  // Of 32 bytes each, and each as long: TF32 takes twice as many as half.
  const double steps =
      p.parts > 1 ? blocks * p.parts * p.row_bytes / 32 : share * taps * ceil_div(s.in_channels * p.element_bytes, 32);
  const double products = steps * std::max(p.channels / 2.0, c.shared_read + p.channels / 4.0);
  const double instructions = p.resident
                                  ? c.pixel_stage * pixel_stages + c.weight_stage * weight_stages
                                  : c.streamed_pixel_stage * pixel_stages + c.streamed_weight_stage * weight_stages;
  const int64_t worker_rounds = ceil_div<int64_t>(column_tiles, p.workers);
  // Not of a ring that has a stage for everything. Of others one stage is being computed on.
  const auto ring = [&](double stages, int size) {
    return stages * worker_rounds <= size ? 0 : c.latency * stages / (size - 1);
  };
  const double control = std::max({instructions * (1 + c.crowd * (p.workers - 1)), ring(pixel_stages, p.pixel_stages),
                                   p.resident ? 0 : ring(weight_stages, p.weight_stages)});
  // Half that is wider than 8 channels gets pixels that boxes can be stored to.
  const bool boxes = p.element_bytes == 2 ? s.out_channels >= 8 : s.out_channels % 4 == 0;
  const double store = c.channel * p.channels * p.element_bytes / 2,
               finish = c.tile + store * (boxes ? 1 : c.unaligned);
  const double alone = std::max(control, products) + finish;  // a worker by itself
  double compute, transfer;
  if (p.resident) {
    const auto round = [&](int tiles) {
      return tiles == 0 ? 0 : std::max({tiles * products, tiles * (finish - c.tile), alone});
    };
    compute = waves * (full_rounds * round(p.workers) + round(rest));
    transfer = waves * column_tiles * pixel_bytes / c.pixel_bytes + weight_bytes / c.l2_bytes;
  } else {
    const double lag = double(sm90_lag_blocks(p, blocks, tiles, columns)) * (p.workers - 1) / blocks;
    const auto round = [&](int tiles) {
      const double together = std::max(control, tiles * products);
      return tiles == 0 ? 0
             : lag > 0  ? std::max(together + c.lagging_finish * finish, alone)
                        : together + finish + c.shared_finish * tiles * store;
    };
    compute = waves * ((full_rounds + lag) * round(p.workers) + round(rest));
    const double rounds = waves * (full_rounds + (rest > 0));
    transfer = (waves * column_tiles * pixel_bytes + rounds * weight_bytes) / c.l2_bytes;
  }
  const double set_up = c.set_up + (p.resident ? weight_bytes / c.first_weight_bytes : 0);
  const double exchange = p.split > 1 ? c.split + sm90_exchange_bytes(p) / c.split_bytes : 0;
  return set_up + exchange + overlapped({compute, transfer, memory_cycles(s, p.element_bytes, c)}, c.overlap);
}

double sm90_once_cycles(const ConvShape& s, const Sm90OncePlan& p, const TileCosts& c) {
  const OnceMode mode = once_mode(s);
  const OncePixels pixels = once_pixels(mode);
  const int parts = once_parts(s, p), taps = once_taps(mode);
  const double bytes =
      double(parts) * p.row_bytes * (double(taps) * p.channels + double(p.workers) * pixels.planes * pixels.pixels);
  const double products = double(p.workers) * parts * taps * (p.row_bytes / 32) *
                          std::max(p.channels / 2.0, c.once_shared_read + p.channels / 4.0);
  const bool single = p.channels == once_store_channels(p.channels);
  const double copies = double(parts) * std::max(pixels.planes, single ? once_groups(mode) : taps);
  return c.once_set_up + p.workers * p.channels * c.once_output +
         overlapped({products, bytes / c.once_bytes,
                     bytes * double(once_blocks(s, p)) / kMultiprocessors / c.once_l2_bytes, copies * c.once_copy},
                    c.once_overlap);
}

double gemm_cycles(const ConvShape& s, DType dtype, const GemmTile& t, const TileCosts& c, int capability) {
  if (t.groups == 1) return large_tile_cycles(s, size_of(dtype), t, c, capability);
  const int element = size_of(dtype), lanes = 16 / element;
  const double chunks = double(s.kernel_h) * s.kernel_w * ceil_div(s.in_channels, lanes);
  const double stages = std::ceil(chunks / t.chunks), steps = stages * (t.chunks / 2);
  const double blocks = double(ceil_div<int64_t>(s.out_pixels(), t.pixels)) * ceil_div(s.out_channels, t.channels);
  const double rounds = std::ceil(blocks / kMultiprocessors);  // blocks that the busiest multiprocessor gets
  const double rows = t.pixels + t.channels, outputs = double(t.pixels) * t.channels;
  const int threads = 32 * t.warps_pixels * t.warps_channels * t.groups;
  // 96 registers a thread: ptxas reports 56 to 126.
  const double share = block_share(std::min<int>(t.stages, stages) * rows * t.chunks * 16, threads, 96);
  const double turns = std::max(1.0, rounds / std::floor(1 / share));
  // One block by itself is a chain; all blocks of a multiprocessor share its ports, with some overlap.
  const double chain = turns * (c.gemm_block + stages * c.gemm_stage + steps / t.groups * c.gemm_step);
  const double transfer = rounds * rows * chunks * 16 / c.l2_bytes;
  const double operands = double(t.warps_pixels) * t.warps_channels *
                          (t.pixels / t.warps_pixels + t.channels / t.warps_channels);  // rows that warps read
  const double shared = rounds * steps * (operands + rows) * 32 / c.gemm_shared_bytes;
  const double products = rounds * steps * outputs * (lanes * 2) / (c.gemm_products * lanes / 8);
  const double partial_sums = t.groups == 1 ? 0 : outputs * t.groups * 8 / c.gemm_shared_bytes;
  return c.gemm_set_up + ((rounds + 1) * share > 1 ? c.gemm_alone : 0) +
         overlapped({chain, transfer, shared, products, memory_cycles(s, element, c)}, c.overlap) +
         rounds * (outputs / c.gemm_outputs + partial_sums);
}

}  // namespace yolo12_fastconv
