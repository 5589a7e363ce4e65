// The launchers of all kernel families: what host code may call. Each throws std::runtime_error on a case it has no
// kernel for and on a failed launch.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"
#include "depthwise_plan.h"
#include "sm90_once_plan.h"
#include "sm90_plan.h"
#include "tile_menu.h"

namespace yolo12_fastconv {

// Dense convolution on tensor cores (groups = 1): half, bfloat16, or float in TF32. kernels/implicit_gemm.cu
void implicit_gemm(const ConvArgs& args, DType dtype, const GemmTile& tile, cudaStream_t stream);
// The same in half and bfloat16, for compute capability 9.0. kernels/implicit_gemm_sm90.cuh
void implicit_gemm_sm90(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream);
// The same for plans by which blocks share work, where the GPU and x's layout allow it. kernels/implicit_gemm_sm90_shared.cu
bool fits_implicit_gemm_sm90_shared(const ConvArgs& args, const Sm90Plan& plan);
void implicit_gemm_sm90_shared(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream);
// The same for small grids, 1x1 and 3x3, where layout and alignment allow it. kernels/implicit_gemm_sm90_once.cu
bool fits_implicit_gemm_sm90_once(const ConvArgs& args, const Sm90OncePlan& plan);
void implicit_gemm_sm90_once(const ConvArgs& args, DType dtype, const Sm90OncePlan& plan, cudaStream_t stream);
// One filter per channel, 3x3, 5x5 or 7x7, stride 1 or 2, NHWC. kernels/depthwise.cu
void depthwise(const ConvArgs& args, DType dtype, cudaStream_t stream);
// The same with stride 1 on tensor cores, in half and bfloat16; channels in eights, all pixels aligned to 16 bytes.
// kernels/depthwise_mma.cu
void depthwise_mma(const ConvArgs& args, DType dtype, const DepthwisePlan& plan, cudaStream_t stream);
// 3x3 over at most 4 channels, stride 1 or 2, any strides; x in the compute dtype or float, weight in any; half and
// bfloat16. kernels/stem.cu
void stem(const ConvArgs& args, DType x_dtype, DType weight_dtype, DType dtype, cudaStream_t stream);
// Any convolution, any strides, x and weight in dtypes of their own. kernels/direct.cu
void direct(const ConvArgs& args, DType x_dtype, DType weight_dtype, DType dtype, cudaStream_t stream);
// Layout and dtype copies. kernels/pack.cu
void pack(const PackArgs& args, cudaStream_t stream);

// Gradient of the weight: depthwise in half, bfloat16 and float, dense in float without TF32 and double; has_wgrad says
// whether a convolution is one of those. kernels/wgrad.cu
bool has_wgrad(const ConvShape& shape, DType dtype, bool allow_tf32);
int64_t wgrad_workspace_bytes(const ConvShape& shape, DType dtype);
void wgrad(const WgradArgs& args, DType dtype, cudaStream_t stream);

// Batch norm. kernels/batch_norm.cu
int64_t batch_norm_workspace_bytes(int64_t rows, int channels, DType dtype);
// running: buffers to move by these statistics, whose own pointers it need not have; or null.
void batch_norm_stats(const BatchNormStatsArgs& args, const RunningStatsArgs* running, DType dtype,
                      cudaStream_t stream);
void batch_norm_act(const BatchNormActArgs& args, DType dtype, cudaStream_t stream);
void batch_norm_backward(const BatchNormBackwardArgs& args, DType dtype, cudaStream_t stream);
void update_running_stats(const RunningStatsArgs& args, cudaStream_t stream);

}  // namespace yolo12_fastconv
