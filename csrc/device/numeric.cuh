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

template <class Acc>
struct ScaleShift {
  Acc scale, shift;
};

template <class Acc>
__device__ __forceinline__ ScaleShift<Acc> scale_shift(Acc bias, Acc gamma, Acc beta, Acc mean, Acc var, double eps) {
  Acc invstd;
  if constexpr (std::is_same_v<Acc, float>) {
    invstd = rsqrtf(var + static_cast<float>(eps));  // off by 2 ulp at the most; a square root and a division are 60 steps
  } else {
    invstd = 1 / sqrt(var + eps);
  }
  const Acc scale = gamma * invstd;
  return {scale, beta + (bias - mean) * scale};
}

// A channel's values as they lie in memory; of double vectors, rounded to float.
struct ChannelBits {
  uint32_t bias, gamma, beta, mean, var;
};

// Asks for a channel's values without waiting for them, which converting them would: five loads one after the other are
// 1.5 us. A kernel may start its copies before it calls fold_bits().
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

// scale = gamma / sqrt(var + eps), shift = beta + (bias - mean) * scale, in float: a fold in half loses bits, and overflows
// for var > 65504. Selects instead of branches, of which there would be 20, at 15 cycles each.
__device__ __forceinline__ ScaleShift<float> fold_bits(const Affine& a, const ChannelBits& bits) {
  const auto value = [](const ChannelVector& v, uint32_t word, float absent) {
    const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
    const float wide = __uint_as_float(v.dtype == DType::kBFloat16 ? word << 16 : word);
    const float given = v.dtype == DType::kFloat16 ? half : wide;
    return v.data == nullptr ? absent : given;
  };
  const ScaleShift<float> folded =
      scale_shift(value(a.bias, bits.bias, 0.0f), value(a.gamma, bits.gamma, 1.0f), value(a.beta, bits.beta, 0.0f),
                  value(a.mean, bits.mean, 0.0f), value(a.var, bits.var, 1.0f), a.eps);
  return {a.mean.data == nullptr ? 1.0f : folded.scale,
          a.mean.data == nullptr ? value(a.bias, bits.bias, 0.0f) : folded.shift};
}

// The same at once, in Acc.
template <class Acc>
__device__ __forceinline__ ScaleShift<Acc> fold(const Affine& a, int channel) {
  if constexpr (std::is_same_v<Acc, float>) {
    return fold_bits(a, load_bits(a, channel));
  } else {
    const Acc bias = load_channel<Acc>(a.bias, channel, Acc(0));
    if (a.mean.data == nullptr) return {Acc(1), bias};
    return scale_shift(bias, load_channel<Acc>(a.gamma, channel, Acc(1)), load_channel<Acc>(a.beta, channel, Acc(0)),
                       load_channel<Acc>(a.mean, channel, Acc(0)), load_channel<Acc>(a.var, channel, Acc(1)), a.eps);
  }
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

// What an epilogue multiplies and adds, zeros behind the last channel. `halved`: for silu_of_half; exact. The two functions
// are load_bits() and fold_bits(), the third is both.
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

__device__ __forceinline__ ScaleShift<float> fold_for_epilogue(const Affine& a, int channel, int channels,
                                                               bool halved) {
  return fold_for_epilogue(a, load_for_epilogue(a, channel, channels), channel, channels, halved);
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
