// The sm90 implicit GEMM for the forward pass of training, with batch statistics.
#include "implicit_gemm_sm90.cuh"

namespace yolo12_fastconv {

int implicit_gemm_sm90_parts(const ConvShape& shape, const Sm90Plan& plan) {
  return blocks_of_channel_tile(shape, plan);
}

void implicit_gemm_sm90_stats(const ConvArgs& args, DType dtype, const Sm90Plan& plan, const TileStats& stats,
                              cudaStream_t stream) {
  if (args.act != Act::kIdentity || args.residual != nullptr) {
    fail("implicit_gemm_sm90: statistics are of the bare convolution, without activation and residual");
  }
  run<true, __half, __nv_bfloat16>(args, dtype, plan, stats, stream);
}

}  // namespace yolo12_fastconv
