#include "device/tile_menu.h"

#include <cstdlib>
#include <iostream>
#include <mutex>
#include <set>

#include "build_info.h"
#include "device/dispatch.h"

namespace yolo12_fastconv {
namespace {

// Tensor cores with cp.async and bfloat16 begin at 8.0.
constexpr int kFirstTensorCoreCapability = 80;

bool is_depthwise(const ConvShape& s) {
  const bool square = s.kernel_h == s.kernel_w && s.stride_h == s.stride_w;
  const bool size = s.kernel_h == 3 || s.kernel_h == 5 || s.kernel_h == 7;
  return s.groups > 1 && s.groups == s.in_channels && s.in_channels == s.out_channels && square && size &&
         (s.stride_h == 1 || s.stride_h == 2) && s.dilation_h == 1 && s.dilation_w == 1;
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
         chunks < (1 << 24) && s.pad_h < (1 << 15) && s.pad_w < (1 << 15);
}

GemmTile choose_gemm_tile(const ConvShape& s, DType dtype) {
  // The channel tile that wastes the fewest columns, the widest among equals: x is read once per channel tile.
  int channels = 16;
  for (const int candidate : {32, 64, 128}) {
    if (round_up(s.out_channels, candidate) <= round_up(s.out_channels, channels)) channels = candidate;
  }
  // Between one wide tile and several narrow ones, up to an eighth of idle columns costs less than reading x again.
  for (const int candidate : {32, 64, 128}) {
    if (candidate > channels && 8 * round_up(s.out_channels, candidate) <= 9 * round_up(s.out_channels, channels)) {
      channels = candidate;
    }
  }
  const int64_t column_tiles = ceil_div(s.out_channels, channels);
  const int64_t blocks = ceil_div<int64_t>(s.out_pixels(), 128) * column_tiles;
  // Fewer blocks than the 132 SMs of the largest current GPU: halve the tile.
  const bool small = blocks < 132;
  if (small && channels == 128) channels = 64;
  const int chunks = s.kernel_h * s.kernel_w * ceil_div(s.in_channels, 16 / size_of(dtype));
  // 128-byte rows halve the barriers per byte; below 16 chunks there is nothing left to overlap with.
  const bool deep = chunks >= 16 && channels >= 64;
  if (small) return channels == 64 ? GemmTile{64, 64, 8, 3} : GemmTile{64, channels, 4, 4};
  return deep ? GemmTile{128, channels, 8, 3} : GemmTile{128, channels, 4, 4};
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

// Below these sizes the sm80 kernel is faster by up to 2 us, in which the sm90 kernel sets up its barriers, tensor
// maps and large blocks: a reduction that is short for both, and no time to win on memory.
bool is_small(const ConvShape& s) {
  const int64_t reduction = int64_t(s.kernel_h) * s.kernel_w * round_up(s.in_channels, 8);
  const int64_t bytes = 2 * (s.in_pixels() * s.in_channels + s.out_pixels() * s.out_channels);
  return reduction <= 144 && bytes < 14'000'000 && s.out_pixels() * s.out_channels * reduction < 300'000'000;
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

KernelChoice choose(const MenuQuery& query) {
  const std::string target = forced_target(query.capability);
  const ConvShape& s = query.shape;
  const bool half = query.dtype == DType::kFloat16 || query.dtype == DType::kBFloat16;
  if (is_depthwise(s)) {
    const bool mma =
        half && query.capability >= kFirstTensorCoreCapability && s.stride_h == 1 && s.out_channels % 8 == 0;
    return {mma ? Family::kDepthwiseMma : Family::kDepthwise, {}, {}};
  }
  // One kernel for both targets: it has nothing to win from wgmma.
  if (half && query.capability >= kFirstTensorCoreCapability && is_stem(s)) return {Family::kStem, {}, {}};
  const bool tensor_cores =
      query.capability >= kFirstTensorCoreCapability && (half || (query.dtype == DType::kFloat32 && query.allow_tf32));
  const bool sm90 = query.capability == kSm90Capability && has_sm90_kernels() && target != "sm80" &&
                    (target == "sm90" || !is_small(s));
  if (s.groups == 1 && half && sm90) {
    const Sm90Plan plan = plan_sm90(s);
    if (plan.channels != 0) return {Family::kImplicitGemmSm90, {}, plan};
  }
  if (s.groups == 1 && tensor_cores && fits_implicit_gemm(s)) {
    const GemmTile tile = choose_gemm_tile(s, query.dtype);
    return {Family::kImplicitGemm, tile, {}};
  }
  return {Family::kDirect, {}, {}};
}

}  // namespace

KernelChoice choose_kernel(const MenuQuery& query) {
  const KernelChoice choice = choose(query);
  print_once(query, choice);
  return choice;
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
