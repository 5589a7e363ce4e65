// The batch norm launcher that writes into a channel slice, beside those in kernels.h.
#pragma once

#include "kernels.h"

namespace yolo12_fastconv {

// batch_norm_act whose rows of y lie y_stride >= channels elements apart. kernels/batch_norm.cu
void batch_norm_act_strided(const BatchNormActArgs& args, int64_t y_stride, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
