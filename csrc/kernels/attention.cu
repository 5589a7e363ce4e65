// Area attention, forward: out = softmax(q k^T scale) v for every area of every picture, and every head of 32 channels.
//
// A warp owns 16 or 32 queries and goes through the keys in steps of 16: logits by mma.sync from registers (queries) and
// shared memory (keys), weights by exp2 in float, rounded to T, which is the layout that the second product wants. Sums
// of the weights are a product with ones: they are sums of the rounded weights, in float.
//
// Weights are exp2(logit - reference). The reference of a row is its largest logit among the first 16 keys, and is moved
// only when a weight grows beyond kMostWeight, which one vote a step finds out; until then the usual maximum, its
// exchange between lanes and the rescaling cost nothing. The reference enters as the initial value of the accumulators.
#include "../device/attention.cuh"
#include "../device/dependent_launch.cuh"
#include "../device/launch_limits.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kStepKeys = 16;

// kTiles: of 16 queries, per warp at a time. kKeyGroups: 1, or the warps that share queries and divide the keys. kAhead:
// the logits of the next keys are computed before the weights of these, so that tensor cores and exp2 overlap in a warp.
template <class T_, int kTiles_, int kWarps_, int kKeyGroups_, int kResident_, bool kAhead_>
struct Config {
  using T = T_;
  static constexpr bool kAhead = kAhead_;
  static constexpr int kTiles = kTiles_, kWarps = kWarps_, kKeyGroups = kKeyGroups_, kResident = kResident_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kQueryGroups = kWarps / kKeyGroups;
  // With keys divided, the sums of a warp: rows of 32 and a gap, then reference and sum of weights per row.
  static constexpr int kSumStride = kHeadDim + 4;
  static constexpr int kSumFloats = kTiles * 16 * (kSumStride + 2);
  static constexpr int kSumBytes = kKeyGroups > 1 ? kWarps * kSumFloats * 4 : 0;
  static constexpr AttentionBlock kBlock = {kTiles,           kWarps, kKeyGroups, kResident, kAhead ? 350 : 450,
                                            kAhead ? 75 : 138};
};

template <class T>
struct Weights;
template <>
struct Weights<__half> {
  using Pair = __half2;
  static constexpr float kMost = 8192.0f;  // half ends at 65504
  static constexpr uint32_t kOnes = 0x3c003c00;
};
template <>
struct Weights<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr float kMost = 1.15e18f;
  static constexpr uint32_t kOnes = 0x3f803f80;
};

template <class T>
__device__ __forceinline__ typename Weights<T>::Pair as_pair(uint32_t word) {
  return *reinterpret_cast<const typename Weights<T>::Pair*>(&word);
}

// One pass of a warp: its queries and what has been summed for them.
template <class Config>
struct Rows {
  using T = typename Config::T;
  static constexpr int kTiles = Config::kTiles;
  RowFragment queries[kTiles];
  float minus_reference[kTiles][4];  // of rows l / 4 (elements 0, 1) and l / 4 + 8 (2, 3)
  float out[kTiles][4][4];
  float weight[kTiles][4];  // all columns are equal
  bool fresh;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        minus_reference[t][e] = weight[t][e] = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) out[t][n][e] = 0.0f;
      }
    }
    fresh = true;
  }

  using Logits = float[kTiles][2][4];

  // Of 16 keys. keys: where this lane's pieces of them begin.
  __device__ __forceinline__ void compute(Logits& logits, uint32_t keys) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 k = load_shared(keys + j * 8 * kRowBytes);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) multiply_rows<T>(logits[t][j], queries[t], k, minus_reference[t]);
    }
  }

  // Weights of 16 keys. ahead: other logits that were computed with the present reference, or null.
  __device__ __forceinline__ void weigh(uint32_t (&weights)[kTiles][4], Logits& logits, Logits* ahead) {
    settle(weights, logits, ahead, exponentiate(weights, logits));
  }

  // The second half of weigh(), which starts with a vote.
  __device__ __forceinline__ void settle(uint32_t (&weights)[kTiles][4], Logits& logits, Logits* ahead, bool beyond) {
    if (__any_sync(0xffffffff, beyond | fresh)) {
      move_reference(logits, ahead);
      exponentiate(weights, logits);
    }
  }

  // Adds the values of 16 keys. values: where this lane's pieces of the first 16 channels begin, and of the last. ones: by
  // which the weights are multiplied for their sum.
  __device__ __forceinline__ void add(const uint32_t (&weights)[kTiles][4], const uint32_t (&values)[2],
                                      const uint32_t (&ones)[2]) {
    uint32_t v[2][4];
    load_transposed(v[0], values[0]);
    load_transposed(v[1], values[1]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        multiply<T>(out[t][n], weights[t], v[n / 2][n % 2 * 2], v[n / 2][n % 2 * 2 + 1], out[t][n]);
      }
      multiply<T>(weight[t], weights[t], ones[0], ones[1], weight[t]);
    }
  }

  // Whether a weight is too large. NaN is not.
  __device__ __forceinline__ static bool exponentiate(uint32_t (&weights)[kTiles][4], const Logits& logits) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const from = &logits[t][i / 2][i % 2 * 2];
        weights[t][i] = pack_pair<T>(exp2_fast(from[0]), exp2_fast(from[1]));
      }
    }
    auto most = as_pair<T>(weights[0][0]);
#pragma unroll
    for (int i = 1; i < kTiles * 4; ++i) most = __hmax2(most, as_pair<T>(weights[i / 4][i % 4]));
    const float2 pair = to_floats(most);
    return fmaxf(pair.x, pair.y) > Weights<T>::kMost;
  }

 private:
  __device__ __forceinline__ static float2 to_floats(__half2 pair) { return __half22float2(pair); }
  __device__ __forceinline__ static float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

  // The largest logit so far becomes the reference. Logits of -inf only leave it where it is: 0 at first.
  __device__ __forceinline__ void move_reference(Logits& logits, Logits* ahead) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 4; h += 2) {
        float most = fmaxf(fmaxf(logits[t][0][h], logits[t][0][h + 1]), fmaxf(logits[t][1][h], logits[t][1][h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float raise = fresh ? (most == -INFINITY ? 0.0f : most) : fmaxf(most, 0.0f);
        const float shrink = fresh ? 1.0f : exp2_fast(-raise);
#pragma unroll
        for (int e = h; e < h + 2; ++e) {
          logits[t][0][e] -= raise;
          logits[t][1][e] -= raise;
          if (ahead != nullptr) (*ahead)[t][0][e] -= raise, (*ahead)[t][1][e] -= raise;
          minus_reference[t][e] -= raise;
          weight[t][e] *= shrink;
#pragma unroll
          for (int n = 0; n < 4; ++n) out[t][n][e] *= shrink;
        }
      }
    }
    fresh = false;
  }
};

template <class Config>
struct Block : SequencePlace {
  using T = typename Config::T;
  const AttentionArgs& args;
  const AttentionPlan& plan;
  int begin, end;  // queries of this block, within the sequence

  __device__ __forceinline__ Block(const AttentionArgs& a, const AttentionPlan& p)
      : Block(a, p, static_cast<int>(blockIdx.x / p.splits)) {}
  __device__ __forceinline__ Block(const AttentionArgs& a, const AttentionPlan& p, int group)
      : SequencePlace(a.shape, group), args(a), plan(p) {
    begin = (static_cast<int>(blockIdx.x) - group * p.splits) * p.tiles * 16;
    end = min(begin + p.tiles * 16, a.shape.length);
  }

  __device__ __forceinline__ const T* qkv_row(int row) const {
    return static_cast<const T*>(args.qkv) + int64_t(first_row + row) * args.qkv_stride + head * 3 * kHeadDim;
  }
  __device__ __forceinline__ int64_t dense_row(int row) const {
    return (int64_t(first_row + row) * args.shape.heads + head) * kHeadDim;
  }

  // Starts to copy keys and values [chunk * buffer_keys, ...) into a buffer, behind the last one its key again and zeros.
  __device__ __forceinline__ void load(uint32_t buffer, int chunk) const {
    const int first = chunk * plan.buffer_keys;
    const int count = min(plan.buffer_keys, (args.shape.length - first + kStepKeys - 1) / kStepKeys * kStepKeys);
    const int piece = threadIdx.x % (2 * kPieces), last = args.shape.length - 1;
    const uint32_t to = buffer + piece / kPieces * plan.buffer_keys * kRowBytes;
#pragma unroll 4
    for (int key = threadIdx.x / (2 * kPieces); key < count; key += Config::kThreads / (2 * kPieces)) {
      const bool valid = first + key < args.shape.length;
      copy_async(to + piece_offset(key, piece % kPieces), qkv_row(valid ? first + key : last) + kHeadDim + piece * 8,
                 valid || piece < kPieces ? 16 : 0);
    }
    commit_async_copies();
  }

  // This block's rows among the values in a buffer, to a tensor of their own.
  __device__ __forceinline__ void store_values(uint32_t buffer, int chunk) const {
    const int first = chunk * plan.buffer_keys, piece = threadIdx.x % kPieces;
    const uint32_t from = buffer + plan.buffer_keys * kRowBytes;
    const int stop = min(end, first + plan.buffer_keys);
    for (int row = max(begin, first) + threadIdx.x / kPieces; row < stop; row += Config::kThreads / kPieces) {
      *reinterpret_cast<uint4*>(static_cast<T*>(args.values) + dense_row(row) + piece * 8) =
          load_shared(from + piece_offset(row - first, piece));
    }
  }

  __device__ __forceinline__ void store_logsumexp(int row, float minus_reference, float weight) const {
    args.logsumexp[first_logsumexp + row] = (__log2f(weight) - minus_reference) * kLn2;
  }
};

template <class Config>
__device__ __forceinline__ void load_queries(Rows<Config>& rows, const Block<Config>& block, int first) {
  const int lane = threadIdx.x % 32;
  const float scale = block.args.shape.scale * kLog2e;
  uint4 pieces[Config::kTiles][2];
#pragma unroll
  for (int i = 0; i < Config::kTiles * 2; ++i) {
    const int row = first + i * 8 + lane / 4;
    pieces[i / 2][i % 2] = load_piece(block.qkv_row(row) + lane % 4 * 8, row < block.end);
  }
#pragma unroll
  for (int t = 0; t < Config::kTiles; ++t) {
    rows.queries[t].set(scaled<typename Config::T>(pieces[t][0], scale),
                        scaled<typename Config::T>(pieces[t][1], scale));
  }
}

// Keys [from, to) of a buffer, of which those from `valid` on are not real: copies of the last one with zeros for values,
// so that nothing but the sum of the weights has to leave them out.
template <class Config>
__device__ __forceinline__ void attend(Rows<Config>& rows, const Block<Config>& block, uint32_t buffer, int from,
                                       int to, int valid) {
  using T = typename Config::T;
  constexpr int kStepBytes = kStepKeys * kRowBytes;
  const int lane = threadIdx.x % 32;
  const uint32_t values = buffer + block.plan.buffer_keys * kRowBytes + from * kRowBytes;
  uint32_t key = buffer + from * kRowBytes + piece_offset(lane / 4, lane % 4);
  uint32_t value[2] = {values + piece_offset(lane % 16, lane / 16), values + piece_offset(lane % 16, lane / 16 + 2)};
  const uint32_t all[2] = {Weights<T>::kOnes, Weights<T>::kOnes};
  uint32_t real[2];  // of the last step
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int count = valid - (to - kStepKeys + j * 8 + lane % 4 * 2);
    real[j] = count > 1 ? Weights<T>::kOnes : count == 1 ? Weights<T>::kOnes & 0xffff : 0;
  }
  const auto advance = [](uint32_t (&addresses)[2]) { addresses[0] += kStepBytes, addresses[1] += kStepBytes; };
  int steps = (to - from) / kStepKeys;
  if (steps == 0) return;

  if constexpr (!Config::kAhead) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      typename Rows<Config>::Logits logits;
      uint32_t weights[Config::kTiles][4];
      rows.compute(logits, key);
      rows.weigh(weights, logits, nullptr);
      const uint32_t ones[2] = {steps > 1 ? all[0] : real[0], steps > 1 ? all[1] : real[1]};
      rows.add(weights, value, ones);
      key += kStepBytes;
      advance(value);
    }
  } else {
    typename Rows<Config>::Logits logits[2];
    uint32_t weights[2][Config::kTiles][4];
    rows.compute(logits[0], key);
    rows.weigh(weights[0], logits[0], nullptr);
    key += steps > 1 ? kStepBytes : 0;
    rows.compute(logits[1], key);
    // Weights of one step, logits of the next and values of the last: none waits for another.
    const auto step = [&](int now) {
      key += steps > 2 ? kStepBytes : 0;  // behind the last step the same keys once more, for nothing
      rows.compute(logits[1 - now], key);
      const bool beyond = rows.exponentiate(weights[now], logits[now]);
      rows.add(weights[1 - now], value, all);
      rows.settle(weights[now], logits[now], &logits[1 - now], beyond);
      advance(value);
      --steps;
    };
#pragma unroll 1
    while (steps > 2) {
      step(1);
      step(0);
    }
    if (steps == 2) {
      step(1);
      rows.add(weights[1], value, real);
    } else {
      rows.add(weights[0], value, real);
    }
  }
}

template <class Config>
__device__ __forceinline__ void store(const Rows<Config>& rows, const Block<Config>& block, int first) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < Config::kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      const int row = first + t * 16 + h * 4 + lane / 4;
      const float weight = rows.weight[t][h], inverse = reciprocal(weight);
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) words[n] = pack_pair<T>(rows.out[t][n][h] * inverse, rows.out[t][n][h + 1] * inverse);
      const uint4 piece = gather_columns(words);
      if (row >= block.end) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(block.args.out) + block.dense_row(row) + lane % 4 * 8) = piece;
      if (lane % 4 == 0) block.store_logsumexp(row, rows.minus_reference[t][h], weight);
    }
  }
}

// The sums of warps with the same queries, each over its own keys, put together.
template <class Config>
__device__ __forceinline__ void combine(const Rows<Config>& rows, const Block<Config>& block, float* shared, int warp) {
  using T = typename Config::T;
  constexpr int kRows = Config::kTiles * 16, kStride = Config::kSumStride;
  const int lane = threadIdx.x % 32;
  __syncthreads();  // keys and values lie here until now
  float* const mine = shared + warp * Config::kSumFloats;
#pragma unroll
  for (int t = 0; t < Config::kTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 4; h += 2) {
      const int row = t * 16 + h * 4 + lane / 4;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        *reinterpret_cast<float2*>(mine + row * kStride + n * 8 + lane % 4 * 2) =
            make_float2(rows.out[t][n][h], rows.out[t][n][h + 1]);
      }
      if (lane % 4 == 0) {
        *reinterpret_cast<float2*>(mine + kRows * kStride + row * 2) =
            make_float2(rows.minus_reference[t][h], rows.weight[t][h]);
      }
    }
  }
  __syncthreads();
  const int query = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  if (query >= Config::kQueryGroups * kRows || block.begin + query >= block.end) return;
  const float* const sums_of_group = shared + query / kRows * Config::kKeyGroups * Config::kSumFloats;
  const int row = query % kRows;
  float2 parts[Config::kKeyGroups];
  float minus_reference = INFINITY;  // the least, among warps that have weights
#pragma unroll
  for (int w = 0; w < Config::kKeyGroups; ++w) {
    parts[w] = *reinterpret_cast<const float2*>(sums_of_group + w * Config::kSumFloats + kRows * kStride + row * 2);
    if (parts[w].y != 0.0f) minus_reference = fminf(minus_reference, parts[w].x);
  }
  float sums[8] = {}, weight = 0.0f;
#pragma unroll
  for (int w = 0; w < Config::kKeyGroups; ++w) {
    if (parts[w].y == 0.0f) continue;
    const float factor = exp2_fast(minus_reference - parts[w].x);
    weight = fmaf(parts[w].y, factor, weight);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 v =
          *reinterpret_cast<const float4*>(sums_of_group + w * Config::kSumFloats + row * kStride + piece * 8 + i);
      sums[i] = fmaf(v.x, factor, sums[i]), sums[i + 1] = fmaf(v.y, factor, sums[i + 1]);
      sums[i + 2] = fmaf(v.z, factor, sums[i + 2]), sums[i + 3] = fmaf(v.w, factor, sums[i + 3]);
    }
  }
  const float inverse = reciprocal(weight);
#pragma unroll
  for (float& x : sums) x *= inverse;
  *reinterpret_cast<uint4*>(static_cast<T*>(block.args.out) + block.dense_row(block.begin + query) + piece * 8) =
      narrow<T>(sums).word;
  if (piece == 0) block.store_logsumexp(block.begin + query, minus_reference, weight);
}

template <class Config>
__global__ __launch_bounds__(Config::kThreads, Config::kResident) void attention_kernel(const AttentionArgs args,
                                                                                        const AttentionPlan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  const uint32_t buffers = shared_address(shared);
  const uint32_t buffer_bytes = plan.buffer_keys * 2 * kRowBytes;
  const Block<Config> block(args, plan);
  // Which warp has most to do must not always be the one of the same scheduler.
  const int warp = (threadIdx.x / 32 + blockIdx.x) % Config::kWarps;
  const int query_group = warp / Config::kKeyGroups, key_group = warp % Config::kKeyGroups;
  const int tiles = (block.end - block.begin + 15) / 16;
  const int passes = (tiles + Config::kQueryGroups * Config::kTiles - 1) / (Config::kQueryGroups * Config::kTiles);
  let_later_kernels_start();
  wait_for_earlier_kernels();

  Rows<Config> rows;
  block.load(buffers, 0);
  for (int pass = 0; pass < passes; ++pass) {
    const int first = block.begin + (pass * Config::kQueryGroups + query_group) * Config::kTiles * 16;
    rows.clear();
    load_queries(rows, block, first);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      const int buffer = plan.buffers == 1 ? 0 : chunk % 2;
      if (pass == 0) {  // more than one only where all keys stay
        wait_for_async_copies<0>();
        __syncthreads();
        // The other buffer was last read before the barrier.
        if (chunk + 1 < plan.chunks) block.load(buffers + (chunk + 1) % 2 * buffer_bytes, chunk + 1);
        if (args.values != nullptr) block.store_values(buffers + buffer * buffer_bytes, chunk);
      }
      const int valid = min(plan.buffer_keys, args.shape.length - chunk * plan.buffer_keys);
      const int steps = (valid + kStepKeys - 1) / kStepKeys;
      const int from = steps * key_group / Config::kKeyGroups, to = steps * (key_group + 1) / Config::kKeyGroups;
      if (first < block.end) {
        attend(rows, block, buffers + buffer * buffer_bytes, from * kStepKeys, to * kStepKeys, valid);
      }
    }
    if constexpr (Config::kKeyGroups == 1) {
      if (first < block.end) store(rows, block, first);
    } else {
      combine(rows, block, reinterpret_cast<float*>(shared), warp);
    }
  }
}

template <class Config>
void launch(const AttentionArgs& a, const AttentionPlan& plan, cudaStream_t stream) {
  const int buffers = plan.buffers * plan.buffer_keys * 2 * kRowBytes;
  const int bytes = buffers > Config::kSumBytes ? buffers : Config::kSumBytes;
  allow_shared_bytes(attention_kernel<Config>, bytes);
  prefer_shared_memory(attention_kernel<Config>);
  const int64_t blocks = int64_t(a.shape.sequences) * a.shape.heads * plan.splits;
  launch_dependent<attention_kernel<Config>>("attention", checked_grid(blocks, "attention"), Config::kThreads, bytes,
                                             stream, a, plan);
}

// Launches the kernel whose estimate is lowest.
template <class... Configs>
void launch_best(const AttentionArgs& a, cudaStream_t stream) {
  const int processors = multiprocessor_count();
  const AttentionPlan plans[] = {plan_attention(a.shape, Configs::kBlock, processors)...};
  int best = 0;
  for (int i = 1; i < static_cast<int>(sizeof...(Configs)); ++i) {
    if (plans[i].cycles < plans[best].cycles) best = i;
  }
  int i = 0;
  ((i++ == best ? launch<Configs>(a, plans[best], stream) : void()), ...);
}

}  // namespace

void attention_forward(const AttentionArgs& a, DType dtype, cudaStream_t stream) {
  if (int64_t(a.shape.sequences) * a.shape.heads * a.shape.length == 0) return;
  with_half_type(dtype, "attention", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch_best<Config<T, 2, 4, 1, 3, true>, Config<T, 2, 4, 1, 4, false>, Config<T, 2, 8, 4, 2, false>,
                Config<T, 2, 16, 8, 1, false>, Config<T, 1, 8, 8, 2, false>>(a, stream);
  });
}

}  // namespace yolo12_fastconv
