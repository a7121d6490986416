#!/usr/bin/env bash
# Everything that wants a machine full of GPUs, in one go: tests on all ranks, faults, the figures beside the dense peer,
# the longest sequence, weak scaling, and two nodes over the network. A part that fails does not keep the others from
# running; the end is a table of what passed, and the exit code is 0 if all of it did.
#
#   bench/full_run.sh --results DIR [--peer SCRIPT] [--bin DIR] [--gpus 4] [--parts "quickstart tests faults schemes peer
#                     longest weak nodes balance models"] [--sparse LIST] [--dense LIST] [--steps 2] [--share-gpus]
#                     [--commit NAME] [--dry-run]
#
#   --parts       in this order; a machine that is lent for minutes wants one call for every few of them
#   --peer        what bench/compare_peer.sh takes; without it there is no part `peer`
#   --gpus        GPUs of this machine. Lengths go with them, so that every GPU has as many tokens as with 4: the longest
#                 sequences are of 262,144 and 524,288 tokens a GPU, the nodes' of 131,072, weak scaling's of 65,536
#   --sparse, --dense  lengths beside the peer (default: 32,768, 65,536 and 131,072 tokens a GPU; 32768,131072)
#   --steps       counted steps of a case
#   --share-gpus  tests and faults of twice as many ranks as there are GPUs, as two hosts that share them: four ranks
#                 on two GPUs. Their speed says nothing
#   --dry-run     print the commands alone
#
# Run it from a bundle (deploy/bundle.sh --only '^(comm_nccl_test|attention_cuda_test|trainer_cuda_test|training_bench)$' FOLDER)
# or a build folder. The parts, and what they leave in DIR:
#   quickstart  deploy/quickstart.sh --gpu: a job of 131,072 tokens a GPU through the whole service; needs 80 GB of disk
#   tests    comm_nccl_test, attention_cuda_test's ring over NCCL, trainer_cuda_test
#   faults   tests/gpu/faults.sh: kill -9, hang, worker, coordinator and a full GPU in a job of two layers at 131,072 tokens
#   schemes  longca_gpu_rings.csv, .svg: every mask under every scheme, against fp64, by as many ranks as there are GPUs
#   peer     compare_peer.json
#   longest  longest.csv and offload.csv: the second with what layers keep in host memory
#   weak     weak.csv: the same tokens and visited tiles a GPU on 1, 2, ... GPUs, with full recomputation
#   nodes    two nodes on this machine, through sockets: nodes.csv, a flat ring against a hierarchical one; shared.csv, heads
#            shared out by half of the GPUs (USP) and by all of them (Ulysses); documents.csv, documents against stripes, also
#            as one node. Rows have GiB that ranks sent, and the share of a step that waited for them
#   balance  balance.json: batching in a group for every GPU and, of four and more, in groups of two
#   models   tests/gpu/models.sh: every shape against transformers; models.csv: Qwen2.5-7B and Llama-3.1-8B at 65,536 tokens a
#            GPU
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
results='' peer='' gpus=4 sparse='' dense=32768,131072 steps=2 model=qwen2.5-3b
parts="quickstart tests faults schemes peer longest weak nodes balance models" share='' dry='' commit=$(cat "$root/COMMIT" 2>/dev/null || echo unknown)
while (($#)); do
  case $1 in
    --share-gpus) share=1; shift; continue ;;
    --dry-run) dry=1; shift; continue ;;
    -h | --help) sed -n '2,41s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "full_run: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --results) results=$2 ;;
    --peer) peer=$(realpath -e "$2") || exit 2 ;;
    --bin) bin=$(realpath -e "$2") || exit 2 ;;
    --gpus) gpus=$2 ;;
    --parts) parts=$2 ;;
    --sparse) sparse=$2 ;;
    --dense) dense=$2 ;;
    --steps) steps=$2 ;;
    --commit) commit=$2 ;;
    *) echo "full_run: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ $results ]] || { echo "full_run: --results names the folder for logs and figures" >&2; exit 2; }
[[ $gpus =~ ^[1-9][0-9]*$ ]] || { echo "full_run: --gpus $gpus is no number of GPUs" >&2; exit 2; }
[[ $sparse ]] || sparse=$((32768 * gpus)),$((65536 * gpus)),$((131072 * gpus))
if [[ ! $dry ]]; then
  there=$({ nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true; } | wc -l)
  ((there >= gpus)) || { echo "full_run: this machine has $there GPUs, --gpus says $gpus" >&2; exit 2; }
fi
mkdir -p "$results"
results=$(realpath "$results")
cd "$root" || exit 2  # tests read tests/golden
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
[[ $dry ]] || if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
hardware="$gpus x $({ nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true; } | head -n 1)"

outcomes=() running=''
# Whoever stops this stops what it runs: ranks that are left behind would hold the memory of the next call's GPUs.
stop() {
  trap '' INT TERM
  if [[ $running ]]; then
    kill "$running" 2>/dev/null
    wait "$running"
    echo "== stopped in the midst of $name" >&2
  fi
  exit 143
}
trap stop INT TERM
try() {  # NAME SECONDS COMMAND...: its output to NAME.log, and the gist of it here
  local name=$1 limit=$2 code start=$SECONDS
  shift 2
  if [[ $dry ]]; then printf '%s:' "$name"; printf ' %q' "$@"; echo; return 0; fi
  timeout --kill-after=20 "$limit" "$@" >"$results/$name.log" 2>&1 &
  running=$!
  wait "$running"
  code=$?
  running=''
  outcomes+=("$name $code $((SECONDS - start))")
  echo "== $name: exit code $code after $((SECONDS - start)) s"
  if ((code)); then tail -n 25 "$results/$name.log"; else
    grep -E '^(\[  (PASSED|SKIPPED)|largest difference|20[0-9-]+,|\| (recompute|memory)|PASSED|kill -9|SIGSTOP|a full GPU|qwen|llama)|tok/s|costs the host' \
      "$results/$name.log" | cut -c1-300 | tail -n 24
  fi
}
bench() {  # NAME SECONDS FLAG...: of $model, $steps steps
  local name=$1 limit=$2
  shift 2
  try "$name" "$limit" "$bin/training_bench" --config "$root/bench/models/$model.json" --commit "$commit" \
    --hardware "$hardware" --steps "$steps" --csv "$results/$name.csv" "$@"
}

run_quickstart() {
  local work
  work=$(mktemp -d)
  try quickstart 1200 "$root/deploy/quickstart.sh" --gpu --dir "$work" --set "resources.trainers=$gpus" \
    --set "data.sequence_length=$((131072 * gpus))"
  [[ $dry ]] || cp "$work/summary.json" "$results/quickstart.json"
  rm -rf "$work"
}
run_tests() {
  local hosts=() environment=()
  if [[ $share ]]; then hosts=("$root/tests/gpu/hosts.sh" 2) environment=(env RINGLEADER_RANKS_PER_GPU=2); fi
  try comm_nccl_test 300 "${hosts[@]}" "$bin/comm_nccl_test"
  try attention_cuda_test 300 "${hosts[@]}" "$bin/attention_cuda_test" '--gtest_filter=*FourGpus*'
  try trainer_cuda_test 900 "${environment[@]}" "$bin/trainer_cuda_test"
}
run_faults() {
  local work common
  work=$(mktemp -d)
  common=("$root/tests/gpu/faults.sh" --bin "$bin" --layers 2)
  try faults 900 "${common[@]}" --dir "$work/one" --trainers "$gpus" --faults "kill hang worker coordinator memory"
  common+=(--dir "$work/two" --workers 2)
  if [[ $share ]]; then
    try faults_two_workers 900 "${common[@]}" --share-gpus --faults "kill hang worker coordinator"
  elif ((gpus % 2 == 0)); then
    try faults_two_workers 900 "${common[@]}" --trainers "$gpus" --faults "kill hang worker coordinator"
  fi
  rm -rf "$work"
}
run_peer() {
  [[ $peer ]] || { echo "== peer: no --peer, not run"; return; }
  try peer 3000 "$root/bench/compare_peer.sh" --peer "$peer" --bin "$bin" --gpus "$gpus" --sparse "$sparse" --dense "$dense" \
    --steps "$steps" --commit "$commit" --output "$results/compare_peer.json"
}
run_schemes() {
  try schemes 900 "$bin/ringleader-bench" --engine cuda --folder "$results" --ranks $((share ? 2 * gpus : gpus)) --tokens 32768 --repetitions 3
}
run_longest() {
  bench longest 1200 --gpus "$gpus" --mode sparse --tokens $((262144 * gpus)) --timeout 1100
  steps=1 bench offload 1200 --gpus "$gpus" --mode sparse --tokens $((524288 * gpus)) --timeout 1100
}
# Columns in the same number at every length, and a tenth more block diagonals a doubling: in longer sequences those that
# are chosen lie further back, where fewer blocks meet. So what a GPU visits stays the same within 2 % (printed).
run_weak() {
  local g
  for ((g = 1; g <= gpus; g *= 2)); do
    bench "weak_$g" 300 --gpus "$g" --mode sparse --tokens $((65536 * g)) --recompute full \
      --slash-share "$(awk "BEGIN {print 0.11 / $g * (1 + 0.1 * log($g) / log(2))}")"
  done
  [[ $dry ]] || python3 - "$results" <<'END'
import csv, glob, sys
rows = sorted((r for p in glob.glob(sys.argv[1] + "/weak_*.csv") for r in csv.DictReader(open(p))), key=lambda r: int(r["gpus"]))
if rows:
    with open(sys.argv[1] + "/weak.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
def visited(r): return float(r["density"]) * int(r["tokens"]) ** 2 / 2 / 128 ** 2 / int(r["gpus"])
for r in rows:
    rate = float(r["tokens_per_second"]) / int(r["gpus"])
    first = float(rows[0]["tokens_per_second"]) / int(rows[0]["gpus"])
    print(f"weak scaling: {r['gpus']} GPUs, {r['tokens']} tokens: {rate:.0f} tokens/s a GPU, {visited(r):.0f} tiles a head and "
          f"GPU, {rate / first:.3f} of {rows[0]['gpus']} GPU")
END
}
run_nodes() {
  local rings=flat
  ((gpus < 4)) || rings=flat,hierarchical  # one GPU a node makes no ring inside it
  local nodes=(--gpus "$gpus" --nodes 2 --mode sparse --tokens $((131072 * gpus)) --timeout 550)
  bench nodes 1200 "${nodes[@]}" --ring "$rings"
  if ((gpus >= 4)); then bench shared 1200 "${nodes[@]}" --heads $((gpus / 2)),"$gpus"; fi
  try documents 1800 env GPUS="$gpus" STEPS="$steps" BIN="$bin" "$root/bench/document_layout.sh" "$results/documents.csv"
}
run_balance() {
  local shapes=("${gpus}x1") shape
  if ((gpus >= 4 && gpus % 2 == 0)); then shapes+=("$((gpus / 2))x2"); fi
  for shape in "${shapes[@]}"; do
    try "balance_$shape" 900 "$root/bench/balance.sh" --gpus --bin "$bin" --groups "$shape" --only 'chatqa2|longalign|prolong-(order|dealt)'
  done
  [[ $dry ]] || cp "$root/bench/results/figures/balance.json" "$results/"
}
run_models() {
  try models 3000 "$root/tests/gpu/models.sh" --bin "$bin" --trainers "$gpus" all
  local model
  for model in qwen2.5-7b llama3.1-8b; do
    bench "$model" 600 --gpus "$gpus" --mode sparse --tokens $((65536 * gpus))
  done
  [[ $dry ]] || awk 'FNR > 1 || NR == 1' "$results"/{qwen2.5-7b,llama3.1-8b}.csv >"$results/models.csv"
}

for part in $parts; do
  case $part in
    quickstart) run_quickstart ;;
    tests) run_tests ;;
    faults) run_faults ;;
    peer) run_peer ;;
    longest) run_longest ;;
    weak) run_weak ;;
    nodes) run_nodes ;;
    schemes) run_schemes ;;
    balance) run_balance ;;
    models) run_models ;;
    *) echo "full_run: unknown part $part (see --help)" >&2; exit 2 ;;
  esac
done
[[ ! $dry ]] || exit 0
failed=0
printf '\n%-22s %20s %8s\n' part outcome seconds
for outcome in "${outcomes[@]}"; do
  read -r name code seconds <<<"$outcome"
  word=passed
  skipped=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) tests\?, .*/\1/p' "$results/$name.log")
  [[ -z $skipped ]] || word="passed, $skipped skipped"
  # A test that skipped everything found no GPU.
  grep -q '^\[  PASSED  \] 0 tests' "$results/$name.log" && word="skipped" failed=1
  ((code == 0)) || { word="failed ($code)" failed=1; }
  printf '%-22s %20s %8s\n' "$name" "$word" "$seconds"
done
exit "$failed"
