#!/usr/bin/env bash
# Makes the environment (see scripts/environment.sh) and runs scripts/demo.py. Arguments go to it: scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
prepare_environment test
"$venv_python" scripts/demo.py "$@"
