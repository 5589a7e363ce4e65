// Shared by the kernels that take batch statistics of channels.
#pragma once

#include "numeric.cuh"

namespace yolo12_fastconv {

// What is subtracted before summing: any value near the mean serves, an infinite or missing one would spread.
template <class Acc>
__device__ __forceinline__ Acc finite_origin(Acc value) {
  return value - value == Acc(0) ? value : Acc(0);
}

template <class Acc>
__device__ __forceinline__ void store_channel(void* vector, DType dtype, int channel, Acc value) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(vector)[channel] = convert<__half>(value); break;
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(vector)[channel] = convert<__nv_bfloat16>(value); break;
    case DType::kFloat32: static_cast<float*>(vector)[channel] = convert<float>(value); break;
    default: static_cast<double*>(vector)[channel] = convert<double>(value); break;
  }
}

template <class Acc>
__device__ __forceinline__ Acc blend(Acc old, Acc batch, Acc factor) {
  return fma(Acc(1) - factor, old, factor * batch);  // spelled out: the same rounding wherever it is compiled
}

// Running statistics of a channel before they move. Asked for before the sums, which take as long to come.
template <class Acc>
struct OldStats {
  Acc mean = 0, var = 0;

  __device__ __forceinline__ void load(const RunningStatsArgs& running, int channel) {
    if (running.running_mean == nullptr) return;
    mean = load_channel<Acc>({running.running_mean, running.running_dtype}, channel, Acc(0));
    var = load_channel<Acc>({running.running_var, running.running_dtype}, channel, Acc(0));
  }
};

// Mean and variance of a channel from the sums of (value - origin) and its square over all rows. running.running_mean is
// null, or the buffers move too, by a momentum that does not depend on the counter.
template <class Acc>
__device__ __forceinline__ void finish_channel(const BatchNormStatsArgs& a, const RunningStatsArgs& running,
                                               const OldStats<Acc>& old, int channel, Acc origin, Acc sum,
                                               Acc squares) {
  const Acc count = static_cast<Acc>(a.rows), share = sum / count;
  const Acc mean = origin + share;
  const Acc spread = (squares - sum * share) / count;
  const Acc var = spread < Acc(0) ? Acc(0) : spread;  // keeps NaN, unlike max
  static_cast<Acc*>(a.mean)[channel] = mean;
  static_cast<Acc*>(a.var)[channel] = var;
  if (running.running_mean == nullptr) return;
  if (channel == 0 && running.num_batches_tracked != nullptr) ++*running.num_batches_tracked;
  const Acc factor = static_cast<Acc>(running.momentum);
  store_channel(running.running_mean, running.running_dtype, channel, blend(old.mean, mean, factor));
  store_channel(running.running_var, running.running_dtype, channel,
                blend(old.var, var * static_cast<Acc>(running.unbias), factor));
}

}  // namespace yolo12_fastconv
