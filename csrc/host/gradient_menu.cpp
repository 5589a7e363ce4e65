#include "gradient_menu.h"

#include <array>
#include <cstring>
#include <map>
#include <mutex>

#include "device/gradient_kernels.h"
#include "device/kernels.h"
#include "targets.h"

namespace yolo12_fastconv {
namespace {

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// What YOLO12_FASTCONV_GRADIENTS asks for.
enum class Wish { kFastest, kOwn, kFused, kAten };

Wish wish() {
  const std::string value = environment("YOLO12_FASTCONV_GRADIENTS");
  if (value.empty()) return Wish::kFastest;
  if (value == "own") return Wish::kOwn;
  if (value == "fused") return Wish::kFused;
  if (value == "aten") return Wish::kAten;
  fail("YOLO12_FASTCONV_GRADIENTS=", value, ": use own, fused or aten, or unset it");
}

// Layers at batch 32 that the rule below gives to the slower of both. cuDNN, ours, us.
struct TimedDgrad {
  int in_channels, out_channels, size, kernel;
  bool ours;
};
constexpr TimedDgrad kTimedDgrads[] = {
    {64, 32, 160, 1, false},  // 45.2, 47.1
    {128, 64, 80, 1, true},  // 24.5, 22.4
    {192, 256, 80, 1, true},  // 53.2, 48.6
    {256, 64, 80, 3, false},  // 88.0, 90.4
    {384, 256, 80, 1, true},  // 89.2, 75.7
    {384, 384, 160, 1, true},  // 542, 444
    {512, 64, 80, 1, true},  // 71.5, 66.1
    {768, 128, 40, 1, true},  // 32.3, 28.9
    {768, 256, 40, 1, true},  // 41.6, 37.3
    {1024, 128, 80, 1, true},  // 150, 142
    {1024, 256, 40, 1, true},  // 50.4, 47.2
};

// Where the forward kernels are faster than cuDNN's dgrad. Numbers: sums over the layers of n, m and x at batch 32, us;
// cuDNN, ours, by this rule (docs/kernel-notes.md).
bool is_dgrad_faster(const ConvShape& s) {
  const bool square = s.in_h == s.in_w && s.kernel_h == s.kernel_w && s.out_h == s.in_h && s.out_w == s.in_w;
  if (s.batch == 32 && s.groups == 1 && square && s.dilation_h == 1 && s.dilation_w == 1) {
    for (const TimedDgrad& t : kTimedDgrads) {
      if (t.in_channels == s.in_channels && t.out_channels == s.out_channels && t.size == s.in_h &&
          t.kernel == s.kernel_h) {
        return t.ours;
      }
    }
  }
  const int64_t plane = int64_t(s.in_h) * s.in_w;
  if (s.groups > 1) {
    // 7x7: 366, 1193, 3557; 77, 174, 526. 3x3: 154, 226, 634; 103, 267, 388; 103, 219, 373.
    return s.kernel_h > 3 || s.in_channels % 256 != 0 || plane < 1600;
  }
  // 3x3: 737, 1405, 4378; 344, 982, 3190.
  if (s.kernel_h > 1) return true;
  // 1x1: 794, 2450, 8090; 811, 2853, 7562; 750, 2447, 7066.
  const bool odd = s.in_channels % 8 != 0 || s.out_channels % 8 != 0;
  const bool small = s.in_channels == s.out_channels && s.in_channels <= 128 && plane < 160 * 160;
  return odd || small || s.out_channels <= 32;
}

// The same of the dense weight gradient in half. All: 3278, 7018, 22433; 1756, 5275, 14316; 1721, 5221, 14223.
bool is_wgrad_faster(const ConvShape& s) {
  if (s.in_channels <= 4) return s.out_channels >= 32;
  const int64_t plane = int64_t(s.in_h) * s.in_w;
  // 768->768 3x3/2 40x40: 227, 283, for 144 tiles on 132 multiprocessors; at 80x80 817, 808.
  if (s.stride_h == 2 && s.in_channels >= 768 && s.out_channels >= 768 && plane <= 40 * 40) return false;
  const bool large = plane >= 160 * 160;
  return !s.pointwise() ||
         (s.in_channels < 8 * s.out_channels && !(large && s.in_channels >= 64 && s.in_channels <= 96));
}

// The same with stride 2. 16->32 320x320: 176, 54; 64->128 320x320: 373, 212; 96->192 320x320: 750, 527; 128->128 80x80: 43,
// 37, 40x40: 22, 19. Where few channels a block fit: 128->256 40x40: 25, 31; 256->256 80x80: 118, 144.
bool is_strided_dgrad_faster(const ConvShape& s) { return s.out_channels <= 192 && s.in_channels <= 128; }

std::optional<ConvShape> choose_dgrad(const MenuQuery& query, Wish wish) {
  const std::optional<ConvShape> shape = dgrad_shape(query.shape);
  if (!shape.has_value() || wish == Wish::kAten) return std::nullopt;
  const Family family = choose_kernel({*shape, query.dtype, query.allow_tf32, query.capability}).family;
  // float, on the same kernels, has not been timed against cuDNN.
  if (wish == Wish::kOwn || wish == Wish::kFused) return shape;
  const bool tuned =
      family == Family::kImplicitGemm || family == Family::kImplicitGemmSm90 || family == Family::kDepthwiseMma;
  return tuned && is_half(query.dtype) && is_dgrad_faster(query.shape) ? shape : std::nullopt;
}

}  // namespace

std::optional<ConvShape> dgrad_shape(const ConvShape& s) {
  const int extent_h = s.dilation_h * (s.kernel_h - 1), extent_w = s.dilation_w * (s.kernel_w - 1);
  if (s.stride_h != 1 || s.stride_w != 1 || s.pad_h > extent_h || s.pad_w > extent_w) return std::nullopt;
  ConvShape d = s;
  d.in_channels = s.out_channels;
  d.out_channels = s.in_channels;
  d.in_h = s.out_h;
  d.in_w = s.out_w;
  d.out_h = s.in_h;
  d.out_w = s.in_w;
  d.pad_h = extent_h - s.pad_h;
  d.pad_w = extent_w - s.pad_w;
  return d;
}

// Thousands of plans are weighed, which takes longer than a launch; so what was found is kept.
GradientChoice choose_gradients(const MenuQuery& query, bool slices_x) {
  constexpr size_t kMostPlans = 4096, kShapeInts = sizeof(ConvShape) / sizeof(int);
  static_assert(kShapeInts * sizeof(int) == sizeof(ConvShape), "ConvShape is made of ints");
  const Wish wished = wish();
  GradientChoice choice;
  choice.dgrad = choose_dgrad(query, wished);
  if (has_wgrad(query.shape, query.dtype, query.allow_tf32)) {
    choice.wgrad = WgradFamily::kSimt;
    choice.depthwise_sm90 = wished != Wish::kAten && serves_sm90(query.capability) &&
                            wgrad_depthwise_sm90_slices(query.shape, query.dtype) > 0;
    return choice;
  }
  if (!is_half(query.dtype) || wished == Wish::kAten || !serves_sm90(query.capability)) return choice;
  choice.strided_dgrad =
      has_strided_dgrad(query.shape) && (wished != Wish::kFastest || is_strided_dgrad_faster(query.shape));
  choice.one_pass = wished != Wish::kOwn && has_pointwise_backward(query.shape);
  choice.stem = has_wgrad_stem(query.shape, query.dtype);
  if (wished == Wish::kFastest && !slices_x && !is_wgrad_faster(query.shape)) return choice;
  if (const std::string name = environment("YOLO12_FASTCONV_WGRAD"); !name.empty()) {
    if (const std::optional<WgradPlan> named = plan_wgrad_sm90(query.shape, name)) {
      choice.wgrad = WgradFamily::kSm90;
      choice.plan = *named;
      choice.stem = choice.one_pass = false;
      return choice;
    }
  }
  using Key = std::array<int, kShapeInts>;
  static std::mutex mutex;
  static std::map<Key, std::optional<WgradPlan>> known;
  Key key;
  std::memcpy(key.data(), &query.shape, sizeof(query.shape));
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    if (known.size() == kMostPlans) known.clear();
    found = known.emplace(key, plan_wgrad_sm90(query.shape)).first;
  }
  if (found->second.has_value()) {
    choice.wgrad = WgradFamily::kSm90;
    choice.plan = *found->second;
  }
  return choice;
}

std::string dgrad_name(const GradientChoice& choice, const MenuQuery& query) {
  if (choice.strided_dgrad) return "dgrad/sm90/strided";
  if (!choice.dgrad.has_value()) return "aten";
  return kernel_name(choose_kernel({*choice.dgrad, query.dtype, query.allow_tf32, query.capability}), *choice.dgrad);
}

std::string wgrad_name(const GradientChoice& choice) {
  if (choice.stem) return "wgrad/stem";
  if (choice.depthwise_sm90) return "wgrad/depthwise/sm90";
  switch (choice.wgrad) {
    case WgradFamily::kSm90: return wgrad_sm90_name(choice.plan);
    case WgradFamily::kSimt: return "wgrad/simt";
    case WgradFamily::kAten: return "aten";
  }
  fail("no name for wgrad family ", static_cast<int>(choice.wgrad));
}

}  // namespace yolo12_fastconv
