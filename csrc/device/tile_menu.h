// Which kernel serves a convolution: shape in, named choice out. Pure host code, no CUDA, testable without a GPU
// (op `describe_kernel`); YOLO12_FASTCONV_PRINT_TILES=1 prints each distinct choice once.
#pragma once

#include <cstdint>
#include <string>

#include "args.h"
#include "sm90_plan.h"

namespace yolo12_fastconv {

enum class Family { kImplicitGemm, kImplicitGemmSm90, kDepthwiseMma, kDepthwise, kStem, kDirect };

// Block tile of the implicit GEMM: pixels x output channels x 16-byte chunks of (tap, input channel), and the number of
// tiles in flight.
struct GemmTile {
  int pixels;
  int channels;
  int chunks;
  int stages;
};

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
};

KernelChoice choose_kernel(const MenuQuery& query);
// "family/target/tile". For people: launches do without it.
std::string kernel_name(const KernelChoice& choice, const ConvShape& shape);

}  // namespace yolo12_fastconv
