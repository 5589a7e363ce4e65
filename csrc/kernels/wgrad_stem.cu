// Gradient of the weight of a network's first convolution: 3 input channels, 3x3, stride 2, padding 1, on tensor cores
// (mma.sync). Half and bfloat16 with float sums. Compute capability 9.0 only, for the shared memory of its ring.
//   dw[k, r, s, c] = sum over n, p, q of grad_z[n, p, q, k] * x[n, c, 2 p + r - 1, 2 q + s - 1]
// x: pictures in float, rounded as a cast before the convolution would round them, or in the compute dtype; the pixels of
// a channel adjacent (planar) or the channels of a pixel. grad_z NHWC, pixels aligned to 16 bytes.
//
// The layer is memory traffic: so x is read once, in the form it comes in. A block takes a strip of kColumns outputs down
// a run of rows. A step, one row of outputs, brings two rows of x and one of grad_z, through a ring of asynchronous
// copies; then x is rounded and put into pixels of four elements, two of them a chunk of 16 bytes that ldmatrix transposes,
// without bank conflicts: a row's under the filter's columns 1 and 2, and both rows' under column 0. The row above is the
// step before's. Of 40 columns of sums 27 are wanted; 5 products per 16 outputs and 16 channels take a quarter of the time
// that their bytes do.
//
// A row is rounded while the one before is multiplied, so that a step has one barrier. Sums go to the workspace as
// [slice][k][tap][c], a slice being a block's run of rows, in an order that depends on the shape alone.
#include <algorithm>
#include <cstring>

#include "device/async_copy.cuh"
#include "device/dependent_launch.cuh"
#include "device/gradient_kernels.h"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/tensor_core.cuh"

// Elsewhere the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "wgrad, stem";
constexpr int kWarps = 10, kThreads = 32 * kWarps;
constexpr int kColumns = 16 * kWarps;  // outputs of a strip: 16 a warp
constexpr int kChunks = kColumns + 1;  // of a row of x
constexpr int kRoundedRow = kChunks * 16, kRoundedStep = 3 * kRoundedRow;  // two rows, and the odd pixels of both
constexpr int kStages = 5, kAhead = kStages - 2;
constexpr int kFilter = 27;  // taps and channels

// kTileCount: groups of 16 output channels. kIsPlanar: whether x has the pixels of a channel adjacent.
template <class Element, class Input, bool kIsPlanar, int kTileCount>
struct Config {
  using T = Element;
  using In = Input;
  static constexpr bool kPlanar = kIsPlanar;
  static constexpr int kTiles = kTileCount, kOctets = 2 * kTiles;
  static constexpr int kLanes = 16 / int(sizeof(In));  // elements in a copy
  static constexpr int kMargin = kLanes;  // pixels in front of the first output's, two of which are of use
  static constexpr int kRowPixels = 2 * kColumns + kMargin;
  static constexpr int kRowPieces = kRowPixels * 3 / kLanes;  // planar: a third is a channel's
  static constexpr int kGradOffset = 2 * kRowPieces * 16, kStageBytes = kGradOffset + kOctets * kColumns * 16;
  static constexpr int kRoundedOffset = kStages * kStageBytes;
  static constexpr int kSharedBytes = kRoundedOffset + 3 * kRoundedStep;
  static constexpr int kScratchBytes = kWarps * kTiles * 16 * kFilter * 4;
  static_assert(kRowPixels * 3 % kLanes == 0 && kRowPixels % kLanes == 0);
  static_assert(kScratchBytes <= kRoundedOffset);
};

struct Plan {
  int tiles, groups;  // of 16 output channels in a block; blocks that share them out
  int strips, rows, slices;  // rows of strips in all pictures
};

// More spill: a thread has 20 sums for each.
constexpr int kMostTiles = 4;
// Blocks on a multiprocessor, as shared memory and registers allow.
constexpr int resident_blocks(int tiles) { return tiles <= 2 ? 2 : 1; }

Plan plan_stem(const ConvShape& s) {
  Plan p;
  const int tiles = ceil_div(s.out_channels, 16);
  p.groups = ceil_div(tiles, kMostTiles);
  p.tiles = ceil_div(tiles, p.groups);
  p.strips = ceil_div(std::max(1, s.out_w), kColumns);
  p.rows = s.batch * p.strips * s.out_h;
  p.slices = std::min(p.rows, std::max(1, kMultiprocessors * resident_blocks(p.tiles) / p.groups));
  return p;
}

// The steps of a block: rows of a strip, and before the first of each strip one that only brings the row of x above it.
struct Walk {
  int row, end, p, strip;
  bool leads_in = true;
  __device__ __forceinline__ Walk(int first, int last, int out_h)
      : row(first), end(last), p(first % out_h), strip(first / out_h) {}
  __device__ __forceinline__ bool done() const { return row == end; }
  __device__ __forceinline__ void advance(int out_h) {
    if (leads_in) {
      leads_in = false;
      return;
    }
    ++row;
    if (++p == out_h) {
      p = 0;
      ++strip;
      leads_in = true;
    }
  }
};

// Two rows of x and one of grad_z into a stage.
template <class C>
__device__ __forceinline__ void load_step(const WgradArgs& a, const Plan& plan, const Walk& at, int first_channel,
                                          uint32_t stage) {
  using In = typename C::In;
  const ConvShape& s = a.shape;
  const int n = at.strip / plan.strips, q = at.strip % plan.strips * kColumns;
  const int top = 2 * at.p - (at.leads_in ? 2 : 0), left = 2 * q - C::kMargin;
  const In* const image = static_cast<const In*>(a.x) + n * a.x_strides.n;
#pragma unroll
  for (int i = 0; i < ceil_div(2 * C::kRowPieces, kThreads); ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    if (piece >= 2 * C::kRowPieces) break;
    const int row = piece / C::kRowPieces, place = piece % C::kRowPieces, h = top + row;
    const In* from = image + h * a.x_strides.h;
    bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(s.in_h);
    if constexpr (C::kPlanar) {
      constexpr int kPlane = C::kRowPieces / 3;
      const int c = place / kPlane, w = left + place % kPlane * C::kLanes;
      inside = inside && static_cast<unsigned>(w) < static_cast<unsigned>(s.in_w);
      from += c * a.x_strides.c + w;
    } else {
      const int element = 3 * left + place * C::kLanes;
      inside = inside && static_cast<unsigned>(element) < static_cast<unsigned>(3 * s.in_w);
      from += element;
    }
    copy_async(stage + piece * 16, from, inside ? 16 : 0);  // of 0 bytes: no access
  }
  if (at.leads_in) return;
  const char* const grad =
      static_cast<const char*>(a.grad_z) + ((int64_t(n) * s.out_h + at.p) * s.out_w + q) * a.grad_z_stride * 2;
#pragma unroll
  for (int i = 0; i < C::kOctets * kColumns / kThreads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads, octet = piece % C::kOctets;
    const int column = piece / C::kOctets, channel = first_channel + octet * 8;
    const bool inside = q + column < s.out_w && channel < s.out_channels;
    copy_async(stage + C::kGradOffset + (octet * kColumns + column) * 16,
               grad + (column * a.grad_z_stride + channel) * 2, inside ? 16 : 0);
  }
}

// The two rows of x of a stage, rounded, in pixels of four elements.
template <class C>
__device__ __forceinline__ void round_step(const char* stage, char* rounded) {
  using T = typename C::T;
  using In = typename C::In;
#pragma unroll
  for (int i = 0; i < ceil_div(2 * kChunks, kThreads); ++i) {
    const int job = static_cast<int>(threadIdx.x) + i * kThreads;
    if (job >= 2 * kChunks) break;
    const int row = job / kChunks, chunk = job % kChunks, pixel = C::kMargin - 2 + 2 * chunk;
    const In* const from = reinterpret_cast<const In*>(stage) + row * 3 * C::kRowPixels;
    In values[2][3];
    if constexpr (C::kPlanar) {
#pragma unroll
      for (int c = 0; c < 3; ++c) {
        const auto pair = load_lanes<2>(from + c * C::kRowPixels + pixel);
        In two[2];
        memcpy(two, &pair, sizeof(two));
        values[0][c] = two[0];
        values[1][c] = two[1];
      }
    } else {
#pragma unroll
      for (int e = 0; e < 6; e += 2) {
        const auto pair = load_lanes<2>(from + pixel * 3 + e);
        In two[2];
        memcpy(two, &pair, sizeof(two));
        values[e / 3][e % 3] = two[0];
        values[(e + 1) / 3][(e + 1) % 3] = two[1];
      }
    }
    T slots[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) slots[e] = e % 4 < 3 ? convert<T>(values[e / 4][e % 4]) : convert<T>(0.0f);
    Lanes<T, 8> word;
    memcpy(&word, slots, sizeof(slots));
    store_lanes(reinterpret_cast<T*>(rounded + job * 16), word);
    Lanes<T, 4> odd;
    memcpy(&odd, slots + 4, sizeof(odd));
    store_lanes(reinterpret_cast<T*>(rounded + 2 * kRoundedRow + chunk * 16 + row * 8), odd);
  }
}

// Products with kTiles * 16 channels: of the filter's rows, columns 1 and 2; column 0 of the rows 1 and 2; and of row 0, with
// a half that nobody wants.
template <class C>
struct Sums {
  float value[C::kTiles][5][4] = {};
};

// Where a lane finds its row of a matrix in a rounded step. Lanes 8 i to 8 i + 7 have the addresses of matrix i: of eight
// outputs, of the next eight; then (from lane 16 on) the same of another operand.
struct Places {
  uint32_t above, here, odd;
  __device__ __forceinline__ Places(int warp, int lane) {
    const uint32_t chunk = (16 * warp + lane % 16) * 16;
    above = lane < 16 ? chunk + 16 + kRoundedRow : chunk + 2 * kRoundedRow;
    here = lane < 16 ? chunk + 16 : chunk + 16 + kRoundedRow;
    odd = chunk + 2 * kRoundedRow;
  }
};

// `above`, `here`: rounded rows of the step before and of this one.
template <class C>
__device__ __forceinline__ void multiply_step(Sums<C>& sum, const Places& at, uint32_t grad, uint32_t above,
                                              uint32_t here) {
  using T = typename C::T;
  uint32_t first[4], others[4], odd[2];
  load_transposed(first, above + at.above);
  load_transposed(others, here + at.here);
  load_transposed(odd, here + at.odd);
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
    uint32_t rows[4];
    load_transposed(rows, grad + m * 2 * kColumns * 16);
    multiply_add<T>(sum.value[m][0], rows, first[0], first[1]);
    multiply_add<T>(sum.value[m][1], rows, others[0], others[1]);
    multiply_add<T>(sum.value[m][2], rows, others[2], others[3]);
    multiply_add<T>(sum.value[m][3], rows, odd[0], odd[1]);
    multiply_add<T>(sum.value[m][4], rows, first[2], first[3]);
  }
}

template <class C>
__global__ __launch_bounds__(kThreads,
                             resident_blocks(C::kTiles)) void wgrad_stem_kernel(const __grid_constant__ WgradArgs a,
                                                                                const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
  extern __shared__ __align__(128) char shared[];
  const uint32_t base = shared_address(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, out_h = a.shape.out_h;
  const int slice = static_cast<int>(blockIdx.x) / plan.groups;
  const int first_channel = static_cast<int>(blockIdx.x) % plan.groups * C::kTiles * 16;
  const int first = static_cast<int>(int64_t(slice) * plan.rows / plan.slices);
  const int end = static_cast<int>(int64_t(slice + 1) * plan.rows / plan.slices);
  const Places places(warp, lane);
  const uint32_t rounded = base + C::kRoundedOffset;
  // Matrices of grad_z: eight channels of eight outputs, the next channels, then the same of the next outputs.
  const int column = 16 * warp + lane / 16 * 8 + lane % 8;
  const uint32_t grad = base + C::kGradOffset + (lane / 8 % 2 * kColumns + column) * 16;

  let_later_kernels_start();
  Walk to_load(first, end, out_h), to_round = to_load;
  wait_for_earlier_kernels();
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) {
    if (!to_load.done()) {
      load_step<C>(a, plan, to_load, first_channel, base + i * C::kStageBytes);
      to_load.advance(out_h);
    }
    commit_async_copies();
  }
  Sums<C> sum;
  int refill = kAhead, stage = 0, previous = 0, here = 0, above = 0, next = 0;  // of stages; of rounded steps
  bool multiplies = false;
#pragma unroll 1
  while (true) {
    wait_for_async_copies<kAhead - 1>();
    __syncthreads();  // this stage is here, and nobody reads the one before the previous any more
    if (!to_load.done()) {
      load_step<C>(a, plan, to_load, first_channel, base + refill * C::kStageBytes);
      to_load.advance(out_h);
    }
    commit_async_copies();
    refill = refill + 1 == kStages ? 0 : refill + 1;
    const bool more = !to_round.done();
    if (more) round_step<C>(shared + stage * C::kStageBytes, shared + C::kRoundedOffset + next * kRoundedStep);
    if (multiplies) {
      multiply_step<C>(sum, places, grad + previous * C::kStageBytes, rounded + above * kRoundedStep,
                       rounded + here * kRoundedStep);
    }
    if (!more) break;
    multiplies = !to_round.leads_in;
    to_round.advance(out_h);
    previous = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    above = here;
    here = next;
    next = next == 2 ? 0 : next + 1;
  }
  wait_for_async_copies<0>();
  __syncthreads();

  float* const scratch = reinterpret_cast<float*>(shared);  // [warp][k][tap][c]
  constexpr int kElements = C::kTiles * 16 * kFilter;
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int part = 0; part < 5; ++part) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int j = lane % 4 * 2 + e % 2, pixel = j / 4, c = j % 4, k = 16 * m + lane / 4 + e / 2 * 8;
        const int r = part < 3 ? part : part == 3 ? 1 + pixel : 0, s = part < 3 ? 1 + pixel : 0;
        if (c < 3 && (part < 4 || pixel == 1)) {
          scratch[warp * kElements + k * kFilter + (r * 3 + s) * 3 + c] = sum.value[m][part][e];
        }
      }
    }
  }
  __syncthreads();
  const int elements = min(C::kTiles * 16, a.shape.out_channels - first_channel) * kFilter;
  float* const out =
      static_cast<float*>(a.workspace) + (int64_t(slice) * a.shape.out_channels + first_channel) * kFilter;
  for (int i = threadIdx.x; i < elements; i += kThreads) {
    float total = scratch[i];
#pragma unroll
    for (int k = 1; k < kWarps; ++k) total += scratch[k * kElements + i];
    out[i] = total;
  }
#endif
}

template <class C>
void launch(const WgradArgs& a, const Plan& plan, cudaStream_t stream) {
  constexpr auto kKernel = wgrad_stem_kernel<C>;
  allow_shared_bytes(kKernel, C::kSharedBytes);
  const unsigned int blocks = checked_grid(int64_t(plan.slices) * plan.groups, kName);
  launch_dependent<kKernel>(kName, blocks, kThreads, C::kSharedBytes, stream, a, plan);
  add_wgrad_slices(a, plan.slices, stream);
}

template <class T, class In, bool kPlanar>
void choose(const WgradArgs& a, cudaStream_t stream) {
  const Plan plan = plan_stem(a.shape);
  switch (plan.tiles) {
    case 1: return launch<Config<T, In, kPlanar, 1>>(a, plan, stream);
    case 2: return launch<Config<T, In, kPlanar, 2>>(a, plan, stream);
    case 3: return launch<Config<T, In, kPlanar, 3>>(a, plan, stream);
    default: return launch<Config<T, In, kPlanar, kMostTiles>>(a, plan, stream);
  }
}

bool is_planar(const WgradArgs& a) { return a.x_strides.w == 1; }

}  // namespace

bool has_wgrad_stem(const ConvShape& s, DType dtype) {
  return size_of(dtype) == 2 && s.in_channels == 3 && s.groups == 1 && s.kernel_h == 3 && s.kernel_w == 3 &&
         s.stride_h == 2 && s.stride_w == 2 && s.pad_h == 1 && s.pad_w == 1 && s.dilation_h == 1 && s.dilation_w == 1 &&
         s.in_w % 8 == 0 && s.out_channels % 8 == 0 && s.out_channels <= 4096 && s.out_pixels() > 0 &&
         s.in_pixels() < (int64_t(1) << 29);
}

bool wgrad_stem_serves(const WgradArgs& a, DType x_dtype, DType dtype) {
  const ConvShape& s = a.shape;
  if (!has_wgrad_stem(s, dtype) || (x_dtype != dtype && x_dtype != DType::kFloat32)) return false;
  // The stride of a dimension of size 1 is never used.
  const auto aligned = [&](int size, int64_t stride) { return size == 1 || stride % (16 / size_of(x_dtype)) == 0; };
  const bool interleaved = a.x_strides.c == 1 && a.x_strides.w == 3;
  return is_aligned(a.x, 16) && aligned(s.batch, a.x_strides.n) && aligned(s.in_h, a.x_strides.h) &&
         (interleaved || (is_planar(a) && aligned(s.in_channels, a.x_strides.c))) && is_aligned(a.grad_z, 16) &&
         a.grad_z_stride % 8 == 0;
}

int64_t wgrad_stem_workspace_bytes(const ConvShape& s) {
  return int64_t(plan_stem(s).slices) * s.out_channels * kFilter * int64_t(sizeof(float));
}

void wgrad_stem(const WgradArgs& a, DType x_dtype, DType dtype, cudaStream_t stream) {
  with_half_type(dtype, kName, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_bool(is_planar(a), [&](auto planar) {
      constexpr bool kPlanar = decltype(planar)::value;
      if (x_dtype == DType::kFloat32) {
        choose<T, float, kPlanar>(a, stream);
      } else {
        choose<T, T, kPlanar>(a, stream);
      }
    });
  });
}

}  // namespace yolo12_fastconv
