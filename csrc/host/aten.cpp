#include "aten.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>

namespace yolo12_fastconv {

using torch::stable::detail::from;
using torch::stable::detail::to;

Tensor cudnn_convolution(const Tensor& x, const Tensor& weight, const Geometry& geometry, bool allow_tf32) {
  std::array<StableIValue, 9> stack = {
      from(x),
      from(weight),
      from(geometry.padding),
      from(geometry.stride),
      from(geometry.dilation),
      from(geometry.groups),
      from(false),  // benchmark: would choose by the clock
      from(true),  // deterministic
      from(allow_tf32),
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::cudnn_convolution", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

ConvGrads convolution_backward(const Tensor& grad_z, const Tensor& x, const Tensor& weight, bool has_bias,
                               const Geometry& geometry, const std::vector<bool>& wanted) {
  std::optional<std::vector<int64_t>> bias_sizes;
  if (has_bias) bias_sizes = {weight.size(0)};
  const std::vector<int64_t> output_padding = {0, 0};
  const std::array<bool, 3> mask = {wanted[0], wanted[1], wanted[2]};
  std::array<StableIValue, 11> stack = {
      from(grad_z),
      from(x),
      from(weight),
      from(bias_sizes),
      from(geometry.stride),
      from(geometry.padding),
      from(geometry.dilation),
      from(false),  // transposed
      from(output_padding),
      from(geometry.groups),
      from(torch::headeronly::HeaderOnlyArrayRef<bool>(mask.data(), mask.size())),
  };
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution_backward", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

}  // namespace yolo12_fastconv
