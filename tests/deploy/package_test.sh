#!/usr/bin/env bash
# Installs the Debian packages of build/packages (deploy/package.sh makes them) on a machine that has none of their
# dependencies, checks the units, runs the services as their users would, trains a small job, and removes everything.
# Changes the machine that it runs on: for a container or a bare root, as root.
#
#   tests/deploy/package_test.sh [FOLDER-OF-PACKAGES]
#
# tests/run.sh does not run it: it installs systemd. In a root that debootstrap made, as root:
#
#   deploy/package.sh && debootstrap --variant=minbase --include=ca-certificates bookworm /tmp/bare
#   git clone . /tmp/bare/src && cp -r build/packages /tmp/bare/src/packages && mount -t proc proc /tmp/bare/proc
#   chroot /tmp/bare /src/tests/deploy/package_test.sh /src/packages
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
packages=$(realpath "${1:-$root/build/packages}")
run=$(mktemp -d)
chmod 755 "$run"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/*.log >&2 || true; exit 1; }

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# systemd brings systemd-analyze; no daemon of it runs here.
apt-get install -y -qq --no-install-recommends systemd python3 "$packages"/*.deb >"$run/install.log" 2>&1 || fail "install"

# What systemd says of the units: no warning, and few rights left.
systemd-analyze verify /usr/lib/systemd/system/ringleader-*.service >"$run/verify.log" 2>&1 || fail "systemd-analyze verify"
grep -q ringleader "$run/verify.log" && fail "systemd-analyze verify"
systemd-analyze security --offline=true --threshold=20 ringleader-coordinator.service >"$run/security.log" || fail "exposure"
systemd-analyze security --offline=true --threshold=50 ringleader-worker.service >"$run/security.log" || fail "exposure"

# The units' commands, as the units' users, in the units' folders.
as_service() {  # UNIT
  local unit=/usr/lib/systemd/system/$1.service user state command
  user=$(sed -n 's/^User=//p' "$unit") state=/var/lib/$(sed -n 's/^StateDirectory=//p' "$unit")
  read -ra command <<<"$(sed -n 's/^ExecStart=//p' "$unit")"
  install -d -m 0700 -o "$user" -g "$user" "$state"
  (cd / && exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs "${command[@]}") >"$run/$1.log" 2>&1 &
  pids+=($!)
}
as_service ringleader-coordinator
as_service ringleader-worker
for ((i = 0; ; ++i)); do
  ringctl nodes -o json 2>/dev/null | grep -q '"READY"' && break
  ((i < 100)) || fail "no node is ready"
  sleep 0.2
done

ringctl bench attention --tokens 128 --ranks 2 --repetitions 1 --folder "$run/bench" >"$run/bench.log" 2>&1 || fail "the bench"
mkdir "$run/job"
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/job/"
ringctl data pack --input "$root/coordinator" --output "$run/job/tokens" --suffix .h --suffix .cc >"$run/pack.log"
chown -R ringleader-worker: "$run/job"
ringctl submit "$run/job/job.yaml" --set training.steps=2 --set training.warmup_steps=1 --set data.sequence_length=1024 --set training.eval_sequences=1 \
  --set parallelism.context=1 --set resources.trainers=1 --follow >"$run/submit.log" 2>&1 || fail "the job"
[[ -s $run/job/checkpoints/model/model.safetensors ]] || fail "no model was exported"

kill "${pids[@]}"
for pid in "${pids[@]}"; do wait "$pid" || fail "a service ended with $?"; done
pids=()
apt-get purge -y -qq 'ringleader-*' >"$run/purge.log" 2>&1 || fail "purge"
for left in /etc/ringleader /usr/bin/ringctl /usr/bin/ringleader-worker /usr/lib/ringleader; do
  [[ ! -e $left ]] || fail "$left is left behind"
done
echo "PASSED"
