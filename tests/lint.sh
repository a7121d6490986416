#!/usr/bin/env bash
# Checks formatting and, with --tidy, runs clang-tidy over every source that the build folder knows.
#
#   --format      clang-format only (what ctest runs)
#   --fix         rewrite the files in place instead
#   --tidy [RE]   clang-tidy, on the files whose path matches RE
#
#   RINGLEADER_BUILD  build folder (default: build/): configured, and with ringleader_proto built
#   RINGLEADER_JOBS   files at a time (default: the number of cores)
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."

sources() { git ls-files -co --exclude-standard '*.cc' '*.h' '*.cu' '*.cuh'; }

# Sets `options`, with which clang-tidy is affordable; what they need is kept in $1/tidy.
tidy_options() {
  local build=$1 tidy=$1/tidy llvm flags
  mkdir -p "$tidy"
  llvm=/usr/lib/llvm-$(clang-tidy --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p')

  # clang refuses gcc's precompiled header where it finds one: it gets its own, from a folder without.
  local header=$build/CMakeFiles/ringleader_torch_pch.dir/cmake_pch.hxx
  if [[ $build/compile_commands.json -nt $tidy/compile_commands.json ]]; then
    sed "s#[^ \"]*/cmake_pch.hxx#$tidy/cmake_pch.hxx#g" "$build/compile_commands.json" >"$tidy/commands.new"
    if [[ -f $header ]]; then
      cp "$header" "$tidy/"
      read -ra flags < <(sed -n 's/.*"command": "[^ ]* \(.*\) -include .*torch_pch\.cc",$/\1/p' "$tidy/commands.new")
      "$llvm/bin/clang++" "${flags[@]}" -w -x c++-header "$tidy/cmake_pch.hxx" -o "$tidy/cmake_pch.hxx.pch"
    fi
    mv "$tidy/commands.new" "$tidy/compile_commands.json"
  fi
  options=("-p=$tidy" --quiet --extra-arg=-Wno-unknown-warning-option)

  if [[ -d $llvm/include/clang && -d $llvm/include/llvm ]]; then
    if [[ tests/lint_scope.cc -nt $tidy/scope.so ]]; then
      c++ -std=c++17 -O1 -fno-rtti -fPIC -shared -isystem "$llvm/include" tests/lint_scope.cc -o "$tidy/scope.so"
    fi
    options+=("--load=$tidy/scope.so")
  else
    echo "lint: clang-tidy will read all of every system header; apt-get install libclang-dev llvm-dev spares it" >&2
  fi
}

case ${1:---format} in
  --format) sources | xargs -r clang-format --dry-run -Werror ;;
  --fix) sources | xargs -r clang-format -i ;;
  --tidy)
    build=$(realpath "${RINGLEADER_BUILD:-build}")
    [[ -f $build/compile_commands.json ]] || { echo "lint: $build is not configured; run tests/run.sh first" >&2; exit 2; }
    tidy_options "$build"
    sed -n "s#^ *\"file\": \"$PWD/\(.*\)\",\{0,1\}\$#\1#p" "$build/compile_commands.json" | grep '\.cc$' | sort -u |
      grep -Fxf <(sources) | { grep -E "${2:-.}" || true; } |
      xargs -r -P "${RINGLEADER_JOBS:-$(nproc)}" -n 4 clang-tidy "${options[@]}"
    ;;
  *) echo "lint: unknown option $1 (see --help)" >&2; exit 2 ;;
esac
