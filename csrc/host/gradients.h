// What the two backward ops share: from grad_z to the gradients that the schema returns.
#pragma once

#include "convolution.h"
#include "ops.h"

namespace yolo12_fastconv {

// Which of the five gradients are asked for, in the order of the schema.
enum Wanted { kGradX = 0, kGradWeight, kGradBias, kGradGamma, kGradBeta };

struct BackwardInputs {
  Tensor grad_y, z;
  OptionalTensor bias, bn_weight, bn_bias;
  Affine affine;     // gamma, beta, mean, var, eps of the batch norm; empty: none
  Act act;
  bool batch_stats;  // mean and var belong to this batch
  OptionalTensor cast_weight = std::nullopt;  // the weight in the compute dtype, if the forward op made that copy
  OptionalTensor add_to_grad_x = std::nullopt;  // (N, C, H, W), of any dtype
  // (N, C, H, W) in the dtype of x, to which `more`, likewise, and the gradient of x are added in place: each sum is rounded.
  // None is returned then.
  OptionalTensor grad_x = std::nullopt, more = std::nullopt;
};

Grads backward(const Convolution& convolution, const Tensor& x, const Tensor& weight, const Geometry& geometry,
               const BackwardInputs& inputs, const std::vector<bool>& wanted);

Act act_of(int64_t code);

}  // namespace yolo12_fastconv
