#!/usr/bin/env bash
# Tests of ringleader.kernels, on the CPU or, with RINGLEADER_TEST_DEVICE=cuda, on a GPU.
#
#   python/tests/run.sh PACKAGES [PYTEST-ARGUMENT...]     PACKAGES: the folder that holds ringleader/kernels
#
#   RINGLEADER_PYTHON      a Python with PyTorch, transformers and pytest (default: that of RINGLEADER_TORCH_ROOT, else
#                          python3). deploy/install_deps.sh --dev makes one.
set -euo pipefail
packages=$(realpath "$1")
shift
cd "$(dirname "$0")"

python=${RINGLEADER_PYTHON:-${RINGLEADER_TORCH_ROOT:+$(realpath "$RINGLEADER_TORCH_ROOT")/../../../bin/python3}}
[[ -x $python ]] || python=$(command -v python3)
if ! why=$("$python" -c 'import pytest, torch, transformers' 2>&1); then
  echo "SKIPPED: $python has not all of PyTorch, transformers and pytest (${why##*$'\n'}); run deploy/install_deps.sh --dev"
  exit 0
fi
PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 exec "$python" -m pytest -q --no-header \
  -p no:cacheprovider "$@" .
