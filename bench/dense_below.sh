#!/usr/bin/env bash
# From which length on documents are better attended to by choice than densely (attention.dense_below, whose default this
# decides): steps on one GPU whose documents are all of one length, laid out by themselves, with and without it; and such of
# many short documents and some long ones, laid out by themselves and in stripes. Prints what attention takes, and appends
# the steps to CSV.
#
#   bench/dense_below.sh CSV      from a checkout or a bundle; PATTERNS, LENGTHS, MIXED (0: no such documents) and BIN may be set;
#                                 ENGINE=cpu tries the script, with TOKENS of a sequence
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
[[ $# == 1 && $1 != -* ]] || { echo "dense_below: it takes a CSV file, and no options (see --help)" >&2; exit 2; }
csv=$(realpath -m "$1") engine=${ENGINE:-cuda} tokens=${TOKENS:-65536}
if [[ -f $root/CMakeLists.txt ]]; then bin=${BIN:-$root/build/bin}; else bin=${BIN:-$root/bin}; fi
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
config=$work/qwen2.5-3b-2-layers.json
sed 's/"num_hidden_layers": *[0-9]*/"num_hidden_layers": 2/' "$root/bench/models/qwen2.5-3b.json" >"$config"
config=${CONFIG:-$config}
commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
hardware="1 x $({ nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo CPU; } | head -n 1)"

measure() {  # PATTERN LAYOUT DOCUMENTS DENSE_BELOW TOKENS
  "$bin/training_bench" --engine "$engine" --config "$config" --commit "$commit" --hardware "$hardware" --gpus 1 --steps 3 \
    --mode "$1" --density 0.1 --layout "$2" --documents "$3" --dense-below "$4" --tokens "$5" --csv "$work/part.csv" >&2
  [[ -s $csv ]] || head -n 1 "$work/part.csv" >"$csv"
  tail -n +2 "$work/part.csv" >>"$csv"
}

for pattern in ${PATTERNS:-vertical_slash xattention block_topk key_groups}; do
  for length in ${LENGTHS:-1024 2048 4096 8192}; do measure "$pattern" documents "$length" "0,$((length + 1))" "$tokens"; done
  [[ ${MIXED:-1} != 0 ]] || continue
  for layout in striped documents; do measure "$pattern" "$layout" ChatQA2-like 0,1024,2048,4096 $((2 * tokens)); done
done
python3 - "$csv" <<'PY'
import csv
import sys

for row in csv.DictReader(open(sys.argv[1])):
    seconds = sum(float(row[name]) for name in ("index", "attention_forward", "attention_backward"))
    print(f"{row['mode']}, {row['layout']}, documents {row['documents']}, dense below {row['dense_below']}: "
          f"attention {1e3 * seconds:.1f} of {1e3 * float(row['step_seconds']):.1f} ms")
PY
