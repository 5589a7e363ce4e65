// Area attention, backward. With weights w = exp2(logits - logsumexp), recomputed from qkv:
//   grad_v = w^T grad_out
//   grad_w = grad_out v^T,  grad_logits = w (grad_w - mean),  mean = sum over channels of grad_out out
//   grad_q = scale grad_logits k,  grad_k = scale grad_logits^T q
//
// Two kinds of blocks, in turn: in one a warp owns 32 keys and goes through the queries in steps of 16 (grad_k, grad_v), in
// the other it owns 32 queries and goes through the keys (grad_q). That computes logits and grad_w twice, 14 products
// instead of 10, and needs no sum across warps: no atomics, no buffers, the same bits from run to run.
//
// -logsumexp and -mean are the initial values of the accumulators. Weights are computed 2^kShift times too large, since those
// of long areas are subnormal in half: w = 1/400 times a small gradient even more so.
#include "../device/attention.cuh"
#include "../device/dependent_launch.cuh"
#include "../device/launch_limits.cuh"
#include "../device/thread_index.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kResident = 2;
constexpr int kTiles = 2;  // of 16 rows, per warp at a time
constexpr int kStep = 16;
constexpr float kShift = 4.0f;

// Of two queries, as accumulators want them: -logsumexp (in powers of two, and shifted) and -mean, each of the first, the
// second, the first, the second.
constexpr int kStatisticBytes = 32;

__host__ __device__ constexpr int buffer_bytes(int rows) { return rows * (2 * kRowBytes + kStatisticBytes / 2); }

template <class T>
struct Block {
  const AttentionBackwardArgs& args;
  const AttentionPlan& plan;
  int head;
  // Of the sequence, in rows of the map and elements of logsumexp. 2^31 of those would be 400 GB of qkv.
  int first_row, first_logsumexp;
  bool of_keys;
  int begin, end;

  // Reads blockIdx anew, as reread_thread_index() does.
  __device__ __forceinline__ Block(const AttentionBackwardArgs& a, const AttentionPlan& p) : args(a), plan(p) {
    const AttentionShape& s = a.shape;
    int block_index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block_index));
    const int index = block_index / 2;
    of_keys = block_index % 2 == 0;
    const int group = index / p.splits, split = index - group * p.splits;
    const int sequence = group / s.heads;
    head = group - sequence * s.heads;
    first_row = sequence * s.length;
    const int picture = sequence / s.areas, area = sequence - picture * s.areas;
    first_logsumexp = ((picture * s.heads + head) * s.areas + area) * s.length;
    begin = split * p.tiles * 16;
    end = min(begin + p.tiles * 16, s.length);
  }

  // kPart: 0 query, 1 key, 2 value
  __device__ __forceinline__ const T* qkv_row(int row, int part) const {
    return static_cast<const T*>(args.qkv) + int64_t(first_row + row) * args.qkv_stride + (head * 3 + part) * kHeadDim;
  }
  __device__ __forceinline__ const T* grad_out_row(int row) const {
    return static_cast<const T*>(args.grad_out) + int64_t(first_row + row) * args.grad_out_stride + head * kHeadDim;
  }
  __device__ __forceinline__ const T* out_row(int row) const {
    return static_cast<const T*>(args.out) + (int64_t(first_row + row) * args.shape.heads + head) * kHeadDim;
  }
  __device__ __forceinline__ const T* grad_values_row(int row) const {
    return static_cast<const T*>(args.grad_values) + int64_t(first_row + row) * args.grad_values_stride +
           head * kHeadDim;
  }
  __device__ __forceinline__ T* grad_row(int row, int part) const {
    return static_cast<T*>(args.grad_qkv) + (int64_t(first_row + row) * args.shape.heads + head) * 3 * kHeadDim +
           part * kHeadDim;
  }
  // -logsumexp of a query as the accumulators want it
  __device__ __forceinline__ float minus_logsumexp(int row) const {
    return fmaf(args.logsumexp[first_logsumexp + row], -kLog2e, kShift);
  }

  // Starts to copy the other side's rows of a chunk into a buffer, zeros behind the last one.
  __device__ __forceinline__ void load(unsigned char* buffer, int chunk) const {
    const int first = chunk * plan.buffer_keys;
    const int count = min(plan.buffer_keys, (args.shape.length - first + kStep - 1) / kStep * kStep);
    if (of_keys) {
      load_queries(buffer, first, count);
    } else {
      load_keys(shared_address(buffer), first, count);
    }
  }

  __device__ __forceinline__ void load_keys(uint32_t buffer, int first, int count) const {
    const int piece = threadIdx.x % (2 * kPieces);
    const uint32_t to = buffer + piece / kPieces * plan.buffer_keys * kRowBytes;
#pragma unroll 4
    for (int row = threadIdx.x / (2 * kPieces); row < count; row += kThreads / (2 * kPieces)) {
      const bool valid = first + row < args.shape.length;
      copy_async(to + piece_offset(row, piece % kPieces), qkv_row(valid ? first + row : 0, 1) + piece * 8,
                 valid ? 16 : 0);
    }
    commit_async_copies();
  }

  // Queries, scaled and rounded as in forward (logsumexp belongs to those logits), grad_out, and the statistics.
  __device__ __forceinline__ void load_queries(unsigned char* buffer, int first, int count) const {
    const int piece = threadIdx.x % kPieces;
    const float scale = args.shape.scale * kLog2e;
    unsigned char* const grads = buffer + plan.buffer_keys * kRowBytes;
    float* const statistics = reinterpret_cast<float*>(grads + plan.buffer_keys * kRowBytes);
    // All lanes of a warp stay in the loop, which exchanges: count is a multiple of 16, a warp has 8 rows.
#pragma unroll 2
    for (int row = threadIdx.x / kPieces; row < count; row += kThreads / kPieces) {
      const bool valid = first + row < args.shape.length;
      const uint4 query = load_piece(qkv_row(first + row, 0) + piece * 8, valid);
      const uint4 grad = load_piece(grad_out_row(first + row) + piece * 8, valid);
      float mean = dot(grad, load_piece(out_row(first + row) + piece * 8, valid));
      mean += __shfl_xor_sync(0xffffffff, mean, 1);
      mean += __shfl_xor_sync(0xffffffff, mean, 2);
      const float logsumexp = valid ? minus_logsumexp(first + row) : -INFINITY;
      *reinterpret_cast<uint4*>(buffer + piece_offset(row, piece)) = scaled<T>(query, scale);
      *reinterpret_cast<uint4*>(grads + piece_offset(row, piece)) = grad;
      statistics[row / 2 * 8 + row % 2 + piece * 2] = piece < 2 ? logsumexp : -mean;
    }
  }

  __device__ __forceinline__ static float dot(const uint4& a, const uint4& b) {
    float x[8], y[8], sum = 0.0f;
    widen(Lanes<T, 8>{a}, x);
    widen(Lanes<T, 8>{b}, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
    return sum;
  }
};

__device__ __forceinline__ void clear(float (&sums)[kTiles][4][4]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sums[t][n][0] = sums[t][n][1] = sums[t][n][2] = sums[t][n][3] = 0.0f;
  }
}

// sums += left * right: left has 16 columns, right 16 rows of which this lane's addresses for the two halves are given.
template <class T>
__device__ __forceinline__ void accumulate(float (&sums)[kTiles][4][4], const uint32_t (&left)[kTiles][4],
                                           const uint32_t (&right)[2]) {
  uint32_t r[2][4];
  load_transposed(r[0], right[0]);
  load_transposed(r[1], right[1]);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      multiply<T>(sums[t][n], left[t], r[n / 2][n % 2 * 2], r[n / 2][n % 2 * 2 + 1], sums[t][n]);
    }
  }
}

template <class T, bool kScaled>
__device__ __forceinline__ void load_rows(RowFragment (&fragments)[kTiles], const Block<T>& block, int first,
                                          int part) {
  const int lane = reread_thread_index() % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    uint4 pieces[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + t * 16 + h * 8 + lane / 4;
      pieces[h] = load_piece(block.qkv_row(row, part) + lane % 4 * 8, row < block.end);
      if (kScaled) pieces[h] = scaled<T>(pieces[h], block.args.shape.scale * kLog2e);
    }
    fragments[t].set(pieces[0], pieces[1]);
  }
}

// Sums times `factor` to one part of grad_qkv.
template <class T, bool kValues>
__device__ __forceinline__ void store_rows(const float (&sums)[kTiles][4][4], const Block<T>& block, int first,
                                           int part, float factor) {
  const int lane = reread_thread_index() % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + t * 16 + h * 8 + lane / 4;
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) words[n] = pack_pair<T>(sums[t][n][2 * h] * factor, sums[t][n][2 * h + 1] * factor);
      uint4 piece = gather_columns(words);
      if (row >= block.end) continue;
      if (kValues && block.args.grad_values != nullptr) {
        float a[8], b[8];
        widen(Lanes<T, 8>{piece}, a);
        widen(Lanes<T, 8>{load_piece(block.grad_values_row(row) + lane % 4 * 8, true)}, b);
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] += b[i];
        piece = narrow<T>(a).word;
      }
      *reinterpret_cast<uint4*>(block.grad_row(row, part) + lane % 4 * 8) = piece;
    }
  }
}

// Where a lane's pieces of 16 rows of a buffer's two matrices are: rows as columns of a product, and transposed.
struct Addresses {
  uint32_t rows[2], transposed[2][2];

  __device__ __forceinline__ Addresses(uint32_t buffer, int buffer_rows) {
    const int lane = reread_thread_index() % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t matrix = buffer + i * buffer_rows * kRowBytes;
      rows[i] = matrix + piece_offset(lane / 4, lane % 4);
      transposed[i][0] = matrix + piece_offset(lane % 16, lane / 16);
      transposed[i][1] = matrix + piece_offset(lane % 16, lane / 16 + 2);
    }
  }
  __device__ __forceinline__ void advance_rows(bool more) {
    rows[0] += more ? kStep * kRowBytes : 0;
    rows[1] += more ? kStep * kRowBytes : 0;
  }
  __device__ __forceinline__ void advance_transposed() {
#pragma unroll
    for (int i = 0; i < 4; ++i) transposed[i / 2][i % 2] += kStep * kRowBytes;
  }
};

// Logits and grad_w of a step, both with their initial values.
struct Products {
  float logits[kTiles][2][4], grad_weights[kTiles][2][4];

  // Weights and grad_logits, as the left operands of products.
  template <class T>
  __device__ __forceinline__ void differentiate(uint32_t (&weights)[kTiles][4], uint32_t (&grads)[kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = i / 2, e = i % 2 * 2;
        const float first = exp2_fast(logits[t][j][e]), second = exp2_fast(logits[t][j][e + 1]);
        weights[t][i] = pack_pair<T>(first, second);
        grads[t][i] = pack_pair<T>(first * grad_weights[t][j][e], second * grad_weights[t][j][e + 1]);
      }
    }
  }
};

// Runs body(i, steps left) for a number of steps, i in turn 0 and 1, two in a row without a branch: products of one step
// and exponentials of the next overlap then.
template <class Body>
__device__ __forceinline__ void alternate(int steps, Body&& body) {
#pragma unroll 1
  for (; steps > 1; steps -= 2) {
    body(0, steps);
    body(1, steps - 1);
  }
  if (steps == 1) body(0, 1);
}

__device__ __forceinline__ void to_array(float (&array)[4], const uint4& v) {
  array[0] = __uint_as_float(v.x), array[1] = __uint_as_float(v.y);
  array[2] = __uint_as_float(v.z), array[3] = __uint_as_float(v.w);
}

// A warp's keys.
template <class T>
struct Keys {
  RowFragment keys[kTiles], values[kTiles];
  float grad_keys[kTiles][4][4], grad_values[kTiles][4][4];

  __device__ __forceinline__ void start(const Block<T>& block, int first) {
    load_rows<T, false>(keys, block, first, 1);
    load_rows<T, false>(values, block, first, 2);
    clear(grad_keys);
    clear(grad_values);
  }

  __device__ __forceinline__ void compute(Products& products, const Addresses& at, uint32_t statistics) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 q = load_shared(at.rows[0] + j * 8 * kRowBytes), g = load_shared(at.rows[1] + j * 8 * kRowBytes);
      float logsumexp[4], mean[4];
      to_array(logsumexp, load_shared(statistics + j * 4 * kStatisticBytes));
      to_array(mean, load_shared(statistics + j * 4 * kStatisticBytes + 16));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_rows<T>(products.logits[t][j], keys[t], q, logsumexp);
        multiply_rows<T>(products.grad_weights[t][j], values[t], g, mean);
      }
    }
  }

  // `count` queries of a buffer, zeros and statistics that make them weightless behind the last one.
  __device__ __forceinline__ void go_through(uint32_t buffer, int buffer_rows, int count) {
    Addresses at(buffer, buffer_rows);
    uint32_t statistics = buffer + buffer_rows * 2 * kRowBytes + reread_thread_index() % 4 * kStatisticBytes;
    Products products[2];
    compute(products[0], at, statistics);
    alternate((count + kStep - 1) / kStep, [&](int now, int steps) {
      // Behind the last step the same queries once more, for nothing.
      at.advance_rows(steps > 1);
      statistics += steps > 1 ? kStep / 2 * kStatisticBytes : 0;
      compute(products[1 - now], at, statistics);
      uint32_t weights[kTiles][4], grad_logits[kTiles][4];
      products[now].differentiate<T>(weights, grad_logits);
      accumulate<T>(grad_values, weights, at.transposed[1]);
      accumulate<T>(grad_keys, grad_logits, at.transposed[0]);
      at.advance_transposed();
    });
  }

  __device__ __forceinline__ void finish(const Block<T>& block, int first) const {
    const float unshift = exp2f(-kShift);
    store_rows<T, false>(grad_keys, block, first, 1, unshift * kLn2);  // queries are multiplied by scale / ln 2
    store_rows<T, true>(grad_values, block, first, 2, unshift);
  }
};

// A warp's queries.
template <class T>
struct Queries {
  RowFragment queries[kTiles], grad_out[kTiles];
  float minus_logsumexp[kTiles][4], minus_mean[kTiles][4];
  float grad_queries[kTiles][4][4];

  __device__ __forceinline__ void start(const Block<T>& block, int first) {
    const int lane = reread_thread_index() % 32;
    load_rows<T, true>(queries, block, first, 0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      uint4 pieces[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + t * 16 + h * 8 + lane / 4;
        const bool valid = row < block.end;
        pieces[h] = load_piece(block.grad_out_row(row) + lane % 4 * 8, valid);
        float mean = Block<T>::dot(pieces[h], load_piece(block.out_row(row) + lane % 4 * 8, valid));
        mean += __shfl_xor_sync(0xffffffff, mean, 1);
        mean += __shfl_xor_sync(0xffffffff, mean, 2);
        minus_mean[t][2 * h] = minus_mean[t][2 * h + 1] = -mean;
        minus_logsumexp[t][2 * h] = minus_logsumexp[t][2 * h + 1] = valid ? block.minus_logsumexp(row) : 0.0f;
      }
      grad_out[t].set(pieces[0], pieces[1]);
    }
    clear(grad_queries);
  }

  __device__ __forceinline__ void compute(Products& products, const Addresses& at) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 k = load_shared(at.rows[0] + j * 8 * kRowBytes), v = load_shared(at.rows[1] + j * 8 * kRowBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_rows<T>(products.logits[t][j], queries[t], k, minus_logsumexp[t]);
        multiply_rows<T>(products.grad_weights[t][j], grad_out[t], v, minus_mean[t]);
      }
    }
  }

  // `count` keys of a buffer.
  __device__ __forceinline__ void go_through(uint32_t buffer, int buffer_rows, int count) {
    Addresses at(buffer, buffer_rows);
    // Keys behind the last one are zeros, but their weights may be infinite: their grad_logits are cleared.
    uint32_t real[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int valid = count - (count - 1) / kStep * kStep - j * 8 - reread_thread_index() % 4 * 2;
      real[j] = valid > 1 ? 0xffffffff : valid == 1 ? 0xffff : 0;
    }
    Products products[2];
    compute(products[0], at);
    alternate((count + kStep - 1) / kStep, [&](int now, int steps) {
      at.advance_rows(steps > 1);  // behind the last step the same keys once more, for nothing
      compute(products[1 - now], at);
      uint32_t weights[kTiles][4], grad_logits[kTiles][4];
      products[now].differentiate<T>(weights, grad_logits);
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) grad_logits[i / 4][i % 4] &= steps > 1 ? 0xffffffff : real[i % 4 / 2];
      accumulate<T>(grad_queries, grad_logits, at.transposed[0]);
      at.advance_transposed();
    });
  }

  __device__ __forceinline__ void finish(const Block<T>& block, int first) const {
    store_rows<T, false>(grad_queries, block, first, 0, exp2f(-kShift) * block.args.shape.scale);
  }
};

template <class T, class Rows, bool kStreamed>
__device__ __forceinline__ void run(const Block<T>& block, unsigned char* shared) {
  const int buffer_rows = block.plan.buffer_keys, length = block.args.shape.length;
  // Which warp has most to do must not always be the one of the same scheduler.
  const int warp = (threadIdx.x / 32 + blockIdx.x / 2) % kWarps;
  int first = block.begin + warp * kTiles * 16;
  Rows rows;
  block.load(shared, 0);
  if constexpr (!kStreamed) {
    wait_for_async_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (; first < block.end; first += kWarps * kTiles * 16) {
      rows.start(block, first);
      rows.go_through(shared_address(shared), buffer_rows, length);
      rows.finish(Block<T>(block.args, block.plan), first);  // registers are scarce in between
    }
  } else {  // one pass
    rows.start(block, first);
#pragma unroll 1
    for (int chunk = 0; chunk < block.plan.chunks; ++chunk) {
      wait_for_async_copies<0>();
      __syncthreads();
      // The other buffer was last read before the barrier.
      if (chunk + 1 < block.plan.chunks) block.load(shared + (chunk + 1) % 2 * buffer_bytes(buffer_rows), chunk + 1);
      if (first < block.end) {
        rows.go_through(shared_address(shared + chunk % 2 * buffer_bytes(buffer_rows)), buffer_rows,
                        min(buffer_rows, length - chunk * buffer_rows));
      }
    }
    if (first < block.end) rows.finish(block, first);
  }
}

template <class T, bool kStreamed>
__global__ __launch_bounds__(kThreads, kResident) void attention_backward_kernel(const AttentionBackwardArgs args,
                                                                                 const AttentionPlan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Block<T> block(args, plan);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (block.of_keys) {
    run<T, Keys<T>, kStreamed>(block, shared);
  } else {
    run<T, Queries<T>, kStreamed>(block, shared);
  }
}

}  // namespace

void attention_backward(const AttentionBackwardArgs& a, DType dtype, cudaStream_t stream) {
  const int64_t groups = int64_t(a.shape.sequences) * a.shape.heads;
  if (groups * a.shape.length == 0) return;
  const bool resident = a.shape.length <= kMostResidentKeys;
  const AttentionBlock block = {kTiles, kWarps, 1, kResident, 500, 150};
  const AttentionPlan plan = plan_attention(a.shape, block, multiprocessor_count(), 2);
  const int bytes = plan.buffers * buffer_bytes(plan.buffer_keys);
  with_half_type(dtype, "attention_backward", [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_bool(!resident, [&](auto streamed) {
      constexpr bool kIsStreamed = decltype(streamed)::value;
      allow_shared_bytes(attention_backward_kernel<T, kIsStreamed>, bytes);
      prefer_shared_memory(attention_backward_kernel<T, kIsStreamed>);
      launch_dependent<attention_backward_kernel<T, kIsStreamed>>(
          "attention_backward", checked_grid(2 * groups * plan.splits, "attention_backward"), kThreads, bytes, stream,
          a, plan);
    });
  });
}

}  // namespace yolo12_fastconv
