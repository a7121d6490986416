#!/usr/bin/env bash
# Measures what docs/balance.md promises and writes bench/results/figures/balance.json, a row each.
#
#   bench/balance.sh                          the dealing, on any machine, after a build of dealing_bench
#   bench/balance.sh --gpus [--config FILE] [--steps 12] [--dir FOLDER]
#                                             batching and tuning, on two GPUs of this machine: the same samples with
#                                             and without; from a checkout or a bundle (deploy/bundle.sh)
#   bench/balance.sh --one-gpu [...]          batching, and tuning on top of it, on one GPU, which plays two data-parallel groups in
#                                             turn (groups_bench); gradients are not exchanged. A model of the 3B's shape, an
#                                             eighteenth of its layers and vocabulary
#   bench/balance.sh --plan [...]             what `ringctl plan` says of a step against the step, on one GPU, in 24 cases: three
#                                             lengths of each pattern, density, documents, recomputation and precision, of the
#                                             same small model; what it reads of the machine is its latency table, no step
#   bench/balance.sh --cpus [--plan | --one-gpu] ...
#                                             the same on CPU ranks and short samples, to try the script: prints rows and writes
#                                             none
#
# --plan --dir FOLDER --again predicts anew what a call measured with that --dir. Rows that other calls measured stay; a row of docs/balance.md that nobody measured says so. --config: the model
# (default: bench/models/bytes-100m.json, of --plan and --one-gpu qwen2.5-3b.json); --steps: of a job (of --plan 6), a third of
# them warm up; of --one-gpu those that count (12).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
gpus='' plan='' one='' again='' engine=cuda divide=1 sequence=65536 config='' steps='' run=''
while (($#)); do
  case $1 in
    --gpus) gpus=1; shift; continue ;;
    --plan) gpus=1 plan=1; shift; continue ;;
    --one-gpu) gpus=1 one=1; shift; continue ;;
    --again) again=1; shift; continue ;;
    --cpus) gpus=1 engine=cpu divide=64 sequence=1024; shift; continue ;;
    --config) config=$2 ;;
    --steps) steps=$2 ;;
    --dir) run=$2 ;;
    -h | --help) sed -n '2,23p' "$0" | sed 's/^# \{0,1\}//'; exit ;;
    *) echo "balance: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
if [[ ! $steps ]]; then if [[ $plan ]]; then steps=6; else steps=12; fi; fi

if [[ ! $gpus ]]; then
  "$bin/dealing_bench" | python3 "$root/bench/balance_rows.py" dealing
  exit
fi

[[ $run ]] || { run=$(mktemp -d); keep=; }
mkdir -p "$run/logs"
run=$(realpath "$run")
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
trap 'stop_services; [[ ${keep-x} ]] || rm -rf "$run"' EXIT
trap 'exit 130' INT TERM

# A document of each length, of words that come again.
pack() {  # DISTRIBUTION [FOLDER EVAL_SHARE PART_OF_LENGTHS]
  local folder=${2:-$1}
  mkdir -p "$run/text-$folder"
  "$bin/dealing_bench" "$1" 400 | python3 -c '
import pathlib, random, sys
words = ["".join(random.Random(i).choices("abcdefgh", k=3 + i % 5)) for i in range(500)]
for number, length in enumerate(map(int, sys.stdin)):
    rng, length = random.Random(number), max(2, length // int(sys.argv[2]))
    text = " ".join(rng.choices(words, k=length // 3 + 1))[:length]
    (pathlib.Path(sys.argv[1]) / f"{number:04}.txt").write_text(text)' "$run/text-$folder" $((divide * ${4:-1}))
  "$bin/ringctl" data pack --input "$run/text-$folder" --output "$run/$folder" --eval-share "${3:-0}" >/dev/null
}

job() {  # NAME DATA CONTEXT GROUPS SAMPLES ATTENTION ANCHOR DEALING [LAYOUT]
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {train: ./$2/train, sequence_length: $sequence, batching: samples, overlong: split, dealing: $8}
attention: {$6$7}
parallelism: {context: $3, data: $4, layout: ${9:-auto}, replan: never}
training: {steps: 1000, global_batch: $5, learning_rate: 3e-4, seed: 1}
checkpoint: {directory: ./$1, every_steps: 1000}
resources: {trainers: 2, engine: $engine}
END
  measure "$1"
}

# Trains the job NAME.yaml until it has reported the steps, into NAME.steps.
measure() {  # NAME
  echo "balance: $1, at $SECONDS s"
  "$bin/ringctl" submit "$run/$1.yaml" >"$run/logs/$1.log" 2>&1 || { cat "$run/logs/$1.log" >&2; exit 1; }
  # The job's end, with a checkpoint and a model, is not measured.
  # Who has seen enough closes the pipe, of which the watch dies.
  { "$bin/ringctl" watch "$1" -o json 2>>"$run/logs/$1.log" || true; } | python3 -c '
import json, sys
wanted = int(sys.argv[1])
with open(sys.argv[2], "w") as out:
    for line in sys.stdin:
        part = json.loads(line)
        for step in part.get("steps", []):
            out.write(json.dumps(step) + "\n")
            if int(step["step"]) >= wanted:
                sys.exit()
        if part.get("job", {}).get("state") in ("FAILED", "CANCELLED", "SUCCEEDED"):
            sys.exit(part["job"].get("state_reason") or "it ended early")' "$steps" "$run/$1.steps" ||
    { "$bin/ringctl" logs "$1" 2>/dev/null | tail -n 20 >&2; exit 1; }
  "$bin/ringctl" cancel "$1" >/dev/null
  local deadline=$((SECONDS + 60))
  until [[ $("$bin/ringctl" get "$1" -o json) == *'"CANCELLED"'* ]]; do
    ((SECONDS < deadline)) || { echo "balance: $1 does not end" >&2; exit 1; }
    sleep 0.2
  done
}

# Prints the rows of what was measured, or writes them.
rows() {  # gpus | one | plan
  local hardware="CPU ranks, short samples" rows=("$1")
  if [[ $engine == cpu ]]; then
    rows=(print "$1")
  else
    hardware=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd, -)
  fi
  HARDWARE="$hardware" python3 "$root/bench/balance_rows.py" "${rows[@]}" "$run"
  echo "balance: $SECONDS s" >&2
}

# Documents of one length, so that every sequence holds the same ones.
pack_even() {  # NAME TOKENS COUNT
  mkdir -p "$run/text-$1"
  python3 -c '
import pathlib, random, sys
folder, tokens, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for number in range(count):  # a token a byte, and one that ends the document
    text = "".join(random.Random(number).choices("abcdefgh ", k=tokens - 1))
    (folder / f"{number:04}.txt").write_text(text)' "$run/text-$1" "$2" "$3"
  "$bin/ringctl" data pack --input "$run/text-$1" --output "$run/$1" --eval-share 0 >/dev/null
}

# The 3B's shape with an eighteenth of its layers and of its vocabulary: what attention, linear layers and the head take
# is in the 3B's proportions.
shrink_model() {
  python3 -c '
import json, sys
config = json.load(open(sys.argv[1]))
config["num_hidden_layers"] //= 18
config["vocab_size"] = max(512, -(-config["vocab_size"] // 18 // 128) * 128)
print(json.dumps(config))' "${config:-$root/bench/models/qwen2.5-3b.json}" >"$run/config.json"
}

# Writes a job of one trainer, and what it is for people.
plan_job() {  # NAME TOKENS CASE DATA LAYOUT ATTENTION TRAINING RECOMPUTE
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {$4, sequence_length: $2}
attention: {$6}
parallelism: {layout: $5, replan: never}
training: {steps: 1000, global_batch: 1, learning_rate: 3e-4, seed: 1$7}
checkpoint: {directory: ./$1, every_steps: 1000}
resources: {trainers: 1, engine: $engine, recompute: $8}
END
  echo "$2 tokens, $3" >"$run/$1.case"
}

measure_cases() {
  local tokens name number=0 what documents data layout attention training recompute auto=() full=() fp8=()
  shrink_model
  pack LongAlign-like
  pack_even eighths $((sequence / 8)) 64
  local slash='pattern: vertical_slash, select: top_k, density:'
  # The first job of a pattern measures its latency table: the longest, and of dense attention one with documents.
  for tokens in $((2 * sequence)) $sequence $((sequence / 2)); do
    while IFS='|' read -ru 3 what documents attention training recompute; do
      printf -v name 'plan-%02d' "$number"
      number=$((number + 1))
      data='train: ./LongAlign-like/train, document_mask: false' layout=auto
      [[ ! $documents ]] || { data='train: ./eighths/train' layout=striped; }
      plan_job "$name" "$tokens" "$what" "$data" "$layout" "$attention" "$training" "$recompute"
      [[ ! $documents ]] || echo "$((sequence / 8))" >"$run/$name.documents"
      case $training$recompute in  # a call of jobs_bench has one model
        auto) auto+=("$run/$name.yaml") ;;
        full) full+=("$run/$name.yaml") ;;
        *) fp8+=("$run/$name.yaml") ;;
      esac
    done 3<<END
dense, documents of $((sequence / 8)) tokens|apart|pattern: dense||auto
dense||pattern: dense||auto
dense, layers computed again||pattern: dense||full
dense, fp8||pattern: dense|, precision: fp8|auto
vertical-slash at 5 %||$slash 0.05||auto
vertical-slash at 20 %||$slash 0.2||auto
vertical-slash at 5 %, layers computed again||$slash 0.05||full
key groups at 10 %||pattern: key_groups, density: 0.1||auto
END
  done
  "$bin/jobs_bench" --steps "$steps" --measured "$run/measured.json" "${auto[@]}"
  "$bin/jobs_bench" --steps "$steps" --measured "$run/measured.json" "${full[@]}"
  "$bin/jobs_bench" --steps "$steps" --measured "$run/measured.json" "${fp8[@]}"
}

# What `ringctl plan` says of each case.
predict() {
  local case name flags
  for case in "$run"/plan-*.case; do
    name=${case%.case} flags=()
    [[ ! -e $name.documents ]] || flags=(--documents "$(<"$name.documents")")
    "$bin/ringctl" plan "$name.yaml" --measured "$run/measured.json" "${flags[@]}" -o json >"$name.plan"
  done
}

# Plays two groups in turn: NAME.steps has a line of each way and step.
play_groups() {  # NAME DATA SEQUENCE SAMPLES ATTENTION WAYS [WARM_UP HELD_OUT]
  [[ -d $run/$2 ]] || pack "$2"
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {train: ./$2/train, sequence_length: $(($3 / divide)), batching: samples, overlong: split${8:+, eval: ./$2/eval}}
attention: {$5}
parallelism: {context: 1, data: 2, replan: never}
training: {steps: 1000, global_batch: $4, learning_rate: 3e-4, seed: 1${8:+, eval_sequences: $8}}
checkpoint: {directory: ./$1, every_steps: 1000}
resources: {trainers: 2, engine: $engine}
END
  echo "balance: $1, at $SECONDS s"
  "$bin/groups_bench" "$run/$1.yaml" --ways "$6" --steps "$steps" --warm-up "${7:-3}" --measured "$run/measured.json" \
    >"$run/$1.steps"
}

# The held-out loss after training with fixed and with moved budgets, on samples of a quarter of the length.
learn() {
  pack ChatQA2-like quarter 0.1 4
  steps=$((12 * steps))
  for way in by_cost tuned; do
    play_groups "learn-${way/by_cost/fixed}" quarter 16384 4 "$1" "$way" 8 32
  done
}

if [[ $one ]]; then
  shrink_model
  play_groups prolong ProLong-like 262144 16 'pattern: dense' in_order,by_cost
  play_groups chatqa2 ChatQA2-like 65536 16 'pattern: dense' in_order,by_cost
  play_groups longalign LongAlign-like 73728 16 'pattern: dense' in_order,by_cost
  tuned='pattern: vertical_slash, vertical_mass: 0.8, slash_mass: 0.8, balance: {anchor: mean, tolerance: 0.1}'
  steps=$((2 * steps))
  play_groups four ChatQA2-like 65536 4 "$tuned" by_cost,tuned 8
  learn "$tuned"
  rows one
  exit
fi
if [[ $plan ]]; then
  [[ $again ]] || measure_cases
  predict
  rows plan
  exit
fi
start_coordinator
start_worker balance --trainers 2
await_nodes 1
cp "${config:-$root/bench/models/bytes-100m.json}" "$run/config.json"
slash='pattern: vertical_slash, vertical_mass: 0.8, slash_mass: 0.8'
for data in ChatQA2-like LongAlign-like ProLong-like; do
  pack $data
  name=${data%%-*}
  name=${name,,}
  job "$name-order" $data 1 2 16 'pattern: dense' '' in_order
  job "$name-dealt" $data 1 2 16 'pattern: dense' '' by_cost
done
job prolong-documents ProLong-like 2 1 16 'pattern: dense' '' by_cost documents
for anchor in none mean; do
  balance=", balance: {anchor: $anchor, tolerance: 0.1}"
  job "groups-$anchor" ChatQA2-like 1 2 4 "$slash" "$balance" by_cost
  job "ring-$anchor" ChatQA2-like 2 1 2 'pattern: xattention, threshold: 0.8' "$balance" by_cost
done
rows gpus
