// Concatenation of NHWC maps along their channels, with nearest-neighbour upsampling on the way, and the gradient of that
// upsampling. Bound by memory.
//
// Concatenation: a block belongs to one part, a thread reads kItems words of it and stores each where the part's pixel goes:
// once, or four times for an upsampled one, which is therefore read once. Words are as wide as all addresses allow, 16 bytes
// where channels come in eights. Neighbouring threads have neighbouring words of a pixel, so that both sides are coalesced.
#include <algorithm>
#include <climits>

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/maps.h"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;
constexpr int kItems = 4;  // loads in flight per thread: 80 KB per multiprocessor at 48 registers

struct Part {
  const void* in;
  void* out;
  int64_t stride;  // of `in`, in words
  FastDivide words;  // per pixel
  FastDivide width;  // pixels of `in` per row
  int items;  // words of all pixels
  int first_block;
  int scale;
};

struct ConcatPlan {
  Part parts[kMostConcatParts];
  int count;
  int64_t out_stride;  // in words
};

template <class Word>
__global__ __launch_bounds__(kThreads) void concat_kernel(const __grid_constant__ ConcatPlan plan) {
  int index = 0;
  while (index + 1 < plan.count && static_cast<int>(blockIdx.x) >= plan.parts[index + 1].first_block) ++index;
  const Part& part = plan.parts[index];
  const int first =
      (static_cast<int>(blockIdx.x) - part.first_block) * (kThreads * kItems) + static_cast<int>(threadIdx.x);
  const Word* in = static_cast<const Word*>(part.in);
  Word* out = static_cast<Word*>(part.out);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  Word value[kItems];
  int pixel[kItems], word[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    // The last block's threads behind the end read the last word again and store nothing.
    const int item = min(first + i * kThreads, part.items - 1);
    part.words.divide(item, pixel[i], word[i]);
    value[i] = in[pixel[i] * part.stride + word[i]];
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i * kThreads >= part.items) break;
    if (part.scale == 1) {
      out[pixel[i] * plan.out_stride + word[i]] = value[i];
    } else {
      int row, column;
      part.width.divide(pixel[i], row, column);
      const int64_t out_width = 2 * static_cast<int64_t>(part.width.divisor);
      Word* corner = out + (int64_t(2) * row * out_width + 2 * column) * plan.out_stride + word[i];
      corner[0] = value[i];
      corner[plan.out_stride] = value[i];
      corner[out_width * plan.out_stride] = value[i];
      corner[(out_width + 1) * plan.out_stride] = value[i];
    }
  }
}

// The widest word that every address and size is a multiple of; element types have 2, 4 or 8 bytes.
int word_bytes(const ConcatArgs& args) {
  uint64_t all = reinterpret_cast<uintptr_t>(args.out) | static_cast<uint64_t>(args.stride);
  for (int i = 0; i < args.count; ++i) {
    const ConcatPart& part = args.parts[i];
    all |=
        reinterpret_cast<uintptr_t>(part.in) | static_cast<uint64_t>(part.stride) | static_cast<uint64_t>(part.bytes);
  }
  for (int bytes = 16; bytes > 2; bytes /= 2) {
    if (all % bytes == 0) return bytes;
  }
  return 2;
}

template <class Word>
void launch_concat(const ConcatArgs& args, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Word);
  // Words of a launch are counted in 31 bits: large batches take several.
  int64_t most = 1;
  for (int i = 0; i < args.count; ++i) {
    const int64_t pixels = int64_t(args.h / args.parts[i].scale) * (args.w / args.parts[i].scale);
    most = std::max(most, pixels * (args.parts[i].bytes / kBytes));
  }
  const int64_t limit = INT_MAX - int64_t(kThreads) * kItems;
  if (most > limit) fail("concat_channels: ", args.h, "x", args.w, " pixels in one image are too many");
  const int64_t images = std::min<int64_t>(args.batch, limit / most);
  for (int64_t done = 0; done < args.batch; done += images) {
    const int64_t now = std::min<int64_t>(images, args.batch - done);
    ConcatPlan plan;
    plan.count = 0;
    plan.out_stride = args.stride / kBytes;
    int64_t blocks = 0;
    char* out = static_cast<char*>(args.out) + done * args.h * args.w * args.stride;
    for (int i = 0; i < args.count; ++i) {
      const ConcatPart& from = args.parts[i];
      if (from.bytes == 0) continue;
      const int h = args.h / from.scale, w = args.w / from.scale;
      Part& part = plan.parts[plan.count++];
      part.in = static_cast<const char*>(from.in) + done * h * w * from.stride;
      part.out = out;
      part.stride = from.stride / kBytes;
      part.words = FastDivide(from.bytes / kBytes);
      part.width = FastDivide(w);
      part.items = static_cast<int>(now * h * w * (from.bytes / kBytes));
      part.first_block = static_cast<int>(blocks);
      part.scale = from.scale;
      blocks += ceil_div(part.items, kThreads * kItems);
      out += from.bytes;
    }
    if (blocks == 0) continue;
    launch_dependent<concat_kernel<Word>>("concat_channels", static_cast<unsigned>(blocks), kThreads, 0, stream, plan);
  }
}

struct UpsampleBackwardPlan {
  UpsampleBackwardArgs args;
  FastDivide width;  // of grad_x
  int64_t items;  // groups of channels, of all pixels of grad_x
  int groups;  // per pixel
};

template <class T, int kLanes, bool kAdds>
__global__ __launch_bounds__(kThreads) void upsample_backward_kernel(
    const __grid_constant__ UpsampleBackwardPlan plan) {
  using Acc = Accumulator<T>;
  const UpsampleBackwardArgs& a = plan.args;
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (item >= plan.items) return;
  const int pixel = static_cast<int>(item / plan.groups);
  const int channel = static_cast<int>(item - int64_t(pixel) * plan.groups) * kLanes;
  int row, column;
  plan.width.divide(pixel, row, column);
  const int64_t grad_width = 2 * static_cast<int64_t>(a.w);
  const T* corner =
      static_cast<const T*>(a.grad_y) + (int64_t(2) * row * grad_width + 2 * column) * a.grad_y_stride + channel;
  const int64_t down = grad_width * a.grad_y_stride;
  const Lanes<T, kLanes> from[4] = {load_lanes<kLanes>(corner), load_lanes<kLanes>(corner + a.grad_y_stride),
                                    load_lanes<kLanes>(corner + down),
                                    load_lanes<kLanes>(corner + down + a.grad_y_stride)};
  T* to = static_cast<T*>(a.grad_x) + pixel * a.grad_x_stride + channel;
  Lanes<T, kLanes> held;
  if constexpr (kAdds) held = load_lanes<kLanes>(to);
  Acc part[4][kLanes], sum[kLanes];
#pragma unroll
  for (int i = 0; i < 4; ++i) widen<T, kLanes>(from[i], part[i]);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) sum[i] = (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
  Lanes<T, kLanes> total = narrow<T, kLanes>(sum);
  if constexpr (kAdds) {
    // Rounded twice, as a sum behind the gradient would be.
    widen<T, kLanes>(total, sum);
    widen<T, kLanes>(held, part[0]);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum[i] += part[0][i];
    total = narrow<T, kLanes>(sum);
  }
  store_lanes<T, kLanes>(to, total);
}

template <class T, int kLanes>
void launch_upsample_backward(const UpsampleBackwardArgs& args, cudaStream_t stream) {
  const int64_t pixels = args.batch * args.h * args.w;
  if (pixels > INT_MAX) fail("upsample_nearest_backward: ", pixels, " pixels are too many; split the batch");
  UpsampleBackwardPlan plan = {args, FastDivide(args.w), 0, args.channels / kLanes};
  plan.items = pixels * plan.groups;
  const int64_t blocks = ceil_div<int64_t>(plan.items, kThreads);
  if (blocks > INT_MAX) fail("upsample_nearest_backward: ", blocks, " blocks are too many; split the batch");
  if (blocks == 0) return;
  const auto grid = static_cast<unsigned>(blocks);
  if (args.adds) {
    launch_dependent<upsample_backward_kernel<T, kLanes, true>>("upsample_nearest_backward_", grid, kThreads, 0, stream,
                                                                plan);
  } else {
    launch_dependent<upsample_backward_kernel<T, kLanes, false>>("upsample_nearest_backward", grid, kThreads, 0, stream,
                                                                 plan);
  }
}

}  // namespace

void concat_channels(const ConcatArgs& args, cudaStream_t stream) {
  if (args.batch == 0 || args.h == 0 || args.w == 0) return;
  switch (word_bytes(args)) {
    case 16: return launch_concat<uint4>(args, stream);
    case 8: return launch_concat<uint2>(args, stream);
    case 4: return launch_concat<unsigned int>(args, stream);
    default: return launch_concat<unsigned short>(args, stream);
  }
}

void upsample_nearest_backward(const UpsampleBackwardArgs& args, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kLanes = kLanesOf16Bytes<T>;
    const bool wide = args.channels % kLanes == 0 && args.grad_y_stride % kLanes == 0 &&
                      args.grad_x_stride % kLanes == 0 && is_aligned(args.grad_y, 16) && is_aligned(args.grad_x, 16);
    wide ? launch_upsample_backward<T, kLanes>(args, stream) : launch_upsample_backward<T, 1>(args, stream);
  });
}

}  // namespace yolo12_fastconv
