// Area attention, backward. With weights w = exp2(logits - logsumexp), recomputed from qkv:
//   grad_v = w^T grad_out
//   grad_w = grad_out v^T,  grad_logits = w (grad_w - mean),  mean = sum over channels of grad_out out
//   grad_q = scale grad_logits k,  grad_k = scale grad_logits^T q
//
// Two kinds of blocks, in turn: in one a warp owns 32 keys and goes through the queries in steps of 16 (grad_k, grad_v), in
// the other it owns 32 queries and goes through the keys (grad_q). That computes logits and grad_w twice, 14 products
// instead of 10, and needs no sum across warps: no atomics, no buffers, the same bits from run to run.
//
// -logsumexp and -mean are the initial values of the accumulators.
#include "../device/attention_backward.cuh"
#include "../device/dependent_launch.cuh"
#include "../device/launch_limits.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kResident = 2;
constexpr int kTiles = 2;  // of 16 rows, per warp at a time

// Of two queries, as accumulators want them: -logsumexp (in powers of two, and shifted) and -mean, each of the first, the
// second, the first, the second.
constexpr int kStatisticBytes = 32;

__host__ __device__ constexpr int buffer_bytes(int rows) { return rows * (2 * kRowBytes + kStatisticBytes / 2); }

// Reads blockIdx anew, as reread_thread_index() does.
__device__ __forceinline__ int reread_block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

template <class T>
struct Block : SequenceRows<T> {
  using SequenceRows<T>::args;
  const AttentionPlan& plan;
  bool of_keys;
  int begin, end;

  __device__ __forceinline__ Block(const AttentionBackwardArgs& a, const AttentionPlan& p)
      : Block(a, p, reread_block_index()) {}
  __device__ __forceinline__ Block(const AttentionBackwardArgs& a, const AttentionPlan& p, int block_index)
      : Block(a, p, block_index, block_index / 2 / p.splits) {}
  __device__ __forceinline__ Block(const AttentionBackwardArgs& a, const AttentionPlan& p, int block_index, int group)
      : SequenceRows<T>(a, group), plan(p) {
    of_keys = block_index % 2 == 0;
    begin = (block_index / 2 - group * p.splits) * p.tiles * 16;
    end = min(begin + p.tiles * 16, a.shape.length);
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
      copy_async(to + piece_offset(row, piece % kPieces), this->qkv_row(valid ? first + row : 0, 1) + piece * 8,
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
      const uint4 query = load_piece(this->qkv_row(first + row, 0) + piece * 8, valid);
      const uint4 grad = load_piece(this->grad_out_row(first + row) + piece * 8, valid);
      const float mean = this->mean(grad, load_piece(this->out_row(first + row) + piece * 8, valid));
      const float logsumexp = valid ? this->minus_logsumexp(first + row) : -INFINITY;
      *reinterpret_cast<uint4*>(buffer + piece_offset(row, piece)) = scaled<T>(query, scale);
      *reinterpret_cast<uint4*>(grads + piece_offset(row, piece)) = grad;
      statistics[row / 2 * 8 + row % 2 + piece * 2] = piece < 2 ? logsumexp : -mean;
    }
  }
};

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

  __device__ __forceinline__ void compute(Products<kTiles>& products, const Addresses& at, uint32_t statistics) const {
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
    Products<kTiles> products[2];
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
    store_key_rows(grad_keys, grad_values, block, first, block.end);
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
        const float mean = Block<T>::mean(pieces[h], load_piece(block.out_row(row) + lane % 4 * 8, valid));
        minus_mean[t][2 * h] = minus_mean[t][2 * h + 1] = -mean;
        minus_logsumexp[t][2 * h] = minus_logsumexp[t][2 * h + 1] = valid ? block.minus_logsumexp(row) : 0.0f;
      }
      grad_out[t].set(pieces[0], pieces[1]);
    }
    clear(grad_queries);
  }

  __device__ __forceinline__ void compute(Products<kTiles>& products, const Addresses& at) const {
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
    Products<kTiles> products[2];
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
    store_query_rows(grad_queries, block, first, block.end);
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
