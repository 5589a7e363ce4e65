// The sm90 implicit GEMM whose blocks share work (Sm90Plan::shares()): half and bfloat16.
#include "implicit_gemm_sm90.cuh"

namespace yolo12_fastconv {
namespace {

template <class T, bool kPaired>
bool launch_rest(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  if constexpr (is_built_for_hopper()) {
    switch (plan.channels) {
      case 128: return launch<T, 128, false, true, kPaired>(args, dtype, plan, {}, stream), true;
      case 192: return launch<T, 192, false, true, kPaired>(args, dtype, plan, {}, stream), true;
      case 256: return launch<T, 256, false, true, kPaired>(args, dtype, plan, {}, stream), true;
      default: break;
    }
  }
  return false;
}

}  // namespace

bool fits_implicit_gemm_sm90_shared(const ConvArgs& args, const Sm90Plan& plan) {
  const ConvShape& s = args.shape;
  return !is_uneven(args, plan) && (!plan.paired || sm90_pairs_blocks(s, plan)) &&
         (!plan.rest || sm90_deals_rest(s, plan, sm90_tiles(s, plan), blocks_of_channel_tile(s, plan)));
}

void implicit_gemm_sm90_shared(const ConvArgs& args, DType dtype, const Sm90Plan& plan, cudaStream_t stream) {
  bool found = false;
  if (dtype == DType::kFloat16) {
    found = (plan.paired ? launch_rest<__half, true> : launch_rest<__half, false>)(args, dtype, plan, stream);
  } else if (dtype == DType::kBFloat16) {
    found =
        (plan.paired ? launch_rest<__nv_bfloat16, true> : launch_rest<__nv_bfloat16, false>)(args, dtype, plan, stream);
  }
  if (!found)
    fail(kName, ": no kernel whose blocks share work for tiles of ", plan.channels, " channels of ", name_of(dtype));
}

}  // namespace yolo12_fastconv
