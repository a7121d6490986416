# shellcheck shell=bash disable=SC2034
# Sourced by tests of whole runs: $root and $bin, $work, a folder that goes when they end, and `fail WHY...`, which shows the
# end of every log in it.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bin=${RINGLEADER_BUILD:-$root/build}/bin
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "FAILED: $*" >&2
  find "$work" -name '*.log' -exec tail -n 20 {} + >&2
  exit 1
}
