// Area attention: the kernels where they serve, else ATen.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <array>

#include "ops.h"

namespace yolo12_fastconv {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

AttentionOutputs attention_on_aten(const Tensor& qkv, int64_t num_heads, int64_t area, double scale, bool with_values) {
  std::array<StableIValue, 5> stack = {from(qkv), from(num_heads), from(area), from(scale), from(with_values)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("yolo12_fastconv::area_attention_aten", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

Tensor attention_backward_on_aten(const Tensor& grad_out, const OptionalTensor& grad_values, const Tensor& qkv,
                                  const Tensor& out, const Tensor& logsumexp, int64_t num_heads, int64_t area,
                                  double scale) {
  std::array<StableIValue, 8> stack = {from(grad_out),  from(grad_values), from(qkv),  from(out),
                                       from(logsumexp), from(num_heads),   from(area), from(scale)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("yolo12_fastconv::area_attention_backward_aten", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

}  // namespace

AttentionOutputs area_attention(Tensor qkv, int64_t num_heads, int64_t area, double scale, bool with_values) {
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  return attention_on_aten(qkv, num_heads, area, scale, with_values);
}

Tensor area_attention_backward(Tensor grad_out, OptionalTensor grad_values, Tensor qkv, Tensor out, Tensor logsumexp,
                               int64_t num_heads, int64_t area, double scale) {
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  return attention_backward_on_aten(grad_out, grad_values, qkv, out, logsumexp, num_heads, area, scale);
}

}  // namespace yolo12_fastconv
