// Area attention in float32, forward: the products of attention.cu in TF32, three for one. An operand x is split into
// high = x rounded to TF32 (11 bits) and low = x - high, and a b = high high + high low + low high; what is left out is
// 2^-22 of it.
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
// Two buffers of so many keys and values are 40 KiB; 5 fill areas of 400, YOLO12's at 640 by 640.
constexpr int kChunkKeys = 80;
constexpr int kFloatRowBytes = kHeadDim * 4, kPiecesOfRow = kFloatRowBytes / 16;
constexpr int kPartBytes = kChunkKeys * kFloatRowBytes, kBufferBytes = 2 * kPartBytes;  // keys, then values
// A weight is exp2(logit - reference). Beyond this exponent the reference moves. Small, so that the difference is as
// exact as one to the largest logit.
constexpr float kMostExponent = 6.0f;

// Where pieces of 16 bytes lie in their row, so that the 8 lanes of one access meet in no bank: two rows and every second
// piece of keys, every second row and two pieces of values.
__device__ __forceinline__ uint32_t key_offset(int row, int piece) {
  return row * kFloatRowBytes + (piece ^ (row & 1)) * 16;
}
__device__ __forceinline__ uint32_t value_offset(int row, int piece) {
  return kPartBytes + row * kFloatRowBytes + (piece ^ (row & 6)) * 16;
}

__device__ __forceinline__ void load_piece(float* out, uint32_t address) {
  const uint4 piece = load_shared(address);
  out[0] = __uint_as_float(piece.x), out[1] = __uint_as_float(piece.y);
  out[2] = __uint_as_float(piece.z), out[3] = __uint_as_float(piece.w);
}

// Tensor cores ignore the low 13 bits of `low`, of which at most one counts.
__device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000) & ~0x1fffu;
  low = __float_as_uint(x - __uint_as_float(high));
}

// d = a * b + c
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                              const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// What a block works on: queries of one area and one head.
struct Indices {
  int head, first_row, first_logsumexp;  // see attention.cu
  int split;  // which of the blocks with this area and head
};

__device__ __forceinline__ Indices indices_of_block(const AttentionShape& s, int splits) {
  const int group = blockIdx.x / splits, sequence = group / s.heads, picture = sequence / s.areas;
  const int head = group - sequence * s.heads, area = sequence - picture * s.areas;
  return {head, sequence * s.length, ((picture * s.heads + head) * s.areas + area) * s.length,
          static_cast<int>(blockIdx.x) - group * splits};
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

  // Starts to copy keys and values [first, first + kChunkKeys), zeros behind the last one.
  __device__ __forceinline__ void load(uint32_t buffer, int first) const {
    const int count = min(kChunkKeys, (args.shape.length - first + kStepKeys - 1) / kStepKeys * kStepKeys);
    const int thread = reread_thread_index(), piece = thread % (2 * kPiecesOfRow), last = args.shape.length - 1;
#pragma unroll 2
    for (int key = thread / (2 * kPiecesOfRow); key < count; key += kThreads / (2 * kPiecesOfRow)) {
      const uint32_t to = piece < kPiecesOfRow ? key_offset(key, piece) : value_offset(key, piece - kPiecesOfRow);
      copy_async(buffer + to, qkv(min(first + key, last)) + kHeadDim + piece * 4, first + key <= last ? 16 : 0);
    }
    commit_async_copies();
  }
};

// A warp's queries and what has been summed for them. Lane l has, of rows l / 4 and l / 4 + 8 of every 16, all that belongs
// to channels 8 (l % 4) and on.
template <int kTiles>
struct Rows {
  uint32_t high[kTiles][4][4], low[kTiles][4][4];  // queries
  float reference[kTiles][2];
  float weight[kTiles][2];  // of this lane's keys
  float out[kTiles][4][2][2];  // channel n of 4, row, which 4 channels

  __device__ __forceinline__ void start(const Place& place, int first) {
    const int lane = threadIdx.x % 32;
    const float scale = place.args.shape.scale * kLog2e;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + t * 16 + h * 8 + lane / 4;
        float query[8] = {};
        if (row < place.args.shape.length) {
          const float* const from = place.qkv(row) + lane % 4 * 8;
          load_run(from, query), load_run(from + 4, query + 4);
          if (place.args.values != nullptr) {
            float4* const to = reinterpret_cast<float4*>(place.dense(place.args.values, row) + lane % 4 * 8);
            const float4* const value = reinterpret_cast<const float4*>(from + 2 * kHeadDim);
            to[0] = value[0], to[1] = value[1];
          }
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          split(query[c] * scale, high[t][c / 2][c % 2 * 2 + h], low[t][c / 2][c % 2 * 2 + h]);
        }
        reference[t][h] = -INFINITY, weight[t][h] = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) out[t][n][h][0] = out[t][n][h][1] = 0.0f;
      }
    }
  }

  // 16 keys, `valid` of which there are. keys, values: where this lane's pieces of them begin.
  __device__ __forceinline__ void step(uint32_t keys, uint32_t values, int valid) {
    constexpr float kZeros[4] = {};
    float logits[kTiles][2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float key[4];
        uint32_t key_high[4], key_low[4];
        load_piece(key, (keys ^ (i * 16)) + j * 8 * kFloatRowBytes);
#pragma unroll
        for (int c = 0; c < 4; ++c) split(key[c], key_high[c], key_low[c]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float sums[4];
          multiply_tf32(sums, low[t][2 * i], key_high[0], key_high[1], kZeros);
          multiply_tf32(sums, low[t][2 * i + 1], key_high[2], key_high[3], sums);
          multiply_tf32(sums, high[t][2 * i], key_low[0], key_low[1], sums);
          multiply_tf32(sums, high[t][2 * i + 1], key_low[2], key_low[3], sums);
          multiply_tf32(sums, high[t][2 * i], key_high[0], key_high[1], sums);
          multiply_tf32(sums, high[t][2 * i + 1], key_high[2], key_high[3], sums);
#pragma unroll
          for (int e = 0; e < 4; ++e) logits[t][j][e] = i == 0 ? sums[e] : logits[t][j][e] + sums[e];
        }
      }
    }
    if (valid < kStepKeys) {
      const int column = reread_thread_index() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kTiles * 8; ++i) {
        if (i / 4 % 2 * 8 + column + i % 2 >= valid) logits[i / 8][i / 4 % 2][i % 4] = -INFINITY;
      }
    }
    weigh(logits);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weight[t][h] +=
            (logits[t][0][2 * h] + logits[t][0][2 * h + 1]) + (logits[t][1][2 * h] + logits[t][1][2 * h + 1]);
      }
    }
    add(logits, values);
  }

  // Logits to weights. NaN moves no reference.
  __device__ __forceinline__ void weigh(float (&logits)[kTiles][2][4]) {
    bool beyond = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) beyond |= largest(logits[t], h) > reference[t][h] + kMostExponent;
    }
    if (__any_sync(0xffffffff, beyond)) move_references(logits);
#pragma unroll
    for (int i = 0; i < kTiles * 8; ++i) {
      float& x = logits[i / 8][i / 4 % 2][i % 4];
      x = exp2_fast(x - reference[i / 8][i % 4 / 2]);
    }
  }

  // Adds weights times values of 16 keys. Which key is which term of a product is free: lane l has keys 2 (l % 4) and the
  // next for weights, as the logits come, and takes the values of these.
  __device__ __forceinline__ void add(const float (&weights)[kTiles][2][4], uint32_t values) {
    constexpr float kZeros[4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t weight_high[kTiles][4], weight_low[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
        constexpr int kOrder[4] = {0, 2, 1, 3};  // of logits: row, column; of an operand: column, row
        split(weights[i / 4][j][i % 4], weight_high[i / 4][kOrder[i % 4]], weight_low[i / 4][kOrder[i % 4]]);
      }
      float value[2][4];  // key of a pair, channel
#pragma unroll
      for (int i = 0; i < 2; ++i) load_piece(value[i], values + (j * 8 + i) * kFloatRowBytes);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) split(value[i][n], high[i], low[i]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float sums[4];
          multiply_tf32(sums, weight_low[t], high[0], high[1], kZeros);
          multiply_tf32(sums, weight_high[t], low[0], low[1], sums);
          multiply_tf32(sums, weight_high[t], high[0], high[1], sums);
#pragma unroll
          for (int e = 0; e < 4; ++e) out[t][n][e / 2][e % 2] += sums[e];
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
        float results[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          results[i / 4][i % 4] = out[t][i % 4][h][i / 4] * inverse;
          probe += results[i / 4][i % 4] * 0.0f;
        }
        if (row >= place.args.shape.length) continue;
        float4* const to = reinterpret_cast<float4*>(place.dense(place.args.out, row) + lane % 4 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) to[i] = make_float4(results[i][0], results[i][1], results[i][2], results[i][3]);
        if (lane % 4 == 0) place.logsumexp(row) = (log2f(sum) + reference[t][h]) * kLn2;
      }
    }
    return __all_sync(0xffffffff, probe == 0.0f);
  }

 private:
  // Of this lane's logits of a row.
  __device__ __forceinline__ static float largest(const float (&logits)[2][4], int h) {
    return fmaxf(fmaxf(logits[0][2 * h], logits[0][2 * h + 1]), fmaxf(logits[1][2 * h], logits[1][2 * h + 1]));
  }

  // The largest logit so far becomes the reference, which is -inf before.
  __device__ __forceinline__ void move_references(const float (&logits)[kTiles][2][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = largest(logits[t], h);
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float moved = fmaxf(most, reference[t][h]), shrink = exp2_fast(reference[t][h] - moved);
        reference[t][h] = moved;
        weight[t][h] *= shrink;
#pragma unroll
        for (int n = 0; n < 4; ++n) out[t][n][h][0] *= shrink, out[t][n][h][1] *= shrink;
      }
    }
  }
};

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
  __shared__ __align__(128) unsigned char shared[2 * kBufferBytes];
  const uint32_t buffers = shared_address(shared);
  __shared__ Indices indices;
  if (threadIdx.x == 0) indices = indices_of_block(args.shape, splits);
  __syncthreads();
  const Place place{args, indices};
  const int length = args.shape.length;
  // The rows of a block's warps lie `splits` apart: 13 times 32 rows in 4 blocks are 4 + 3 + 3 + 3, not 4 + 4 + 4 + 1.
  const auto first_query = [&] { return (indices.split + reread_thread_index() / 32 * splits) * kTiles * 16; };
  const auto works = [&] { return first_query() < length; };
  let_later_kernels_start();
  wait_for_earlier_kernels();

  place.load(buffers, 0);
  Rows<kTiles> rows;
  if (works()) rows.start(place, first_query());
#pragma unroll 1
  for (int chunk = 0; chunk * kChunkKeys < length; ++chunk) {
    wait_for_async_copies<0>();
    __syncthreads();
    const int begin = chunk * kChunkKeys, buffer = chunk % 2 * kBufferBytes;
    // The other buffer was last read before the barrier.
    if (begin + kChunkKeys < length) place.load(buffers + kBufferBytes - buffer, begin + kChunkKeys);
    if (!works()) continue;
    const int lane = reread_thread_index() % 32;
    const uint32_t first_key = key_offset(lane / 4, lane % 4 * 2);
    const uint32_t to_values = value_offset(lane % 4 * 2, lane / 4) - first_key;
    uint32_t keys = buffers + buffer + first_key;
#pragma unroll 1
    for (int valid = min(kChunkKeys, length - begin); valid > 0; valid -= kStepKeys) {
      rows.step(keys, keys + to_values, valid);
      keys += kStepKeys * kFloatRowBytes;
    }
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
  prefer_shared_memory(attention_float_kernel<kTiles, kResident>);
  launch_dependent<attention_float_kernel<kTiles, kResident>>(
      "attention_float", checked_grid(blocks, "attention_float"), kThreads, 0, stream, a, splits);
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
