// y = act((z + bias - mean) / sqrt(var + eps) * gamma + beta) + residual over few float elements: what follows cuDNN's
// convolution of a picture. batch_norm_act() has tables per block, which pay for many rows: each thread computes four rows
// with them. Here a thread has one word of 16 bytes and computes its channels' values itself, so that all of its loads are on
// their way at once and nobody waits at a barrier. The same operations in the same order: the same results.
#include "device/small_pass.h"

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/lanes.cuh"
#include "device/launch.cuh"
#include "device/numeric.cuh"

namespace yolo12_fastconv {
namespace {

constexpr int kThreads = 128;

struct SmallPass {
  const float4 *z, *residual;
  float4* y;
  const float4 *bias, *gamma, *beta, *mean, *var;  // null: absent
  float eps;
  bool silu;
  FastDivide words;  // of a row
  int count, residual_words;  // of all rows; from one row of the residual to the next
};

__device__ __forceinline__ float4 load_or(const float4* from, int index, float absent) {
  return from != nullptr ? from[index] : make_float4(absent, absent, absent, absent);
}

__global__ __launch_bounds__(kThreads) void small_pass_kernel(const __grid_constant__ SmallPass pass) {
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  int row, word;
  pass.words.divide(index, row, word);
  let_later_kernels_start();
  wait_for_earlier_kernels();
  if (index >= pass.count) return;
  const float4 z = pass.z[index], bias = load_or(pass.bias, word, 0.0f), gamma = load_or(pass.gamma, word, 1.0f);
  const float4 beta = load_or(pass.beta, word, 0.0f), mean = load_or(pass.mean, word, 0.0f);
  const float4 var = load_or(pass.var, word, 1.0f);
  const float4 residual = load_or(pass.residual, row * pass.residual_words + word, 0.0f);
  const auto finish = [&](float u, float b, float g, float shift, float m, float v, float more) {
    const bool normed = pass.mean != nullptr;
    const float scale = normed ? g * (1.0f / sqrtf(v + pass.eps)) : 1.0f;
    u = (u - (m - b)) * scale + (normed ? shift : 0.0f);
    if (pass.silu) u = activate<float>(u, Act::kSilu);
    return pass.residual != nullptr ? u + more : u;
  };
  pass.y[index] = make_float4(finish(z.x, bias.x, gamma.x, beta.x, mean.x, var.x, residual.x),
                              finish(z.y, bias.y, gamma.y, beta.y, mean.y, var.y, residual.y),
                              finish(z.z, bias.z, gamma.z, beta.z, mean.z, var.z, residual.z),
                              finish(z.w, bias.w, gamma.w, beta.w, mean.w, var.w, residual.w));
}

}  // namespace

bool batch_norm_act_small(const BatchNormActArgs& a, cudaStream_t stream) {
  const Affine& affine = a.affine;
  const int64_t words = a.rows * (a.channels / 4);
  for (const ChannelVector* v : {&affine.bias, &affine.gamma, &affine.beta, &affine.mean, &affine.var}) {
    if (v->data != nullptr && (v->dtype != DType::kFloat32 || !is_aligned(v->data, 16))) return false;
  }
  if (a.channels == 0 || a.channels % 4 != 0 || words == 0 || words > kSmallPassWords || !is_aligned(a.z, 16) ||
      !is_aligned(a.y, 16) || !is_aligned(a.residual, 16) || a.residual_stride % 4 != 0 ||
      a.rows * a.residual_stride > (int64_t(1) << 31)) {
    return false;
  }
  const auto pointer = [](const void* data) { return static_cast<const float4*>(data); };
  SmallPass pass;
  pass.z = pointer(a.z);
  pass.residual = pointer(a.residual);
  pass.y = static_cast<float4*>(a.y);
  pass.bias = pointer(affine.bias.data);
  pass.gamma = pointer(affine.gamma.data);
  pass.beta = pointer(affine.beta.data);
  pass.mean = pointer(affine.mean.data);
  pass.var = pointer(affine.var.data);
  pass.eps = static_cast<float>(affine.eps);
  pass.silu = a.act == Act::kSilu;
  pass.words = FastDivide(a.channels / 4);
  pass.count = static_cast<int>(words);
  pass.residual_words = static_cast<int>(a.residual_stride / 4);
  launch_dependent<small_pass_kernel>("batch_norm_act", static_cast<unsigned>((words + kThreads - 1) / kThreads),
                                      kThreads, 0, stream, pass);
  return true;
}

}  // namespace yolo12_fastconv
