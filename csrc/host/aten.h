// Calls into ATen, through the dispatcher of the running torch.
#pragma once

#include <vector>

#include "convolution.h"

namespace yolo12_fastconv {

struct ConvGrads {
  Tensor x, weight, bias;  // undefined where not asked for
};

// aten::cudnn_convolution: no bias, all in one dtype, channels_last if x is. TF32 only if `allow_tf32`, which is torch's own
// switch as ops.py reads it; always an algorithm that is deterministic.
Tensor cudnn_convolution(const Tensor& x, const Tensor& weight, const Geometry& geometry, bool allow_tf32);

// aten::convolution_backward: gradients of a convolution's input, weight and bias from grad_z (N, K, P, Q), all in one
// dtype. It follows torch's cuDNN switches (deterministic, benchmark, TF32) by itself.
ConvGrads convolution_backward(const Tensor& grad_z, const Tensor& x, const Tensor& weight, bool has_bias,
                               const Geometry& geometry, const std::vector<bool>& wanted);

}  // namespace yolo12_fastconv
