// The buffers of a batch norm, checked.
#pragma once

#include "tensors.h"

namespace yolo12_fastconv {

// What moves running_mean and running_var by a batch of `count` values per channel; nothing if, as in nn.BatchNorm2d, a
// cumulative average has no counter. Raises where sizes, dtypes or devices do not fit together.
std::optional<RunningStatsArgs> running_stats_args(const Tensor& running_mean, const Tensor& running_var,
                                                   const OptionalTensor& num_batches_tracked, const Tensor& mean,
                                                   const Tensor& var, std::optional<double> momentum, int64_t count);

}  // namespace yolo12_fastconv
