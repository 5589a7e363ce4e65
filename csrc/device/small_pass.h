// batch_norm_act() over few elements. kernels/small_pass.cu
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"

namespace yolo12_fastconv {

// batch_norm_act() in float, if its arguments are those that the kernel takes: at most kSmallPassWords words of 16 bytes,
// every vector in float, everything aligned to 16 bytes. Returns whether they are; if not, nothing is launched.
bool batch_norm_act_small(const BatchNormActArgs& args, cudaStream_t stream);

// What all threads of an H200 hold at once.
constexpr int kSmallPassWords = 132 * 2048;

}  // namespace yolo12_fastconv
