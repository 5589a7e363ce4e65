// Inference: running statistics. Forward in one kernel; backward recomputes the convolution, so that nothing is kept for
// the rare caller that differentiates an eval-mode block (a frozen batch norm, predict(visualize=True)).
#include <torch/csrc/stable/accelerator.h>

#include "gradients.h"
#include "ops.h"

namespace yolo12_fastconv {
namespace {

Affine batch_norm_of(const OptionalTensor& gamma, const OptionalTensor& beta, const OptionalTensor& mean,
                     const OptionalTensor& var, double eps, int64_t channels, const Tensor& like,
                     std::vector<Tensor>& keep_alive) {
  if (mean.has_value() != var.has_value()) fail("running_mean and running_var go together: give both or neither");
  if (!mean.has_value()) return {};
  Affine affine;
  affine.gamma = channel_vector(gamma, "bn_weight", channels, like, keep_alive);
  affine.beta = channel_vector(beta, "bn_bias", channels, like, keep_alive);
  affine.mean = channel_vector(mean, "running_mean", channels, like, keep_alive);
  affine.var = channel_vector(var, "running_var", channels, like, keep_alive);
  affine.eps = eps;
  return affine;
}

}  // namespace

Tensor conv_bn_act(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight, OptionalTensor bn_bias,
                   OptionalTensor running_mean, OptionalTensor running_var, double eps, OptionalTensor residual,
                   std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                   int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Convolution convolution(x, weight, {stride, padding, dilation, groups}, dtype_of(dtype), allow_tf32);
  const int64_t channels = convolution.shape().out_channels;
  std::vector<Tensor> keep_alive;
  Affine affine = batch_norm_of(bn_weight, bn_bias, running_mean, running_var, eps, channels, x, keep_alive);
  affine.bias = channel_vector(cast_bias(bias, dtype), "bias", channels, x, keep_alive);
  return convolution.run(affine, act_of(act), residual, /*pad_pixels=*/true);
}

void conv_bn_act_out(Tensor x, Tensor weight, Tensor out, OptionalTensor bias, OptionalTensor bn_weight,
                     OptionalTensor bn_bias, OptionalTensor running_mean, OptionalTensor running_var, double eps,
                     OptionalTensor residual, std::vector<int64_t> stride, std::vector<int64_t> padding,
                     std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Convolution convolution(x, weight, {stride, padding, dilation, groups}, dtype_of(dtype), allow_tf32);
  const int64_t channels = convolution.shape().out_channels;
  std::vector<Tensor> keep_alive;
  Affine affine = batch_norm_of(bn_weight, bn_bias, running_mean, running_var, eps, channels, x, keep_alive);
  affine.bias = channel_vector(cast_bias(bias, dtype), "bias", channels, x, keep_alive);
  convolution.run_out(affine, act_of(act), residual, out);
}

Grads conv_bn_act_backward(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight,
                           OptionalTensor bn_bias, OptionalTensor running_mean, OptionalTensor running_var, double eps,
                           std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                           int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32,
                           std::vector<bool> output_mask) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Geometry geometry = {stride, padding, dilation, groups};
  const Convolution convolution(x, weight, geometry, dtype_of(dtype), allow_tf32);
  const int64_t channels = convolution.shape().out_channels;
  std::vector<Tensor> keep_alive;
  const Affine affine = batch_norm_of(bn_weight, bn_bias, running_mean, running_var, eps, channels, x, keep_alive);
  Tensor z;
  if (affine.mean.data != nullptr || act_of(act) != Act::kIdentity) {
    Affine only_bias;
    only_bias.bias = channel_vector(cast_bias(bias, dtype), "bias", channels, x, keep_alive);
    z = convolution.run(only_bias, Act::kIdentity, std::nullopt);
  }
  return backward(convolution, x, weight, geometry, {grad_y, z, bn_weight, bn_bias, affine, act_of(act), false, {bias}},
                  output_mask);
}

std::tuple<Tensor, Tensor, Tensor> conv_backward(Tensor grad_z, Tensor x, Tensor weight, OptionalTensor bias,
                                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                 std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                                 bool allow_tf32, std::vector<bool> output_mask,
                                                 OptionalTensor cast_weight, OptionalTensor add_to_grad_x) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (output_mask.size() != 3) fail("output_mask must have 3 entries, got ", output_mask.size());
  const Geometry geometry = {stride, padding, dilation, groups};
  const Convolution convolution(x, weight, geometry, dtype_of(dtype), allow_tf32);
  if (cast_weight.has_value()) check_cast(*cast_weight, weight, dtype);
  const ConvGrads grads =
      conv_backward(convolution, grad_z, x, weight, geometry, {bias, cast_weight, add_to_grad_x}, output_mask);
  const DType x_dtype = dtype_of(x.scalar_type());
  return {or_empty(grads.x, output_mask[0], x, x_dtype), or_empty(grads.weight, output_mask[1], x, x_dtype),
          or_empty(grads.bias, output_mask[2], x, x_dtype)};
}

void conv_backward_(Tensor grad_z, Tensor x, Tensor weight, std::vector<int64_t> stride, std::vector<int64_t> padding,
                    std::vector<int64_t> dilation, int64_t groups, ScalarType dtype, bool allow_tf32,
                    OptionalTensor cast_weight, Tensor grad_x, OptionalTensor more) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Geometry geometry = {stride, padding, dilation, groups};
  const Convolution convolution(x, weight, geometry, dtype_of(dtype), allow_tf32);
  if (cast_weight.has_value()) check_cast(*cast_weight, weight, dtype);
  conv_backward(convolution, grad_z, x, weight, geometry, {std::nullopt, cast_weight, std::nullopt, grad_x, more},
                {true, false, false});
}

}  // namespace yolo12_fastconv
