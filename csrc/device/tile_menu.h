// Which kernel serves a convolution: shape in, named choice out. Pure host code, no CUDA, testable without a GPU
// (ops `describe_kernel` and `kernel_candidates`); YOLO12_FASTCONV_PRINT_TILES=1 prints each distinct choice once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "depthwise_plan.h"
#include "sm90_once_plan.h"
#include "sm90_plan.h"

namespace yolo12_fastconv {

enum class Family { kImplicitGemm, kImplicitGemmSm90, kDepthwiseMma, kDepthwise, kStem, kDirect, kAten };

// Block tile of the implicit GEMM: pixels x output channels x 16-byte chunks of (tap, input channel), the number of
// tiles in flight and the one that is computed on, and how warps share it: pixels, channels, and the reduction.
struct GemmTile {
  int pixels, channels, chunks, stages;
  int warps_pixels, warps_channels, groups;
  bool window = false;  // 3x3: pixels are copied once for all taps
  bool operator==(const GemmTile&) const = default;
  // Warps of 64 x 64 or 64 x 48, which have no registers for the offsets and taps of any convolution (fits_tile()).
  constexpr bool wide_warps() const { return pixels / warps_pixels * (channels / warps_channels) > 2048; }
  // Float of 256 pixels would not fit shared memory on its way out, and of wide warps not the registers.
  constexpr bool half_only() const { return window || pixels > 128 || wide_warps(); }
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
  // kImplicitGemmSm90: the kernel for small grids, if it has channels; `sm90` where layout or statistics rule it out.
  Sm90OncePlan once = {};
  // The same for plans by which blocks share work (Sm90Plan::shares()).
  Sm90Plan shared = {};
};

// The first of kernel_candidates(), or the one that YOLO12_FASTCONV_KERNEL names.
KernelChoice choose_kernel(const MenuQuery& query);
// Kernels that can serve the convolution under YOLO12_FASTCONV_TARGET, at least one, at most 150, the one with the lowest
// estimate first, or one that was timed. Plans by which blocks share work are first only where they were timed.
std::vector<KernelChoice> kernel_candidates(const MenuQuery& query);
// "family/target/tile". For people: launches do without it.
std::string kernel_name(const KernelChoice& choice, const ConvShape& shape);

}  // namespace yolo12_fastconv
