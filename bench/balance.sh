#!/usr/bin/env bash
# Measures what docs/balance.md promises and writes bench/results/figures/balance.json, a row each.
#
#   bench/balance.sh                          the dealing, on any machine, after a build of dealing_bench
#   bench/balance.sh --gpus [--config FILE] [--steps 12] [--dir FOLDER]
#                                             batching and tuning, on two GPUs of this machine: the same samples with
#                                             and without; from a checkout or a bundle (deploy/bundle.sh)
#   bench/balance.sh --cpus ...               the same on two CPU ranks and short samples, to try the script: prints rows and
#                                             writes none
#
# Rows that other calls measured stay; a row of docs/balance.md that nobody measured says so. --config: the model
# (default: bench/models/bytes-100m.json); --steps: of a job, a third of them warm up.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
gpus='' engine=cuda divide=1 sequence=65536 config=$root/bench/models/bytes-100m.json steps=12 run=''
while (($#)); do
  case $1 in
    --gpus) gpus=1; shift; continue ;;
    --cpus) gpus=1 engine=cpu divide=64 sequence=1024; shift; continue ;;
    --config) config=$2 ;;
    --steps) steps=$2 ;;
    --dir) run=$2 ;;
    -h | --help) sed -n '2,13p' "$0" | sed 's/^# \{0,1\}//'; exit ;;
    *) echo "balance: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done

if [[ ! $gpus ]]; then
  "$bin/dealing_bench" | python3 "$root/bench/balance_rows.py" dealing
  exit
fi

[[ $run ]] || { run=$(mktemp -d); keep=; }
mkdir -p "$run/logs"
run=$(realpath "$run")
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; [[ ${keep-x} ]] || rm -rf "$run"' EXIT
trap 'exit 130' INT TERM

# A document of each length, of words that come again.
pack() {  # DISTRIBUTION
  mkdir -p "$run/text-$1"
  "$bin/dealing_bench" "$1" 400 | python3 -c '
import pathlib, random, sys
words = ["".join(random.Random(i).choices("abcdefgh", k=3 + i % 5)) for i in range(500)]
for number, length in enumerate(map(int, sys.stdin)):
    rng, length = random.Random(number), max(2, length // int(sys.argv[2]))
    text = " ".join(rng.choices(words, k=length // 3 + 1))[:length]
    (pathlib.Path(sys.argv[1]) / f"{number:04}.txt").write_text(text)' "$run/text-$1" "$divide"
  "$bin/ringctl" data pack --input "$run/text-$1" --output "$run/$1" --eval-share 0 >/dev/null
}

job() {  # NAME DATA CONTEXT GROUPS SAMPLES ATTENTION ANCHOR DEALING [LAYOUT]
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {train: ./$2/train, sequence_length: $sequence, batching: samples, overlong: split, dealing: $8}
attention: {$6$7}
parallelism: {context: $3, data: $4, layout: ${9:-auto}, replan: never}
training: {steps: 1000, global_batch: $5, learning_rate: 3e-4, seed: 1}
checkpoint: {directory: ./$1, every_steps: 1000}
resources: {trainers: 2, engine: $engine}
END
  echo "balance: $1, at $SECONDS s"
  "$bin/ringctl" submit "$run/$1.yaml" >"$run/logs/$1.log" 2>&1 || { cat "$run/logs/$1.log" >&2; exit 1; }
  # The job's end, with a checkpoint and a model, is not measured.
  # Who has seen enough closes the pipe, of which the watch dies.
  { "$bin/ringctl" watch "$1" -o json 2>>"$run/logs/$1.log" || true; } | python3 -c '
import json, sys
wanted = int(sys.argv[1])
with open(sys.argv[2], "w") as out:
    for line in sys.stdin:
        part = json.loads(line)
        for step in part.get("steps", []):
            out.write(json.dumps(step) + "\n")
            if int(step["step"]) >= wanted:
                sys.exit()
        if part.get("job", {}).get("state") in ("FAILED", "CANCELLED", "SUCCEEDED"):
            sys.exit(part["job"].get("state_reason") or "it ended early")' "$steps" "$run/$1.steps" ||
    { "$bin/ringctl" logs "$1" 2>/dev/null | tail -n 20 >&2; exit 1; }
  "$bin/ringctl" cancel "$1" >/dev/null
  local deadline=$((SECONDS + 60))
  until [[ $("$bin/ringctl" get "$1" -o json) == *'"CANCELLED"'* ]]; do
    ((SECONDS < deadline)) || { echo "balance: $1 does not end" >&2; exit 1; }
    sleep 0.2
  done
}

start_coordinator
start_worker balance --trainers 2
await_nodes 1
cp "$config" "$run/config.json"
slash='pattern: vertical_slash, vertical_mass: 0.8, slash_mass: 0.8'
for data in ChatQA2-like LongAlign-like ProLong-like; do
  pack $data
  name=${data%%-*}
  name=${name,,}
  job "$name-order" $data 1 2 16 'pattern: dense' '' in_order
  job "$name-dealt" $data 1 2 16 'pattern: dense' '' by_cost
done
job prolong-documents ProLong-like 2 1 16 'pattern: dense' '' by_cost documents
for anchor in none mean; do
  balance=", balance: {anchor: $anchor, tolerance: 0.1}"
  job "groups-$anchor" ChatQA2-like 1 2 4 "$slash" "$balance" by_cost
  job "ring-$anchor" ChatQA2-like 2 1 2 'pattern: xattention, threshold: 0.8' "$balance" by_cost
done
if [[ $engine == cpu ]]; then
  HARDWARE="two CPU ranks, short samples" python3 "$root/bench/balance_rows.py" print "$run"
  echo "balance: all jobs ran in $SECONDS s" >&2
  exit
fi
hardware=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd, -)
HARDWARE="$hardware" python3 "$root/bench/balance_rows.py" gpus "$run"
echo "balance: $SECONDS s" >&2
