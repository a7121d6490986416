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
    # A precompiled header of gcc means nothing to clang: tidy parses the real one instead.
    sources | grep '\.cc$' | { grep -E "${2:-.}" || true; } |
      xargs -r -P "$(nproc)" -n 4 clang-tidy --quiet -p "$build" --extra-arg=-Wno-unknown-warning-option
    ;;
  *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
