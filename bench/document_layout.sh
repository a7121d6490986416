#!/usr/bin/env bash
# Layout by documents against stripes, on GPUs that NCCL takes for two machines (through sockets) and for one (NVLink):
# ProLong-like documents in sequences of 262,144 tokens, dense, 3B shape. Writes its two rows into
# bench/results/figures/balance.json, which name the layers where they are not all 36, and the steps to CSV: of each layout the
# median of STEPS, of an even number the slower of the two in the middle.
#
#   bench/document_layout.sh [CSV]       from a checkout or a bundle; GPUS (2), TOKENS, STEPS, LAYERS and BIN may be set, and
#                                        SOCKET_GBYTES, what jobs measure of the sockets before they are planned (GB/s; 5.9);
#                                        ENGINE=cpu tries the script on two CPU ranks, without rows. Steps have sequences of
#                                        their own: calls with other STEPS compare other documents
#   bench/document_layout.sh --rows CSV  the rows alone, of steps that were measured before with the same STEPS
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
measured=''
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  --rows) measured=$(realpath -e "${2:?--rows needs the CSV}") ;;
  -*) echo "document_layout: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
measure() {  # CSV
  if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
  bin=${BIN:-$bin} csv=$1 tokens=${TOKENS:-262144} steps=${STEPS:-3}
  engine=${ENGINE:-cuda}
  # shellcheck source=deploy/gpu_libraries.sh
  source "$root/deploy/gpu_libraries.sh"
  if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  config=$work/qwen2.5-3b-${LAYERS:-36}-layers.json
  sed "s/\"num_hidden_layers\": *[0-9]*/\"num_hidden_layers\": ${LAYERS:-36}/" "$root/bench/models/qwen2.5-3b.json" >"$config"
  commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
  gpus=${GPUS:-2}
  hardware="$gpus x $({ nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo CPU; } | head -n 1)"
  rm -f "$csv.new"  # what an earlier call has measured stays in CSV until this one has
  for nodes in 2 1; do
    # Between processes that NCCL takes for machines of their own it goes through sockets, not through what GPUs share.
    NCCL_IB_DISABLE=1 "$bin/training_bench" --engine "$engine" --config "$config" --gpus "$gpus" --nodes $nodes --tokens "$tokens" --mode dense --ring flat \
      --inter-node-gbytes "${SOCKET_GBYTES:-5.9}" --layout striped,documents --documents ProLong-like --steps "$steps" --timeout 900 --commit "$commit" \
      --hardware "$hardware" --csv "$csv.part"
    cat "$csv.part" >>"$csv.new"
    rm "$csv.part"
  done
  mv "$csv.new" "$csv"
  [[ $engine == cuda ]] || { cat "$csv"; exit; }
}

if [[ ! $measured ]]; then
  measured=$(realpath -m "${1:-/tmp/document_layout.csv}")
  measure "$measured"
fi
cd "$root"
CSV=$measured STEPS=${STEPS:-3} python3 - <<'PY'
import csv
import json
import os
import pathlib
import re

steps, tokens, gpus, model, hardware, commit, date = {}, 0, "", "", "", "", ""
for row in csv.DictReader(open(os.environ["CSV"])):
    if row["layout"] == "layout":  # the second run's header
        continue
    steps[row["nodes"], row["layout"]] = float(row["step_seconds"])
    tokens, gpus, model, hardware, commit, date = (row[name] for name in ("tokens", "gpus", "model", "hardware", "commit", "date"))
tokens, layers = int(tokens), int(re.search(r"-(\d+)-layers", model).group(1))
part = ("" if gpus == "2" else f", {gpus} GPUs") + ("" if layers == 36 else f", {layers} of 36 layers")
rows = []
for nodes, link, asked in (("2", "two nodes through sockets", 2.0), ("1", "NVLink", 1.03)):
    gain = round(steps[nodes, "striped"] / steps[nodes, "documents"], 3)
    rows.append({
        "row": f"ProLong-like in {tokens // 1024}K sequences, {link}: documents against stripes{part}",
        "value": gain, "asked": asked, "met": gain >= asked, "peer": None, "hardware": hardware,
        "commit": commit, "date": date,
        "command": ("" if gpus == "2" else f"GPUS={gpus} ") + f"LAYERS={layers} STEPS={os.environ['STEPS']} bench/document_layout.sh",
    })
path = pathlib.Path("bench/results/figures/balance.json")
new = {row["row"] for row in rows}
if path.exists():
    rows = [row for row in json.loads(path.read_text()) if row["row"] not in new] + rows
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(rows, indent=2) + "\n")
print(path.read_text(), end="")
PY
