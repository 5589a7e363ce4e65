// Training: batch statistics. Keeps z and two vectors; batch norm and SiLU are recomputed in backward.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "device/kernels.h"
#include "device/training_kernels.h"
#include "gradients.h"
#include "ops.h"
#include "running_stats.h"

namespace yolo12_fastconv {

namespace {

struct TrainOutputs {
  Tensor y, z, mean, var;
  Tensor cast_weight;  // dense channels_last; undefined if the weight has the compute dtype already, or was given in it
};

// running_mean may be absent; then nothing is moved. With `place`, y is written there and the returned one is empty.
TrainOutputs forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& bn_weight,
                     const OptionalTensor& bn_bias, double eps, const OptionalTensor& residual,
                     const Geometry& geometry, int64_t act, ScalarType dtype, bool allow_tf32,
                     const OptionalTensor& running_mean, const OptionalTensor& running_var,
                     const OptionalTensor& num_batches_tracked, std::optional<double> momentum,
                     const OptionalTensor& place, const OptionalTensor& cast_weight) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  TrainOutputs out;
  Tensor filter = weight;
  if (cast_weight.has_value()) {
    check_cast(*cast_weight, weight, dtype);
    filter = *cast_weight;
  } else if (weight.scalar_type() != dtype) {
    filter = out.cast_weight = Convolution(x, weight, geometry, dtype_of(dtype), allow_tf32).cast_weight();
  }
  const Convolution convolution(x, filter, geometry, dtype_of(dtype), allow_tf32);
  const ConvShape& s = convolution.shape();
  const DType type = convolution.dtype();
  const cudaStream_t stream = convolution.stream();
  if (s.out_pixels() < 2) {
    fail("training needs more than 1 value per channel, got an output of ", s.batch, "x", s.out_channels, "x", s.out_h,
         "x", s.out_w);
  }
  if (place.has_value()) check_out(*place, s, type, x);
  const DType sum_dtype = type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  out.mean = empty_vector(x, s.out_channels, sum_dtype);
  out.var = empty_vector(x, s.out_channels, sum_dtype);
  std::optional<RunningStatsArgs> running;
  if (running_mean.has_value() && running_var.has_value()) {
    running = running_stats_args(*running_mean, *running_var, num_batches_tracked, out.mean, out.var, momentum,
                                 s.out_pixels());
  }
  std::vector<Tensor> keep_alive;
  Affine only_bias;
  only_bias.bias = channel_vector(cast_bias(bias, dtype), "bias", s.out_channels, x, keep_alive);
  BatchNormActArgs args;
  args.affine.gamma = channel_vector(bn_weight, "bn_weight", s.out_channels, x, keep_alive);
  args.affine.beta = channel_vector(bn_bias, "bn_bias", s.out_channels, x, keep_alive);
  args.act = act_of(act);
  OutputStats stats;
  out.z = convolution.run_with_stats(only_bias, stats);

  BatchNormStatsArgs sums = {};
  sums.z = out.z.const_data_ptr();
  sums.rows = s.out_pixels();
  sums.channels = s.out_channels;
  sums.mean = out.mean.mutable_data_ptr();
  sums.var = out.var.mutable_data_ptr();

  const bool in_place = place.has_value() && is_row_matrix(*place);
  Tensor y = in_place ? *place : empty_channels_last(x, s.batch, s.out_channels, s.out_h, s.out_w, type);
  args.z = out.z.const_data_ptr();
  args.rows = s.out_pixels();
  args.channels = s.out_channels;
  args.affine.mean = {out.mean.const_data_ptr(), sum_dtype};
  args.affine.var = {out.var.const_data_ptr(), sum_dtype};
  args.affine.eps = eps;
  args.residual = nullptr;
  args.residual_stride = 0;
  args.y = y.mutable_data_ptr();
  Tensor rows;
  if (residual.has_value()) {
    rows = residual_rows(*residual, s, type, x, stream);
    args.residual = rows.const_data_ptr();
    args.residual_stride = row_stride(rows);
  }
  const RunningStatsArgs* const moved = running ? &*running : nullptr;
  if (stats.parts.parts > 0) {
    tile_stats_finish(sums, stats.parts, moved, stream);
    // From the last row on, which the convolution has written last.
    batch_norm_act_strided(args, row_stride(y), type, stream);
  } else {
    const Tensor workspace = empty_bytes(x, batch_norm_workspace_bytes(s.out_pixels(), s.out_channels, type));
    sums.workspace = workspace.mutable_data_ptr();
    batch_norm_stats_act(sums, moved, args, row_stride(y), type, stream);
  }
  if (place.has_value() && !in_place) {
    Tensor to = *place;
    torch::stable::copy_(to, y);
  }
  out.y = place.has_value() ? empty_vector(x, 0, type) : y;
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_act_train(Tensor x, Tensor weight, OptionalTensor bias,
                                                             OptionalTensor bn_weight, OptionalTensor bn_bias,
                                                             double eps, OptionalTensor residual,
                                                             std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                             std::vector<int64_t> dilation, int64_t groups, int64_t act,
                                                             ScalarType dtype, bool allow_tf32) {
  const TrainOutputs out =
      forward(x, weight, bias, bn_weight, bn_bias, eps, residual, {stride, padding, dilation, groups}, act, dtype,
              allow_tf32, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  return {out.y, out.z, out.mean, out.var};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_bn_act_train_(
    Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
    OptionalTensor residual, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
    int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32, OptionalTensor running_mean,
    OptionalTensor running_var, OptionalTensor num_batches_tracked, std::optional<double> momentum, OptionalTensor out,
    OptionalTensor cast_weight) {
  const TrainOutputs made =
      forward(x, weight, bias, bn_weight, bn_bias, eps, residual, {stride, padding, dilation, groups}, act, dtype,
              allow_tf32, running_mean, running_var, num_batches_tracked, momentum, out, cast_weight);
  const bool casts = made.cast_weight.defined();
  return {made.y, made.z, made.mean, made.var, casts ? made.cast_weight : empty_vector(x, 0, dtype_of(dtype))};
}

// The y of conv_bn_act_train from its z and statistics, by the same kernel: bit for bit the same.
Tensor bn_act(Tensor z, Tensor mean, Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
              int64_t act) {
  const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
  if (z.dim() != 4) fail("z must have 4 dimensions, got ", z.dim());
  const DType type = dtype_of(z.scalar_type());
  const cudaStream_t stream = current_stream(z);
  const auto size = z.sizes();
  const Tensor dense = dense_rows(z, type, stream);
  std::vector<Tensor> keep_alive;
  BatchNormActArgs args;
  args.affine.gamma = channel_vector(bn_weight, "bn_weight", size[1], z, keep_alive);
  args.affine.beta = channel_vector(bn_bias, "bn_bias", size[1], z, keep_alive);
  args.affine.mean = channel_vector(mean, "mean", size[1], z, keep_alive);
  args.affine.var = channel_vector(var, "var", size[1], z, keep_alive);
  args.affine.eps = eps;
  args.act = act_of(act);
  args.z = dense.const_data_ptr();
  args.rows = size[0] * size[2] * size[3];
  args.channels = size[1];
  args.residual = nullptr;
  args.residual_stride = 0;
  const Tensor y = empty_channels_last(z, size[0], size[1], size[2], size[3], type);
  args.y = y.mutable_data_ptr();
  batch_norm_act(args, type, stream);
  return y;
}

namespace {

Grads train_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& z, const Tensor& mean,
                     const Tensor& var, const OptionalTensor& bn_weight, const OptionalTensor& bn_bias, double eps,
                     const Geometry& geometry, int64_t act, ScalarType dtype, bool allow_tf32,
                     const std::vector<bool>& output_mask, const ConvBackwardInputs& conv) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Convolution convolution(x, weight, geometry, dtype_of(dtype), allow_tf32);
  const ConvShape& s = convolution.shape();
  if (conv.cast_weight.has_value()) check_cast(*conv.cast_weight, weight, dtype);
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
                  {grad_y, dense, bn_weight, bn_bias, affine, act_of(act), true, conv}, output_mask);
}

}  // namespace

Grads conv_bn_act_train_backward(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, Tensor z, Tensor mean,
                                 Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                 std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype,
                                 bool allow_tf32, std::vector<bool> output_mask, OptionalTensor cast_weight,
                                 OptionalTensor add_to_grad_x) {
  return train_backward(grad_y, x, weight, z, mean, var, bn_weight, bn_bias, eps, {stride, padding, dilation, groups},
                        act, dtype, allow_tf32, output_mask, {bias, cast_weight, add_to_grad_x});
}

Grads conv_bn_act_train_backward_(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, Tensor z, Tensor mean,
                                  Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                  std::vector<int64_t> stride, std::vector<int64_t> padding,
                                  std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype,
                                  bool allow_tf32, std::vector<bool> output_mask, OptionalTensor cast_weight,
                                  Tensor grad_x, OptionalTensor more) {
  return train_backward(grad_y, x, weight, z, mean, var, bn_weight, bn_bias, eps, {stride, padding, dilation, groups},
                        act, dtype, allow_tf32, output_mask, {bias, cast_weight, std::nullopt, grad_x, more});
}

std::tuple<Tensor, Tensor, Tensor> bn_act_backward(Tensor grad_y, Tensor z, Tensor mean, Tensor var,
                                                   OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                                   int64_t act, std::vector<bool> output_mask) {
  const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
  if (z.dim() != 4) fail("z must have 4 dimensions, got ", z.dim());
  if (output_mask.size() != 3) fail("output_mask must have 3 entries, got ", output_mask.size());
  const DType type = dtype_of(z.scalar_type());
  const cudaStream_t stream = current_stream(z);
  std::vector<Tensor> keep_alive;
  Affine affine;
  affine.gamma = channel_vector(bn_weight, "bn_weight", z.size(1), z, keep_alive);
  affine.beta = channel_vector(bn_bias, "bn_bias", z.size(1), z, keep_alive);
  affine.mean = channel_vector(mean, "mean", z.size(1), z, keep_alive);
  affine.var = channel_vector(var, "var", z.size(1), z, keep_alive);
  affine.eps = eps;
  ActGrads grads =
      act_backward(grad_y, dense_rows(z, type, stream), affine, act_of(act), /*batch_stats=*/true, output_mask, stream);
  if (output_mask[1] && bn_weight.has_value()) grads.gamma = in_form_of(grads.gamma, *bn_weight);
  if (output_mask[2] && bn_bias.has_value()) grads.beta = in_form_of(grads.beta, *bn_bias);
  return {or_empty(grads.z, output_mask[0], z, type), or_empty(grads.gamma, output_mask[1], z, type),
          or_empty(grads.beta, output_mask[2], z, type)};
}

}  // namespace yolo12_fastconv
