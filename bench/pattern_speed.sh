#!/usr/bin/env bash
# What patterns cost, by default on two GPUs: steps of Qwen2.5-3B's shape at 262,144 tokens in which each visits 5 % of the causal
# tiles, beside vertical-slash in the same run; steps of dense attention and of patterns as jobs get them that name nothing else; and how
# long choosing takes (index_bench). key_groups are measured twice, once with attention.group_heads: 2 (key_groups_of_pairs).
# Writes its rows into bench/results/figures/patterns.json, the steps to CSV, and how long choosing takes beside it, to …_index.csv.
#
#   bench/pattern_speed.sh [CSV]     from a checkout or a bundle; GPUS, TOKENS, STEPS, LAYERS, MODES, DEFAULTS and BIN may be set; ENGINE=cpu
#                                    tries the script on two CPU ranks, without rows
#   bench/pattern_speed.sh index [CSV]     how long choosing takes alone
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
index_only=''
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "pattern_speed: unknown option $1 (see --help)" >&2; exit 2 ;;
  index) index_only=1; shift ;;
esac
bin=${BIN:-$bin} csv=$(realpath -m "${1:-/tmp/pattern_speed.csv}") tokens=${TOKENS:-262144} steps=${STEPS:-2}
index_csv=${csv%.csv}_index.csv
engine=${ENGINE:-cuda} gpus=${GPUS:-2} layers=${LAYERS:-36}
modes=${MODES:-vertical_slash,sliding_window,fixed_blocks,block_topk,moba,xattention,key_groups,adaspa}
defaults=${DEFAULTS:-vertical_slash,key_groups}
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
config=$work/qwen2.5-3b-$layers-layers.json
sed "s/\"num_hidden_layers\": *[0-9]*/\"num_hidden_layers\": $layers/" "$root/bench/models/qwen2.5-3b.json" >"$config"
commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
hardware=$({ nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo CPU; } | head -n 1)
measure() {  # MODES DENSITY CSV [FLAG...]
  "$bin/training_bench" --engine "$engine" --config "$config" --gpus "$gpus" --tokens "$tokens" --mode "$1" --density "$2" \
    --steps "$steps" --timeout 900 --commit "$commit" --hardware "$gpus x $hardware" --csv "$3" "${@:4}"
}
append() {  # SUFFIX CSV: what was measured there, as modes of that name
  awk -F, -v OFS=, -v suffix="$1" 'NR > 1 {$8 = $8 suffix; print}' "$2" >>"$csv.new"
}
time_index() {
  rm -f "$index_csv.new"
  "$bin/index_bench" --commit "$commit" --csv "$index_csv.new"
  mv "$index_csv.new" "$index_csv"
}
if [[ $index_only ]]; then
  time_index
  python3 "$root/bench/pattern_rows.py" --index "$index_csv"
  exit
fi
# What an earlier call has measured stays until this one has.
measure "$modes" 0.05 "$csv.new"
measure "$defaults" 0 "$work/defaults.csv"
append _by_default "$work/defaults.csv"
if [[ ,$modes, == *,key_groups,* ]]; then
  measure key_groups 0.05 "$work/pairs.csv" --group-heads 2
  append _of_pairs "$work/pairs.csv"
fi
if [[ ,$defaults, == *,key_groups,* ]]; then
  measure key_groups 0 "$work/pairs_by_default.csv" --group-heads 2
  append _of_pairs_by_default "$work/pairs_by_default.csv"
fi
mv "$csv.new" "$csv"
[[ $engine == cuda ]] || exit 0
time_index
python3 "$root/bench/pattern_rows.py" --index "$index_csv" --steps "$csv" --gpus "$gpus" --layers "$layers" --tokens "$tokens"
