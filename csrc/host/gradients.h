// What the two backward ops share: from grad_z to the gradients that the schema returns.
#pragma once

#include "aten.h"
#include "convolution.h"
#include "ops.h"

namespace yolo12_fastconv {

struct TransposeFilterArgs;  // device/gradient_kernels.h

// Which of the five gradients are asked for, in the order of the schema.
enum Wanted { kGradX = 0, kGradWeight, kGradBias, kGradGamma, kGradBeta };

// What the half behind the gradient of z reads besides x and weight.
struct ConvBackwardInputs {
  OptionalTensor bias;
  OptionalTensor cast_weight = std::nullopt;    // the weight in the compute dtype, if the forward op made that copy
  OptionalTensor add_to_grad_x = std::nullopt;  // (N, C, H, W), of any dtype
  // (N, C, H, W) in the dtype of x, to which `more`, likewise, and the gradient of x are added in place: each sum is rounded.
  // None is returned then.
  OptionalTensor grad_x = std::nullopt, more = std::nullopt;
};

struct BackwardInputs {
  Tensor grad_y, z;  // without batch norm and activation z is not read, and may be undefined
  OptionalTensor bn_weight, bn_bias;
  Affine affine;  // gamma, beta, mean, var, eps of the batch norm; empty: none
  Act act;
  bool batch_stats;  // mean and var belong to this batch
  ConvBackwardInputs conv;
};

// Both halves, one after the other.
Grads backward(const Convolution& convolution, const Tensor& x, const Tensor& weight, const Geometry& geometry,
               const BackwardInputs& inputs, const std::vector<bool>& wanted);

struct ActGrads {
  Tensor z, gamma, beta;  // undefined where not asked for; gamma and beta in the dtype that sums are taken in
};

// From the gradient of y to that of z, through activation and batch norm. z is rows of pixels, and its gradient's are as far
// apart. wanted: z, gamma, beta. On the way it makes `filter`, unless that is null.
ActGrads act_backward(const Tensor& grad_y, const Tensor& z, const Affine& affine, Act act, bool batch_stats,
                      const std::vector<bool>& wanted, cudaStream_t stream,
                      const TransposeFilterArgs* filter = nullptr);

// From the gradient of z to those of x, weight and bias, each in its own tensor's dtype and form. wanted: in that order.
ConvGrads conv_backward(const Convolution& convolution, const Tensor& grad_z, const Tensor& x, const Tensor& weight,
                        const Geometry& geometry, const ConvBackwardInputs& inputs, const std::vector<bool>& wanted);

// An op returns tensors, never None: a gradient nobody asked for is empty.
Tensor or_empty(const Tensor& grad, bool wanted, const Tensor& like, DType dtype);
// `grad`, which is dense, in the dtype and strides of `like`, as the fake kernels promise.
Tensor in_form_of(const Tensor& grad, const Tensor& like);

// Raises unless `cast` is `weight` in `dtype`, on the same device.
void check_cast(const Tensor& cast, const Tensor& weight, ScalarType dtype);

Act act_of(int64_t code);

}  // namespace yolo12_fastconv
