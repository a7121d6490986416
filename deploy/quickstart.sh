#!/usr/bin/env bash
# From a fresh Debian 12 machine to a trained model: installs what is missing, builds, starts one coordinator and two
# workers on loopback, packs real text into token shards, trains on it and follows the job live. Ctrl-C stops it all.
#
#   --dir DIR     run folder: tokens, logs, database, checkpoints, summary.json (default: ./quickstart-run). A call begins anew in
#                 the folder of an earlier one, which it knows by the file .ringleader-quickstart; it takes no other that holds something
#   --text DIR    the text to train on: every file that is text (default: the header files under /usr/include)
#   --gpu         on this machine's GPUs instead: the Qwen2.5-3B shape at 524,288 tokens on 4 GPUs, one worker. Runs from a
#                 bundle (deploy/bundle.sh) where there is no compiler
#   --layers N    with --gpu: only so many layers, for fewer or smaller GPUs
#   --set K=V     override a field of the job file, e.g. --set training.steps=10 (repeatable)
#   --keep        leave the coordinator and the workers running at the end
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
run=$PWD/quickstart-run text=/usr/include keep='' gpu='' layers='' overrides=()
suffixes=(--suffix .h --suffix .hpp --suffix .c)
while (($#)); do
  case $1 in
    --dir) run=$(realpath -m "${2:?--dir needs a folder}"); shift 2 ;;
    --text) text=$(realpath -e "${2:?--text needs a folder}") suffixes=(); shift 2 ;;
    --set) overrides+=(--set "${2:?--set needs key=value}"); shift 2 ;;
    --gpu) gpu=1; shift ;;
    --layers) layers=${2:?--layers needs a number}; shift 2 ;;
    --keep) keep=1; shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "quickstart: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
[[ -z $layers || $gpu ]] || { echo "quickstart: --layers goes with --gpu" >&2; exit 2; }

say() { printf '\033[1m%s\033[0m\n' "== $*"; }

# A bundle brings its binaries; a checkout builds them.
build=${RINGLEADER_BUILD:-$root/build}
bin=$build/bin
[[ -f $root/CMakeLists.txt ]] || bin=$root/bin

configure() {  # CMAKE-OPTION...
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$run/logs/configure.log" ||
    { tail -n 30 "$run/logs/configure.log" >&2; exit 1; }
}

installing=
build_binaries() {
  if [[ -e $build/build.ninja ]] && ! grep -q '^RINGLEADER_TORCH:BOOL=OFF' "$build/CMakeCache.txt"; then
    "$root/deploy/install_deps.sh"
    configure
  else
    # The first time, LibTorch (most of a gigabyte) is fetched while all that does not need it compiles.
    "$root/deploy/install_deps.sh" --packages
    setsid "$root/deploy/install_deps.sh" --libtorch &
    installing=$!
    # ccache then takes a source's headers from the compiler, instead of preprocessing each source once more.
    export CCACHE_DEPEND=1
    configure -DRINGLEADER_TORCH=OFF -DRINGLEADER_CUDA=OFF
    cmake --build "$build" --target ringleader-coordinator ringleader-worker ringctl
    wait "$installing"
    installing=
    configure -DRINGLEADER_TORCH=ON -DRINGLEADER_CUDA=AUTO
  fi
  cmake --build "$build" --target ringleader-coordinator ringleader-worker ringleader-trainer ringctl
}
stop_installing() {
  [[ -z $installing ]] || kill -TERM -- "-$installing" 2>/dev/null || true
}

# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"

# What is replaced is this script's own: what an earlier call left in a folder that it marked, empty as it was.
marker=$run/.ringleader-quickstart
if [[ -e $run && ! -f $marker ]]; then
  [[ -d $run && -z $(ls -A "$run") ]] || {
    echo "quickstart: $run holds what no quickstart left there (no .ringleader-quickstart in it); give another --dir, or remove it yourself" >&2
    exit 1
  }
fi
mkdir -p "$run/logs"
echo "deploy/quickstart.sh replaces what is in this folder at its next call." >"$marker"
# Held by this script and by the services that it starts: what they work in is not replaced under them.
exec {lock}<"$marker"
flock -n "$lock" || {
  echo "quickstart: another call, or what it left running, uses $run; stop that, or name another folder with --dir" >&2
  exit 1
}
trap 'stop_installing; stop_services' EXIT
trap 'echo; echo "quickstart: stopping"; exit 130' INT
trap 'exit 143' TERM

if [[ $bin == "$build/bin" ]]; then
  say "Building (the first time takes a while)"
  build_binaries
fi
if [[ $gpu || $bin == "$root/bin" ]]; then
  # shellcheck source=deploy/gpu_libraries.sh
  source "$root/deploy/gpu_libraries.sh"
  if [[ $bin == "$root/bin" ]]; then use_gpu_libraries "$root"; else use_gpu_libraries; fi
fi

say "Packing $text into token shards"
if [[ $gpu ]]; then
  job=headers-512k
  cp "$root/deploy/quickstart/gpu_config.json" "$run/"
  cp "$root/deploy/quickstart/gpu_job.yaml" "$run/job.yaml"
  [[ -z $layers ]] || sed -i "s/\"num_hidden_layers\": [0-9]*/\"num_hidden_layers\": $layers/" "$run/gpu_config.json"
else
  job=headers-16k
  cp "$root/deploy/quickstart/"{config.json,job.yaml} "$run/"
fi
# A run folder is for one run: a second call starts from the beginning.
rm -rf "$run/tokens" "$run/coordinator" "$run/worker-a" "$run/worker-b" "$run/checkpoints" "$run/summary.json"
"$bin/ringctl" data pack --input "$text" --output "$run/tokens" "${suffixes[@]}"

say "Starting a coordinator and workers"
start_coordinator --page-listen 127.0.0.1:0
echo "In a browser: $(sed -n 's/.* the page is //p' "$run/logs/coordinator.log")"
if [[ $gpu ]]; then
  start_worker a  # a trainer for every GPU
  await_nodes 1
else
  start_worker a --trainers 2
  start_worker b --trainers 2
  await_nodes 2
fi
"$bin/ringctl" nodes

say "Training: ringctl submit $run/job.yaml --follow"
"$bin/ringctl" submit "$run/job.yaml" "${overrides[@]}" --follow
"$bin/ringctl" report "$job" -o json >"$run/summary.json"

say "Done"
"$bin/ringctl" report "$job"
cat <<END

The trained model, as a Hugging Face folder:  $run/checkpoints/model
The figures above, as JSON:                   $run/summary.json
Logs of every process:                        $run/logs

Next:
  deploy/quickstart.sh --text DIR                    train on your own text
  deploy/quickstart.sh --set attention.pattern=dense train the same model with dense attention, and compare
  $bin/ringctl plan $run/job.yaml --nodes 128 --gpus 8
  docs/job_file.md                                   every field of a job
END
if [[ $keep ]]; then
  trap - EXIT
  echo "Still running (--keep): export RINGLEADER_ADDRESS=$RINGLEADER_ADDRESS; stop with: kill ${pids[*]}"
fi
