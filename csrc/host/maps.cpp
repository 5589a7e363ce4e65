// Ops that copy and decode feature maps: concatenation with upsampling, and a detection head's outputs.
#include "device/maps.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops.h"

namespace yolo12_fastconv {
namespace {

void check_map(const Tensor& map, const char* name, const Tensor& like) {
  if (map.dim() != 4) fail(name, " must be (N, C, H, W), got ", map.dim(), " dimensions");
  if (!map.is_cuda() || map.get_device_index() != like.get_device_index()) {
    fail(name, " must be on the device of the first tensor, cuda:", like.get_device_index());
  }
}

const char* name_of_scale(int64_t scale) { return scale == 1 ? "H, W" : "H / 2, W / 2"; }

}  // namespace

namespace {

struct ConcatSize {
  int64_t batch, channels, h, w;
};

ConcatSize concat_size(const std::vector<Tensor>& tensors, const std::vector<int64_t>& scales) {
  if (tensors.empty()) fail("tensors must hold at least one tensor");
  if (scales.size() != tensors.size()) {
    fail("scales must have one entry per tensor, got ", scales.size(), " for ", tensors.size());
  }
  const Tensor& first = tensors.front();
  check_map(first, "tensors", first);
  ConcatSize size = {first.size(0), 0, first.size(2) * scales[0], first.size(3) * scales[0]};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    check_map(t, "tensors", first);
    if (scales[i] != 1 && scales[i] != 2) fail("scales must be 1 or 2, got ", scales[i]);
    if (t.size(0) != size.batch || t.size(2) * scales[i] != size.h || t.size(3) * scales[i] != size.w) {
      fail("tensors[", i, "] must be (N, C, ", name_of_scale(scales[i]), ") of ", size.batch, "x", size.h, "x", size.w,
           ", got ", t.size(0), "x", t.size(1), "x", t.size(2), "x", t.size(3));
    }
    size.channels += t.size(1);
  }
  return size;
}

// `out` is a row matrix of `size`.
void concat_into(const Tensor& out, const std::vector<Tensor>& tensors, const std::vector<int64_t>& scales,
                 const ConcatSize& size) {
  if (out.numel() == 0) return;
  const cudaStream_t stream = current_stream(out);
  const DType type = dtype_of(out.scalar_type());
  const int bytes = size_of(type);
  ConcatArgs args;
  args.stride = row_stride(out) * bytes;
  args.batch = static_cast<int>(size.batch);
  args.h = static_cast<int>(size.h);
  args.w = static_cast<int>(size.w);
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (size_t begin = 0; begin < tensors.size(); begin += kMostConcatParts) {
    args.out = to;
    args.count = static_cast<int>(std::min<size_t>(kMostConcatParts, tensors.size() - begin));
    std::vector<Tensor> rows;  // keeps copies alive until the launch
    for (int i = 0; i < args.count; ++i) {
      rows.push_back(as_row_matrix(tensors[begin + i], type, stream));
      const Tensor& t = rows.back();
      args.parts[i] = {t.const_data_ptr(), row_stride(t) * bytes, static_cast<int>(t.size(1) * bytes),
                       static_cast<int>(scales[begin + i])};
      to += t.size(1) * bytes;
    }
    concat_channels(args, stream);
  }
}

}  // namespace

Tensor concat_channels(std::vector<Tensor> tensors, std::vector<int64_t> scales, ScalarType dtype) {
  const ConcatSize size = concat_size(tensors, scales);
  const torch::stable::accelerator::DeviceGuard guard(tensors.front().get_device_index());
  Tensor out = empty_channels_last(tensors.front(), size.batch, size.channels, size.h, size.w, dtype_of(dtype));
  concat_into(out, tensors, scales, size);
  return out;
}

void concat_channels_out(std::vector<Tensor> tensors, std::vector<int64_t> scales, Tensor out) {
  const ConcatSize size = concat_size(tensors, scales);
  check_map(out, "out", tensors.front());
  if (out.size(0) != size.batch || out.size(1) != size.channels || out.size(2) != size.h || out.size(3) != size.w) {
    fail("out must be ", size.batch, "x", size.channels, "x", size.h, "x", size.w);
  }
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  if (is_row_matrix(out)) {
    concat_into(out, tensors, scales, size);
  } else {
    torch::stable::copy_(out, concat_channels(tensors, scales, out.scalar_type()));
  }
}

namespace {

void check_magnified(const Tensor& grad_y) {
  check_map(grad_y, "grad_y", grad_y);
  if (grad_y.size(2) % 2 != 0 || grad_y.size(3) % 2 != 0) {
    fail("grad_y must have even height and width, got ", grad_y.size(2), "x", grad_y.size(3));
  }
}

// `grad_x` is a row matrix.
void sum_magnified(const Tensor& grad_y, const Tensor& grad_x, bool adds) {
  if (grad_x.numel() == 0) return;
  const DType type = dtype_of(grad_y.scalar_type());
  const cudaStream_t stream = current_stream(grad_y);
  const Tensor rows = as_row_matrix(grad_y, type, stream);
  UpsampleBackwardArgs args;
  args.grad_y = rows.const_data_ptr();
  args.grad_y_stride = row_stride(rows);
  args.grad_x = grad_x.mutable_data_ptr();
  args.grad_x_stride = row_stride(grad_x);
  args.batch = grad_x.size(0);
  args.channels = static_cast<int>(grad_x.size(1));
  args.h = static_cast<int>(grad_x.size(2));
  args.w = static_cast<int>(grad_x.size(3));
  args.adds = adds;
  upsample_nearest_backward(args, type, stream);
}

}  // namespace

Tensor upsample_nearest_backward(Tensor grad_y) {
  check_magnified(grad_y);
  const torch::stable::accelerator::DeviceGuard guard(grad_y.get_device_index());
  Tensor grad_x = empty_channels_last(grad_y, grad_y.size(0), grad_y.size(1), grad_y.size(2) / 2, grad_y.size(3) / 2,
                                      dtype_of(grad_y.scalar_type()));
  sum_magnified(grad_y, grad_x, false);
  return grad_x;
}

void upsample_nearest_backward_(Tensor grad_y, Tensor grad_x) {
  check_magnified(grad_y);
  check_map(grad_x, "grad_x", grad_y);
  const int64_t n = grad_y.size(0), c = grad_y.size(1), h = grad_y.size(2) / 2, w = grad_y.size(3) / 2;
  if (grad_x.size(0) != n || grad_x.size(1) != c || grad_x.size(2) != h || grad_x.size(3) != w ||
      grad_x.scalar_type() != grad_y.scalar_type()) {
    fail("grad_x must be ", n, "x", c, "x", h, "x", w, " in the dtype of grad_y");
  }
  const torch::stable::accelerator::DeviceGuard guard(grad_y.get_device_index());
  const Tensor rows = as_row_matrix(grad_x, dtype_of(grad_y.scalar_type()), current_stream(grad_y));
  sum_magnified(grad_y, rows, true);
  if (!is_row_matrix(grad_x)) torch::stable::copy_(grad_x, rows);
}

std::tuple<Tensor, Tensor, Tensor> detect_decode(std::vector<Tensor> boxes, std::vector<Tensor> scores,
                                                 OptionalTensor bin_values, Tensor points, Tensor steps, bool xywh) {
  if (boxes.empty() || boxes.size() != scores.size()) {
    fail("boxes and scores must have one map per level, got ", boxes.size(), " and ", scores.size());
  }
  if (boxes.size() > static_cast<size_t>(kMostDetectLevels)) {
    fail("boxes must have at most ", kMostDetectLevels, " levels, got ", boxes.size());
  }
  const Tensor& first = boxes.front();
  check_map(first, "boxes", first);
  check_map(scores.front(), "scores", first);
  const torch::stable::accelerator::DeviceGuard guard(first.get_device_index());
  const cudaStream_t stream = current_stream(first);
  const DType type = dtype_of(first.scalar_type());
  const int64_t batch = first.size(0), classes = scores.front().size(1);
  if (first.size(1) % 4 != 0 || first.size(1) == 0 || first.size(1) > 4 * kMostDetectBins) {
    fail("boxes must have 4 to ", 4 * kMostDetectBins, " channels, a multiple of 4, got ", first.size(1));
  }

  DetectArgs args;
  args.level_count = static_cast<int>(boxes.size());
  args.batch = static_cast<int>(batch);
  args.bins = static_cast<int>(first.size(1) / 4);
  args.classes = static_cast<int>(classes);
  args.xywh = xywh;
  int64_t anchors = 0;
  std::vector<Tensor> rows;  // keeps copies alive until the launch
  for (int i = 0; i < args.level_count; ++i) {
    for (const Tensor* map : {&boxes[i], &scores[i]}) {
      check_map(*map, "boxes and scores", first);
      const int64_t channels = map == &boxes[i] ? first.size(1) : classes;
      if (map->size(0) != batch || map->size(1) != channels || map->size(2) != boxes[i].size(2) ||
          map->size(3) != boxes[i].size(3) || map->scalar_type() != first.scalar_type()) {
        fail("boxes and scores must agree in batch, map sizes of a level, channels of all levels and dtype; level ", i,
             " is ", map->size(0), "x", map->size(1), "x", map->size(2), "x", map->size(3));
      }
      rows.push_back(as_row_matrix(*map, type, stream));
    }
    const Tensor &box = rows[2 * i], &score = rows[2 * i + 1];
    args.levels[i] = {box.const_data_ptr(), row_stride(box), score.const_data_ptr(), row_stride(score),
                      static_cast<int>(box.size(2) * box.size(3))};
    anchors += box.size(2) * box.size(3);
  }
  if (bin_values.has_value() ? bin_values->numel() != args.bins : args.bins != 1) {
    fail("bin_values must have ", args.bins, " elements, one per bin, and may be absent for one bin alone");
  }
  if (points.dim() != 2 || points.size(0) != 2 || points.size(1) != anchors || steps.numel() != anchors ||
      steps.dim() == 0 || steps.size(steps.dim() - 1) != anchors) {
    fail("points must be 2x", anchors, " and steps 1x", anchors, " for these maps, got ", points.numel(), " and ",
         steps.numel(), " elements");
  }
  for (const Tensor* t : {&points, &steps}) {
    if (t->scalar_type() != first.scalar_type() || !t->is_cuda() || t->get_device_index() != first.get_device_index()) {
      fail("points and steps must have the dtype and device of boxes");
    }
  }
  Tensor bins;
  if (bin_values.has_value()) {
    if (!bin_values->is_cuda() || bin_values->get_device_index() != first.get_device_index()) {
      fail("bin_values must be on the device of boxes, cuda:", first.get_device_index());
    }
    bins = bin_values->scalar_type() == first.scalar_type() ? *bin_values
                                                            : torch::stable::to(*bin_values, first.scalar_type());
    if (!bins.is_contiguous()) bins = torch::stable::contiguous(bins);
  }
  args.bin_values = bin_values.has_value() ? bins.const_data_ptr() : nullptr;
  args.points = points.const_data_ptr();
  args.points_strides[0] = points.stride(0);
  args.points_strides[1] = points.stride(1);
  args.steps = steps.const_data_ptr();
  args.steps_stride = steps.stride(steps.dim() - 1);

  Tensor y = empty_dense(first, {batch, 4 + classes, anchors}, type);
  Tensor all_boxes = empty_dense(first, {batch, first.size(1), anchors}, type);
  Tensor all_scores = empty_dense(first, {batch, classes, anchors}, type);
  args.y = y.mutable_data_ptr();
  args.boxes = all_boxes.mutable_data_ptr();
  args.scores = all_scores.mutable_data_ptr();
  detect_decode(args, type, stream);
  return {y, all_boxes, all_scores};
}

}  // namespace yolo12_fastconv
