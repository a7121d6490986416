#!/usr/bin/env bash
# Debian's Prometheus scrapes a coordinator and two workers while they train: every panel of every dashboard has series,
# every rule finds its metrics, and no alert fires. GPU panels see recorded samples of NVIDIA's DCGM exporter.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
run=$(mktemp -d)
mkdir "$run/logs" "$run/text" "$run/gpus"

# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/logs/*.log >&2 || true; exit 1; }

metrics_address() { sed -n 's/^metrics-listen: //p' "$run/logs/$1.log"; }

for header in /usr/include/s*.h; do cp "$header" "$run/text/$(basename "$header" .h).txt"; done
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/"
"$bin/ringctl" data pack --input "$run/text" --output "$run/tokens" >"$run/logs/pack.log"

start_coordinator
# Worker a's GPUs are those of the driver that the tests build.
printf 'gpus 4\nxid 1 13\n' >"$run/gpus/facts"
RINGLEADER_FAKE_NVML=$run/gpus/facts LD_LIBRARY_PATH=${bin%/bin}/fake_driver start_worker a --trainers 2
start_worker b --trainers 2
await_nodes 2

# Four GPUs of this host, as the exporter shows them.
dcgm_port=$(free_port)
for name in DCGM_FI_DEV_GPU_UTIL:97 DCGM_FI_DEV_POWER_USAGE:652.4 DCGM_FI_DEV_XID_ERRORS:0 \
  DCGM_FI_PROF_PIPE_TENSOR_ACTIVE:0.61 DCGM_FI_DEV_SM_CLOCK:1755; do
  echo "# TYPE ${name%:*} gauge"
  for gpu in 0 1 2 3; do
    echo "${name%:*}{gpu=\"$gpu\",UUID=\"GPU-0$gpu\",device=\"nvidia$gpu\",modelName=\"NVIDIA H200\",Hostname=\"$(hostname)\"} ${name#*:}"
  done
done >"$run/gpus/metrics"
start dcgm python3 -m http.server --bind 127.0.0.1 --directory "$run/gpus" "$dcgm_port"

prometheus=127.0.0.1:$(free_port)
cat >"$run/prometheus.yaml" <<END
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$root/deploy/prometheus/rules.yaml"]
scrape_configs:
  - {job_name: ringleader-coordinator, static_configs: [{targets: ["$(metrics_address coordinator)"]}]}
  - {job_name: ringleader-worker, static_configs: [{targets: ["$(metrics_address worker-a)", "$(metrics_address worker-b)"]}]}
  - {job_name: dcgm-exporter, static_configs: [{targets: ["127.0.0.1:$dcgm_port"]}]}
END
start prometheus prometheus --config.file="$run/prometheus.yaml" --storage.tsdb.path="$run/prometheus" \
  --web.listen-address="$prometheus" --log.level=warn
for ((i = 0; ; ++i)); do
  curl -fs "http://$prometheus/-/ready" >"$run/logs/ready.log" 2>&1 && break
  ((i < 300)) || fail "Prometheus did not start"
  sleep 0.1
done

"$bin/ringctl" submit "$run/job.yaml" --set training.steps=100000 --set data.sequence_length=4096 \
  --set training.eval_sequences=1 --set training.eval_every_steps=1 >"$run/logs/submit.log" 2>&1 || fail "submit"
# Calls and streams, for the panels that show them.
start watch "$bin/ringctl" watch headers-16k
start list bash -c "while sleep 0.5; do '$bin/ringctl' list; done"
python3 "$root/tests/observability/live_test.py" "$prometheus" headers-16k >"$run/logs/live.log" 2>&1 ||
  { cat "$run/logs/live.log" >&2; fail "live_test.py"; }
"$bin/ringctl" cancel headers-16k >"$run/logs/cancel.log" 2>&1 || fail "cancel"
cat "$run/logs/live.log"
echo "PASSED"
