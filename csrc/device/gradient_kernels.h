// Launchers of the kernels that only gradients need, beside those in kernels.h.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"
#include "wgrad_plan.h"

namespace yolo12_fastconv {

// Filter of the convolution that computes a gradient of x: from w, (K, C / groups, R, S) of any strides and dtype, to
// out[g * C / groups + c][R - 1 - r][S - 1 - s][k] = w[g * K / groups + k][c][r][s], dense, (C, R, S, K / groups).
struct TransposeFilterArgs {
  const void* in;
  DType in_dtype;
  Strides in_strides;
  void* out;
  DType out_dtype;
  int groups, out_channels, in_channels;  // of the weight: K / groups, C / groups
  int kernel_h, kernel_w;
};
// kernels/transpose_filter.cu
void transpose_filter(const TransposeFilterArgs& args, cudaStream_t stream);

// Gradient of the input of a dense 3x3 convolution with stride 2 and padding 1, in half and bfloat16, for compute capability
// 9.0: up to 128 output channels, more where the input has few. kernels/dgrad_strided_sm90.cu
struct StridedDgradArgs {
  ConvShape shape;  // of the convolution
  const void* grad_z;  // (out pixels, K), channels adjacent, rows aligned to 16 bytes
  int64_t grad_z_stride;  // of its rows
  const void* filter;  // from transpose_filter(), in the same dtype
  void* grad_x;  // (in pixels, C), dense
};
bool has_strided_dgrad(const ConvShape& shape);
void strided_dgrad(const StridedDgradArgs& args, DType dtype, cudaStream_t stream);

// Adds the sums of slices in the workspace up to the weight's gradient, and rounds once: [slice][k][tap][pitch] or, depthwise,
// [slice][tap][channel]; float, or double. The order of the additions depends on the shape and the number of slices alone.
// kernels/wgrad_slices.cu
void add_wgrad_slices(const WgradArgs& args, DType sums_dtype, int pitch, int slices, cudaStream_t stream);
// Of float sums, a row of which has as many elements as channels.
void add_wgrad_slices(const WgradArgs& args, int slices, cudaStream_t stream);

// Gradient of a 7x7 depthwise weight in half and bfloat16: stride 1, a multiple of 8 channels. How many slices
// the workspace of wgrad() holds then, 0 where there is no kernel for the shape; whether it serves: rows of x and grad_z
// aligned to 16 bytes too. kernels/wgrad_depthwise_mma.cu
int wgrad_depthwise_mma_slices(const ConvShape& shape, DType dtype);
bool wgrad_depthwise_mma_serves(const WgradArgs& args, DType dtype);
void wgrad_depthwise_mma(const WgradArgs& args, DType dtype, cudaStream_t stream);
// The same for compute capability 9.0; no stride 0. kernels/wgrad_depthwise_sm90.cu
int wgrad_depthwise_sm90_slices(const ConvShape& shape, DType dtype);
bool wgrad_depthwise_sm90_serves(const WgradArgs& args, DType dtype);
void wgrad_depthwise_sm90(const WgradArgs& args, DType dtype, cudaStream_t stream);

// Gradient of the first convolution's weight, 3x3 over 3 channels with stride 2 and padding 1, in half and bfloat16. x: in
// that dtype or in float, planar or interleaved, rows aligned to 16 bytes, as are those of grad_z.
// kernels/wgrad_stem.cu
bool has_wgrad_stem(const ConvShape& shape, DType dtype);
bool wgrad_stem_serves(const WgradArgs& args, DType x_dtype, DType dtype);
int64_t wgrad_stem_workspace_bytes(const ConvShape& shape);
void wgrad_stem(const WgradArgs& args, DType x_dtype, DType dtype, cudaStream_t stream);

// Gradient of a dense weight in half and bfloat16, for compute capability 9.0. x: NHWC, nested strides; rows of x and
// grad_z aligned to 16 bytes. Workspace of plan.slices * wgrad_slice_floats() floats. kernels/wgrad_sm90.cu
bool is_wgrad_sm90_built();
void wgrad_sm90(const WgradArgs& args, DType dtype, const WgradPlan& plan, cudaStream_t stream);

// What follows the batch norm's sums in the backward of a narrow 1x1 convolution, in one pass: half and bfloat16, compute
// capability 9.0, batch norm by batch statistics, its vectors float, no bias. kernels/pointwise_backward_sm90.cu
struct PointwiseBackwardArgs {
  ConvShape shape;
  const void* grad_y;  // (pixels, K); rows aligned to 16 bytes, as are those of x, grad_x and added
  int64_t grad_y_stride;
  const void* z;  // (pixels, K)
  int64_t z_stride;
  Affine affine;  // gamma, beta, mean, var, eps
  Act act;
  const float* grad_beta;   // (K), from batch_norm_backward()
  const float* grad_gamma;  // (K)
  const void* x;  // (pixels, C)
  int64_t x_stride;
  const void* weight;  // (K, C), dense, in the same dtype
  void* grad_x;  // (pixels, C); may be `added`
  int64_t grad_x_stride;
  const void* added;  // to grad_x, (pixels, C); may be null
  int64_t added_stride;
  void* grad_weight;  // logical (K, C, 1, 1)
  Strides grad_weight_strides;
  DType grad_weight_dtype;
  void* workspace;  // pointwise_backward_slices() * K * C floats
};
bool has_pointwise_backward(const ConvShape& shape);
int pointwise_backward_slices(const ConvShape& shape);
void pointwise_backward(const PointwiseBackwardArgs& args, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
