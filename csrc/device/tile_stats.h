// Batch statistics that a convolution leaves beside its output: what batch norm in training would else read the whole
// output for. Each block writes those of its pixels, and one small kernel puts them together.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"
#include "sm90_plan.h"

namespace yolo12_fastconv {

// Of pixels that are dealt out to `parts` blocks, the same for every channel.
struct TileStats {
  float2* moments;  // (parts, channels): mean and sum of squared deviations from it, of the rounded output
  float* counts;  // (parts): pixels
  int parts;
};

constexpr int64_t tile_stats_bytes(int parts, int channels) {
  return parts * (channels * int64_t(sizeof(float2)) + int64_t(sizeof(float)));
}
inline TileStats tile_stats_at(void* workspace, int parts, int channels) {
  float2* const moments = static_cast<float2*>(workspace);
  return {moments, reinterpret_cast<float*>(moments + int64_t(parts) * channels), parts};
}

// Wider tiles have no registers left for the statistics.
constexpr int kSm90MaxStatsChannels = 128;

// Into how many parts the kernel cuts the pixels on the current device.
int implicit_gemm_sm90_parts(const ConvShape& shape, const Sm90Plan& plan);
// implicit_gemm_sm90() with statistics; half and bfloat16, without activation and residual. kernels/implicit_gemm_sm90.cuh
void implicit_gemm_sm90_stats(const ConvArgs& args, DType dtype, const Sm90Plan& plan, const TileStats& stats,
                              cudaStream_t stream);
// As batch_norm_stats(), whose z and workspace it does not read, of float statistics. kernels/tile_stats.cu
void tile_stats_finish(const BatchNormStatsArgs& args, const TileStats& stats, const RunningStatsArgs* running,
                       cudaStream_t stream);

}  // namespace yolo12_fastconv
