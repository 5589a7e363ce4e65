// Arguments and launchers of area attention. kernels/attention*.cu
#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstdint>

#include "args.h"

namespace yolo12_fastconv {

// Channels of a head that there are kernels for: every YOLO12 has 32.
constexpr int kHeadDim = 32;

// The pixels of a map as rows of channels, those of all pictures one behind the other. Areas are runs of `length` rows,
// `sequences` in all. In qkv a head has 3 * kHeadDim channels (query, key, value), elsewhere kHeadDim.
struct AttentionShape {
  int sequences = 0, areas = 0;  // areas: of one picture
  int heads = 0, length = 0;
  float scale = 0.0f;
};

struct AttentionArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  int64_t qkv_stride = 0;      // elements from row to row
  void* out = nullptr;         // dense rows
  void* values = nullptr;      // dense rows, or null
  float* logsumexp = nullptr;  // (picture, head, pixel)
};

struct AttentionBackwardArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  int64_t qkv_stride = 0;
  const void* out = nullptr;  // dense rows
  const void* grad_out = nullptr;
  int64_t grad_out_stride = 0;
  const void* grad_values = nullptr;  // or null
  int64_t grad_values_stride = 0;
  const float* logsumexp = nullptr;
  void* grad_qkv = nullptr;  // dense rows
};

// What a kernel's block is: warps that take `tiles` of 16 rows at a time, `groups` of them the same rows (and a share of
// the other side's), and how many blocks a multiprocessor holds. Cycles of a warp's step of 16 of the other side's rows:
// of a warp alone on its scheduler, and per tile where four or so share it.
struct AttentionBlock {
  int tiles = 0, warps = 0, groups = 0, resident = 0;
  int cycles_alone = 0, cycles_shared = 0;
};

// Which rows a block takes, and how the other side's rows pass through shared memory.
struct AttentionPlan {
  int splits = 0;       // blocks that share an area and head, each with its own rows
  int tiles = 0;        // of 16 rows, per block
  int buffer_keys = 0;  // rows of one buffer
  int buffers = 0;      // 1 or 2
  int chunks = 0;       // buffers to fill
  int64_t cycles = 0;   // estimate
};

// Areas up to this long are held in shared memory at once: 4 blocks of the forward kernel on a multiprocessor of 9.0.
constexpr int kMostResidentKeys = 416;
constexpr int kStreamedKeys = 192;  // else two buffers of so many

// Longest area of the backward kernel for wgmma.
constexpr int kMostKeysSm90 = 400;

// Whether that kernel is the faster one on 9.0, where it has a block for each area and head and the other can split them:
// 24 and 20 us for 32 of 400 pixels, 31 and 64 for 128; 41 and 39 for 1024 of 32 pixels, 47 and 50 for 1024 of 64.
inline bool is_backward_faster_on_sm90(const AttentionShape& s) {
  return s.length >= 48 && s.length <= kMostKeysSm90 && int64_t(s.sequences) * s.heads >= 48;
}

// The split with the lowest estimate. kinds: of blocks, 2 in backward.
inline AttentionPlan plan_attention(const AttentionShape& s, const AttentionBlock& block, int processors,
                                    int kinds = 1) {
  const auto divide = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t groups = int64_t(s.sequences) * s.heads * kinds;
  const int tiles = static_cast<int>(divide(s.length, 16)), pairs = static_cast<int>(divide(tiles, block.tiles));
  const bool resident = s.length <= kMostResidentKeys;
  const int row_groups = block.warps / block.groups;
  AttentionPlan best;
  best.buffer_keys = resident ? tiles * 16 : kStreamedKeys;
  best.buffers = resident ? 1 : 2;
  best.chunks = static_cast<int>(divide(s.length, best.buffer_keys));
  best.cycles = INT64_MAX;
  for (int block_pairs = 1; block_pairs <= pairs; ++block_pairs) {
    const int64_t passes = divide(block_pairs, row_groups);
    // Streamed rows pass once, and warps with divided rows put their sums together once.
    if (passes > 1 && (!resident || block.groups > 1)) break;
    const int64_t splits = divide(pairs, block_pairs), per_processor = divide(groups * splits, processors);
    const int64_t together = per_processor < block.resident ? per_processor : block.resident;
    const int64_t alone = block.cycles_alone;
    const int64_t busy = block.cycles_shared * block.tiles * together * block.warps / 4;  // of four schedulers
    const int64_t steps = divide(tiles, block.groups);
    const int64_t load = 1500 + int64_t(s.length) * 128 / 46 * together, combine = block.groups > 1 ? 800 : 0;
    const int64_t cycles =
        divide(per_processor, block.resident) * (passes * steps * (alone > busy ? alone : busy) + load + combine);
    if (cycles < best.cycles) {
      best.cycles = cycles;
      best.tiles = block_pairs * block.tiles;
      best.splits = static_cast<int>(splits);
    }
  }
  return best;
}

// Half and bfloat16, from compute capability 8.0 on; all rows aligned to 16 bytes.
void attention_forward(const AttentionArgs& args, DType dtype, cudaStream_t stream);
void attention_backward(const AttentionBackwardArgs& args, DType dtype, cudaStream_t stream);
// The same on 9.0, areas of up to kMostKeysSm90 pixels.
void attention_backward_sm90(const AttentionBackwardArgs& args, DType dtype, cudaStream_t stream);
// Float, likewise; forward only.
void attention_float_forward(const AttentionArgs& args, cudaStream_t stream);

}  // namespace yolo12_fastconv
