#!/usr/bin/env bash
# Measures what docs/balance.md promises and writes bench/results/figures/balance.json, a row each.
#
#   bench/balance.sh                          the dealing, on any machine, after a build of dealing_bench
#   bench/balance.sh --gpus [--config FILE] [--steps 40] [--dir FOLDER]
#                                             tuning, on two GPUs of this machine: the same job with and without it
#
# Rows that other calls measured stay. --config: the model (default: bench/models/bytes-100m.json).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build/bin gpus='' config=$root/bench/models/bytes-100m.json steps=40 run=''
while (($#)); do
  case $1 in
    --gpus) gpus=1; shift; continue ;;
    --config) config=$2 ;;
    --steps) steps=$2 ;;
    --dir) run=$2 ;;
    -h | --help) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit ;;
    *) echo "balance: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done

if [[ ! $gpus ]]; then
  "$bin/dealing_bench" | python3 "$root/bench/balance_rows.py" dealing
  exit
fi

[[ $run ]] || { run=$(mktemp -d); keep=; }
mkdir -p "$run/logs" "$run/text"
run=$(realpath "$run")
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
use_gpu_libraries "$root"
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; [[ ${keep-x} ]] || rm -rf "$run"' EXIT
trap 'exit 130' INT TERM

# A document of each length, of words that come again.
"$bin/dealing_bench" ChatQA2-like 400 | python3 -c '
import pathlib, random, sys
words = ["".join(random.Random(i).choices("abcdefgh", k=3 + i % 5)) for i in range(500)]
for number, length in enumerate(map(int, sys.stdin)):
    rng = random.Random(number)
    text = " ".join(rng.choices(words, k=length // 3))[:length]
    (pathlib.Path(sys.argv[1]) / f"{number:04}.txt").write_text(text)' "$run/text"
cp "$config" "$run/config.json"
"$bin/ringctl" data pack --input "$run/text" --output "$run/tokens" --eval-share 0 >/dev/null

job() {  # NAME CONTEXT DATA BATCH PATTERN ANCHOR
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {train: ./tokens/train, sequence_length: 65536, batching: samples, overlong: split}
attention: {$5, balance: {anchor: $6, tolerance: 0.1}}
parallelism: {context: $2, data: $3}
training: {steps: $steps, global_batch: $4, learning_rate: 3e-4, seed: 1}
checkpoint: {directory: ./$1, every_steps: 0}
resources: {trainers: 2, engine: cuda}
END
  "$bin/ringctl" submit "$run/$1.yaml" --follow >"$run/logs/$1.log" 2>&1 || { tail -n 20 "$run/logs/$1.log" >&2; exit 1; }
  "$bin/ringctl" report "$1" -o json >"$run/$1.json"
}

start_coordinator
start_worker balance --trainers 2
await_nodes 1
slash='pattern: vertical_slash, vertical_mass: 0.8, slash_mass: 0.8'
job measure 1 2 4 "$slash" none  # leaves the latency table
for anchor in none mean; do
  job "groups-$anchor" 1 2 4 "$slash" "$anchor"
  job "ring-$anchor" 2 1 2 'pattern: xattention, threshold: 0.8' "$anchor"
done
hardware=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd, -)
HARDWARE="$hardware" python3 "$root/bench/balance_rows.py" tuning "$run"
