// From run-time values to template arguments, and errors that name the value.
#pragma once

#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "args.h"

namespace yolo12_fastconv {

template <class... Parts>
[[noreturn]] void fail(Parts&&... parts) {
  std::ostringstream message;
  message << "yolo12_fastconv: ";
  (message << ... << std::forward<Parts>(parts));
  throw std::runtime_error(message.str());
}

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat32: return "float32";
    case DType::kFloat64: return "float64";
  }
  return "unknown";
}

template <class Function>
void with_bool(bool value, Function&& function) {
  value ? function(std::true_type{}) : function(std::false_type{});
}

template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace yolo12_fastconv
