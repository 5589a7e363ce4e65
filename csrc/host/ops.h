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
                                 bool allow_tf32, std::vector<bool> output_mask, OptionalTensor cast_weight);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_bn_act_train_(
    Tensor x, Tensor weight, OptionalTensor bias, OptionalTensor bn_weight, OptionalTensor bn_bias, double eps,
    OptionalTensor residual, std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
    int64_t groups, int64_t act, ScalarType dtype, bool allow_tf32, OptionalTensor running_mean,
    OptionalTensor running_var, OptionalTensor num_batches_tracked, std::optional<double> momentum);

void update_running_stats_(Tensor running_mean, Tensor running_var, OptionalTensor num_batches_tracked, Tensor mean,
                           Tensor var, std::optional<double> momentum, int64_t count);

std::string describe_kernel(std::vector<int64_t> x_size, std::vector<int64_t> weight_size, std::vector<int64_t> stride,
                            std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                            ScalarType dtype, bool allow_tf32, int64_t capability);

std::vector<std::string> kernel_candidates(std::vector<int64_t> x_size, std::vector<int64_t> weight_size,
                                           std::vector<int64_t> stride, std::vector<int64_t> padding,
                                           std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                           bool allow_tf32, int64_t capability);

std::string library_info();

}  // namespace yolo12_fastconv
