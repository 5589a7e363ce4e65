// The sm90 implicit GEMM for inference and for input gradients.
#include "implicit_gemm_sm90.cuh"

namespace yolo12_fastconv {

void implicit_gemm_sm90(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  run<false>(args, dtype, plan, {}, stream);
}

}  // namespace yolo12_fastconv
