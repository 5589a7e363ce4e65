// Bodies for the ops that yolo12_fastconv/ops.py declares (schemas live there, because an installation without this
// library has them too). Stable ABI only: one binary serves every torch from 2.11 on.
#include <torch/csrc/stable/library.h>

#include "host/ops.h"

STABLE_TORCH_LIBRARY_IMPL(yolo12_fastconv, CUDA, m) {
  m.impl("conv_bn_act", TORCH_BOX(&yolo12_fastconv::conv_bn_act));
  m.impl("conv_bn_act_out", TORCH_BOX(&yolo12_fastconv::conv_bn_act_out));
  m.impl("conv_bn_act_backward", TORCH_BOX(&yolo12_fastconv::conv_bn_act_backward));
  m.impl("conv_bn_act_train", TORCH_BOX(&yolo12_fastconv::conv_bn_act_train));
  m.impl("conv_bn_act_train_", TORCH_BOX(&yolo12_fastconv::conv_bn_act_train_));
  m.impl("conv_bn_act_train_backward", TORCH_BOX(&yolo12_fastconv::conv_bn_act_train_backward));
  m.impl("conv_bn_act_train_backward_", TORCH_BOX(&yolo12_fastconv::conv_bn_act_train_backward_));
  m.impl("bn_act", TORCH_BOX(&yolo12_fastconv::bn_act));
  m.impl("bn_act_backward", TORCH_BOX(&yolo12_fastconv::bn_act_backward));
  m.impl("conv_backward", TORCH_BOX(&yolo12_fastconv::conv_backward));
  m.impl("conv_backward_", TORCH_BOX(&yolo12_fastconv::conv_backward_));
  m.impl("concat_channels", TORCH_BOX(&yolo12_fastconv::concat_channels));
  m.impl("concat_channels_out", TORCH_BOX(&yolo12_fastconv::concat_channels_out));
  m.impl("upsample_nearest_backward", TORCH_BOX(&yolo12_fastconv::upsample_nearest_backward));
  m.impl("upsample_nearest_backward_", TORCH_BOX(&yolo12_fastconv::upsample_nearest_backward_));
  m.impl("detect_decode", TORCH_BOX(&yolo12_fastconv::detect_decode));
  m.impl("run_program", TORCH_BOX(&yolo12_fastconv::run_program));
  m.impl("area_attention", TORCH_BOX(&yolo12_fastconv::area_attention));
  m.impl("area_attention_backward", TORCH_BOX(&yolo12_fastconv::area_attention_backward));
  m.impl("update_running_stats_", TORCH_BOX(&yolo12_fastconv::update_running_stats_));
}

// Host functions: they take no tensor, and need no GPU.
STABLE_TORCH_LIBRARY_IMPL(yolo12_fastconv, CompositeExplicitAutograd, m) {
  m.impl("describe_kernel", TORCH_BOX(&yolo12_fastconv::describe_kernel));
  m.impl("kernel_candidates", TORCH_BOX(&yolo12_fastconv::kernel_candidates));
  m.impl("describe_gradients", TORCH_BOX(&yolo12_fastconv::describe_gradients));
  m.impl("backward_in_one_pass", TORCH_BOX(&yolo12_fastconv::backward_in_one_pass));
  m.impl("library_info", TORCH_BOX(&yolo12_fastconv::library_info));
}
