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
double overlapped(std::initializer_list<double> cycles, const TileCosts& c) {
  double sum = 0;
  for (const double value : cycles) sum += std::pow(value, c.overlap);
  return std::pow(sum, 1 / c.overlap);
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
  return set_up + exchange + overlapped({compute, transfer, memory_cycles(s, p.element_bytes, c)}, c);
}

double gemm_cycles(const ConvShape& s, DType dtype, const GemmTile& t, const TileCosts& c) {
  const int element = size_of(dtype), lanes = 16 / element;
  const int taps = s.kernel_h * s.kernel_w;
  const double rows = t.pixels + t.channels, outputs = double(t.pixels) * t.channels;
  double stages, steps, copied;  // per block; steps of 32 bytes of the reduction, bytes
  int64_t pixels = s.out_pixels();
  int shared_bytes;
  if (t.window) {
    const int windows = ceil_div(s.in_channels, 4 * lanes);
    pixels = int64_t(s.batch) * (s.in_h + 1) * (s.in_w + 1);
    stages = 3.0 * windows;
    steps = double(taps) * ceil_div(s.in_channels, 2 * lanes);
    copied = (t.pixels + 2 * s.in_w + 4 + double(taps) * t.channels) * s.in_channels * element;
    shared_bytes = window_bytes(t, s.in_w, s.in_channels);
  } else {
    const double chunks = double(taps) * ceil_div(s.in_channels, lanes);
    stages = std::ceil(chunks / t.chunks);
    steps = stages * (t.chunks / 2);
    copied = rows * chunks * 16;
    shared_bytes = static_cast<int>(std::min<double>(t.stages, stages) * rows * t.chunks * 16);
  }
  const double blocks = double(ceil_div<int64_t>(pixels, t.pixels)) * ceil_div(s.out_channels, t.channels);
  const double rounds = std::ceil(blocks / kMultiprocessors);  // blocks that the busiest multiprocessor gets
  const int threads = 32 * t.warps_pixels * t.warps_channels * t.groups;
  // A thread's registers: its sums and operands, and 60 others.
  const int warp_pixels = t.pixels / t.warps_pixels, warp_channels = t.channels / t.warps_channels;
  const int registers = std::min(255, warp_pixels * warp_channels / 32 + (warp_pixels + warp_channels) / 2 + 60);
  const double share = block_share(shared_bytes, threads, registers);
  const double turns = std::max(1.0, rounds / std::floor(1 / share));
  // One block by itself is a chain; all blocks of a multiprocessor share its ports, with some overlap.
  const double chain = turns * (c.gemm_block + stages * c.gemm_stage + steps / t.groups * c.gemm_step);
  const double transfer = rounds * copied / c.l2_bytes;
  const double operands = double(t.warps_pixels) * t.warps_channels * (warp_pixels + warp_channels);
  const double shared = rounds * (steps * operands * 32 + copied) / c.gemm_shared_bytes;
  const double products = rounds * steps * outputs * (lanes * 2) / (c.gemm_products * lanes / 8);
  const double partial_sums = t.groups == 1 ? 0 : outputs * t.groups * 8 / c.gemm_shared_bytes;
  return c.gemm_set_up + ((rounds + 1) * share > 1 ? c.gemm_alone : 0) +
         overlapped({chain, transfer, shared, products, memory_cycles(s, element, c)}, c) +
         rounds * (outputs / c.gemm_outputs + partial_sums);
}

}  // namespace yolo12_fastconv
