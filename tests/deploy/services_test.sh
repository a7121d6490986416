#!/usr/bin/env bash
# deploy/loopback_services.sh: a coordinator whose port another program took meanwhile gets another one, and one that takes an
# earlier one's place keeps its address, or says why it cannot.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck disable=SC2034
bin=${RINGLEADER_BUILD:-$root/build}/bin
run=$(mktemp -d)
mkdir "$run/logs"
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; rm -rf "$run"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$run"/logs/*.log >&2 || true; exit 1; }

eval "$(declare -f free_port | sed '1s/free_port/truly_free_port/')"
taken=$(truly_free_port)
start taker python3 -m http.server --bind 127.0.0.1 "$taken"
for ((i = 0; ; ++i)); do
  curl -fs "http://127.0.0.1:$taken" >"$run/logs/curl.log" 2>&1 && break
  ((i < 300)) || fail "nobody took the port"
  sleep 0.1
done
# The first port that is looked up is the taken one, for clients and then for /metrics.
for at in 1 2; do
  : >"$run/looked_up"
  services_address=
  free_port() { echo >>"$run/looked_up"; if (($(wc -l <"$run/looked_up") == at)); then echo "$taken"; else truly_free_port; fi; }
  start_coordinator 2>"$run/logs/start.log" || fail "no other port was tried"
  (($(wc -l <"$run/looked_up") == 4)) || fail "$(wc -l <"$run/looked_up") ports were looked up for two starts"
  "$bin/ringctl" health >"$run/logs/health.log" || fail "the coordinator does not answer at $RINGLEADER_ADDRESS"
  curl -fs "http://$services_metrics/metrics" >"$run/logs/metrics.log" || fail "no metrics at $services_metrics"
  kill -KILL "${pids[-1]}"
  timeout 20 tail --pid="${pids[-1]}" -f /dev/null || fail "the coordinator did not die"
done

# Its place.
before=$RINGLEADER_ADDRESS
start_coordinator || fail "its place is not taken"
[[ $RINGLEADER_ADDRESS == "$before" ]] || fail "$before became $RINGLEADER_ADDRESS"
"$bin/ringctl" health >"$run/logs/health.log" || fail "the second does not answer"
(start_coordinator) 2>"$run/logs/third.log" && fail "a third one started beside it"
grep -q "another coordinator uses it" "$run/logs/third.log" || fail "a third one is not told why"
"$bin/ringctl" health >"$run/logs/health.log" || fail "a third one disturbed it"
echo "PASSED"
