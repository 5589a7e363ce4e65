// A few neighbouring channels that one thread loads, computes on and stores at once.
#pragma once

#include <cstdint>
#include <cstring>

#include "numeric.cuh"

namespace yolo12_fastconv {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<16> {
  using type = uint4;
};

// How many channels fill the widest load.
template <class T>
constexpr int kLanesOf16Bytes = 16 / static_cast<int>(sizeof(T));

// kCount elements of T in one machine word: a single load or store instruction, at an address aligned to its size.
template <class T, int kCount>
struct Lanes {
  using Word = typename WordOf<static_cast<int>(sizeof(T)) * kCount>::type;
  Word word;
};

template <int kCount, class T>
__device__ __forceinline__ Lanes<T, kCount> load_lanes(const T* from) {
  return {*reinterpret_cast<const typename Lanes<T, kCount>::Word*>(from)};
}

template <class T, int kCount>
__device__ __forceinline__ void store_lanes(T* to, Lanes<T, kCount> lanes) {
  *reinterpret_cast<typename Lanes<T, kCount>::Word*>(to) = lanes.word;
}

template <class T, int kCount>
__device__ __forceinline__ void widen(Lanes<T, kCount> lanes, Accumulator<T> (&out)[kCount]) {
  T values[kCount];
  memcpy(values, &lanes.word, sizeof(values));
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = convert<Accumulator<T>>(values[i]);
}

template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> narrow(const Accumulator<T> (&in)[kCount]) {
  Lanes<T, kCount> lanes;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {  // two elements are rounded and packed by one instruction
    unsigned int words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        memcpy(&words[i], &pair, sizeof(pair));
      }
    }
    memcpy(&lanes.word, words, sizeof(words));
  } else {
    T values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = convert<T>(in[i]);
    memcpy(&lanes.word, values, sizeof(values));
  }
  return lanes;
}

// Four neighbouring values of a row of shared memory, aligned to 16 bytes.
__device__ __forceinline__ void load_run(const float* from, float* out) {
  const float4 run = *reinterpret_cast<const float4*>(from);
  out[0] = run.x, out[1] = run.y, out[2] = run.z, out[3] = run.w;
}
__device__ __forceinline__ void load_run(const double* from, double* out) {
  const double2 low = reinterpret_cast<const double2*>(from)[0], high = reinterpret_cast<const double2*>(from)[1];
  out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
}

inline bool is_aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace yolo12_fastconv
