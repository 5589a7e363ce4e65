#include "running_stats.h"

#include <torch/csrc/stable/accelerator.h>

#include "device/kernels.h"
#include "ops.h"

namespace yolo12_fastconv {

std::optional<RunningStatsArgs> running_stats_args(const Tensor& running_mean, const Tensor& running_var,
                                                   const OptionalTensor& num_batches_tracked, const Tensor& mean,
                                                   const Tensor& var, std::optional<double> momentum, int64_t count) {
  const int64_t channels = running_mean.numel();
  if (count < 2) fail("count must be at least 2, since there is no unbiased variance of ", count, " values");
  for (const Tensor* t : {&running_mean, &running_var, &mean, &var}) {
    if (!t->is_cuda() || t->get_device_index() != running_mean.get_device_index() || t->numel() != channels ||
        !t->is_contiguous()) {
      fail(
          "running_mean, running_var, mean and var must be contiguous vectors of one length on one device; "
          "running_mean "
          "has ",
          channels, " elements, another ", t->numel());
    }
  }
  if (running_mean.scalar_type() != running_var.scalar_type() || mean.scalar_type() != var.scalar_type()) {
    fail("running_mean and running_var must have one dtype, and so must mean and var");
  }
  RunningStatsArgs args;
  args.num_batches_tracked = nullptr;
  if (num_batches_tracked.has_value()) {
    if (!num_batches_tracked->is_cuda() || num_batches_tracked->scalar_type() != ScalarType::Long) {
      fail("num_batches_tracked must be an int64 tensor on the device of running_mean");
    }
    args.num_batches_tracked = static_cast<int64_t*>(num_batches_tracked->mutable_data_ptr());
  } else if (!momentum.has_value()) {
    return std::nullopt;
  }
  args.running_mean = running_mean.mutable_data_ptr();
  args.running_var = running_var.mutable_data_ptr();
  args.running_dtype = dtype_of(running_mean.scalar_type());
  args.mean = mean.const_data_ptr();
  args.var = var.const_data_ptr();
  args.stats_dtype = dtype_of(mean.scalar_type());
  args.channels = static_cast<int>(channels);
  args.momentum = momentum.value_or(-1.0);
  args.unbias = static_cast<double>(count) / static_cast<double>(count - 1);
  return args;
}

void update_running_stats_(Tensor running_mean, Tensor running_var, OptionalTensor num_batches_tracked, Tensor mean,
                           Tensor var, std::optional<double> momentum, int64_t count) {
  const torch::stable::accelerator::DeviceGuard guard(running_mean.get_device_index());
  const auto args = running_stats_args(running_mean, running_var, num_batches_tracked, mean, var, momentum, count);
  if (args.has_value()) update_running_stats(*args, current_stream(running_mean));
}

}  // namespace yolo12_fastconv
