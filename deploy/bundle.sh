#!/usr/bin/env bash
# Packs Ringleader into a folder that runs on a machine with an H100 or H200, a driver and LibTorch, but without a
# compiler or a network: coordinator, worker, trainer and ringctl with deploy/quickstart.sh, the GPU tests and benches,
# the Debian libraries they need, and the commit's name.
#
#   deploy/bundle.sh [-b BUILD_DIR] [--only PATTERN] FOLDER|ARCHIVE.tar.xz
#   then there, after `tar xf` of an archive: FOLDER/deploy/quickstart.sh --gpu      or: FOLDER/run_gpu.sh FOLDER
#
# An archive holds a folder of its name and must be smaller than 64 MiB. A FOLDER that is there is replaced where it is empty or an
# earlier bundle (it holds COMMIT and bin/), and left alone otherwise. Relative names are those of the folder that you are in.
#
#   -b       the build folder (default: build/ of the checkout)
#   --only   of the GPU tests and benches, those whose name matches this extended regular expression
#
# LibTorch, CUDA and NCCL are not packed: deploy/gpu_libraries.sh finds them through python3 or RINGLEADER_TORCH_ROOT.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
limit_mib=64
build=$root/build only=.
while [[ ${1:-} == -* ]]; do
  case $1 in
    -b) build=$(realpath -m "${2:?-b needs a folder}"); shift 2 ;;
    --only) only=${2:?--only needs a pattern}; shift 2 ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "bundle: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
[[ $# == 1 && $1 ]] || { echo "usage: deploy/bundle.sh [-b BUILD_DIR] [--only PATTERN] FOLDER|ARCHIVE.tar.xz" >&2; exit 2; }
bundle=$(realpath -m "$1") archive=
cd "$root"
if [[ $bundle == *.tar.xz ]]; then
  archive=$bundle
  [[ ! -d $archive ]] || { echo "bundle: $archive is a folder; name a file" >&2; exit 1; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  bundle=$work/$(basename "$archive" .tar.xz)
elif [[ -e $bundle && ! (-f $bundle/COMMIT && -d $bundle/bin) ]]; then
  # What is replaced is this script's own.
  [[ -d $bundle && -z $(ls -A "$bundle") ]] || {
    echo "bundle: $bundle is there and is no bundle (no COMMIT and bin/ in it); name another folder, or remove it yourself" >&2
    exit 1
  }
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
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=-modified
# First: it also marks the folder as a bundle, whole or not.
echo "$commit" >"$bundle/COMMIT"
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
cp -r bench/attention_speed.sh bench/attention_rows.py bench/balance.sh bench/balance_rows.py bench/compare_peer.sh bench/dense_below.sh \
  bench/document_layout.sh bench/figure_rows.py bench/fp8.sh bench/fp8_rows.py bench/full_run.sh bench/models bench/pattern_rows.py \
  bench/pattern_speed.sh bench/quality bench/sparse_quality.sh "$bundle/bench/"
cp -r --parents bench/longca/picture.py bench/longca/lengths/*.json bench/longca/masks bench/longca/rings "$bundle/"

echo "bundle: $bundle, ${#binaries[@]} binaries, $(du -sm "$bundle" | cut -f1) MiB"
[[ $archive ]] || exit 0
mkdir -p "$(dirname "$archive")"
XZ_OPT=-T0 tar -C "$work" -cJf "$archive" "$(basename "$bundle")"
mib=$(du -m "$archive" | cut -f1)
echo "bundle: $archive, $mib MiB"
((mib < limit_mib)) || { echo "bundle: $archive is larger than $limit_mib MiB; take fewer with --only" >&2; exit 1; }
