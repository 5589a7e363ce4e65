# Sourced by the other scripts, in the root of the checkout.
# prepare_environment EXTRAS: makes the virtual environment YOLO12_FASTCONV_VENV (else .venv) if there is none, and
# installs PyTorch, Ultralytics and this checkout (editable, without the CUDA library) with these extras. Does nothing
# if that was done before and pyproject.toml is the same. Sets `venv_python`. PYTHON: what makes the environment.

prepare_environment() {
  local extras=$1 venv=${YOLO12_FASTCONV_VENV:-.venv} python=${PYTHON:-python3} stamp wanted
  # torch and torchvision belong together, so they are pinned and installed together.
  local packages=("torch==2.14.1" "torchvision==0.29.1" "ultralytics-opencv-headless==8.4.190")
  venv_python=$venv/bin/python

  if [ ! -x "$venv_python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      echo "$python is older than 3.10, or missing: set PYTHON to a newer one" >&2
      return 1
    }
    "$python" -m venv "$venv"
  fi
  stamp=$venv/yolo12_fastconv-${extras//,/-}.installed
  wanted=$({ pwd; printf '%s\n' "${packages[@]}"; cat pyproject.toml yolo12_fastconv/_autopatch.pth; } | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into $venv: ${packages[*]} yolo12-fastconv[$extras]"
    FORCE_CUDA=0 "$venv_python" -m pip install --disable-pip-version-check --quiet "${packages[@]}" -e ".[$extras]"
    echo "$wanted" >"$stamp"
  fi
}
