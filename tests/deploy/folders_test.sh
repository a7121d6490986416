#!/usr/bin/env bash
# deploy/bundle.sh, deploy/quickstart.sh and deploy/python_kernels.sh replace what is their own and nothing else, and take a relative
# name for one of the folder that they were called in. What they would build and train is played by programs that do nothing.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; tail -n 20 "$work"/*.log >&2; exit 1; }
says() { grep -q -- "$1" "$work/log.log" || fail "does not say: $1"; }
mkdir -p "$work"/{stubs,build/bin,here,torch/torch}
for program in cmake strip; do
  cat >"$work/stubs/$program" <<'END'
#!/bin/sh
[ "$1" != -o ] || : >"$2"
END
done
chmod +x "$work"/stubs/*
export PATH=$work/stubs:$PATH
# A checkout whose scripts are the true ones, in which nothing is built: what goes wrong in here costs nobody anything.
checkout=$work/checkout
mkdir "$checkout"
(cd "$root" && cp -r --parents deploy tests/run_gpu.sh tests/gpu tests/golden bench "$checkout/")
printf '#!/bin/sh\n' >"$checkout/deploy/install_deps.sh"
touch "$checkout/CMakeLists.txt"
cd "$work/here"

# bundle.sh. Run in the checkout where it takes what is relative for its own.
bundle() { "$checkout/deploy/bundle.sh" -b "$work/build" "$@" >"$work/log.log" 2>&1; }
: >"$work/build/gpu_binaries.txt"
for binary in ringleader-{coordinator,worker,trainer,bench} ringctl dealing_bench; do cp /bin/true "$work/build/bin/$binary"; done
bundle fresh || fail "a folder that is not there: $?"
[[ -s fresh/COMMIT && -e fresh/bin/ringctl && -e fresh/deploy/quickstart.sh ]] || fail "the bundle is not in the folder of the call"
touch fresh/old
bundle fresh || fail "an earlier bundle: $?"
[[ ! -e fresh/old && -e fresh/bin/ringctl ]] || fail "an earlier bundle was not replaced"
bundle "$(mktemp -d -p "$work")" || fail "an empty folder: $?"
mkdir -p foreign/bin && touch foreign/thesis && echo x >file
for theirs in foreign "$PWD/foreign" foreign/bin/.. file "$PWD/file"; do
  if bundle "$theirs"; then fail "takes $theirs"; fi
  says "$(realpath "$theirs") is there and is no bundle"
  [[ -e foreign/thesis && -s file ]] || fail "what is others' was removed"
done
# A name that the checkout has, too.
mkdir "$checkout/mine" && touch "$checkout/mine/thesis"
bundle mine || fail "a folder that is not there: $?"
[[ -e $checkout/mine/thesis && -e mine/bin/ringctl ]] || fail "a folder of the checkout was taken for one of here"
bundle archive.tar.xz || fail "an archive: $?"
tar -tf archive.tar.xz archive/COMMIT >"$work/tar.log" || fail "the archive is not in the folder of the call"
(cd "$work" && "$checkout/deploy/bundle.sh" -b build here/other >"$work/log.log" 2>&1 && [[ -e here/other/bin/ringctl ]]) || fail "a relative -b"

# quickstart.sh. Its ringctl ends it when the old run has been removed.
touch "$work/build/build.ninja" "$work/build/CMakeCache.txt"
printf '#!/bin/sh\nexit 77\n' >"$work/build/bin/ringctl"
quickstart() {  # ends with 77 where it begins a run
  local code=0
  RINGLEADER_BUILD=$work/build "$checkout/deploy/quickstart.sh" "$@" >"$work/log.log" 2>&1 || code=$?
  ((code == 77))
}
mkdir -p theirs/{checkpoints,tokens,coordinator} && touch theirs/{checkpoints,tokens,coordinator}/x
for folder in theirs "$PWD/theirs" file; do
  if quickstart --dir "$folder"; then fail "takes $folder"; fi
  says "$(realpath "$folder") holds what no quickstart left there"
  [[ -e theirs/checkpoints/x && -e theirs/tokens/x && -e theirs/coordinator/x && ! -e theirs/logs ]] || fail "what is others' was touched"
done
quickstart --dir run || fail "a folder that is not there"
mkdir -p run/checkpoints && touch run/checkpoints/x
quickstart --dir run || fail "an earlier run"
[[ ! -e run/checkpoints ]] || fail "an earlier run was not removed"
quickstart --dir "$(mktemp -d -p "$work")" || fail "an empty folder"
quickstart || fail "the default folder"
[[ -d quickstart-run/logs ]] || fail "the default folder is not in the folder of the call"

# python_kernels.sh.
touch "$work/torch/torch/version.py"
cat >"$work/python" <<'END'
#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" != --wheel-dir ] || : >"$2/ringleader_kernels-0.whl"; shift; done
END
chmod +x "$work/python"
kernels() { RINGLEADER_PYTHON=../python RINGLEADER_TORCH_ROOT=../torch "$checkout/deploy/python_kernels.sh" "$@" >"$work/log.log" 2>&1; }
kernels wheels || fail "python_kernels: $?"
[[ -e wheels/ringleader_kernels-0.whl && ! -e $checkout/wheels ]] || fail "the wheel is not in the folder of the call"
kernels || fail "python_kernels: $?"
[[ -e $checkout/build/wheels/ringleader_kernels-0.whl ]] || fail "the default folder is not in the checkout"
for script in bundle quickstart python_kernels; do
  "$checkout/deploy/$script.sh" --help >"$work/log.log" 2>&1 || fail "$script.sh --help: $?"
  says '^  *--'
done
if kernels --no-such-flag; then fail "takes a flag for a folder"; fi
echo "PASSED"
