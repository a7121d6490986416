#!/usr/bin/env bash
# The commands of deploy/kubernetes/components/backup, on a true coordinator's folder: copies are made while it runs and the oldest go, a
# restore waits until it is gone, files of other names stay, and the coordinator that is started then knows that its database is a copy. No cluster is needed.
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
if BACKUP='' job restore; then fail "a restore without a copy"; fi
grep -q "^no copy in $run/backup" "$run/restore.log" || fail "a restore does not say that there is no copy"
echo mine >"$run/backup/ringleader-mine.db"
touch "$run"/backup/ringleader-20200102T031700Z.db.part{,-wal} "$run/backup/mine.part"
for _ in 1 2 3; do
  KEEP=2 job backup || fail "a backup: $?"
  sleep 1.1  # their names are of the second
done
copies=("$run"/backup/ringleader-2*Z.db)
((${#copies[@]} == 2)) || fail "${#copies[@]} copies are kept instead of 2"
[[ $(cat "$run/backup/ringleader-mine.db") == mine && -e $run/backup/mine.part ]] || fail "a file of another name is gone"
! compgen -G "$run/backup/*.db.part*" >/dev/null || fail "what a killed copy left stays"
if BACKUP='' job restore; then fail "a restore beside a running coordinator"; fi
grep -q 'a coordinator uses this database' "$run/restore.log" || fail "a restore does not say why not"
stop
# A copy that fails has made room, and left one of those that were there.
mv "$run/home/state" "$run/home/elsewhere"
mkdir "$run/home/state"
if KEEP=1 job backup; then fail "a backup of no database"; fi
[[ ! -e ${copies[0]} && -e ${copies[1]} ]] || fail "a backup makes no room, or takes the only copy"
cp "${copies[1]}" "${copies[0]}"
rmdir "$run/home/state"
mv "$run/home/elsewhere" "$run/home/state"
# A signal ends a backup at once, here one that waits for a database in use, and the next of that name removes what it left.
mine=$run/backup/mine.db
python3 - "$run/home/state/ringleader.db" "$run/locked" <<'END' &
import pathlib, sqlite3, sys, time

database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA locking_mode=EXCLUSIVE")
database.execute("BEGIN EXCLUSIVE")
pathlib.Path(sys.argv[2]).touch()
time.sleep(600)
END
user=$!
until [[ -e $run/locked ]]; do
  kill -0 "$user" 2>/dev/null || fail "the database cannot be locked"
  sleep 0.05
done
ringleader-coordinator --data-dir="$run/home/state" --backup="$mine" >"$run/signal.log" 2>&1 &
backup=$!
for ((i = 0; i < 1200; ++i)); do
  [[ ! -e $mine.part ]] || break
  sleep 0.05
done
kill "$backup"
if wait "$backup"; then code=0; else code=$?; fi
kill "$user"
{ wait "$user"; } 2>/dev/null || true
((code == 143)) || fail "SIGTERM ends a backup with exit code $code"
[[ -e $mine.part ]] || fail "the backup was not at work"
ringleader-coordinator --data-dir="$run/home/state" --backup="$mine" >"$run/signal.log" 2>&1 || fail "a backup after one that was ended"
[[ -e $mine && ! -e $mine.part ]] || fail "the part of a backup that was ended stays"
before=$(cksum <"$run/home/state/ringleader.db")
mkdir "$run/backup/folder.db"
if BACKUP=$run/backup/folder.db job restore; then fail "a folder was put back"; fi
(ulimit -f 8; BACKUP='' job restore) && fail "a restore that lacks room"
[[ ! -e $run/home/state/ringleader.db.restored ]] || fail "a restore that failed leaves its half"
[[ $(cksum <"$run/home/state/ringleader.db") == "$before" ]] || fail "a restore that failed changes the database"
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
