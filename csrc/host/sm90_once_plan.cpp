#include "device/sm90_once_plan.h"

#include <algorithm>

#include "device/dispatch.h"

namespace yolo12_fastconv {

std::vector<Sm90OncePlan> sm90_once_plans(const ConvShape& s) {
  std::vector<Sm90OncePlan> plans;
  const bool square = s.stride_h == s.stride_w && s.dilation_h == 1 && s.dilation_w == 1;
  const bool filter = s.kernel_h == 3 && s.kernel_w == 3 && (s.stride_h == 1 || s.stride_h == 2);
  constexpr int64_t kLongest = (int64_t(1) << 31) - 4096;  // positions reach tiles behind the last pixel
  if (s.groups != 1 || s.in_channels == 0 || s.out_channels % 4 != 0 || !(s.pointwise() || (square && filter)) ||
      s.out_pixels() >= kLongest || s.in_pixels() >= kLongest) {
    return plans;
  }
  int usual_bytes = sm90_row_bytes(s, 2);
  if (s.pointwise()) usual_bytes = std::max(usual_bytes, 64);
  const auto add = [&](int row_bytes, bool only_rings) {
    // Copied tap by tap, weights behind the last channel are those of the next tap, or anything.
    const bool whole = s.pointwise() || s.in_channels * 2 % row_bytes == 0;
    for (const int channels : kOnceChannels) {
      if (channels > s.out_channels || (!whole && channels > once_store_channels(channels)) ||
          s.out_channels * 2 % once_store_bytes(channels) != 0) {
        continue;
      }
      Sm90OncePlan plan{channels, 0, row_bytes};
      for (plan.workers = 1; plan.workers <= once_max_workers(channels); ++plan.workers) {
        if (plan.workers > 1 && plan.workers > once_tiles(s)) continue;
        const int stages = once_stages(s, plan);
        if (stages == 0 || (only_rings && stages == once_parts(s, plan))) continue;
        if (once_blocks(s, plan) <= kMultiprocessors) plans.push_back(plan);
      }
    }
  };
  add(usual_bytes, false);
  // Of 3x3, halves of a part: more of them fit a ring.
  if (!s.pointwise() && usual_bytes == 128 && s.in_channels % 32 == 0) add(64, true);
  return plans;
}

std::string sm90_once_name(const ConvShape& s, const Sm90OncePlan& p) {
  const char* mode[] = {"rows", "window", "strided"};
  return "implicit_gemm/sm90/" + std::to_string(64 * p.workers) + "x" + std::to_string(p.channels) + "x" +
         std::to_string(p.row_bytes / 2) + "-" + mode[static_cast<int>(once_mode(s))] + "-once";
}

}  // namespace yolo12_fastconv
