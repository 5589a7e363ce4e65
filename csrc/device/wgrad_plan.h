// How the sm90 weight gradient (kernels/wgrad_sm90.cu) runs a convolution: decided by arithmetic on the host from the
// shape alone, testable without a GPU.
#pragma once

#include <optional>
#include <string>

#include "args.h"
#include "dispatch.h"

namespace yolo12_fastconv {

// A block sums the products of a slice of the output pixels for a tile of the weight: 64 output channels per warpgroup
// (rows), 64 for all of them (window) or 96 (turned) x `channels` input channels (x 9 filter taps). A stage of pixels holds
// both operands as they lie in memory, pixels one behind the other.
struct WgradPlan {
  bool window = false;  // 3x3: stages of 8 columns of outputs and the window of x below; else 1x1, pixels in a row
  bool turned = false;  // window: rows of a warpgroup's sums are two taps of 32 input channels, columns output channels
  // rows: blocks of 64 output channels; window: rows or columns of the filter; turned: pairs of taps
  int warpgroups = 0;
  int channels = 0;
  int width = 0;  // columns of a warpgroup's sums: channels, times 3 taps in a window
  int grad_row_bytes = 0, x_row_bytes = 0;  // of a pixel in a stage, for a block of channels: 128, 64 or 32
  int pixels = 0;  // of a stage; in a window 8 columns x pixels / 8 rows
  int stages = 0;
  int slices = 0;
  bool operator==(const WgradPlan&) const = default;
};

// Widths of sums that kernels exist for. 3x3 with stride 2 has its three taps in two products, of two and one.
constexpr int kWgradRowWidths[] = {16, 32, 48, 64, 80, 96, 128, 192, 256};
constexpr int kWgradWindowWidths[] = {48, 96, 192};
// 3x3 with stride 1: three blocks of 16 channels at the three taps of a filter's column, for 48 channels, of which blocks
// of 32 or 64 would leave a quarter empty.
constexpr int kWgradColumnWidth = 144;
// And turned, for 96 output channels, of which blocks of 64 would leave a quarter empty.
constexpr int kWgradTurnedWidth = 96, kWgradTurnedChannels = 32, kWgradTurnedWarpgroups = 5;
constexpr int kWgradSharedBytes = 227 * 1024;
constexpr int kWgradMostTailBytes = 2048 - 16 * 32;  // wgrad_tail_bytes(), and barriers
constexpr int kWgradMaxStages = 16;

constexpr int wgrad_max_warpgroups(int width) { return width <= 96 ? 4 : width <= 192 ? 3 : 2; }

// A window of x, per residue of the stride: rows of pixels, in a row blocks of channels one behind the other.
struct WgradWindow {
  int w, h, planes, blocks, plane_bytes;
};
inline WgradWindow wgrad_window(const ConvShape& s, const WgradPlan& p) {
  WgradWindow window;
  window.w = 8 + (s.kernel_w - 1) / s.stride_w;
  window.h = p.pixels / 8 + (s.kernel_h - 1) / s.stride_h;
  window.planes = s.stride_h * s.stride_w;
  window.blocks = p.channels * 2 / p.x_row_bytes;
  window.plane_bytes = round_up(window.w * window.blocks * window.h, 8) * p.x_row_bytes;
  return window;
}

// Output channels of a tile, and blocks of them in a stage, of as many channels as a swizzled row holds.
inline int wgrad_tile_filters(const WgradPlan& p) {
  return p.turned ? kWgradTurnedWidth : p.window ? 64 : 64 * p.warpgroups;
}
inline int wgrad_grad_copies(const WgradPlan& p) {
  return p.turned ? kWgradTurnedWidth * 2 / p.grad_row_bytes : p.window ? 1 : p.warpgroups;
}
// Bytes of the two operands in a stage. Both are multiples of the swizzle's period.
inline int wgrad_grad_bytes(const WgradPlan& p) { return wgrad_grad_copies(p) * p.pixels * p.grad_row_bytes; }
inline int wgrad_x_bytes(const ConvShape& s, const WgradPlan& p) {
  if (!p.window) return ceil_div(p.channels * 2, p.x_row_bytes) * p.pixels * p.x_row_bytes;
  const WgradWindow window = wgrad_window(s, p);
  return window.planes * window.plane_bytes;
}
// x comes first. compute-sanitizer takes an operand for dense: 16 pixels of all columns, one behind the other, where the
// taps of a window share pixels. With grad_z behind it, which is at least as large, that is inside of the block's memory.
inline int wgrad_grad_offset(const ConvShape& s, const WgradPlan& p) {
  return round_up(wgrad_x_bytes(s, p), 8 * p.grad_row_bytes);
}
inline int wgrad_stage_bytes(const ConvShape& s, const WgradPlan& p) {
  return round_up(wgrad_grad_offset(s, p) + wgrad_grad_bytes(p), 1024);
}
// As dense, the 64 rows of a product's sums are 2048 bytes of grad_z, which has fewer channels: room behind the last stage.
inline int wgrad_tail_bytes(const WgradPlan& p) { return 2048 - 16 * p.grad_row_bytes; }

// Stages that all output pixels take.
inline int64_t wgrad_pixel_stages(const ConvShape& s, const WgradPlan& p) {
  return p.window ? int64_t(s.batch) * ceil_div(s.out_w, 8) * ceil_div(s.out_h, p.pixels / 8)
                  : ceil_div<int64_t>(s.out_pixels(), p.pixels);
}
inline int wgrad_filter_tiles(const ConvShape& s, const WgradPlan& p) {
  return ceil_div(s.out_channels, wgrad_tile_filters(p));
}
inline int wgrad_channel_tiles(const ConvShape& s, const WgradPlan& p) { return ceil_div(s.in_channels, p.channels); }
// Floats from one output channel and tap to the next in a slice's sums: whole vectors of four.
inline int wgrad_pitch(const ConvShape& s) { return round_up(s.in_channels, 4); }
inline int64_t wgrad_slice_floats(const ConvShape& s) {
  return int64_t(s.out_channels) * s.kernel_h * s.kernel_w * wgrad_pitch(s);
}

// The plan with the lowest estimate; nothing where the kernel can't run the convolution. Takes for granted: half or
// bfloat16, rows of x and grad_z aligned to 16 bytes.
std::optional<WgradPlan> plan_wgrad_sm90(const ConvShape& shape);
// The plan of such a name, with any number of slices; nothing where the kernel has none for this convolution.
std::optional<WgradPlan> plan_wgrad_sm90(const ConvShape& shape, const std::string& name);
// Cycles of a multiprocessor of an H200, with the sum of the slices.
double wgrad_sm90_cycles(const ConvShape& shape, const WgradPlan& plan);
std::string wgrad_sm90_name(const WgradPlan& plan);

}  // namespace yolo12_fastconv
