#!/usr/bin/env bash
# Tests of ringleader.kernels, on the CPU or, with RINGLEADER_TEST_DEVICE=cuda, on a GPU.
#
#   python/tests/run.sh PACKAGES [PYTEST-ARGUMENT...]     PACKAGES: the folder that holds ringleader/kernels
#
#   RINGLEADER_PYTHON      a Python with PyTorch, transformers and pytest (default: that of RINGLEADER_TORCH_ROOT, else
#                          python3). deploy/install_deps.sh --dev makes one.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "run: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
packages=$(realpath "${1:?names the folder that holds ringleader/kernels}")
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
