// The sm90 implicit GEMM for inference and for input gradients.
#include "implicit_gemm_sm90.cuh"

namespace yolo12_fastconv {

void implicit_gemm_sm90(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return implicit_gemm_sm90_float(args, plan, stream);
  run<false, __half, __nv_bfloat16>(args, dtype, plan, {}, stream);
}

}  // namespace yolo12_fastconv
