#!/usr/bin/env bash
# What patterns cost, by default on two GPUs: steps of Qwen2.5-3B's shape at 262,144 tokens in which each visits 5 % of the causal
# tiles, beside vertical-slash in the same run; steps of dense attention and of patterns as jobs get them that name nothing else; and how
# long choosing takes (index_bench). Writes its rows into bench/results/figures/patterns.json and the steps to CSV.
#
#   bench/pattern_speed.sh [CSV]     from a checkout or a bundle; GPUS, TOKENS, STEPS, LAYERS, MODES, DEFAULTS and BIN may be set; ENGINE=cpu
#                                    tries the script on two CPU ranks, without rows
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
bin=${BIN:-$bin} csv=$(realpath -m "${1:-/tmp/pattern_speed.csv}") tokens=${TOKENS:-262144} steps=${STEPS:-2}
engine=${ENGINE:-cuda} gpus=${GPUS:-2} layers=${LAYERS:-36}
modes=${MODES:-vertical_slash,sliding_window,block_topk,moba,xattention,key_groups,adaspa}
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
measure() {  # MODES DENSITY CSV
  "$bin/training_bench" --engine "$engine" --config "$config" --gpus "$gpus" --tokens "$tokens" --mode "$1" --density "$2" \
    --steps "$steps" --timeout 900 --commit "$commit" --hardware "$gpus x $hardware" --csv "$3"
}
measure "$modes" 0.05 "$csv"
measure "$defaults" 0 "$work/defaults.csv"
awk -F, -v OFS=, 'NR > 1 {$8 = $8 "_by_default"; print}' "$work/defaults.csv" >>"$csv"
[[ $engine == cuda ]] || exit 0
"$bin/index_bench" --commit "$commit" --csv "$work/index.csv"
cd "$root"
CSV=$csv INDEX=$work/index.csv GPUS=$gpus LAYERS=$layers TOKENS=$tokens HARDWARE=$hardware python3 - <<'PY'
import csv
import json
import os
import pathlib

steps = {line["mode"]: line for line in csv.DictReader(open(os.environ["CSV"]))}
index = {(line["step"], line["ranks"], line["heads"]): float(line["ms"]) for line in csv.DictReader(open(os.environ["INDEX"]))}
base = steps["vertical_slash"]
peer = float(base["tokens_per_second"])
gpus, layers = int(os.environ["GPUS"]), int(os.environ["LAYERS"])
length = f"{int(os.environ['TOKENS']) // 1024}K, {gpus} GPU{'s' * (gpus > 1)}" + (f", {layers} layers" if layers != 36 else "")
rows = []


def add(name, value, asked, met, peer, hardware):
    rows.append({"row": name, "value": value, "asked": asked, "met": met, "peer": peer, "hardware": hardware,
                 "commit": base["commit"], "date": base["date"], "command": "bench/pattern_speed.sh"})


for mode, line in steps.items():
    speed, of, visited = float(line["tokens_per_second"]), f"{peer:.0f} tokens/s", f"here {float(line['density']):.1%}"
    if mode.endswith("_by_default"):
        add(f"tokens/s of {mode.replace('_by_default', ' by default')}, {length}, of vertical-slash's where 5% are asked for",
            round(speed / peer, 3), "reported", True, f"{of}; {visited} visited", line["hardware"])
    elif mode != "vertical_slash":
        ratio = round(speed / peer, 3)
        add(f"tokens/s of {mode} where 5% are asked for, {length}, of vertical-slash's", ratio, ">= 0.85", ratio >= 0.85,
            f"{of}, {float(base['density']):.1%} visited; {visited}", line["hardware"])
for name, parts, asked in (("vertical-slash, spread queries", ["all_spread"], 0.3),
                           ("xattention", ["antidiagonals_16", "antidiagonal_lists_16"], 1.5),
                           ("moba", ["query_gate_1024", "query_gate_lists_1024"], 0.5)):
    ms = round(sum(index[part, "1", "16"] for part in parts), 3)
    add(f"index of {name}, 131,072 tokens a rank, 16 heads: ms a layer", ms, f"<= {asked}", ms <= asked, None,
        os.environ["HARDWARE"])
# attention.probe_every is 16 by default.
share = round(index["probe", "1", "16"] / 1000 * layers / 16 / float(base["step_seconds"]), 5)
add(f"probe at its default rate, share of a step of vertical-slash, {length}", share, "<= 0.01", share <= 0.01, None,
    base["hardware"])
path = pathlib.Path("bench/results/figures/patterns.json")
if path.exists():
    rows = [row for row in json.loads(path.read_text()) if row["row"] not in {new["row"] for new in rows}] + rows
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(rows, indent=1) + "\n")
for row in rows:
    if row["command"] == "bench/pattern_speed.sh":
        print(f"{'met    ' if row['met'] else 'NOT MET'} {row['row']}: {row['value']} (asked {row['asked']})")
PY
