// Plain structs between the host code (torch, no CUDA code) and the kernels (CUDA, no torch).
// All pointers are device pointers; all strides count elements.
#pragma once

#include <cstdint>

namespace yolo12_fastconv {

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

constexpr int size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

enum class Act : int { kIdentity = 0, kSilu = 1 };

// Strides of a logical (N, C, H, W) tensor.
struct Strides {
  int64_t n, c, h, w;
};

// A per-channel vector, contiguous; data is null where the block has none.
struct ChannelVector {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// What follows the convolution, per output channel. Folded to one scale and shift inside the kernels:
//   scale = gamma / sqrt(var + eps),  shift = beta + (bias - mean) * scale
// gamma, beta, bias default to 1, 0, 0; without mean and var there is no batch norm and scale is 1.
struct Affine {
  ChannelVector bias, gamma, beta, mean, var;
  double eps = 0.0;
};

struct ConvShape {
  int batch;                    // N
  int in_channels;              // C
  int in_h, in_w;               // H, W
  int out_channels;             // K
  int out_h, out_w;             // P, Q
  int kernel_h, kernel_w;       // R, S
  int stride_h, stride_w;
  int pad_h, pad_w;
  int dilation_h, dilation_w;
  int groups;

  int64_t out_pixels() const { return int64_t(batch) * out_h * out_w; }
  int64_t in_pixels() const { return int64_t(batch) * in_h * in_w; }
  bool pointwise() const {
    return kernel_h == 1 && kernel_w == 1 && stride_h == 1 && stride_w == 1 && pad_h == 0 && pad_w == 0;
  }
  // One filter per channel, as wide as high, and so its stride.
  bool square_depthwise() const {
    return groups == in_channels && in_channels == out_channels && kernel_h == kernel_w && stride_h == stride_w &&
           dilation_h == 1 && dilation_w == 1;
  }
};

// y = act(conv(x, weight) * scale + shift) + residual
// x, weight, y and residual have the compute dtype unless a kernel's comment says otherwise; y is NHWC, pixels evenly
// spaced: y[((n * P + p) * Q + q) * y_stride + k]. What lies between K and y_stride is not written.
struct ConvArgs {
  ConvShape shape;
  const void* x;
  Strides x_strides;
  const void* weight;           // logical (K, C / groups, R, S)
  Strides weight_strides;       // n: output channel, c: input channel, h: kernel row, w: kernel column
  void* y;
  int64_t y_stride;             // >= K
  const void* residual;         // null: none
  Strides residual_strides;
  Affine affine;
  Act act;
};

// Gradient of the convolution's weight: grad_weight[k,c,r,s] = sum over pixels of grad_z[pixel,k] * x[pixel moved by the
// tap, c]. x and grad_z have the compute dtype.
struct WgradArgs {
  ConvShape shape;
  const void* grad_z;           // (out pixels, K), channels adjacent
  int64_t grad_z_stride;        // of its rows
  const void* x;
  Strides x_strides;            // c is 1, or C is 1
  void* grad_weight;            // logical (K, C / groups, R, S)
  Strides grad_weight_strides;
  DType grad_weight_dtype;      // any: the sums are rounded once
  void* workspace;              // wgrad_workspace_bytes()
};

// Copy of a logical (N, C, H, W) tensor into NHWC rows of `out_channels` >= C elements, zero-filled behind C, rounded
// to another dtype on the way. Serves activations (NCHW, odd channel counts, float32 under autocast) and weights
// ((K, C, R, S) is the same thing with N = K).
struct PackArgs {
  const void* in;
  DType in_dtype;
  Strides in_strides;
  void* out;
  DType out_dtype;
  int64_t batch;
  int channels, h, w;
  int out_channels;
};

// Batch norm over the rows of an NHWC tensor.
struct BatchNormStatsArgs {
  const void* z;                // (rows, channels) with row stride z_stride
  int64_t rows;
  int channels;
  void* mean;                   // (channels), float, or double for double z
  void* var;                    // biased
  void* workspace;              // batch_norm_workspace_bytes()
  int z_stride = 0;             // 0: dense
};

// y = act((z + bias - mean) / sqrt(var + eps) * gamma + beta) + residual; y (rows, channels), dense; may be z.
struct BatchNormActArgs {
  const void* z;                // (rows, channels) with row stride z_stride
  int64_t rows;
  int channels;
  Affine affine;
  Act act;
  const void* residual;         // (rows, channels) with row stride residual_stride, or null
  int64_t residual_stride;
  void* y;
  int z_stride = 0;             // 0: dense
};

// Gradient of y above with respect to z, gamma and beta.
//   u = (z - mean) * invstd * gamma + beta,   du = grad_y * act'(u),   xhat = (z - mean) * invstd
//   grad_beta = sum du,   grad_gamma = sum du * xhat          (float sums, fixed order)
//   grad_z = gamma * invstd * (du - batch_stats * (grad_beta + xhat * grad_gamma) / rows)
// batch_stats: whether mean and var are those of this batch (training) or constants (running statistics).
struct BatchNormBackwardArgs {
  const void* grad_y;           // (rows, channels) with row stride grad_y_stride
  int64_t grad_y_stride;
  const void* z;                // (rows, channels) with row stride z_stride
  int64_t rows;
  int channels;
  Affine affine;                // gamma, beta, mean, var, eps; without mean: scale 1, shift 0 (no batch norm)
  Act act;
  bool batch_stats;
  void* grad_beta;              // (channels) float (double for double). Null, both: not computed, and
  void* grad_gamma;             //   batch_stats must be false
  void* grad_z;                 // as z; null: only the sums
  void* workspace;              // batch_norm_workspace_bytes()
  int z_stride = 0;             // 0: dense
};

// running = (1 - momentum) * running + momentum * batch, the variance made unbiased: var * count / (count - 1).
struct RunningStatsArgs {
  void* running_mean;
  void* running_var;
  DType running_dtype;
  int64_t* num_batches_tracked;  // incremented; may be null
  const void* mean;
  const void* var;
  DType stats_dtype;             // float32 or float64
  int channels;
  double momentum;               // negative: cumulative average, 1 / num_batches_tracked after the increment
  double unbias;                 // count / (count - 1)
};

}  // namespace yolo12_fastconv
