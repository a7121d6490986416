#!/usr/bin/env bash
# Packs the GPU tests and benches into a folder that runs on a machine with an H100 or H200, a driver and LibTorch, but
# without a compiler or a network: binaries, the Debian libraries they need, tests/run_gpu.sh and the commit's name.
#
#   deploy/bundle.sh [-b BUILD_DIR] FOLDER      then there: FOLDER/run_gpu.sh FOLDER
#
# LibTorch and CUDA are not packed: tests/run_gpu.sh finds them through python3 or RINGLEADER_TORCH_ROOT.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_mib=64
build=build
[[ ${1:-} == -b ]] && { build=$2; shift 2; }
(($# == 1)) || { echo "usage: deploy/bundle.sh [-b BUILD_DIR] FOLDER" >&2; exit 2; }
bundle=$1

[[ -f $build/gpu_binaries.txt ]] || {
  echo "bundle: $build has no GPU binaries; configure it on a machine with nvcc: cmake -S . -B $build -G Ninja" >&2
  exit 1
}
cmake --build "$build" --target gpu_binaries
mapfile -t binaries <"$build/gpu_binaries.txt"

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
cp tests/run_gpu.sh "$bundle/"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=-modified
echo "$commit" >"$bundle/COMMIT"

mib=$(du -sm "$bundle" | cut -f1)
echo "bundle: $bundle, ${#binaries[@]} binaries, $mib MiB"
((mib < limit_mib)) || { echo "bundle: larger than $limit_mib MiB" >&2; exit 1; }
