# PyTorch's stable ABI: headers, the two libraries with its C functions, and the version that is targeted.

# The oldest PyTorch that the library has to load under; see torch/csrc/stable/version.h for the encoding.
set(torch_target_version 2.11)
set(torch_target_version_define 0x020b000000000000)

# Sets torch_dir and torch_cuda_version by asking the Python that runs the build, without importing torch.
function(find_torch)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "
import importlib.util, pathlib, runpy
spec = importlib.util.find_spec('torch')
if spec is None or spec.origin is None:
    raise SystemExit('none')
folder = pathlib.Path(spec.origin).parent
facts = runpy.run_path(str(folder / 'version.py'))
print(folder.as_posix(), facts['__version__'], facts['cuda'] or 'none', sep=';')
"
    OUTPUT_VARIABLE facts ERROR_QUIET RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR
      "Building the CUDA library needs PyTorch ${torch_target_version} or newer in the build environment, and "
      "${Python_EXECUTABLE} can't import torch: run "
      "'pip install torch scikit-build-core cmake ninja' and then "
      "'FORCE_CUDA=1 pip install --no-build-isolation .'.")
  endif()
  list(GET facts 0 folder)
  list(GET facts 1 version)
  list(GET facts 2 cuda)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" release "${version}")
  if(release VERSION_LESS torch_target_version)
    message(FATAL_ERROR
      "PyTorch ${version} in ${folder} is too old to build the CUDA library: install torch>=${torch_target_version}.")
  endif()
  if(cuda STREQUAL "none" OR NOT EXISTS "${folder}/lib/libtorch_cuda.so")
    message(FATAL_ERROR
      "PyTorch ${version} in ${folder} was built without CUDA, so the CUDA library can't be linked: install a CUDA "
      "build of PyTorch, or install without FORCE_CUDA to run without the library.")
  endif()
  message(STATUS "PyTorch ${version} for CUDA ${cuda}")
  set(torch_dir "${folder}" PARENT_SCOPE)
  set(torch_cuda_version "${cuda}" PARENT_SCOPE)
endfunction()

# Only C++ files see PyTorch's headers: kernels get plain structs, and compile far faster.
function(target_link_stable_abi target)
  target_include_directories(${target} SYSTEM PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${torch_dir}/include>"
    "$<$<COMPILE_LANGUAGE:CXX>:${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}>")
  target_compile_definitions(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:TORCH_TARGET_VERSION=${torch_target_version_define}>"
    "$<$<COMPILE_LANGUAGE:CXX>:USE_CUDA>")
  # Both libraries are named whether or not today's PyTorch finds a symbol in them: releases move symbols between
  # them. They are already loaded when this library is, so no path is needed. -z defs: an undefined symbol shall
  # fail here and not at a user's import.
  target_link_options(${target} PRIVATE -Wl,-z,defs -Wl,--exclude-libs,ALL)
  target_link_libraries(${target} PRIVATE
    -Wl,--no-as-needed "${torch_dir}/lib/libtorch_cpu.so" "${torch_dir}/lib/libtorch_cuda.so" -Wl,--as-needed)
endfunction()
