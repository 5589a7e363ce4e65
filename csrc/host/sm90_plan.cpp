#include "device/sm90_plan.h"

#include <algorithm>
#include <sstream>

#include "device/dispatch.h"

namespace yolo12_fastconv {
namespace {

constexpr double kHbmBytesPerCycle = 18.6;

// Fitted to 5900 timings on an H200: 230 layers of YOLO12, each with up to 36 plans. The plans that this picks
// take 1.6 % longer in sum than the fastest ones.
constexpr double kPixelBytesPerCycle = 37;         // from L2, resident weights
constexpr double kFirstWeightBytesPerCycle = 14;   // resident weights, before any product
constexpr double kStageCycles = 340;               // resident: a worker's instructions per pixel stage
constexpr double kTapCycles = 210;                 //   and per weight stage
constexpr double kStreamedTapCycles = 370;         // streamed: per weight stage
constexpr double kTileCycles = 850;                // epilogue of a tile
constexpr double kChannelCycles = 9.4;             //   and per channel
constexpr double kUnalignedFactor = 3;             // of which there are more where y can't be stored in boxes
constexpr double kSharedReadCycles = 21;  // A of a wgmma through shared memory; B adds a quarter per channel
constexpr double kOverlapLoss = 0.3;  // of what runs beside the longest of products, transfers and memory

// Limits of the tensor maps: corners of the im2col box in [-128, 127], offsets below 256, strides up to 8, boxes up to
// 256 elements a side.
bool fits_taps(const ConvShape& s) {
  const int right = (s.kernel_w - 1) * s.dilation_w, down = (s.kernel_h - 1) * s.dilation_h;
  return s.pad_w <= 128 && s.pad_h <= 128 && right < 256 && down < 256 && s.pad_w - right >= -128 &&
         s.pad_w - right <= 127 && s.pad_h - down >= -128 && s.pad_h - down <= 127;
}

bool fits_window(const ConvShape& s) {
  const Sm90Window window = sm90_window(s);
  // The box is counted in elements before striding.
  return window.w * s.stride_w <= 256 && window.h * s.stride_h <= 256 && window.w * window.h <= 400;
}

int padded_bytes(int channels) { return round_up(channels, 8) * 2; }

int row_bytes_of(const ConvShape& s) {
  const int c = s.in_channels;
  if (c <= 16) return 32;
  if (c <= 32) return 64;
  // A last block that is at most half full is not worth its shared memory unless there are many blocks.
  const int rest = c % 64;
  return rest > 0 && rest <= 32 && c < 256 ? 64 : 128;
}

int blocks_of(const ConvShape& s, const Sm90Plan& p) { return ceil_div(s.in_channels * 2, p.row_bytes * p.parts); }

// Fills in the stages; false if shared memory does not hold them.
bool choose_stages(const ConvShape& s, Sm90Plan& p) {
  const int taps = s.kernel_h * s.kernel_w * p.parts;  // weight stages that a pixel stage is multiplied with
  const auto fits = [&](int pixel_stages, int weight_stages) {
    Sm90Plan q = p;
    q.pixel_stages = pixel_stages;
    q.weight_stages = weight_stages;
    return sm90_layout(s, q).bytes <= kSm90SharedBytes;
  };
  const bool window = p.mode == PixelMode::kWindow;
  const int planes = window ? std::min(s.stride_h, s.kernel_h) * std::min(s.stride_w, s.kernel_w) : 1;
  // Two where a stage lasts for several products, and enough of them to cover a latency.
  const int least = window && taps / planes >= 4 ? 2 : p.parts > 1 ? 2 : 3;
  if (p.resident) {
    const int steps = blocks_of(s, p) * taps;
    if (steps > kSm90MaxWeightStages) return false;
    p.weight_stages = steps;
    for (p.pixel_stages = 12; p.pixel_stages >= least; --p.pixel_stages) {
      if (fits(p.pixel_stages, steps)) return true;
    }
    return false;
  }
  if (!window) {  // as far ahead in both
    if (!fits(least, least * p.parts)) return false;
    p.pixel_stages = least;
    p.weight_stages = least * p.parts;
    for (bool more = true; more;) {
      more = false;
      if (p.weight_stages < 8 && fits(p.pixel_stages, p.weight_stages + 1)) ++p.weight_stages, more = true;
      if (p.pixel_stages < 8 && p.pixel_stages * p.parts < p.weight_stages &&
          fits(p.pixel_stages + 1, p.weight_stages)) {
        ++p.pixel_stages, more = true;
      }
    }
    return true;
  }
  for (p.pixel_stages = least + (planes > 1 ? 2 : 0); p.pixel_stages >= least; --p.pixel_stages) {
    for (p.weight_stages = 8; p.weight_stages >= 4; --p.weight_stages) {
      if (p.weight_stages * sm90_weight_stage_bytes(p) < 3 * 16384 && p.weight_stages < 8) break;
      if (fits(p.pixel_stages, p.weight_stages)) return true;
    }
  }
  return false;
}

// Cycles of a multiprocessor.
double estimate(const ConvShape& s, const Sm90Plan& p) {
  const int taps = s.kernel_h * s.kernel_w, blocks = blocks_of(s, p);
  const int channel_tiles = ceil_div(s.out_channels, p.channels);
  const double row = padded_bytes(s.in_channels);
  int64_t tiles;
  double pixel_bytes, pixel_stages;  // per tile
  if (p.mode == PixelMode::kWindow) {
    const Sm90Window window = sm90_window(s);
    const double planes = std::min(s.stride_h, s.kernel_h) * std::min(s.stride_w, s.kernel_w);
    tiles = int64_t(s.batch) * ceil_div(s.out_h, 8) * ceil_div(s.out_w, 8);
    pixel_bytes = planes * window.w * window.h * row;
    pixel_stages = planes * blocks;
  } else {
    tiles = ceil_div<int64_t>(s.out_pixels(), 64);
    pixel_bytes = 64.0 * taps * row;
    pixel_stages = double(taps) * blocks;
  }
  const double weight_bytes = double(p.channels) * taps * row, weight_stages = double(taps) * p.parts * blocks;
  const int64_t columns = std::min<int64_t>(std::max(1, kMultiprocessors / channel_tiles), tiles);
  const int64_t column_tiles = ceil_div<int64_t>(tiles, columns);
  const int64_t full_rounds = column_tiles / p.workers;
  const int rest = static_cast<int>(column_tiles % p.workers);  // tiles of the last round, if it is not full
  const double waves = ceil_div(channel_tiles, kMultiprocessors);
  const double steps = p.parts > 1 ? blocks * p.parts * p.row_bytes / 32 : taps * ceil_div(s.in_channels, 16);
  const double products = steps * std::max(p.channels / 2.0, kSharedReadCycles + p.channels / 4.0);
  const double control =
      p.resident ? kStageCycles * pixel_stages + kTapCycles * weight_stages : kStreamedTapCycles * weight_stages;
  const double store = kChannelCycles * p.channels,
               finish = kTileCycles + store * (s.out_channels >= 8 ? 1 : kUnalignedFactor);
  const double alone = std::max(control, products) + finish;  // a worker by itself
  double compute, transfer;
  if (p.resident) {
    const auto round = [&](int tiles) {
      return tiles == 0 ? 0 : std::max({tiles * products, tiles * (finish - kTileCycles), alone});
    };
    compute = waves * (full_rounds * round(p.workers) + round(rest));
    transfer = waves * column_tiles * pixel_bytes / kPixelBytesPerCycle + weight_bytes / kL2BytesPerCycle;
  } else {
    const double lag = double(sm90_lag_blocks(p, blocks, tiles, columns)) * (p.workers - 1) / blocks;
    const auto round = [&](int tiles) {
      const double together = std::max(control, tiles * products);
      return tiles == 0 ? 0
             : lag > 0  ? std::max(together + 0.35 * finish, alone)
                        : together + finish + 0.5 * tiles * store;
    };
    compute = waves * ((full_rounds + lag) * round(p.workers) + round(rest));
    const double rounds = waves * (full_rounds + (rest > 0));
    transfer = (waves * column_tiles * pixel_bytes + (rounds + 1) * weight_bytes) / kL2BytesPerCycle;
  }
  const double memory = (double(s.in_pixels()) * row + double(s.out_pixels()) * s.out_channels * 2 +
                         double(s.out_channels) * taps * row) /
                        kMultiprocessors / kHbmBytesPerCycle;
  const double longest = std::max({compute, transfer, memory});
  return longest + kOverlapLoss * (compute + transfer + memory - longest) +
         (p.resident ? weight_bytes / kFirstWeightBytesPerCycle : 0);
}

}  // namespace

Sm90Plan plan_sm90(const ConvShape& s) {
  Sm90Plan best;
  constexpr int64_t kLongest = (int64_t(1) << 31) - 4096;  // positions reach a tile behind the last pixel
  if (s.groups != 1 || s.in_channels == 0 || s.kernel_h * s.kernel_w > kSm90MaxTaps || s.stride_h > 8 ||
      s.stride_w > 8 || !fits_taps(s) || s.out_pixels() >= kLongest || s.in_pixels() >= kLongest) {
    return best;
  }
  const auto consider = [&](Sm90Plan plan) {
    if (!choose_stages(s, plan)) return;
    plan.cycles = estimate(s, plan);
    if (best.channels == 0 || plan.cycles < best.cycles) best = plan;
  };
  Sm90Plan plan;
  plan.row_bytes = row_bytes_of(s);
  const int blocks = ceil_div(s.in_channels * 2, plan.row_bytes);
  for (const int channels : kSm90Channels) {
    if (channels > 16 && channels / 2 >= round_up(s.out_channels, 16)) continue;
    plan.channels = channels;
    for (plan.workers = 1; plan.workers <= sm90_max_workers(channels); ++plan.workers) {
      for (const bool resident : {true, false}) {
        plan.resident = resident;
        plan.parts = 1;
        if (s.pointwise()) {
          plan.mode = PixelMode::kRows;
          for (; plan.parts <= 4; ++plan.parts) {
            if (blocks % plan.parts == 0) consider(plan);
          }
        } else {
          plan.mode = PixelMode::kTaps;
          consider(plan);
          plan.mode = PixelMode::kWindow;
          if (fits_window(s)) consider(plan);
        }
      }
    }
  }
  return best;
}

std::string sm90_name(const Sm90Plan& p) {
  std::ostringstream name;
  const char* mode[] = {"rows", "window", "taps"};
  name << "implicit_gemm/sm90/" << 64 * p.workers << "x" << p.channels << "x" << p.row_bytes / 2 * p.parts << "-"
       << mode[static_cast<int>(p.mode)] << "-" << (p.resident ? "resident" : "streamed") << "-" << p.pixel_stages
       << "+" << p.weight_stages;
  return name.str();
}

}  // namespace yolo12_fastconv
