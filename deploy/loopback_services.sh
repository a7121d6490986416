# shellcheck shell=bash disable=SC2154
# Sourced: starts a coordinator and workers on loopback for a script, and stops them with it.
#
# In: bin (folder of binaries), run (folder for data and logs). Sets RINGLEADER_ADDRESS. The script calls stop_services
# when it ends.

pids=() services_address= services_metrics=
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

# Prints a port below those that the system gives to outgoing connections: one of these could take it before its server.
free_port() {
  python3 -c '
import random, socket
while True:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", random.randrange(16384, 32768)))
            print(probe.getsockname()[1])
            break
        except OSError:
            pass'
}

await_nodes() {  # COUNT
  local ready deadline=$((SECONDS + 60))
  until ready=$("$bin/ringctl" nodes -o json 2>/dev/null | grep -c '"READY"') && ((ready >= $1)); do
    for pid in "${pids[@]}"; do
      kill -0 "$pid" 2>/dev/null || { tail -n 5 "$run"/logs/*.log >&2; exit 1; }
    done
    ((SECONDS < deadline)) || { echo "the workers did not come up; see $run/logs" >&2; exit 1; }
    sleep 0.2
  done
}

# Returns when the coordinator serves. A second one takes the first's place, if that is gone. Whoever else looks for a port
# may take one between the look and the start: then others are tried.
# shellcheck disable=SC2120
start_coordinator() {  # [FLAG...]
  local log=$run/logs/coordinator.log known=$services_address deadline=$((SECONDS + 60))
  while :; do
    [[ $known ]] || services_address=127.0.0.1:$(free_port) services_metrics=127.0.0.1:$(free_port)
    : >"$log"  # nothing of an earlier one
    start coordinator "$bin/ringleader-coordinator" --listen "$services_address" --data-dir "$run/coordinator" \
      --metrics-listen "$services_metrics" "$@"
    until grep -q " serving on " "$log"; do
      if ! kill -0 "${pids[-1]}" 2>/dev/null; then
        unset 'pids[-1]'
        [[ ! $known ]] && ((SECONDS < deadline)) && grep -qE "cannot (listen|serve metrics) on" "$log" && continue 2
        echo "the coordinator did not start:" >&2
        tail -n 5 "$log" >&2
        exit 1
      fi
      ((SECONDS < deadline)) || { echo "the coordinator did not come up; see $log" >&2; exit 1; }
      sleep 0.1
    done
    break
  done
  export RINGLEADER_ADDRESS=$services_address
}

start_worker() {  # NAME [FLAG...]; its log says where its metrics are
  local name=$1
  shift
  start "worker-$name" "$bin/ringleader-worker" --name "$name" --coordinator "$RINGLEADER_ADDRESS" \
    --data-dir "$run/worker-$name" --metrics-listen 127.0.0.1:0 "$@"
}

# Workers NAME-1 to NAME-COUNT of one trainer each. The GPUs that this shell sees are given to them in turn: workers beyond
# their number share them.
start_workers() {  # COUNT NAME [FLAG...]
  local count=$1 name=$2 gpus i
  shift 2
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}"
  for ((i = 0; i < count; ++i)); do
    if ((${#gpus[@]})); then
      CUDA_VISIBLE_DEVICES=${gpus[i % ${#gpus[@]}]} start_worker "$name-$((i + 1))" --trainers 1 "$@"
    else
      start_worker "$name-$((i + 1))" --trainers 1 "$@"
    fi
  done
}
