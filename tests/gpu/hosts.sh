#!/usr/bin/env bash
# Runs a GPU test as several processes on this machine that NCCL takes for hosts of their own (NCCL_HOSTID), the ranks of
# each test dealt out to them. So tests of four ranks run on two GPUs: ranks of different hosts may share a GPU, and what
# they exchange goes through the network. Results count; timings do not.
#
#   tests/gpu/hosts.sh HOSTS TEST [ARGUMENT...]       e.g. tests/gpu/hosts.sh 2 build/bin/comm_nccl_test
#
# The output is the first host's; that of one that fails follows.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
[[ ${1:-} =~ ^[2-9]$ && -x ${2:-} ]] || { echo "hosts: it wants 2 to 9 HOSTS and a TEST (see --help)" >&2; exit 2; }
hosts=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/rendezvous"
export RINGLEADER_TEST_HOSTS=$hosts RINGLEADER_TEST_RENDEZVOUS=$folder/rendezvous
pids=()
for ((host = 1; host < hosts; ++host)); do
  RINGLEADER_TEST_HOST=$host NCCL_HOSTID=host-$host "$@" >"$folder/$host.log" 2>&1 &
  pids+=($!)
done
failed=0
RINGLEADER_TEST_HOST=0 NCCL_HOSTID=host-0 "$@" || failed=1
for ((host = 1; host < hosts; ++host)); do
  wait "${pids[host - 1]}" || { failed=1; echo "--- host $host failed:"; tail -n 60 "$folder/$host.log"; }
done
exit "$failed"
