#!/usr/bin/env bash
# Checks the images of deploy/container/build.sh as a cluster runs them: not as root, on a read-only root file system, without
# capabilities. Every program finds its libraries and starts, nothing can be written but the volumes, a CPU job is trained, and one
# that wants GPUs says that there are none. Needs podman with runc and catatonit, the images, and root.
#
#   tests/deploy/image_test.sh [--cuda] [TAG]     --cuda: the worker's image was built with it, and must bring CUDA's libraries
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cuda=''
[[ ${1:-} != --cuda ]] || { cuda=1; shift; }
tag=${1:-0.1.0}
run=$(mktemp -d)
export CONTAINERS_CONF=$run/containers.conf
containers=()
cleanup() {
  for name in "${containers[@]}"; do podman rm -f -t 5 "$name" >/dev/null 2>&1 || true; done
  rm -rf "$run"
}
trap cleanup EXIT
fail() {
  echo "FAILED: $*" >&2
  for name in "${containers[@]}"; do podman logs --tail 20 "$name" >&2 || true; done
  tail -n 20 "$run"/*.log >&2 || true
  exit 1
}

# podman's limits must not exceed this process's own.
cat >"$run/containers.conf" <<END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4096:4096"]
[engine]
runtime = "runc"
END
mkdir -p "$run"/{state,worker,data/text}
restricted=(--read-only --read-only-tmpfs=false --cap-drop all --security-opt no-new-privileges --network host)
# within IMAGE ENTRYPOINT [ARGUMENT...]: ends with the program's exit code.
within() { podman run --rm "${restricted[@]}" -v "$run/data:/data" --entrypoint "$2" "localhost/$1:$tag" "${@:3}"; }

declare -A programs=([ringleader-coordinator]="/usr/bin/ringleader-coordinator /usr/bin/ringctl"
  [ringleader-worker]="/usr/bin/ringleader-worker /usr/bin/ringleader-trainer")
for image in "${!programs[@]}"; do
  [[ $(podman image inspect --format '{{.User}}' "localhost/$image:$tag") == 65532:65532 ]] || fail "$image runs as root"
  within "$image" /bin/sh -c 'id -u 2>/dev/null || cat /proc/self/status' >"$run/who.log" 2>&1 || fail "$image has no shell"
  grep -qE '^(65532|Uid:\s+65532)' "$run/who.log" || fail "$image runs as somebody else"
  # What manifests and docs/kubernetes.md call.
  within "$image" /bin/sh -c "for applet in cat ls sleep tar mv rm cp mkdir date flock chown; do command -v \$applet || exit 1; done" \
    >"$run/applets.log" 2>&1 || fail "$image lacks an applet"
  for folder in / /etc /usr/bin /tmp; do
    if within "$image" /bin/sh -c "echo x >$folder/x" >"$run/write.log" 2>&1; then fail "$image writes to $folder"; fi
  done
  for program in ${programs[$image]}; do
    within "$image" "$program" --help >"$run/help.log" 2>&1 || fail "$image: $program --help"
    grep -q '^Usage: ' "$run/help.log" || fail "$image: $program --help"
    within "$image" /lib64/ld-linux-x86-64.so.2 --list "$program" >"$run/libraries.log" 2>&1 || fail "$image: $program"
    # The driver's own come from the node.
    missing=$(grep 'not found' "$run/libraries.log" | grep -vE 'libcuda\.so|libnvidia-ml\.so' || true)
    [[ -z $missing ]] || fail "$image: $program lacks $missing"
  done
done
if [[ $cuda ]]; then
  for library in libtorch_cuda.so libc10_cuda.so libnccl.so.2 libcudart.so.13 libcublas.so.13; do
    within ringleader-worker /bin/sh -c "cat /usr/lib/ringleader/$library >/dev/null" || fail "the worker's image lacks $library"
    within ringleader-worker /lib64/ld-linux-x86-64.so.2 --list "/usr/lib/ringleader/$library" >"$run/libraries.log" 2>&1 ||
      fail "$library"
    missing=$(grep 'not found' "$run/libraries.log" | grep -vE 'libcuda\.so|libnvidia-ml\.so' || true)
    [[ -z $missing ]] || fail "$library lacks $missing"
  done
fi

for header in /usr/include/s*.h; do cp "$header" "$run/data/text/$(basename "$header" .h).txt"; done
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/data/"
chown -R 65532:65532 "$run"/{state,worker,data}
chmod 755 "$run"
within ringleader-coordinator /usr/bin/ringctl data pack --input /data/text --output /data/tokens >"$run/pack.log" 2>&1 ||
  fail "data pack"
within ringleader-coordinator /usr/bin/ringctl submit --dry-run /data/job.yaml --set data.sequence_length=4096 \
  >"$run/dry_run.log" 2>&1 || fail "a dry run"
grep -q '^planned for 1 node' "$run/dry_run.log" || fail "a dry run"

start() {  # NAME IMAGE FOLDER FLAG...
  containers+=("$1")
  podman run -d --name "$1" "${restricted[@]}" --tmpfs /tmp -v "$3:/var/lib/ringleader" -v "$run/data:/data" \
    "localhost/$2:$tag" "${@:4}" >"$run/start.log" 2>&1 || fail "$1 does not start"
}
read -r port page < <(python3 -c 'import socket
ends = [socket.socket() for _ in range(2)]
for end in ends: end.bind(("127.0.0.1", 0))
print(*(end.getsockname()[1] for end in ends))')
start image-test-coordinator ringleader-coordinator "$run/state" --listen "127.0.0.1:$port" --metrics-listen off \
  --page-listen "127.0.0.1:$page" --data-dir /var/lib/ringleader/state
start image-test-worker ringleader-worker "$run/worker" --coordinator "127.0.0.1:$port" --name a --trainers 1 \
  --data-dir /var/lib/ringleader/worker
ringctl() { within ringleader-coordinator /usr/bin/ringctl --address "127.0.0.1:$port" "$@"; }
await() {  # SECONDS WHAT COMMAND...
  local deadline=$((SECONDS + $1)) what=$2
  until "${@:3}" >"$run/await.log" 2>&1; do
    ((SECONDS < deadline)) || fail "$what"
    sleep 0.5
  done
}
is_ready() { ringctl nodes -o json | grep -q '"READY"'; }
await 60 "the worker" is_ready
curl -fs "http://127.0.0.1:$page/" >"$run/page.log" || fail "the page"

small=(--set data.sequence_length=1024 --set training.eval_sequences=1 --set parallelism.context=1 --set resources.trainers=1
  --set training.steps=2 --set training.warmup_steps=1)
ringctl submit /data/job.yaml "${small[@]}" --set name=gpu --set checkpoint.directory=/data/gpu --set resources.engine=cuda \
  >"$run/submit_gpu.log" 2>&1 || fail "submit for a GPU"
says_why() { ringctl get gpu | grep -i '^reason' | grep -qi gpu; }
await 30 "a job that wants GPUs does not say that there are none" says_why
ringctl submit /data/job.yaml "${small[@]}" --set checkpoint.directory=/data/checkpoints --follow >"$run/submit.log" 2>&1 ||
  fail "the job"
[[ -s $run/data/checkpoints/model/model.safetensors ]] || fail "no model was exported"
podman stop -t 60 image-test-worker image-test-coordinator >"$run/stop.log" 2>&1 || fail "stop"
for name in "${containers[@]}"; do
  [[ $(podman inspect --format '{{.State.ExitCode}}' "$name") == 0 ]] || fail "$name did not end in order"
done
echo "PASSED"
