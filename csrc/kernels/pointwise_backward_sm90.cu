// Backward of a narrow 1x1 convolution with batch norm and activation, from the sums of the batch norm's backward on, in one
// pass (wgmma, bulk tensor copies): half and bfloat16, compute capability 9.0 only.
//   grad_z = scale * grad_y * act'(u) - offset - slope * (z - mean)      in shared memory, where z was
//   grad_x = grad_z w + added,   grad_w = grad_z^T x
// The three steps by themselves move seven maps: grad_y and z in, grad_z out; grad_z in, grad_x out; grad_z and x in. This
// moves four. It serves where all of grad_w fits in the registers of a warpgroup, besides a tile of grad_x.
//
// More input channels are divided among blocks, which compute the same grad_z from what the L2 cache has for all but one.
//
// A block's workers (warpgroups) take tiles of 64 pixels in turn, from one ring of stages that a warp fills. Channels lie in
// slices of 64, 128 bytes a pixel; what is behind the last channel is zeros of the copy engine, and their grad_z is 0. Pixels
// behind the last have a grad_z that is not, which multiplies zeros of x, and a grad_x that is not written.
//
// grad_z is rounded to the dtype as the pass that writes it does. Sums of grad_w are float; those of a block's workers are
// added in shared memory and leave for the workspace, [block][k][c]; add_wgrad_slices() adds the blocks. Their number depends
// on the shape alone, as does the order of all sums.
#include <algorithm>
#include <limits>
#include <optional>

#include "device/built_for_hopper.h"
#include "device/dependent_launch.cuh"
#include "device/gradient_kernels.h"
#include "device/hopper.cuh"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/sm90_plan.h"
#include "device/sm90_results.cuh"
#include "device/stage_ring.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"

// Without wgmma the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "pointwise_backward_sm90";
constexpr int kPixels = 64, kSlice = 64;  // of a tile; channels of a slice
constexpr int kSliceBytes = kPixels * kSlice * 2;
constexpr int kMaxStages = 12;
constexpr int kBlocks = 132;  // as an H200 has multiprocessors: fewer of them take turns, and the sums stay the same

// kOut: slices of output channels; kIn: columns of grad_x and grad_w.
constexpr int slices_of(int channels) { return (channels + kSlice - 1) / kSlice; }
template <int kOut, int kIn>
struct Config {
  static constexpr int kInSlices = slices_of(kIn);
  static constexpr int kSums = (kOut + 1) * kIn / 2;  // registers of a thread
  static constexpr int kWorkers = kSums <= 64 ? 3 : 2;
  // Many sums take registers that the warps of a whole warpgroup give up, of which one copies. Otherwise that warp is alone.
  static constexpr bool kMovesRegisters = kSums > 96;
  static constexpr int kThreads = kWorkers * 128 + (kMovesRegisters ? 128 : 32);
  // Per-channel values stay in registers where these suffice for it.
  static constexpr bool kKeepsValues = kSums <= 128;
  // grad_x takes the place of grad_y.
  static constexpr int kGradSlices = std::max(kOut, kInSlices);
  static constexpr int kStageBytes = (kOut + kGradSlices + kInSlices) * kSliceBytes;
  static constexpr int kWeightBytes = kInSlices * kOut * kSlice * kSlice * 2;
  static constexpr int kValueBytes = 5 * kOut * kSlice * 4;
  static constexpr int kBarrierBytes = (2 * kMaxStages + 1) * 8;
  static constexpr int kStages =
      std::min(kMaxStages, (kSm90SharedBytes - kWeightBytes - kValueBytes - kBarrierBytes) / kStageBytes);
  static constexpr int kStagesAt = kWeightBytes, kValuesAt = kStagesAt + kStages * kStageBytes,
                       kBarriersAt = kValuesAt + kValueBytes, kBytes = kBarriersAt + kBarrierBytes;
  // Sums of the workers, where the stages were: rows of floats, eight banks further each.
  static constexpr int kSumPitch = kIn + 8, kSumFloats = kOut * kSlice * kSumPitch;
  static_assert(kStages >= kWorkers + 1 && kWorkers * kSumFloats * 4 <= kStages * kStageBytes);
};

struct KernelArgs {
  CUtensorMap z, grad_y, x, weight, grad_x;
  Affine affine;
  const float* grad_beta;
  const float* grad_gamma;
  Act act;
  float rows;
  int tiles, out_channels, in_channels;
  int parts;  // of the input channels, kIn each
  int64_t pixels;
  const void* added;  // to grad_x, or null
  int64_t added_stride;
  void* out;  // grad_x again, where something is added
  int64_t out_stride;
  float* workspace;
};

// Values of eight channels: du = grad_y * act'((z - mean) * scale + beta), grad_z = scale * du - (offset + slope * (z - mean)).
struct Values {
  float mean[8], scale[8], beta[8], offset[8], slope[8];

  template <int kChannels>
  __device__ __forceinline__ void load(const float* table, int channel) {
    const auto read = [&](int which, float (&to)[8]) {
      const float4* const from = reinterpret_cast<const float4*>(table + which * kChannels + channel);
      const float4 a = from[0], b = from[1];
      to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    };
    read(0, mean), read(1, scale), read(2, beta), read(3, offset), read(4, slope);
  }
};

__device__ __forceinline__ float channel_of(const ChannelVector& v, int channel, float absent) {
  return v.data != nullptr ? static_cast<const float*>(v.data)[channel] : absent;
}

// By `threads` threads.
template <int kChannels>
__device__ __forceinline__ void fill_values(const KernelArgs& args, float* table, int threads) {
  for (int c = threadIdx.x; c < kChannels; c += threads) {
    float mean = 0, scale = 0, beta = 0, offset = 0, slope = 0;
    if (c < args.out_channels) {
      const float var = channel_of(args.affine.var, c, 1.0f), gamma = channel_of(args.affine.gamma, c, 1.0f);
      const float grad_beta = args.grad_beta[c], grad_gamma = args.grad_gamma[c];
      mean = channel_of(args.affine.mean, c, 0.0f);
      beta = channel_of(args.affine.beta, c, 0.0f);
      const float invstd = 1.0f / sqrtf(var + static_cast<float>(args.affine.eps));
      scale = gamma * invstd;
      const float factor = scale / args.rows;
      offset = factor * grad_beta;
      slope = factor * invstd * grad_gamma;
    }
    table[c] = mean;
    table[kChannels + c] = scale;
    table[2 * kChannels + c] = beta;
    table[3 * kChannels + c] = offset;
    table[4 * kChannels + c] = slope;
  }
}

template <class T>
__device__ __forceinline__ uint4 differentiate(const uint4& z_word, const uint4& grad_word, const Values& v, Act act) {
  float d[8], grad[8];
  widen(Lanes<T, 8>{z_word}, d);
  widen(Lanes<T, 8>{grad_word}, grad);
#pragma unroll
  for (int c = 0; c < 8; ++c) d[c] -= v.mean[c];
  if (act == Act::kSilu) {
#pragma unroll
    for (int c = 0; c < 8; ++c) grad[c] *= activate_gradient<T>(d[c] * v.scale[c] + v.beta[c], Act::kSilu);
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) grad[c] = v.scale[c] * grad[c] - (v.offset[c] + v.slope[c] * d[c]);
  return narrow<T>(grad).word;
}

__device__ __forceinline__ void sync_worker(int worker) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + worker) : "memory");
}

// Of a warpgroup's threads each. What one has given up another may take.
template <int kCount>
__device__ __forceinline__ void more_registers() {
#if YOLO12_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void fewer_registers() {
#if YOLO12_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
#endif
}

// Where a thread is in a tile of grad_z: a chunk of eight channels, in every `rows`-th pixel from `first` on.
struct ThreadChunk {
  int chunk, first, rows;
  __device__ __forceinline__ explicit ThreadChunk(int out_channels) {
    const int chunks = out_channels / 8, thread = static_cast<int>(threadIdx.x) % 128;
    rows = 128 / chunks;
    first = thread / chunks < rows ? thread / chunks : kPixels;  // chunks may not divide 128
    chunk = thread % chunks;
  }
};

// grad_z of a tile in the place of z. Behind the last channel z is 0 and stays.
template <class T, int kOut, bool kKeeps>
__device__ __forceinline__ void differentiate_tile(char* z, const char* grad_y, const ThreadChunk& at,
                                                   const Values& kept, const float* table, Act act) {
  Values values = kept;
  if constexpr (!kKeeps) values.load<kOut * kSlice>(table, at.chunk * 8);
  const int slice = at.chunk / 8 * kSliceBytes;
#pragma unroll 4
  for (int row = at.first; row < kPixels; row += at.rows) {
    const int offset = slice + buffer_offset<128>(row, at.chunk % 8);
    uint4* const word = reinterpret_cast<uint4*>(z + offset);
    *word = differentiate<T>(*word, *reinterpret_cast<const uint4*>(grad_y + offset), values, act);
  }
}

// A warp's 16 pixels of grad_x to the buffer, and from there to memory.
template <class T, int kIn>
__device__ __forceinline__ void write_grad_x(const KernelArgs& args, const float (&sum)[kIn / 2], char* buffer,
                                             int tile, int first_channel) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = 16 * warp + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kIn / 16; ++pair) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i / 2: of eight channels, i % 2: of eight pixels
      const float* const d = sum + pair * 8 + i / 2 * 4 + i % 2 * 2;
      packed[i] = round_pair<T>(d[0], d[1]);
    }
    store_matrices(shared_address(buffer) + pair / 4 * kSliceBytes + buffer_offset<128>(row, pair % 4 * 2 + lane / 16),
                   packed);
  }
  constexpr int kInSlices = slices_of(kIn);
  if (args.added == nullptr) {
    fence_for_copy_engine();
    __syncwarp();
#pragma unroll
    for (int slice = 0; slice < kInSlices; ++slice) {
      store_box(lane == 0, &args.grad_x, shared_address(buffer) + slice * kSliceBytes + warp * 16 * 128,
                first_channel + slice * kSlice, tile * kPixels + 16 * warp, 0, 0);
    }
    return;
  }
  __syncwarp();
  const T* const added = static_cast<const T*>(args.added);
  T* const out = static_cast<T*>(args.out);
#pragma unroll
  for (int slice = 0; slice < kInSlices; ++slice) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pixel = 16 * warp + 4 * i + lane / 8, chunk = lane % 8,
                channel = first_channel + slice * kSlice + chunk * 8;
      const int64_t m = int64_t(tile) * kPixels + pixel;
      if (m >= args.pixels || channel >= args.in_channels) continue;
      float mine[8], more[8];
      widen(
          Lanes<T, 8>{*reinterpret_cast<const uint4*>(buffer + slice * kSliceBytes + buffer_offset<128>(pixel, chunk))},
          mine);
      widen(load_lanes<8>(added + m * args.added_stride + channel), more);
#pragma unroll
      for (int c = 0; c < 8; ++c) mine[c] += more[c];
      store_lanes(out + m * args.out_stride + channel, narrow<T>(mine));
    }
  }
}

template <class T, int kOut, int kIn>
__global__ __launch_bounds__(Config<kOut, kIn>::kThreads,
                             1) void pointwise_backward_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  using C = Config<kOut, kIn>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  // Through a shuffle, so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const uint32_t leads = threadIdx.x % 32 == 0;
  const uint32_t filled = base + C::kBarriersAt, emptied = filled + 8 * kMaxStages,
                 weights_filled = emptied + 8 * kMaxStages;
  float* const table = reinterpret_cast<float*>(shared + C::kValuesAt);
  let_later_kernels_start();
  if (threadIdx.x == 0) {
    if (base % 1024 != 0) __trap();  // the swizzle is a function of the address
    prefetch_tensor_map(&args.z);
    prefetch_tensor_map(&args.grad_y);
    prefetch_tensor_map(&args.x);
    prefetch_tensor_map(&args.weight);
    prefetch_tensor_map(&args.grad_x);
    for (int i = 0; i < C::kStages; ++i) {
      barrier_init(filled + 8 * i, 1);
      barrier_init(emptied + 8 * i, 4);
    }
    barrier_init(weights_filled, 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  const int part = static_cast<int>(blockIdx.x) % args.parts, first_channel = part * kIn;
  const int block = static_cast<int>(blockIdx.x) / args.parts, step = static_cast<int>(gridDim.x) / args.parts;
  if (warp >= 4 * C::kWorkers) {
    if constexpr (C::kMovesRegisters) fewer_registers<40>();
    if (warp > 4 * C::kWorkers) return;
    // z and grad_y come with the batch norm's sums, which are behind the wait; x and the weight came long ago.
    barrier_expect(leads, weights_filled, C::kWeightBytes);
    for (int slice = 0; slice < C::kInSlices; ++slice) {
      load_box(leads, base + slice * kOut * kSlice * kSlice * 2, &args.weight, weights_filled,
               first_channel + slice * kSlice, 0, 0, 0);
    }
    int stage = 0;
    uint32_t parity = 0;
    for (int tile = block; tile < args.tiles; tile += step) {
      barrier_wait(emptied + 8 * stage, parity ^ 1);
      const uint32_t full = filled + 8 * stage;
      barrier_expect(leads, full, (2 * kOut + C::kInSlices) * kSliceBytes);
      uint32_t to = base + C::kStagesAt + stage * C::kStageBytes;
      const int pixel = tile * kPixels;
      for (int slice = 0; slice < kOut; ++slice) {
        load_box(leads, to + slice * kSliceBytes, &args.z, full, slice * kSlice, pixel, 0, 0);
      }
      to += kOut * kSliceBytes;
      for (int slice = 0; slice < kOut; ++slice) {
        load_box(leads, to + slice * kSliceBytes, &args.grad_y, full, slice * kSlice, pixel, 0, 0);
      }
      to += C::kGradSlices * kSliceBytes;
      for (int slice = 0; slice < C::kInSlices; ++slice) {
        load_box(leads, to + slice * kSliceBytes, &args.x, full, first_channel + slice * kSlice, pixel, 0, 0);
      }
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    return;
  }
  if constexpr (C::kMovesRegisters) more_registers<232>();
  constexpr int kThreads = C::kWorkers * 128;
  const auto sync_workers = [] { asm volatile("bar.sync %0, %1;" ::"n"(1 + C::kWorkers), "n"(kThreads) : "memory"); };
  const int worker = warp / 4;
  float grad_w[kOut][kIn / 2] = {};
  fill_values<kOut * kSlice>(args, table, kThreads);
  sync_workers();
  {
    const ThreadChunk at(args.out_channels);
    Values values = {};
    if constexpr (C::kKeepsValues) values.load<kOut * kSlice>(table, at.chunk * 8);
    barrier_wait(weights_filled, 0);
    const uint32_t layout = descriptor_layout(128, 8 * 128);
    int stage = worker;
    uint32_t parity = 0, last_emptied = 0, releases = 0;
    for (int tile = block + worker * step; tile < args.tiles; tile += C::kWorkers * step) {
      char* const z = shared + C::kStagesAt + stage * C::kStageBytes;
      char* const grad_y = z + kOut * kSliceBytes;
      const uint32_t grad = shared_address(z), x = shared_address(grad_y) + C::kGradSlices * kSliceBytes;
      barrier_wait(filled + 8 * stage, parity);
      differentiate_tile<T, kOut, C::kKeepsValues>(z, grad_y, at, values, table, args.act);
      // The stage before is free when its grad_x has left.
      if (leads) wait_stores_read<0>();
      barrier_arrive_if(last_emptied, releases);
      fence_for_copy_engine();
      sync_worker(worker);
      float grad_x[kIn / 2] = {};
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4 * kOut; ++k) {
        const uint32_t a = descriptor_start(grad + k / 4 * kSliceBytes) + k % 4 * 2;
        const uint32_t b = transposed_start(base + k * 16 * 128, kOut * kSlice * kSlice * 2);
        wgmma<T, kIn, false, true>(grad_x, descriptor(layout, a), descriptor(layout, b));
      }
      wgmma_commit();
#pragma unroll
      for (int slice = 0; slice < kOut; ++slice) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t a = transposed_start(grad + slice * kSliceBytes + k * 16 * 128, 0);
          const uint32_t b = transposed_start(x + k * 16 * 128, kSliceBytes);
          wgmma<T, kIn, true>(grad_w[slice], descriptor(layout, a), descriptor(layout, b));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      write_grad_x<T, kIn>(args, grad_x, grad_y, tile, first_channel);
      wgmma_wait<0>();
      last_emptied = emptied + 8 * stage;
      releases = leads;
      stage += C::kWorkers;
      if (stage >= C::kStages) {
        stage -= C::kStages;
        parity ^= 1;
      }
    }
    if (leads) wait_stores_read<0>();
  }
  sync_workers();
  float* const sums = reinterpret_cast<float*>(shared + C::kStagesAt);
  {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int slice = 0; slice < kOut; ++slice) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = slice * kSlice + 16 * (warp % 4) + lane / 4 + 8 * h;
        float* const row = sums + worker * C::kSumFloats + k * C::kSumPitch + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kIn / 8; ++j) {
          *reinterpret_cast<float2*>(row + 8 * j) = {grad_w[slice][4 * j + 2 * h], grad_w[slice][4 * j + 2 * h + 1]};
        }
      }
    }
  }
  sync_workers();
  const int vectors = min(args.in_channels - first_channel, kIn) / 4;
  float* const to = args.workspace + int64_t(block) * args.out_channels * args.in_channels + first_channel;
  for (int i = threadIdx.x; i < args.out_channels * vectors; i += kThreads) {
    const int k = i / vectors, c = (i - k * vectors) * 4;
    const float* const from = sums + k * C::kSumPitch + c;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int other = 1; other < C::kWorkers; ++other) {
      const float4 more = *reinterpret_cast<const float4*>(from + other * C::kSumFloats);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    *reinterpret_cast<float4*>(to + k * args.in_channels + c) = sum;
  }
#endif
}

// ---- host -----------------------------------------------------------------------------------------------------------

// How the input channels are divided: parts of so many columns, of which there is a kernel; no parts if there is none.
struct Widths {
  int columns, parts;
};
Widths widths_of(const ConvShape& s) {
  const auto least = [&s](std::initializer_list<Widths> candidates) {
    for (const Widths& widths : candidates) {
      if (s.in_channels <= widths.columns * widths.parts) return widths;
    }
    return Widths{0, 0};
  };
  // Parts begin at whole slices: those of 96 would write into the next one.
  switch (slices_of(s.out_channels)) {
    case 1: return least({{32, 1}, {64, 1}, {96, 1}, {128, 1}, {192, 1}, {128, 2}, {192, 2}});
    case 2: return least({{64, 1}, {96, 1}, {128, 1}, {128, 2}});
    case 3: return least({{64, 1}, {64, 2}});
    default: return {0, 0};
  }
}

int64_t tiles_of(const ConvShape& s) { return ceil_div<int64_t>(s.out_pixels(), kPixels); }

template <class T, int kOut, int kIn>
void launch(const PointwiseBackwardArgs& a, DType dtype, cudaStream_t stream) {
  using C = Config<kOut, kIn>;
  const ConvShape& s = a.shape;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const auto map = [&](const char* which, const void* data, int channels, int64_t rows, int64_t stride, int box_rows) {
    const cuuint64_t row = static_cast<cuuint64_t>(rows > 1 ? stride : channels) * sizeof(T);
    return tensor_map(kName, which, map_type(dtype), data, {size(channels), size(rows), 1, 1},
                      {row, row * rows, row * rows}, {kSlice, static_cast<cuuint32_t>(box_rows), 1, 1}, {1, 1, 1, 1},
                      128);
  };
  const int64_t pixels = s.out_pixels();
  KernelArgs k;
  k.z = map("z", a.z, s.out_channels, pixels, a.z_stride, kPixels);
  k.grad_y = map("grad_y", a.grad_y, s.out_channels, pixels, a.grad_y_stride, kPixels);
  k.x = map("x", a.x, s.in_channels, pixels, a.x_stride, kPixels);
  k.weight = map("weight", a.weight, s.in_channels, s.out_channels, s.in_channels, kOut * kSlice);
  k.grad_x = map("grad_x", a.grad_x, s.in_channels, pixels, a.grad_x_stride, 16);
  k.affine = a.affine;
  k.grad_beta = a.grad_beta;
  k.grad_gamma = a.grad_gamma;
  k.act = a.act;
  k.rows = static_cast<float>(pixels);
  k.tiles = static_cast<int>(tiles_of(s));
  k.out_channels = s.out_channels;
  k.in_channels = s.in_channels;
  k.parts = widths_of(s).parts;
  k.pixels = pixels;
  k.added = a.added;
  k.added_stride = a.added_stride;
  k.out = a.grad_x;
  k.out_stride = a.grad_x_stride;
  k.workspace = static_cast<float*>(a.workspace);
  constexpr auto kKernel = pointwise_backward_sm90_kernel<T, kOut, kIn>;
  allow_shared_bytes(kKernel, C::kBytes);
  launch_dependent<kKernel>(kName, pointwise_backward_slices(s) * k.parts, C::kThreads, C::kBytes, stream, k);
}

template <class T>
void choose(const PointwiseBackwardArgs& a, DType dtype, cudaStream_t stream) {
  const int out = slices_of(a.shape.out_channels), in = widths_of(a.shape).columns;
  if constexpr (is_built_for_hopper()) {
    switch (out * 1000 + in) {
      case 1032: return launch<T, 1, 32>(a, dtype, stream);
      case 1064: return launch<T, 1, 64>(a, dtype, stream);
      case 1096: return launch<T, 1, 96>(a, dtype, stream);
      case 1128: return launch<T, 1, 128>(a, dtype, stream);
      case 1192: return launch<T, 1, 192>(a, dtype, stream);
      case 2064: return launch<T, 2, 64>(a, dtype, stream);
      case 2096: return launch<T, 2, 96>(a, dtype, stream);
      case 2128: return launch<T, 2, 128>(a, dtype, stream);
      case 3064: return launch<T, 3, 64>(a, dtype, stream);
      default: break;
    }
  }
  fail(kName, ": this build has no kernel for ", a.shape.in_channels, " to ", a.shape.out_channels, " channels");
}

}  // namespace

bool has_pointwise_backward(const ConvShape& s) {
  return is_built_for_hopper() && s.pointwise() && s.groups == 1 && s.in_channels % 8 == 0 && s.out_channels % 8 == 0 &&
         s.out_pixels() > 0 && s.out_pixels() <= std::numeric_limits<int>::max() - kPixels && widths_of(s).parts > 0;
}

int pointwise_backward_slices(const ConvShape& s) {
  return static_cast<int>(std::min<int64_t>(kBlocks / widths_of(s).parts, tiles_of(s)));
}

void pointwise_backward(const PointwiseBackwardArgs& a, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat16) {
    choose<__half>(a, dtype, stream);
  } else if (dtype == DType::kBFloat16) {
    choose<__nv_bfloat16>(a, dtype, stream);
  } else {
    fail(kName, ": no kernel for ", name_of(dtype));
  }
  WgradArgs w = {};
  w.shape = a.shape;
  w.grad_weight = a.grad_weight;
  w.grad_weight_strides = a.grad_weight_strides;
  w.grad_weight_dtype = a.grad_weight_dtype;
  w.workspace = a.workspace;
  add_wgrad_slices(w, pointwise_backward_slices(a.shape), stream);
}

}  // namespace yolo12_fastconv
