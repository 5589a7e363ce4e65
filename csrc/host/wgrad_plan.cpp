#include "device/wgrad_plan.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>

#include "device/sm90_plan.h"

namespace yolo12_fastconv {
namespace {

// As the copies count: int coordinates of pixels, and tiles of the workspace in an int.
bool served(const ConvShape& s) {
  const bool window = s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == s.stride_w && s.stride_h <= 2;
  return s.groups == 1 && s.dilation_h == 1 && s.dilation_w == 1 && (s.pointwise() || window) && s.out_pixels() > 0 &&
         s.out_pixels() < std::numeric_limits<int>::max() / 2 && s.in_pixels() < std::numeric_limits<int>::max() / 2 &&
         s.out_channels >= 8 &&
         // Fewer channels are copied to pixels of 16 bytes first, which pays in a network's first convolution.
         (s.in_channels >= 8 || (window && s.in_channels <= 4)) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15) &&
         wgrad_slice_floats(s) < (1 << 29);
}

int row_bytes(int channels) { return channels > 32 ? 128 : channels > 16 ? 64 : 32; }

// A product over 16 pixels: N / 2 cycles, or what its operands take in shared memory.
double product_cycles(int width) { return std::max(width / 2.0, 23.3 + width / 4.0); }

}  // namespace

double wgrad_sm90_cycles(const ConvShape& s, const WgradPlan& p) {
  // Fitted to 615 timings of 19 layers at batch 32; what they pick takes 1 % longer than the fastest plan that was timed.
  constexpr double kL2Bytes = 38.5, kMemoryBytes = 17.3;  // per cycle and multiprocessor
  constexpr double kStage = 594;  // a warpgroup's way from one stage to the next
  constexpr double kBlock = 5560;  // set-up, first stage, sums to the workspace
  constexpr double kFinish = 5310, kFinishBytes = 16.5;  // the second kernel
  const bool split = p.window && !p.turned && s.stride_w == 2;
  const double step = split ? product_cycles(p.width / 3 * 2) + product_cycles(p.width / 3) : product_cycles(p.width);
  const double products = p.warpgroups * (p.pixels / 16) * step;
  const double stage = std::max({products, wgrad_stage_bytes(s, p) / kL2Bytes, kStage});
  const int64_t tiles = int64_t(wgrad_filter_tiles(s, p)) * wgrad_channel_tiles(s, p);
  const double rounds = double(ceil_div<int64_t>(tiles * p.slices, kMultiprocessors));
  const double stages = double(ceil_div<int64_t>(wgrad_pixel_stages(s, p), p.slices));
  const double bytes = 2.0 * (double(s.in_pixels()) * s.in_channels + double(s.out_pixels()) * s.out_channels);
  const double sums = 4.0 * wgrad_slice_floats(s) * p.slices;
  return std::max(rounds * (stages * stage + kBlock), kBlock + bytes / kMultiprocessors / kMemoryBytes) + kFinish +
         2 * sums / kMultiprocessors / kFinishBytes;
}

namespace {

// Calls function(plan) with every tile that the kernel has for the convolution, with as many stages as fit.
template <class Function>
void for_each_tile(const ConvShape& s, Function&& function) {
  if (!served(s)) return;
  WgradPlan p;
  p.grad_row_bytes = row_bytes(s.out_channels);
  const auto call = [&] {
    p.stages = std::min(kWgradMaxStages, (kWgradSharedBytes - kWgradMostTailBytes) / wgrad_stage_bytes(s, p));
    if (p.stages >= 2) function(p);
  };
  if (s.pointwise()) {
    for (const int width : kWgradRowWidths) {
      if (width / 2 >= s.in_channels && width > 16) continue;
      p.width = p.channels = width;
      p.x_row_bytes = row_bytes(width);
      for (p.warpgroups = 1; p.warpgroups <= wgrad_max_warpgroups(width); ++p.warpgroups) {
        if (64 * (p.warpgroups - 1) >= s.out_channels) continue;
        for (p.pixels = 64; p.pixels <= 256; p.pixels *= 2) call();
      }
    }
    return;
  }
  const auto call_with_rows = [&] {
    for (const int rows : {8, 10}) {
      p.pixels = 8 * rows;
      call();
    }
  };
  p.window = true;
  p.warpgroups = s.kernel_h;
  for (const int width : kWgradWindowWidths) {
    p.width = width;
    p.channels = width / 3;
    p.x_row_bytes = row_bytes(p.channels);
    call_with_rows();
  }
  if (s.stride_w == 1 && s.in_channels % 16 == 0) {  // the copies take x for pixels of whole blocks of 16 channels
    p.width = kWgradColumnWidth;
    p.channels = p.width / 3;
    p.x_row_bytes = 32;
    call_with_rows();
  }
  // Where blocks of 64 leave channels idle; elsewhere the estimate would choose it with stride 2, and it is 6 % slower
  // (768->768 80x80: 851, 900). With 64 pixels a stage it is up to 15 % slower than with 80.
  if (s.out_channels % 64 == 0 && (s.stride_w == 1 || s.in_channels % 64 == 0)) return;
  p.turned = true;
  p.warpgroups = kWgradTurnedWarpgroups;
  p.width = kWgradTurnedWidth;
  p.channels = kWgradTurnedChannels;
  p.x_row_bytes = p.grad_row_bytes = 64;
  p.pixels = 80;
  call();
}

// Layers of the models at batch 32 for which one of some 20 timed plans was at least 4.5 % faster than the one with the
// lowest estimate, most of them with stages of 128 pixels and a block for each multiprocessor. Times of both, us, H200;
// `size` is the input's.
struct TimedPlan {
  int in_channels, out_channels, size, kernel, stride;
  const char* name;
};
constexpr TimedPlan kTimedPlans[] = {
    {16, 32, 320, 3, 2, "wgrad/sm90/window/64x16x80x12/132"},  // 58.9, 49.5
    {32, 16, 80, 3, 1, "wgrad/sm90/window/64x32x64x16/132"},  // 15.6, 14.6
    {32, 32, 40, 3, 1, "wgrad/sm90/window/64x16x80x16/64"},  // 8.2, 7.7
    {64, 64, 20, 3, 1, "wgrad/sm90/window/64x16x80x16/33"},  // 8.6, 8.1
    {64, 128, 320, 3, 2, "wgrad/sm90/window/64x64x64x4/66"},  // 211.4, 200.5
    {128, 64, 80, 1, 1, "wgrad/sm90/rows/64x64x128x7/33"},  // 27.0, 23.7
    {128, 128, 80, 1, 1, "wgrad/sm90/rows/64x64x128x7/33"},  // 35.4, 31.0
    {128, 128, 80, 3, 2, "wgrad/sm90/window/64x32x80x6/16"},  // 37.4, 33.2
    {128, 128, 160, 1, 1, "wgrad/sm90/rows/128x128x128x3/132"},  // 124.0, 103.2
    {128, 384, 20, 1, 1, "wgrad/sm90/rows/64x64x128x7/11"},  // 10.0, 8.3
    {192, 96, 80, 1, 1, "wgrad/sm90/rows/128x64x128x4/44"},  // 41.2, 36.5
    {192, 192, 80, 1, 1, "wgrad/sm90/rows/64x192x64x7/44"},  // 48.6, 45.8
    {192, 192, 160, 1, 1, "wgrad/sm90/rows/192x192x64x4/132"},  // 174.5, 156.7
    {192, 256, 160, 1, 1, "wgrad/sm90/rows/128x192x64x5/66"},  // 211.2, 182.5
    {256, 128, 40, 1, 1, "wgrad/sm90/rows/64x64x128x7/16"},  // 18.0, 15.8
    {256, 256, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/16"},  // 11.1, 9.2
    {256, 256, 40, 1, 1, "wgrad/sm90/rows/64x128x128x4/16"},  // 23.7, 21.3
    {256, 512, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/8"},  // 14.4, 12.8
    {256, 512, 40, 1, 1, "wgrad/sm90/rows/64x128x128x4/8"},  // 34.8, 33.2
    {256, 768, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/5"},  // 18.3, 16.5
    {384, 192, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/14"},  // 12.0, 9.7
    {384, 192, 40, 1, 1, "wgrad/sm90/rows/64x128x128x4/14"},  // 26.8, 23.6
    {384, 256, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/11"},  // 13.0, 10.7
    {384, 384, 20, 1, 1, "wgrad/sm90/rows/64x128x128x4/7"},  // 15.3, 13.8
    {384, 384, 40, 1, 1, "wgrad/sm90/rows/128x192x64x5/22"},  // 35.5, 33.7
    {384, 1152, 20, 1, 1, "wgrad/sm90/rows/128x192x64x5/7"},  // 29.4, 27.1
    {512, 256, 20, 1, 1, "wgrad/sm90/rows/128x64x128x4/8"},  // 14.5, 12.9
    {512, 256, 40, 1, 1, "wgrad/sm90/rows/128x128x128x3/16"},  // 34.6, 33.0
    {768, 384, 20, 1, 1, "wgrad/sm90/rows/128x128x128x3/7"},  // 22.2, 20.9
};

const char* timed_plan(const ConvShape& s) {
  const auto found = std::find_if(std::begin(kTimedPlans), std::end(kTimedPlans), [&](const TimedPlan& t) {
    return s.batch == 32 && s.in_h == t.size && s.in_w == t.size && s.in_channels == t.in_channels &&
           s.out_channels == t.out_channels && s.kernel_h == t.kernel && s.stride_h == t.stride &&
           s.pad_h == t.kernel / 2 && s.pad_w == t.kernel / 2;
  });
  return found == std::end(kTimedPlans) ? nullptr : found->name;
}

}  // namespace

std::optional<WgradPlan> plan_wgrad_sm90(const ConvShape& s) {
  std::optional<WgradPlan> best;
  if (const char* name = timed_plan(s)) best = plan_wgrad_sm90(s, name);
  if (best.has_value()) return best;
  double least = std::numeric_limits<double>::infinity();
  for_each_tile(s, [&](WgradPlan p) {
    const int64_t tiles = int64_t(wgrad_filter_tiles(s, p)) * wgrad_channel_tiles(s, p);
    const int most =
        static_cast<int>(std::min<int64_t>(wgrad_pixel_stages(s, p), std::max<int64_t>(4, kMultiprocessors / tiles)));
    for (p.slices = 1; p.slices <= most; ++p.slices) {
      const double cycles = wgrad_sm90_cycles(s, p);
      if (cycles < least) {
        least = cycles;
        best = p;
      }
    }
  });
  return best;
}

std::optional<WgradPlan> plan_wgrad_sm90(const ConvShape& s, const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return std::nullopt;
  const int slices = std::atoi(name.c_str() + slash + 1);
  std::optional<WgradPlan> found;
  for_each_tile(s, [&](WgradPlan p) {
    p.slices = slices;
    if (slices >= 1 && slices <= wgrad_pixel_stages(s, p) && wgrad_sm90_name(p) == name) found = p;
  });
  return found;
}

std::string wgrad_sm90_name(const WgradPlan& p) {
  return std::string("wgrad/sm90/") + (p.window ? "window" : "rows") + "/" + std::to_string(wgrad_tile_filters(p)) +
         "x" + std::to_string(p.channels) + "x" + std::to_string(p.pixels) + "x" + std::to_string(p.stages) + "/" +
         std::to_string(p.slices);
}

}  // namespace yolo12_fastconv
