#!/usr/bin/env bash
# Checks deploy/kubernetes: every overlay renders and fits the schemas of several Kubernetes versions, as its workers do as a JobSet, and the CPU demo's pods
# run on podman: coordinator and two workers train the quickstart's job to its end although a worker's pod is killed in the
# middle, their metrics are scraped, and the probes' commands work.
#
# Needs kubectl (1.27 or newer), podman with runc and catatonit, the images of deploy/container/build.sh, and PyPI; as root.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
run=$(mktemp -d)
export CONTAINERS_CONF=$run/containers.conf
cleanup() {
  [[ ! -e $run/pods.yaml ]] || podman kube down "$run/pods.yaml" >/dev/null 2>&1 || true
  rm -rf "$run"
}
trap cleanup EXIT
fail() {
  echo "FAILED: $*" >&2
  for pod in coordinator-coordinator worker-a-worker worker-b-worker; do podman logs --tail 20 "$pod" >&2 || true; done
  tail -n 20 "$run"/*.log >&2 || true
  exit 1
}

python3 -m venv "$run/venv"
"$run/venv/bin/pip" install -q kubernetes-validate pyyaml
for overlay in "$root"/deploy/kubernetes/overlays/*/; do
  kubectl kustomize "$overlay" >"$run/rendered.yaml" || fail "$overlay does not render"
  "$run/venv/bin/python" "$root/deploy/kubernetes/gang.py" --name gang --pods 4 --queue team <"$run/rendered.yaml" >"$run/gang.yaml" ||
    fail "$overlay makes no gang"
  for version in 1.29 1.31 1.33; do
    "$run/venv/bin/python" - "$version" "$run/rendered.yaml" "$run/gang.yaml" <<'END' || fail "$overlay does not fit Kubernetes $version"
import sys
import kubernetes_validate, yaml

version, path, gang_path = sys.argv[1:]
kinds = []
for manifest in yaml.safe_load_all(open(path)):
    if manifest["apiVersion"].startswith("monitoring.coreos.com/"):
        continue  # the operator's own kinds are no part of Kubernetes' schemas
    kubernetes_validate.validate(manifest, version, strict=True)
    kinds.append(manifest["kind"])
assert {"StatefulSet", "DaemonSet", "PodDisruptionBudget", "NetworkPolicy", "Service"} <= set(kinds), kinds
# JobSet is no part of Kubernetes either: its jobs are.
gang = yaml.safe_load(open(gang_path))
assert gang["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and gang["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
workers, = gang["spec"]["replicatedJobs"]
assert workers["replicas"] == 1 and workers["template"]["spec"]["parallelism"] == 4
kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "workers"}, **workers["template"]},
                             version, strict=True)
END
  done
  echo "kubernetes: ${overlay#"$root/"} fits 1.29, 1.31 and 1.33"
done

# podman's limits must not exceed this process's own.
cat >"$run/containers.conf" <<END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4096:4096"]
[engine]
runtime = "runc"
END
mkdir -p "$run"/{access,state,state-a,state-b,data/text}
"$root/deploy/kubernetes/certificates.sh" "$run/tls" a=127.0.0.1 b=127.0.0.1 2>"$run/certificates.log"
cp "$run/tls/coordinator.crt" "$run/tls/tls.crt"
cp "$run/tls/coordinator.key" "$run/tls/tls.key"
echo 'roles_in_certificates: true' >"$run/access/access.yaml"
# What a cluster's volumes do with fsGroup.
chown -R 65532:65532 "$run"/{tls,access,state,data}
kubectl kustomize "$root/deploy/kubernetes/overlays/cpu-demo" | "$root/tests/deploy/demo_pods.py" "$run" >"$run/pods.yaml"
podman kube play "$run/pods.yaml" >"$run/play.log" 2>&1 || fail "podman kube play"

ringctl() {  # as the admin, with the coordinator's image
  podman run --rm --network host -v "$run:/run/demo:ro" --entrypoint /usr/bin/ringctl \
    "$(podman inspect --format '{{.ImageName}}' coordinator-coordinator)" --address localhost:7070 \
    --tls-ca /run/demo/tls/ca.crt --tls-cert /run/demo/admin.crt --tls-key /run/demo/admin.key "$@"
}
cp "$run/tls/admin.crt" "$run/tls/admin.key" "$run/"
chown 65532 "$run"/admin.*
chmod 755 "$run"
await() {  # SECONDS WHAT COMMAND...
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >"$run/await.log" 2>&1; do
    ((SECONDS < deadline)) || fail "$what"
    sleep 0.5
  done
}
both_ready() { (($(ringctl nodes -o json | grep -c '"READY"') == 2)); }
# The probes' command, as the manifest has it.
mapfile -t probe_command < <(kubectl kustomize "$root/deploy/kubernetes/base" | "$run/venv/bin/python" -c 'import sys, yaml
for manifest in yaml.safe_load_all(sys.stdin):
    if manifest["kind"] == "StatefulSet":
        print(*manifest["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"], sep="\n")')
probe() { podman exec coordinator-coordinator "${probe_command[@]}"; }
await 60 "the coordinator's probe" probe
await 60 "the workers" both_ready
worker_probe=$(kubectl kustomize "$root/deploy/kubernetes/base" | "$run/venv/bin/python" -c 'import sys, yaml
for manifest in yaml.safe_load_all(sys.stdin):
    if manifest["kind"] == "DaemonSet":
        print(manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"][2])')
podman exec worker-a-worker /bin/sh -c "$worker_probe" >"$run/probe.log" 2>&1 || fail "the workers' probe"

for header in /usr/include/s*.h; do cp "$header" "$run/data/text/$(basename "$header" .h).txt"; done
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/data/"
podman run --rm --network none -v "$run/data:/data" --entrypoint /usr/bin/ringctl \
  "$(podman inspect --format '{{.ImageName}}' coordinator-coordinator)" \
  data pack --input /data/text --output /data/tokens >"$run/pack.log" 2>&1 || fail "data pack"
podman run --rm --network host -v "$run:/run/demo:ro" -v "$run/data:/data" --entrypoint /usr/bin/ringctl \
  "$(podman inspect --format '{{.ImageName}}' coordinator-coordinator)" --address localhost:7070 \
  --tls-ca /run/demo/tls/ca.crt --tls-cert /run/demo/admin.crt --tls-key /run/demo/admin.key \
  submit /data/job.yaml --set training.steps=20 --set data.sequence_length=4096 --set training.eval_sequences=1 \
  --set checkpoint.every_steps=4 >"$run/submit.log" 2>&1 || fail "submit"

step() { ringctl get headers-16k -o json | python3 -c 'import json, sys
print(json.load(sys.stdin).get("progress", {}).get("step", 0))'; }
checkpointed() { (($(step) >= 5)); }
await 180 "the first checkpoint" checkpointed
curl -fs http://127.0.0.1:7071/metrics >"$run/coordinator.metrics" || fail "the coordinator's metrics"
grep -q 'ringleader_job_loss{job_name="headers-16k"}' "$run/coordinator.metrics" || fail "the job's metrics"
curl -fs http://127.0.0.1:7082/metrics >"$run/worker.metrics" || fail "the worker's metrics"
grep -q '^ringleader_worker_trainers 2' "$run/worker.metrics" || fail "the worker's trainers"

# As when a node is drained: SIGTERM, a checkpoint within the grace, and the job goes on when the pod is back.
podman kill --signal KILL worker-b-worker >"$run/kill.log" || fail "kill"
podman pod restart worker-b >"$run/restart.log" 2>&1 || fail "restart"
succeeded() { ringctl get headers-16k -o json | grep -q '"SUCCEEDED"'; }
await 400 "the job's end" succeeded
attempts=$(ringctl get headers-16k -o json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["attempts"]))')
((attempts >= 2)) || fail "the killed worker cost no attempt"
[[ -s $run/data/checkpoints/model/model.safetensors ]] || fail "no model was exported"
echo "PASSED"
