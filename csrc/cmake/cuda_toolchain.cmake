# The CUDA compiler and the architectures to build for.

set(default_arch_list "7.5;8.0;8.6;8.9;9.0a;10.0;12.0+PTX")

# Sets CMAKE_CUDA_COMPILER from CUDACXX, CUDA_HOME or PATH, in this order.
function(find_nvcc)
  if(CMAKE_CUDA_COMPILER)
    return()
  endif()
  if(DEFINED ENV{CUDACXX})
    find_program(nvcc_path NAMES "$ENV{CUDACXX}" NO_CACHE)
  else()
    find_program(nvcc_path NAMES nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin NO_DEFAULT_PATH NO_CACHE)
    find_program(nvcc_path NAMES nvcc PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
  endif()
  if(NOT nvcc_path)
    message(FATAL_ERROR
      "Building the CUDA library needs nvcc, which is not in CUDACXX, CUDA_HOME/bin or PATH: install the CUDA "
      "toolkit (12.8 or newer) and set CUDA_HOME, or install without FORCE_CUDA to run without the library.")
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc_path}" CACHE FILEPATH "nvcc" FORCE)
endfunction()

# Refuses pairs of nvcc and PyTorch that can't work, and names what to install.
function(check_cuda_versions)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR
      "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}) is too old: the CUDA library needs 12.8 or "
      "newer; set CUDA_HOME to a newer toolkit.")
  endif()
  # The runtime is linked statically, so it runs with any driver that is new enough for nvcc's major version.
  string(REGEX MATCH "^[0-9]+" nvcc_major "${CMAKE_CUDA_COMPILER_VERSION}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch_cuda_version}")
  if(nvcc_major GREATER torch_major)
    message(WARNING
      "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, PyTorch was built for CUDA ${torch_cuda_version}: the library will "
      "need a driver for CUDA ${nvcc_major}; set CUDA_HOME to a CUDA ${torch_major} toolkit if yours is older.")
  endif()
endfunction()

# From TORCH_CUDA_ARCH_LIST: arch_list_text ("8.0 9.0a 12.0+PTX") and gencode_flags.
function(read_arch_list)
  set(text "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(text STREQUAL "")
    set(text "${default_arch_list}")
  endif()
  string(REGEX REPLACE "[ ,]+" ";" entries "${text}")

  # The family names that PyTorch's extension builder accepts, from the oldest family that this library serves.
  set(Turing 7.5+PTX)
  set(Ampere 8.0 8.6+PTX)
  set(Ada 8.9+PTX)
  set(Hopper 9.0a)
  set(Blackwell 10.0 10.3 12.0 12.1+PTX)
  set(archs "")
  foreach(entry IN LISTS entries)
    if(entry MATCHES "^(Turing|Ampere|Ada|Hopper|Blackwell)$")
      list(APPEND archs ${${entry}})
    else()
      list(APPEND archs "${entry}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES archs)

  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch
    OUTPUT_VARIABLE known OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "[ \n]+" ";" known "${known}")

  set(flags "")
  foreach(arch IN LISTS archs)
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR
        "TORCH_CUDA_ARCH_LIST holds '${arch}', which is no architecture: write a list such as "
        "'8.0;9.0a;12.0+PTX'.")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(suffix "${CMAKE_MATCH_3}")
    set(ptx "${CMAKE_MATCH_4}")
    if(number LESS 75)
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST holds '${arch}': the kernels need 7.5 or newer; leave it out.")
    endif()
    if(NOT "compute_${number}" IN_LIST known)
      message(FATAL_ERROR
        "TORCH_CUDA_ARCH_LIST holds '${arch}', which nvcc ${CMAKE_CUDA_COMPILER_VERSION} can't compile for: "
        "leave it out, or set CUDA_HOME to a newer toolkit.")
    endif()
    list(APPEND flags "-gencode=arch=compute_${number}${suffix},code=sm_${number}${suffix}")
    if(ptx)
      list(APPEND flags "-gencode=arch=compute_${number}${suffix},code=compute_${number}${suffix}")
    endif()
  endforeach()
  list(JOIN archs " " arch_list_text)
  message(STATUS "CUDA architectures: ${arch_list_text}")
  set(arch_list_text "${arch_list_text}" PARENT_SCOPE)
  set(gencode_flags "${flags}" PARENT_SCOPE)
endfunction()
