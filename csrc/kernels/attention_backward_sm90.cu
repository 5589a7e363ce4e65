// Area attention, backward, on Hopper (wgmma): one block per area and head, of up to 400 pixels. Logits and grad_w are
// computed once, 5 products instead of 7 (attention_backward.cu, which has the formulas).
//
// All rows of the area lie in shared memory. Warps have roles:
// - Twelve warps own 16 keys each, four of them a warpgroup's 64, and go through the queries in steps of 16: logits and
//   grad_w by wgmma with keys and values in registers, then grad_v and grad_k with weights and grad_logits in registers.
//   Two passes are 384 keys.
// - One warp owns the 16 keys behind them, by mma.sync: 400 = 2 * 192 + 16. A 7th warpgroup's tile would be 3/4 empty.
// - grad_logits go to shared memory, two steps a stage of a ring, from where three warps take stages in turn: grad_q. They
//   see all keys of a pass, in order, so nothing is added up across warps: no atomics, the same bits from run to run. Sums
//   of the first pass wait in shared memory for the same lane.
#include "../device/attention_backward.cuh"
#include "../device/dependent_launch.cuh"
#include "../device/hopper.cuh"
#include "../device/launch_limits.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kKeyWarps = 12, kLastKeysWarp = kKeyWarps, kQueryWarps = 3;
constexpr int kThreads = (kKeyWarps + 1 + kQueryWarps) * 32;
constexpr int kPassKeys = kKeyWarps * 16;
constexpr int kRows = kMostKeysSm90;
constexpr int kMostSteps = kRows / kStep;
constexpr int kStageSteps = 2, kMostStages = (kMostSteps + kStageSteps - 1) / kStageSteps;
static_assert(kRows == 2 * kPassKeys + 16);

// A step's grad_logits are 8x8 matrices of 128 bytes, keys by queries: those of queries 0 to 7 and 8 to 15 of eight keys,
// then the next keys. 12 warps' keys and those of the last one.
constexpr int kMatrixBytes = 128, kTileBytes = 4 * kMatrixBytes;
constexpr int kStepBytes = (kKeyWarps + 1) * kTileBytes, kStageBytes = kStageSteps * kStepBytes;
constexpr int kSlots = 5;
constexpr int kStepStatisticBytes = kStep * 8;
constexpr int kStepUnits = kStep * kRowBytes / 16;  // from step to step, as descriptors count

constexpr int kMatrix = kRows * kRowBytes;  // queries, grad_out, keys, values
constexpr int kQueriesAt = 0, kGradsAt = kMatrix, kKeysAt = 2 * kMatrix, kValuesAt = 3 * kMatrix;
constexpr int kRingAt = 4 * kMatrix;
constexpr int kSumBytes = kStageSteps * 16 * kHeadDim * 4;  // of a stage's grad_q
constexpr int kSumsAt = kRingAt + kSlots * kStageBytes;
constexpr int kStatisticsAt = kSumsAt + kMostStages * kSumBytes;
constexpr int kNowhereAt = kStatisticsAt + kMostSteps * kStepStatisticBytes;
constexpr int kBarriersAt = kNowhereAt + 16;
constexpr int kSharedBytes = kBarriersAt + 2 * kSlots * 8;
static_assert(kMatrix % 1024 == 0 && kSharedBytes <= 227 * 1024);

#define YOLO12_WGMMA_ROWS(columns, groups, types, flags, i0, i1, i2, i3, ib)                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" YOLO12_REGISTERS_##groups \
               "}, {%" i0 ", %" i1 ", %" i2 ", %" i3 "}, %" ib ", " flags ";\n"                             \
               : YOLO12_SUMS_##groups                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define YOLO12_SUMS_AT(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// d = a * b, or with kAdds a * b + d: 64 rows of 16 columns in registers, as those of load_matrices, and 32 columns, whose
// terms are neighbours in shared memory. Asynchronous; d as in wgmma().
template <class T, bool kAdds>
__device__ __forceinline__ void wgmma_rows(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
#if YOLO12_HAS_WGMMA
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kAdds) {
      YOLO12_WGMMA_ROWS(32, 2, "f16.f16", "1, 1, 1, 0", "16", "17", "18", "19", "20");
    } else {
      YOLO12_WGMMA_ROWS(32, 2, "f16.f16", "0, 1, 1, 0", "16", "17", "18", "19", "20");
    }
  } else {
    if constexpr (kAdds) {
      YOLO12_WGMMA_ROWS(32, 2, "bf16.bf16", "1, 1, 1, 0", "16", "17", "18", "19", "20");
    } else {
      YOLO12_WGMMA_ROWS(32, 2, "bf16.bf16", "0, 1, 1, 0", "16", "17", "18", "19", "20");
    }
  }
#endif
}

// d += a * b: the same with 32 columns, which are neighbours in shared memory.
template <class T>
__device__ __forceinline__ void wgmma_rows_transposed(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
#if YOLO12_HAS_WGMMA
  if constexpr (std::is_same_v<T, __half>) {
    YOLO12_WGMMA_ROWS(32, 2, "f16.f16", "1, 1, 1, 1", "16", "17", "18", "19", "20");
  } else {
    YOLO12_WGMMA_ROWS(32, 2, "bf16.bf16", "1, 1, 1, 1", "16", "17", "18", "19", "20");
  }
#endif
}

#undef YOLO12_SUMS_AT
#undef YOLO12_WGMMA_ROWS

// What was computed asynchronously is not read before this.
template <int kCount>
__device__ __forceinline__ void settle(float (&sums)[kCount]) {
#pragma unroll
  for (float& x : sums) asm volatile("" : "+f"(x)::"memory");
}

// The slots of the ring, one after another. Stages take them in order, pass by pass.
struct Ring {
  uint32_t shared;
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t stage() const { return shared + kRingAt + slot * kStageBytes; }
  __device__ __forceinline__ uint32_t filled() const { return shared + kBarriersAt + slot * 8; }
  __device__ __forceinline__ uint32_t emptied() const { return filled() + kSlots * 8; }
  __device__ __forceinline__ void wait_until_empty() const { barrier_wait(emptied(), parity ^ 1); }
  __device__ __forceinline__ void wait_until_filled() const { barrier_wait(filled(), parity); }
  // By up to kSlots.
  __device__ __forceinline__ void advance(int count) {
    slot += count;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void arrive_as_warp(uint32_t barrier) {
  __syncwarp();
  barrier_arrive_if(barrier, threadIdx.x % 32 == 0);
}

template <class T>
struct Block : SequenceRows<T> {
  using SequenceRows<T>::args;
  uint32_t shared;
  int length, steps, stages, passes;

  __device__ __forceinline__ Block(const AttentionBackwardArgs& a, uint32_t shared_memory)
      : SequenceRows<T>(a, static_cast<int>(blockIdx.x)), shared(shared_memory), length(a.shape.length) {
    steps = (length + kStep - 1) / kStep;
    stages = (steps + kStageSteps - 1) / kStageSteps;
    passes = length <= kPassKeys + 16 ? 1 : 2;
  }

  __device__ __forceinline__ int last_keys() const { return passes * kPassKeys; }
  // The last keys' warp has as much to do as the others' in two passes only if it takes half of the stages in each.
  __device__ __forceinline__ bool has_last_keys(int pass, int stage) const {
    return last_keys() < length && (passes == 1 || stage % 2 == pass);
  }
  // One more than the warps for queries share evenly.
  __device__ __forceinline__ bool has_odd_stage() const { return stages % kQueryWarps == 1; }
  // Of this lane's two queries among the first eight of a step: -logsumexp, and -mean. 64 bytes behind, of the others.
  __device__ __forceinline__ uint32_t statistics_address(int step) const {
    return shared + kStatisticsAt + step * kStepStatisticBytes + threadIdx.x % 4 * 16;
  }

  __device__ __forceinline__ void load() const {
    const int key_rows = passes * kPassKeys + 16;
    const int piece = threadIdx.x % (2 * kPieces);
    const uint32_t to = shared + kKeysAt + piece / kPieces * kMatrix;
#pragma unroll 4
    for (int row = threadIdx.x / (2 * kPieces); row < key_rows; row += kThreads / (2 * kPieces)) {
      const bool valid = row < length;
      copy_async(to + piece_offset(row, piece % kPieces), this->qkv_row(valid ? row : 0, 1) + piece * 8,
                 valid ? 16 : 0);
    }
    commit_async_copies();
    load_queries();
    wait_for_async_copies<0>();
  }

  // Queries, scaled and rounded as in forward (logsumexp belongs to those logits), grad_out, and the statistics; those
  // of rows behind the last make them weightless.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kAtOnce = kThreads / kPieces, kParts = (kRows + kAtOnce - 1) / kAtOnce;
    const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    const float scale = args.shape.scale * kLog2e;
    uint4 query[kParts], grad[kParts], out[kParts];
    float logsumexp[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int row = first + i * kAtOnce;
      const bool valid = row < length;
      query[i] = load_piece(this->qkv_row(row, 0) + piece * 8, valid);
      grad[i] = load_piece(this->grad_out_row(row) + piece * 8, valid);
      out[i] = load_piece(this->out_row(row) + piece * 8, valid);
      logsumexp[i] = valid ? this->minus_logsumexp(row) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int row = first + i * kAtOnce;
      const float minus_mean = -this->mean(grad[i], out[i]);
      if (row >= steps * kStep) continue;
      store(shared + kQueriesAt + piece_offset(row, piece), scaled<T>(query[i], scale));
      store(shared + kGradsAt + piece_offset(row, piece), grad[i]);
      if (piece < 2) {
        asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(shared + kStatisticsAt + row / 2 * 16 + row % 2 * 4 + piece * 8),
                     "f"(piece == 0 ? logsumexp[i] : minus_mean)
                     : "memory");
      }
    }
  }

  __device__ __forceinline__ static void store(uint32_t to, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }

  // Where this lane's row of the matrices of 16 keys' grad_logits is in a step, and whether it is a key's at all: what is
  // not must stay zero, which products of infinite weights are not.
  __device__ __forceinline__ int matrix_row() const {
    const int lane = threadIdx.x % 32;
    return (lane / 8 % 2 * 2 + lane / 16) * kMatrixBytes + lane % 8 * 16;
  }
  __device__ __forceinline__ bool is_key(int first) const {
    return first + static_cast<int>(threadIdx.x) % 16 < length;
  }
};

// The 64 keys of a warpgroup in each pass.
template <class T>
struct KeyWarp {
  const Block<T>& block;
  uint32_t keys[2][4], values[2][4];
  float grad_keys[16], grad_values[16];
  float logits[16], grad_weights[16];  // of a stage

  __device__ __forceinline__ explicit KeyWarp(const Block<T>& b) : block(b) {
#pragma unroll
    for (int i = 0; i < 16; ++i) logits[i] = grad_weights[i] = 0.0f;
  }

  __device__ __forceinline__ void run(int warp) {
    Ring ring{block.shared};
    for (int pass = 0; pass < block.passes; ++pass) {
      const int first = pass * kPassKeys + warp * 16;
      load(first);
      go_through(ring, warp, block.is_key(first));
      float sums[2][1][4][4];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sums[0][0][i / 4][i % 4] = grad_keys[i];
        sums[1][0][i / 4][i % 4] = grad_values[i];
      }
      store_key_rows(sums[0], sums[1], block, first, block.length);
    }
  }

 private:
  __device__ __forceinline__ void load(int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t at = block.shared + piece_offset(first + lane % 16, 2 * k + lane / 16);
      load_matrices(keys[k], at + kKeysAt);
      load_matrices(values[k], at + kValuesAt);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) grad_keys[i] = grad_values[i] = 0.0f;
    settle(grad_keys), settle(grad_values);
  }

  // A stage's products are finished at its end: the compiler serializes those that it does not see both ends of without a
  // branch. Other warpgroups have theirs meanwhile.
  __device__ __forceinline__ void go_through(Ring& ring, int warp, bool is_key) {
    const int row = warp * kTileBytes + block.matrix_row();
    const uint32_t nowhere = block.shared + kNowhereAt;
    uint32_t start = descriptor_start(block.shared), statistics = block.statistics_address(0);
    uint32_t weights[kStageSteps][4], grads[kStageSteps][4];
    compute(start);
    finish();
    int steps = block.steps;
#pragma unroll 1
    for (; steps >= kStageSteps; steps -= kStageSteps) {
      const uint32_t to = ring.stage() + row;
      ring.wait_until_empty();
      differentiate<0>(weights[0], grads[0], statistics);
      store_matrices(is_key ? to : nowhere, grads[0]);
      differentiate<1>(weights[1], grads[1], statistics + kStepStatisticBytes);
      store_matrices(is_key ? to + kStepBytes : nowhere, grads[1]);
      add(weights[0], grads[0], start);
      add(weights[1], grads[1], start + kStepUnits);
      start += kStageSteps * kStepUnits;
      statistics += kStageSteps * kStepStatisticBytes;
      compute(start);  // behind the last step of what comes to lie there, for nothing
      arrive_as_warp(ring.filled());
      ring.advance(1);
      finish();
    }
    if (steps > 0) {
      ring.wait_until_empty();
      differentiate<0>(weights[0], grads[0], statistics);
      store_matrices(is_key ? ring.stage() + row : nowhere, grads[0]);
      add(weights[0], grads[0], start);
      arrive_as_warp(ring.filled());
      ring.advance(1);
      finish();
    }
  }

  // Starts logits and grad_w of a stage.
  __device__ __forceinline__ void compute(uint32_t start) {
    constexpr int kHalf = 32 / 16, kGrads = (kGradsAt - kQueriesAt) / 16;
    wgmma_fence();
    wgmma_rows<T, false>(logits, keys[0], operand(start));
    wgmma_rows<T, true>(logits, keys[1], operand(start + kHalf));
    wgmma_rows<T, false>(grad_weights, values[0], operand(start + kGrads));
    wgmma_rows<T, true>(grad_weights, values[1], operand(start + kGrads + kHalf));
    wgmma_commit();
  }

  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    settle(logits), settle(grad_weights), settle(grad_keys), settle(grad_values);
  }

  // Queries or grad_out. Both halves of a descriptor are the same for a transposed operand, of which a row holds all columns.
  __device__ __forceinline__ static uint64_t operand(uint32_t start) {
    return descriptor(descriptor_layout(kRowBytes, 8 * kRowBytes), start);
  }

  // Weights and grad_logits of a step. at: its statistics.
  template <int kIndex>
  __device__ __forceinline__ void differentiate(uint32_t (&weights)[4], uint32_t (&grads)[4], uint32_t at) const {
    const uint4 statistics[2] = {load_shared(at), load_shared(at + 64)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4& s = statistics[i / 2];
      const int e = kIndex * 8 + 2 * i;
      const float first = exp2_fast(logits[e] + __uint_as_float(s.x));
      const float second = exp2_fast(logits[e + 1] + __uint_as_float(s.y));
      weights[i] = pack_pair<T>(first, second);
      grads[i] = pack_pair<T>(first * (grad_weights[e] + __uint_as_float(s.z)),
                              second * (grad_weights[e + 1] + __uint_as_float(s.w)));
    }
  }

  __device__ __forceinline__ void add(const uint32_t (&weights)[4], const uint32_t (&grads)[4], uint32_t start) {
    wgmma_fence();
    wgmma_rows_transposed<T>(grad_values, weights, operand(start + (kGradsAt - kQueriesAt) / 16));
    wgmma_rows_transposed<T>(grad_keys, grads, operand(start));
    wgmma_commit();
  }
};

// grad_q of a stage: its queries' share of a pass's keys, and the first pass's sums.
template <class T>
__device__ __forceinline__ void add_queries(const Block<T>& block, int pass, int stage) {
  const int lane = threadIdx.x % 32, fill = pass * block.stages + stage;
  const Ring ring{block.shared, fill % kSlots, static_cast<uint32_t>(fill) / kSlots % 2};
  const uint32_t keys[2] = {block.shared + kKeysAt + piece_offset(lane % 16, lane / 16),
                            block.shared + kKeysAt + piece_offset(lane % 16, lane / 16 + 2)};
  const uint32_t from = ring.stage() + lane * 16, saved = block.shared + kSumsAt + stage * kSumBytes + lane * 16;
  float sums[kStageSteps][4][4];
  clear(sums);
  if (pass > 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 v = load_shared(saved + i * 512);
      sums[i / 4][i % 4][0] = __uint_as_float(v.x), sums[i / 4][i % 4][1] = __uint_as_float(v.y);
      sums[i / 4][i % 4][2] = __uint_as_float(v.z), sums[i / 4][i % 4][3] = __uint_as_float(v.w);
    }
  }
  uint32_t grads[2][kStageSteps][4], right[2][2][4];
  const auto load = [&](int to, int tile, int first_key) {
#pragma unroll
    for (int t = 0; t < kStageSteps; ++t) load_transposed(grads[to][t], from + t * kStepBytes + tile * kTileBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) load_transposed(right[to][i], keys[i] + first_key * kRowBytes);
  };
  const auto add = [&](int now) {
#pragma unroll
    for (int t = 0; t < kStageSteps; ++t) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t (&r)[4] = right[now][n / 2];
        multiply<T>(sums[t][n], grads[now][t], r[n % 2 * 2], r[n % 2 * 2 + 1], sums[t][n]);
      }
    }
  };
  ring.wait_until_filled();
  load(0, 0, pass * kPassKeys);
#pragma unroll
  for (int tile = 0; tile < kKeyWarps; ++tile) {
    if (tile + 1 < kKeyWarps) load((tile + 1) % 2, tile + 1, pass * kPassKeys + (tile + 1) * 16);
    add(tile % 2);
  }
  if (block.has_last_keys(pass, stage)) {
    load(0, kKeyWarps, block.last_keys());
    add(0);
  }
  arrive_as_warp(ring.emptied());
  if (pass + 1 == block.passes) {
    store_query_rows(sums, block, stage * kStageSteps * kStep, block.length);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const v = sums[i / 4][i % 4];
      block.store(saved + i * 512, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                              __float_as_uint(v[3])));
    }
  }
}

// The 16 keys behind those of the passes.
template <class T>
__device__ __forceinline__ void run_last_keys(const Block<T>& block) {
  const int lane = threadIdx.x % 32, first = block.last_keys();
  const bool is_key = block.is_key(first);
  RowFragment keys, values;
  const uint32_t rows = block.shared + piece_offset(lane / 4, lane % 4);
  {
    const uint32_t at = block.shared + piece_offset(min(first, kRows - 16) + lane / 4, lane % 4);
    keys.set(load_shared(at + kKeysAt), load_shared(at + kKeysAt + 8 * kRowBytes));
    values.set(load_shared(at + kValuesAt), load_shared(at + kValuesAt + 8 * kRowBytes));
  }
  const uint32_t transposed[2] = {block.shared + piece_offset(lane % 16, lane / 16),
                                  block.shared + piece_offset(lane % 16, lane / 16 + 2)};
  float grad_keys[1][4][4], grad_values[1][4][4];
  clear(grad_keys);
  clear(grad_values);
  Ring ring{block.shared};
  for (int pass = 0; pass < block.passes; ++pass) {
#pragma unroll 1
    for (int stage = 0; stage < block.stages; ++stage) {
      ring.wait_until_empty();
      if (block.has_last_keys(pass, stage)) {
        const int end = min((stage + 1) * kStageSteps, block.steps);
        uint32_t to = is_key ? ring.stage() + kKeyWarps * kTileBytes + block.matrix_row() : block.shared + kNowhereAt;
#pragma unroll 1
        for (int step = stage * kStageSteps; step < end; ++step) {
          const int offset = step * kStep * kRowBytes;
          Products<1> products;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint4 s = load_shared(block.statistics_address(step) + j * 64);
            const float x = __uint_as_float(s.x), y = __uint_as_float(s.y);
            const float z = __uint_as_float(s.z), w = __uint_as_float(s.w);
            const float logsumexp[4] = {x, y, x, y}, mean[4] = {z, w, z, w};
            multiply_rows<T>(products.logits[0][j], keys, load_shared(rows + kQueriesAt + offset + j * 8 * kRowBytes),
                             logsumexp);
            multiply_rows<T>(products.grad_weights[0][j], values,
                             load_shared(rows + kGradsAt + offset + j * 8 * kRowBytes), mean);
          }
          uint32_t weights[1][4], grads[1][4];
          products.differentiate<T>(weights, grads);
          store_matrices(to, grads[0]);
          to += is_key ? kStepBytes : 0;
          const uint32_t queries[2] = {transposed[0] + kQueriesAt + offset, transposed[1] + kQueriesAt + offset};
          const uint32_t grad_out[2] = {transposed[0] + kGradsAt + offset, transposed[1] + kGradsAt + offset};
          accumulate<T>(grad_values, weights, grad_out);
          accumulate<T>(grad_keys, grads, queries);
        }
      }
      arrive_as_warp(ring.filled());
      ring.advance(1);
    }
    if (block.has_odd_stage()) add_queries(block, pass, block.stages - 1);
  }
  store_key_rows(grad_keys, grad_values, block, first, block.length);
}

// Every third stage's queries. The last of 13, which would be a fifth for one of the warps, is the last keys' warp's.
template <class T>
__device__ __forceinline__ void run_queries(const Block<T>& block, int warp) {
  const int stages = block.stages - block.has_odd_stage();
  for (int pass = 0; pass < block.passes; ++pass) {
#pragma unroll 1
    for (int stage = warp; stage < stages; stage += kQueryWarps) add_queries(block, pass, stage);
  }
}

// Starts to bring rows of a later block's group into L2: those that this group has among the heads of its area, all heads'
// channels of them. Blocks start together, and would wait for memory together. Of a whole warp.
template <class T>
__device__ __forceinline__ void prefetch(const AttentionBackwardArgs& args, int group, int warp, int warps) {
  const int heads = args.shape.heads, length = args.shape.length;
  const SequencePlace place(args.shape, group);
  const int first = place.head * length / heads, end = (place.head + 1) * length / heads;
  const auto fetch = [](const void* from, int64_t element, int bytes) {
#if YOLO12_HAS_WGMMA
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(static_cast<const T*>(from) + element), "r"(bytes)
                 : "memory");
#endif
  };
  if (threadIdx.x % 32 != 0) return;
  for (int i = first + warp; i < end; i += warps) {
    const int64_t row = place.first_row + i;
    fetch(args.qkv, row * args.qkv_stride, heads * 3 * kRowBytes);
    fetch(args.grad_out, row * args.grad_out_stride, heads * kRowBytes);
    fetch(args.out, row * heads * kHeadDim, heads * kRowBytes);
  }
}

template <class T>
__global__ __launch_bounds__(kThreads, 1) void attention_backward_sm90_kernel(const AttentionBackwardArgs args,
                                                                              int groups, int ahead) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const Block<T> block(args, shared);
  let_later_kernels_start();
  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) __trap();  // the swizzle is a function of the address
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared + kBarriersAt + i * 8, kKeyWarps + 1);
      barrier_init(shared + kBarriersAt + (kSlots + i) * 8, 1);
    }
    barrier_init_fence();
  }
  if (block.length < block.last_keys() + 16) {  // grad_logits of rows that are no keys are never written
    for (int i = threadIdx.x * 16; i < kSlots * kStageBytes; i += kThreads * 16) {
      block.store(shared + kRingAt + i, make_uint4(0, 0, 0, 0));
    }
  }
  wait_for_earlier_kernels();
  block.load();
  fence_for_copy_engine();  // and wgmma reads the same way
  __syncthreads();
  if (warp < kKeyWarps) {
    KeyWarp<T>(block).run(warp);
  } else if (warp == kLastKeysWarp) {
    run_last_keys(block);
  } else {
    const int index = warp - kLastKeysWarp - 1, later = static_cast<int>(blockIdx.x) + ahead;
    if (later < groups) prefetch<T>(args, later, index, kQueryWarps);
    __syncwarp();
    run_queries(block, index);
  }
#endif
}

}  // namespace

void attention_backward_sm90(const AttentionBackwardArgs& a, DType dtype, cudaStream_t stream) {
  const int64_t groups = int64_t(a.shape.sequences) * a.shape.heads;
  if (groups * a.shape.length == 0) return;
  if (a.shape.length > kMostKeysSm90) {
    fail("attention_backward_sm90: areas of ", a.shape.length, " pixels, at most ", kMostKeysSm90);
  }
  with_half_type(dtype, "attention_backward_sm90", [&](auto tag) {
    using T = typename decltype(tag)::type;
    allow_shared_bytes(attention_backward_sm90_kernel<T>, kSharedBytes);
    launch_dependent<attention_backward_sm90_kernel<T>>(
        "attention_backward_sm90", checked_grid(groups, "attention_backward_sm90"), kThreads, kSharedBytes, stream, a,
        static_cast<int>(groups), multiprocessor_count());
  });
}

}  // namespace yolo12_fastconv
