#!/usr/bin/env bash
# deploy/slurm/workers.sbatch on a Slurm of one machine: a worker in an allocation trains, writes a checkpoint when the
# allocation's time is nearly over, comes back with the allocation and trains on; after scancel it stays away.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
if ! command -v slurmctld slurmd sbatch >/dev/null || ((EUID != 0)); then
  echo "SKIPPED: needs root, and Slurm (deploy/install_deps.sh --dev installs it)"
  exit 0
fi
run=$(mktemp -d)
mkdir -p "$run"/{logs,text,slurm/state,slurm/spool}

# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
allocation=
finish() {
  [[ ! $allocation ]] || scancel "$allocation" 2>/dev/null || true
  stop_services
  rm -rf "$run"
}
trap finish EXIT
fail() {
  echo "FAILED: $*" >&2
  tail -n 20 "$run"/logs/*.log "$run"/slurm/*.log >&2 || true
  exit 1
}
await() {  # WHAT COMMAND...
  local what=$1 deadline=$((SECONDS + 180))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || fail "$what"
    sleep 0.2
  done
}

host=$(hostname -s)
cat >"$run/slurm/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
StateSaveLocation=$run/slurm/state
SlurmdSpoolDir=$run/slurm/spool
SlurmctldPidFile=$run/slurm/slurmctld.pid
SlurmdPidFile=$run/slurm/slurmd.pid
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF=$run/slurm/slurm.conf
start slurmctld slurmctld -D
start slurmd slurmd -D -N "$host"
idle() { sinfo -h -o %t 2>/dev/null | grep -q '^idle'; }
await "Slurm did not start" idle

for header in /usr/include/s*.h; do cp "$header" "$run/text/$(basename "$header" .h).txt"; done
cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/"
"$bin/ringctl" data pack --input "$run/text" --output "$run/tokens" >"$run/logs/pack.log"
start_coordinator

export PATH=$bin:$PATH RINGLEADER_STATE=$run/worker
allocation=$(sbatch --parsable --time=10 --output="$run/logs/allocation.log" "$root/deploy/slurm/workers.sbatch" \
  --coordinator "$RINGLEADER_ADDRESS" --trainers 2)
await_nodes 1

# job KEY...: what the job's record has there.
job() {
  "$bin/ringctl" get headers-16k -o json | python3 -c '
import json, sys
value = json.load(sys.stdin)
for key in sys.argv[1:]:
    value = value[int(key)] if isinstance(value, list) else value.get(key, 0)
print(value)' "$@"
}
# Its only checkpoint is the one of the allocation's end.
"$bin/ringctl" submit "$run/job.yaml" --set training.steps=100000 --set data.sequence_length=4096 \
  --set resources.trainers=2 --set parallelism.context=2 --set training.eval_sequences=1 \
  --set checkpoint.every_steps=100000 >"$run/logs/submit.log" 2>&1 || fail "submit"
trained() { (($(job progress step) >= ${1:-2})); }
await "the job did not train" trained

# What Slurm sends when the time is nearly over.
scancel --batch --signal=USR1 "$allocation"
kept() { (($(job progress checkpoint_step) >= 2)); }
await "no checkpoint was written when the allocation had to end" kept
kept_step=$(job progress checkpoint_step)
restarted() {
  scontrol show job "$allocation" >"$run/logs/show.log" && grep -q 'JobState=RUNNING' "$run/logs/show.log" &&
    grep -q 'Restarts=1' "$run/logs/show.log"
}
await "the allocation did not come back" restarted
await_nodes 1
await "the job did not go on" trained "$((kept_step + 2))"
[[ $(job attempts -1 first_step) == "$kept_step" ]] || fail "attempt 2 did not begin at step $kept_step"

scancel "$allocation"
gone() { ! squeue -h -j "$allocation" 2>/dev/null | grep -q .; }
await "the allocation did not end" gone
scontrol show job "$allocation" | grep -q 'JobState=CANCELLED' || fail "a cancelled allocation came back"
"$bin/ringctl" cancel headers-16k >"$run/logs/cancel.log" 2>&1 || fail "cancel"
echo "PASSED"
