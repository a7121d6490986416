#!/usr/bin/env bash
# Ctrl-C in the middle of the quickstart ends every process that it started, and until then no other call replaces what it
# works in.
set -euo pipefail
# shellcheck source=tests/e2e/scratch.sh
source "$(dirname "$0")/scratch.sh"

await() {  # SECONDS COMMAND...
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}
quickstart_ended() { ! kill -0 "$quickstart" 2>/dev/null; }
trainers_run() { (($(pgrep -fc "ringleader-trainer.*$work/run") == 4)); }
nothing_runs() { ! pgrep -f "$work/run" >/dev/null; }

# Job control gives the script a process group of its own, as a terminal does.
set -m
"$root/deploy/quickstart.sh" --dir "$work/run" --set training.steps=1000 --set data.sequence_length=4096 \
  >"$work/quickstart.log" 2>&1 &
quickstart=$!
set +m

trainers_run_or_never_will() { trainers_run || quickstart_ended; }
await 300 trainers_run_or_never_will && ! quickstart_ended || fail "the trainers did not start"
"$root/deploy/quickstart.sh" --dir "$work/run" >"$work/second.log" 2>&1 && fail "a second call in the same folder went on"
grep -q "uses $work/run; stop that" "$work/second.log" || fail "a second call was not told why"
trainers_run || fail "a second call disturbed the first"
kill -INT -- "-$quickstart"
timeout 120 tail --pid="$quickstart" -f /dev/null || fail "the quickstart did not end"
status=0
wait "$quickstart" || status=$?
((status == 130)) || fail "exit status $status instead of 130"
await 30 nothing_runs || fail "processes are left behind: $(pgrep -af "$work/run")"
echo "PASSED"
