#include "tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "device/kernels.h"
#include "device/maps.h"

namespace yolo12_fastconv {
namespace {

Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                     int32_t dtype) {
  AtenTensorHandle handle = nullptr;
  // The stable ABI says that it failed, and not why; with sizes that are right there is one reason. Ultralytics tries again
  // with a smaller batch if it reads "out of memory".
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle) != AOTI_TORCH_SUCCESS) {
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    fail("CUDA out of memory: no room for a tensor of ", elements, " elements on cuda:", like.get_device_index());
  }
  return Tensor(handle);
}

int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return aoti_torch_dtype_float16();
    case DType::kBFloat16: return aoti_torch_dtype_bfloat16();
    case DType::kFloat32: return aoti_torch_dtype_float32();
    case DType::kFloat64: return aoti_torch_dtype_float64();
  }
  fail("no torch dtype for dtype code ", static_cast<int>(dtype));
}

}  // namespace

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    default:
      fail("dtype ", torch::headeronly::toString(type), " is not supported: use float16, bfloat16, float32 or float64");
  }
}

ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return ScalarType::Half;
    case DType::kBFloat16: return ScalarType::BFloat16;
    case DType::kFloat32: return ScalarType::Float;
    default: return ScalarType::Double;
  }
}

Tensor empty_channels_last(const Tensor& like, int64_t n, int64_t c, int64_t h, int64_t w, DType dtype) {
  return empty_rows(like, n, c, h, w, c, dtype);
}

Tensor empty_rows(const Tensor& like, int64_t n, int64_t c, int64_t h, int64_t w, int64_t pitch, DType dtype) {
  return empty_strided(like, {n, c, h, w}, {h * w * pitch, 1, w * pitch, pitch}, torch_dtype(dtype));
}

Tensor empty_vector(const Tensor& like, int64_t size, DType dtype) {
  return empty_strided(like, {size}, {1}, torch_dtype(dtype));
}

Tensor empty_dense(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return empty_strided(like, sizes, strides, torch_dtype(dtype));
}

Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                     DType dtype) {
  return empty_strided(like, sizes, strides, torch_dtype(dtype));
}

Tensor empty_bytes(const Tensor& like, int64_t size) {
  return empty_strided(like, {size}, {1}, aoti_torch_dtype_uint8());
}

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

int capability_of(const Tensor& tensor) {
  // Asked several times by every op, and an immutable fact; 0: not known yet.
  constexpr int kMostDevices = 64;
  static std::array<std::atomic<int>, kMostDevices> known{};
  const int device = tensor.get_device_index();
  if (device < kMostDevices) {
    if (const int capability = known[device].load(std::memory_order_relaxed); capability != 0) return capability;
  }
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    fail("cannot read the compute capability of CUDA device ", device);
  }
  const int capability = major * 10 + minor;
  if (device < kMostDevices) known[device].store(capability, std::memory_order_relaxed);
  return capability;
}

Strides strides_of(const Tensor& tensor) {
  const auto s = tensor.strides();
  return {s[0], s[1], s[2], s[3]};
}

int64_t row_stride(const Tensor& tensor) {
  // From whichever dimension has more than one pixel: the stride of a dimension of size 1 means nothing.
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  return size[3] > 1 ? stride[3] : size[2] > 1 ? stride[2] : size[0] > 1 ? stride[0] : size[1];
}

bool is_row_matrix(const Tensor& tensor) {
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  const int64_t row = row_stride(tensor);
  return (size[1] == 1 || stride[1] == 1) && row >= size[1] && (size[2] == 1 || stride[2] == size[3] * row) &&
         (size[0] == 1 || stride[0] == size[2] * size[3] * row);
}

bool has_nested_strides(const Tensor& tensor) {
  int64_t inner = 1;
  for (const int dim : {3, 2, 0}) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) <= 0 || tensor.stride(dim) % inner != 0) return false;
    inner = tensor.stride(dim);
  }
  return true;
}

namespace {

Tensor copy_to_rows(const Tensor& tensor, DType dtype, cudaStream_t stream) {
  const DType have = dtype_of(tensor.scalar_type());
  const auto size = tensor.sizes();
  Tensor copy = empty_channels_last(tensor, size[0], size[1], size[2], size[3], dtype);
  // Whole images with gaps between them (a level of a detection head's gradient): as many bytes at once as are aligned.
  const auto stride = tensor.strides();
  const int64_t image = size[1] * size[2] * size[3] * size_of(dtype);
  if (have == dtype && stride[1] == 1 && stride[3] == size[1] && stride[2] == size[3] * size[1] &&
      stride[0] * size_of(dtype) >= image && image <= std::numeric_limits<int>::max()) {
    ConcatArgs args;
    args.parts[0] = {tensor.const_data_ptr(), stride[0] * size_of(dtype), static_cast<int>(image), 1};
    args.count = 1;
    args.out = copy.mutable_data_ptr();
    args.stride = image;
    args.batch = static_cast<int>(size[0]);
    args.h = args.w = 1;
    concat_channels(args, stream);
    return copy;
  }
  pack({tensor.const_data_ptr(), have, strides_of(tensor), copy.mutable_data_ptr(), dtype, size[0],
        static_cast<int>(size[1]), static_cast<int>(size[2]), static_cast<int>(size[3]), static_cast<int>(size[1])},
       stream);
  return copy;
}

}  // namespace

Tensor as_row_matrix(const Tensor& tensor, DType dtype, cudaStream_t stream) {
  const bool ready = dtype_of(tensor.scalar_type()) == dtype && is_row_matrix(tensor);
  return ready ? tensor : copy_to_rows(tensor, dtype, stream);
}

Tensor dense_rows(const Tensor& tensor, DType dtype, cudaStream_t stream) {
  const bool ready =
      dtype_of(tensor.scalar_type()) == dtype && is_row_matrix(tensor) && row_stride(tensor) == tensor.size(1);
  return ready ? tensor : copy_to_rows(tensor, dtype, stream);
}

Tensor residual_rows(const Tensor& residual, const ConvShape& s, DType dtype, const Tensor& like, cudaStream_t stream) {
  if (residual.dim() != 4 || residual.size(0) != s.batch || residual.size(1) != s.out_channels ||
      residual.size(2) != s.out_h || residual.size(3) != s.out_w) {
    fail("residual must be ", s.batch, "x", s.out_channels, "x", s.out_h, "x", s.out_w);
  }
  if (!residual.is_cuda() || residual.get_device_index() != like.get_device_index()) {
    fail("residual must be on the device of x, cuda:", like.get_device_index());
  }
  return as_row_matrix(residual, dtype, stream);
}

OptionalTensor cast_bias(const OptionalTensor& bias, ScalarType dtype) {
  if (!bias.has_value() || bias->scalar_type() == dtype) return bias;
  return torch::stable::to(*bias, dtype);
}

ChannelVector channel_vector(const OptionalTensor& vector, const char* name, int64_t channels, const Tensor& like,
                             std::vector<Tensor>& keep_alive) {
  if (!vector.has_value()) return {};
  if (vector->dim() != 1 || vector->size(0) != channels) {
    fail(name, " must have shape (", channels, ",), got ", vector->dim(), " dimensions and ", vector->numel(),
         " elements");
  }
  if (!vector->is_cuda() || vector->get_device_index() != like.get_device_index()) {
    fail(name, " must be on the device of x, cuda:", like.get_device_index());
  }
  // Parameters and buffers are contiguous; a strided view is copied.
  const Tensor dense = vector->is_contiguous() ? *vector : torch::stable::contiguous(*vector);
  keep_alive.push_back(dense);
  return {dense.const_data_ptr(), dtype_of(dense.scalar_type())};
}

}  // namespace yolo12_fastconv
