// Gradient of a 7x7 depthwise weight in half and bfloat16, for compute capability 9.0: stride 1, a multiple of 8
// channels. kernels/wgrad_depthwise_sm90.cu
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"

namespace yolo12_fastconv {

// How many slices the workspace of wgrad() holds then, 0 where there is no kernel for the shape; whether it serves: rows
// of x and grad_z aligned to 16 bytes too, no stride 0.
int wgrad_depthwise_sm90_slices(const ConvShape& shape, DType dtype);
bool wgrad_depthwise_sm90_serves(const WgradArgs& args, DType dtype);
void wgrad_depthwise_sm90(const WgradArgs& args, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
