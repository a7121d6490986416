#!/usr/bin/env bash
# Packs Ringleader into a folder that runs on a machine with an H100 or H200, a driver and LibTorch, but without a
# compiler or a network: coordinator, worker, trainer and ringctl with deploy/quickstart.sh, the GPU tests and benches,
# the Debian libraries they need, and the commit's name.
#
#   deploy/bundle.sh [-b BUILD_DIR] [--only PATTERN] FOLDER|ARCHIVE.tar.xz
#   then there, after `tar xf` of an archive: FOLDER/deploy/quickstart.sh --gpu      or: FOLDER/run_gpu.sh FOLDER
#
# An archive holds a folder of its name and must be smaller than 64 MiB.
#
#   --only   of the GPU tests and benches, those whose name matches this extended regular expression
#
# LibTorch, CUDA and NCCL are not packed: deploy/gpu_libraries.sh finds them through python3 or RINGLEADER_TORCH_ROOT.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_mib=64
build=build only=.
while [[ ${1:-} == -* ]]; do
  case $1 in
    -b) build=${2:?-b needs a folder}; shift 2 ;;
    --only) only=${2:?--only needs a pattern}; shift 2 ;;
    *) echo "bundle: unknown option $1" >&2; exit 2 ;;
  esac
done
(($# == 1)) || { echo "usage: deploy/bundle.sh [-b BUILD_DIR] [--only PATTERN] FOLDER|ARCHIVE.tar.xz" >&2; exit 2; }
bundle=$1 archive=
if [[ $bundle == *.tar.xz ]]; then
  archive=$(realpath -m "$bundle")
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  bundle=$work/$(basename "$archive" .tar.xz)
fi

[[ -f $build/gpu_binaries.txt ]] || {
  echo "bundle: $build has no GPU binaries; configure it on a machine with nvcc: cmake -S . -B $build -G Ninja" >&2
  exit 1
}
mapfile -t binaries < <(grep -E -- "$only" "$build/gpu_binaries.txt" || true)
binaries+=(ringleader-coordinator ringleader-worker ringleader-trainer ringctl dealing_bench ringleader-bench)
cmake --build "$build" --target "${binaries[@]}"

rm -rf "$bundle"
mkdir -p "$bundle/bin" "$bundle/lib"
for binary in "${binaries[@]}"; do
  strip -o "$bundle/bin/$binary" "$build/bin/$binary"
done
# Debian's libraries, less what every Linux machine has in its own, newer version.
for binary in "${binaries[@]}"; do ldd "$build/bin/$binary"; done |
  awk '$2 == "=>" && $3 ~ "^/(usr/)?lib/" {print $3}' | sort -u |
  { grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so' || true; } |
  while read -r library; do cp -L "$library" "$bundle/lib/"; done
mkdir -p "$bundle/deploy" "$bundle/tests" "$bundle/bench"
cp tests/run_gpu.sh "$bundle/"
cp -r deploy/quickstart.sh deploy/loopback_services.sh deploy/gpu_libraries.sh deploy/quickstart "$bundle/deploy/"
cp -r tests/gpu tests/golden "$bundle/tests/"
cp -r bench/balance.sh bench/balance_rows.py bench/document_layout.sh bench/pattern_speed.sh bench/pattern_rows.py bench/compare_peer.sh bench/full_run.sh \
  bench/fp8.sh bench/fp8_rows.py bench/sparse_quality.sh bench/models bench/quality "$bundle/bench/"
cp -r --parents bench/longca/rings "$bundle/"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=-modified
echo "$commit" >"$bundle/COMMIT"

echo "bundle: $bundle, ${#binaries[@]} binaries, $(du -sm "$bundle" | cut -f1) MiB"
[[ $archive ]] || exit 0
mkdir -p "$(dirname "$archive")"
XZ_OPT=-T0 tar -C "$work" -cJf "$archive" "$(basename "$bundle")"
mib=$(du -m "$archive" | cut -f1)
echo "bundle: $archive, $mib MiB"
((mib < limit_mib)) || { echo "bundle: $archive is larger than $limit_mib MiB; take fewer with --only" >&2; exit 1; }
