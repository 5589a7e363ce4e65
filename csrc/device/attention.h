// Arguments and launchers of area attention. kernels/attention.cu, kernels/attention_backward.cu
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "args.h"

namespace yolo12_fastconv {

// Channels of a head that there are kernels for: every YOLO12 has 32.
constexpr int kHeadDim = 32;

// The pixels of a map as rows of channels, those of all pictures one behind the other. Areas are runs of `length` rows,
// `sequences` in all. In qkv a head has 3 * kHeadDim channels (query, key, value), elsewhere kHeadDim.
struct AttentionShape {
  int sequences = 0, areas = 0;  // areas: of one picture
  int heads = 0, length = 0;
  float scale = 0.0f;
};

struct AttentionArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  int64_t qkv_stride = 0;      // elements from row to row
  void* out = nullptr;         // dense rows
  void* values = nullptr;      // dense rows, or null
  float* logsumexp = nullptr;  // (picture, head, pixel)
};

struct AttentionBackwardArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  int64_t qkv_stride = 0;
  const void* out = nullptr;  // dense rows
  const void* grad_out = nullptr;
  int64_t grad_out_stride = 0;
  const void* grad_values = nullptr;  // or null
  int64_t grad_values_stride = 0;
  const float* logsumexp = nullptr;
  void* grad_qkv = nullptr;  // dense rows
};

// Half and bfloat16, from compute capability 8.0 on; all rows aligned to 16 bytes.
void attention_forward(const AttentionArgs& args, DType dtype, cudaStream_t stream);
void attention_backward(const AttentionBackwardArgs& args, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
