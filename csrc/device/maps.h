// Kernels that copy and decode feature maps: their arguments, and what host code may call. All maps are NHWC rows: channels
// adjacent, pixels evenly spaced in order over (N, H, W).
#pragma once

#include <cuda_runtime_api.h>

#include "args.h"

namespace yolo12_fastconv {

// One map of a concatenation.
struct ConcatPart {
  const void* in;  // (N, H / scale, W / scale) pixels
  int64_t stride;  // bytes from pixel to pixel
  int bytes;  // of a pixel's channels
  int scale;  // 1, or 2: every pixel becomes 2x2 (nearest neighbour)
};

constexpr int kMostConcatParts = 8;

// out[pixel] = the parts' pixels one behind the other. Bytes, whatever their type.
struct ConcatArgs {
  ConcatPart parts[kMostConcatParts];
  int count;
  void* out;  // (N, H, W) pixels
  int64_t stride;  // bytes from pixel to pixel
  int batch, h, w;
};

// kernels/concat.cu
void concat_channels(const ConcatArgs& args, cudaStream_t stream);

// grad_x[n, c, h, w] = sum of the 2x2 pixels of grad_y that nearest-neighbour upsampling made of it, added as
// (top left + top right) + (bottom left + bottom right), in float (double for double). With `adds` the sum, rounded, is added
// to what grad_x holds.
struct UpsampleBackwardArgs {
  const void* grad_y;  // (N, 2 H, 2 W) pixels
  int64_t grad_y_stride;  // elements from pixel to pixel
  void* grad_x;  // (N, H, W) pixels
  int64_t grad_x_stride;  // likewise
  int64_t batch;
  int channels, h, w;
  bool adds;
};

// kernels/concat.cu
void upsample_nearest_backward(const UpsampleBackwardArgs& args, DType dtype, cudaStream_t stream);

// One level of a detection head. Strides count elements from pixel to pixel.
struct DetectLevel {
  const void* boxes;  // (N, pixels, 4 * bins)
  int64_t box_stride;
  const void* scores;  // (N, pixels, classes)
  int64_t score_stride;
  int pixels;  // H * W
};

constexpr int kMostDetectLevels = 8;
constexpr int kMostDetectBins = 16;

// A detection head's maps to what it returns, levels one behind the other along A ("anchors", one per pixel):
//   boxes (N, 4 * bins, A) and scores (N, classes, A): the maps themselves
//   y (N, 4 + classes, A): boxes decoded, and sigmoid(scores)
// A side of a box is sum(softmax(its bins) * bin_values), or the value itself without bin_values; sides are the distances
// from the anchor point to the left, top, right and bottom edge. All computed in float (double for double), rounded once.
struct DetectArgs {
  DetectLevel levels[kMostDetectLevels];
  int level_count;
  int batch;
  int bins;  // 1 to kMostDetectBins
  int classes;
  const void* bin_values;  // (bins), dense; null if bins is 1
  const void* points;  // (2, A): x and y in pixels of the level
  int64_t points_strides[2];
  const void* steps;  // (A): image pixels per pixel of the level
  int64_t steps_stride;
  void* y;  // all three dense
  void* boxes;
  void* scores;
  bool xywh;  // centre and size, else left, top, right, bottom
};

// kernels/detect.cu
void detect_decode(const DetectArgs& args, DType dtype, cudaStream_t stream);

}  // namespace yolo12_fastconv
