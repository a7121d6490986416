#!/usr/bin/env bash
# The worker's liveness probe, as its manifest has it, on a worker that is process 1 as in its pod: 120 connections that say nothing
# hold up /metrics and not the probe, which fails when the worker's loop stands still and passes when that goes on. No cluster is needed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
((EUID == 0)) || { echo "SKIPPED: needs root, for a process 1 of its own"; exit 0; }
run=$(mktemp -d)
worker='' flood=''
# unshare heeds no SIGTERM: it ends with its process 1.
trap '[[ ! $worker$flood ]] || kill -KILL $worker $flood 2>/dev/null || true; { wait; } 2>/dev/null; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/*.log >&2; exit 1; }

python3 - "$root/deploy/kubernetes/base/worker.yaml" >"$run/probe" <<'END' || fail "the liveness probe is no command of its own"
import sys, yaml

container, = yaml.safe_load(open(sys.argv[1]))["spec"]["template"]["spec"]["containers"]
for name, probe in container.items():
    if name.endswith("Probe"):
        assert set(probe) & {"exec", "httpGet", "tcpSocket", "grpc"} == {"exec"}, f"{name} hangs on what others can reach"
shell, flag, script = container["livenessProbe"]["exec"]["command"]
assert (shell, flag) == ("/bin/sh", "-c")
print(script)
END

# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
port=$(free_port)
unshare --pid --fork --mount-proc --kill-child "$bin/ringleader-worker" --coordinator 127.0.0.1:1 --name a --data-dir "$run/worker" \
  --metrics-listen "127.0.0.1:$port" --trainer /bin/true >"$run/worker.log" 2>&1 &
outer=$!
for ((i = 0; ; ++i)); do
  worker=$(pgrep -P "$outer" || true)
  [[ $worker ]] && curl -fs -m 5 "http://127.0.0.1:$port/metrics" >"$run/metrics.log" && break
  ((i < 300)) || fail "the worker did not start"
  sleep 0.1
done
probe() { nsenter --target "$worker" --pid --mount /bin/sh "$run/probe" >"$run/probe.log" 2>&1; }

probe || fail "the probe fails beside a worker that is well"
python3 - "$port" >"$run/flood.log" 2>&1 <<'END' &
import select, socket, sys, time

silent = []
while True:
    while len(silent) < 120:
        silent.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
    for connection in select.select(silent, [], [], 0.2)[0]:
        silent.remove(connection)
        connection.close()
    print("120", flush=True)
END
flood=$!
until [[ -s $run/flood.log ]]; do sleep 0.1; kill -0 "$flood" || fail "no flood"; done
probe || fail "the probe fails while others flood /metrics"
kill -0 "$flood" 2>/dev/null || fail "the flood ended"
kill -STOP "$worker"
# On a busy machine it stands still later, and that counts as a wait of its loop.
until grep -q '^State:[[:space:]]*T' "/proc/$worker/status"; do sleep 0.1; kill -0 "$worker" || fail "the worker ended"; done
if probe; then fail "the probe passes beside a worker that stands still"; fi
kill -CONT "$worker"
probe || fail "the probe fails beside a worker that goes on"
echo "PASSED"
