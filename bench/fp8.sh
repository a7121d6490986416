#!/usr/bin/env bash
# Measures what docs/precision.md promises of training.precision: fp8, beside bfloat16 in the same run, and writes
# bench/results/figures/fp8.json, a row each. Rows that other calls measured stay.
#
#   bench/fp8.sh speed [--gpus 2] [--steps 2] [--parts "sparse dense memory"] [--peer SCRIPT]
#       steps of Qwen2.5-3B's shape at 64K and 128K tokens a GPU (sparse), at 64K (dense) and, all of it recomputed, at 128K
#       (memory, with nothing in host memory: wants GPUs of 141 GB); a part `longest` is of 512K a GPU. --peer, as
#       bench/compare_peer.sh takes it: beside a dense peer, too
#   bench/fp8.sh loss --text DIR [--steps 1000] [--tokens 8192] [--seeds "1 2 3"] [--engine cuda|cpu] [--config FILE]
#                     [--first-step N] [--last-step N] [--at-once 1] [--again 1]
#       held-out losses of both precisions on real text, for each seed (default: bench/models/bytes-100m.json, a GPU a job),
#       32,768 tokens a step in sequences of --tokens; and, unless --again is 0, bf16 once more with the first seed, which
#       tells what two runs of one precision differ by. --first-step, --last-step: training.fp8_first_step and fp8_last_step of the jobs in FP8;
#       --at-once: so many jobs share the machine's GPUs
#   bench/fp8.sh recall --quality FILE
#       answers of the recall tasks in both precisions, from the quality.json of bench/quality/run.sh
#   bench/fp8.sh error
#       a small decoder's logits and gradients against fp64, by layer, on the CPU (model_test)
#
# Every call takes [--bin DIR], [--dir FOLDER], which keeps what was measured, and [--output FILE].
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
command="bench/fp8.sh ${1:-}"  # what rows name: without where things are kept
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
what=${1:-} gpus=2 steps='' peer='' parts="sparse dense memory" quality='' text='' tokens=8192 seeds="1 2 3" engine=cuda run=''
first_step='' last_step='' at_once=1 again=1
config=$root/bench/models/bytes-100m.json output=$root/bench/results/figures/fp8.json
case $what in
  speed | loss | recall | error) shift ;;
  -h | --help) sed -n '2,22s/^# \{0,1\}//p' "$0"; exit ;;
  *) echo "fp8: '$what' is nothing to measure; give speed, loss, recall or error (see --help)" >&2; exit 2 ;;
esac
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,22s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "fp8: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --bin | --dir | --output) ;;
    --peer | --text | --config | --quality) command+=" $1 $(basename "$2")" ;;
    *) if [[ $2 == *' '* ]]; then command+=" $1 \"$2\""; else command+=" $1 $2"; fi ;;
  esac
  case $1 in
    --gpus) gpus=$2 ;;
    --steps) steps=$2 ;;
    --parts) parts=$2 ;;
    --peer) peer=$(realpath -e "$2") || exit 2 ;;
    --quality) quality=$(realpath -e "$2") || exit 2 ;;
    --text) text=$(realpath -e "$2") || exit 2 ;;
    --tokens) tokens=$2 ;;
    --seeds) seeds=$2 ;;
    --engine) engine=$2 ;;
    --first-step) first_step=$2 ;;
    --last-step) last_step=$2 ;;
    --at-once) at_once=$2 ;;
    --again) again=$2 ;;
    --config) config=$(realpath -e "$2") || exit 2 ;;
    --bin) bin=$(realpath -e "$2") || exit 2 ;;
    --dir) run=$2 ;;
    --output) output=$2 ;;
    *) echo "fp8: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
for part in $parts; do
  [[ $part =~ ^(sparse|dense|memory|longest)$ ]] || { echo "fp8: unknown part $part (see --help)" >&2; exit 2; }
done
[[ $what != loss ]] || ((tokens > 0 && 32768 % tokens == 0)) ||
  { echo "fp8: --tokens must divide the 32,768 tokens of a step" >&2; exit 2; }
[[ $again =~ ^[01]$ ]] || { echo "fp8: --again is 0 or 1, not '$again'" >&2; exit 2; }
[[ $what != loss || $text ]] || { echo "fp8: --text must name a folder of text" >&2; exit 2; }
[[ $what != recall || $quality ]] || { echo "fp8: --quality must name a quality.json" >&2; exit 2; }
[[ $run ]] || { run=$(mktemp -d); keep=; }
mkdir -p "$run/logs"
run=$(realpath "$run")
trap '[[ ${keep-x} ]] || rm -rf "$run"' EXIT
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
COMMIT=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
HARDWARE="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 || true)"
[[ $HARDWARE != *" x " ]] || HARDWARE=$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1)
export COMMIT HARDWARE
rows() { python3 "$root/bench/fp8_rows.py" "$what" "$run" --output "$output" --command "$command" "$@"; }

speed() {
  steps=${steps:-2}
  both() {  # NAME MODE TOKENS STEPS [OPTION...]
    [[ ! -e $run/$1.csv ]] || return 0
    rm -f "$run/$1.csv.part"
    "$bin/training_bench" --trainer "$bin/ringleader-trainer" --config "$root/bench/models/qwen2.5-3b.json" \
      --gpus "$gpus" --mode "$2" --tokens "$3" --precision bfloat16,fp8 --steps "$4" --csv "$run/$1.csv.part" \
      --commit "$COMMIT" --hardware "${HARDWARE//,/ }" "${@:5}"
    mv "$run/$1.csv.part" "$run/$1.csv"
    rows --gpus "$gpus" >/dev/null
  }
  for part in $parts; do
    case $part in
      sparse) both sparse sparse "$((65536 * gpus)),$((131072 * gpus))" "$steps" ;;
      dense) both dense dense "$((65536 * gpus))" "$steps" ;;
      memory) both memory sparse "$((131072 * gpus))" 1 --recompute full --offload none ;;
      longest) both longest sparse "$((524288 * gpus))" 1 --timeout 900 ;;
    esac
  done
  if [[ $peer && ! -e $run/peer.log ]]; then
    env -u LD_LIBRARY_PATH COMPILE=1 BE=cudnn python3 -m torch.distributed.run --nproc-per-node "$gpus" \
      "$peer" "$((128 * gpus))" | tee "$run/peer.log.part"
    grep -q "S=$((131072 * gpus)) .*-> [0-9]* tok/s" "$run/peer.log.part" || {
      echo "fp8: $peer printed no line of $((131072 * gpus)) tokens (bench/compare_peer.sh says which)" >&2
      exit 1
    }
    mv "$run/peer.log.part" "$run/peer.log"
    rows --gpus "$gpus" >/dev/null
  fi
  rows --gpus "$gpus"
}

loss() {
  steps=${steps:-1000}
  # shellcheck source=deploy/loopback_services.sh
  source "$root/deploy/loopback_services.sh"
  trap 'stop_services; [[ ${keep-x} ]] || rm -rf "$run"' EXIT
  trap 'exit 130' INT TERM
  # What has ended is not measured again, so it must be of the same code, machine and options.
  made_by=$(printf '%s\n' "commit $COMMIT" "hardware $HARDWARE" "engine $engine" "text $text" "tokens $tokens" "steps $steps" \
    "first step ${first_step:-1}" "last step ${last_step:-$steps}" "config $(sha256sum <"$config")")
  if [[ ! -e $run/made_by ]] && compgen -G "$run/*.csv" >/dev/null; then
    echo "fp8: $run holds losses of nobody knows which run; give another --dir, or remove it" >&2
    exit 2
  fi
  if [[ -e $run/made_by ]]; then
    difference=$(diff --old-line-format='  kept:  %L' --new-line-format='  asked: %L' --unchanged-line-format= "$run/made_by" - <<<"$made_by") || {
      echo "fp8: $run holds losses of another run; give another --dir, or remove it:" >&2
      echo "$difference" >&2
      exit 2
    }
  else
    echo "$made_by" >"$run/made_by"
  fi
  cp "$config" "$run/config.json"
  [[ -d $run/tokens ]] || "$bin/ringctl" data pack --input "$text" --output "$run/tokens" --eval-share 0.05
  start_coordinator
  # A worker's slots are GPUs of their own; several workers share one.
  start_workers "$at_once" fp8
  await_nodes "$at_once"
  for seed in $seeds; do
    for precision in bfloat16 fp8 again; do
      name=$precision-$seed fp8_steps=''
      [[ $precision != fp8 ]] || fp8_steps=${first_step:+, fp8_first_step: $first_step}${last_step:+, fp8_last_step: $last_step}
      [[ $precision != again || ($again != 0 && $seed == "${seeds%% *}") ]] || continue
      [[ ! -e $run/$name.csv ]] || continue
      cat >"$run/$name.yaml" <<END
name: $name
model: {config: ./config.json, init: random}
data: {train: ./tokens/train, eval: ./tokens/eval, sequence_length: $tokens}
attention: {pattern: dense}
training: {steps: $steps, learning_rate: 6e-4, warmup_steps: $((steps / 20)), seed: $seed, precision: ${precision/again/bfloat16}$fp8_steps,
           global_batch: $((32768 / tokens)), eval_every_steps: $((steps / 20)), eval_sequences: $((262144 / tokens))}
checkpoint: {directory: ./$name, every_steps: 0, keep_last: 1}
resources: {trainers: 1, engine: $engine}
END
      "$bin/ringctl" submit "$run/$name.yaml" --follow >"$run/logs/$name.log" 2>&1 &
      following+=("$! $name")
    done
  done
  for job in "${following[@]}"; do
    name=${job#* }
    wait "${job% *}" || { tail -n 20 "$run/logs/$name.log" >&2; exit 1; }
    "$bin/ringctl" history "$name" -o csv >"$run/$name.csv.part"
    mv "$run/$name.csv.part" "$run/$name.csv"
  done
  local cast=''
  [[ ! $first_step$last_step ]] || cast="${first_step:-1} to ${last_step:-$steps}"
  HARDWARE=${HARDWARE/#$gpus x/1 x} rows --seeds "$seeds" ${cast:+--cast-steps "$cast"}
}

recall() {
  rows --quality "$quality"
}

error() {
  "$bin/model_test" --gtest_filter='Fp8DecoderTest.ErrorsByLayer*' >"$run/error.txt"
  HARDWARE=$(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1) rows
}

"$what"
