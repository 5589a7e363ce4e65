// A detection head's NHWC maps to its outputs, which are (N, C, A): transposed through shared memory, boxes decoded and
// scores passed through the sigmoid on the way, so that every map is read once.
//
// A block has 64 pixels of one level and one image, and either all bins of the boxes or up to kScoreWords words of the
// scores. It loads whole pixels, in words of 16 bytes. In shared memory pixel p's word w lies at w ^ swizzle(p): then both
// the rows that one ldmatrix reads and the same word of eight neighbouring pixels are in different banks. ldmatrix gives a
// thread eight neighbouring pixels of one channel, a 16-byte word of the output.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "device/async_copy.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/launch_limits.cuh"
#include "device/maps.h"
#include "device/tensor_core.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 256;
constexpr int kPixels = 64;
constexpr int kRun = 8;  // pixels of a channel in a thread
constexpr int kScoreWords = 16;
constexpr int kSides = 4;
static_assert(kThreads == kSides * kPixels);

struct DetectPlan {
  DetectArgs args;
  FastDivide tiles;  // per image, of all levels
  FastDivide roles;  // per tile: the boxes, then the scores' channels in parts
  FastDivide box_words, score_words, last_score_words;  // per pixel and role
  int first_tile[kMostDetectLevels];
  int first_pixel[kMostDetectLevels];
  int anchors;  // A
  bool boxes_in_words, scores_in_words;  // maps can be read in words of 16 bytes
  int store;  // pixels that a store takes: 8, 4, 2 or 1
};

__device__ __forceinline__ int swizzle(int pixel) { return (pixel & 7) ^ ((pixel >> 3 & 3) << 1); }

// Where in a tile of shared memory a pixel's channel lies.
template <class T>
__device__ __forceinline__ int tile_index(int pixel, int channel, int row_words) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  return (pixel * row_words + (channel / kLanes ^ swizzle(pixel))) * kLanes + channel % kLanes;
}

// Of a run, as many neighbouring pixels as 16 bytes hold.
template <class T>
constexpr int kPiece = kLanesOf16Bytes<T>;

template <class T>
struct alignas(16) Run {
  T value[kRun];
};

// Which of the tile's pixels is element i of a lane's run. The same pieces of four lanes lie side by side: a store that leaves
// every other 16 bytes out would fill each sector of L2 by halves, in two turns.
template <class T>
__device__ __forceinline__ int run_pixel(int half, int lane, int i) {
  constexpr int kOwn = kPiece<T>;
  return 32 * half + i / kOwn * (4 * kOwn) + lane % 4 * kOwn + i % kOwn;
}

// Eight pixels (run_pixel) of channel 8 group + lane / 4. All lanes of a warp call it together.
template <class T>
__device__ __forceinline__ Run<T> load_run(const T* tile, int half, int group, int lane, int row_words) {
  Run<T> run;
  if constexpr (sizeof(T) == 2) {
    // Row r of matrix m is the pixel whose two lanes' values end up as word m of a thread.
    const int m = lane / 8, r = lane % 8;
    const int pixel = 32 * half + 8 * (r / 2) + 2 * m + r % 2;
    uint32_t words[4];
    load_transposed(words, shared_address(tile + tile_index<T>(pixel, group * kLanesOf16Bytes<T>, row_words)));
    memcpy(&run, words, sizeof(run));
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      run.value[i] = tile[tile_index<T>(run_pixel<T>(half, lane, i), 8 * group + lane / 4, row_words)];
    }
  }
  return run;
}

// Stores those of a run's pixels that are below `pixels`, `width` at once, of which `pixels` is a multiple. to: pixel 0.
template <class T>
__device__ __forceinline__ void store_run(T* to, const Run<T>& run, int half, int lane, int pixels, int width) {
  const auto store = [&]<int kMost>() {
    constexpr int kWidth = std::min(kMost, kPiece<T>);
    struct alignas(sizeof(T) * kWidth) Part {
      T value[kWidth];
    };
#pragma unroll
    for (int i = 0; i < kRun; i += kWidth) {
      Part part;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part.value[j] = run.value[i + j];
      const int pixel = run_pixel<T>(half, lane, i);
      if (pixel < pixels) *reinterpret_cast<Part*>(to + pixel) = part;
    }
  };
  switch (width) {
    case 8: return store.template operator()<8>();
    case 4: return store.template operator()<4>();
    case 2: return store.template operator()<2>();
    default: return store.template operator()<1>();
  }
}

template <class T>
__device__ __forceinline__ Accumulator<T> exponential(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, double>) {
    return exp(x);
  } else if constexpr (sizeof(T) == 2) {
    return __expf(x);  // relative error 2^-21 and less where it counts, under half rounding
  } else {
    return expf(x);
  }
}

// Calls function(index of the bin, value) for a side's bins of one pixel, a word at a time where its bins are whole words.
template <class T, class Function>
__device__ __forceinline__ void for_bins(const T* tile, int pixel, int side, int bins, int row_words,
                                         Function&& function) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  if (bins % kLanes == 0) {
    for (int i = 0; i < bins; i += kLanes) {
      Accumulator<T> values[kLanes];
      widen<T, kLanes>(load_lanes<kLanes>(tile + tile_index<T>(pixel, side * bins + i, row_words)), values);
#pragma unroll
      for (int j = 0; j < kLanes; ++j) function(i + j, values[j]);
    }
  } else {
    for (int i = 0; i < bins; ++i) {
      function(i, convert<Accumulator<T>>(tile[tile_index<T>(pixel, side * bins + i, row_words)]));
    }
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void detect_kernel(const __grid_constant__ DetectPlan plan) {
  using Acc = Accumulator<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  extern __shared__ uint4 shared[];
  __shared__ Acc sides[kSides][kPixels];
  __shared__ Acc bin_values[kMostDetectBins];
  T* tile = reinterpret_cast<T*>(shared);
  const DetectArgs& a = plan.args;
  const int tid = static_cast<int>(threadIdx.x);

  int rest, tile_of_image, image, role;
  plan.tiles.divide(static_cast<int>(blockIdx.x), rest, tile_of_image);
  plan.roles.divide(rest, image, role);
  int index = 0;
  while (index + 1 < a.level_count && tile_of_image >= plan.first_tile[index + 1]) ++index;
  const DetectLevel& level = a.levels[index];
  const int pixel = (tile_of_image - plan.first_tile[index]) * kPixels;
  const int pixels = min(kPixels, level.pixels - pixel);
  const int anchor = plan.first_pixel[index] + pixel;

  const bool is_box = role == 0;
  const int first_channel = is_box ? 0 : (role - 1) * kScoreWords * kLanes;
  const int channels = is_box ? kSides * a.bins : min(kScoreWords * kLanes, a.classes - first_channel);
  const bool is_last = role + 1 == static_cast<int>(plan.roles.divisor);
  const FastDivide& by_words = is_box ? plan.box_words : is_last ? plan.last_score_words : plan.score_words;
  const int words = static_cast<int>(by_words.divisor);
  const int row_words = round_up(words, 8);
  const int64_t stride = is_box ? level.box_stride : level.score_stride;
  const T* in = static_cast<const T*>(is_box ? level.boxes : level.scores) +
                (int64_t(image) * level.pixels + pixel) * stride + first_channel;

  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (is_box ? plan.boxes_in_words : plan.scores_in_words) {
    for (int i = tid; i < words * pixels; i += kThreads) {
      int p, w;
      by_words.divide(i, p, w);
      copy_chunk_async(shared + p * row_words + (w ^ swizzle(p)), in + p * stride + w * kLanes, true);
    }
    commit_async_copies();
  } else {
    for (int i = tid; i < channels * pixels; i += kThreads) {
      const int p = i / channels, c = i - p * channels;
      tile[tile_index<T>(p, c, row_words)] = in[p * stride + c];
    }
  }
  if (is_box && tid < a.bins && a.bin_values != nullptr) {
    bin_values[tid] = convert<Acc>(static_cast<const T*>(a.bin_values)[tid]);
  }
  wait_for_async_copies<0>();
  __syncthreads();

  // The maps themselves, and the sigmoid.
  T* map = static_cast<T*>(is_box ? a.boxes : a.scores) +
           (int64_t(image) * (is_box ? channels : a.classes) + first_channel) * plan.anchors + anchor;
  T* y = static_cast<T*>(a.y) + int64_t(image) * (kSides + a.classes) * plan.anchors + anchor;
  T* y_scores = y + int64_t(kSides + first_channel) * plan.anchors;
  const int lane = tid % 32;
  for (int unit = tid / 32; unit < 2 * ceil_div(channels, 8); unit += kThreads / 32) {
    const int half = unit % 2, group = unit / 2;
    const Run<T> run = load_run(tile, half, group, lane, row_words);
    const int channel = 8 * group + lane / 4;
    if (channel >= channels) continue;
    const int64_t to = int64_t(channel) * plan.anchors;
    store_run(map + to, run, half, lane, pixels, plan.store);
    if (is_box) continue;
    Run<T> confidence;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      confidence.value[i] = convert<T>(sigmoid<kFastSigmoid<T>>(convert<Acc>(run.value[i])));
    }
    store_run(y_scores + to, confidence, half, lane, pixels, plan.store);
  }
  if (!is_box) return;

  const int p = tid % kPixels, side = tid / kPixels;
  if (p < pixels) {
    Acc distance;
    if (a.bin_values == nullptr) {
      distance = convert<Acc>(tile[tile_index<T>(p, side, row_words)]);
    } else {
      // NaN is lost here, and comes back through its own exponential.
      Acc largest = -INFINITY;
      for_bins(tile, p, side, a.bins, row_words, [&](int, Acc value) { largest = max(largest, value); });
      Acc total = 0, weighted = 0;
      for_bins(tile, p, side, a.bins, row_words, [&](int i, Acc value) {
        const Acc e = exponential<T>(value - largest);
        total += e;
        weighted += e * bin_values[i];
      });
      distance = weighted / total;
    }
    sides[side][p] = distance;
  }
  __syncthreads();
  if (p >= pixels) return;
  // A thread now has one of the box's four numbers, x where `side` is even.
  const int axis = side % 2;
  const Acc point =
      convert<Acc>(static_cast<const T*>(a.points)[axis * a.points_strides[0] + (anchor + p) * a.points_strides[1]]);
  const Acc step = convert<Acc>(static_cast<const T*>(a.steps)[(anchor + p) * a.steps_stride]);
  const Acc low = point - sides[axis][p], high = point + sides[2 + axis][p];
  const Acc number = side < 2 ? (a.xywh ? (low + high) / 2 : low) : (a.xywh ? high - low : high);
  y[int64_t(side) * plan.anchors + p] = convert<T>(number * step);
}

template <class T>
void launch_detect(const DetectArgs& args, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  DetectPlan plan;
  plan.args = args;
  int64_t tiles = 0, anchors = 0;
  plan.boxes_in_words = plan.scores_in_words = true;
  uint64_t sizes = 0;
  for (int i = 0; i < args.level_count; ++i) {
    const DetectLevel& level = args.levels[i];
    plan.first_tile[i] = static_cast<int>(tiles);
    plan.first_pixel[i] = static_cast<int>(anchors);
    tiles += ceil_div(level.pixels, kPixels);
    anchors += level.pixels;
    sizes |= static_cast<uint64_t>(level.pixels);
    plan.boxes_in_words &= is_aligned(level.boxes, 16) && level.box_stride % kLanes == 0;
    plan.scores_in_words &= is_aligned(level.scores, 16) && level.score_stride % kLanes == 0;
  }
  const int roles = 1 + ceil_div(args.classes, kScoreWords * kLanes);
  const int64_t blocks = tiles * args.batch * roles;
  if (anchors > INT_MAX || blocks > INT_MAX) {
    fail("detect_decode: ", args.batch, " images of ", anchors, " pixels are too many; split the batch");
  }
  if (blocks == 0) return;
  plan.anchors = static_cast<int>(anchors);
  plan.tiles = FastDivide(static_cast<int>(tiles));
  plan.roles = FastDivide(roles);
  plan.box_words = FastDivide(ceil_div(kSides * args.bins, kLanes));
  plan.score_words = FastDivide(kScoreWords);
  plan.last_score_words = FastDivide(ceil_div(args.classes, kLanes) - (roles - 2) * kScoreWords);
  plan.store = sizes % 8 == 0 ? 8 : sizes % 4 == 0 ? 4 : sizes % 2 == 0 ? 2 : 1;
  const int most_channels = std::max(kSides * args.bins, std::min(args.classes, kScoreWords * kLanes));
  const int shared_bytes = kPixels * round_up(ceil_div(most_channels, kLanes), 8) * 16;
  allow_shared_bytes(&detect_kernel<T>, shared_bytes);
  launch_dependent<detect_kernel<T>>("detect_decode", static_cast<unsigned>(blocks), kThreads, shared_bytes, stream,
                                     plan);
}

}  // namespace

void detect_decode(const DetectArgs& args, DType dtype, cudaStream_t stream) {
  if (args.level_count > kMostDetectLevels || args.bins > kMostDetectBins) {
    fail("detect_decode: no kernel for ", args.level_count, " levels and ", args.bins, " bins");
  }
  with_type(dtype, [&](auto tag) { launch_detect<typename decltype(tag)::type>(args, stream); });
}

}  // namespace yolo12_fastconv
