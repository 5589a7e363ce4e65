// Area attention in float32, forward: the products of attention.cu in half, three for one. An operand x is split into
// high = x rounded to half (11 bits) and low = x - high, and a b = high high + high low + low high; what is left out is
// 2^-22 of it. That is what a split into TF32 numbers leaves, at twice the rate and with half the registers.
//
// Half has 5 bits of exponent, so operands are multiplied by powers of two first: the queries of a warp and the keys and the
// values of a step of 16 by one each, such that the largest is in [2^14, 2^15). What is 2^-17 of that or smaller loses
// bits, 2^-40 of the largest at most: no more than 2^-24 of a logit while those of its step stay below 2^16. Weights, which are
// at most 2^15 and 2^9 where they matter, need none.
//
// Tensor cores cut off what does not fit when they add, always towards zero: over the 400 keys of an area that is twice what
// the error rule allows. So a chain of products never starts from the sums, but from zero, with small terms first, and is
// added to the sums by an ordinary addition.
//
// Splitting an infinity gives NaN, and so may results that are infinite or zero in plain float arithmetic. NaN reaches the
// output from wherever it arises: rows with one that is not finite are computed anew without tensor cores.
#include "../device/attention.cuh"
#include "../device/dependent_launch.cuh"
#include "../device/launch_limits.cuh"
#include "../device/thread_index.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kStepKeys = 16;
constexpr int kChunkSteps = kWarps, kChunkKeys = kChunkSteps * kStepKeys;  // each warp splits a step
// Of a step: high and low parts of its keys, of its values.
constexpr int kPartBytes = kStepKeys * kRowBytes, kStepBytes = 4 * kPartBytes;
constexpr int kChunkBytes = kChunkSteps * kStepBytes;
// Keys and values as they come: 8 pieces of 16 bytes of every thread, which is the only one to read them.
constexpr int kRawPieces = 8, kRawBytes = kRawPieces * kThreads * 16;
// A weight is exp2(logit - reference). A reference is kNominal below the largest logit so far, and moves when the weights of
// a row that a lane has in a step reach kMostWeight together. The difference is as exact as one to the largest logit.
constexpr float kNominal = 9.0f, kMostWeight = 32768.0f;

// x as two half numbers; of pairs.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 rounded = __floats2half2_rn(x, y);
  const float2 back = __half22float2(rounded);
  high = *reinterpret_cast<const uint32_t*>(&rounded);
  low = pack_pair<__half>(x - back.x, y - back.y);
}

__device__ __forceinline__ void split(const float (&x)[8], uint4& high, uint4& low) {
  split(x[0], x[1], high.x, low.x), split(x[2], x[3], high.y, low.y);
  split(x[4], x[5], high.z, low.z), split(x[6], x[7], high.w, low.w);
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// What a warp's numbers are multiplied by before they are split, and products with them afterwards.
struct Scaling {
  float before, after;
};

// most: of this lane's numbers, the largest absolute one. Not for NaN, which stays NaN whatever it is multiplied by.
__device__ __forceinline__ Scaling scaling_of_warp(float most) {
  uint32_t bits = __float_as_uint(most);
#if __CUDA_ARCH__ >= 800
  bits = __reduce_max_sync(0xffffffff, bits);
#endif
  const uint32_t exponent = max(bits >> 23, 15u);  // below, `after` would not be a normal number
  return {__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23)};
}

template <int kCount>
__device__ __forceinline__ float largest_absolute(const float (&x)[kCount]) {
  float most = 0.0f;
#pragma unroll
  for (const float v : x) most = fmaxf(most, fabsf(v));
  return most;
}

// The 8 channels of a head that piece p of a row has, in this order: 4 p and on, 16 + 4 p and on. So pieces of 16 bytes of
// floats are read side by side. `to`: where the first 4 go.
__device__ __forceinline__ void load_channels(const float* row, int piece, float* to) {
  load_run(row + piece * 4, to), load_run(row + kHeadDim / 2 + piece * 4, to + 4);
}

// What a block works on: queries of one area and one head.
struct Indices : SequencePlace {
  int split;  // which of the blocks with this area and head
  int turn;  // of the warps: which one has none must not always be that of the same scheduler
};

// Shared memory: two buffers, raw pieces, scales of the steps in both buffers, indices. Over 48 KiB, so all of it dynamic.
constexpr int kRawOffset = 2 * kChunkBytes, kScaleOffset = kRawOffset + kRawBytes;
constexpr int kIndexOffset = kScaleOffset + 2 * kChunkSteps * int(sizeof(float2));
constexpr int kSharedBytes = kIndexOffset + int(sizeof(Indices));

__device__ __forceinline__ Indices indices_of_block(const AttentionShape& s, int splits) {
  const int group = static_cast<int>(blockIdx.x / splits);
  return {SequencePlace(s, group), static_cast<int>(blockIdx.x) - group * splits, group % kWarps};
}

struct Place {
  const AttentionArgs& args;
  const Indices& at;  // in shared memory: the loop over the keys has no registers for it

  // Query, key and value of a pixel.
  __device__ __forceinline__ const float* qkv(int row) const {
    return static_cast<const float*>(args.qkv) + int64_t(at.first_row + row) * args.qkv_stride + at.head * 3 * kHeadDim;
  }
  __device__ __forceinline__ float* dense(void* tensor, int row) const {
    return static_cast<float*>(tensor) + (int64_t(at.first_row + row) * args.shape.heads + at.head) * kHeadDim;
  }
  __device__ __forceinline__ float& logsumexp(int row) const { return args.logsumexp[at.first_logsumexp + row]; }
};

// Keys and values on their way through shared memory: as they come, then split, in two buffers. A warp has step
// threadIdx.x / 32 of every chunk, of which a lane has piece lane % 4 of rows lane / 4 and lane / 4 + 8.
struct Keys {
  const Place& place;
  uint32_t buffers, raw;
  float2* scales;  // of the steps in both buffers: of products with keys, with values

  // Starts to copy those of a chunk. Zeros behind the last one.
  __device__ __forceinline__ void request(int chunk) const {
    const int thread = reread_thread_index(), lane = thread % 32, length = place.args.shape.length;
    const int first = chunk * kChunkKeys + thread / 32 * kStepKeys;
    if (first < length) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int key = first + h * 8 + lane / 4;
        const float* const from = place.qkv(min(key, length - 1)) + kHeadDim + lane % 4 * 4;
        const uint32_t to = raw + (h * 4 * kThreads + thread) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          copy_async(to + i * kThreads * 16, from + i * (kHeadDim / 2), key < length ? 16 : 0);
        }
      }
    }
    commit_async_copies();
  }

  // Splits what has been requested last. The raw pieces are free afterwards.
  __device__ __forceinline__ void split_step(int chunk) const {
    wait_for_async_copies<0>();
    const int thread = reread_thread_index(), lane = thread % 32, warp = thread / 32;
    if (chunk * kChunkKeys + warp * kStepKeys >= place.args.shape.length) return;
    const uint32_t step = buffers + chunk % 2 * kChunkBytes + warp * kStepBytes;
    const uint32_t to = step + piece_offset(lane / 4, lane % 4);
    float after[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float x[2][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 piece = load_shared(raw + ((i / 2 * 4 + part * 2 + i % 2) * kThreads + thread) * 16);
        float* const four = &x[i / 2][i % 2 * 4];
        four[0] = __uint_as_float(piece.x), four[1] = __uint_as_float(piece.y);
        four[2] = __uint_as_float(piece.z), four[3] = __uint_as_float(piece.w);
      }
      const Scaling scaling = scaling_of_warp(fmaxf(largest_absolute(x[0]), largest_absolute(x[1])));
      after[part] = scaling.after;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (float& v : x[h]) v *= scaling.before;
        uint4 high, low;
        split(x[h], high, low);
        // Rows 8 apart are swizzled alike.
        store_shared(to + part * 2 * kPartBytes + h * 8 * kRowBytes, high);
        store_shared(to + (part * 2 + 1) * kPartBytes + h * 8 * kRowBytes, low);
      }
    }
    if (lane == 0) scales[chunk % 2 * kChunkSteps + warp] = make_float2(after[0], after[1]);
  }
};

// A warp's queries and what has been summed for them. Lane l has rows l / 4 and l / 4 + 8 of every 16.
template <int kTiles>
struct Rows {
  using Logits = float[kTiles][2][4];

  RowFragment high[kTiles], low[kTiles];  // queries
  float scale;  // of products with them
  float reference[kTiles][2];
  float weight[kTiles][2];  // of this lane's keys
  float out[kTiles][4][4];
  bool fresh;

  __device__ __forceinline__ void start(const Place& place, int first) {
    const int lane = threadIdx.x % 32;
    float queries[kTiles * 2][8];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int row = first + i * 8 + lane / 4;
#pragma unroll
      for (float& x : queries[i]) x = 0.0f;
      if (row < place.args.shape.length) {
        const float* const from = place.qkv(row);
        load_channels(from, lane % 4, queries[i]);
        if (place.args.values != nullptr) {
          const float4* const value = reinterpret_cast<const float4*>(from + 2 * kHeadDim) + lane % 4;
          float4* const to = reinterpret_cast<float4*>(place.dense(place.args.values, row)) + lane % 4;
          to[0] = value[0], to[4] = value[4];
        }
#pragma unroll
        for (float& x : queries[i]) x *= place.args.shape.scale * kLog2e;
      }
      most = fmaxf(most, largest_absolute(queries[i]));
    }
    const Scaling scaling = scaling_of_warp(most);
    scale = scaling.after;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint4 highs[2], lows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (float& x : queries[t * 2 + h]) x *= scaling.before;
        split(queries[t * 2 + h], highs[h], lows[h]);
        reference[t][h] = -INFINITY, weight[t][h] = 0.0f;
      }
      high[t].set(highs[0], highs[1]), low[t].set(lows[0], lows[1]);
#pragma unroll
      for (int i = 0; i < 16; ++i) out[t][i / 4][i % 4] = 0.0f;
    }
    fresh = true;
  }

  // Of 16 keys, but for the scales. keys: where this lane's pieces of them begin.
  __device__ __forceinline__ void compute(Logits& logits, uint32_t keys) const {
    constexpr float kZeros[4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 key_high = load_shared(keys + j * 8 * kRowBytes);
      const uint4 key_low = load_shared(keys + j * 8 * kRowBytes + kPartBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_rows<__half>(logits[t][j], low[t], key_high, kZeros);
        multiply_rows<__half>(logits[t][j], high[t], key_low, logits[t][j]);
        multiply_rows<__half>(logits[t][j], high[t], key_high, logits[t][j]);
      }
    }
  }

  // Keys from `valid` on are not there.
  __device__ __forceinline__ static void mask(Logits& logits, int valid) {
    const int column = reread_thread_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) {
      if (i / 4 % 2 * 8 + column + i % 2 >= valid) logits[i / 8][i / 4 % 2][i % 4] = -INFINITY;
    }
  }

  // Logits to weights, which are added up. factor: the product of the scales.
  __device__ __forceinline__ void weigh(Logits& weights, const Logits& logits, float factor) {
    float sums[kTiles][2];
    if (__any_sync(0xffffffff, exponentiate(weights, sums, logits, factor) | fresh)) {
      move_references(logits, factor);
      exponentiate(weights, sums, logits, factor);
    }
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) weight[i / 2][i % 2] += sums[i / 2][i % 2];
  }

  // Adds weights times values of 16 keys. values: where this lane's pieces of the high parts begin, of the first 16 channels
  // and of the last.
  __device__ __forceinline__ void add(const Logits& weights, const uint32_t (&values)[2], float factor) {
    constexpr float kZeros[4] = {};
    uint32_t weight_high[kTiles][4], weight_low[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const float* const from = &weights[i / 4][i % 4 / 2][i % 2 * 2];
      split(from[0], from[1], weight_high[i / 4][i % 4], weight_low[i / 4][i % 4]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t v_high[4], v_low[4];
      load_transposed(v_high, values[half]);
      load_transposed(v_low, values[half] + kPartBytes);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float sums[4];
          multiply<__half>(sums, weight_low[t], v_high[n * 2], v_high[n * 2 + 1], kZeros);
          multiply<__half>(sums, weight_high[t], v_low[n * 2], v_low[n * 2 + 1], sums);
          multiply<__half>(sums, weight_high[t], v_high[n * 2], v_high[n * 2 + 1], sums);
#pragma unroll
          for (int e = 0; e < 4; ++e) out[t][half * 2 + n][e] = fmaf(sums[e], factor, out[t][half * 2 + n][e]);
        }
      }
    }
  }

  // Whether all of these rows are finite.
  __device__ __forceinline__ bool store(const Place& place, int first) {
    const int lane = threadIdx.x % 32;
    float probe = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + t * 16 + h * 8 + lane / 4;
        float sum = weight[t][h];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const float inverse = 1.0f / sum;
        // Two channels of each of 4 pieces, to four channels of each of 2.
        float4 results[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float mine[2], given[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float even = out[t][i * 2][h * 2 + c] * inverse, odd = out[t][i * 2 + 1][h * 2 + c] * inverse;
            probe += even * 0.0f + odd * 0.0f;
            mine[c] = lane % 2 == 0 ? even : odd;
            given[c] = __shfl_xor_sync(0xffffffff, lane % 2 == 0 ? odd : even, 1);
          }
          results[i] = lane % 2 == 0 ? make_float4(mine[0], mine[1], given[0], given[1])
                                     : make_float4(given[0], given[1], mine[0], mine[1]);
        }
        if (row >= place.args.shape.length) continue;
        float4* const to =
            reinterpret_cast<float4*>(place.dense(place.args.out, row) + lane % 4 / 2 * (kHeadDim / 2)) + lane % 2;
        to[0] = results[0], to[2] = results[1];
        if (lane % 4 == 0) place.logsumexp(row) = (log2f(sum) + reference[t][h]) * kLn2;
      }
    }
    return __all_sync(0xffffffff, probe == 0.0f);
  }

 private:
  // Whether a weight may be too large for half. NaN is not.
  __device__ __forceinline__ bool exponentiate(Logits& weights, float (&sums)[kTiles][2], const Logits& logits,
                                               float factor) const {
    bool beyond = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        weights[t][i / 4][i % 4] = exp2_fast(fmaf(logits[t][i / 4][i % 4], factor, -reference[t][i % 4 / 2]));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[t][h] =
            (weights[t][0][2 * h] + weights[t][0][2 * h + 1]) + (weights[t][1][2 * h] + weights[t][1][2 * h + 1]);
        beyond |= sums[t][h] >= kMostWeight;
      }
    }
    return beyond;
  }

  // To kNominal below the largest logit so far; -inf before.
  __device__ __forceinline__ void move_references(const Logits& logits, float factor) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = fmaxf(fmaxf(logits[t][0][2 * h], logits[t][0][2 * h + 1]),
                           fmaxf(logits[t][1][2 * h], logits[t][1][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float moved = fmaxf(most * factor - kNominal, reference[t][h]);
        const float shrink = exp2_fast(reference[t][h] - moved);
        reference[t][h] = moved;
        weight[t][h] *= shrink;
#pragma unroll
        for (int n = 0; n < 4; ++n) out[t][n][2 * h] *= shrink, out[t][n][2 * h + 1] *= shrink;
      }
    }
    fresh = false;
  }
};

// Steps of a chunk. step: the first, in shared memory. valid: keys from there on.
template <int kTiles>
__device__ __forceinline__ void attend(Rows<kTiles>& rows, uint32_t step, const float2* scales, int valid) {
  const int lane = reread_thread_index() % 32;
  uint32_t key = step + piece_offset(lane / 4, lane % 4);
  uint32_t value[2] = {step + 2 * kPartBytes + piece_offset(lane % 16, lane / 16),
                       step + 2 * kPartBytes + piece_offset(lane % 16, lane / 16 + 2)};
  using Logits = typename Rows<kTiles>::Logits;
  if (valid >= kChunkKeys) {
    // Logits of the next step are computed beside the weights of this one.
    Logits logits[2];
    rows.compute(logits[0], key);
#pragma unroll
    for (int i = 0; i < kChunkSteps; ++i) {
      const float2 scale = scales[i];
      Logits weights;
      if (i + 1 < kChunkSteps) rows.compute(logits[(i + 1) % 2], key + (i + 1) * kStepBytes);
      rows.weigh(weights, logits[i % 2], scale.x * rows.scale);
      const uint32_t values[2] = {value[0] + i * kStepBytes, value[1] + i * kStepBytes};
      rows.add(weights, values, scale.y);
    }
    return;
  }
#pragma unroll 1
  for (; valid > 0; valid -= kStepKeys) {
    const float2 scale = *scales++;
    Logits logits, weights;
    rows.compute(logits, key);
    if (valid < kStepKeys) rows.mask(logits, valid);
    rows.weigh(weights, logits, scale.x * rows.scale);
    rows.add(weights, value, scale.y);
    key += kStepBytes, value[0] += kStepBytes, value[1] += kStepBytes;
  }
}

// One row by a warp, in plain float arithmetic: a lane has a key of 32 for the logits, and a channel for the sum.
__device__ __forceinline__ void attend_plainly(const Place& place, int row) {
  const int lane = threadIdx.x % 32, length = place.args.shape.length;
  const float query = place.qkv(row)[lane] * (place.args.shape.scale * kLog2e);
  const auto logit_of = [&](int key) {
    const float* const from = place.qkv(min(key, length - 1)) + kHeadDim;
    float logit = 0.0f;
#pragma unroll 1
    for (int c = 0; c < kHeadDim; ++c) logit = fmaf(__shfl_sync(0xffffffff, query, c), from[c], logit);
    return logit;
  };
  float most = -INFINITY;
#pragma unroll 1
  for (int first = 0; first < length; first += 32) most = fmaxf(most, logit_of(first + lane));
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, mask));
  float sum = 0.0f, out = 0.0f;
#pragma unroll 1
  for (int first = 0; first < length; first += 32) {
    const float logit = logit_of(first + lane);
    const float weight = first + lane < length ? exp2f(logit - most) : 0.0f;
    sum += weight;
#pragma unroll 1
    for (int i = 0; i < min(32, length - first); ++i) {
      out = fmaf(__shfl_sync(0xffffffff, weight, i), place.qkv(first + i)[2 * kHeadDim + lane], out);
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  place.dense(place.args.out, row)[lane] = out / sum;
  if (lane == 0) place.logsumexp(row) = (log2f(sum) + most) * kLn2;
}

// Blocks on a multiprocessor, at most: 8.6, 8.9 and 12.0 have shared memory for two.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kMostBlocks = 2;
#else
constexpr int kMostBlocks = 4;
#endif

template <int kTiles, int kResident>
__global__ __launch_bounds__(kThreads, kResident < kMostBlocks ? kResident : kMostBlocks) void attention_float_kernel(
    const AttentionArgs args, const int splits) {
  extern __shared__ __align__(128) unsigned char shared[];
  float2* const scales = reinterpret_cast<float2*>(shared + kScaleOffset);
  Indices& indices = *reinterpret_cast<Indices*>(shared + kIndexOffset);
  if (threadIdx.x == 0) indices = indices_of_block(args.shape, splits);
  __syncthreads();
  const Place place{args, indices};
  const Keys keys{place, shared_address(shared), shared_address(shared) + kRawOffset, scales};
  const int length = args.shape.length;
  // The rows of a block's warps lie `splits` apart: 13 times 32 rows in 4 blocks are 4 + 3 + 3 + 3, not 4 + 4 + 4 + 1.
  const auto first_query = [&] {
    const int warp = (reread_thread_index() / 32 + indices.turn) % kWarps;
    return (indices.split + warp * splits) * kTiles * 16;
  };
  const auto works = [&] { return first_query() < length; };
  let_later_kernels_start();
  wait_for_earlier_kernels();

  keys.request(0);
  Rows<kTiles> rows;
  if (works()) rows.start(place, first_query());
  keys.split_step(0);
  keys.request(1);
#pragma unroll 1
  for (int chunk = 0; chunk * kChunkKeys < length; ++chunk) {
    __syncthreads();
    const int buffer = chunk % 2;
    if (works()) {
      attend(rows, keys.buffers + buffer * kChunkBytes, scales + buffer * kChunkSteps, length - chunk * kChunkKeys);
    }
    // The other buffer was last read before the barrier.
    keys.split_step(chunk + 1);
    keys.request(chunk + 2);
  }
  if (!works()) return;
  const int first = first_query();
  if (rows.store(place, first)) return;
  __syncwarp();
#pragma unroll 1
  for (int row = first; row < min(first + kTiles * 16, length); ++row) attend_plainly(place, row);
}

template <int kTiles, int kResident>
void launch(const AttentionArgs& a, cudaStream_t stream) {
  const int splits = ceil_div(a.shape.length, kWarps * kTiles * 16);
  const int64_t blocks = int64_t(a.shape.sequences) * a.shape.heads * splits;
  allow_shared_bytes(attention_float_kernel<kTiles, kResident>, kSharedBytes);
  prefer_shared_memory(attention_float_kernel<kTiles, kResident>);
  launch_dependent<attention_float_kernel<kTiles, kResident>>(
      "attention_float", checked_grid(blocks, "attention_float"), kThreads, kSharedBytes, stream, a, splits);
}

}  // namespace

void attention_float_forward(const AttentionArgs& a, cudaStream_t stream) {
  const int64_t groups = int64_t(a.shape.sequences) * a.shape.heads;
  if (groups * a.shape.length == 0) return;
  // Twice the rows for each key that a warp splits, unless that leaves multiprocessors with one block or none.
  if (groups * ceil_div(a.shape.length, kWarps * 32) < 2 * multiprocessor_count()) {
    launch<1, 4>(a, stream);
  } else {
    launch<2, 3>(a, stream);
  }
}

}  // namespace yolo12_fastconv
