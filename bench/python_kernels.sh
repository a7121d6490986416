#!/usr/bin/env bash
# ringleader.kernels on a GPU, in a few minutes: its tests, then the rows of bench/results/figures/masks_schemes.json that
# bench/python_kernels.py measures. Needs a Hopper, and a python3 with PyTorch, transformers and pytest; no compiler.
#
#   deploy/python_kernels.sh --bench build/wheels     first, where there is a compiler
#   bench/python_kernels.sh build/wheels [OUTPUT]     OUTPUT: the file of rows (default: that of the repository)
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "python_kernels: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
wheels=$(realpath "${1:?names the folder of the wheel}")
cd "$(dirname "$0")/.."
output=$(realpath -m "${2:-bench/results/figures/masks_schemes.json}")

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
python3 -m pip install -q --no-deps --no-index --no-compile --target "$packages" "$wheels"/ringleader_kernels-*.whl
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
[[ -e $output || ! -e bench/results/figures/masks_schemes.json ]] || cp bench/results/figures/masks_schemes.json "$output"
failed=
RINGLEADER_PYTHON=$(command -v python3) RINGLEADER_TEST_DEVICE=cuda timeout 240 python/tests/run.sh "$packages" || failed=1
timeout 150 python3 bench/python_kernels.py --call-from-cpp "$wheels/call_from_cpp.so" \
  --commit "$(cat "$wheels/COMMIT")" --output "$output"
[[ ! $failed ]] || { echo "python_kernels: tests failed, see above" >&2; exit 1; }
