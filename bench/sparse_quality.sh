#!/usr/bin/env bash
# Does a model lose anything by going on with sparse attention? Trains one dense on real text, then goes on from it
# twice, dense and vertical-slash at about 95 % sparsity, and compares the held-out losses and the index's recall.
#
#   bench/sparse_quality.sh --text DIR [--bin DIR] [--engine cuda|cpu] [--trainers 1] [--tokens 32768] [--steps 300]
#                           [--more 60] [--verticals 512] [--slashes 10] [--config FILE] [--dir FOLDER]
#                           [--output sparse_quality.json]
#
# The exit code is 0 if the sparse run's held-out loss is within 2 % of the dense run's.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
text='' engine=cuda trainers=1 tokens=32768 steps=300 more=60 verticals=512 slashes=10
config=$root/bench/models/bytes-100m.json run='' output=sparse_quality.json
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "sparse_quality: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --text) text=$(realpath -e "$2") || exit 2 ;;
    --bin) bin=$2 ;;
    --engine) engine=$2 ;;
    --trainers) trainers=$2 ;;
    --tokens) tokens=$2 ;;
    --steps) steps=$2 ;;
    --more) more=$2 ;;
    --verticals) verticals=$2 ;;
    --slashes) slashes=$2 ;;
    --config) config=$2 ;;
    --dir) run=$2 ;;
    --output) output=$2 ;;
    *) echo "sparse_quality: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ $text ]] || { echo "sparse_quality: --text must name a folder of text" >&2; exit 2; }
[[ $run ]] || { run=$(mktemp -d); keep=; }
mkdir -p "$run/logs"
run=$(realpath "$run")
# A bundle brings its binaries, and finds the rest on its machine.
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; [[ ${keep-x} ]] || rm -rf "$run"' EXIT
trap 'exit 130' INT TERM

cp "$config" "$run/config.json"
"$bin/ringctl" data pack --input "$text" --output "$run/tokens" --eval-share 0.05
job() {  # NAME STEPS MODEL RATE ATTENTION
  cat >"$run/$1.yaml" <<END
name: $1
model: $3
data: {train: ./tokens/train, eval: ./tokens/eval, sequence_length: $tokens, document_mask: false}
attention: $5
parallelism: {context: $trainers}
training: {steps: $2, learning_rate: $4, warmup_steps: $(($2 / 10)), seed: 1, eval_sequences: 8}
checkpoint: {directory: ./$1, every_steps: 100000, keep_last: 1}
resources: {trainers: $trainers, engine: $engine}
END
  "$bin/ringctl" submit "$run/$1.yaml" --follow >"$run/logs/$1.log" 2>&1 || { tail -n 20 "$run/logs/$1.log" >&2; exit 1; }
  "$bin/ringctl" report "$1" -o json >"$run/$1.json"
  grep 'held-out' "$run/logs/$1.log" | sed "s/^/$1: /"
}

start_coordinator
start_worker quality --trainers "$trainers"
await_nodes 1
job first "$steps" "{config: ./config.json, init: random}" 1e-3 "{pattern: dense}"
job on-dense "$more" "{init: ./first/model}" 3e-4 "{pattern: dense}"
job on-sparse "$more" "{init: ./first/model}" 3e-4 \
  "{pattern: vertical_slash, select: top_k, max_verticals: $verticals, max_slashes: $slashes}"

python3 - "$run" "$output" "$tokens" <<'END'
import json, sys

run, output, tokens = sys.argv[1:]
first, dense, sparse = (json.load(open(f"{run}/{name}.json")) for name in ("first", "on-dense", "on-sparse"))
ratio = sparse["heldout_last"] / dense["heldout_last"]
result = {"tokens": int(tokens), "first_steps": first["steps"], "more_steps": dense["steps"],
          "heldout_untrained": first["heldout_first"], "heldout_after_first": first["heldout_last"],
          "heldout_on_dense": dense["heldout_last"], "heldout_on_sparse": sparse["heldout_last"],
          "sparse_over_dense": ratio, "density": sparse["density"],
          "density_per_layer": sparse["density_per_layer"], "recall_per_layer": sparse["recall_per_layer"]}
json.dump(result, open(output, "w"), indent=1)
print(json.dumps(result, indent=1))
sys.exit(0 if ratio <= 1.02 else 1)
END
