#!/usr/bin/env bash
# Builds the coordinator, worker, planner and command line with sanitizers, without LibTorch, and runs their tests.
#
#   tests/sanitize.sh asan-ubsan [CTEST ARGUMENT...]   addresses, leaks and undefined behaviour; in build-asan/
#   tests/sanitize.sh tsan [CTEST ARGUMENT...]         data races and deadlocks; in build-tsan/
#
#   RINGLEADER_JOBS   parallel compilations and tests (default: the number of cores)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

case ${1:-} in
  asan-ubsan | tsan) preset=$1 ;;
  *) echo "sanitize: '${1:-}' is neither asan-ubsan nor tsan (see --help)" >&2; exit 2 ;;
esac
shift
jobs=${RINGLEADER_JOBS:-$(nproc)}

deploy/install_deps.sh --dev
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" -j "$jobs"
ctest --preset "$preset" -j "$jobs" "$@"
