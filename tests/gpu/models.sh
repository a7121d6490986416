#!/usr/bin/env bash
# Real model shapes through the whole service on GPUs, against transformers on the same machine: a Hugging Face folder
# with random weights is made, loaded, trained for a few steps and saved; transformers must find the same held-out loss
# as the service, before on the original and after on the saved model.
#
#   tests/gpu/models.sh [--bin DIR] [--trainers 1] [--tokens 8192] [--steps 3] [--layers N] [--dir FOLDER]
#                       SHAPE...
#
# Shapes: see models.py; `all` is each of them. --layers takes only so many layers of a shape. Needs python3 with torch and transformers.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
trainers=1 tokens=8192 steps=3 layers=0 run='' shapes=()
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    -*) (($# > 1)) || { echo "models: $1 needs a value, or is no option (see --help)" >&2; exit 2; } ;;
  esac
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --trainers) trainers=$2; shift 2 ;;
    --tokens) tokens=$2; shift 2 ;;
    --steps) steps=$2; shift 2 ;;
    --layers) layers=$2; shift 2 ;;
    --dir) run=$2; shift 2 ;;
    -*) echo "models: unknown option $1 (see --help)" >&2; exit 2 ;;
    *) shapes+=("$1"); shift ;;
  esac
done
((${#shapes[@]})) || { echo "models: name a shape: $(python3 "$root/tests/gpu/models.py" shapes)" >&2; exit 2; }
run=${run:-$(mktemp -d)}
mkdir -p "$run/logs"
# A bundle brings its binaries, and finds the rest on its machine.
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap stop_services EXIT
trap 'exit 130' INT TERM

python=(env -u LD_LIBRARY_PATH python3 "$root/tests/gpu/models.py")
[[ ${shapes[*]} != all ]] || read -ra shapes <<<"$("${python[@]}" shapes)"
failed=0
check() {
  local shape=$1 folder=$run/$1
  mkdir -p "$folder"
  "${python[@]}" make "$shape" "$folder/original" "$folder/ids.bin" "$tokens" "$layers" || return 1
  local vocabulary
  vocabulary=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["vocab_size"])' "$folder/original/config.json")
  # One sequence, the same for training and evaluation.
  "$bin/ringctl" data pack --format uint32 --input "$folder/ids.bin" --output "$folder/tokens" --eval-share 0 \
    --vocabulary "$vocabulary" --separator $((vocabulary - 1)) >"$run/logs/$shape.pack.log"
  cat >"$folder/job.yaml" <<END
name: ${shape//./-}
model: {init: ./original}
data: {train: ./tokens/train, eval: ./tokens/train, sequence_length: $tokens, document_mask: false}
attention: {pattern: dense}
parallelism: {context: $trainers}
training: {steps: $steps, learning_rate: 1e-5, warmup_steps: 1, seed: 1, eval_sequences: 1}
checkpoint: {directory: ./checkpoints, every_steps: 100000, keep_last: 1}
resources: {trainers: $trainers, engine: cuda}
END
  "$bin/ringctl" submit "$folder/job.yaml" --follow >"$run/logs/$shape.log" 2>&1 ||
    { tail -n 25 "$run/logs/$shape.log"; return 1; }
  "$bin/ringctl" report "${shape//./-}" -o json >"$folder/summary.json"
  "${python[@]}" check "$shape" "$folder" "$tokens" || return 1
  rm -rf "$folder"
}
start_coordinator
start_worker models --trainers "$trainers"
await_nodes 1
for shape in "${shapes[@]}"; do
  check "$shape" || { echo "$shape: FAILED"; failed=1; }
done
exit "$failed"
