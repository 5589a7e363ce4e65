#include "device/tile_menu.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "build_info.h"
#include "device/dispatch.h"
#include "device/gemm_tiles.h"
#include "device/tile_costs.h"
#include "device/tile_stats.h"
#include "stats_plan.h"
#include "targets.h"

namespace yolo12_fastconv {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

namespace {

// Tensor cores with cp.async and bfloat16 begin at 8.0.
constexpr int kFirstTensorCoreCapability = 80;
constexpr size_t kMostCandidates = 150;

bool is_depthwise(const ConvShape& s) {
  const bool size = s.kernel_h == 3 || s.kernel_h == 5 || s.kernel_h == 7;
  return s.groups > 1 && s.square_depthwise() && size && (s.stride_h == 1 || s.stride_h == 2);
}

// A network's first convolution. All weights of the stem kernel lie in shared memory, of which a block has 99 KiB on 8.6, and
// it counts tiles of 4 x 32 pixels in 30 bits (kernels/stem.cu).
bool is_stem(const ConvShape& s, DType dtype) {
  const auto one_or_two = [](int stride) { return stride == 1 || stride == 2; };
  const int64_t tiles = int64_t(s.batch) * ceil_div(s.out_h, 4) * ceil_div(s.out_w, 32);
  return s.groups == 1 && s.in_channels >= 1 && s.in_channels <= 4 && s.kernel_h == 3 && s.kernel_w == 3 &&
         one_or_two(s.stride_h) && one_or_two(s.stride_w) && s.dilation_h == 1 && s.dilation_w == 1 &&
         s.out_channels <= 1024 / size_of(dtype) && tiles < (1 << 30) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15);
}

// The implicit GEMM counts offsets in 32 bits inside a tile of at most 256 pixels (kernels/implicit_gemm.cu).
bool fits_implicit_gemm(const ConvShape& s) {
  const int64_t plane = int64_t(s.out_h) * s.out_w;
  const int64_t image = int64_t(s.in_h) * s.in_w * round_up(s.in_channels, 8);
  const int64_t tiles = ceil_div<int64_t>(s.out_pixels(), 64) * ceil_div(s.out_channels, 16);
  const int64_t chunks = int64_t(s.kernel_h) * s.kernel_w * ceil_div(s.in_channels, 4);
  return (256 + plane - 1) / plane * image + 2 * image < (int64_t(1) << 30) && tiles < (int64_t(1) << 31) &&
         chunks < (1 << 24) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15) && s.kernel_h <= kMaxGemmKernel &&
         s.kernel_w <= kMaxGemmKernel;
}

// Strict float: whether cuDNN, and a pass for what follows, is faster than the direct kernel. Two reasons: the direct kernel
// adds up a tile's products in one block, where cuDNN shares long sums among blocks; and cuDNN needs fewer products for 3x3.
// Fitted to 207 layers of n, m and x (one H200, batch 1 and 32, float): the choices take 0.6 % longer than the faster of
// both. Direct / cuDNN, times:
//   1x1    batch 1, 20x20: 128->128 1.0, 256->256 1.4, 384->384 1.6, 768->512 2.0; 80x80: 64->64 0.6, 384->384 1.14
//          batch 32: 64->64 160x160 0.5, 256->256 0.8 to 0.9, 512->512 40x40 1.0, 1024->512 20x20 1.13
//   3x3    batch 1: 64->64 1.2 to 1.7, 192->192 1.5 to 2.3, 512->64 2.7; batch 32: 32->16 0.5, 32->32 1.1, 512->64 1.5
//   3x3/2  batch 32: 16->32 0.75, 64->64 1.1 to 1.2, 128->128 1.1 to 1.5; before: large maps of 256->256 0.85 to 0.94
// A second run, batch 1: 128->128, 128->256 and 128->64 1x1 20x20 1.05 to 1.08, 128->128 40x40 1.01, 80x80 0.76.
bool rule_prefers_cudnn(const ConvShape& s) {
  // Maps below those that were compared: on 3x3 pixels, 256->64 3x3 was five times less exact than by the algorithm that
  // torch lets cuDNN choose.
  if (int64_t(s.out_h) * s.out_w < 100) return false;
  const int c = s.in_channels, k = s.out_channels;
  const int64_t blocks = ceil_div<int64_t>(s.out_pixels(), 128) * ceil_div(k, 128);
  const bool idle = blocks <= kMultiprocessors * 5 / 4;  // hardly a multiprocessor with two blocks of the direct kernel
  if (s.kernel_h * s.kernel_w == 1) {
    return (c >= 160 && idle) || (c >= 128 && blocks <= 16) || (c >= 768 && k >= 256);
  }
  if (c < 32 || k < 32) return c >= 16 && k >= 16 && idle;
  return (s.stride_h == 1 && s.stride_w == 1) || blocks <= 2000;
}

// Layers of n and m at batch 1 and 32 that the rule gives to the slower of both by more than 2 %. Direct / cuDNN, us.
struct StrictLayer {
  int batch, in_channels, out_channels, size, kernel, stride;
};
constexpr StrictLayer kRuleMisses[] = {
    {1, 32, 32, 160, 3, 1},  // 35.4 / 39.5: 200 blocks
    {1, 64, 64, 160, 3, 2},  // 47.6 / 82.8: cuDNN's choice for one picture is a poor one
    {1, 80, 80, 20, 1, 1},  // 10.7 / 10.3
    {1, 256, 512, 40, 1, 1},  // 31.2 / 34.7
    {1, 256, 768, 40, 1, 1},  // 39.6 / 40.9
    {32, 64, 128, 320, 3, 2},  // 3891 / 3803
    {32, 128, 80, 40, 1, 1},  // 100 / 95.7: 80 of 128 channels
    {32, 128, 384, 20, 1, 1},  // 87.8 / 82.2: 300 blocks, 264 at once
    {32, 256, 256, 80, 3, 2},  // 2087 / 2176
};

bool prefers_cudnn(const ConvShape& s) {
  const bool missed = std::any_of(std::begin(kRuleMisses), std::end(kRuleMisses), [&](const StrictLayer& l) {
    return l.batch == s.batch && l.in_channels == s.in_channels && l.out_channels == s.out_channels &&
           l.size == s.in_h && l.size == s.in_w && l.kernel == s.kernel_h && l.kernel == s.kernel_w &&
           l.stride == s.stride_h && l.stride == s.stride_w && s.pad_h == l.kernel / 2 && s.pad_w == l.kernel / 2 &&
           s.dilation_h == 1 && s.dilation_w == 1;
  });
  return rule_prefers_cudnn(s) != missed;
}

std::string tile_name(const GemmTile& t) {
  return "implicit_gemm/sm80/" + std::to_string(t.pixels) + "x" + std::to_string(t.channels) + "x" +
         std::to_string(t.chunks) + "x" + std::to_string(t.stages) + (t.wide_warps() ? "-wide" : "") +
         (t.window ? "-window" : "");
}

// wgmma exists on 9.0 alone, and only in code that was compiled for "9.0a".
constexpr int kSm90Capability = 90;

bool has_sm90_kernels() {
  static const bool built = [] {
    std::istringstream list(YOLO12_FASTCONV_ARCH_LIST);
    for (std::string arch; list >> arch;) {
      if (arch == "9.0a" || arch == "9.0a+PTX") return true;
    }
    return false;
  }();
  return built;
}

void print_once(const MenuQuery& query, const KernelChoice& choice) {
  if (environment("YOLO12_FASTCONV_PRINT_TILES") != "1") return;
  const ConvShape& s = query.shape;
  std::ostringstream line;
  line << "yolo12_fastconv: " << s.batch << "x" << s.in_channels << "x" << s.in_h << "x" << s.in_w << " -> "
       << s.out_channels << ", kernel " << s.kernel_h << "x" << s.kernel_w << ", stride " << s.stride_h << "x"
       << s.stride_w << ", groups " << s.groups << ", " << name_of(query.dtype) << ": " << kernel_name(choice, s);
  static std::mutex mutex;
  static std::set<std::string> printed;  // debugging aid; bounded by the distinct shapes of a run
  const std::lock_guard<std::mutex> lock(mutex);
  if (printed.insert(line.str()).second) std::cerr << line.str() << std::endl;
}

// YOLO12_FASTCONV_TARGET; empty: none. "aten" never gets here: the package then loads no library.
std::string forced_target(int capability) {
  const std::string target = environment("YOLO12_FASTCONV_TARGET");
  if (target == "sm90") {
    if (capability != kSm90Capability) {
      fail("YOLO12_FASTCONV_TARGET=sm90 needs a GPU of compute capability 9.0, this one has ", capability / 10, ".",
           capability % 10, ": use sm80, or unset it");
    }
    if (!has_sm90_kernels()) {
      fail("YOLO12_FASTCONV_TARGET=sm90, but this library was built for ", YOLO12_FASTCONV_ARCH_LIST,
           ": build it with 9.0a in TORCH_CUDA_ARCH_LIST, or unset the variable");
    }
  } else if (!target.empty() && target != "sm80") {
    fail("YOLO12_FASTCONV_TARGET=", target,
         " is no target of this library: use sm80 or sm90, or aten at the start of the process");
  }
  return target;
}

// Layers whose fastest timed kernel is at least 2.5 % faster than the one with the lowest estimate: scripts/tune.py writes
// them. Square maps, padding by half the filter, no dilation.
struct TunedLayer {
  int batch, in_channels, out_channels, size, kernel, stride;
  const char* name;
};
constexpr TunedLayer kTunedLayers[] = {
#include "tuned_layers.inc"
// Gradients of x, which are such convolutions of other shapes: at least 3.5 %.
#include "tuned_layers_dgrad.inc"
};
// The same of layers whose fastest timed kernel is one whose blocks share work, against the fastest of the others, which
// serves them where that one can't.
constexpr TunedLayer kTunedSharedLayers[] = {
#include "tuned_layers_shared.inc"
};
// The same of float in TF32, to which the estimates are not fitted: 6 % of the time of m's dense layers at batch 32. Layers
// that add a residual in a model are timed with it: not all tiles have it brought by the copy engine.
constexpr TunedLayer kTunedTf32Layers[] = {
#include "tuned_layers_tf32.inc"
};

// The same of half with statistics, whose epilogue is longer and whose tiles are not wider than 128 channels.
constexpr TunedLayer kTunedStatsLayers[] = {
#include "tuned_layers_stats.inc"
};

template <size_t kCount>
const char* tuned_kernel(const TunedLayer (&table)[kCount], const ConvShape& s) {
  const int pad = s.kernel_h / 2;
  if (s.in_h != s.in_w || s.kernel_h != s.kernel_w || s.stride_h != s.stride_w || s.pad_h != pad || s.pad_w != pad ||
      s.dilation_h != 1 || s.dilation_w != 1 || s.groups != 1) {
    return nullptr;
  }
  const auto found = std::find_if(std::begin(table), std::end(table), [&](const TunedLayer& t) {
    return t.batch == s.batch && t.in_channels == s.in_channels && t.out_channels == s.out_channels &&
           t.size == s.in_h && t.kernel == s.kernel_h && t.stride == s.stride_h;
  });
  return found != std::end(table) ? found->name : nullptr;
}

std::vector<KernelChoice> candidates(const MenuQuery& query, const std::string& target) {
  const ConvShape& s = query.shape;
  const bool half = query.dtype == DType::kFloat16 || query.dtype == DType::kBFloat16;
  if (is_depthwise(s)) {
    const bool mma =
        half && query.capability >= kFirstTensorCoreCapability && s.stride_h == 1 && s.out_channels % 8 == 0;
    if (mma) return {{Family::kDepthwiseMma, {}, {}, plan_depthwise(s)}};
    return {{Family::kDepthwise, {}, {}}};
  }
  const bool tensor_cores =
      query.capability >= kFirstTensorCoreCapability && (half || (query.dtype == DType::kFloat32 && query.allow_tf32));
  // One kernel for both targets: it has nothing to win from wgmma.
  if (tensor_cores && is_stem(s, query.dtype)) return {{Family::kStem, {}, {}}};
  std::vector<std::pair<double, KernelChoice>> weighed;
  if (tensor_cores && query.capability == kSm90Capability && has_sm90_kernels() && target != "sm80") {
    const std::vector<Sm90Plan> plans = sm90_plans(s, size_of(query.dtype));
    for (const Sm90Plan& plan : plans) {
      if (!plan.shares()) weighed.push_back({sm90_cycles(s, plan), {Family::kImplicitGemmSm90, {}, plan}});
    }
    if (half && !weighed.empty()) {
      const Sm90Plan otherwise = std::min_element(weighed.begin(), weighed.end(), [](const auto& a, const auto& b) {
                                   return a.first < b.first;
                                 })->second.sm90;
      for (const Sm90OncePlan& plan : sm90_once_plans(s)) {
        weighed.push_back({sm90_once_cycles(s, plan), {Family::kImplicitGemmSm90, {}, otherwise, {}, plan}});
      }
      for (const Sm90Plan& plan : plans) {
        if (plan.shares()) {
          weighed.push_back({sm90_cycles(s, plan), {Family::kImplicitGemmSm90, {}, otherwise, {}, {}, plan}});
        }
      }
    }
  }
  if (s.groups == 1 && tensor_cores && fits_implicit_gemm(s) && (target != "sm90" || weighed.empty())) {
    for (const GemmTile& tile : kGemmTiles) {
      if ((tile.half_only() && !half) || !fits_tile(s, tile)) continue;
      weighed.push_back({gemm_cycles(s, query.dtype, tile, {}, query.capability), {Family::kImplicitGemm, tile, {}}});
    }
  }
  std::stable_sort(weighed.begin(), weighed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto prefer = [&](auto&& wanted) {
    const auto found =
        std::find_if(weighed.begin(), weighed.end(), [&](const auto& one) { return wanted(one.second); });
    if (found != weighed.end()) std::rotate(weighed.begin(), found, found + 1);
    return found != weighed.end();
  };
  const auto prefer_named = [&](const char* name) {
    return name != nullptr && prefer([&](const KernelChoice& choice) { return kernel_name(choice, s) == name; });
  };
  prefer([](const KernelChoice& choice) { return !choice.shared.shares(); });
  prefer_named(half ? tuned_kernel(kTunedLayers, s) : tuned_kernel(kTunedTf32Layers, s));
  if (half) {
    const Sm90Plan otherwise = weighed.empty() ? Sm90Plan() : weighed.front().second.sm90;
    const bool shares = prefer_named(tuned_kernel(kTunedSharedLayers, s));
    if (shares && otherwise.channels > 0) weighed.front().second.sm90 = otherwise;
  }
  if (weighed.empty()) {
    std::vector<KernelChoice> choices = {{Family::kDirect, {}, {}}};
    if (query.dtype == DType::kFloat32 && s.groups == 1) {
      choices.insert(prefers_cudnn(s) ? choices.begin() : choices.end(), {Family::kAten, {}, {}});
    }
    return choices;
  }
  std::vector<KernelChoice> choices;
  for (size_t i = 0; i < std::min<size_t>(weighed.size(), kMostCandidates); ++i) choices.push_back(weighed[i].second);
  return choices;
}

KernelChoice choose(const MenuQuery& query, const std::string& target, const std::string& kernel) {
  const std::vector<KernelChoice> all = candidates(query, target);
  const auto named = std::find_if(all.begin(), all.end(), [&](const KernelChoice& choice) {
    return !kernel.empty() && kernel_name(choice, query.shape) == kernel;
  });
  return named != all.end() ? *named : all.front();
}

}  // namespace

bool serves_sm90(int capability) {
  return capability == kSm90Capability && has_sm90_kernels() && forced_target(capability) != "sm80";
}

std::vector<KernelChoice> kernel_candidates(const MenuQuery& query) {
  return candidates(query, forced_target(query.capability));
}

// Up to 500 plans are weighed, which takes longer than a launch; so what was found is kept.
KernelChoice choose_kernel(const MenuQuery& query) {
  constexpr size_t kMostChoices = 4096, kShapeInts = sizeof(ConvShape) / sizeof(int);
  static_assert(kShapeInts * sizeof(int) == sizeof(ConvShape), "ConvShape is made of ints");
  using Key = std::tuple<std::array<int, kShapeInts + 3>, std::string, std::string>;
  static std::mutex mutex;
  static std::map<Key, KernelChoice> known;
  Key key = {{}, forced_target(query.capability), environment("YOLO12_FASTCONV_KERNEL")};
  auto& [numbers, target, kernel] = key;
  std::memcpy(numbers.data(), &query.shape, sizeof(query.shape));
  numbers[kShapeInts] = static_cast<int>(query.dtype);
  numbers[kShapeInts + 1] = query.allow_tf32;
  numbers[kShapeInts + 2] = query.capability;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    if (known.size() == kMostChoices) known.clear();
    found = known.emplace(key, choose(query, target, kernel)).first;
  }
  print_once(query, found->second);
  return found->second;
}

std::optional<Sm90Plan> choose_stats_plan(const MenuQuery& query) {
  const KernelChoice usual = choose_kernel(query);
  const ConvShape& s = query.shape;
  if (usual.family != Family::kImplicitGemmSm90 || size_of(query.dtype) != 2 || usual.sm90.split > 1) {
    return std::nullopt;
  }
  const bool serves = usual.sm90.channels <= kSm90MaxStatsChannels;
  const std::string named = environment("YOLO12_FASTCONV_KERNEL");
  if (serves && !named.empty() && sm90_name(usual.sm90) == named) return usual.sm90;
  const char* const tuned = tuned_kernel(kTunedStatsLayers, s);
  if (serves && tuned == nullptr) return usual.sm90;
  // As in choose_kernel(): kept, since it takes longer than a launch.
  constexpr size_t kMostPlans = 4096, kShapeInts = sizeof(ConvShape) / sizeof(int);
  using Key = std::array<int, kShapeInts>;
  static std::mutex mutex;
  static std::map<Key, Sm90Plan> known;
  Key key;
  std::memcpy(key.data(), &s, sizeof(s));
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    std::optional<Sm90Plan> best;
    double least = 0;
    for (const Sm90Plan& plan : sm90_plans(s, size_of(query.dtype))) {
      if (plan.split > 1 || plan.shares() || plan.channels > kSm90MaxStatsChannels) continue;
      const double cycles = tuned != nullptr && sm90_name(plan) == tuned ? 0 : sm90_cycles(s, plan);
      if (best.has_value() && cycles >= least) continue;
      best = plan;
      least = cycles;
    }
    if (!best.has_value()) return std::nullopt;
    if (known.size() == kMostPlans) known.clear();
    found = known.emplace(key, *best).first;
  }
  return found->second;
}

std::string kernel_name(const KernelChoice& choice, const ConvShape& s) {
  const std::string filter = std::to_string(s.kernel_h) + "x" + std::to_string(s.kernel_w);
  switch (choice.family) {
    case Family::kImplicitGemm: return tile_name(choice.tile);
    case Family::kImplicitGemmSm90:
      if (choice.once.channels > 0) return sm90_once_name(s, choice.once);
      return sm90_name(choice.shared.channels > 0 ? choice.shared : choice.sm90);
    case Family::kDepthwiseMma: return "depthwise/mma/" + filter;
    case Family::kDepthwise: return "depthwise/simt/" + filter;
    case Family::kStem: {
      std::string name = "stem/mma/3x3s" + std::to_string(s.stride_h);
      // Not "x" + std::to_string(): inlined, GCC 12 takes that for a copy that overlaps (-Wrestrict).
      if (s.stride_w != s.stride_h) name.append("x").append(std::to_string(s.stride_w));
      return name;
    }
    case Family::kDirect: return "direct/simt";
    case Family::kAten: return "aten/float";
  }
  fail("no name for kernel family ", static_cast<int>(choice.family));
}

}  // namespace yolo12_fastconv
