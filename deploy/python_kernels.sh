#!/usr/bin/env bash
# Builds the wheel of ringleader.kernels (docs/kernels_python.md) for the PyTorch that it finds: python3's, or that of
# RINGLEADER_TORCH_ROOT (the site-packages folder that holds torch/), or the one of deploy/install_deps.sh. With a CUDA
# compiler it holds the kernels for Hopper, else the CPU's alone. No GPU is needed, and a wheel serves every Python 3 with
# that version of PyTorch.
#
#   deploy/python_kernels.sh [--bench] [FOLDER]     where the wheel goes (default: build/wheels/ of the checkout)
#
#   FOLDER                   is made where it is not there, and nothing is removed from it; a relative name is one of the folder that
#                            you are in
#   --bench                  also call_from_cpp.so and the name of the commit, which bench/python_kernels.sh takes
#
#   RINGLEADER_WHEEL_BUILD   build folder (default: build-wheel/ of the checkout)
#   RINGLEADER_CUDA          ON, OFF or AUTO (default: kernels for GPUs where there is nvcc)
#
# Needs Debian's libabsl-dev, libgtest-dev, cmake and ninja-build (deploy/install_deps.sh --packages) and, from python3
# or PyPI, scikit-build-core. Without a network: RINGLEADER_PYTHON names a Python that has it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bench=
while [[ ${1:-} == -* ]]; do
  case $1 in
    --bench) bench=1; shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "python_kernels: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
(($# <= 1)) || { echo "usage: deploy/python_kernels.sh [--bench] [FOLDER]" >&2; exit 2; }
out=$(realpath -m "${1:-$root/build/wheels}")
build=$(realpath -m "${RINGLEADER_WHEEL_BUILD:-$root/build-wheel}")
[[ -z ${RINGLEADER_TORCH_ROOT:-} ]] || RINGLEADER_TORCH_ROOT=$(realpath -m "$RINGLEADER_TORCH_ROOT")
python=${RINGLEADER_PYTHON:-python3}
[[ $python != */* ]] || python=$(realpath -ms "$python")  # the link itself: a virtual environment is known by it
cd "$root"
# shellcheck source=deploy/versions.env
source deploy/versions.env

torch_root=${RINGLEADER_TORCH_ROOT:-$(python3 -c 'import importlib.util, os
print(os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin)))' 2>/dev/null || true)}
torch_root=${torch_root:-${RINGLEADER_DEPS:-${XDG_CACHE_HOME:-$HOME/.cache}/ringleader/deps}/torch}
[[ -e $torch_root/torch/version.py ]] || {
  echo "python_kernels: no PyTorch in $torch_root; install it, or set RINGLEADER_TORCH_ROOT" >&2
  exit 1
}

if ! "$python" -c 'import scikit_build_core' 2>/dev/null; then
  python=$build.venv/bin/python3
  [[ -x $python ]] || python3 -m venv "$build.venv"
  "$python" -m pip install -q "scikit-build-core==$SCIKIT_BUILD_CORE_VERSION"
fi
mkdir -p "$out"
CMAKE_GENERATOR=Ninja "$python" -m pip wheel -q --no-build-isolation --no-deps --wheel-dir "$out" ./python \
  -C build-dir="$build" -C cmake.build-type=Release \
  -C cmake.define.RINGLEADER_TORCH_ROOT="$torch_root" -C cmake.define.RINGLEADER_CUDA="${RINGLEADER_CUDA:-AUTO}"
if [[ $bench ]]; then
  cmake --build "$build" --target call_from_cpp
  cp "$build/bin/call_from_cpp.so" "$out/"
  commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
  [[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=-modified
  echo "$commit" >"$out/COMMIT"
fi
ls -sh "$out"/ringleader_kernels-*.whl
