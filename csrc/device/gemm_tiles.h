// The tiles that the sm80 implicit GEMM is compiled for, and which layers a tile that keeps windows of pixels can serve.
#pragma once

#include <cstdint>

#include "tile_menu.h"

namespace yolo12_fastconv {

// Kernels of each tile and dtype: one, or of stages of 128 bytes one for each way to load them. Warps of 64 x 32 read shared
// memory less often than those of 32 x 32 (5 to 10 % at 64 channels); of 64 x 64 or 64 x 48 still less, but 8 of them fill a
// multiprocessor's registers: 10 to 20 % faster where blocks are long (3x3 with stride 2, windows), slower in short ones,
// whose set-up and epilogue 16 warps hide better. Stages of 128 bytes cost a barrier half as often (128 x 128 of 64 bytes
// takes a third longer). 48 and 96 channels are widths of YOLO12x.
constexpr GemmTile kGemmTiles[] = {
    {128, 128, 8, 3, 2, 4, 1},
    {128, 128, 8, 3, 2, 2, 1},
    {128, 96, 8, 3, 2, 2, 1},
    {128, 64, 8, 3, 2, 2, 1},
    {128, 32, 4, 5, 4, 1, 1},
    {128, 16, 4, 5, 4, 1, 1},
    {128, 64, 4, 5, 2, 2, 1},
    {128, 48, 4, 5, 4, 1, 1},
    {64, 64, 8, 4, 2, 2, 2},
    {64, 32, 8, 5, 2, 1, 2},
    {64, 16, 8, 5, 2, 1, 2},
    {32, 64, 8, 5, 1, 2, 2},
    {32, 32, 8, 6, 1, 1, 4},
    {16, 32, 8, 8, 1, 1, 4},
    // Windows.
    {256, 16, 4, 3, 8, 1, 1, true},
    {256, 32, 4, 3, 8, 1, 1, true},
    {256, 48, 4, 2, 8, 1, 1, true},
    {256, 64, 4, 3, 4, 1, 1, true},
    {128, 32, 4, 3, 4, 1, 1, true},
    {128, 64, 4, 3, 2, 2, 1, true},
    {128, 96, 4, 3, 2, 2, 1, true},
};
// Shared memory of a window tile: its window of 32 channels, two if there are more, and filter rows of weights, or the
// finished tile; and tables.
constexpr int window_bytes(const GemmTile& t, int width, int channels) {
  const int rows = t.pixels + 2 * width + 4;
  const int pipeline = t.stages * 3 * t.channels * 64 + (channels > 32 ? 2 : 1) * rows * 64;
  const int out = t.pixels * (t.channels * 2 + 16);
  return t.channels * 8 + (rows + t.pixels + 32) / 32 * 128 + (pipeline > out ? pipeline : out);
}
// sm_86, sm_89 and sm_120 have 99 KiB a block.
constexpr bool fits_window(const ConvShape& s, const GemmTile& t) {
  return s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 1 && s.stride_w == 1 && s.pad_h == 1 && s.pad_w == 1 &&
         s.dilation_h == 1 && s.dilation_w == 1 && s.in_channels % 8 == 0 && s.in_w < 4096 &&
         (int64_t(s.in_h) + 1) * (s.in_w + 1) * s.batch < (int64_t(1) << 30) &&
         window_bytes(t, s.in_w, s.in_channels) <= 99 * 1024;
}

// Up to nine taps of whole 16-byte chunks of half, of which a stage of 128 bytes meets two at most.
constexpr bool few_taps(const ConvShape& s) {
  return s.in_channels % 8 == 0 && s.in_channels >= 64 && s.kernel_h * s.kernel_w <= 9;
}
constexpr bool fits_tile(const ConvShape& s, const GemmTile& t) {
  if (t.window) return fits_window(s, t);
  return !t.wide_warps() || few_taps(s);
}

}  // namespace yolo12_fastconv
