// Conversions, SiLU and its derivative, and the fold of batch norm into one scale and shift.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "args.h"

namespace yolo12_fastconv {

// The type that sums and per-channel values of T are computed in.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

template <class To, class From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<To, double>) {
    if constexpr (std::is_same_v<From, float>) {
      return static_cast<double>(value);
    } else {
      return static_cast<double>(static_cast<float>(value));
    }
  } else if constexpr (std::is_same_v<To, float>) {
    return static_cast<float>(value);
  } else if constexpr (std::is_same_v<From, double>) {  // one rounding, not two
    if constexpr (std::is_same_v<To, __half>) {
      return __double2half(value);
    } else {
      return __double2bfloat16(value);
    }
  } else if constexpr (std::is_same_v<To, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else {
    return __float2bfloat16_rn(static_cast<float>(value));
  }
}

// One element of a per-channel vector, whatever its dtype. The branch is uniform over the whole grid.
template <class Acc>
__device__ __forceinline__ Acc load_channel(const ChannelVector& v, int channel, Acc absent) {
  if (v.data == nullptr) return absent;
  switch (v.dtype) {
    case DType::kFloat16: return convert<Acc>(static_cast<const __half*>(v.data)[channel]);
    case DType::kBFloat16: return convert<Acc>(static_cast<const __nv_bfloat16*>(v.data)[channel]);
    case DType::kFloat32: return convert<Acc>(static_cast<const float*>(v.data)[channel]);
    default: return convert<Acc>(static_cast<const double*>(v.data)[channel]);
  }
}

// 1 / sqrt(v). float: off by 2^-22.9 of it at the most, in one instruction instead of 60; subnormals count as 0.
template <class Acc>
__device__ __forceinline__ Acc inverse_root(Acc v) {
  if constexpr (std::is_same_v<Acc, float>) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(v));
    return root;
  } else {
    return 1 / sqrt(v);
  }
}

template <class Acc>
struct ScaleShift {
  Acc scale, shift;
};

template <class Acc>
__device__ __forceinline__ ScaleShift<Acc> scale_shift(Acc bias, Acc gamma, Acc beta, Acc mean, Acc var, double eps) {
  const Acc scale = gamma * inverse_root(var + Acc(eps));
  return {scale, beta + (bias - mean) * scale};
}

// See fold(). P: the dtype of all vectors that are there.
template <class Acc, class P>
__device__ __forceinline__ ScaleShift<Acc> fold_from(const Affine& a, int channel) {
  const auto load = [&](const ChannelVector& v, float absent) {
    return v.data != nullptr ? static_cast<const P*>(v.data)[channel] : convert<P>(absent);
  };
  const P bias = load(a.bias, 0.0f), gamma = load(a.gamma, 1.0f), beta = load(a.beta, 0.0f);
  const P mean = load(a.mean, 0.0f), var = load(a.var, 1.0f);
  return scale_shift(convert<Acc>(bias), convert<Acc>(gamma), convert<Acc>(beta), convert<Acc>(mean), convert<Acc>(var),
                     a.eps);
}

// scale = gamma / sqrt(var + eps), shift = beta + (bias - mean) * scale, in Acc: a fold in half loses bits, and
// overflows for var > 65504. Vectors of one dtype, as in every module, are loaded together: load_channel() branches on the
// dtype, and five of them one after the other wait for memory five times, 1.5 us.
template <class Acc>
__device__ __forceinline__ ScaleShift<Acc> fold(const Affine& a, int channel) {
  if (a.mean.data == nullptr) return {Acc(1), load_channel<Acc>(a.bias, channel, Acc(0))};
  const auto agrees = [&](const ChannelVector& v) { return v.data == nullptr || v.dtype == a.mean.dtype; };
  if (agrees(a.bias) && agrees(a.gamma) && agrees(a.beta) && agrees(a.var)) {
    switch (a.mean.dtype) {
      case DType::kFloat16: return fold_from<Acc, __half>(a, channel);
      case DType::kBFloat16: return fold_from<Acc, __nv_bfloat16>(a, channel);
      case DType::kFloat32: return fold_from<Acc, float>(a, channel);
      default: return fold_from<Acc, double>(a, channel);
    }
  }
  return scale_shift(load_channel<Acc>(a.bias, channel, Acc(0)), load_channel<Acc>(a.gamma, channel, Acc(1)),
                     load_channel<Acc>(a.beta, channel, Acc(0)), load_channel<Acc>(a.mean, channel, Acc(0)),
                     load_channel<Acc>(a.var, channel, Acc(1)), a.eps);
}

// A channel's values as they lie in memory; of double vectors, rounded to float.
struct ChannelBits {
  uint32_t bias, gamma, beta, mean, var;
};

// fold() in two parts, for kernels that have the registers: load_bits() asks for a channel's values without waiting for
// them, as converting them would, so that a kernel's copies can start in between.
__device__ __forceinline__ ChannelBits load_bits(const Affine& a, int channel) {
  const auto load = [channel](const ChannelVector& v) -> uint32_t {
    if (v.data == nullptr) return 0;
    if (v.dtype == DType::kFloat32) return static_cast<const uint32_t*>(v.data)[channel];
    if (v.dtype == DType::kFloat64) {
      return __float_as_uint(static_cast<float>(static_cast<const double*>(v.data)[channel]));
    }
    return static_cast<const uint16_t*>(v.data)[channel];
  };
  return {load(a.bias), load(a.gamma), load(a.beta), load(a.mean), load(a.var)};
}

// Selects instead of branches, of which there would be 20, at 15 cycles each.
__device__ __forceinline__ ScaleShift<float> fold_bits(const Affine& a, const ChannelBits& bits) {
  const auto value = [](const ChannelVector& v, uint32_t word, float absent) {
    const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    const float wide = __uint_as_float(v.dtype == DType::kBFloat16 ? word << 16 : word);
    const float given = v.dtype == DType::kFloat16 ? half : wide;
    return v.data == nullptr ? absent : given;
  };
  const float bias = value(a.bias, bits.bias, 0.0f);
  const ScaleShift<float> folded = scale_shift(bias, value(a.gamma, bits.gamma, 1.0f), value(a.beta, bits.beta, 0.0f),
                                               value(a.mean, bits.mean, 0.0f), value(a.var, bits.var, 1.0f), a.eps);
  const bool normalises = a.mean.data != nullptr;
  return {normalises ? folded.scale : 1.0f, normalises ? folded.shift : bias};
}

// 1 / (1 + exp(-u)). kFast: ex2.approx and rcp.approx, subnormals flushed; the error grows with |u| to 2 + 1.2 |u| ulp of
// float, that is 2^-18 relative at |u| = 40, far under half rounding (2^-11). Infinite and NaN inputs give what the exact
// formula gives.
template <bool kFast, class Acc>
__device__ __forceinline__ Acc sigmoid(Acc u) {
  if constexpr (std::is_same_v<Acc, double>) {
    return 1.0 / (1.0 + exp(-u));
  } else if constexpr (kFast) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(u * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
  } else {
    return 1.0f / (1.0f + expf(-u));
  }
}

// Half outputs take the fast sigmoid, float and double the exact one.
template <class T>
constexpr bool kFastSigmoid = sizeof(T) == 2;

// silu(u) = h + h tanh(h) with h = u / 2: one special function and two multiply-adds, where exp and reciprocal would be
// two and four. tanh.approx errs by 2^-11 of its value, so the result by |u| 2^-12 at most: half a unit in the last
// place of u as half. From compute capability 7.5 on.
__device__ __forceinline__ float silu_of_half(float h) {
  float t;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(t) : "f"(h));
  return fmaf(h, t, h);
}

// What an epilogue multiplies and adds, zeros behind the last channel. `halved`: for silu_of_half; exact.
__device__ __forceinline__ ScaleShift<float> fold_for_epilogue(const Affine& a, int channel, int channels,
                                                               bool halved) {
  ScaleShift<float> folded = {0.0f, 0.0f};
  if (channel < channels) folded = fold<float>(a, channel);
  const float factor = halved ? 0.5f : 1.0f;
  return {folded.scale * factor, folded.shift * factor};
}

// The same in two parts.
__device__ __forceinline__ ChannelBits load_for_epilogue(const Affine& a, int channel, int channels) {
  return channel < channels ? load_bits(a, channel) : ChannelBits{};
}

__device__ __forceinline__ ScaleShift<float> fold_for_epilogue(const Affine& a, const ChannelBits& bits, int channel,
                                                               int channels, bool halved) {
  ScaleShift<float> folded = {0.0f, 0.0f};
  if (channel < channels) folded = fold_bits(a, bits);
  const float factor = halved ? 0.5f : 1.0f;
  return {folded.scale * factor, folded.shift * factor};
}

template <class T, class Acc>
__device__ __forceinline__ Acc activate(Acc u, Act act) {
  return act == Act::kSilu ? u * sigmoid<kFastSigmoid<T>>(u) : u;
}

// d act(u) / du
template <class T, class Acc>
__device__ __forceinline__ Acc activate_gradient(Acc u, Act act) {
  if (act != Act::kSilu) return Acc(1);
  const Acc s = sigmoid<kFastSigmoid<T>>(u);
  return s * (Acc(1) + u * (Acc(1) - s));
}

}  // namespace yolo12_fastconv
