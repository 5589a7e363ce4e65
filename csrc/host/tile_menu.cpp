#include "device/tile_menu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "build_info.h"
#include "device/dispatch.h"

namespace yolo12_fastconv {
namespace {

// Tensor cores with cp.async and bfloat16 begin at 8.0.
constexpr int kFirstTensorCoreCapability = 80;

bool is_depthwise(const ConvShape& s) {
  const bool size = s.kernel_h == 3 || s.kernel_h == 5 || s.kernel_h == 7;
  return s.groups > 1 && s.square_depthwise() && size && (s.stride_h == 1 || s.stride_h == 2);
}

// A network's first convolution. All weights of the stem kernel lie in shared memory, and it counts tiles of 4 x 32
// pixels in 30 bits (kernels/stem.cu).
bool is_stem(const ConvShape& s) {
  const auto one_or_two = [](int stride) { return stride == 1 || stride == 2; };
  const int64_t tiles = int64_t(s.batch) * ceil_div(s.out_h, 4) * ceil_div(s.out_w, 32);
  return s.groups == 1 && s.in_channels >= 1 && s.in_channels <= 4 && s.kernel_h == 3 && s.kernel_w == 3 &&
         one_or_two(s.stride_h) && one_or_two(s.stride_w) && s.dilation_h == 1 && s.dilation_w == 1 &&
         s.out_channels <= 512 && tiles < (1 << 30) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15);
}

// The implicit GEMM counts offsets in 32 bits inside a tile of at most 128 pixels (kernels/implicit_gemm.cu).
bool fits_implicit_gemm(const ConvShape& s) {
  const int64_t plane = int64_t(s.out_h) * s.out_w;
  const int64_t image = int64_t(s.in_h) * s.in_w * round_up(s.in_channels, 8);
  const int64_t tiles = ceil_div<int64_t>(s.out_pixels(), 64) * ceil_div(s.out_channels, 16);
  const int64_t chunks = int64_t(s.kernel_h) * s.kernel_w * ceil_div(s.in_channels, 4);
  return (128 + plane - 1) / plane * image + 2 * image < (int64_t(1) << 30) && tiles < (int64_t(1) << 31) &&
         chunks < (1 << 24) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15) && s.kernel_h <= kMaxGemmKernel &&
         s.kernel_w <= kMaxGemmKernel;
}

// Cycles of a multiprocessor (H200, 1.755 GHz) from the end of the kernel before to the end of this one, with x and w in
// L2, as they are when one image runs through a model. Not fitted to timings yet.
constexpr double kFirstTileCycles = 600;   // the first copies' way from L2: 500, and a barrier
constexpr double kStageCycles = 70;        // wait, barrier, first ldmatrix
constexpr double kStepCycles = 35;         // products that wait for the products before
constexpr double kFinishCycles = 250;      // sums through shared memory to y, besides:
constexpr double kOutputsPerCycle = 12;    //   128 lanes, 10 instructions an element
constexpr double kSharedBytesPerCycle = 128;
constexpr double kProductsPerCycle = 1270;  // mma.sync in half: 62 % of wgmma's 2048

double gemm_cycles(const ConvShape& s, DType dtype, const GemmTile& t) {
  const int lanes = 16 / size_of(dtype);
  const double chunks = double(s.kernel_h) * s.kernel_w * ceil_div(s.in_channels, lanes);
  const double stages = std::ceil(chunks / t.chunks), steps = stages * (t.chunks / 2);
  const double blocks = double(ceil_div<int64_t>(s.out_pixels(), t.pixels)) * ceil_div(s.out_channels, t.channels);
  const double rounds = std::ceil(blocks / kMultiprocessors);  // blocks that the busiest multiprocessor gets
  const double rows = t.pixels + t.channels, outputs = double(t.pixels) * t.channels;
  // One block by itself is a chain; all blocks of a multiprocessor share its ports, with some overlap.
  const double chain = stages * kStageCycles + steps / t.groups * kStepCycles;
  const double transfer = rounds * rows * chunks * 16 / kL2BytesPerCycle;
  const double operands = double(t.warps_pixels) * t.warps_channels *
                          (t.pixels / t.warps_pixels + t.channels / t.warps_channels);  // rows that warps read
  const double shared = rounds * steps * (operands + rows) * 32 / kSharedBytesPerCycle;
  const double products = rounds * steps * outputs * (lanes * 2) / (kProductsPerCycle * lanes / 8);
  const double partial_sums = t.groups == 1 ? 0 : outputs * t.groups * 8 / kSharedBytesPerCycle;
  return kFirstTileCycles + std::max({chain, transfer, shared, products}) + kFinishCycles +
         rounds * (outputs / kOutputsPerCycle + partial_sums);
}

// The tile with the lowest estimate.
GemmTile choose_gemm_tile(const ConvShape& s, DType dtype) {
  return *std::min_element(std::begin(kGemmTiles), std::end(kGemmTiles), [&](const GemmTile& a, const GemmTile& b) {
    return gemm_cycles(s, dtype, a) < gemm_cycles(s, dtype, b);
  });
}

std::string tile_name(const GemmTile& t) {
  return "implicit_gemm/sm80/" + std::to_string(t.pixels) + "x" + std::to_string(t.channels) + "x" +
         std::to_string(t.chunks) + "x" + std::to_string(t.stages);
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

// Whether the sm80 kernel serves a convolution on 9.0 too: most layers of one image. Its tiles are smaller than the 64
// pixels of wgmma and its blocks share a reduction among warps, so that it fills the multiprocessors and has the shorter
// chain; and it lacks the sm90 kernel's barriers, tensor maps and 200 KB of shared memory, 1 to 2 us to set up, which are
// left out here as a margin, because gemm_cycles() is not fitted. Above 4 us (7000 cycles) x and y outgrow L2, which
// gemm_cycles() takes for granted.
bool is_small(const ConvShape& s, DType dtype, const Sm90Plan& plan) {
  constexpr double kMostCycles = 7000;
  const double cycles = gemm_cycles(s, dtype, choose_gemm_tile(s, dtype));
  return cycles < kMostCycles && cycles < plan.cycles;
}

void print_once(const MenuQuery& query, const KernelChoice& choice) {
  const char* wanted = std::getenv("YOLO12_FASTCONV_PRINT_TILES");
  if (wanted == nullptr || std::string(wanted) != "1") return;
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

// YOLO12_FASTCONV_TARGET, read at every call; empty: none. "aten" never gets here: the package then loads no library.
std::string forced_target(int capability) {
  const char* value = std::getenv("YOLO12_FASTCONV_TARGET");
  const std::string target = value != nullptr ? value : "";
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

KernelChoice choose(const MenuQuery& query, const std::string& target) {
  const ConvShape& s = query.shape;
  const bool half = query.dtype == DType::kFloat16 || query.dtype == DType::kBFloat16;
  if (is_depthwise(s)) {
    const bool mma =
        half && query.capability >= kFirstTensorCoreCapability && s.stride_h == 1 && s.out_channels % 8 == 0;
    if (mma) return {Family::kDepthwiseMma, {}, {}, plan_depthwise(s)};
    return {Family::kDepthwise, {}, {}};
  }
  // One kernel for both targets: it has nothing to win from wgmma.
  if (half && query.capability >= kFirstTensorCoreCapability && is_stem(s)) return {Family::kStem, {}, {}};
  const bool tensor_cores =
      query.capability >= kFirstTensorCoreCapability && (half || (query.dtype == DType::kFloat32 && query.allow_tf32));
  if (s.groups == 1 && half && query.capability == kSm90Capability && has_sm90_kernels() && target != "sm80") {
    const Sm90Plan plan = plan_sm90(s);
    const bool small = target.empty() && fits_implicit_gemm(s) && is_small(s, query.dtype, plan);
    if (plan.channels != 0 && !small) return {Family::kImplicitGemmSm90, {}, plan};
  }
  if (s.groups == 1 && tensor_cores && fits_implicit_gemm(s)) {
    const GemmTile tile = choose_gemm_tile(s, query.dtype);
    return {Family::kImplicitGemm, tile, {}};
  }
  return {Family::kDirect, {}, {}};
}

}  // namespace

// Some 200 plans and 10 tiles are weighed, which takes longer than a launch; so what was found is kept.
KernelChoice choose_kernel(const MenuQuery& query) {
  constexpr size_t kMostChoices = 4096, kShapeInts = sizeof(ConvShape) / sizeof(int);
  static_assert(kShapeInts * sizeof(int) == sizeof(ConvShape), "ConvShape is made of ints");
  using Key = std::pair<std::array<int, kShapeInts + 3>, std::string>;
  static std::mutex mutex;
  static std::map<Key, KernelChoice> known;
  Key key = {{}, forced_target(query.capability)};
  std::memcpy(key.first.data(), &query.shape, sizeof(query.shape));
  key.first[kShapeInts] = static_cast<int>(query.dtype);
  key.first[kShapeInts + 1] = query.allow_tf32;
  key.first[kShapeInts + 2] = query.capability;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(key);
  if (found == known.end()) {
    if (known.size() == kMostChoices) known.clear();
    found = known.emplace(key, choose(query, key.second)).first;
  }
  print_once(query, found->second);
  return found->second;
}

std::string kernel_name(const KernelChoice& choice, const ConvShape& s) {
  const std::string filter = std::to_string(s.kernel_h) + "x" + std::to_string(s.kernel_w);
  switch (choice.family) {
    case Family::kImplicitGemm: return tile_name(choice.tile);
    case Family::kImplicitGemmSm90: return sm90_name(choice.sm90);
    case Family::kDepthwiseMma: return "depthwise/mma/" + filter;
    case Family::kDepthwise: return "depthwise/simt/" + filter;
    case Family::kStem:
      return "stem/mma/3x3s" + std::to_string(s.stride_h) +
             (s.stride_w == s.stride_h ? "" : "x" + std::to_string(s.stride_w));
    case Family::kDirect: return "direct/simt";
  }
  fail("no name for kernel family ", static_cast<int>(choice.family));
}

}  // namespace yolo12_fastconv
