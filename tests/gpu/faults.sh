#!/usr/bin/env bash
# Faults on real GPUs, from a bundle (deploy/bundle.sh) or a build folder: a trainer that is killed in mid-step, one that
# hangs, one whose GPU is filled by another process, a worker and a coordinator that are killed. Trainers must be gone
# within 5 s and the rank that failed first be named, and a new attempt must go on from the checkpoint by itself; without
# its coordinator a job trains on. Last, `ringctl profile` must leave a trace of every rank.
#
#   tests/gpu/faults.sh [--bin DIR] [--trainers N] [--dir DIR] [--text DIR] [--layers N] [--config FILE] [--set K=V]...
#                       [--workers N] [--share-gpus] [--faults "kill hang worker coordinator memory profile"]
#
#   --bin       folder of binaries (default: the bundle's, or build/bin)
#   --trainers  GPUs to use (default: all)
#   --workers   deal the GPUs out to this many workers, which NCCL takes for machines of their own (default: 1)
#   --share-gpus  with --workers N: each worker has all GPUs, so that N trainers share one, where there are too few for the
#               job's ranks; their speed says nothing
#   --text      folder of text to train on (default: /usr/include)
#   --layers    of the Qwen2.5-3B shape (default: 4)
#   --config    another model's config.json
#   --set       overrides a field of deploy/quickstart/gpu_job.yaml (default: data.sequence_length=131072)
#
# With --set resources.engine=cpu and a small --config it runs without a GPU, less `memory`.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
run=$PWD/gpu-faults text=/usr/include trainers='' workers=1 share='' layers=4 config='' overrides=(--set data.sequence_length=131072)
faults="kill hang worker coordinator memory profile"
while (($#)); do
  case $1 in
    --share-gpus) share=1; shift; continue ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "faults: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --bin) bin=$(realpath -e "$2") ;;
    --trainers) trainers=$2 ;;
    --workers) workers=$2 ;;
    --dir) run=$(realpath -m "$2") ;;
    --layers) layers=$2 ;;
    --config) config=$(realpath -e "$2") ;;
    --text) text=$2 ;;
    --set) overrides+=(--set "$2") ;;
    --faults) faults=$2 ;;
    *) echo "faults: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
gpus=$({ nvidia-smi --query-gpu=uuid --format=csv,noheader 2>/dev/null || true; } | wc -l)
if [[ -z $trainers ]]; then trainers=$((share ? gpus * workers : gpus)); fi
((trainers % workers == 0)) || { echo "faults: $trainers trainers cannot be dealt out to $workers workers" >&2; exit 2; }
rm -rf "$run"
mkdir -p "$run/logs"
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -d $root/lib ]]; then use_gpu_libraries "$root"; else use_gpu_libraries; fi
hog=
trap '[[ -z $hog ]] || kill -9 "$hog"; stop_services' EXIT

fail() { echo "FAILED: $*" >&2; tail -n 15 "$run"/logs/*.log >&2; "$bin/ringctl" logs faults --tail 20 >&2 || true; exit 1; }

# field PYTHON: an expression over the job, as ringctl shows it.
field() { "$bin/ringctl" get faults -o json | python3 -c "import json, sys; job = json.load(sys.stdin); print($1)"; }
step() { field 'job.get("progress", {}).get("step", 0)'; }
attempts() { field 'len(job.get("attempts", []))'; }
pids() { pgrep -f "$bin/ringleader-trainer.*$run" || true; }
pid_of() { pgrep -f "$bin/ringleader-trainer.*$run.*--rank $1 "; }

await() {  # SECONDS WHAT COMMAND...
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    ((SECONDS < deadline)) || fail "$what did not happen in time"
    sleep 0.1
  done
}
past_step() { local now; now=$(step) && ((now > $1)); }
saved() { (($(field 'job.get("progress", {}).get("checkpoint_step", 0)') > 0)); }
attempt_is() { (($(attempts) >= $1)); }
trained() { (($(field "job['attempts'][$1 - 1].get('last_step', 0)") > $2)); }
resumed() { "$bin/ringctl" logs faults --attempt "$1" | grep -o "resuming from .*"; }
# Dead, even if nobody has collected it yet.
gone() { [[ ! -e /proc/$1 || $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) == [ZX]* ]]; }

# In mid-step of a job that has a checkpoint. Sets `before` (step), `number` (attempts) and `all` (pids).
prepare() {  # NAME
  await 180 "$1: a checkpoint" saved
  before=$(step)
  await 180 "$1: a step" past_step "$before"
  before=$(step)
  number=$(attempts)
  mapfile -t all < <(pids)
  ((${#all[@]} == trainers)) || fail "$1: ${#all[@]} trainers run, not $trainers"
  sleep 0.3  # into the next step
}

# From `start` (date +%s%N) on: all ranks gone within SECONDS, a failure that says WORDS, a new attempt that resumes.
check() {  # NAME SECONDS VICTIM WORDS
  local name=$1 limit=$2 victim=$3 words=$4 seconds failure
  for pid in "${all[@]}"; do await "$limit" "$name: the end of all ranks" gone "$pid"; done
  seconds=$(python3 -c "print(round(($(date +%s%N) - $start) / 1e9, 1))")
  await 60 "$name: a new attempt" attempt_is $((number + 1))
  failure=$(field "job['attempts'][$number - 1].get('failure', {})")
  echo "$name after step $before: all ${#all[@]} ranks gone after $seconds s; $failure"
  if [[ $victim ]]; then
    [[ $failure == *"'rank': $victim,"* || ($victim == 0 && $failure != *"'rank'"*) ]] || fail "$name: rank $victim is not named: $failure"
  fi
  [[ $failure == *"$words"* ]] || fail "$name: the reason does not say '$words': $failure"
  # Steps that the old attempt still finished do not count.
  await 180 "$name: a step of attempt $((number + 1)) beyond $before" trained $((number + 1)) "$before"
  await 10 "$name: the word that attempt $((number + 1)) resumed" resumed $((number + 1)) >/dev/null
  echo "$name: attempt $(attempts) is at step $(step), $(resumed $((number + 1)))"
}

signal() {  # NAME SIGNAL SECONDS WORDS: to the last rank
  prepare "$1"
  start=$(date +%s%N)
  kill "-$2" "$(pid_of $((trainers - 1)))"
  check "$1" "$3" $((trainers - 1)) "$4"
}

# Worker number $1 with its share of the trainers and GPUs. `pids` are the coordinator's and then the workers'.
start_node() {
  local first=$(($1 * trainers / workers)) each=$((trainers / workers)) environment=()
  if ((workers > 1)); then
    environment=("NCCL_HOSTID=host-$1")
    [[ $share ]] || environment+=("CUDA_VISIBLE_DEVICES=$(seq -s, $first $((first + each - 1)))")
  fi
  start "worker-$1" env "${environment[@]}" "$bin/ringleader-worker" --name "worker-$1" --data-dir "$run/worker-$1" \
    --coordinator "$RINGLEADER_ADDRESS" --metrics-listen 127.0.0.1:0 --trainers "$each" --pulse-timeout 6
}

# The last one: its ranks and all others end.
kill_worker() {
  prepare "kill -9 of a worker"
  start=$(date +%s%N)
  kill -9 "${pids[workers]}"
  for pid in "${all[@]}"; do await 5 "kill -9 of a worker: the end of all ranks" gone "$pid"; done
  unset "pids[workers]"
  start_node $((workers - 1))
  pids=("${pids[@]}")
  check "kill -9 of a worker" 5 '' ''
}

# Its workers go on by themselves, and so does the job when it is back: no new attempt.
kill_coordinator() {
  prepare "kill -9 of the coordinator"
  kill -9 "${pids[0]}"
  await 5 "the coordinator's end" gone "${pids[0]}"
  sleep 3
  for pid in "${all[@]}"; do gone "$pid" && fail "a trainer died with the coordinator"; done
  start_coordinator
  pids=("${pids[-1]}" "${pids[@]:1:workers}")
  await_nodes "$workers"
  await 60 "steps after the coordinator came back" past_step "$((before + 1))"
  (($(attempts) == number)) || fail "the job started a new attempt for want of a coordinator"
  echo "kill -9 of the coordinator after step $before: back after 3 s, attempt $number is at step $(step)"
}

# Another process takes the last GPU's memory once the trainer has planned its own.
fill_memory() {
  prepare "a full GPU"
  python3 - $((trainers - 1)) >"$run/logs/hog.log" 2>&1 <<'HOG' &
import ctypes, sys, time

cuda, context, memory = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()

def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code: sys.exit(f"{name}: error {code}")

def free_bytes():
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value

call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), int(sys.argv[1]))
call("cuCtxSetCurrent", context)
print("ready", flush=True)
# The old attempt's memory comes back, then the new one's plan is made and its weights are loaded.
while free_bytes() < 0.95 * total.value: time.sleep(0.01)
empty = free_bytes()
while free_bytes() > empty - (4 << 30): time.sleep(0.005)
left = free_bytes()
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(left - (3 << 29)))
print("took", left - (3 << 29), flush=True)
time.sleep(600)
HOG
  hog=$!
  await 20 "the hog's start" grep -q ready "$run/logs/hog.log"
  # A new attempt meets it.
  kill -9 "$(pid_of 0)"
  await 60 "a full GPU: a new attempt" attempt_is $((number + 1))
  await 60 "a full GPU: the hog's bite" grep -q took "$run/logs/hog.log"
  mapfile -t all < <(pids)
  start=$(date +%s%N)
  ((++number))
  await 60 "a full GPU: the attempt's end" attempt_is $((number + 1))
  kill -9 "$hog"
  hog=
  check "a full GPU" 5 $((trainers - 1)) "GiB"
}

traced() { (($(find "$run/checkpoints/profiles" -name 'step-*.json' 2>/dev/null | wc -l) >= trainers)); }
profile() {
  prepare "a profile"
  "$bin/ringctl" profile faults --steps 2 >/dev/null
  await 90 "a trace of every rank" traced
  python3 - "$run/checkpoints/profiles" <<'END'
import glob, json, sys
for path in sorted(glob.glob(sys.argv[1] + "/step-*.json")):
    events = json.load(open(path))["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    print(f"profile: {path.rsplit('/', 1)[1]}: {len(events)} events, {len(kernels)} of kernels, "
          f"{sum(e['dur'] for e in kernels) / 1e6:.3f} s on the GPU")
END
}

"$bin/ringctl" data pack --input "$text" --output "$run/tokens" --suffix .h --suffix .hpp --suffix .c >/dev/null
if [[ $config ]]; then
  cp "$config" "$run/gpu_config.json"
else
  cp "$root/deploy/quickstart/gpu_config.json" "$run/gpu_config.json"
  sed -i "s/\"num_hidden_layers\": [0-9]*/\"num_hidden_layers\": $layers/" "$run/gpu_config.json"
fi
cp "$root/deploy/quickstart/gpu_job.yaml" "$run/job.yaml"
start_coordinator
for ((node = 0; node < workers; ++node)); do start_node "$node"; done
await_nodes "$workers"
"$bin/ringctl" submit "$run/job.yaml" --set name=faults --set training.steps=100000 --set checkpoint.every_steps=2 \
  --set "resources.trainers=$trainers" "${overrides[@]}" >/dev/null

for fault in $faults; do
  case $fault in
    kill) signal "kill -9 of rank $((trainers - 1))" KILL 5 "SIGKILL" ;;
    # The workers have --pulse-timeout 6 to find out; then 5 s more.
    hang) signal "SIGSTOP of rank $((trainers - 1))" STOP 12 "no sign of life" ;;
    worker) kill_worker ;;
    coordinator) kill_coordinator ;;
    memory) fill_memory ;;
    profile) profile ;;
    *) echo "faults: unknown fault $fault" >&2; exit 2 ;;
  esac
done
"$bin/ringctl" cancel faults >/dev/null
echo "PASSED: $faults"
