#!/usr/bin/env bash
# Runs every GPU test and bench of a bundle (deploy/bundle.sh) and ends with a summary; the exit code is 0 when all
# passed or were skipped for want of a GPU.
#
#   run_gpu.sh BUNDLE [--results FOLDER] [--only PATTERN] [--no-bench] [--sanitize]
#
#   --results   where the benches' CSV files and all logs go (default: BUNDLE/results)
#   --only      run binaries whose name matches this extended regular expression
#   --sanitize  run the tests under compute-sanitizer's four tools instead, small shapes only
#
# Where LibTorch and the CUDA libraries come from: deploy/gpu_libraries.sh.
set -uo pipefail
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  '') echo "run_gpu: it wants the folder of a bundle (see --help)" >&2; exit 2 ;;
  -*) echo "run_gpu: unknown option $1, or no BUNDLE before it (see --help)" >&2; exit 2 ;;
esac
bundle=$1
shift
results=$bundle/results only=. benches=1 sanitize=0
while (($#)); do
  case $1 in
    --results) results=${2:?--results needs a folder}; shift 2 ;;
    --only) only=${2:?--only needs a pattern}; shift 2 ;;
    --no-bench) benches=0; shift ;;
    --sanitize) sanitize=1; shift ;;
    *) echo "run_gpu: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
[[ -d $bundle/bin ]] || { echo "run_gpu: $bundle/bin is missing; make a bundle with deploy/bundle.sh" >&2; exit 2; }
mkdir -p "$results"
bundle=$(realpath "$bundle") results=$(realpath "$results")
cd "$bundle" || exit 2  # tests read tests/golden

# shellcheck source=deploy/gpu_libraries.sh
source "$bundle/deploy/gpu_libraries.sh"
use_gpu_libraries "$bundle"
commit=$(cat "$bundle/COMMIT" 2>/dev/null || echo unknown)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo "run_gpu: no GPU; tests will say SKIPPED"

failed=() passed=0
record() {  # NAME EXIT_CODE LOG
  if (($2 == 0)); then ((++passed)); else failed+=("$1"); echo "--- $1 failed, the end of $3:"; tail -n 40 "$3"; fi
}

for test in "$bundle"/bin/*_test; do
  name=$(basename "$test")
  [[ -x $test && $name =~ $only ]] || continue
  if ((sanitize)); then
    for tool in memcheck racecheck initcheck synccheck; do
      log=$results/$name.$tool.log
      RINGLEADER_SMALL_SHAPES=1 compute-sanitizer --tool "$tool" --error-exitcode 1 "$test" >"$log" 2>&1
      record "$name ($tool)" $? "$log"
      echo "$name $tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1)"
    done
  else
    log=$results/$name.log
    "$test" >"$log" 2>&1
    record "$name" $? "$log"
    echo "$name: $(grep -E '^\[  (PASSED|SKIPPED|FAILED)' "$log" | grep -E '[0-9]+ test' | tr '\n' ' ')"
  fi
done
if ((benches && !sanitize)); then
  for bench in "$bundle"/bin/*_bench; do
    name=$(basename "$bench")
    [[ -x $bench && $name =~ $only ]] || continue
    log=$results/$name.log
    "$bench" --csv "$results/$name.csv" --commit "$commit" >"$log" 2>&1
    record "$name" $? "$log"
    cat "$log"
  done
fi

echo "run_gpu: $passed passed, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
((${#failed[@]} == 0))
