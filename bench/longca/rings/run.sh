#!/usr/bin/env bash
# Our schemes beside PyTorch's ring attention on the GPUs of this machine, in one go: ringleader-bench, then
# bench/longca/rings/peers.py under torchrun, in the same shape and cells, and what the fastest of each reach.
#
#   bench/longca/rings/run.sh [--gpus 2] [--tokens "32768 131072" | --tokens-per-gpu "8192 16384"] [--repetitions 5]
#                             [--bin DIR] [--folder DIR]
#
#   The masks are those that PyTorch's ring attention knows: full and causal.
#   --tokens   of the sequences that the GPUs share; --tokens-per-gpu says how much of them each GPU has
#   --folder   gets longca_gpu_rings and longca_ring_peers, .csv and .svg (default: bench/results/rings)
#   --bin      of the programs (default: build/bin, or bin of a bundle)
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=${RINGLEADER_BUILD:-$root/build}/bin; else bin=$root/bin; fi
gpus=2 tokens='' per_gpu='' repetitions=5 folder=$root/bench/results/rings
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "rings: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --gpus) gpus=$2 ;;
    --tokens) tokens=$2 ;;
    --tokens-per-gpu) per_gpu=$2 ;;
    --repetitions) repetitions=$2 ;;
    --bin) bin=$(realpath -e "$2") || exit 2 ;;
    --folder) folder=$(realpath -m "$2") ;;
    *) echo "rings: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ ! $tokens || ! $per_gpu ]] || { echo "rings: --tokens and --tokens-per-gpu are both given" >&2; exit 2; }
for each in $per_gpu; do tokens+="$((each * gpus)) "; done
tokens=${tokens:-32768 131072}
[[ -x $bin/ringleader-bench ]] || { echo "rings: no ringleader-bench in $bin; --bin names the folder" >&2; exit 2; }
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi

commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
mkdir -p "$folder"
# shellcheck disable=SC2086
"$bin/ringleader-bench" --engine cuda --folder "$folder" --ranks "$gpus" --tokens $tokens --masks full causal \
  --patterns none --repetitions "$repetitions" --commit "$commit"
# The libraries that our programs were pointed to are not the peer's.
# shellcheck disable=SC2086
env -u LD_LIBRARY_PATH python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$root/bench/longca/rings/peers.py" \
  --tokens $tokens --repetitions "$repetitions" --commit "$commit" --csv "$folder/longca_ring_peers.csv" \
  --beside "$folder/longca_gpu_rings.csv"
