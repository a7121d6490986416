#!/usr/bin/env bash
# Builds the wheel as users do, for the CPU, installs it alone into an empty folder and calls it from there: all that it needs beside
# PyTorch is in it.
#
#   python/tests/wheel_test.sh [BUILD]     BUILD: the folder that keeps what is compiled (default: build/wheel-test/ of the checkout)
#
#   RINGLEADER_TORCH_ROOT    the site-packages folder that holds torch/ (default: that of deploy/install_deps.sh)
#   RINGLEADER_PYTHON        a Python that has scikit-build-core, without a network (deploy/python_kernels.sh)
set -euo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  -*) echo "wheel_test: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(realpath -m "${1:-$root/build/wheel-test}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$work"/*.log >&2 || true; exit 1; }

export RINGLEADER_TORCH_ROOT=${RINGLEADER_TORCH_ROOT:-${RINGLEADER_DEPS:-${XDG_CACHE_HOME:-$HOME/.cache}/ringleader/deps}/torch}
python=$(realpath -m "$RINGLEADER_TORCH_ROOT")/../../../bin/python3
if ! why=$("$python" -c 'import torch, pip' 2>&1); then
  echo "SKIPPED: $python has no PyTorch (${why##*$'\n'}); run deploy/install_deps.sh --dev"
  exit 0
fi
if ! RINGLEADER_CUDA=OFF RINGLEADER_WHEEL_BUILD=$build "$root/deploy/python_kernels.sh" "$work/wheels" >"$work/build.log" 2>&1; then
  if grep -q "No matching distribution found for scikit-build-core" "$work/build.log"; then
    echo "SKIPPED: no scikit-build-core, and no network to get it from (RINGLEADER_PYTHON names a Python that has it)"
    exit 0
  fi
  fail "python_kernels.sh"
fi
"$python" -m pip install -q --no-deps --no-index --no-compile --target "$work/packages" "$work"/wheels/ringleader_kernels-*.whl \
  >"$work/install.log" 2>&1 || fail "pip install"
for source in "$root"/python/ringleader/kernels/*.py; do
  cmp -s "$source" "$work/packages/ringleader/kernels/${source##*/}" || fail "the wheel has no ${source##*/}, or an old one"
done

version=$(sed -n 's/.*project(ringleader VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")
mkdir "$work/empty"
cd "$work/empty"
env -u LD_LIBRARY_PATH PYTHONPATH="$work/packages" "$python" - "$work/packages" "$version" >"$work/call.log" 2>&1 <<'END' || fail "a call"
import importlib.metadata
import pathlib
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from ringleader import kernels

packages, version = sys.argv[1:]
assert pathlib.Path(kernels.__file__).is_relative_to(packages), kernels.__file__
assert importlib.metadata.version("ringleader-kernels") == version, importlib.metadata.version("ringleader-kernels")
q, k, v = (torch.randn(1, heads, 300, 64, requires_grad=True) for heads in (4, 2, 2))
expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
packed = kernels.sparse_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 300], dtype=torch.int32))
for out in (kernels.sparse_attention(q, k, v), packed.transpose(0, 1).unsqueeze(0)):
    assert torch.allclose(out, expected, atol=1e-5)
    gradients = zip(*(torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, expected)))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in gradients)
# Its libraries, Abseil's among them, are its own, and not those of the machine that it was built on.
loaded = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
own = {path for path in loaded if pathlib.Path(path).name.startswith(("libabsl_", "ringleader_"))}
assert len(own) > 1 and all(path.startswith(packages) for path in own), own
END
echo "PASSED"
