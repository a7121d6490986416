#!/usr/bin/env bash
# From a fresh Debian 12 machine to a trained model: installs what is missing, builds, starts one coordinator and two
# workers on loopback, packs real text into token shards, trains on it and follows the job live. Ctrl-C stops it all.
#
#   --dir DIR     run folder: tokens, logs, database, checkpoints, summary.json (default: ./quickstart-run)
#   --text DIR    the text to train on (default: the header files under /usr/include)
#   --set K=V     override a field of the job file, e.g. --set training.steps=10 (repeatable)
#   --keep        leave the coordinator and the workers running at the end
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
run=$PWD/quickstart-run text=/usr/include keep= overrides=()
while (($#)); do
  case $1 in
    --dir) run=$(realpath -m "${2:?--dir needs a folder}"); shift 2 ;;
    --text) text=$(realpath -e "${2:?--text needs a folder}"); shift 2 ;;
    --set) overrides+=(--set "${2:?--set needs key=value}"); shift 2 ;;
    --keep) keep=1; shift ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "quickstart: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done

say() { printf '\033[1m%s\033[0m\n' "== $*"; }

build=${RINGLEADER_BUILD:-$root/build}
bin=$build/bin

build_binaries() {
  "$root/deploy/install_deps.sh"
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release >"$run/logs/configure.log" ||
    { tail -n 30 "$run/logs/configure.log" >&2; exit 1; }
  cmake --build "$build" --target ringleader-coordinator ringleader-worker ringleader-trainer ringctl
}

pids=()
stop_services() {
  trap - EXIT INT TERM
  ((${#pids[@]})) || return 0
  # The workers first: SIGTERM lets them stop their trainers and tell the coordinator so.
  kill -TERM "${pids[@]}" 2>/dev/null || true
  for pid in "${pids[@]}"; do
    timeout 20 tail --pid="$pid" -f /dev/null || kill -KILL "$pid" 2>/dev/null || true
  done
}

# start NAME COMMAND...: in the background, output to logs/NAME.log.
start() {
  local name=$1
  shift
  # setsid: Ctrl-C reaches this script alone, which then stops the services in order.
  setsid "$@" >"$run/logs/$name.log" 2>&1 &
  pids+=($!)
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

await_nodes() {  # COUNT
  local ready deadline=$((SECONDS + 60))
  until ready=$("$bin/ringctl" nodes -o json 2>/dev/null | grep -c '"READY"') && ((ready >= $1)); do
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null || { tail -n 5 "$run"/logs/*.log >&2; exit 1; }
    done
    ((SECONDS < deadline)) || { echo "quickstart: the workers did not come up; see $run/logs" >&2; exit 1; }
    sleep 0.2
  done
}

mkdir -p "$run/logs"
trap 'stop_services' EXIT
trap 'echo; echo "quickstart: stopping"; exit 130' INT
trap 'exit 143' TERM

say "Building (the first time takes a while)"
build_binaries

say "Packing $text into token shards"
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/"
# A run folder is for one run: a second call starts from the beginning.
rm -rf "$run/tokens" "$run/coordinator" "$run/worker-a" "$run/worker-b" "$run/checkpoints" "$run/summary.json"
"$bin/ringctl" data pack --input "$text" --output "$run/tokens" --suffix .h --suffix .hpp --suffix .c

say "Starting one coordinator and two workers"
RINGLEADER_ADDRESS=127.0.0.1:$(free_port)
export RINGLEADER_ADDRESS
start coordinator "$bin/ringleader-coordinator" --listen "$RINGLEADER_ADDRESS" --data-dir "$run/coordinator" \
  --metrics-listen "127.0.0.1:$(free_port)"
for name in a b; do
  start "worker-$name" "$bin/ringleader-worker" --name "quickstart-$name" --coordinator "$RINGLEADER_ADDRESS" \
    --data-dir "$run/worker-$name" --trainers 2 --metrics-listen "127.0.0.1:$(free_port)"
done
await_nodes 2
"$bin/ringctl" nodes

say "Training: ringctl submit $run/job.yaml --follow"
"$bin/ringctl" submit "$run/job.yaml" "${overrides[@]}" --follow
"$bin/ringctl" report headers-16k -o json >"$run/summary.json"

say "Done"
"$bin/ringctl" report headers-16k
cat <<END

The trained model, as a Hugging Face folder:  $run/checkpoints/model
The figures above, as JSON:                   $run/summary.json
Logs of every process:                        $run/logs

Next:
  deploy/quickstart.sh --text DIR                    train on your own text
  deploy/quickstart.sh --set attention.pattern=dense train the same model with dense attention, and compare
  $bin/ringctl plan $run/job.yaml --nodes 128 --gpus 8
  docs/job_file.md                                   every field of a job
END
if [[ $keep ]]; then
  trap - EXIT
  echo "Still running (--keep): export RINGLEADER_ADDRESS=$RINGLEADER_ADDRESS; stop with: kill ${pids[*]}"
fi
