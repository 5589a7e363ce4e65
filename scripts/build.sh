#!/usr/bin/env bash
# Builds the CUDA library. Needs nvcc 12.8 or newer, and a Python with PyTorch (a CUDA build), scikit-build-core,
# cmake and ninja: that of PYTHON, else of .venv, else python3.
#
#   scripts/build.sh          a wheel with the library for every architecture, in dist/; checks it
#   scripts/build.sh --dev    an incremental build for this checkout, in yolo12_fastconv/lib/
#
# TORCH_CUDA_ARCH_LIST   architectures (release: all of the design; --dev: 9.0a)
# MAX_JOBS               how many compilers run at once
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
# Programs of the virtual environment (cmake, ninja) come before those of the system.
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
export PATH

"$python" -c 'import scikit_build_core, torch' 2>/dev/null || {
  echo "build.sh: $python lacks torch or scikit-build-core: pip install 'yolo12-fastconv[dev]' there first" >&2
  exit 1
}

case ${1:-} in
  --dev)
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0a}
    mkdir -p build
    cmake -S csrc -B build/dev -G Ninja -DPython_EXECUTABLE="$(command -v "$python")" >build/dev-configure.log 2>&1 || {
      cat build/dev-configure.log >&2
      exit 1
    }
    cmake --build build/dev
    cmake --install build/dev --prefix build/dev/stage >/dev/null
    # Renamed into place: a process that has the old file mapped keeps it.
    mkdir -p yolo12_fastconv/lib
    mv build/dev/stage/yolo12_fastconv/lib/libyolo12_fastconv.so* yolo12_fastconv/lib/
    "$python" scripts/check_library.py yolo12_fastconv/lib/libyolo12_fastconv.so --log build/dev
    ;;
  "")
    FORCE_CUDA=1 "$python" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir dist .
    wheel=$(ls -t dist/yolo12_fastconv-*-linux_*.whl | head -n 1)
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    "$python" -m zipfile -e "$wheel" "$unpacked"
    "$python" scripts/check_library.py "$unpacked/yolo12_fastconv/lib/libyolo12_fastconv.so" \
      --log build/py3-none-linux_"$(uname -m)"
    echo "$wheel: $(du -h "$wheel" | cut -f 1)"
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
