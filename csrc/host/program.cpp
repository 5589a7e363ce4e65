// Inference ops one behind the other in one call: see `run_program` in yolo12_fastconv/ops.py and the format of programs
// in yolo12_fastconv/_program.py. A call of an op from Python takes longer than most kernels of a small model.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <bit>

#include "ops.h"

namespace yolo12_fastconv {
namespace {

enum Instruction : int64_t { kExpect, kEmpty, kView, kConvolution, kAttention, kFree, kReturn };

// A program, its registers and what it reads; every access is checked, since the op can be called with any numbers.
class Interpreter {
 public:
  Interpreter(const std::vector<Tensor>& inputs, const std::vector<Tensor>& constants, const Tensor& program,
              ScalarType dtype, bool allow_tf32)
      : like_(inputs.front()),
        constants_(constants),
        registers_(inputs.begin(), inputs.end()),
        dtype_(dtype),
        allow_tf32_(allow_tf32) {
    if (program.is_cuda() || program.scalar_type() != ScalarType::Long || !program.is_contiguous()) {
      fail("program must be a contiguous int64 tensor on the CPU");
    }
    at_ = static_cast<const int64_t*>(program.const_data_ptr());
    end_ = at_ + program.numel();
  }

  std::vector<Tensor> run() {
    std::vector<Tensor> results;
    while (at_ != end_) {
      switch (const int64_t instruction = next()) {
        case kExpect:
          if (!expected()) return {};
          break;
        case kEmpty: empty(); break;
        case kView: view(); break;
        case kConvolution: convolution(); break;
        case kAttention: attention(); break;
        case kFree: registers_[next_register()].reset(); break;
        case kReturn: results.push_back(tensor()); break;
        default: fail("program has an instruction ", instruction);
      }
    }
    return results;
  }

 private:
  int64_t next() {
    if (at_ == end_) fail("program ends within an instruction");
    return *at_++;
  }
  double next_double() { return std::bit_cast<double>(next()); }
  std::vector<int64_t> next_pair() {
    const int64_t first = next();
    return {first, next()};
  }
  std::array<int64_t, 4> next_four() {
    std::array<int64_t, 4> values;
    for (int64_t& value : values) value = next();
    return values;
  }

  size_t next_register() {
    const int64_t index = next();
    if (index < 0 || index >= static_cast<int64_t>(registers_.size())) fail("program reads register ", index);
    return static_cast<size_t>(index);
  }
  const Tensor& tensor() {
    const OptionalTensor& held = registers_[next_register()];
    if (!held.has_value()) fail("program reads a register that was freed");
    return *held;
  }
  OptionalTensor optional_tensor() { return absent() ? OptionalTensor() : OptionalTensor(tensor()); }
  const Tensor& constant() {
    const int64_t index = next();
    if (index < 0 || index >= static_cast<int64_t>(constants_.size())) fail("program reads constant ", index);
    return constants_[static_cast<size_t>(index)];
  }
  OptionalTensor optional_constant() { return absent() ? OptionalTensor() : OptionalTensor(constant()); }
  // Whether -1 stands in the place of an index; steps over it then.
  bool absent() {
    if (at_ == end_ || *at_ >= 0) return false;
    ++at_;
    return true;
  }

  // Whether a constant is still what the program was written for.
  bool expected() {
    const Tensor& held = constant();
    const bool float32 = next() != 0;
    bool same = held.scalar_type() == (float32 ? ScalarType::Float : dtype_) && held.is_cuda() &&
                held.get_device_index() == like_.get_device_index();
    const int64_t dims = next();
    same = same && held.dim() == dims;
    for (int64_t dim = 0; dim < dims; ++dim) {
      const int64_t size = next();
      same = same && held.size(dim) == size;
    }
    return same;
  }

  void empty() {
    const auto sizes = next_four(), strides = next_four();
    registers_.emplace_back(
        empty_strided(like_, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, dtype_of(dtype_)));
  }

  void view() {
    const Tensor& source = tensor();
    const auto sizes = next_four(), strides = next_four();
    const int64_t offset = next();
    // A view stays within what its source spans: nothing else of the memory needs to be the source's.
    int64_t last = offset, source_last = 0;
    for (int dim = 0; dim < 4; ++dim) {
      if (sizes[dim] < 1 || strides[dim] < 0)
        fail("program has a view of size ", sizes[dim], ", stride ", strides[dim]);
      last += (sizes[dim] - 1) * strides[dim];
    }
    for (int64_t dim = 0; dim < source.dim(); ++dim) source_last += (source.size(dim) - 1) * source.stride(dim);
    if (offset < 0 || source.numel() == 0 || last > source_last) fail("program has a view beyond its tensor");
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(source.get(), 4, sizes.data(), strides.data(),
                                                          source.storage_offset() + offset, &handle));
    registers_.emplace_back(Tensor(handle));
  }

  void convolution() {
    const OptionalTensor out = optional_tensor();
    const Tensor x = tensor();
    const OptionalTensor residual = optional_tensor();
    const Tensor weight = constant();
    const OptionalTensor bias = optional_constant(), gamma = optional_constant(), beta = optional_constant();
    const OptionalTensor mean = optional_constant(), var = optional_constant();
    const double eps = next_double();
    const auto stride = next_pair(), padding = next_pair(), dilation = next_pair();
    const int64_t groups = next(), act = next();
    if (out.has_value()) {
      conv_bn_act_out(x, weight, *out, bias, gamma, beta, mean, var, eps, residual, stride, padding, dilation, groups,
                      act, dtype_, allow_tf32_);
    } else {
      registers_.emplace_back(conv_bn_act(x, weight, bias, gamma, beta, mean, var, eps, residual, stride, padding,
                                          dilation, groups, act, dtype_, allow_tf32_));
    }
  }

  void attention() {
    const Tensor qkv = tensor();
    const int64_t heads = next(), area = next();
    const double scale = next_double();
    const bool with_values = next() != 0;
    const auto [out, values, logsumexp] = area_attention(qkv, heads, area, scale, with_values);
    registers_.emplace_back(out);
    registers_.emplace_back(values);
  }

  const Tensor& like_;
  const std::vector<Tensor>& constants_;
  std::vector<OptionalTensor> registers_;  // the inputs, then what each instruction makes
  ScalarType dtype_;
  bool allow_tf32_;
  const int64_t* at_;
  const int64_t* end_;
};

}  // namespace

std::vector<Tensor> run_program(std::vector<Tensor> inputs, std::vector<Tensor> constants, Tensor program,
                                std::vector<int64_t> outputs, ScalarType dtype, bool allow_tf32) {
  if (inputs.empty()) fail("inputs must hold at least one tensor");
  const torch::stable::accelerator::DeviceGuard guard(inputs.front().get_device_index());
  std::vector<Tensor> results = Interpreter(inputs, constants, program, dtype, allow_tf32).run();
  if (!results.empty() && outputs.size() != 8 * results.size()) {
    fail("program returns ", results.size(), " tensors, outputs has ", outputs.size(), " numbers, not 8 for each");
  }
  return results;
}

}  // namespace yolo12_fastconv
