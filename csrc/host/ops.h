// The CUDA bodies of the ops, with the arguments of their schemas (yolo12_fastconv/ops.py, where they are documented).
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace yolo12_fastconv {

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor conv_bn_act(Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight, OptionalTensor bn_bias,
                   OptionalTensor running_mean, OptionalTensor running_var, double eps, OptionalTensor residual,
                   std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                   int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32);

void conv_bn_act_out(Tensor x, Tensor weight, Tensor out, OptionalTensor bias, OptionalTensor bn_weight,
                     OptionalTensor bn_bias, OptionalTensor running_mean, OptionalTensor running_var, double eps,
                     OptionalTensor residual, std::vector<int64_t> stride, std::vector<int64_t> padding,
                     std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32);

Grads conv_bn_act_backward(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight,
                           OptionalTensor bn_bias, OptionalTensor running_mean, OptionalTensor running_var, double eps,
                           std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                           int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32,
                           std::vector<bool> output_mask);

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_bn_act_train(Tensor x, Tensor weight, OptionalTensor bias,
                                                             OptionalTensor bn_weight, OptionalTensor bn_bias,
                                                             double eps, OptionalTensor residual,
                                                             std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                             std::vector<int64_t> dilation, int64_t groups, int64_t act,
                                                             ScalarType dtype, bool allow_tf32);

Grads conv_bn_act_train_backward(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, Tensor z, Tensor mean,
                                 Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                 std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype,
                                 bool allow_tf32, std::vector<bool> output_mask, OptionalTensor cast_weight,
                                 OptionalTensor add_to_grad_x);

Grads conv_bn_act_train_backward_(Tensor grad_y, Tensor x, Tensor weight, OptionalTensor bias, Tensor z, Tensor mean,
                                  Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                  std::vector<int64_t> stride, std::vector<int64_t> padding,
                                  std::vector<int64_t> dilation, int64_t groups, int64_t act, ScalarType dtype,
                                  bool allow_tf32, std::vector<bool> output_mask, OptionalTensor cast_weight,
                                  Tensor grad_x, OptionalTensor more);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_bn_act_train_(
    Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
    OptionalTensor residual, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
    int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32, OptionalTensor running_mean,
    OptionalTensor running_var, OptionalTensor num_batches_tracked, std::optional<double> momentum, OptionalTensor out,
    OptionalTensor cast_weight);

Tensor bn_act(Tensor z, Tensor mean, Tensor var, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
              int64_t act);

std::tuple<Tensor, Tensor, Tensor> bn_act_backward(Tensor grad_y, Tensor z, Tensor mean, Tensor var,
                                                   OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
                                                   int64_t act, std::vector<bool> output_mask);

std::tuple<Tensor, Tensor, Tensor> conv_backward(Tensor grad_z, Tensor x, Tensor weight, OptionalTensor bias,
                                                 std::vector<int64_t> stride, std::vector<int64_t> padding,
                                                 std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                                 bool allow_tf32, std::vector<bool> output_mask,
                                                 OptionalTensor cast_weight, OptionalTensor add_to_grad_x);

void conv_backward_(Tensor grad_z, Tensor x, Tensor weight, std::vector<int64_t> stride, std::vector<int64_t> padding,
                    std::vector<int64_t> dilation, int64_t groups, ScalarType dtype, bool allow_tf32,
                    OptionalTensor cast_weight, Tensor grad_x, OptionalTensor more);

void update_running_stats_(Tensor running_mean, Tensor running_var, OptionalTensor num_batches_tracked, Tensor mean,
                           Tensor var, std::optional<double> momentum, int64_t count);

Tensor concat_channels(std::vector<Tensor> tensors, std::vector<int64_t> scales, ScalarType dtype);

void concat_channels_out(std::vector<Tensor> tensors, std::vector<int64_t> scales, Tensor out);

Tensor upsample_nearest_backward(Tensor grad_y);

void upsample_nearest_backward_(Tensor grad_y, Tensor grad_x);

std::tuple<Tensor, Tensor, Tensor> detect_decode(std::vector<Tensor> boxes, std::vector<Tensor> scores,
                                                 OptionalTensor bin_values, Tensor points, Tensor steps, bool xywh);

std::vector<Tensor> run_program(std::vector<Tensor> inputs, std::vector<Tensor> constants, Tensor program,
                                std::vector<int64_t> outputs, ScalarType dtype, bool allow_tf32);

using AttentionOutputs = std::tuple<Tensor, Tensor, Tensor>;

AttentionOutputs area_attention(Tensor qkv, int64_t num_heads, int64_t area, double scale, bool with_values);

Tensor area_attention_backward(Tensor grad_out, OptionalTensor grad_values, Tensor qkv, Tensor out, Tensor logsumexp,
                               int64_t num_heads, int64_t area, double scale);

std::string describe_kernel(std::vector<int64_t> x_size, std::vector<int64_t> weight_size, std::vector<int64_t> stride,
                            std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                            ScalarType dtype, bool allow_tf32, int64_t capability, bool training);

std::vector<std::string> kernel_candidates(std::vector<int64_t> x_size, std::vector<int64_t> weight_size,
                                           std::vector<int64_t> stride, std::vector<int64_t> padding,
                                           std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                           bool allow_tf32, int64_t capability);

// Kernels of the gradients of x and of the weight, or "aten".
std::vector<std::string> describe_gradients(std::vector<int64_t> x_size, std::vector<int64_t> weight_size,
                                            std::vector<int64_t> stride, std::vector<int64_t> padding,
                                            std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                            bool allow_tf32, int64_t capability);

// Whether choose_gradients() takes one pass for both and the batch norm's.
bool backward_in_one_pass(std::vector<int64_t> x_size, std::vector<int64_t> weight_size, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                          bool allow_tf32, int64_t capability);

std::string library_info();

}  // namespace yolo12_fastconv
