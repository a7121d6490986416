#!/usr/bin/env bash
# What each attention pattern keeps of what dense attention learns (docs/quality.md): trains a model dense until it
# answers what documents ask, goes on from it with each pattern at several densities, and asks both ways.
#
#   bench/quality/run.sh --dir DIR [--plan gpu|4096|8192|65536|long|tuning|smoke|tuning-smoke] [--engine cuda|cpu] [--text DIR] [--seconds N] [--at-once N]
#                        [--bin DIR] [--output FOLDER]
#
#   --plan     4096, 8192, 65536: the same in sequences of so many tokens, XAttention's longer strides at 65,536 alone; long: of 131,072, at 5 and 10 %, learned on two GPUs if there are;
#              tuning: instead, patterns with and without attention.balance, of two data-parallel groups, on two GPUs;
#              DIR/tuning.json has what was found (bench/balance.sh --recall makes rows of it)
#   --dir      keeps what is done; a call that ran out of time (exit code 75) is repeated, and goes on there
#   --seconds  begin no job that would not end in so many seconds, and end by then
#   --text     a folder of text for the task of that name (default: /usr/include)
#   --at-once  so many of the patterns' jobs share the machine, its GPUs given to them in turn
#              (default: 3 with cuda, 1 with cpu)
#   --output   where table, picture and figures go (default: DIR); of what is done so far where time ran out
#
# From a checkout or from a bundle (deploy/bundle.sh). One GPU, some ten minutes in all.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
command=bench/quality/run.sh  # what rows name: without where things are kept
if [[ -f $root/CMakeLists.txt ]]; then bin=${RINGLEADER_BUILD:-$root/build}/bin; else bin=$root/bin; fi
run='' plan=gpu engine=cuda text=/usr/include seconds=86400 output='' at_once=''
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "quality: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --bin | --dir | --output) ;;
    --text) command+=" $1 $(basename "$2")" ;;
    *) command+=" $1 $2" ;;
  esac
  case $1 in
    --dir) run=$(realpath -m "$2") ;;
    --plan) plan=$2 ;;
    --engine) engine=$2 ;;
    --text) text=$(realpath -e "$2") || exit 2 ;;
    --seconds) seconds=$2 ;;
    --at-once) at_once=$2 ;;
    --bin) bin=$(realpath -e "$2") || exit 2 ;;
    --output) output=$(realpath -m "$2") ;;
    *) echo "quality: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ $at_once ]] || { [[ $engine == cuda && $plan != tuning* ]] && at_once=3 || at_once=1; }
[[ $at_once =~ ^[1-9][0-9]?$ ]] || { echo "quality: --at-once is a number of jobs from 1 to 99, not '$at_once'" >&2; exit 2; }
[[ $run ]] || { echo "quality: --dir names the folder that keeps what is done" >&2; exit 2; }
mkdir -p "$run/logs"
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap stop_services EXIT
trap 'exit 130' INT TERM

# A job that was broken off begins anew: nothing of earlier services is needed.
rm -rf "$run/coordinator" "$run"/worker-quality-*
start_coordinator
hardware="$(nproc) CPU cores" ring=2 nodes=$at_once
if [[ $engine != cpu ]]; then
  ring=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 2 | wc -l)
  hardware=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed -E 's/^ *([0-9]+) /\1 x /; s/^1 x //' | paste -sd,)
fi
# A worker's slots are GPUs of their own; several workers share one.
if [[ $plan == tuning* ]]; then
  for ((i = 1; i <= at_once; ++i)); do start_worker "quality-$i" --trainers 2; done
else
  start_workers "$at_once" quality
  if ((ring > 1)); then start_worker quality-ring --trainers "$ring" && ((++nodes)); fi
fi
await_nodes "$nodes"
commit=$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
code=0
python3 "$root/bench/quality/suite.py" --dir "$run" --plan "$plan" --engine "$engine" --text "$text" \
  --seconds "$((seconds - SECONDS))" --began-before "$SECONDS" --at-once "$at_once" --ring "$ring" --ringctl "$bin/ringctl" \
  --hardware "$hardware" --commit "$commit" --command "$command" || code=$?
[[ ! -e $run/quality.json ]] || python3 "$root/bench/quality/report.py" "$run/quality.json" --output "${output:-$run}"
exit "$code"
