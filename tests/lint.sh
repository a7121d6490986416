#!/usr/bin/env bash
# Checks formatting and, with --tidy, runs clang-tidy over every source that the build folder knows.
#
#   --format      clang-format only (what ctest runs)
#   --fix         rewrite the files in place instead
#   --tidy [RE]   clang-tidy, on the files whose path matches RE
set -euo pipefail
cd "$(dirname "$0")/.."

sources() { git ls-files -co --exclude-standard '*.cc' '*.h' '*.cu' '*.cuh'; }

case ${1:---format} in
  --format) sources | xargs -r clang-format --dry-run -Werror ;;
  --fix) sources | xargs -r clang-format -i ;;
  --tidy)
    build=${RINGLEADER_BUILD:-build}
    [[ -f $build/compile_commands.json ]] || { echo "lint: $build is not configured; run tests/run.sh first" >&2; exit 2; }
    # clang refuses gcc's precompiled header where it finds one: it gets the plain header, in a folder without.
    database=$(mktemp -d)
    trap 'rm -rf "$database"' EXIT
    header=$build/CMakeFiles/ringleader_torch_pch.dir/cmake_pch.hxx
    [[ ! -f $header ]] || cp "$header" "$database/"
    sed "s#[^ \"]*/cmake_pch.hxx#$database/cmake_pch.hxx#g" "$build/compile_commands.json" >"$database/compile_commands.json"
    sources | grep '\.cc$' | { grep -E "${2:-.}" || true; } |
      xargs -r -P "$(nproc)" -n 4 clang-tidy --quiet -p "$database" --extra-arg=-Wno-unknown-warning-option
    ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
