#!/usr/bin/env bash
# Block-sparse attention beside cuDNN's dense attention on one Hopper: attention_bench, and the rows of
# bench/results/figures/masks_schemes.json that are of its table.
#
#   bench/attention_speed.sh [FOLDER [ARGUMENT...]]     from a checkout or a bundle; FOLDER: of the results (default:
#                                                       bench/results); arguments are those of attention_bench, of which
#                                                       --quick leaves the shapes out that no row is of. BIN may be set
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "attention_speed: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
bin=${BIN:-$bin} folder=$(realpath -m "${1:-$root/bench/results}") command="bench/attention_speed.sh"
[[ $# -le 1 ]] || command+=" bench/results ${*:2}"
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi

commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
measured=$(mktemp)
trap 'rm -f "$measured"' EXIT
"$bin/attention_bench" --csv "$measured" --commit "$commit" "${@:2}"
[[ -s $measured ]] || { echo "attention_speed: attention_bench found no GPU" >&2; exit 1; }
mkdir -p "$folder"
cat "$measured" >"$folder/attention_bench.csv"
python3 "$root/bench/attention_rows.py" "$measured" --output "$folder/figures/masks_schemes.json" --command "$command"
