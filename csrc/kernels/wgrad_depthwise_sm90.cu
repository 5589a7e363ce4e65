// Gradient of a 7x7 depthwise convolution's weight on tensor cores, for compute capability 9.0: stride 1, dilation 1,
// half or bfloat16 with float sums, channels a multiple of 8.
//   dw[c, r, s] = sum over n, p, q of grad_z[n, p, q, c] * x[n, p + r - pad_h, q + s - pad_w, c]
// x and grad_z NHWC, pixels aligned to 16 bytes.
//
// A product m16n8k16 is of one channel. k are 16 columns of outputs, k0 to k0 + 15. The 16 rows of A are four rows of
// x, each from columns k0, k0 + 2, k0 + 4 and k0 + 6 on; the 8 columns of B are four rows of grad_z, each from column
// k0 and from k0 - 1 on. So an element of the result is a sum of one tap: x's even distances and grad_z's two make 8
// columns of the filter, of which 7 are wanted, and the difference of the rows is the filter's row. Four rows of grad_z
// reach ten rows of x: three products for 4 x 16 outputs and 49 taps, 51 % of them of use (products of 8 channels by 8,
// of which the diagonal is wanted: 11 %).
//
// Operands are planes of channels. The copy engine brings tiles as they lie in memory, zeros where they lie outside of
// the image; ldmatrix and stmatrix transpose them, grad_z a second time from a column before, since operands are words
// of two columns. A stage of 4 rows, 48 columns and 32 channels is 288 products (460 cycles of the tensor cores at 1.6
// a multiprocessor) and about 1200 cycles of shared memory. Asynchronous copies by the threads instead of boxes, 16
// bytes each, and one block of 64 channels a multiprocessor: 42.9 us for 256 channels at 40x40 and batch 32, where this
// takes 26.6.
//
// A block has 32 channels and kBlocks blocks of 8 columns of outputs, of one image or two. It walks down four rows of x
// and of grad_z at a time. Two warps have 8 channels: each transposes two rows of a stage, and multiplies four
// channels. The last two stages' operands of grad_z stay in registers, so that those of x are read once. Two blocks are
// resident, so that one transposes while the other multiplies.
//
// A slice, a block, is a run of groups of four rows of outputs. Its sums, in an order that depends on the shape alone,
// go to the workspace as [slice][tap][channel].
#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/gradient_kernels.h"
#include "device/hopper.cuh"
#include "device/kernels.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/tensor_core.cuh"
#include "device/tensor_map.cuh"

// For other architectures the kernel's body is empty, and the functions that it calls are left over.
#pragma nv_diag_suppress 177

namespace yolo12_fastconv {
namespace {

constexpr char kName[] = "wgrad, depthwise";
constexpr int kTaps = 7;
constexpr int kRows = 4;  // of x and of grad_z in a stage
constexpr int kBlocks = 6;  // of 8 columns of outputs, of a block
constexpr int kOctets = 4, kBlockChannels = 8 * kOctets;
constexpr int kChannels = 4;  // of a warp
constexpr int kStages = 2;
constexpr int kThreads = 64 * kOctets, kResident = 2;  // 128 registers, all of which are in use

// A stage: [image][row][column] of x, then of grad_z, whose pixels of kPixelBytes the copies swizzle.
constexpr int kPixelBytes = 2 * kBlockChannels;
__host__ __device__ constexpr int x_columns(int images) { return images == 2 ? 32 : 56; }
__host__ __device__ constexpr int grad_columns(int images) { return images == 2 ? 28 : 52; }
__host__ __device__ constexpr int x_bytes(int images) { return images * kRows * x_columns(images) * kPixelBytes; }
__host__ __device__ constexpr int grad_bytes(int images) { return images * kRows * grad_columns(images) * kPixelBytes; }
__host__ __device__ constexpr int stage_bytes(int images) { return x_bytes(images) + grad_bytes(images); }
// Planes: x as [channel][row][column], grad_z as [channel][row][shift by 0 or 1][column]. Eight channels, and what the
// lanes of a load read, lie in different banks.
constexpr int kXRowBytes = 160, kXPlaneBytes = kRows * kXRowBytes + 16;
constexpr int kGradRowBytes = kBlocks * 16 + 16, kGradPlaneBytes = 2 * kRows * kGradRowBytes + 16;
constexpr int kSumFloats = 3 * 16 * 8 + 1;  // of a channel, at the end; odd, for the banks

constexpr int kPlanesBytes = kBlockChannels * (kXPlaneBytes + kGradPlaneBytes);
constexpr int kControlBytes = 128;
constexpr int shared_bytes(int images) { return kStages * stage_bytes(images) + kPlanesBytes + kControlBytes; }
static_assert(kStages * stage_bytes(1) >= kBlockChannels * kSumFloats * 4);
static_assert(kResident * (shared_bytes(2) + 1024) <= 228 * 1024);

struct Cut {
  int chunks;  // blocks along channels
  int blocks, images;  // of a block: blocks of 8 columns of an image, images
  int column_strips;
  int row_groups;  // of a strip of columns of an image
  int groups, slice_groups, slices;  // groups of rows in all, of a slice
  FastDivide by_chunks, by_row_groups, by_sets;
};

Cut cut_depthwise(const ConvShape& s) {
  Cut g;
  g.chunks = std::max(1, ceil_div(s.out_channels, kBlockChannels));
  const int blocks = ceil_div(s.out_w + 1, 8);  // the last column is used from the one after it, too
  g.images = 2 * blocks <= kBlocks ? 2 : 1;
  g.blocks = kBlocks / g.images;
  g.column_strips = ceil_div(blocks, g.blocks);
  const int sets = std::max(1, ceil_div(s.batch, g.images));
  g.row_groups = std::max(1, ceil_div(s.out_h, kRows));
  g.groups = s.batch > 0 && s.out_h > 0 ? sets * g.column_strips * g.row_groups : 0;
  // One round of blocks. A slice has a stage more for each image that it ends, two where it ends inside of one.
  const int wanted = std::max(1, kResident * kMultiprocessors / g.chunks),
            least = std::max(1, ceil_div(g.groups, wanted));
  int best = 0;
  for (int n = least; n <= least + g.row_groups; ++n) {
    const int stages = n % g.row_groups == 0   ? n + n / g.row_groups
                       : g.row_groups % n == 0 ? n + 2
                                               : n + ceil_div(n - 1, g.row_groups) + 2;
    if (n > least && stages > best) continue;
    best = stages;
    g.slice_groups = n;
  }
  g.slices = ceil_div(g.groups, g.slice_groups);
  g.by_chunks = FastDivide(g.chunks);
  g.by_row_groups = FastDivide(g.row_groups);
  g.by_sets = FastDivide(sets);
  return g;
}

// A thread's place, read from the hardware each time: 96 sums and operands leave few registers to keep it in.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

struct KernelArgs {
  WgradArgs wgrad;
  CUtensorMap x, grad;  // (C, W, H, N)
  Cut cut;
};

// Of a stage, as bits.
constexpr int kFirst = 1;  // of an image's rows
constexpr int kOnlyX = 2;  // below the slice's rows of grad_z
constexpr int kNone = 4;  // behind the last

// Where the copies are; for want of registers in shared memory. A unit: a strip of columns of a set of images.
struct Progress {
  int group, end;  // that the next unit begins with, and behind the slice's last
  int stages;  // left of this unit
  int strip, set;
  int p, end_p;  // rows of outputs: the stage's first, the unit's end
  int chunk;

  // To the next stage, of which it returns the bits.
  __device__ __forceinline__ int advance(const ConvShape& s, const Cut& g) {
    p += kRows;
    int kind = 0;
    if (stages == 0) {
      if (group >= end) return kNone;
      int unit, index;
      g.by_row_groups.divide(group, unit, index);
      g.by_sets.divide(unit, strip, set);
      const int groups = min(end - group, g.row_groups - index);
      group += groups;
      p = index * kRows;
      end_p = p + groups * kRows;
      // Two more for the rows of x below; where all of those are below the image, none.
      stages = max(1, min(groups + 2, (s.in_h + s.pad_h - p + kRows - 1) / kRows));
      kind = kFirst;
    }
    --stages;
    return kind | (p >= end_p ? kOnlyX : 0);
  }
};

// Beside stages and planes.
struct Control {
  uint64_t arrived[kStages];  // barriers
  int kinds[kStages];
  Progress copied;
};

// Starts the copies of the next stage. By one thread; behind the products, where it has registers.
__device__ __forceinline__ void copy_stage(const KernelArgs& args, Control& control, uint32_t base, int stage) {
  const ConvShape& s = args.wgrad.shape;
  const Cut& g = args.cut;
  Progress& at = control.copied;
  const uint32_t arrived = shared_address(&control.arrived[stage]), to = base + stage * stage_bytes(g.images);
  const int kind = at.advance(s, g);
  control.kinds[stage] = kind;
  if (kind & kNone) {
    barrier_arrive(arrived);
    return;
  }
  const int p = at.p, q = at.strip * g.blocks * 8;
  barrier_expect(1, arrived, kind & kOnlyX ? x_bytes(g.images) : stage_bytes(g.images));
#pragma unroll 1
  for (int image = 0; image < g.images; ++image) {
    const int n = at.set * g.images + image;
    load_box(1, to + image * x_bytes(2) / 2, &args.x, arrived, at.chunk * kBlockChannels, q - s.pad_w, p - s.pad_h, n);
    if (!(kind & kOnlyX)) {
      load_box(1, to + x_bytes(g.images) + image * grad_bytes(2) / 2, &args.grad, arrived, at.chunk * kBlockChannels,
               q - 1, p, n);
    }
  }
}

static_assert(sizeof(Control) <= kControlBytes);

// Four matrices of eight pixels by eight channels, transposed: pixel is lane % 8 of matrix lane / 8, from `from` on.
__device__ __forceinline__ void load_pixels_transposed(uint32_t (&words)[4], uint32_t from, int pixel, int octet) {
  const uint32_t address = from + pixel * kPixelBytes;
  load_transposed(words, address + ((octet ^ (address >> 7 & 3)) * 16));
}

// Two rows of the stage, for each of two warps, into planes.
__device__ __forceinline__ void transpose_stage(int images, uint32_t stage, uint32_t x_planes) {
  const int lane = thread_index() % 32, warp = thread_index() / 32, octet = warp / 2, half = warp % 2;
  // Matrix lane / 8, whose row lane % 8 is a column in the stage and a channel in the planes.
  const uint32_t x_to = x_planes + (octet * 8 + lane % 8) * kXPlaneBytes + 2 * half * kXRowBytes + lane / 8 * 16;
  const uint32_t grad_to = x_planes + kBlockChannels * kXPlaneBytes + (octet * 8 + lane % 8) * kGradPlaneBytes +
                           (4 * half + lane / 8 % 2) * kGradRowBytes + lane / 16 * 16;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    uint32_t x[2][4], grad[kBlocks / 2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // One image: 64 columns, of which the last 8 are those of the next row, and not used.
      const int pixel = (2 * half + row) * x_columns(images) + lane + i * (images == 2 ? kRows * x_columns(2) : 32);
      load_pixels_transposed(x[i], stage, pixel, octet);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) store_matrices(x_to + row * kXRowBytes + 64 * i, x[i]);
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      // Both shifts of two blocks.
      const int block = 2 * i + lane / 16;
      const int first = images == 2 && block >= kBlocks / 2 ? kRows * grad_columns(2) - kBlocks / 2 * 8 : 0;
      const int pixel = (2 * half + row) * grad_columns(images) + first + 8 * block + 1 - lane / 8 % 2 + lane % 8;
      load_pixels_transposed(grad[i], stage + x_bytes(images), pixel, octet);
    }
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) store_matrices(grad_to + 2 * row * kGradRowBytes + 32 * i, grad[i]);
  }
}

// Two matrices, of the addresses that lanes 0 to 15 give.
__device__ __forceinline__ void load_two_matrices(uint32_t (&registers)[2], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(registers[0]), "=r"(registers[1])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(address));
  return word;
}

template <class T>
__global__ __launch_bounds__(kThreads,
                             kResident) void wgrad_depthwise_sm90_kernel(const __grid_constant__ KernelArgs args) {
#if YOLO12_HAS_WGMMA
  extern __shared__ __align__(1024) char shared[];
  const WgradArgs& a = args.wgrad;
  const Cut& g = args.cut;
  const uint32_t base = shared_address(shared), x_planes = base + kStages * stage_bytes(g.images);
  Control& control = *reinterpret_cast<Control*>(shared + kStages * stage_bytes(g.images) + kPlanesBytes);
  const uint32_t arrived = shared_address(control.arrived);

  let_later_kernels_start();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.x);
    prefetch_tensor_map(&args.grad);
    for (int i = 0; i < kStages; ++i) barrier_init(arrived + 8 * i, 1);
    barrier_init_fence();
    int slice;
    g.by_chunks.divide(static_cast<int>(blockIdx.x), slice, control.copied.chunk);
    control.copied.group = slice * g.slice_groups;
    control.copied.end = min(g.groups, control.copied.group + g.slice_groups);
    control.copied.stages = 0;
  }
  wait_for_earlier_kernels();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) copy_stage(args, control, base, i);
  }
  __syncthreads();

  float sum[kChannels][3][4] = {};
  uint32_t held[kChannels][2][kBlocks];  // operands of the last two stages of grad_z
#pragma unroll 1
  for (uint32_t step = 0;; ++step) {
    const uint32_t stage = step % kStages;
    barrier_wait(arrived + 8 * stage, step / kStages % 2);
    const int kind = control.kinds[stage];
    __syncthreads();  // nobody reads the planes any more
    if (kind & kNone) break;
    if (kind & kFirst) {
#pragma unroll
      for (auto& of_channel : held) {
#pragma unroll
        for (auto& of_stage : of_channel) {
#pragma unroll
          for (uint32_t& word : of_stage) word = 0;
        }
      }
    }
    transpose_stage(g.images, base + stage * stage_bytes(g.images), x_planes);
    __syncthreads();

    // lane / 4 is a row of A, two rows of x by four distances, or a column of B.
    const int lane = thread_index() % 32, channel = thread_index() / 32 * kChannels;
    const uint32_t a_from = x_planes + channel * kXPlaneBytes + lane / 16 * kXRowBytes + (lane / 4 % 4 + lane % 4) * 4;
    const uint32_t a_from_second = a_from + (g.images == 2 ? 16 : 0);  // blocks of the second half
    const uint32_t b_from =
        x_planes + kBlockChannels * kXPlaneBytes + channel * kGradPlaneBytes + lane % 8 * kGradRowBytes + lane / 8 * 16;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      uint32_t grad[kBlocks], words[4], pair[2];
      load_matrices(words, b_from + c * kGradPlaneBytes);
      load_two_matrices(pair, b_from + c * kGradPlaneBytes + 64);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) grad[b] = kind & kOnlyX ? 0 : b < 4 ? words[b] : pair[b - 4];
#pragma unroll
      for (int b = 0; b < kBlocks; b += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int block = b + i / 2;
          x[i] = load_word((block < kBlocks / 2 ? a_from : a_from_second) + c * kXPlaneBytes + i % 2 * 2 * kXRowBytes +
                           block * 16);
        }
        multiply_add<T>(sum[c][0], x, grad[b], grad[b + 1]);
        multiply_add<T>(sum[c][1], x, held[c][0][b], held[c][0][b + 1]);
        multiply_add<T>(sum[c][2], x, held[c][1][b], held[c][1][b + 1]);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        held[c][1][b] = held[c][0][b];
        held[c][0][b] = grad[b];
      }
    }
    if (thread_index() == 0) copy_stage(args, control, base, stage);
  }

  // Sum [j][4 * row of x + distance][2 * row of grad_z + shift], the row of x being 4 * j rows further down.
  float* const scratch = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x % 32, channel = threadIdx.x / 32 * kChannels;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float* const to = scratch + (channel + c) * kSumFloats + lane / 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[j * 128 + i / 2 * 64 + i % 2] = sum[c][j][i];
    }
  }
  __syncthreads();
  int slice, chunk;
  g.by_chunks.divide(static_cast<int>(blockIdx.x), slice, chunk);
  float* const out = static_cast<float*>(a.workspace) + int64_t(slice) * kTaps * kTaps * a.shape.out_channels;
  for (int i = threadIdx.x; i < kTaps * kTaps * kBlockChannels; i += kThreads) {
    const int tap = i / kBlockChannels, local = i % kBlockChannels, to = chunk * kBlockChannels + local;
    const int r = tap / kTaps, s = tap % kTaps;
    const float* const from = scratch + local * kSumFloats + (4 * r + s / 2) * 8 + s % 2;
    // Rows 0 to 3 of grad_z, and of x as far below as the tap.
    const float total = (from[0] + from[4 * 8 + 2]) + (from[2 * (4 * 8 + 2)] + from[3 * (4 * 8 + 2)]);
    if (to < a.shape.out_channels) out[int64_t(tap) * a.shape.out_channels + to] = total;
  }
#endif
}

// Whether machine code for 9.0 is compiled at all. If not, the kernel is left out.
constexpr bool is_built_for_hopper() {
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch == 900) return true;
  }
  return false;
}

template <class T>
void launch(const WgradArgs& a, DType dtype, cudaStream_t stream) {
  if constexpr (is_built_for_hopper()) {
    const ConvShape& s = a.shape;
    KernelArgs k = {};
    k.wgrad = a;
    k.cut = cut_depthwise(s);
    const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
    const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(2 * elements); };
    // The stride of a dimension of size 1 is never used.
    const int64_t x_w = s.in_w == 1 ? s.in_channels : a.x_strides.w, x_h = s.in_h == 1 ? s.in_w * x_w : a.x_strides.h,
                  x_n = s.batch == 1 ? s.in_h * x_h : a.x_strides.n;
    const cuuint32_t images = static_cast<cuuint32_t>(k.cut.images);
    k.x = tensor_map(kName, "x", map_type(dtype), a.x, {size(s.in_channels), size(s.in_w), size(s.in_h), size(s.batch)},
                     {bytes(x_w), bytes(x_h), bytes(x_n)},
                     {kBlockChannels, static_cast<cuuint32_t>(x_columns(images)), kRows, 1}, {1, 1, 1, 1}, kPixelBytes);
    const int64_t grad_w = s.out_pixels() == 1 ? s.out_channels : a.grad_z_stride;
    k.grad = tensor_map(
        kName, "grad_z", map_type(dtype), a.grad_z, {size(s.out_channels), size(s.out_w), size(s.out_h), size(s.batch)},
        {bytes(grad_w), bytes(grad_w * s.out_w), bytes(grad_w * s.out_w * s.out_h)},
        {kBlockChannels, static_cast<cuuint32_t>(grad_columns(images)), kRows, 1}, {1, 1, 1, 1}, kPixelBytes);
    constexpr auto kKernel = wgrad_depthwise_sm90_kernel<T>;
    const int shared = shared_bytes(k.cut.images);
    allow_shared_bytes(kKernel, shared);
    const unsigned int blocks = checked_grid(int64_t(k.cut.slices) * k.cut.chunks, kName);
    launch_dependent<kKernel>(kName, blocks, kThreads, shared, stream, k);
  }
}

}  // namespace

int wgrad_depthwise_sm90_slices(const ConvShape& s, DType dtype) {
  const bool served = size_of(dtype) == 2 && s.square_depthwise() && s.stride_h == 1 && s.out_channels % 8 == 0 &&
                      s.kernel_h == kTaps && s.in_h < (1 << 28) &&
                      int64_t(s.batch + 1) * (s.out_h + kRows) * ceil_div(s.out_w + 1, 8) < (1 << 28);
  return served ? cut_depthwise(s).slices : 0;
}

bool wgrad_depthwise_sm90_serves(const WgradArgs& a, DType dtype) {
  const ConvShape& s = a.shape;
  // The stride of a dimension of size 1 is never used.
  const auto even = [](int64_t stride, int size) { return size == 1 || (stride > 0 && stride % 8 == 0); };
  const Strides& x = a.x_strides;
  return is_built_for_hopper() && wgrad_depthwise_sm90_slices(s, dtype) > 0 && is_aligned(a.x, 16) &&
         is_aligned(a.grad_z, 16) && even(a.grad_z_stride, s.out_pixels() == 1 ? 1 : 2) && even(x.n, s.batch) &&
         even(x.h, s.in_h) && even(x.w, s.in_w);
}

void wgrad_depthwise_sm90(const WgradArgs& a, DType dtype, cudaStream_t stream) {
  with_half_type(dtype, kName, [&](auto tag) { launch<typename decltype(tag)::type>(a, dtype, stream); });
  add_wgrad_slices(a, cut_depthwise(a.shape).slices, stream);
}

}  // namespace yolo12_fastconv
