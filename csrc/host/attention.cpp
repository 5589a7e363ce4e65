// Area attention: the kernels where they serve, else ATen.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <climits>

#include "device/attention.h"
#include "ops.h"
#include "targets.h"

namespace yolo12_fastconv {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

AttentionOutputs attention_on_aten(const Tensor& qkv, int64_t num_heads, int64_t area, double scale, bool with_values) {
  std::array<StableIValue, 5> stack = {from(qkv), from(num_heads), from(area), from(scale), from(with_values)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("yolo12_fastconv::area_attention_aten", "", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1]), to<Tensor>(stack[2])};
}

Tensor attention_backward_on_aten(const Tensor& grad_out, const OptionalTensor& grad_values, const Tensor& qkv,
                                  const Tensor& out, const Tensor& logsumexp, int64_t num_heads, int64_t area,
                                  double scale) {
  std::array<StableIValue, 8> stack = {from(grad_out),  from(grad_values), from(qkv),  from(out),
                                       from(logsumexp), from(num_heads),   from(area), from(scale)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("yolo12_fastconv::area_attention_backward_aten", "", stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

// The sizes of a call, after checking those that go in; the same checks as in yolo12_fastconv/_shapes.py.
struct Sizes {
  int64_t batch, channels, height, width, pixels, heads, areas;

  Sizes(const Tensor& qkv, int64_t num_heads, int64_t area) : heads(num_heads), areas(area) {
    if (qkv.dim() != 4) fail("qkv must be (B, 3 * C, H, W), got ", qkv.dim(), " dimensions");
    if (heads <= 0) fail("num_heads must be positive, got ", heads);
    if (areas <= 0) fail("area must be positive, got ", areas);
    batch = qkv.size(0), channels = qkv.size(1) / 3, height = qkv.size(2), width = qkv.size(3);
    pixels = height * width;
    if (qkv.size(1) % (3 * heads) != 0) {
      fail("qkv has ", qkv.size(1), " channels, not a multiple of 3 * num_heads = ", 3 * heads);
    }
    if (pixels % areas != 0) {
      fail("qkv has ", height, " x ", width, " = ", pixels, " pixels, not a multiple of area=", areas);
    }
  }

  AttentionShape shape(double scale) const {
    if (batch * pixels * heads > INT_MAX) fail("qkv has ", batch, " x ", pixels, " pixels: split the batch");
    AttentionShape s;
    s.sequences = static_cast<int>(batch * areas);
    s.areas = static_cast<int>(areas);
    s.heads = static_cast<int>(heads);
    s.length = static_cast<int>(pixels / areas);
    s.scale = static_cast<float>(scale);
    return s;
  }
};

// What the kernels are written for. The fake kernel in yolo12_fastconv/ops.py asks the same.
bool attention_kernel_serves(const Tensor& qkv, const Sizes& sizes) {
  return dtype_of(qkv.scalar_type()) != DType::kFloat64 && sizes.channels == sizes.heads * kHeadDim;
}

bool backward_kernel_serves(const Tensor& qkv, const Sizes& sizes) {
  return attention_kernel_serves(qkv, sizes) && dtype_of(qkv.scalar_type()) != DType::kFloat32;
}

// `tensor` itself if it is a row matrix of `dtype` that can be read 16 bytes at a time, else a dense copy.
Tensor aligned_rows(const Tensor& tensor, DType dtype) {
  if (dtype_of(tensor.scalar_type()) == dtype && is_row_matrix(tensor) &&
      row_stride(tensor) * size_of(dtype) % 16 == 0 && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0) {
    return tensor;
  }
  Tensor copy = empty_channels_last(tensor, tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3), dtype);
  return torch::stable::copy_(copy, tensor);
}

Tensor dense_aligned_rows(const Tensor& tensor, DType dtype) {
  const Tensor rows = aligned_rows(tensor, dtype);
  if (row_stride(rows) == rows.size(1)) return rows;
  Tensor copy = empty_channels_last(tensor, tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3), dtype);
  return torch::stable::copy_(copy, tensor);
}

Tensor empty_logsumexp(const Tensor& like, const Sizes& s) {
  return empty_dense(like, {s.batch, s.heads, s.pixels}, DType::kFloat32);
}

void check_gradient(const Tensor& grad, const char* name, const Sizes& s, const Tensor& qkv) {
  if (grad.dim() != 4 || grad.size(0) != s.batch || grad.size(1) != s.channels || grad.size(2) != s.height ||
      grad.size(3) != s.width) {
    fail(name, " must be ", s.batch, "x", s.channels, "x", s.height, "x", s.width);
  }
  if (!grad.is_cuda() || grad.get_device_index() != qkv.get_device_index()) {
    fail(name, " must be on the device of qkv, cuda:", qkv.get_device_index());
  }
}

}  // namespace

AttentionOutputs area_attention(Tensor qkv, int64_t num_heads, int64_t area, double scale, bool with_values) {
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const Sizes s(qkv, num_heads, area);
  const bool serves = attention_kernel_serves(qkv, s);
  if (!serves || capability_of(qkv) < 80) {
    auto [out, values, logsumexp] = attention_on_aten(qkv, num_heads, area, scale, with_values);
    return {out, values, serves ? empty_logsumexp(qkv, s) : logsumexp};  // nobody reads it then
  }
  const DType dtype = dtype_of(qkv.scalar_type());
  const Tensor rows = aligned_rows(qkv, dtype);
  Tensor out = empty_channels_last(qkv, s.batch, s.channels, s.height, s.width, dtype);
  Tensor values = with_values ? empty_channels_last(qkv, s.batch, s.channels, s.height, s.width, dtype)
                              : empty_vector(qkv, 0, dtype);
  Tensor logsumexp = empty_logsumexp(qkv, s);
  AttentionArgs args;
  args.shape = s.shape(scale);
  args.qkv = rows.const_data_ptr();
  args.qkv_stride = row_stride(rows);
  args.out = out.mutable_data_ptr();
  args.values = with_values ? values.mutable_data_ptr() : nullptr;
  args.logsumexp = static_cast<float*>(logsumexp.mutable_data_ptr());
  if (dtype == DType::kFloat32) {
    attention_float_forward(args, current_stream(qkv));
  } else {
    attention_forward(args, dtype, current_stream(qkv));
  }
  return {out, values, logsumexp};
}

Tensor area_attention_backward(Tensor grad_out, OptionalTensor grad_values, Tensor qkv, Tensor out, Tensor logsumexp,
                               int64_t num_heads, int64_t area, double scale) {
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
  const Sizes s(qkv, num_heads, area);
  if (!backward_kernel_serves(qkv, s) || capability_of(qkv) < 80) {
    return attention_backward_on_aten(grad_out, grad_values, qkv, out, logsumexp, num_heads, area, scale);
  }
  check_gradient(grad_out, "grad_out", s, qkv);
  check_gradient(out, "out", s, qkv);
  if (grad_values.has_value()) check_gradient(*grad_values, "grad_values", s, qkv);
  if (!logsumexp.is_cuda() || logsumexp.scalar_type() != ScalarType::Float || !logsumexp.is_contiguous() ||
      logsumexp.numel() != s.batch * s.heads * s.pixels) {
    fail("logsumexp must be what area_attention returned: float32, ", s.batch, "x", s.heads, "x", s.pixels);
  }
  const DType dtype = dtype_of(qkv.scalar_type());
  const Tensor qkv_rows = aligned_rows(qkv, dtype), out_rows = dense_aligned_rows(out, dtype);
  const Tensor grad_rows = aligned_rows(grad_out, dtype);
  const OptionalTensor values_rows =
      grad_values.has_value() ? OptionalTensor(aligned_rows(*grad_values, dtype)) : std::nullopt;
  Tensor grad_qkv = empty_channels_last(qkv, s.batch, 3 * s.channels, s.height, s.width, dtype);
  AttentionBackwardArgs args;
  args.shape = s.shape(scale);
  args.qkv = qkv_rows.const_data_ptr();
  args.qkv_stride = row_stride(qkv_rows);
  args.out = out_rows.const_data_ptr();
  args.grad_out = grad_rows.const_data_ptr();
  args.grad_out_stride = row_stride(grad_rows);
  if (values_rows.has_value()) {
    args.grad_values = values_rows->const_data_ptr();
    args.grad_values_stride = row_stride(*values_rows);
  }
  args.logsumexp = static_cast<const float*>(logsumexp.const_data_ptr());
  args.grad_qkv = grad_qkv.mutable_data_ptr();
  if (is_backward_faster_on_sm90(args.shape) && serves_sm90(capability_of(qkv))) {
    attention_backward_sm90(args, dtype, current_stream(qkv));
  } else {
    attention_backward(args, dtype, current_stream(qkv));
  }
  return grad_qkv;
}

}  // namespace yolo12_fastconv
