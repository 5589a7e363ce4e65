// One convolution with everything that follows it, on whichever kernel family serves it.
#pragma once

#include <vector>

#include "device/tile_menu.h"
#include "device/tile_stats.h"
#include "tensors.h"

namespace yolo12_fastconv {

struct Geometry {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};

// Sizes of a convolution, after checking that `x` (N, C, H, W) and `weight` (K, C / groups, R, S) fit together.
ConvShape conv_shape(const std::vector<int64_t>& x_size, const std::vector<int64_t>& weight_size,
                     const Geometry& geometry);

// Raises unless a result of shape `s` in `dtype` can be written to `out`.
void check_out(const Tensor& out, const ConvShape& s, DType dtype, const Tensor& like);

// Statistics of a convolution's output, where the kernel that serves it has taken them on the way; else without parts.
struct OutputStats {
  Tensor workspace;
  TileStats parts = {};

  // Room for so many parts of `channels` channels, on the device of `like`.
  void allocate(const Tensor& like, int count, int channels);
};

class Convolution {
 public:
  // Checks devices, dtypes and sizes; raises with the values otherwise.
  Convolution(const Tensor& x, const Tensor& weight, const Geometry& geometry, DType dtype, bool allow_tf32);

  // y = act(conv(x, weight) * scale + shift) + residual, channels_last, in the compute dtype. pad_pixels: pixels of y may
  // begin at aligned addresses, with gaps between them.
  Tensor run(const Affine& affine, Act act, const OptionalTensor& residual, bool pad_pixels = false) const;

  // conv(x, weight) + bias, and its statistics if the kernel takes them.
  Tensor run_with_stats(const Affine& bias, OutputStats& stats) const;

  // The same as run() into `out`, of any strides.
  void run_out(const Affine& affine, Act act, const OptionalTensor& residual, Tensor out) const;

  // `x` and `weight` in the compute dtype: themselves where they have it. Weights come as channels_last.
  Tensor cast_x() const;
  Tensor cast_weight() const;
  // Elements from one pixel of an output with padded pixels to the next: odd widths in half begin at multiples of 16 bytes.
  int64_t pixel_pitch() const;

  const ConvShape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  bool allow_tf32() const { return allow_tf32_; }
  cudaStream_t stream() const { return stream_; }

 private:
  MenuQuery query() const;
  KernelChoice choose() const;
  // y: not empty, pixels `pitch` elements apart.
  // stats: what the kernel has taken of y on the way, if it can; may be null.
  void launch(const KernelChoice& choice, const Affine& affine, Act act, const OptionalTensor& residual,
              const Tensor& y, int64_t pitch, OutputStats* stats = nullptr) const;
  void run_implicit_gemm(ConvArgs args, const KernelChoice& choice, OutputStats* stats) const;
  void run_depthwise(ConvArgs args, const KernelChoice& choice, OutputStats* stats) const;
  void run_stem(ConvArgs args, OutputStats* stats) const;
  void run_direct(ConvArgs args) const;
  Tensor run_aten(const Affine& affine, Act act, const OptionalTensor& residual) const;

  Tensor x_, weight_;
  Geometry geometry_;
  ConvShape shape_;
  DType dtype_;
  bool allow_tf32_;
  cudaStream_t stream_;
};

}  // namespace yolo12_fastconv
