// Which kernel serves a convolution: shape in, named choice out. Pure host code, no CUDA, testable without a GPU
// (ops `describe_kernel` and `kernel_candidates`); YOLO12_FASTCONV_PRINT_TILES=1 prints each distinct choice once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "depthwise_plan.h"
#include "sm90_plan.h"

namespace yolo12_fastconv {

enum class Family { kImplicitGemm, kImplicitGemmSm90, kDepthwiseMma, kDepthwise, kStem, kDirect, kAten };

// Block tile of the implicit GEMM: pixels x output channels x 16-byte chunks of (tap, input channel), the number of
// tiles in flight and the one that is computed on, and how warps share it: pixels, channels, and the reduction.
struct GemmTile {
  int pixels, channels, chunks, stages;
  int warps_pixels, warps_channels, groups;
  bool operator==(const GemmTile&) const = default;
};

// One kernel per tile and dtype. Warps of 64 x 32 read shared memory less often than those of 32 x 32 (5 to 10 % at 64
// channels), but 4 warps of 64 x 64 are too few to hide each other's latencies (8 of 64 x 32 are up to 15 % faster). 48
// channels are a width of YOLO12x.
constexpr GemmTile kGemmTiles[] = {
    {128, 128, 8, 3, 2, 4, 1}, {128, 64, 8, 3, 4, 2, 1}, {128, 32, 4, 5, 4, 1, 1}, {128, 16, 4, 5, 4, 1, 1},
    {128, 64, 4, 5, 2, 2, 1},  {128, 48, 4, 5, 4, 1, 1}, {64, 64, 8, 4, 2, 2, 2},  {64, 32, 8, 5, 2, 1, 2},
    {64, 16, 8, 5, 2, 1, 2},   {32, 64, 8, 5, 1, 2, 2},  {32, 32, 8, 6, 1, 1, 4},  {16, 32, 8, 8, 1, 1, 4},
};
constexpr int kMaxGemmKernel = 16;  // rows and columns of a filter: a bit each of 32

// What the menu looks at.
struct MenuQuery {
  ConvShape shape;
  DType dtype;
  bool allow_tf32;
  int capability;          // major * 10 + minor
};

struct KernelChoice {
  Family family;
  GemmTile tile;           // kImplicitGemm only
  Sm90Plan sm90;           // kImplicitGemmSm90 only
  DepthwisePlan depthwise = {};  // kDepthwiseMma only
};

// The first of kernel_candidates(), or the one that YOLO12_FASTCONV_KERNEL names.
KernelChoice choose_kernel(const MenuQuery& query);
// Kernels that can serve the convolution under YOLO12_FASTCONV_TARGET, at least one, at most 100, the one with the lowest
// estimate first, or one that was timed.
std::vector<KernelChoice> kernel_candidates(const MenuQuery& query);
// "family/target/tile". For people: launches do without it.
std::string kernel_name(const KernelChoice& choice, const ConvShape& shape);

}  // namespace yolo12_fastconv
