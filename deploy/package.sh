#!/usr/bin/env bash
# Builds the Debian packages ringleader-cli, ringleader-coordinator and ringleader-worker into build/packages, installing first
# what building needs. docs/install.md says how to use them.
#
#   RINGLEADER_BUILD  build folder (default: build/)
#   RINGLEADER_CUDA   ON, OFF or AUTO (default: kernels for GPUs where there is nvcc)
set -euo pipefail
case ${1:-} in
  '') ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  *) echo "package: $1 is nothing that it takes (see --help)" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
build=${RINGLEADER_BUILD:-build}

deploy/install_deps.sh --package
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRINGLEADER_TORCH=ON -DRINGLEADER_CUDA="${RINGLEADER_CUDA:-AUTO}" >"$build.configure.log" 2>&1 ||
  { cat "$build.configure.log" >&2; exit 1; }
rm -f "$build.configure.log"
cmake --build "$build" --target ringleader-coordinator ringleader-worker ringleader-trainer ringctl ringleader-bench
rm -rf "$build/packages"
log=$(mktemp)
(cd "$build" && cpack >"$log" 2>&1) || { cat "$log" >&2; exit 1; }
rm -f "$log"
ls -sh "$build"/packages/*.deb
