// The sm90 implicit GEMM in float, with products in TF32.
#include "implicit_gemm_sm90.cuh"

namespace yolo12_fastconv {

void implicit_gemm_sm90_float(const ConvArgs& args, const Sm90Plan& plan, cudaStream_t stream) {
  run<false, float>(args, DType::kFloat32, plan, {}, stream);
}

}  // namespace yolo12_fastconv
