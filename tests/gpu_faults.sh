#!/usr/bin/env bash
# Faults on real GPUs, from a bundle (deploy/bundle.sh) or a build folder: a trainer that is killed in mid-step, and one
# that hangs. All ranks must be gone within 5 s, the rank that failed first named, and a new attempt must go on from the
# checkpoint by itself.
#
#   tests/gpu_faults.sh [--bin DIR] [--trainers N] [--dir DIR] [--text DIR] [--layers N] [--set K=V]...
#
#   --bin       folder of binaries (default: bin/ beside this folder)
#   --trainers  GPUs to use (default: all)
#   --text      folder of text to train on (default: /usr/include)
#   --layers    of the Qwen2.5-3B shape (default: 4)
#   --set       overrides a field of deploy/quickstart/gpu_job.yaml (default: data.sequence_length=131072)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/bin run=$PWD/gpu-faults text=/usr/include trainers='' layers=4 overrides=(--set data.sequence_length=131072)
while (($#)); do
  case $1 in
    --bin) bin=$(realpath -e "$2") ;;
    --trainers) trainers=$2 ;;
    --dir) run=$(realpath -m "$2") ;;
    --layers) layers=$2 ;;
    --text) text=$2 ;;
    --set) overrides+=(--set "$2") ;;
    *) echo "gpu_faults: unknown option $1" >&2; exit 2 ;;
  esac
  shift 2
done
if [[ -z $trainers ]]; then trainers=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | wc -l); fi
rm -rf "$run"
mkdir -p "$run/logs"
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -d $root/lib ]]; then use_gpu_libraries "$root"; fi
trap stop_services EXIT

fail() { echo "FAILED: $*" >&2; tail -n 15 "$run"/logs/*.log >&2; "$bin/ringctl" logs faults --tail 20 >&2 || true; exit 1; }

# field PYTHON: an expression over the job, as ringctl shows it.
field() { "$bin/ringctl" get faults -o json | python3 -c "import json, sys; job = json.load(sys.stdin); print($1)"; }
step() { field 'job.get("progress", {}).get("step", 0)'; }
attempts() { field 'len(job.get("attempts", []))'; }
pids() { pgrep -f "$bin/ringleader-trainer.*$run" || true; }
pid_of() { pgrep -f "$bin/ringleader-trainer.*$run.*--rank $1 " ; }

await() {  # SECONDS WHAT COMMAND...
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    ((SECONDS < deadline)) || fail "$what did not happen in time"
    sleep 0.1
  done
}
past_step() { (($(step) > $1)); }
saved() { (($(field 'job.get("progress", {}).get("checkpoint_step", 0)') > 0)); }
attempt_is() { (($(attempts) >= $1)); }
trained() { (($(field "job['attempts'][$1 - 1].get('last_step', 0)") > $2)); }
resumed() { "$bin/ringctl" logs faults --attempt "$1" | grep -o "resuming from .*"; }
gone() { ! kill -0 "$@" 2>/dev/null; }

# fault NAME SIGNAL SECONDS WORDS: does it to the last rank in mid-step, and looks at what a user would.
fault() {
  local name=$1 signal=$2 limit=$3 words=$4 before victim all start number
  victim=$((trainers - 1))
  before=$(step)
  await 180 "$name: a checkpoint" saved
  await 180 "$name: a step" past_step "$before"
  before=$(step)
  number=$(attempts)
  mapfile -t all < <(pids)
  sleep 0.3  # into the next step
  kill "-$signal" "$(pid_of "$victim")"
  start=$(date +%s%N)
  for pid in "${all[@]}"; do await "$limit" "$name: the end of all ranks" gone "$pid"; done
  local seconds
  seconds=$(python3 -c "print(round(($(date +%s%N) - $start) / 1e9, 1))")
  await 60 "$name: a new attempt" attempt_is $((number + 1))
  local failure
  failure=$(field "job['attempts'][$number - 1].get('failure', {})")
  echo "$name of rank $victim after step $before: all ${#all[@]} ranks gone after $seconds s; $failure"
  [[ $failure == *"'rank': $victim,"* || ($victim == 0 && $failure != *"'rank'"*) ]] || fail "$name: rank $victim is not named: $failure"
  [[ $failure == *"$words"* ]] || fail "$name: the reason does not say '$words': $failure"
  # Steps that the old attempt still finished do not count.
  await 180 "$name: a step of attempt $((number + 1)) beyond $before" trained $((number + 1)) "$before"
  await 10 "$name: the word that attempt $((number + 1)) resumed" resumed $((number + 1)) >/dev/null
  echo "$name: attempt $(attempts) is at step $(step), $(resumed $((number + 1)))"
}

"$bin/ringctl" data pack --input "$text" --output "$run/tokens" --suffix .h --suffix .hpp >/dev/null
cp "$root/deploy/quickstart/gpu_config.json" "$run/config.json"
sed -i "s/\"num_hidden_layers\": [0-9]*/\"num_hidden_layers\": $layers/" "$run/config.json"
cp "$root/deploy/quickstart/gpu_job.yaml" "$run/job.yaml"
start_coordinator
start_worker a --trainers "$trainers" --pulse-timeout 6
await_nodes 1
"$bin/ringctl" submit "$run/job.yaml" --set name=faults --set training.steps=100000 --set checkpoint.every_steps=2 \
  --set "resources.trainers=$trainers" "${overrides[@]}" >/dev/null

fault "kill -9" KILL 5 "SIGKILL"
# The worker has --pulse-timeout 6 to find out; then 5 s more.
fault "SIGSTOP" STOP 12 "no sign of life"
"$bin/ringctl" cancel faults >/dev/null
echo "PASSED"
