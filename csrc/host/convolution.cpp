#include "convolution.h"

#include <torch/csrc/stable/ops.h>

#include <limits>
#include <string>

#include "aten.h"
#include "device/kernels.h"
#include "device/small_pass.h"
#include "device/stats_kernels.h"
#include "stats_plan.h"

namespace yolo12_fastconv {
namespace {

std::string text(const std::vector<int64_t>& values) {
  std::string joined = "(";
  for (size_t i = 0; i < values.size(); ++i) joined += (i ? ", " : "") + std::to_string(values[i]);
  return joined + ")";
}

std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

int narrow(int64_t value, const char* what) {
  if (value < 0 || value > std::numeric_limits<int>::max()) fail(what, " is ", value, ", which does not fit 31 bits");
  return static_cast<int>(value);
}

void check_pair(const char* name, const std::vector<int64_t>& pair, int64_t least) {
  if (pair.size() != 2 || pair[0] < least || pair[1] < least) {
    fail(name, " must be two integers >= ", least, ", got ", text(pair));
  }
}

// Rows of pixels that 16-byte copies can read: channels adjacent, everything else in whole chunks.
bool has_aligned_rows(const Tensor& x, DType dtype) {
  const int64_t lanes = 16 / size_of(dtype);
  const auto size = x.sizes();
  const auto stride = x.strides();
  const auto aligned = [&](int dim) { return size[dim] == 1 || (stride[dim] % lanes == 0 && stride[dim] > 0); };
  return dtype_of(x.scalar_type()) == dtype && (size[1] == 1 || stride[1] == 1) && aligned(0) && aligned(2) &&
         aligned(3) && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

// The same for the residual, whose rows are evenly spaced.
bool has_aligned_residual(const ConvArgs& args, DType dtype) {
  return args.residual_strides.w % (16 / size_of(dtype)) == 0 && reinterpret_cast<uintptr_t>(args.residual) % 16 == 0;
}

// The implicit GEMM multiplies strides by positions in 32 bits, and positions reach into the padding.
bool has_short_strides(const Tensor& x, const ConvShape& s) {
  const Strides stride = strides_of(x);
  const int64_t plane = int64_t(s.out_h) * s.out_w;
  return ((128 + plane - 1) / plane + 1) * stride.n + (int64_t(s.in_h) + 2 * s.pad_h) * stride.h +
             (int64_t(s.in_w) + 2 * s.pad_w) * stride.w <
         std::numeric_limits<int>::max();
}

// Odd widths (the 307 and 460 channels inside YOLO12's attention blocks, pruned models): pixels 16-byte aligned, so that
// this layer stores and the next one loads whole vectors. Nothing to gain up to 8 channels, where the gap would outweigh
// them. `ops.py` has the same rule for fake tensors.
int64_t padded_pitch(const ConvShape& s, DType dtype) {
  return size_of(dtype) == 2 && s.groups == 1 && s.out_channels > 8 ? round_up(s.out_channels, 8) : s.out_channels;
}

}  // namespace

ConvShape conv_shape(const std::vector<int64_t>& x_size, const std::vector<int64_t>& weight_size, const Geometry& g) {
  if (x_size.size() != 4) fail("x must be (N, C, H, W), got ", text(x_size));
  if (weight_size.size() != 4) fail("weight must be (K, C / groups, R, S), got ", text(weight_size));
  check_pair("stride", g.stride, 1);
  check_pair("padding", g.padding, 0);
  check_pair("dilation", g.dilation, 1);
  if (g.groups < 1) fail("groups must be positive, got ", g.groups);
  if (x_size[1] != weight_size[1] * g.groups) {
    fail("x has ", x_size[1], " channels, but weight ", text(weight_size), " with groups=", g.groups, " takes ",
         weight_size[1] * g.groups);
  }
  if (weight_size[0] % g.groups != 0) {
    fail("weight has ", weight_size[0], " output channels, not a multiple of groups=", g.groups);
  }
  int64_t out[2];
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t size = x_size[2 + axis] + 2 * g.padding[axis];
    const int64_t extent = g.dilation[axis] * (weight_size[2 + axis] - 1) + 1;
    if (size < extent) fail("padded input size ", size, " is smaller than the kernel's extent ", extent);
    out[axis] = (size - extent) / g.stride[axis] + 1;
  }
  ConvShape s;
  s.batch = narrow(x_size[0], "batch");
  s.in_channels = narrow(x_size[1], "channels");
  s.in_h = narrow(x_size[2], "height");
  s.in_w = narrow(x_size[3], "width");
  s.out_channels = narrow(weight_size[0], "output channels");
  s.out_h = narrow(out[0], "output height");
  s.out_w = narrow(out[1], "output width");
  s.kernel_h = narrow(weight_size[2], "kernel height");
  s.kernel_w = narrow(weight_size[3], "kernel width");
  s.stride_h = narrow(g.stride[0], "stride");
  s.stride_w = narrow(g.stride[1], "stride");
  s.pad_h = narrow(g.padding[0], "padding");
  s.pad_w = narrow(g.padding[1], "padding");
  s.dilation_h = narrow(g.dilation[0], "dilation");
  s.dilation_w = narrow(g.dilation[1], "dilation");
  s.groups = narrow(g.groups, "groups");
  return s;
}

void check_out(const Tensor& out, const ConvShape& s, DType dtype, const Tensor& like) {
  if (out.dim() != 4 || out.size(0) != s.batch || out.size(1) != s.out_channels || out.size(2) != s.out_h ||
      out.size(3) != s.out_w) {
    fail("out must be ", s.batch, "x", s.out_channels, "x", s.out_h, "x", s.out_w, ", got ", text(sizes_of(out)));
  }
  if (dtype_of(out.scalar_type()) != dtype || !out.is_cuda() || out.get_device_index() != like.get_device_index()) {
    fail("out must have the dtype of the result and be on the device of x, cuda:", like.get_device_index());
  }
}

Convolution::Convolution(const Tensor& x, const Tensor& weight, const Geometry& geometry, DType dtype, bool allow_tf32)
    : x_(x),
      weight_(weight),
      geometry_(geometry),
      shape_(conv_shape(sizes_of(x), sizes_of(weight), geometry)),
      dtype_(dtype),
      allow_tf32_(allow_tf32),
      stream_(current_stream(x)) {
  if (!weight.is_cuda() || weight.get_device_index() != x.get_device_index()) {
    fail("x is on cuda:", x.get_device_index(), ", weight is not: move one of them");
  }
  dtype_of(x.scalar_type());  // raises for integers
  dtype_of(weight.scalar_type());
}

Tensor Convolution::run(const Affine& affine, Act act, const OptionalTensor& residual, bool pad_pixels) const {
  const ConvShape& s = shape_;
  const int64_t pitch = pad_pixels ? pixel_pitch() : s.out_channels;
  const auto allocate = [&] { return empty_rows(x_, s.batch, s.out_channels, s.out_h, s.out_w, pitch, dtype_); };
  if (s.out_pixels() == 0 || s.out_channels == 0) return allocate();
  const KernelChoice choice = choose();
  if (choice.family == Family::kAten) return run_aten(affine, act, residual);
  const Tensor y = allocate();
  launch(choice, affine, act, residual, y, pitch);
  return y;
}

void OutputStats::allocate(const Tensor& like, int count, int channels) {
  workspace = empty_bytes(like, tile_stats_bytes(count, channels));
  parts = tile_stats_at(workspace.mutable_data_ptr(), count, channels);
}

Tensor Convolution::run_with_stats(const Affine& bias, OutputStats& stats) const {
  const ConvShape& s = shape_;
  const std::optional<Sm90Plan> plan = choose_stats_plan(query());
  const KernelChoice choice = plan.has_value() ? KernelChoice{Family::kImplicitGemmSm90, {}, *plan} : choose();
  const bool may_serve = plan.has_value() || choice.family == Family::kDepthwiseMma || choice.family == Family::kStem;
  if (!may_serve || s.out_pixels() == 0 || s.out_channels == 0) {
    return run(bias, Act::kIdentity, std::nullopt, /*pad_pixels=*/true);
  }
  const int64_t pitch = pixel_pitch();
  const Tensor y = empty_rows(x_, s.batch, s.out_channels, s.out_h, s.out_w, pitch, dtype_);
  launch(choice, bias, Act::kIdentity, std::nullopt, y, pitch, &stats);
  return y;
}

void Convolution::run_out(const Affine& affine, Act act, const OptionalTensor& residual, Tensor out) const {
  const ConvShape& s = shape_;
  check_out(out, s, dtype_, x_);
  if (out.numel() == 0) return;
  const KernelChoice choice = choose();
  const bool depthwise = choice.family == Family::kDepthwiseMma || choice.family == Family::kDepthwise;
  const int64_t pitch = row_stride(out);
  // Depthwise kernels write dense rows only. The others need whole chunks: tensor maps store 16 bytes at least, so the
  // last channels of an odd width would reach into the neighbour's.
  const bool chunks = s.out_channels % (16 / size_of(dtype_)) == 0 && has_aligned_rows(out, dtype_);
  const bool direct =
      is_row_matrix(out) && chunks && !(depthwise && pitch != s.out_channels) && choice.family != Family::kAten;
  if (direct) {
    launch(choice, affine, act, residual, out, pitch);
  } else {
    torch::stable::copy_(out, run(affine, act, residual, /*pad_pixels=*/true));
  }
}

int64_t Convolution::pixel_pitch() const { return padded_pitch(shape_, dtype_); }

MenuQuery Convolution::query() const { return {shape_, dtype_, allow_tf32_, capability_of(x_)}; }

KernelChoice Convolution::choose() const { return choose_kernel(query()); }

void Convolution::launch(const KernelChoice& choice, const Affine& affine, Act act, const OptionalTensor& residual,
                         const Tensor& y, int64_t pitch, OutputStats* stats) const {
  const ConvShape& s = shape_;
  ConvArgs args;
  args.shape = s;
  args.x = x_.const_data_ptr();
  args.x_strides = strides_of(x_);
  args.weight = weight_.const_data_ptr();
  args.weight_strides = strides_of(weight_);
  args.y = y.mutable_data_ptr();
  args.y_stride = pitch;
  args.residual = nullptr;
  args.residual_strides = {};
  args.affine = affine;
  args.act = act;
  Tensor rows;  // keeps a copied residual alive until the launch
  if (residual.has_value()) {
    rows = residual_rows(*residual, s, dtype_, x_, stream_);
    const int64_t row = row_stride(rows);
    args.residual = rows.const_data_ptr();
    args.residual_strides = {row * s.out_w * s.out_h, 1, row * s.out_w, row};
  }
  switch (choice.family) {
    case Family::kImplicitGemm:
    case Family::kImplicitGemmSm90: run_implicit_gemm(args, choice, stats); break;
    case Family::kDepthwiseMma:
    case Family::kDepthwise: run_depthwise(args, choice, stats); break;
    case Family::kStem: run_stem(args, stats); break;
    case Family::kDirect: run_direct(args); break;
    case Family::kAten: break;
  }
}

void Convolution::run_implicit_gemm(ConvArgs args, const KernelChoice& choice, OutputStats* stats) const {
  const ConvShape& s = shape_;
  const int padded = round_up(s.in_channels, 16 / size_of(dtype_));
  Tensor x = x_, weight = weight_;
  const bool sm90 = choice.family == Family::kImplicitGemmSm90;
  if (!has_aligned_rows(x_, dtype_) || !(sm90 ? has_nested_strides(x_) : has_short_strides(x_, s))) {
    x = empty_channels_last(x_, s.batch, padded, s.in_h, s.in_w, dtype_);
    pack({x_.const_data_ptr(), dtype_of(x_.scalar_type()), strides_of(x_), x.mutable_data_ptr(), dtype_, s.batch,
          s.in_channels, s.in_h, s.in_w, padded},
         stream_);
    args.x = x.const_data_ptr();
    args.x_strides = strides_of(x);
  }
  // Weights in rows (R, S, C), each tap's channels padded to whole chunks: as they lie if they are channels_last (or 1x1)
  // in the compute dtype and C is whole, or have such strides. What lies in the padding is not read.
  const Strides w = strides_of(weight_);
  const int64_t taps = int64_t(s.kernel_h) * s.kernel_w;
  const bool ready = dtype_of(weight_.scalar_type()) == dtype_ && (w.c == 1 || s.in_channels == 1) &&
                     w.n == taps * padded && (taps == 1 || (w.w == padded && w.h == int64_t(s.kernel_w) * padded)) &&
                     reinterpret_cast<uintptr_t>(weight_.const_data_ptr()) % 16 == 0;
  if (!ready) {
    weight = empty_channels_last(weight_, s.out_channels, padded, s.kernel_h, s.kernel_w, dtype_);
    pack({weight_.const_data_ptr(), dtype_of(weight_.scalar_type()), w, weight.mutable_data_ptr(), dtype_,
          s.out_channels, s.in_channels, s.kernel_h, s.kernel_w, padded},
         stream_);
    args.weight = weight.const_data_ptr();
  }
  args.weight_strides = {taps * padded, 1, int64_t(s.kernel_w) * padded, padded};
  if (sm90 && stats != nullptr) {
    stats->allocate(x_, implicit_gemm_sm90_parts(s, choice.sm90), s.out_channels);
    implicit_gemm_sm90_stats(args, dtype_, choice.sm90, stats->parts, stream_);
  } else if (sm90 && choice.once.channels > 0 && fits_implicit_gemm_sm90_once(args, choice.once)) {
    implicit_gemm_sm90_once(args, dtype_, choice.once, stream_);
  } else if (sm90 && choice.shared.channels > 0 && fits_implicit_gemm_sm90_shared(args, choice.shared)) {
    implicit_gemm_sm90_shared(args, dtype_, choice.shared, stream_);
  } else if (sm90) {
    implicit_gemm_sm90(args, dtype_, choice.sm90, stream_);
  } else {
    implicit_gemm(args, dtype_, choice.tile, stream_);
  }
}

void Convolution::run_depthwise(ConvArgs args, const KernelChoice& choice, OutputStats* stats) const {
  const Tensor x = cast_x(), weight = dtype_of(weight_.scalar_type()) == dtype_ ? weight_ : cast_weight();
  args.x = x.const_data_ptr();
  args.x_strides = strides_of(x);
  args.weight = weight.const_data_ptr();
  args.weight_strides = strides_of(weight);
  if (choice.family != Family::kDepthwiseMma || !has_aligned_rows(x, dtype_) || !has_aligned_residual(args, dtype_)) {
    depthwise(args, dtype_, stream_);
  } else if (const int parts = stats != nullptr ? depthwise_mma_parts(shape_, choice.depthwise) : 0; parts > 0) {
    stats->allocate(x_, parts, shape_.out_channels);
    depthwise_mma_stats(args, dtype_, choice.depthwise, stats->parts, stream_);
  } else {
    depthwise_mma(args, dtype_, choice.depthwise, stream_);
  }
}

void Convolution::run_stem(ConvArgs args, OutputStats* stats) const {
  Tensor x = x_;  // half where bfloat16 is asked for, or double, is cast first
  if (const DType given = dtype_of(x_.scalar_type()); given != dtype_ && given != DType::kFloat32) {
    x = cast_x();
    args.x = x.const_data_ptr();
    args.x_strides = strides_of(x);
  }
  const DType x_dtype = dtype_of(x.scalar_type()), weight_dtype = dtype_of(weight_.scalar_type());
  if (const int parts = stats != nullptr ? stem_parts(args, x_dtype, dtype_) : 0; parts > 0) {
    stats->allocate(x_, parts, shape_.out_channels);
    stem_stats(args, x_dtype, weight_dtype, dtype_, stats->parts, stream_);
  } else {
    stem(args, x_dtype, weight_dtype, dtype_, stream_);
  }
}

void Convolution::run_direct(ConvArgs args) const {
  direct(args, dtype_of(x_.scalar_type()), dtype_of(weight_.scalar_type()), dtype_, stream_);
}

// cuDNN's convolution, and what follows it in one pass over its result, in place.
Tensor Convolution::run_aten(const Affine& affine, Act act, const OptionalTensor& residual) const {
  const Tensor z = cudnn_convolution(cast_x(), cast_weight(), geometry_, allow_tf32_);
  const Tensor y = dense_rows(z, dtype_, stream_);
  const bool bare = affine.bias.data == nullptr && affine.mean.data == nullptr;
  if (bare && act == Act::kIdentity && !residual.has_value()) return y;
  BatchNormActArgs args = {};
  args.z = y.const_data_ptr();
  args.rows = shape_.out_pixels();
  args.channels = shape_.out_channels;
  args.affine = affine;
  args.act = act;
  args.y = y.mutable_data_ptr();
  Tensor rows;  // keeps a copied residual alive until the launch
  if (residual.has_value()) {
    rows = residual_rows(*residual, shape_, dtype_, x_, stream_);
    args.residual = rows.const_data_ptr();
    args.residual_stride = row_stride(rows);
  }
  if (dtype_ != DType::kFloat32 || !batch_norm_act_small(args, stream_)) batch_norm_act(args, dtype_, stream_);
  return y;
}

Tensor Convolution::cast_x() const {
  const bool channels_adjacent = shape_.in_channels == 1 || x_.stride(1) == 1;
  if (dtype_of(x_.scalar_type()) == dtype_ && channels_adjacent) return x_;
  return as_row_matrix(x_, dtype_, stream_);
}

Tensor Convolution::cast_weight() const {
  // Rows that the dense kernels read as they lie: of odd widths (460 channels) the cast would else be copied again.
  const int channels = shape_.in_channels;
  const bool odd = size_of(dtype_) == 2 && shape_.groups == 1 && channels > 8 && channels % 8 != 0;
  if (!odd || dtype_of(weight_.scalar_type()) == dtype_) return as_row_matrix(weight_, dtype_, stream_);
  const int pitch = round_up(channels, 8);
  Tensor whole = empty_channels_last(weight_, shape_.out_channels, pitch, shape_.kernel_h, shape_.kernel_w, dtype_);
  pack({weight_.const_data_ptr(), dtype_of(weight_.scalar_type()), strides_of(weight_), whole.mutable_data_ptr(),
        dtype_, shape_.out_channels, channels, shape_.kernel_h, shape_.kernel_w, pitch},
       stream_);
  return torch::stable::narrow(whole, 1, 0, channels);
}

}  // namespace yolo12_fastconv
