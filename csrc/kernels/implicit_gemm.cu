// Dense convolution (groups = 1) as an implicit GEMM on tensor cores, target sm80 (mma.sync, cp.async): every GPU from
// compute capability 8.0 up.
//
//   y[m, k] = act(scale[k] * sum over t, c of x[pixel(m, t), c] * w[k, t, c] + shift[k]) + residual[m, k]
//
// m: output pixel (n, p, q). t: filter tap (r, s). x: NHWC, element strides, channel stride 1, rows 16-byte aligned (a
// channel slice of a wider tensor is fine); pixels outside the image read as zero. w: packed, (K, R * S, C rounded up to
// 16 bytes), zero-filled. y: NHWC, dense. half or bfloat16 in and out, float sums; float in and out with TF32 products.
//
// One block computes a tile of pixels x channels. The reduction runs over 16-byte chunks of (tap, channel) in an order
// that does not depend on the tile, kStages tiles in flight: a chunk never crosses a tap, so each thread finds the tap of
// its chunk once per tile and each of its rows costs one bounds check. Rows are XOR-swizzled in shared memory so that
// ldmatrix and the copies are free of bank conflicts.
#include <cstdint>

#include "device/async_copy.cuh"
#include "device/fast_divide.h"
#include "device/kernels.h"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/numeric.cuh"
#include "device/tensor_core.cuh"

// Below 8.0 the kernel's body is empty, and the constants of its tiles are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

template <class Element, int kTilePixels, int kTileChannels, int kTileChunks, int kStageCount, int kWarpsPixels,
          int kWarpsChannels>
struct GemmConfig {
  using T = Element;
  static constexpr int kPixels = kTilePixels, kChannels = kTileChannels, kChunks = kTileChunks, kStages = kStageCount;
  static constexpr int kWarpPixels = kPixels / kWarpsPixels;  // one warp's part of the tile
  static constexpr int kWarpChannels = kChannels / kWarpsChannels;
  static constexpr int kWarpColumns = kWarpsChannels;
  static constexpr int kThreads = 32 * kWarpsPixels * kWarpsChannels;
  static constexpr int kLanes = 16 / sizeof(T);  // elements in a chunk
  static constexpr int kFragmentsPixels = kWarpPixels / 16, kFragmentsChannels = kWarpChannels / 8;

  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kStageBytes = (kPixels + kChannels) * kRowBytes;
  // The finished tile goes through shared memory on its way out; the padding shifts each row by 4 (half) or 8 (float)
  // banks, so that a quarter warp's fragments fall into different ones.
  static constexpr int kOutRowBytes = kChannels * int(sizeof(T)) + (sizeof(T) == 2 ? 16 : 32);
  static constexpr int kPipelineBytes = kStages * kStageBytes;
  static constexpr int kOutBytes = kPixels * kOutRowBytes;
  static constexpr int kAffineBytes = kChannels * int(sizeof(ScaleShift<float>));
  static constexpr int kSharedBytes = (kPipelineBytes > kOutBytes ? kPipelineBytes : kOutBytes) + kAffineBytes;

  static constexpr int kRowsPerPass = kThreads / kChunks;  // rows that all threads copy at once
  static constexpr int kPixelPasses = kPixels / kRowsPerPass;
  static constexpr int kChannelPasses = (kChannels + kRowsPerPass - 1) / kRowsPerPass;

  static_assert(kChunks == 4 || kChunks == 8, "the swizzle is written for rows of 64 and 128 bytes");
  static_assert(kPixels % kRowsPerPass == 0 && kWarpPixels % 16 == 0 && kWarpChannels % 16 == 0);
  static_assert(kSharedBytes <= 99 * 1024, "sm_86 and sm_89 have 99 KB a block");
};

struct GemmArgs {
  const void* x;
  int64_t x_stride_n;
  int x_stride_h, x_stride_w;
  const void* weight;
  void* y;
  const void* residual;
  int64_t residual_stride;  // between pixels
  bool residual_vectors;  // 16-byte loads are aligned
  Affine affine;
  Act act;
  int64_t pixels;  // N * P * Q
  int out_channels;
  int64_t y_stride;
  int in_channels;
  int chunks_per_tap, chunks;  // ceil(C / lanes), times R * S
  int in_h, in_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int channel_tiles;
  FastDivide by_chunks_per_tap, by_kernel_w, by_out_w, by_out_h, by_channel_tiles;
};

// Byte offset of a 16-byte chunk in a swizzled tile.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  const int mask = kChunks == 8 ? row & 7 : (row >> 1) & 3;
  return (row * kChunks + (chunk ^ mask)) * 16;
}

template <class Config>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const GemmArgs& args, int64_t first_pixel, int first_channel, uint32_t shared)
      : args_(args), shared_(shared), chunk_(threadIdx.x % Config::kChunks), row_(threadIdx.x / Config::kChunks) {
    // Offsets of this thread's pixels count from the tile's first image, which keeps them in 32 bits (checked on the host).
    const int64_t image_pixels = int64_t(args.by_out_h.divisor) * args.by_out_w.divisor;
    const int64_t first_image = first_pixel / image_pixels;
    const int start = static_cast<int>(first_pixel - first_image * image_pixels);
    x_ = static_cast<const T*>(args.x) + first_image * args.x_stride_n;
#pragma unroll
    for (int i = 0; i < Config::kPixelPasses; ++i) {
      const int row = row_ + i * Config::kRowsPerPass;
      int image, p, q, image_row;
      args.by_out_w.divide(start + row, image_row, q);
      args.by_out_h.divide(image_row, image, p);
      const int top = p * args.stride_h - args.pad_h;
      left_[i] = q * args.stride_w - args.pad_w;
      offset_[i] = image * static_cast<int>(args.x_stride_n) + top * args.x_stride_h + left_[i] * args.x_stride_w;
      // A row behind the last pixel gets a position that is outside of every image.
      top_[i] = first_pixel + row < args.pixels ? top : -(1 << 30);
    }
    weight_ = static_cast<const T*>(args.weight) + (first_channel + row_) * int64_t(args.chunks) * Config::kLanes;
    channels_left_ = args.out_channels - first_channel - row_;
  }

  // Starts the copies of tile `index` of the reduction into stage `stage`.
  __device__ __forceinline__ void load(int index, int stage) const {
    const int chunk = index * Config::kChunks + chunk_;
    const bool inside = chunk < args_.chunks;
    int tap, channel_chunk, r, s;
    args_.by_chunks_per_tap.divide(chunk, tap, channel_chunk);
    args_.by_kernel_w.divide(tap, r, s);
    const int down = r * args_.dilation_h, right = s * args_.dilation_w;
    const int channel = channel_chunk * Config::kLanes;
    const int shift = down * args_.x_stride_h + right * args_.x_stride_w + channel;
    const int chunk_bytes = inside ? min(args_.in_channels - channel, Config::kLanes) * int(sizeof(T)) : 0;

    const uint32_t pixels = shared_ + stage * Config::kStageBytes;
#pragma unroll
    for (int i = 0; i < Config::kPixelPasses; ++i) {
      const bool valid = static_cast<unsigned>(top_[i] + down) < static_cast<unsigned>(args_.in_h) &&
                         static_cast<unsigned>(left_[i] + right) < static_cast<unsigned>(args_.in_w);
      const int bytes = valid ? chunk_bytes : 0;
      // An address that is not read still has to be a valid one.
      const T* source = bytes > 0 ? x_ + (offset_[i] + shift) : x_;
      copy_async(pixels + swizzled<Config::kChunks>(row_ + i * Config::kRowsPerPass, chunk_), source, bytes);
    }
    const uint32_t channels = pixels + Config::kPixels * Config::kRowBytes;
#pragma unroll
    for (int i = 0; i < Config::kChannelPasses; ++i) {
      const int row = row_ + i * Config::kRowsPerPass;
      if (Config::kChannels % Config::kRowsPerPass != 0 && row >= Config::kChannels) break;
      const bool valid = inside && i * Config::kRowsPerPass < channels_left_;
      const T* source = valid ? weight_ + (int64_t(i) * Config::kRowsPerPass * args_.chunks + chunk) * Config::kLanes
                              : static_cast<const T*>(args_.weight);
      copy_async(channels + swizzled<Config::kChunks>(row, chunk_), source, valid ? 16 : 0);
    }
    commit_async_copies();
  }

 private:
  using T = typename Config::T;
  const GemmArgs& args_;
  uint32_t shared_;
  int chunk_, row_;
  const T* x_;
  const T* weight_;
  int channels_left_;
  int top_[Config::kPixelPasses], left_[Config::kPixelPasses], offset_[Config::kPixelPasses];
};

template <class Config>
struct Accumulators {
  float value[Config::kFragmentsPixels][Config::kFragmentsChannels][4];
};

// One stage's products: this warp's part of the tile over kChunks chunks of the reduction.
template <class Config>
__device__ __forceinline__ void multiply_stage(Accumulators<Config>& sum, uint32_t stage, int warp_row,
                                               int warp_column) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
  const uint32_t pixels = stage, channels = stage + Config::kPixels * Config::kRowBytes;
#pragma unroll
  for (int step = 0; step < Config::kChunks / 2; ++step) {
    uint32_t a[Config::kFragmentsPixels][4], b[Config::kFragmentsChannels / 2][4];
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
      const int row = warp_row * Config::kWarpPixels + i * 16 + lane % 16;
      load_matrices(a[i], pixels + swizzled<Config::kChunks>(row, step * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < Config::kFragmentsChannels / 2; ++j) {
      const int row = warp_column * Config::kWarpChannels + j * 16 + lane % 8 + lane / 16 * 8;
      load_matrices(b[j], channels + swizzled<Config::kChunks>(row, step * 2 + lane / 8 % 2));
    }
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[i][r] = round_to_tf32(a[i][r]);
      }
#pragma unroll
      for (int j = 0; j < Config::kFragmentsChannels / 2; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) b[j][r] = round_to_tf32(b[j][r]);
      }
    }
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kFragmentsChannels; ++j) {
        multiply_add<T>(sum.value[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_pair(char* shared, float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(shared) = __floats2half2_rn(first, second);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(shared) = __floats2bfloat162_rn(first, second);
  } else {
    *reinterpret_cast<float2*>(shared) = make_float2(first, second);
  }
}

// Scale, shift and activation on the accumulators, then the rounded tile into shared memory.
template <class Config, bool kSilu>
__device__ __forceinline__ void finish_tile(const Accumulators<Config>& sum, const ScaleShift<float>* affine, char* out,
                                            int warp_row, int warp_column) {
  using T = typename Config::T;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Config::kFragmentsChannels; ++j) {
    const int column = warp_column * Config::kWarpChannels + j * 8 + lane % 4 * 2;
    const ScaleShift<float> first = affine[column], second = affine[column + 1];
#pragma unroll
    for (int i = 0; i < Config::kFragmentsPixels; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row * Config::kWarpPixels + i * 16 + half * 8 + lane / 4;
        float u = fmaf(sum.value[i][j][half * 2], first.scale, first.shift);
        float v = fmaf(sum.value[i][j][half * 2 + 1], second.scale, second.shift);
        if constexpr (kSilu) {
          u = activate<T>(u, Act::kSilu);
          v = activate<T>(v, Act::kSilu);
        }
        store_pair<T>(out + row * Config::kOutRowBytes + column * int(sizeof(T)), u, v);
      }
    }
  }
}

template <class T>
union Chunk {
  uint4 bits;
  T element[16 / sizeof(T)];
};

// The tile from shared to global memory, 16 bytes at a time where rows of y are 16-byte aligned, plus the residual. As in
// stock, the activated value is rounded before the residual is added.
template <class Config>
__device__ __forceinline__ void write_tile(const GemmArgs& args, const char* out, int64_t first_pixel,
                                           int first_channel) {
  using T = typename Config::T;
  constexpr int kRowChunks = Config::kChannels / Config::kLanes;
  const bool vectors = args.out_channels % Config::kLanes == 0 && args.y_stride % Config::kLanes == 0;
#pragma unroll 4
  for (int index = threadIdx.x; index < Config::kPixels * kRowChunks; index += Config::kThreads) {
    const int row = index / kRowChunks, column = index % kRowChunks * Config::kLanes;
    const int64_t pixel = first_pixel + row;
    const int channel = first_channel + column;
    if (pixel >= args.pixels || channel >= args.out_channels) continue;
    Chunk<T> value;
    value.bits = *reinterpret_cast<const uint4*>(out + row * Config::kOutRowBytes + column * int(sizeof(T)));
    T* y = static_cast<T*>(args.y) + pixel * args.y_stride + channel;
    const T* residual = static_cast<const T*>(args.residual) + pixel * args.residual_stride + channel;
    if (vectors) {
      if (args.residual != nullptr) {
        Chunk<T> added;
        if (args.residual_vectors) {
          added.bits = *reinterpret_cast<const uint4*>(residual);
        } else {
#pragma unroll
          for (int e = 0; e < Config::kLanes; ++e) added.element[e] = residual[e];
        }
#pragma unroll
        for (int e = 0; e < Config::kLanes; ++e) {
          value.element[e] = convert<T>(convert<float>(value.element[e]) + convert<float>(added.element[e]));
        }
      }
      *reinterpret_cast<uint4*>(y) = value.bits;
    } else {
#pragma unroll
      for (int e = 0; e < Config::kLanes; ++e) {
        if (channel + e >= args.out_channels) break;
        const float added = args.residual != nullptr ? convert<float>(residual[e]) : 0.0f;
        y[e] = args.residual != nullptr ? convert<T>(convert<float>(value.element[e]) + added) : value.element[e];
      }
    }
  }
}

template <class Config>
__global__ __launch_bounds__(Config::kThreads) void implicit_gemm_kernel(const __grid_constant__ GemmArgs args) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  // Channel tiles of the same pixels run next to each other, so that x comes from L2 after the first.
  int pixel_tile, channel_tile;
  args.by_channel_tiles.divide(static_cast<int>(blockIdx.x), pixel_tile, channel_tile);
  const int64_t first_pixel = int64_t(pixel_tile) * Config::kPixels;
  const int first_channel = channel_tile * Config::kChannels;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / Config::kWarpColumns, warp_column = warp % Config::kWarpColumns;

  const uint32_t pipeline = shared_address(shared);
  const TileLoader<Config> loader(args, first_pixel, first_channel, pipeline);
  const int tiles = (args.chunks + Config::kChunks - 1) / Config::kChunks;
#pragma unroll
  for (int stage = 0; stage < Config::kStages - 1; ++stage) {
    if (stage < tiles) {
      loader.load(stage, stage);
    } else {
      commit_async_copies();  // an empty group keeps the count that wait_for_async_copies relies on
    }
  }

  auto* affine = reinterpret_cast<ScaleShift<float>*>(shared + Config::kSharedBytes - Config::kAffineBytes);
  for (int c = threadIdx.x; c < Config::kChannels; c += Config::kThreads) {
    const int channel = first_channel + c;
    affine[c] = channel < args.out_channels ? fold<float>(args.affine, channel) : ScaleShift<float>{0.0f, 0.0f};
  }

  Accumulators<Config> sum = {};
  for (int tile = 0; tile < tiles; ++tile) {
    wait_for_async_copies<Config::kStages - 2>();
    __syncthreads();  // stage `tile` is there for all threads, and all are done with the stage that is refilled next
    const int next = tile + Config::kStages - 1;
    if (next < tiles) {
      loader.load(next, next % Config::kStages);
    } else {
      commit_async_copies();
    }
    multiply_stage<Config>(sum, pipeline + tile % Config::kStages * Config::kStageBytes, warp_row, warp_column);
  }
  wait_for_async_copies<0>();
  __syncthreads();  // the pipeline's memory becomes the output tile

  if (args.act == Act::kSilu) {
    finish_tile<Config, true>(sum, affine, shared, warp_row, warp_column);
  } else {
    finish_tile<Config, false>(sum, affine, shared, warp_row, warp_column);
  }
  __syncthreads();
  write_tile<Config>(args, shared, first_pixel, first_channel);
#endif
}

template <class Config>
void launch(const ConvArgs& a, cudaStream_t stream) {
  const ConvShape& s = a.shape;
  const int64_t plane = int64_t(s.out_h) * s.out_w;
  // See TileLoader: a tile of pixels spans this many images at most, and its offsets must fit 32 bits.
  const int64_t images = (Config::kPixels + plane - 1) / plane + 1;
  const int64_t span = images * a.x_strides.n + (int64_t(s.in_h) + 2 * s.pad_h) * a.x_strides.h +
                       (int64_t(s.in_w) + 2 * s.pad_w) * a.x_strides.w;
  const int64_t pixel_tiles = ceil_div<int64_t>(s.out_pixels(), Config::kPixels);
  const int channel_tiles = ceil_div(s.out_channels, Config::kChannels);
  if (span >= int64_t(1) << 31 || plane + Config::kPixels >= int64_t(1) << 31) {
    fail("implicit_gemm: ", s.batch, "x", s.in_h, "x", s.in_w, " with image stride ", a.x_strides.n,
         " exceeds 32-bit offsets inside a tile; the tile menu sends such shapes to direct");
  }
  const int chunks_per_tap = ceil_div(s.in_channels, Config::kLanes);
  GemmArgs g;
  g.x = a.x;
  g.x_stride_n = a.x_strides.n;
  g.x_stride_h = static_cast<int>(a.x_strides.h);
  g.x_stride_w = static_cast<int>(a.x_strides.w);
  g.weight = a.weight;
  g.y = a.y;
  g.y_stride = a.y_stride;
  g.residual = a.residual;
  g.residual_stride = a.residual_strides.w;
  g.residual_vectors = reinterpret_cast<uintptr_t>(a.residual) % 16 == 0 && a.residual_strides.w % Config::kLanes == 0;
  g.affine = a.affine;
  g.act = a.act;
  g.pixels = s.out_pixels();
  g.out_channels = s.out_channels;
  g.in_channels = s.in_channels;
  g.chunks_per_tap = chunks_per_tap;
  g.chunks = chunks_per_tap * s.kernel_h * s.kernel_w;
  g.in_h = s.in_h;
  g.in_w = s.in_w;
  g.stride_h = s.stride_h;
  g.stride_w = s.stride_w;
  g.pad_h = s.pad_h;
  g.pad_w = s.pad_w;
  g.dilation_h = s.dilation_h;
  g.dilation_w = s.dilation_w;
  g.channel_tiles = channel_tiles;
  g.by_chunks_per_tap = FastDivide(chunks_per_tap);
  g.by_kernel_w = FastDivide(s.kernel_w);
  g.by_out_w = FastDivide(s.out_w);
  g.by_out_h = FastDivide(s.out_h);
  g.by_channel_tiles = FastDivide(channel_tiles);

  const auto kernel = implicit_gemm_kernel<Config>;
  allow_shared_bytes(kernel, Config::kSharedBytes);
  const unsigned int blocks = checked_grid(pixel_tiles * channel_tiles, "implicit_gemm");
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes, stream>>>(g);
  check_launch("implicit_gemm");
}

template <class T>
void choose(const ConvArgs& args, const GemmTile& t, cudaStream_t stream) {
  const auto is = [&](int pixels, int channels, int chunks, int stages) {
    return t.pixels == pixels && t.channels == channels && t.chunks == chunks && t.stages == stages;
  };
  if (is(128, 128, 8, 3)) return launch<GemmConfig<T, 128, 128, 8, 3, 2, 4>>(args, stream);
  if (is(128, 128, 4, 4)) return launch<GemmConfig<T, 128, 128, 4, 4, 2, 4>>(args, stream);
  if (is(128, 64, 8, 3)) return launch<GemmConfig<T, 128, 64, 8, 3, 4, 2>>(args, stream);
  if (is(128, 64, 4, 4)) return launch<GemmConfig<T, 128, 64, 4, 4, 4, 2>>(args, stream);
  if (is(128, 32, 4, 4)) return launch<GemmConfig<T, 128, 32, 4, 4, 4, 1>>(args, stream);
  if (is(128, 16, 4, 4)) return launch<GemmConfig<T, 128, 16, 4, 4, 4, 1>>(args, stream);
  if (is(64, 64, 8, 3)) return launch<GemmConfig<T, 64, 64, 8, 3, 2, 2>>(args, stream);
  if (is(64, 32, 4, 4)) return launch<GemmConfig<T, 64, 32, 4, 4, 4, 1>>(args, stream);
  if (is(64, 16, 4, 4)) return launch<GemmConfig<T, 64, 16, 4, 4, 4, 1>>(args, stream);
  fail("implicit_gemm: no kernel for tile ", t.pixels, "x", t.channels, "x", t.chunks, "x", t.stages);
}

}  // namespace

void implicit_gemm(const ConvArgs& args, DType dtype, const GemmTile& tile, cudaStream_t stream) {
  if (args.shape.groups != 1) fail("implicit_gemm: groups=", args.shape.groups, ", only 1 is dense");
  switch (dtype) {
    case DType::kFloat16: return choose<__half>(args, tile, stream);
    case DType::kBFloat16: return choose<__nv_bfloat16>(args, tile, stream);
    case DType::kFloat32: return choose<float>(args, tile, stream);
    default: fail("implicit_gemm: no tensor-core kernel for ", name_of(dtype));
  }
}

}  // namespace yolo12_fastconv
