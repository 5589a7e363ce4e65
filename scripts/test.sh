#!/usr/bin/env bash
# Makes the environment (see scripts/environment.sh) and runs the tests. Arguments go to pytest: scripts/test.sh -k ops
# The tests run on the checkout, which is installed editable; tests/test_packaging.py builds and installs a wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment test

# Ultralytics shall neither install nor download anything, nor touch the user's settings.
YOLO_CONFIG_DIR=$(mktemp -d)
trap 'rm -rf "$YOLO_CONFIG_DIR"' EXIT
export YOLO_CONFIG_DIR YOLO_AUTOINSTALL=false YOLO_OFFLINE=true
"$venv_python" -m pytest "$@"
