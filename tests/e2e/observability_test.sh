#!/usr/bin/env bash
# Debian's Prometheus scrapes a coordinator and two workers while they train: every panel of every dashboard has series,
# every rule finds its metrics, and no alert fires. GPU panels see recorded samples of NVIDIA's DCGM exporter. A collector that
# speaks OpenTelemetry's own definition gets the trace of an attempt, through the death of the coordinator.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
run=$(mktemp -d)
mkdir "$run/logs" "$run/text" "$run/gpus"

# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/logs/*.log >&2 || true; exit 1; }

metrics_address() { sed -n 's|.* metrics are at http://\(.*\)/metrics$|\1|p' "$run/logs/$1.log"; }

for header in /usr/include/s*.h; do cp "$header" "$run/text/$(basename "$header" .h).txt"; done
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/"
"$bin/ringctl" data pack --input "$run/text" --output "$run/tokens" >"$run/logs/pack.log"

# shellcheck source=deploy/versions.env
source "$root/deploy/versions.env"
otlp=${RINGLEADER_DEPS:-${XDG_CACHE_HOME:-$HOME/.cache}/ringleader/deps}/otlp-$OPENTELEMETRY_PROTO_VERSION/bin/python
[[ -x $otlp ]] || { echo "SKIPPED: needs opentelemetry-proto (deploy/install_deps.sh --dev)"; exit; }
collector=$(free_port)
start collector "$otlp" "$root/tests/observability/otlp_collector.py" "$collector" "$run/spans.jsonl"
otlp_collector=${pids[-1]}
traces=(--trace-endpoint "http://127.0.0.1:$collector" --trace-step-seconds 1)

# A coordinator whose certificate has a time to live.
"$root/deploy/kubernetes/certificates.sh" "$run/tls" 2>"$run/logs/certificates.log" || fail "certificates.sh"
start secured "$bin/ringleader-coordinator" --listen 127.0.0.1:0 --data-dir "$run/secured" --tls-ca "$run/tls/ca.crt" \
  --tls-cert "$run/tls/coordinator.crt" --tls-key "$run/tls/coordinator.key" --metrics-listen 127.0.0.1:0

start_coordinator "${traces[@]}"
coordinator=${pids[-1]}
# Worker a's GPUs are those of the driver that the tests build.
printf 'gpus 4\nxid 1 13\n' >"$run/gpus/facts"
RINGLEADER_FAKE_NVML=$run/gpus/facts LD_LIBRARY_PATH=${bin%/bin}/fake_driver start_worker a --trainers 2
start_worker b --trainers 4
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

until [[ $(metrics_address secured) ]]; do sleep 0.1; done
prometheus=127.0.0.1:$(free_port)
cat >"$run/prometheus.yaml" <<END
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$root/deploy/prometheus/rules.yaml"]
scrape_configs:
  - {job_name: ringleader-coordinator, static_configs: [{targets: ["$(metrics_address coordinator)", "$(metrics_address secured)"]}]}
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

"$bin/ringctl" submit "$run/job.yaml" --set training.steps=100000 --set data.sequence_length=4096 --set checkpoint.every_steps=2 \
  --set checkpoint.keep_last=10000 --set parallelism.heads=2 --set training.eval_sequences=1 --set training.eval_every_steps=1 >"$run/logs/submit.log" 2>&1 || fail "submit"
# Calls and streams, for the panels that show them.
start watch "$bin/ringctl" watch headers-16k
start list bash -c "while sleep 0.5; do '$bin/ringctl' list; done"
# A small one whose choices are balanced over the ranks of its ring.
{
  sed -n '/^model:\|^data:/p' "$run/job.yaml" | sed 's/sequence_length: 16384/sequence_length: 2048/'
  echo 'name: balanced'
  echo 'attention: {pattern: block_topk, block_size: 128, topk_blocks: 4, balance: {anchor: mean}}'
  echo 'parallelism: {context: 2}'
  echo 'training: {steps: 100000, global_batch: 1, eval_sequences: 1}'
  echo "checkpoint: {directory: $run/balanced, every_steps: 1000}"
  echo 'resources: {trainers: 2}'
} >"$run/balanced.yaml"
"$bin/ringctl" submit "$run/balanced.yaml" >"$run/logs/submit_balanced.log" 2>&1 ||
  { cat "$run/logs/submit_balanced.log" >&2; fail "submit balanced"; }
python3 "$root/tests/observability/live_test.py" "$prometheus" 'headers-16k|balanced' >"$run/logs/live.log" 2>&1 ||
  { cat "$run/logs/live.log" >&2; fail "live_test.py"; }

# spans NAME: how many of that name came for headers-16k. await_more NAME COUNT FAILURE: until more than COUNT did.
spans() { grep -c "\"name\": \"$1\".*\"ringleader.job\": \"headers-16k\"" "$run/spans.jsonl" || true; }
await_more() {
  for ((i = 0; ; ++i)); do
    (($(spans "$1") > $2)) && break
    ((i < 1200)) || fail "$3"
    sleep 0.1
  done
}
await_more checkpoint 0 "no checkpoint was traced"
# A coordinator is killed while its collector hangs: what it had not sent, the next one sends.
checkpointed() { "$bin/ringctl" get headers-16k -o json | sed -n 's/.*"checkpoint_step": "\([0-9]*\)".*/\1/p'; }
kill -STOP "$otlp_collector"
stopped_at=$(checkpointed)
for ((i = 0; $(checkpointed) < stopped_at + 4; ++i)); do
  ((i < 1200)) || fail "no checkpoint was written beside a collector that hangs"
  sleep 0.1
done
kill -KILL "$coordinator"
timeout 20 tail --pid="$coordinator" -f /dev/null || fail "the coordinator did not die"
kill -CONT "$otlp_collector"
steps=$(spans step)
checkpoints=$(spans checkpoint)
start_coordinator "${traces[@]}"
await_more step "$steps" "no step was traced after the restart"
await_more checkpoint "$checkpoints" "no checkpoint was traced after the restart"
"$bin/ringctl" cancel headers-16k >"$run/logs/cancel.log" 2>&1 || fail "cancel"
await_more attempt 0 "the attempt's span did not come"
python3 "$root/tests/observability/traces_test.py" "$run/spans.jsonl" headers-16k >"$run/logs/traces.log" 2>&1 ||
  { cat "$run/logs/traces.log" "$run/spans.jsonl" >&2; fail "traces_test.py"; }
cat "$run/logs/live.log" "$run/logs/traces.log"
echo "PASSED"
