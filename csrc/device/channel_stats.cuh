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
  int64_t batches = 0;

  __device__ __forceinline__ void load(const RunningStatsArgs& running, int channel) {
    if (running.running_mean == nullptr) return;
    mean = load_channel<Acc>({running.running_mean, running.running_dtype}, channel, Acc(0));
    var = load_channel<Acc>({running.running_var, running.running_dtype}, channel, Acc(0));
    if (channel == 0 && running.num_batches_tracked != nullptr) batches = *running.num_batches_tracked;
  }
};

// Mean and sum of squared deviations of `count` rows from their sums of (value - origin) and its square.
template <class Acc>
struct Moments {
  Acc mean, squares;
};
template <class Acc>
__device__ __forceinline__ Moments<Acc> moments_of(Acc sum, Acc squares, Acc count, Acc origin) {
  const Acc share = sum / count;
  return {origin + share, squares - sum * share};
}

// Adds the moments of `count` more rows to sums of (value - origin) and its square (Chan et al.). With the mean of any of
// the parts as the origin, a mean far from zero does not cost bits.
template <class Acc>
__device__ __forceinline__ void add_moments(Acc& sum, Acc& squares, const Moments<Acc>& part, Acc count, Acc origin) {
  const Acc d = part.mean - origin;
  sum += count * d;
  squares += part.squares + count * d * d;
}

template <class Acc>
struct MeanVar {
  Acc mean, var;
};
template <class Acc>
__device__ __forceinline__ MeanVar<Acc> mean_var_of(Acc sum, Acc squares, Acc count, Acc origin) {
  const Moments<Acc> all = moments_of(sum, squares, count, origin);
  const Acc var = all.squares / count;
  return {all.mean, var < Acc(0) ? Acc(0) : var};  // keeps NaN, unlike max
}

// Stores a channel's statistics. running.running_mean is null, or the buffers move too, by a momentum that does not depend
// on the counter.
template <class Acc>
__device__ __forceinline__ void store_stats(const BatchNormStatsArgs& a, const RunningStatsArgs& running,
                                            const OldStats<Acc>& old, int channel, const MeanVar<Acc>& stats) {
  static_cast<Acc*>(a.mean)[channel] = stats.mean;
  static_cast<Acc*>(a.var)[channel] = stats.var;
  if (running.running_mean == nullptr) return;
  if (channel == 0 && running.num_batches_tracked != nullptr) *running.num_batches_tracked = old.batches + 1;
  const Acc factor = static_cast<Acc>(running.momentum);
  store_channel(running.running_mean, running.running_dtype, channel, blend(old.mean, stats.mean, factor));
  store_channel(running.running_var, running.running_dtype, channel,
                blend(old.var, stats.var * static_cast<Acc>(running.unbias), factor));
}

// Mean and variance of a channel from the sums of (value - origin) and its square over all rows.
template <class Acc>
__device__ __forceinline__ void finish_channel(const BatchNormStatsArgs& a, const RunningStatsArgs& running,
                                               const OldStats<Acc>& old, int channel, Acc origin, Acc sum,
                                               Acc squares) {
  store_stats(a, running, old, channel, mean_var_of(sum, squares, static_cast<Acc>(a.rows), origin));
}

}  // namespace yolo12_fastconv
