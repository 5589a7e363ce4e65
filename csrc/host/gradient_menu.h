// Which of our kernels compute a convolution's gradients; the rest is aten::convolution_backward. Shape in, choice out.
#pragma once

#include <optional>
#include <string>

#include "device/tile_menu.h"
#include "device/wgrad_plan.h"

namespace yolo12_fastconv {

// A convolution with stride 1 whose output is the gradient of x: of grad_z with the channels of each group swapped and the
// taps reversed. Nothing where the padding is wider than the filter, or the stride is not 1.
std::optional<ConvShape> dgrad_shape(const ConvShape& shape);

enum class WgradFamily { kAten, kSimt, kSm90 };

struct GradientChoice {
  std::optional<ConvShape> dgrad;  // to be run by the forward kernels
  bool strided_dgrad = false;  // kernels/dgrad_strided_sm90.cu instead, where grad_z is aligned as it wants it
  WgradFamily wgrad = WgradFamily::kAten;
  WgradPlan plan;  // kSm90 only
  bool depthwise_sm90 = false;  // kernels/wgrad_depthwise_sm90.cu instead of kSimt, where it serves what it reads
  bool stem = false;  // kernels/wgrad_stem.cu instead, where it serves x as it lies at the call
  // kernels/pointwise_backward_sm90.cu for grad_z and both, where a batch norm's backward is asked for as a whole.
  bool one_pass = false;
};

// By measurement, or as YOLO12_FASTCONV_GRADIENTS says: "own" is every case that a kernel exists for, "fused" besides
// those that one kernel serves with the batch norm, "aten" none that ATen computes as exactly. Whether tensors are aligned as a kernel wants them is seen at the call. slices_x: x lies in a
// wider tensor, which ours read in place and ATen copies.
GradientChoice choose_gradients(const MenuQuery& query, bool slices_x = false);
// "family/target/tile" of both, or "aten". For people and tests.
std::string dgrad_name(const GradientChoice& choice, const MenuQuery& query);
std::string wgrad_name(const GradientChoice& choice);

}  // namespace yolo12_fastconv
