#include "device/sm90_plan.h"

#include <algorithm>
#include <sstream>

#include "device/dispatch.h"

namespace yolo12_fastconv {
namespace {

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

// Fills in the stages, as many as are of use; false if shared memory does not hold the least.
bool choose_stages(const ConvShape& s, Sm90Plan& p) {
  const int taps = s.kernel_h * s.kernel_w, groups = sm90_weight_groups(s, p);
  const auto fits = [&](int pixel_stages, int weight_stages) {
    Sm90Plan q = p;
    q.pixel_stages = pixel_stages;
    q.weight_stages = weight_stages;
    return sm90_layout(s, q).bytes <= kSm90SharedBytes;
  };
  const bool window = p.mode == PixelMode::kWindow;
  const int planes = window ? std::min(s.stride_h, s.kernel_h) * std::min(s.stride_w, s.kernel_w) : 1;
  // What passes through a ring in its life, and what the block streams: stages beyond them would never be filled.
  const int64_t column_tiles = ceil_div(sm90_tiles(s, p), sm90_columns(s, p));
  const int64_t tile_blocks = ceil_div<int64_t>(column_tiles, p.workers) * sm90_split_blocks(s, p);
  const int64_t ring_blocks = p.one_ring ? column_tiles * sm90_split_blocks(s, p) : tile_blocks;
  const int most_pixels = static_cast<int>(std::min<int64_t>(12, ring_blocks * (window ? planes : taps)));
  const int most_weights = static_cast<int>(std::min<int64_t>(8, tile_blocks * groups));
  // Two where a stage lasts for several products, and enough of them to cover a latency.
  const int least =
      p.one_ring ? sm90_blocks(s, p) : std::min(most_pixels, (window && taps / planes >= 4) || p.parts > 1 ? 2 : 3);
  if (p.resident) {
    const int steps = sm90_split_blocks(s, p) * groups;
    if (steps > kSm90MaxWeightStages) return false;
    p.weight_stages = steps;
    for (p.pixel_stages = most_pixels; p.pixel_stages >= least; --p.pixel_stages) {
      if (fits(p.pixel_stages, steps)) return true;
    }
    return false;
  }
  if (!window) {  // as far ahead in both
    p.pixel_stages = least;
    p.weight_stages = std::min(most_weights, least * groups / taps);
    if (!fits(p.pixel_stages, p.weight_stages)) return false;
    for (bool more = true; more;) {
      more = false;
      if (p.weight_stages < most_weights && fits(p.pixel_stages, p.weight_stages + 1)) ++p.weight_stages, more = true;
      if (p.pixel_stages < std::min(8, most_pixels) && p.pixel_stages * groups < p.weight_stages * taps &&
          fits(p.pixel_stages + 1, p.weight_stages)) {
        ++p.pixel_stages, more = true;
      }
    }
    return true;
  }
  for (p.pixel_stages = std::min(most_pixels, least + (planes > 1 ? 2 : 0)); p.pixel_stages >= least;
       --p.pixel_stages) {
    for (p.weight_stages = most_weights; p.weight_stages >= std::min(4, most_weights); --p.weight_stages) {
      if (p.weight_stages * sm90_weight_stage_bytes(s, p) < 3 * 16384 && p.weight_stages < most_weights) break;
      if (fits(p.pixel_stages, p.weight_stages)) return true;
    }
  }
  return false;
}

}  // namespace

int sm90_row_bytes(const ConvShape& s, int element_bytes) {
  const int bytes = s.in_channels * element_bytes;
  if (bytes <= 32) return 32;
  if (bytes <= 64) return 64;
  // A last block that is at most half full is not worth its shared memory unless there are many blocks.
  const int rest = bytes % 128;
  return rest > 0 && rest <= 64 && bytes < 512 ? 64 : 128;
}

std::vector<Sm90Plan> sm90_plans(const ConvShape& s, int element_bytes) {
  std::vector<Sm90Plan> plans;
  constexpr int64_t kLongest = (int64_t(1) << 31) - 4096;  // positions reach a tile behind the last pixel
  if (s.groups != 1 || s.in_channels == 0 || s.kernel_h * s.kernel_w > kSm90MaxTaps || s.stride_h > 8 ||
      s.stride_w > 8 || !fits_taps(s) || s.out_pixels() >= kLongest || s.in_pixels() >= kLongest) {
    return plans;
  }
  const auto add = [&](Sm90Plan plan) {
    for (const bool one_ring : {false, true}) {
      plan.one_ring = one_ring;
      if ((one_ring && !sm90_joins_rings(s, plan)) || !choose_stages(s, plan)) continue;
      const bool rest = sm90_deals_rest(s, plan, sm90_tiles(s, plan), sm90_columns(s, plan));
      for (const bool paired : {false, true}) {
        plan.paired = paired;
        if (paired && !sm90_pairs_blocks(s, plan)) continue;
        plan.rest = false;
        plans.push_back(plan);
        plan.rest = true;
        if (rest) plans.push_back(plan);
      }
      plan.paired = plan.rest = false;
    }
    plan.one_ring = false;
    // A reduction is split where that fills multiprocessors which would be idle.
    const bool splits = sm90_can_split(plan.channels, plan.element_bytes);
    for (plan.split = 2; splits && plan.split <= kSm90MaxSplit; ++plan.split) {
      const int blocks = sm90_blocks(s, plan);
      const int64_t grid = plan.split * sm90_columns(s, plan) * ceil_div(s.out_channels, plan.channels);
      const bool all_have_some = (plan.split - 1) * sm90_split_blocks(s, plan) < blocks;
      if (all_have_some && grid <= kMultiprocessors && choose_stages(s, plan)) plans.push_back(plan);
    }
  };
  Sm90Plan plan;
  plan.element_bytes = element_bytes;
  plan.row_bytes = sm90_row_bytes(s, element_bytes);
  const int blocks = sm90_blocks(s, plan);
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
            if (blocks % plan.parts == 0) add(plan);
          }
        } else {
          plan.mode = PixelMode::kTaps;
          add(plan);
          plan.mode = PixelMode::kWindow;
          if (fits_window(s)) add(plan);
        }
      }
    }
  }
  return plans;
}

std::string sm90_name(const Sm90Plan& p) {
  std::ostringstream name;
  const char* mode[] = {"rows", "window", "taps"};
  name << "implicit_gemm/sm90/" << 64 * p.workers << "x" << p.channels << "x" << p.row_bytes / p.element_bytes * p.parts
       << "-" << mode[static_cast<int>(p.mode)] << "-" << (p.resident ? "resident" : "streamed") << "-"
       << (p.one_ring ? "ring-" : "") << (p.paired ? "paired-" : "") << (p.rest ? "rest-" : "")
       << (p.split > 1 ? "split" + std::to_string(p.split) + "-" : "") << p.pixel_stages << "+" << p.weight_stages;
  return name.str();
}

}  // namespace yolo12_fastconv
