#!/usr/bin/env bash
# Installs what building and testing Ringleader needs on Debian 12: packages from Debian, LibTorch from PyPI.
# Idempotent: a second call finds everything in place and returns in a second.
#
#   --dev             also what the tests and linters need
#   --package         also what deploy/package.sh needs
#   --packages        only the packages from Debian
#   --libtorch        only LibTorch and, where there is a CUDA compiler, NCCL's headers
#   RINGLEADER_DEPS   where LibTorch goes (default: ~/.cache/ringleader/deps); shared by all checkouts
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
# shellcheck source=deploy/versions.env
source deploy/versions.env

deps=${RINGLEADER_DEPS:-${XDG_CACHE_HOME:-$HOME/.cache}/ringleader/deps}
packages=(
  ca-certificates g++ cmake ninja-build ccache git curl procps python3 python3-venv
  libgrpc++-dev protobuf-compiler-grpc protobuf-compiler libprotobuf-dev libabsl-dev
  libsqlitecpp-dev libsqlite3-dev prometheus-cpp-dev libcli11-dev libyaml-cpp-dev
  nlohmann-json3-dev libspdlog-dev libssl-dev libxxhash-dev openssl libcpp-httplib-dev
  libgtest-dev libgmock-dev
)
case ${1:-} in
  --package) packages+=(dpkg-dev file) ;;
  --dev) packages+=(prometheus chromium slurmctld slurmd slurm-client clang-format clang-tidy python3-matplotlib python3-yaml) ;;
  --libtorch) packages=() ;;
  --packages | '') ;;
  *) echo "install_deps: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
# RUNLEVEL: the tests start a Prometheus of their own; the package shall start no daemon that takes a port.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || { echo "install_deps: needs root for: apt-get install ${missing[*]}" >&2; exit 1; }
  echo "install_deps: apt-get install ${missing[*]}"
  log=$(mktemp)
  { apt-get update -qq && apt-get install -y -qq -o DPkg::Lock::Timeout=600 --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    { cat "$log" >&2; exit 1; }
  rm -f "$log"
fi

[[ ${1:-} != --packages ]] || exit 0

# Of calls that would put the same thing into the folder, the second waits for the first, and finds it there.
mkdir -p "$deps"
exec {lock}>"$deps/.lock"
flock -n "$lock" || { echo "install_deps: waiting for another call that installs into $deps"; flock "$lock"; }

venv=$deps/torch-$TORCH_VERSION
if [[ ! -e $venv/.complete ]]; then
  echo "install_deps: LibTorch $TORCH_VERSION into $venv"
  rm -rf "$venv"
  python3 -m venv "$venv"
  # --no-deps: libtorch_cpu needs the CUDA runtime and CUPTI libraries to load, and nothing else of CUDA.
  "$venv/bin/pip" install -q --no-deps "torch==$TORCH_VERSION" \
    "nvidia-cuda-runtime==$CUDA_RUNTIME_VERSION" "nvidia-cuda-cupti==$CUDA_RUNTIME_VERSION"
  touch "$venv/.complete"
fi
ln -sfn "$(echo "$venv"/lib/python3*/site-packages)" "$deps/torch"

# Python imports PyTorch only with all of CUDA's libraries (2 GB): for the tests of python/.
if [[ ${1:-} == --dev && ! -e $venv/.python ]]; then
  echo "install_deps: PyTorch for Python, transformers and pytest into $venv"
  "$venv/bin/pip" install -q "torch==$TORCH_VERSION" "transformers==$TRANSFORMERS_VERSION" numpy pytest
  touch "$venv/.python"
fi

# OpenTelemetry's own definition of what a collector of traces takes, which Debian does not carry.
otlp=$deps/otlp-$OPENTELEMETRY_PROTO_VERSION
if [[ ${1:-} == --dev && ! -e $otlp/.complete ]]; then
  echo "install_deps: opentelemetry-proto into $otlp"
  rm -rf "$otlp"
  python3 -m venv "$otlp"
  "$otlp/bin/pip" install -q "grpcio==$GRPCIO_VERSION" "opentelemetry-proto==$OPENTELEMETRY_PROTO_VERSION"
  touch "$otlp/.complete"
fi

# Where there is a CUDA compiler, trainers are built for NCCL, too: its headers come with the library.
if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
  [[ -e $venv/.nccl || -e /usr/local/cuda/include/nccl.h ]] || {
    echo "install_deps: NCCL $NCCL_VERSION into $venv"
    "$venv/bin/pip" install -q --no-deps "nvidia-nccl-cu13==$NCCL_VERSION"
    touch "$venv/.nccl"
  }
fi
