#!/usr/bin/env bash
# Every mask beside cuDNN and FlexAttention on one GPU: bench/longca/masks.py, about 4 minutes. Needs a Hopper, and a
# python3 with PyTorch (and Triton, for FlexAttention); no compiler.
#
#   deploy/python_kernels.sh --bench build/wheels     first, where there is a compiler
#   bench/longca/run.sh build/wheels [FOLDER [ARGUMENT...]]     FOLDER: of the results (default: bench/results);
#                                                               arguments are those of masks.py
set -euo pipefail
wheels=$(realpath "${1:?names the folder of the wheel}")
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${2:-bench/results}")

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
python3 -m pip install -q --no-deps --no-index --no-compile --target "$packages" "$wheels"/ringleader_kernels-*.whl
PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} python3 bench/longca/masks.py --folder "$folder" \
  --figures "$folder/figures/masks_schemes.json" --commit "$(cat "$wheels/COMMIT")" "${@:3}"
