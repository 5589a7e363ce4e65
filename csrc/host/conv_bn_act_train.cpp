// Training: batch statistics. Keeps z and two vectors; batch norm and SiLU are recomputed in backward.
#include <torch/csrc/stable/accelerator.h>

#include "device/kernels.h"
#include "gradients.h"
#include "ops.h"

namespace yolo12_fastconv {

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_act_train(Tensor x, Tensor weight, OptionalTensor bias,
                                                             OptionalTensor bn_weight, OptionalTensor bn_bias,
                                                             double eps, OptionalTensor residual,
                                                             std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                             std::vector<int64_t> dilation, int64_t groups, int64_t act,
                                                             ScalarType dtype, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Convolution convolution(x, weight, {stride, padding, dilation, groups}, dtype_of(dtype), allow_tf32);
  const ConvShape& s = convolution.shape();
  const DType type = convolution.dtype();
  const cudaStream_t stream = convolution.stream();
  if (s.out_pixels() < 2) {
    fail("training needs more than 1 value per channel, got an output of ", s.batch, "x", s.out_channels, "x", s.out_h,
         "x", s.out_w);
  }
  std::vector<Tensor> keep_alive;
  Affine only_bias;
  only_bias.bias = channel_vector(cast_bias(bias, dtype), "bias", s.out_channels, x, keep_alive);
  Tensor z = convolution.run(only_bias, Act::kIdentity, std::nullopt);

  const DType sum_dtype = type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Tensor mean = empty_vector(x, s.out_channels, sum_dtype), var = empty_vector(x, s.out_channels, sum_dtype);
  const Tensor workspace = empty_bytes(x, batch_norm_workspace_bytes(s.out_pixels(), s.out_channels, type));
  batch_norm_stats({z.const_data_ptr(), s.out_pixels(), s.out_channels, mean.mutable_data_ptr(), var.mutable_data_ptr(),
                    workspace.mutable_data_ptr()},
                   type, stream);

  Tensor y = empty_channels_last(x, s.batch, s.out_channels, s.out_h, s.out_w, type);
  BatchNormActArgs args;
  args.z = z.const_data_ptr();
  args.rows = s.out_pixels();
  args.channels = s.out_channels;
  args.affine.gamma = channel_vector(bn_weight, "bn_weight", s.out_channels, x, keep_alive);
  args.affine.beta = channel_vector(bn_bias, "bn_bias", s.out_channels, x, keep_alive);
  args.affine.mean = {mean.const_data_ptr(), sum_dtype};
  args.affine.var = {var.const_data_ptr(), sum_dtype};
  args.affine.eps = eps;
  args.act = act_of(act);
  args.residual = nullptr;
  args.residual_stride = 0;
  args.y = y.mutable_data_ptr();
  Tensor rows;
  if (residual.has_value()) {
    rows = residual_rows(*residual, s, type, x, stream);
    args.residual = rows.const_data_ptr();
    args.residual_stride = row_stride(rows);
  }
  batch_norm_act(args, type, stream);
  return {y, z, mean, var};
}

Grads conv_bn_act_train_backward(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, Tensor z, Tensor mean,
                                 Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                 std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype,
                                 bool allow_tf32, std::vector<bool> output_mask) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Geometry geometry = {stride, padding, dilation, groups};
  const Convolution convolution(x, weight, geometry, dtype_of(dtype), allow_tf32);
  const ConvShape& s = convolution.shape();
  std::vector<Tensor> keep_alive;
  Affine affine;
  affine.gamma = channel_vector(bn_weight, "bn_weight", s.out_channels, x, keep_alive);
  affine.beta = channel_vector(bn_bias, "bn_bias", s.out_channels, x, keep_alive);
  affine.mean = channel_vector(mean, "mean", s.out_channels, x, keep_alive);
  affine.var = channel_vector(var, "var", s.out_channels, x, keep_alive);
  affine.eps = eps;
  // z comes from the forward op, dense channels_last; anything else (a caller's own) is copied.
  const Tensor dense = dense_rows(z, convolution.dtype(), convolution.stream());
  return backward(convolution, x, weight, geometry,
                  {grad_y, dense, bias, bn_weight, bn_bias, affine, act_of(act), true}, output_mask);
}

}  // namespace yolo12_fastconv
