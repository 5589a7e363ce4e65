#include "build_info.h"
#include "convolution.h"
#include "gradient_menu.h"
#include "ops.h"
#include "stats_plan.h"

namespace yolo12_fastconv {

std::string describe_kernel(std::vector<int64_t> x_size, std::vector<int64_t> weight_size, std::vector<int64_t> stride,
                            std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
                            ScalarType dtype, bool allow_tf32, int64_t capability, bool training) {
  const ConvShape shape = conv_shape(x_size, weight_size, {stride, padding, dilation, groups});
  const MenuQuery query = {shape, dtype_of(dtype), allow_tf32, static_cast<int>(capability)};
  const std::optional<Sm90Plan> plan = training ? choose_stats_plan(query) : std::nullopt;
  return plan.has_value() ? sm90_name(*plan) : kernel_name(choose_kernel(query), shape);
}

std::vector<std::string> kernel_candidates(std::vector<int64_t> x_size, std::vector<int64_t> weight_size,
                                           std::vector<int64_t> stride, std::vector<int64_t> padding,
                                           std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                           bool allow_tf32, int64_t capability) {
  const ConvShape shape = conv_shape(x_size, weight_size, {stride, padding, dilation, groups});
  std::vector<std::string> names;
  for (const KernelChoice& choice :
       kernel_candidates({shape, dtype_of(dtype), allow_tf32, static_cast<int>(capability)})) {
    names.push_back(kernel_name(choice, shape));
  }
  return names;
}

std::vector<std::string> describe_gradients(std::vector<int64_t> x_size, std::vector<int64_t> weight_size,
                                            std::vector<int64_t> stride, std::vector<int64_t> padding,
                                            std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                                            bool allow_tf32, int64_t capability) {
  const ConvShape shape = conv_shape(x_size, weight_size, {stride, padding, dilation, groups});
  const MenuQuery query = {shape, dtype_of(dtype), allow_tf32, static_cast<int>(capability)};
  const GradientChoice choice = choose_gradients(query);
  return {dgrad_name(choice, query), wgrad_name(choice)};
}

bool backward_in_one_pass(std::vector<int64_t> x_size, std::vector<int64_t> weight_size, std::vector<int64_t> stride,
                          std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups, ScalarType dtype,
                          bool allow_tf32, int64_t capability) {
  const ConvShape shape = conv_shape(x_size, weight_size, {stride, padding, dilation, groups});
  return choose_gradients({shape, dtype_of(dtype), allow_tf32, static_cast<int>(capability)}).one_pass;
}

std::string library_info() {
  return std::string("arch_list=") + YOLO12_FASTCONV_ARCH_LIST + ";cuda=" + YOLO12_FASTCONV_CUDA_VERSION +
         ";source_hash=" + YOLO12_FASTCONV_SOURCE_HASH + ";version=" + YOLO12_FASTCONV_VERSION;
}

}  // namespace yolo12_fastconv
