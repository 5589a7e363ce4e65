#include "gradients.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <utility>

#include "aten.h"
#include "device/gradient_kernels.h"
#include "device/kernels.h"
#include "device/training_kernels.h"
#include "gradient_menu.h"

namespace yolo12_fastconv {
namespace {

bool same_strides(const Tensor& a, const Tensor& b) {
  const auto first = a.strides(), second = b.strides();
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (first[dim] != second[dim]) return false;
  }
  return true;
}

Tensor channels_last_in_dtype(const Tensor& grad, DType dtype) {
  const auto size = grad.sizes();
  const auto stride = grad.strides();
  const bool ready = stride[0] == size[1] * size[2] * size[3] && stride[1] == 1 && stride[2] == size[1] * size[3] &&
                     stride[3] == size[1];
  if (ready && dtype_of(grad.scalar_type()) == dtype) return grad;
  Tensor out = empty_channels_last(grad, size[0], size[1], size[2], size[3], dtype);
  return torch::stable::copy_(out, grad);
}

// A copy of `tensor` in `dtype` whose pixels begin at multiples of 16 bytes.
Tensor copy_with_aligned_pixels(const Tensor& tensor, DType dtype, cudaStream_t stream) {
  const int64_t lanes = 16 / size_of(dtype), channels = tensor.size(1);
  const int64_t pitch = round_up(channels, lanes);
  // With all of the padding: the kernel writes that of the last pixel, too.
  Tensor whole = empty_channels_last(tensor, tensor.size(0), pitch, tensor.size(2), tensor.size(3), dtype);
  Tensor copy = pitch == channels ? whole : torch::stable::narrow(whole, 1, 0, channels);
  pack({tensor.const_data_ptr(), dtype_of(tensor.scalar_type()), strides_of(tensor), copy.mutable_data_ptr(), dtype,
        tensor.size(0), static_cast<int>(channels), static_cast<int>(tensor.size(2)), static_cast<int>(tensor.size(3)),
        static_cast<int>(pitch)},
       stream);
  return copy;
}

bool has_aligned_pixels(const Tensor& tensor, DType dtype) {
  const int64_t lanes = 16 / size_of(dtype);
  const auto aligned = [&](int dim) { return tensor.size(dim) == 1 || tensor.stride(dim) % lanes == 0; };
  return dtype_of(tensor.scalar_type()) == dtype && (tensor.size(1) == 1 || tensor.stride(1) == 1) && aligned(0) &&
         aligned(2) && aligned(3) && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// grad_z as the sm90 weight gradient reads it. Widths like 460 need a copy, which serves the gradient of x too.
Tensor grad_for_sm90(const Tensor& grad_z, const Convolution& convolution) {
  const bool ready = has_aligned_pixels(grad_z, convolution.dtype());
  return ready ? grad_z : copy_with_aligned_pixels(grad_z, convolution.dtype(), convolution.stream());
}

// x likewise: 1x1, a matrix of pixels; 3x3, strides that are multiples of each other.
Tensor x_for_sm90(const Tensor& x, const Convolution& convolution) {
  const bool even = is_row_matrix(x) || (!convolution.shape().pointwise() && has_nested_strides(x));
  const bool ready = even && has_aligned_pixels(x, convolution.dtype());
  return ready ? x : copy_with_aligned_pixels(x, convolution.dtype(), convolution.stream());
}

// The filter of the convolution that computes a gradient of x, in the compute dtype, and what makes it.
struct TransposedFilter {
  Tensor filter;
  TransposeFilterArgs args;
};

TransposedFilter empty_transposed_filter(const Convolution& convolution, const Tensor& weight) {
  const ConvShape& s = convolution.shape();
  const DType dtype = convolution.dtype();
  const int filters = s.out_channels / s.groups;
  const Tensor filter = empty_channels_last(weight, s.in_channels, filters, s.kernel_h, s.kernel_w, dtype);
  TransposeFilterArgs args;
  args.in = weight.const_data_ptr();
  args.in_dtype = dtype_of(weight.scalar_type());
  args.in_strides = strides_of(weight);
  args.out = filter.mutable_data_ptr();
  args.out_dtype = dtype;
  args.groups = s.groups;
  args.out_channels = filters;
  args.in_channels = s.in_channels / s.groups;
  args.kernel_h = s.kernel_h;
  args.kernel_w = s.kernel_w;
  return {filter, args};
}

Tensor transposed_filter(const Convolution& convolution, const Tensor& weight) {
  const TransposedFilter made = empty_transposed_filter(convolution, weight);
  transpose_filter(made.args, convolution.stream());
  return made.filter;
}

// grad_x by the forward kernels: the convolution of grad_z with the transposed filter, which `shape` is, plus `added`. With
// `out` it is written there, which may be `added`: a thread reads what it adds before it writes it, and no other does.
Tensor input_gradient(const Convolution& convolution, const ConvShape& shape, const Tensor& grad_z,
                      const Tensor& filter, const OptionalTensor& added, const OptionalTensor& out) {
  const ConvShape& s = convolution.shape();
  const Geometry geometry = {{1, 1}, {shape.pad_h, shape.pad_w}, {s.dilation_h, s.dilation_w}, s.groups};
  const Convolution transposed(grad_z, filter, geometry, convolution.dtype(), convolution.allow_tf32());
  if (!out.has_value()) return transposed.run({}, Act::kIdentity, added);
  transposed.run_out({}, Act::kIdentity, added, *out);
  return *out;
}

// grad_x of a 3x3 convolution with stride 2 by its own kernel.
Tensor strided_input_gradient(const Convolution& convolution, const Tensor& grad_z, const Tensor& filter) {
  const ConvShape& s = convolution.shape();
  const Tensor grad_x = empty_channels_last(grad_z, s.batch, s.in_channels, s.in_h, s.in_w, convolution.dtype());
  StridedDgradArgs args;
  args.shape = s;
  args.grad_z = grad_z.const_data_ptr();
  args.grad_z_stride = row_stride(grad_z);
  args.filter = filter.const_data_ptr();
  args.grad_x = grad_x.mutable_data_ptr();
  strided_dgrad(args, convolution.dtype(), convolution.stream());
  return grad_x;
}

// The same filter, of half the bytes, from the copy that the forward pass has made.
const Tensor& filter_of(const Tensor& weight, const ConvBackwardInputs& in) {
  return in.cast_weight.has_value() ? *in.cast_weight : weight;
}

// Takes 5 us, as long as a launch: once for both halves of a backward.
GradientChoice gradients_of(const Convolution& convolution, const Tensor& x) {
  const DType dtype = convolution.dtype();
  const bool sliced = dtype_of(x.scalar_type()) == dtype && is_row_matrix(x) && row_stride(x) != x.size(1);
  return choose_gradients({convolution.shape(), dtype, convolution.allow_tf32(), capability_of(x)}, sliced);
}

// Whether a kernel of ours computes the gradient of x, from rows of grad_z as act_backward() leaves them.
bool has_own_dgrad(const GradientChoice& own, const Convolution& convolution) {
  const bool aligned = convolution.shape().out_channels % (16 / size_of(convolution.dtype())) == 0;
  return (own.strided_dgrad && aligned) || own.dgrad.has_value();
}

void check_grad(const Tensor& grad, const char* name, const std::vector<int64_t>& wanted) {
  const auto have = grad.sizes();
  if (grad.dim() != 4 || !std::equal(have.begin(), have.end(), wanted.begin())) {
    fail(name, " must have the shape of y, ", wanted[0], "x", wanted[1], "x", wanted[2], "x", wanted[3]);
  }
}

void check_added(const Tensor& added, const char* name, const Tensor& x) {
  const auto have = added.sizes(), wanted = x.sizes();
  if (added.dim() != 4 || !std::equal(have.begin(), have.end(), wanted.begin()) || !added.is_cuda() ||
      added.get_device_index() != x.get_device_index()) {
    fail(name, " must have the shape of x, ", wanted[0], "x", wanted[1], "x", wanted[2], "x", wanted[3],
         ", and be on cuda:", x.get_device_index());
  }
}

// sum += each of `maps`, one after the other, in place; two at most. `sum` is in `dtype`, of any strides.
void add_in_place(Tensor sum, const std::vector<Tensor>& maps, DType dtype, cudaStream_t stream) {
  if (sum.numel() == 0) return;
  std::vector<Tensor> rows = {as_row_matrix(sum, dtype, stream)};
  for (const Tensor& map : maps) rows.push_back(as_row_matrix(map, dtype, stream));
  const Tensor& out = rows.front();
  AddRowsArgs args = {};
  args.count = static_cast<int>(rows.size());
  for (int i = 0; i < args.count; ++i) {
    args.in[i] = rows[i].const_data_ptr();
    args.in_stride[i] = row_stride(rows[i]);
  }
  args.out = out.mutable_data_ptr();
  args.out_stride = row_stride(out);
  args.rows = sum.size(0) * sum.size(2) * sum.size(3);
  args.channels = static_cast<int>(sum.size(1));
  add_rows(args, dtype, stream);
  if (!is_row_matrix(sum)) torch::stable::copy_(sum, out);
}

// The bias gradient: sums of grad_z over the pixels, float for half and float, by the kernel that sums for batch norms.
Tensor bias_gradient(const Tensor& grad_z, DType dtype, DType sum_dtype, cudaStream_t stream) {
  const Tensor rows = dense_rows(grad_z, dtype, stream);
  BatchNormBackwardArgs args = {};
  args.grad_y = args.z = rows.const_data_ptr();
  args.rows = rows.size(0) * rows.size(2) * rows.size(3);
  args.channels = static_cast<int>(rows.size(1));
  args.grad_y_stride = args.channels;
  args.act = Act::kIdentity;
  const Tensor sums = empty_vector(rows, args.channels, sum_dtype),
               unused = empty_vector(rows, args.channels, sum_dtype);
  const Tensor workspace = empty_bytes(rows, batch_norm_workspace_bytes(args.rows, args.channels, dtype));
  args.grad_beta = sums.mutable_data_ptr();
  args.grad_gamma = unused.mutable_data_ptr();
  args.workspace = workspace.mutable_data_ptr();
  batch_norm_backward(args, dtype, stream);
  return sums;
}

// What the kernels of weight gradients read; where they write is for weight_gradient() to say.
WgradArgs wgrad_inputs(const ConvShape& shape, const Tensor& grad_z, const Tensor& x) {
  WgradArgs args = {};
  args.shape = shape;
  args.grad_z = grad_z.const_data_ptr();
  args.grad_z_stride = row_stride(grad_z);
  args.x = x.const_data_ptr();
  args.x_strides = strides_of(x);
  return args;
}

// Whether the stem's kernel reads x and grad_z as they lie.
bool is_for_stem(const Convolution& convolution, const Tensor& grad_z, const Tensor& x) {
  return dtype_of(grad_z.scalar_type()) == convolution.dtype() &&
         wgrad_stem_serves(wgrad_inputs(convolution.shape(), grad_z, x), dtype_of(x.scalar_type()),
                           convolution.dtype());
}

// The weight gradient by our own kernels, in the dtype and strides of `weight`.
Tensor weight_gradient(const Convolution& convolution, const GradientChoice& choice, const Tensor& grad_z,
                       const Tensor& x, const Tensor& weight) {
  const ConvShape& s = convolution.shape();
  const DType dtype = convolution.dtype();
  Tensor grad = torch::stable::empty_like(weight);
  if (grad.numel() == 0) return grad;
  const bool sm90 = choice.wgrad == WgradFamily::kSm90;
  const Tensor workspace = empty_bytes(x, choice.stem ? wgrad_stem_workspace_bytes(s)
                                          : sm90 ? choice.plan.slices * wgrad_slice_floats(s) * int64_t(sizeof(float))
                                                 : wgrad_workspace_bytes(s, dtype));
  WgradArgs args = wgrad_inputs(s, grad_z, x);
  args.grad_weight = grad.mutable_data_ptr();
  args.grad_weight_strides = strides_of(grad);
  args.grad_weight_dtype = dtype_of(grad.scalar_type());
  args.workspace = workspace.mutable_data_ptr();
  if (choice.stem) {
    wgrad_stem(args, dtype_of(x.scalar_type()), dtype, convolution.stream());
  } else if (sm90) {
    wgrad_sm90(args, dtype, choice.plan, convolution.stream());
  } else if (choice.depthwise_sm90 && wgrad_depthwise_sm90_serves(args, dtype)) {
    wgrad_depthwise_sm90(args, dtype, convolution.stream());
  } else {
    wgrad(args, dtype, convolution.stream());
  }
  return grad;
}

bool is_float_or_absent(const ChannelVector& vector) {
  return vector.data == nullptr || vector.dtype == DType::kFloat32;
}

// What pointwise_backward() takes: rows of `channels` neighbours in the compute dtype, aligned to 16 bytes.
bool is_aligned_matrix(const Tensor& tensor, DType dtype) {
  return dtype_of(tensor.scalar_type()) == dtype && is_row_matrix(tensor) && has_aligned_pixels(tensor, dtype);
}

// The whole backward of a 1x1 convolution with batch norm in two passes; nothing where the kernel does not serve.
std::optional<std::pair<ActGrads, ConvGrads>> backward_in_one_pass(const Convolution& convolution, const Tensor& x,
                                                                   const Tensor& weight, const BackwardInputs& in,
                                                                   const std::vector<bool>& wanted) {
  const ConvShape& s = convolution.shape();
  const DType dtype = convolution.dtype();
  const cudaStream_t stream = convolution.stream();
  if (!in.batch_stats || !wanted[kGradX] || !wanted[kGradWeight] || in.conv.bias.has_value()) return std::nullopt;
  const Tensor& filter = filter_of(weight, in.conv);
  const bool dense_filter = filter.stride(0) == s.in_channels && (s.in_channels == 1 || filter.stride(1) == 1);
  const Affine& affine = in.affine;
  if (!is_float_or_absent(affine.gamma) || !is_float_or_absent(affine.beta) || !is_float_or_absent(affine.mean) ||
      !is_float_or_absent(affine.var) || !is_aligned_matrix(x, dtype) || !is_aligned_matrix(in.z, dtype) ||
      !dense_filter || !has_aligned_pixels(filter, dtype)) {
    return std::nullopt;
  }
  check_grad(in.grad_y, "grad_y", {s.batch, s.out_channels, s.out_h, s.out_w});
  const bool in_place = in.conv.grad_x.has_value();
  const OptionalTensor& added = in_place ? in.conv.grad_x : in.conv.add_to_grad_x;
  if (added.has_value()) {
    check_added(*added, in_place ? "grad_x" : "add_to_grad_x", x);
    if (!is_aligned_matrix(*added, dtype)) return std::nullopt;
    if (in_place && in.conv.more.has_value()) {
      check_added(*in.conv.more, "more", x);
      add_in_place(*added, {*in.conv.more}, dtype, stream);
    }
  }
  const Tensor rows = as_row_matrix(in.grad_y, dtype, stream);
  const Tensor grad_y = has_aligned_pixels(rows, dtype) ? rows : copy_with_aligned_pixels(rows, dtype, stream);
  ActGrads act = act_backward(grad_y, in.z, affine, in.act, true, {false, true, true}, stream);
  ConvGrads grads;
  grads.weight = torch::stable::empty_like(weight);
  grads.x = in_place ? *in.conv.grad_x : empty_channels_last(x, s.batch, s.in_channels, s.in_h, s.in_w, dtype);
  const Tensor workspace =
      empty_bytes(x, int64_t(pointwise_backward_slices(s)) * s.out_channels * s.in_channels * int64_t(sizeof(float)));
  PointwiseBackwardArgs args = {};
  args.shape = s;
  args.grad_y = grad_y.const_data_ptr();
  args.grad_y_stride = row_stride(grad_y);
  args.z = in.z.const_data_ptr();
  args.z_stride = row_stride(in.z);
  args.affine = affine;
  args.act = in.act;
  args.grad_beta = static_cast<const float*>(act.beta.const_data_ptr());
  args.grad_gamma = static_cast<const float*>(act.gamma.const_data_ptr());
  args.x = x.const_data_ptr();
  args.x_stride = row_stride(x);
  args.weight = filter.const_data_ptr();
  args.grad_x = grads.x.mutable_data_ptr();
  args.grad_x_stride = row_stride(grads.x);
  if (added.has_value()) {
    args.added = added->const_data_ptr();
    args.added_stride = row_stride(*added);
  }
  args.grad_weight = grads.weight.mutable_data_ptr();
  args.grad_weight_strides = strides_of(grads.weight);
  args.grad_weight_dtype = dtype_of(grads.weight.scalar_type());
  args.workspace = workspace.mutable_data_ptr();
  pointwise_backward(args, dtype, stream);
  return std::make_pair(act, grads);
}

}  // namespace

Tensor or_empty(const Tensor& grad, bool wanted, const Tensor& like, DType dtype) {
  return wanted && grad.defined() ? grad : empty_vector(like, 0, dtype);
}

// An allocation costs as much as a launch, so none is made to compare with.
Tensor in_form_of(const Tensor& grad, const Tensor& like) {
  if (grad.scalar_type() == like.scalar_type() && same_strides(grad, like)) return grad;
  Tensor out = torch::stable::empty_like(like);
  return torch::stable::copy_(out, grad);
}

void check_cast(const Tensor& cast, const Tensor& weight, ScalarType dtype) {
  const auto have = cast.sizes(), wanted = weight.sizes();
  if (cast.scalar_type() != dtype || cast.dim() != 4 || !std::equal(have.begin(), have.end(), wanted.begin()) ||
      !cast.is_cuda() || cast.get_device_index() != weight.get_device_index()) {
    fail("cast_weight must be weight in dtype ", torch::headeronly::toString(dtype), ", from conv_bn_act_train_");
  }
}

Act act_of(int64_t code) {
  if (code != 0 && code != 1) fail("act must be 0 (identity) or 1 (silu), got ", code);
  return static_cast<Act>(code);
}

ActGrads act_backward(const Tensor& grad_y, const Tensor& z, const Affine& affine, Act act, bool batch_stats,
                      const std::vector<bool>& wanted, cudaStream_t stream, const TransposeFilterArgs* filter) {
  const DType dtype = dtype_of(z.scalar_type());
  const DType sum_dtype = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const bool has_bn = affine.mean.data != nullptr;
  const auto size = z.sizes();
  check_grad(grad_y, "grad_y", {size[0], size[1], size[2], size[3]});
  ActGrads grads;
  const Tensor rows = as_row_matrix(grad_y, dtype, stream);
  BatchNormBackwardArgs args;
  args.grad_y = rows.const_data_ptr();
  args.grad_y_stride = row_stride(rows);
  args.z = z.const_data_ptr();
  args.z_stride = static_cast<int>(row_stride(z));
  args.rows = size[0] * size[2] * size[3];
  args.channels = static_cast<int>(size[1]);
  args.affine = affine;
  args.act = act;
  args.batch_stats = batch_stats;
  args.grad_beta = args.grad_gamma = args.workspace = nullptr;
  Tensor workspace;
  if (has_bn && (batch_stats || wanted[1] || wanted[2])) {
    grads.beta = empty_vector(z, args.channels, sum_dtype);
    grads.gamma = empty_vector(z, args.channels, sum_dtype);
    workspace = empty_bytes(z, batch_norm_workspace_bytes(args.rows, args.channels, dtype));
    args.grad_beta = grads.beta.mutable_data_ptr();
    args.grad_gamma = grads.gamma.mutable_data_ptr();
    args.workspace = workspace.mutable_data_ptr();
  }
  args.grad_z = nullptr;
  if (wanted[0]) {
    grads.z = empty_rows(z, size[0], size[1], size[2], size[3], args.z_stride, dtype);
    args.grad_z = grads.z.mutable_data_ptr();
  }
  batch_norm_backward_and_filter(args, filter, dtype, stream);
  return grads;
}

namespace {

// conv_backward() by `own` kernels; `made`: the transposed filter, if it is there already.
ConvGrads conv_backward(const Convolution& convolution, GradientChoice own, const Tensor& grad_of_z, const Tensor& x,
                        const Tensor& weight, const Geometry& geometry, const ConvBackwardInputs& in,
                        const std::vector<bool>& wanted, const OptionalTensor& made) {
  const ConvShape& s = convolution.shape();
  const DType dtype = convolution.dtype();
  const DType x_dtype = dtype_of(x.scalar_type());
  const DType sum_dtype = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const cudaStream_t stream = convolution.stream();
  const bool adds = wanted[kGradX] && in.add_to_grad_x.has_value();
  if (adds) check_added(*in.add_to_grad_x, "add_to_grad_x", x);
  const bool in_place = wanted[kGradX] && in.grad_x.has_value();
  if (in_place) {
    check_added(*in.grad_x, "grad_x", x);
    if (in.grad_x->scalar_type() != x.scalar_type()) fail("grad_x must have the dtype of x");
    if (in.more.has_value()) check_added(*in.more, "more", x);
  }
  if (!wanted[kGradX] && !wanted[kGradWeight] && !wanted[kGradBias]) return {};
  check_grad(grad_of_z, "grad_y", {s.batch, s.out_channels, s.out_h, s.out_w});
  bool added = false;
  ConvGrads grads;
  Tensor grad_z = as_row_matrix(grad_of_z, dtype, stream);
  own.stem = own.stem && is_for_stem(convolution, grad_z, x);
  const bool strided_x = wanted[kGradX] && own.strided_dgrad && has_aligned_pixels(grad_z, dtype);
  const bool own_x = strided_x || (wanted[kGradX] && own.dgrad.has_value());
  const bool own_weight = wanted[kGradWeight] && (own.stem || own.wgrad != WgradFamily::kAten);
  const bool sm90_weight = own_weight && !own.stem && own.wgrad == WgradFamily::kSm90;
  Tensor grad_bias;
  if (wanted[kGradBias]) grad_bias = bias_gradient(grad_z, dtype, sum_dtype, stream);
  if (sm90_weight) grad_z = grad_for_sm90(grad_z, convolution);
  Tensor filter;
  if (own_x) filter = made.has_value() ? *made : transposed_filter(convolution, filter_of(weight, in));
  if (strided_x) {
    grads.x = strided_input_gradient(convolution, grad_z, filter);
  } else if (own_x) {
    // Depthwise kernels write dense rows only.
    const bool sums = in_place && x_dtype == dtype && s.groups == 1;
    if (sums && in.more.has_value()) add_in_place(*in.grad_x, {*in.more}, dtype, stream);
    added = sums || (adds && x_dtype == dtype);
    grads.x = sums ? input_gradient(convolution, *own.dgrad, grad_z, filter, in.grad_x, in.grad_x)
                   : input_gradient(convolution, *own.dgrad, grad_z, filter, added ? in.add_to_grad_x : std::nullopt,
                                    std::nullopt);
  }
  const std::vector<bool> others = {wanted[kGradX] && !own_x, wanted[kGradWeight] && !own_weight, false};
  const bool calls_aten = others[0] || others[1];
  const Tensor cast_x = calls_aten || (own_weight && !sm90_weight && !own.stem) ? convolution.cast_x() : x;
  if (calls_aten) {
    const Tensor cast_weight = in.cast_weight.has_value() ? *in.cast_weight : convolution.cast_weight();
    ConvGrads rest = convolution_backward(grad_z, cast_x, cast_weight, in.bias.has_value(), geometry, others);
    if (own_x) rest.x = grads.x;
    grads = rest;
  }
  if (own_weight) {
    grads.weight = weight_gradient(convolution, own, grad_z, sm90_weight ? x_for_sm90(x, convolution) : cast_x, weight);
  }
  grads.bias = grad_bias;
  if (in_place && !added) {
    std::vector<Tensor> maps;
    if (in.more.has_value()) maps.push_back(*in.more);
    maps.push_back(grads.x);
    add_in_place(*in.grad_x, maps, x_dtype, stream);
  } else if (wanted[kGradX] && !in_place) {
    grads.x = channels_last_in_dtype(grads.x, x_dtype);
    if (adds && !added) add_in_place(grads.x, {*in.add_to_grad_x}, x_dtype, stream);
  }
  if (wanted[kGradWeight]) grads.weight = in_form_of(grads.weight, weight);
  if (wanted[kGradBias]) grads.bias = in_form_of(grads.bias, *in.bias);
  return grads;
}

}  // namespace

ConvGrads conv_backward(const Convolution& convolution, const Tensor& grad_z, const Tensor& x, const Tensor& weight,
                        const Geometry& geometry, const ConvBackwardInputs& in, const std::vector<bool>& wanted) {
  return conv_backward(convolution, gradients_of(convolution, x), grad_z, x, weight, geometry, in, wanted,
                       std::nullopt);
}

Grads backward(const Convolution& convolution, const Tensor& x, const Tensor& weight, const Geometry& geometry,
               const BackwardInputs& in, const std::vector<bool>& wanted) {
  const DType x_dtype = dtype_of(x.scalar_type());
  if (wanted.size() != 5) fail("output_mask must have 5 entries, got ", wanted.size());
  const bool conv_wanted = wanted[kGradX] || wanted[kGradWeight] || wanted[kGradBias];
  ActGrads act;
  ConvGrads grads;
  const GradientChoice own = conv_wanted ? gradients_of(convolution, x) : GradientChoice();
  const auto both = own.one_pass ? backward_in_one_pass(convolution, x, weight, in, wanted) : std::nullopt;
  if (both.has_value()) {
    std::tie(act, grads) = *both;
  } else {
    OptionalTensor made;
    if (in.affine.mean.data == nullptr && in.act == Act::kIdentity) {
      act.z = in.grad_y;
    } else {
      // The filter that the gradient of x needs depends on nothing that comes before: it is made beside it.
      std::optional<TransposedFilter> filter;
      if (wanted[kGradX] && has_own_dgrad(own, convolution)) {
        filter = empty_transposed_filter(convolution, filter_of(weight, in.conv));
        made = filter->filter;
      }
      act = act_backward(in.grad_y, in.z, in.affine, in.act, in.batch_stats,
                         {conv_wanted, wanted[kGradGamma], wanted[kGradBeta]}, convolution.stream(),
                         filter ? &filter->args : nullptr);
    }
    grads = conv_backward(convolution, own, act.z, x, weight, geometry, in.conv, wanted, made);
  }
  if (wanted[kGradGamma] && in.bn_weight.has_value()) act.gamma = in_form_of(act.gamma, *in.bn_weight);
  if (wanted[kGradBeta] && in.bn_bias.has_value()) act.beta = in_form_of(act.beta, *in.bn_bias);
  return {or_empty(grads.x, wanted[kGradX] && !in.conv.grad_x.has_value(), x, x_dtype),
          or_empty(grads.weight, wanted[kGradWeight], x, x_dtype), or_empty(grads.bias, wanted[kGradBias], x, x_dtype),
          or_empty(act.gamma, wanted[kGradGamma], x, x_dtype), or_empty(act.beta, wanted[kGradBeta], x, x_dtype)};
}

}  // namespace yolo12_fastconv
