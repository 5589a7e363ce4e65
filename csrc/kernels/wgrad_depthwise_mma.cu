// Gradient of a 7x7 depthwise convolution's weight on tensor cores: stride 1, dilation 1, half or bfloat16 with float sums,
// channels a multiple of 8. From compute capability 8.0 on; for 9.0 wgrad_depthwise_sm90.cu is faster. For 3x3 wgrad.cu is:
// 304 us to 360 for the layers of m.
//   dw[c, r, s] = sum over n, p, q of grad_z[n, p, q, c] * x[n, p + r - pad_h, q + s - pad_w, c]
// x and grad_z NHWC, pixels aligned to 16 bytes.
//
// The product of 8 channels of grad_z and the same 8 of x over 16 pixels, m16n8k16, has the sums wanted on its diagonal:
// one of eight is of use. The 16 rows of A are two rows of outputs, which the same pixels of x reach through different
// rows of the filter. The 16 pixels are 8 neighbouring columns of two images.
//
// A warp has 8 channels and 8 columns of outputs. It walks down the rows of x: a row brings kTaps operands B, one for each
// column of the filter, and the last kTaps rows of grad_z, operands A, stay in registers. So x and grad_z are read from
// shared memory once, by ldmatrix, which also transposes them. 7x7: 28 products a row, about 50 other instructions.
//
// The warps of a block have neighbouring channels, 128 bytes of a pixel where there are as many: with 32 bytes of five
// times as many columns, 3x3 got 8 bytes a cycle from L2. Two rows at a time come through a ring of stages of asynchronous
// copies, [group of channels][image][column]: 8 columns are 128 bytes next to each other, free of bank conflicts from
// whichever column on. What lies outside of the image is zero.
//
// A unit is two images and the columns of a block; a slice, a block, is a run of rows of units. Its sums, in an order that
// depends on the shape alone, go to the workspace as [slice][tap][channel].
#include <algorithm>
#include <cstdlib>

#include "device/async_copy.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/gradient_kernels.h"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/tensor_core.cuh"

// Below 8.0 the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "wgrad, depthwise";
constexpr int kTaps = 7;
constexpr int kStages = 4, kStageRows = 2;
constexpr int kMostWarps = 8;  // all that fit a multiprocessor's registers: 112 sums a thread
struct Cut {
  int octets, groups;  // of a block: groups of 8 channels, and of 8 columns
  int chunks;  // blocks along channels
  int pairs, column_strips;
  int rows, slices;  // of outputs in all units
  FastDivide by_chunks, by_pairs, by_octets, by_out_h;
};

Cut cut_depthwise(const ConvShape& s) {
  constexpr int kLeastRows = 8;  // of a slice, which begins and ends with rows of x beside its own
  Cut g;
  const int columns = std::max(1, ceil_div(s.out_w, 8)), octets = s.out_channels / 8;
  g.chunks = ceil_div(octets, kMostWarps);
  g.octets = ceil_div(octets, g.chunks);
  g.column_strips = ceil_div(columns, kMostWarps / g.octets);
  g.groups = ceil_div(columns, g.column_strips);
  g.pairs = ceil_div(s.batch, 2);
  g.rows = g.pairs * g.column_strips * s.out_h;
  const int wanted = std::max(1, kMultiprocessors / g.chunks);
  g.slices = std::min(wanted, ceil_div(g.rows, kLeastRows));
  g.by_chunks = FastDivide(g.chunks);
  g.by_pairs = FastDivide(std::max(1, g.pairs));
  g.by_octets = FastDivide(g.octets);
  g.by_out_h = FastDivide(std::max(1, s.out_h));
  return g;
}

// Columns of x in a stage: those under 8 * groups outputs, and one that is loaded into registers beside the last.
__host__ __device__ constexpr int x_columns(int groups) { return 8 * groups + kTaps; }
__host__ __device__ constexpr int stage_bytes(int octets, int groups) {
  return kStageRows * octets * 2 * (x_columns(groups) + 8 * groups) * 16;
}
int shared_bytes(const Cut& g) {
  return std::max(kStages * stage_bytes(g.octets, g.groups), g.octets * g.groups * kTaps * kTaps * 8 * 4);
}

// A 16-byte piece of each row that a thread copies: of 8 channels of a pixel of x or grad_z.
struct Piece {
  const char* from;
  int row_bytes;
  int first, rows;  // steps at which it lies inside
  uint32_t to;  // in a stage
};

class Loader {
 public:
  __device__ __forceinline__ Loader(const WgradArgs& a, const Cut& g, int chunk, int row, int end)
      : a_(a), g_(g), chunk_(chunk), row_(row), end_(end) {}

  // The next two rows of x, and of grad_z, into `stage`; nothing behind the last.
  __device__ __forceinline__ void load(uint32_t stage) {
    if (steps_ == 0) {
      if (row_ == end_) return;
      begin_unit();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Piece& piece = piece_[i];
      if (i == 0 || second_) {
#pragma unroll
        for (int row = 0; row < kStageRows; ++row) {
          const bool valid = static_cast<unsigned>(row - piece.first) < static_cast<unsigned>(piece.rows);
          copy_async(stage + row * row_bytes_ + piece.to, piece.from, valid ? 16 : 0);  // of 0 bytes: no access
          piece.from += piece.row_bytes;
        }
        // Counted from this step on.
        piece.first -= kStageRows;
        if (piece.first < 0) {
          piece.rows = max(0, piece.rows + piece.first);
          piece.first = 0;
        }
      }
    }
    --steps_;
  }

 private:
  // The rows of this slice in the unit that row_ lies in.
  __device__ __forceinline__ void begin_unit() {
    const ConvShape& s = a_.shape;
    int unit, p, pair, strip;
    g_.by_out_h.divide(row_, unit, p);
    g_.by_pairs.divide(unit, strip, pair);
    const int rows = min(end_ - row_, s.out_h - p), q = strip * g_.groups * 8;
    row_ += rows;
    steps_ = (rows + kTaps - 1 + kStageRows - 1) / kStageRows;
    const int xs = g_.octets * 2 * (x_columns(g_.groups) - 1), grads = g_.octets * 2 * 8 * g_.groups;
    row_bytes_ = stage_bytes(g_.octets, g_.groups) / kStageRows;
    second_ = static_cast<int>(threadIdx.x + blockDim.x) < grads + xs;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int index = static_cast<int>(threadIdx.x + i * blockDim.x);
      const bool is_x = index >= grads;
      if (is_x) index -= grads;
      const int columns = is_x ? x_columns(g_.groups) : 8 * g_.groups;
      const int loaded = is_x ? columns - 1 : columns;
      int place, octet;
      g_.by_octets.divide(index, place, octet);
      const int image = place >= loaded, column = image ? place - loaded : place;
      const int n = 2 * pair + image, channel = (chunk_ * g_.octets + octet) * 8;
      const int w = is_x ? q + column - s.pad_w : q + column;
      const bool inside = n < s.batch && channel < s.out_channels && w >= 0 && w < (is_x ? s.in_w : s.out_w);
      Piece& piece = piece_[i];
      // Images of a stage lie behind each other in each group of channels, x before grad_z.
      piece.to = ((is_x ? 0 : g_.octets * 2 * x_columns(g_.groups)) + (octet * 2 + image) * columns + column) * 16;
      if (is_x) {
        const int top = p - s.pad_h;
        piece.first = max(0, -top);
        piece.rows = inside ? max(0, s.in_h - max(0, top)) : 0;
        piece.row_bytes = static_cast<int>(a_.x_strides.h * 2);
        piece.from = static_cast<const char*>(a_.x) +
                     (n * a_.x_strides.n + top * a_.x_strides.h + w * a_.x_strides.w + channel) * 2;
      } else {
        piece.first = 0;
        piece.rows = inside ? rows : 0;
        piece.row_bytes = static_cast<int>(s.out_w * a_.grad_z_stride * 2);
        piece.from = static_cast<const char*>(a_.grad_z) +
                     (((int64_t(n) * s.out_h + p) * s.out_w + w) * a_.grad_z_stride + channel) * 2;
      }
    }
  }

  const WgradArgs& a_;
  const Cut& g_;
  int chunk_, row_, end_, steps_ = 0, row_bytes_ = 0;
  bool second_ = false;
  Piece piece_[2];
};

template <class T>
__global__ __launch_bounds__(kMostWarps * 32, 1) void wgrad_depthwise_mma_kernel(const __grid_constant__ WgradArgs a,
                                                                                 const __grid_constant__ Cut g) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) char shared[];
  constexpr int kPairs = (kTaps + 1) / 2;  // of rows of the filter
  const uint32_t base = shared_address(shared);
  const int bytes = stage_bytes(g.octets, g.groups), row_bytes = bytes / kStageRows;
  int slice, chunk;
  g.by_chunks.divide(static_cast<int>(blockIdx.x), slice, chunk);
  const int first = static_cast<int>(int64_t(slice) * g.rows / g.slices);
  const int end = static_cast<int>(int64_t(slice + 1) * g.rows / g.slices);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int group, octet;
  g.by_octets.divide(warp, group, octet);

  // Lanes 8 i to 8 i + 7 have the addresses of matrix i: columns, of image i % 2; x: from the next column on for i >= 2.
  const int columns = x_columns(g.groups), image = lane / 8 % 2, column = 8 * group + lane % 8;
  const uint32_t x_from = ((octet * 2 + image) * columns + column + lane / 16) * 16;
  const uint32_t grad_from = (g.octets * 2 * columns + (octet * 2 + image) * 8 * g.groups + column) * 16;

  let_later_kernels_start();
  Loader loader(a, g, chunk, first, end);
  wait_for_earlier_kernels();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    loader.load(base + i * bytes);
    commit_async_copies();
  }
  float sum[kTaps][kPairs][4] = {};  // by columns of the filter
  uint32_t grad[2 * kPairs][2] = {};  // of the rows of outputs that tap row 0, 1, ... of this row of x reaches
  uint32_t stage = base, refill = base + (kStages - 1) * bytes;
#pragma unroll 1
  for (int row = first; row < end;) {
    int unit, p;
    g.by_out_h.divide(row, unit, p);
    const int rows = min(end - row, a.shape.out_h - p);
    row += rows;
    int steps = (rows + kTaps - 1 + kStageRows - 1) / kStageRows;
#pragma unroll 1
    do {
      wait_for_async_copies<kStages - 2>();
      __syncthreads();  // this stage is here, and nobody reads the one before any more
#pragma unroll
      for (int i = 0; i < kStageRows; ++i) {
        const uint32_t here = stage + i * row_bytes;
#pragma unroll
        for (int r = kTaps - 1; r > 0; --r) {
          grad[r][0] = grad[r - 1][0];
          grad[r][1] = grad[r - 1][1];
        }
        load_transposed(grad[0], here + grad_from);
#pragma unroll
        for (int s = 0; s < kTaps; s += 2) {
          uint32_t x[4];
          load_transposed(x, here + x_from + s * 16);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (s + e == kTaps) break;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              const uint32_t pixels[4] = {grad[2 * pair][0], grad[2 * pair + 1][0], grad[2 * pair][1],
                                          grad[2 * pair + 1][1]};
              multiply_add<T>(sum[s + e][pair], pixels, x[2 * e], x[2 * e + 1]);
            }
          }
        }
        if (i == 0) {
          loader.load(refill);
          commit_async_copies();
        }
      }
      refill = stage;
      stage += bytes;
      if (stage == base + kStages * bytes) stage = base;
    } while (--steps > 0);
  }
  wait_for_async_copies<0>();
  __syncthreads();

  // The diagonal: row lane / 4 has its own column in the lane with lane % 4 == lane / 8.
  float* const scratch = reinterpret_cast<float*>(shared);  // [group][tap][octet][channel]
  const int width = g.octets * 8;
  if (lane % 4 == lane / 8) {
    float* const to = scratch + group * kTaps * kTaps * width + octet * 8 + lane / 4;
    const bool odd = lane / 4 % 2;
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const float (&d)[4] = sum[s][pair];
        to[(2 * pair * kTaps + s) * width] = odd ? d[1] : d[0];
        if (2 * pair + 1 < kTaps) to[((2 * pair + 1) * kTaps + s) * width] = odd ? d[3] : d[2];
      }
    }
  }
  __syncthreads();
  float* const out = static_cast<float*>(a.workspace) + int64_t(slice) * kTaps * kTaps * a.shape.out_channels;
  for (int i = threadIdx.x; i < kTaps * kTaps * width; i += blockDim.x) {
    float total = scratch[i];
    for (int k = 1; k < g.groups; ++k) total += scratch[k * kTaps * kTaps * width + i];
    int tap, place;
    g.by_octets.divide(i / 8, tap, place);
    const int channel = chunk * width + place * 8 + i % 8;
    if (channel < a.shape.out_channels) out[int64_t(tap) * a.shape.out_channels + channel] = total;
  }
#endif
}

// For which the kernel was written; before 8.0 its body is empty.
bool has_tensor_cores() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  return major >= 8;
}

}  // namespace

int wgrad_depthwise_mma_slices(const ConvShape& s, DType dtype) {
  const bool served = size_of(dtype) == 2 && s.square_depthwise() && s.stride_h == 1 && s.out_channels % 8 == 0 &&
                      s.kernel_h == kTaps && s.in_h < (1 << 28) &&
                      int64_t(s.batch + 1) * s.out_h * ceil_div(s.out_w, 8) < (1 << 28);
  return served ? cut_depthwise(s).slices : 0;
}

bool wgrad_depthwise_mma_serves(const WgradArgs& a, DType dtype) {
  const ConvShape& s = a.shape;
  // The stride of a dimension of size 1 is never used.
  const bool aligned = is_aligned(a.x, 16) && is_aligned(a.grad_z, 16) &&
                       (s.out_pixels() <= 1 || a.grad_z_stride % 8 == 0) && (s.batch == 1 || a.x_strides.n % 8 == 0) &&
                       (s.in_h == 1 || a.x_strides.h % 8 == 0) && (s.in_w == 1 || a.x_strides.w % 8 == 0);
  const bool short_rows = std::abs(a.x_strides.h) < (1 << 29) && std::abs(s.out_w * a.grad_z_stride) < (1 << 29);
  return aligned && short_rows && wgrad_depthwise_mma_slices(s, dtype) > 0 && has_tensor_cores();
}

void wgrad_depthwise_mma(const WgradArgs& a, DType dtype, cudaStream_t stream) {
  const Cut g = cut_depthwise(a.shape);
  const int bytes = shared_bytes(g);
  const unsigned int blocks = checked_grid(int64_t(g.slices) * g.chunks, kName);
  with_half_type(dtype, kName, [&](auto tag) {
    constexpr auto kKernel = wgrad_depthwise_mma_kernel<typename decltype(tag)::type>;
    allow_shared_bytes(kKernel, bytes);
    launch_dependent<kKernel>(kName, blocks, 32 * g.octets * g.groups, bytes, stream, a, g);
  });
  add_wgrad_slices(a, g.slices, stream);
}

}  // namespace yolo12_fastconv
