#!/usr/bin/env bash
# The commands of deploy/kubernetes/components/backup, on a true coordinator's folder: copies are made while it runs and the oldest go, a
# restore waits until it is gone, and the coordinator that is started then knows that its database is a copy. No cluster is needed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
run=$(mktemp -d)
coordinator=''
trap '[[ ! $coordinator ]] || kill "$coordinator" 2>/dev/null || true; { wait; } 2>/dev/null; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/*.log >&2; exit 1; }
export PATH=$bin:$PATH
mkdir -p "$run"/{home,backup}

for name in backup restore; do
  python3 - "$root/deploy/kubernetes/components/backup/$name.yaml" "$run" >"$run/$name.sh" <<'END'
import sys, yaml

container, = yaml.safe_load(open(sys.argv[1]))["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
shell, flags, script = container["command"]
assert (shell, flags) == ("/bin/sh", "-euc")
print(script.replace("/var/lib/ringleader", sys.argv[2] + "/home").replace("/backup", sys.argv[2] + "/backup"))
END
done
job() { /bin/sh -eu "$run/$1.sh" >"$run/$1.log" 2>&1; }
start() {
  "$bin/ringleader-coordinator" --listen "unix:$run/socket" --data-dir "$run/home/state" --metrics-listen off >"$run/coordinator.log" 2>&1 &
  coordinator=$!
  for ((i = 0; ; ++i)); do
    RINGLEADER_ADDRESS=unix:$run/socket "$bin/ringctl" health >"$run/health.log" 2>&1 && break
    ((i < 300)) || fail "the coordinator did not start"
    sleep 0.1
  done
}
stop() {
  kill "$coordinator"
  wait "$coordinator" || fail "the coordinator ended with $?"
  coordinator=''
}

start
for _ in 1 2 3; do
  KEEP=2 job backup || fail "a backup: $?"
  sleep 1.1  # their names are of the second
done
copies=("$run"/backup/ringleader-*.db)
((${#copies[@]} == 2)) || fail "${#copies[@]} copies are kept instead of 2"
if BACKUP='' job restore; then fail "a restore beside a running coordinator"; fi
grep -q 'a coordinator uses this database' "$run/restore.log" || fail "a restore does not say why not"
stop
before=$(cksum <"$run/home/state/ringleader.db")
BACKUP='' job restore || fail "a restore: $?"
grep -q "^${copies[1]} was put back" "$run/restore.log" || fail "not the newest"
[[ $(cat "$run"/home/before-*/ringleader.db | cksum) == "$before" ]] || fail "what was there is lost"
start
grep -q 'was put back from a backup' "$run/coordinator.log" || fail "the coordinator does not know that it has a copy"
stop
# An older one, by name, which comes later.
sleep 1.1
BACKUP=$run/backup/by-hand.db job restore &
restore=$!
sleep 1
kill -0 "$restore" || fail "a restore does not wait for its copy"
cp "${copies[0]}" "$run/backup/by-hand.part" && mv "$run/backup/by-hand.part" "$run/backup/by-hand.db"
wait "$restore" || fail "a restore that waited: $?"
start
stop
echo "PASSED"
