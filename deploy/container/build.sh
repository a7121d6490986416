#!/usr/bin/env bash
# Builds two OCI images out of the Debian packages, without a registry or a base image: ringleader-coordinator (with
# ringctl) and ringleader-worker (with the trainer). Each holds the programs, the libraries they load, certificates of
# public authorities and busybox as /bin/sh; it runs as user 65532 on a read-only root.
#
#   --tag TAG        the images' tag (default: the project's version)
#   --packages DIR   where deploy/package.sh left the packages (default: build/packages)
#   --cuda           the worker's image brings LibTorch's CUDA half, CUDA's libraries and NCCL, too (some 4 GB more)
#   --archive DIR    also writes DIR/NAME.tar, for `podman load` and `ctr images import`
#
# Needs buildah and busybox-static (installed if missing, as root); the images land where podman finds them.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=deploy/versions.env
source "$root/deploy/versions.env"
packages=$root/build/packages tag='' cuda='' archive=''
while (($#)); do
  case $1 in
    --tag) tag=${2:?--tag needs a name}; shift 2 ;;
    --packages) packages=${2:?--packages needs a folder}; shift 2 ;;
    --cuda) cuda=1; shift ;;
    --archive) archive=${2:?--archive needs a folder}; shift 2 ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "container: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done

export DEBIAN_FRONTEND=noninteractive
missing=()
for package in buildah busybox-static ca-certificates; do
  dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || { echo "container: needs root for: apt-get install ${missing[*]}" >&2; exit 1; }
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
shopt -s nullglob
debs=("$packages"/ringleader-{cli,coordinator,worker}_*.deb)
((${#debs[@]} == 3)) || { echo "container: $packages does not hold the three packages; run deploy/package.sh" >&2; exit 1; }
[[ $tag ]] || tag=$(dpkg-deb -f "${debs[0]}" Version)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# layout FOLDER PACKAGE...: a root folder with the packages' files, and what their programs load.
layout() {
  local folder=$1 package library
  shift
  mkdir -p "$folder"/{bin,etc/ssl/certs,lib,lib64,tmp,usr/bin,usr/lib,var/lib/ringleader}
  chmod 1777 "$folder/tmp"
  for package in "$@"; do dpkg-deb -x "$packages/${package}_"*.deb "$folder"; done
  rm -rf "$folder"/usr/lib/{systemd,sysusers.d} "$folder/etc/ringleader"
  # Every library by its path on this machine, so that the loader finds it where it looks first.
  { find "$folder/usr/bin" "$folder/usr/lib/ringleader" -type f 2>/dev/null || true; } |
    while read -r file; do LD_LIBRARY_PATH=$folder/usr/lib/ringleader ldd "$file" 2>/dev/null || true; done |
    awk '$2 == "=>" && $3 ~ "^/" {print $3} $1 ~ "^/lib64/" {print $1}' | sort -u |
    while read -r library; do
      [[ $library == "$folder"/* ]] || install -D -m 0755 "$(realpath "$library")" "$folder${library/#\/lib\//\/usr\/lib\/}"
    done
  rmdir "$folder/lib" && ln -s usr/lib "$folder/lib"
  cp "$(command -v busybox)" "$folder/bin/busybox"
  # What probes, backups and restores call (docs/kubernetes.md); `kubectl cp` wants tar.
  for applet in sh cat ls ps sleep kill tar mv rm cp mkdir date flock chown; do ln -s busybox "$folder/bin/$applet"; done
  cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"
  echo 'hosts: files dns' >"$folder/etc/nsswitch.conf"
  printf 'root:x:0:0::/:/bin/sh\nringleader:x:65532:65532::/var/lib/ringleader:/bin/sh\n' >"$folder/etc/passwd"
  printf 'root:x:0:\nringleader:x:65532:\n' >"$folder/etc/group"
  chown 65532:65532 "$folder/var/lib/ringleader" && chmod 0700 "$folder/var/lib/ringleader"
}

# image NAME FOLDER PROGRAM [BUILDAH-CONFIG...]
image() {
  local name=$1 folder=$2 program=$3 container
  shift 3
  container=$(buildah from scratch)
  buildah copy -q "$container" "$folder" / >/dev/null
  buildah config --user 65532:65532 --entrypoint "[\"/usr/bin/$program\"]" --cmd '' --workingdir /var/lib/ringleader \
    --volume /var/lib/ringleader --label org.opencontainers.image.title="$name" \
    --label org.opencontainers.image.version="$tag" --label org.opencontainers.image.licenses=Apache-2.0 \
    --env PATH=/usr/bin:/bin --env RINGLEADER_ADDRESS=127.0.0.1:7070 "$@" "$container"
  buildah commit -q --rm "$container" "localhost/$name:$tag" >/dev/null
  if [[ $archive ]]; then
    mkdir -p "$archive"
    rm -f "$archive/$name.tar"
    buildah push -q "localhost/$name:$tag" "docker-archive:$archive/$name.tar:localhost/$name:$tag"
  fi
  echo "container: localhost/$name:$tag, $(du -sm "$folder" | cut -f1) MB"
}

layout "$work/coordinator" ringleader-coordinator ringleader-cli
image ringleader-coordinator "$work/coordinator" ringleader-coordinator --port 7070 --port 7071

layout "$work/worker" ringleader-worker
worker_config=(--port 7081)
if [[ $cuda ]]; then
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" install -q "torch==$TORCH_VERSION" "nvidia-nccl-cu13==$NCCL_VERSION"
  site=$(echo "$work"/venv/lib/python3*/site-packages)
  for library in "$site"/torch/lib/*.so* "$site"/nvidia/*/lib/*.so*; do
    cp -n "$library" "$work/worker/usr/lib/ringleader/"
  done
  rm -f "$work"/worker/usr/lib/ringleader/libtorch_python.so
  worker_config+=(--env LD_LIBRARY_PATH=/usr/lib/ringleader --env NVIDIA_VISIBLE_DEVICES=all
    --env "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
fi
image ringleader-worker "$work/worker" ringleader-worker "${worker_config[@]}"
