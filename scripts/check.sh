#!/usr/bin/env bash
# Format, lint, types and generated files. Makes the environment (see scripts/environment.sh), changes nothing else.
# Runs every check and says at the end which failed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment check
bin=$(dirname "$venv_python")

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}
clang_format() {
  find csrc scripts \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh' \) -print0 |
    xargs -0 "$bin/clang-format" --dry-run -Werror
}
shell_syntax() {
  local script
  for script in scripts/*.sh csrc/cmake/*.sh .ci/run; do
    bash -n "$script" || return 1
  done
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "clang-format" clang_format
check "shell syntax" shell_syntax
check "configs/conv_shapes.yaml" "$venv_python" scripts/list_conv_shapes.py --check
check "README.md shows docs/benchmarks" "$venv_python" scripts/gpu_record.py readme --check
check "age of docs/benchmarks" "$venv_python" scripts/gpu_record.py stale

if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "all checks passed"
