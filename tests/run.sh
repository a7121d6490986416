#!/usr/bin/env bash
# Installs what is missing, builds everything, runs every test. Arguments go to ctest, e.g. -R store_test.
#
#   RINGLEADER_BUILD  build folder (default: build/)
#   RINGLEADER_CUDA   ON, OFF or AUTO (default: kernels for GPUs where there is nvcc)
#   RINGLEADER_JOBS   parallel compilations and tests (default: the number of cores)
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in -h | --help) sed -n '2,6s/^# \{0,1\}//p' tests/run.sh; exit ;; esac

build=${RINGLEADER_BUILD:-build}
jobs=${RINGLEADER_JOBS:-$(nproc)}

deploy/install_deps.sh --dev
# With all parts named: a folder where deploy/quickstart.sh was interrupted has some of them off.
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRINGLEADER_TORCH=ON -DRINGLEADER_CUDA="${RINGLEADER_CUDA:-AUTO}" >"$build.configure.log" 2>&1 ||
  { cat "$build.configure.log" >&2; exit 1; }
rm -f "$build.configure.log"
cmake --build "$build" -j "$jobs"
ctest --test-dir "$build" -j "$jobs" --output-on-failure --no-tests=error "$@"
