// Launchers that only a training step needs, beside those in kernels.h and gradient_kernels.h.
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"
#include "gradient_kernels.h"

namespace yolo12_fastconv {

// batch_norm_act() whose rows of y lie y_stride >= channels elements apart. kernels/batch_norm.cu
void batch_norm_act_strided(const BatchNormActArgs& args, int64_t y_stride, DType dtype, cudaStream_t stream);

// batch_norm_stats() and, with what it gives, batch_norm_act_strided(): of the same z, rows and channels. act.affine.mean and var
// are stats.mean and stats.var. The two passes go through z in opposite directions. kernels/batch_norm.cu
void batch_norm_stats_act(const BatchNormStatsArgs& stats, const RunningStatsArgs* running, const BatchNormActArgs& act,
                          int64_t y_stride, DType dtype, cudaStream_t stream);

// batch_norm_backward() and, unless filter is null, transpose_filter(), which what follows reads. kernels/batch_norm.cu
void batch_norm_backward_and_filter(const BatchNormBackwardArgs& args, const TransposeFilterArgs* filter, DType dtype,
                                    cudaStream_t stream);

// out = in[0] + in[1], and with three maps + in[2], in this order, each sum rounded to the dtype. All (rows, channels); `out` may
// be one of them. kernels/add_rows.cu
struct AddRowsArgs {
  const void* in[3];
  int64_t in_stride[3];  // between rows, in elements
  int count;             // 2 or 3
  void* out;
  int64_t out_stride;
  int64_t rows;
  int channels;
};
void add_rows(const AddRowsArgs& args, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
