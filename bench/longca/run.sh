#!/usr/bin/env bash
# Every mask beside cuDNN, FlashAttention and FlexAttention on one GPU: bench/longca/masks. Needs a Hopper, and a python3 with
# PyTorch (and Triton, for FlexAttention, which compiles each cell anew); no compiler.
#
#   deploy/python_kernels.sh --bench build/wheels     first, where there is a compiler
#   bench/longca/run.sh build/wheels [FOLDER [ARGUMENT...]]     FOLDER: of the results (default: bench/results);
#                                                               arguments are those of masks/main.py, for example
#   bench/longca/run.sh build/wheels /tmp/lists --tokens 131072 --masks full --choices uniform:12.5 uniform:50 \
#     --kernels ringleader flex
#
# SIGTERM, as timeout sends it, ends it with exit code 1, and with files of the cells that ran.
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "longca: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
wheels=$(realpath "${1:?names the folder of the wheel}")
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${2:-bench/results}")
command="bench/longca/run.sh build/wheels"
[[ $# -le 2 ]] || command+=" bench/results ${*:3}"

packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
trap : TERM  # masks/main.py gets it, too, and writes what it has
python3 -m pip install -q --no-deps --no-index --no-compile --target "$packages" "$wheels"/ringleader_kernels-*.whl
PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} python3 bench/longca/masks/main.py --folder "$folder" \
  --figures "$folder/figures/masks_schemes.json" --commit "$(cat "$wheels/COMMIT")" --command "$command" "${@:3}"
