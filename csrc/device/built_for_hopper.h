// What of the kernels for compute capability 9.0 is compiled. For CUDA sources.
#pragma once

namespace yolo12_fastconv {

// Whether machine code for 9.0 is compiled at all. If not, kernels that need it are left out.
constexpr bool is_built_for_hopper() {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch == 900) return true;
  }
  return false;
}

}  // namespace yolo12_fastconv
