# shellcheck shell=bash
# Sourced: puts LibTorch, CUDA and NCCL on LD_LIBRARY_PATH, behind a bundle's own libraries.
#
# They come from RINGLEADER_TORCH_ROOT (the site-packages folder that holds torch/), or from where python3 imports torch,
# or from /usr/local/cuda.

use_gpu_libraries() {  # [BUNDLE]
  local root folder path=
  root=${RINGLEADER_TORCH_ROOT:-$(python3 -c 'import importlib.util, os
print(os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin)))' 2>/dev/null || true)}
  [[ -z ${1:-} ]] || path=$(realpath "$1/lib"):
  if [[ -n $root ]]; then
    path+=$root/torch/lib:
    for folder in "$root"/nvidia/*/lib; do [[ -d $folder ]] && path+=$folder:; done
  fi
  export LD_LIBRARY_PATH=$path/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}
