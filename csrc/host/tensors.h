// The little that host code needs of torch's stable C++ API: allocation by strides, checks, the current stream.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "device/args.h"
#include "device/dispatch.h"

namespace yolo12_fastconv {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ScalarType = torch::headeronly::ScalarType;

DType dtype_of(ScalarType type);
ScalarType scalar_type_of(DType dtype);

// Uninitialised (N, C, H, W) tensor with channels_last strides on the device of `like`.
Tensor empty_channels_last(const Tensor& like, int64_t n, int64_t c, int64_t h, int64_t w, DType dtype);
// Likewise with `pitch` >= c elements from pixel to pixel.
Tensor empty_rows(const Tensor& like, int64_t n, int64_t c, int64_t h, int64_t w, int64_t pitch, DType dtype);
// Uninitialised dense tensor, and one of one dimension.
Tensor empty_dense(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype);
Tensor empty_vector(const Tensor& like, int64_t size, DType dtype);
// Uninitialised tensor of any sizes and strides.
Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                     DType dtype);
// Uninitialised bytes.
Tensor empty_bytes(const Tensor& like, int64_t size);

cudaStream_t current_stream(const Tensor& tensor);
// major * 10 + minor
int capability_of(const Tensor& tensor);

Strides strides_of(const Tensor& tensor);

// Channels adjacent, and pixels evenly spaced in order over (N, H, W): what can be read as a matrix with a row stride.
bool is_row_matrix(const Tensor& tensor);
// Each stride a multiple of the one inside it, as in slices and crops of a dense NHWC tensor and as tensor maps want it.
bool has_nested_strides(const Tensor& tensor);
// Elements between neighbouring pixels of a row matrix.
int64_t row_stride(const Tensor& tensor);
// `tensor` itself if it is a row matrix of `dtype`, else a dense channels_last copy.
Tensor as_row_matrix(const Tensor& tensor, DType dtype, cudaStream_t stream);
// Likewise, but only a row matrix without gaps between its rows is returned as it is.
Tensor dense_rows(const Tensor& tensor, DType dtype, cudaStream_t stream);
// The residual of an output of shape `s` as a row matrix; raises if its size or device do not fit.
Tensor residual_rows(const Tensor& residual, const ConvShape& s, DType dtype, const Tensor& like, cudaStream_t stream);

// The bias of a convolution in `dtype`, to which autocast rounds it.
OptionalTensor cast_bias(const OptionalTensor& bias, ScalarType dtype);

// Per-channel vector of `channels` elements on the device of `like`; an absent one is null. Raises naming `name`.
ChannelVector channel_vector(const OptionalTensor& vector, const char* name, int64_t channels, const Tensor& like,
                             std::vector<Tensor>& keep_alive);

}  // namespace yolo12_fastconv
