// Kernels outside of the sm90 implicit GEMM that leave statistics of their outputs as it does (device/tile_stats.h): half and
// bfloat16, without activation and residual.
#pragma once

#include "args.h"
#include "depthwise_plan.h"
#include "tile_stats.h"

namespace yolo12_fastconv {

// ..._parts(): into how many parts the kernel cuts the pixels on the current device, 0 if it has no statistics.

// depthwise_mma(); no parts without such a kernel (5x5). kernels/depthwise_mma.cu
int depthwise_mma_parts(const ConvShape& shape, const DepthwisePlan& plan);
void depthwise_mma_stats(const ConvArgs& args, DType dtype, const DepthwisePlan& plan, const TileStats& stats,
                         cudaStream_t stream);
// stem(); no parts in float, nor of what is not read and written by whole vectors. kernels/stem.cu
int stem_parts(const ConvArgs& args, DType x_dtype, DType dtype);
void stem_stats(const ConvArgs& args, DType x_dtype, DType weight_dtype, DType dtype, const TileStats& stats,
                cudaStream_t stream);

}  // namespace yolo12_fastconv
