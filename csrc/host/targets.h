// What the environment and the build say about targets.
#pragma once

#include <string>

namespace yolo12_fastconv {

// The value of a switch, or empty. Read at every call, as tests and tools change it.
std::string environment(const char* name);
// Whether kernels for wgmma are built, fit this GPU (major * 10 + minor), and are not switched off.
bool serves_sm90(int capability);

}  // namespace yolo12_fastconv
