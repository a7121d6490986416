#!/usr/bin/env bash
# Measures what docs/balance.md promises and writes bench/results/figures/balance.json, a row each.
#
#   bench/balance.sh                          the dealing, on any machine, after a build of dealing_bench
#   bench/balance.sh --gpus [--config FILE] [--steps 12] [--dir FOLDER] [--only PATTERN] [--groups 2x1] [--bin DIR]
#                                             batching and tuning, on two GPUs of this machine: the same samples with
#                                             and without; from a checkout or a bundle (deploy/bundle.sh)
#                                             --only: of its jobs those whose name matches this extended regular expression
#                                             --groups: batching alone, in so many data-parallel groups of so many GPUs each
#   bench/balance.sh --one-gpu [...]          batching, and tuning on top of it, on one GPU, which plays two data-parallel groups in
#                                             turn (groups_bench); gradients are not exchanged. A model of the 3B's shape, an
#                                             eighteenth of its layers and vocabulary
#   bench/balance.sh --plan [...]             what `ringctl plan` says of a step against the step, on one GPU, in 24 cases: three
#                                             lengths of each pattern, density, documents, recomputation and precision, of the
#                                             same small model; what it reads of the machine is its latency table, no step
#   bench/balance.sh --plan --gpus [...]      the same of two ranks, through the whole service on two GPUs of this machine: three
#                                             lengths of each layout, ring, pattern, density and documents
#   bench/balance.sh --live [--sockets] [...] a dense job of two GPUs whose documents grow from 4K tokens to 128K in mid-run: live
#                                             plans against the best fixed plan of each half, with the same small model;
#                                             --sockets: two workers that NCCL takes for machines of their own
#   bench/balance.sh --recall [--dir FOLDER] [--seconds N] [--text DIR]
#                                             answers of the recall tasks with tuning and without, on two GPUs (bench/quality/run.sh,
#                                             --plan tuning, which has these options); exit code 75: repeat it with the same --dir
#   bench/balance.sh --cpus [--plan [--gpus] | --one-gpu | --live | --recall] ...
#                                             the same on CPU ranks and short samples, to try the script: prints rows and writes
#                                             none
#
# --plan --dir FOLDER --again predicts anew what a call measured with that --dir. Rows that other calls measured stay; a row of docs/balance.md that nobody measured says so. --config: the model
# (default: bench/models/bytes-100m.json, of --plan, --one-gpu and --live qwen2.5-3b.json); --steps: of a job (of --plan 6), a third
# of them warm up; of --one-gpu those that count (12); of --live those with long documents (56), after three times as many with
# short ones.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
gpus='' plan='' one='' live='' recall='' pair='' sockets='' again='' only=. groups=2x1 engine=cuda divide=1 sequence=65536 config='' steps='' run=''
suite=()
while (($#)); do
  case $1 in
    --gpus) gpus=1 pair=1; shift; continue ;;
    --plan) gpus=1 plan=1; shift; continue ;;
    --one-gpu) gpus=1 one=1; shift; continue ;;
    --live) gpus=1 live=1; shift; continue ;;
    --recall) gpus=1 recall=1; shift; continue ;;
    --sockets) sockets=1; shift; continue ;;
    --again) again=1; shift; continue ;;
    --cpus) gpus=1 engine=cpu divide=64 sequence=1024; shift; continue ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "balance: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --config) config=$2 ;;
    --steps) steps=$2 ;;
    --only) only=$2 ;;
    --groups) groups=$2 ;;
    --bin) bin=$(realpath -e "$2") || exit 2 ;;
    --dir) run=$2 ;;
    --seconds | --text) suite+=("$1" "$2") ;;
    *) echo "balance: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ $recall || ! ${suite[*]} ]] || { echo "balance: ${suite[0]} goes with --recall (see --help)" >&2; exit 2; }
[[ $groups =~ ^([1-9][0-9]?)x([1-9][0-9]?)$ ]] || { echo "balance: --groups is GROUPSxGPUS, not '$groups'" >&2; exit 2; }
trainers=$((BASH_REMATCH[1] * BASH_REMATCH[2])) context=${BASH_REMATCH[2]}
if [[ ! $steps ]]; then if [[ $plan ]]; then steps=6; elif [[ $live ]]; then steps=56; else steps=12; fi; fi

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

# Trains a job until it has reported the steps or, where `last` says which step is its last, to its end. `init`: its model where
# that is not random; `held_out`: samples of the data's evaluation at the end.
job() {  # NAME DATA CONTEXT GROUPS SAMPLES ATTENTION ANCHOR DEALING [LAYOUT]
  [[ $1 =~ $only ]] || return 0
  cat >"$run/$1.yaml" <<END
name: $1
model: {${init:-config: ./config.json, init: random}}
data: {train: ./$2/train${held_out:+, eval: ./$2/eval}, sequence_length: $sequence, batching: samples, overlong: split, dealing: $8}
attention: {$6$7}
parallelism: {context: $3, data: $4, layout: ${9:-auto}, replan: never}
training: {steps: ${last:-1000}, global_batch: $5, learning_rate: 3e-4, seed: 1${held_out:+, eval_sequences: $held_out}}
checkpoint: {directory: ./$1, every_steps: 1000}
resources: {trainers: $(($3 * $4)), engine: $engine}
END
  if [[ ${last-} ]]; then finish "$1"; else measure "$1"; fi
}

# Trains the job NAME.yaml to its end; its steps are in NAME.steps then, and with its evaluations in NAME.csv.
finish() {  # NAME
  echo "balance: $1, at $SECONDS s"
  "$bin/ringctl" submit "$run/$1.yaml" --follow >"$run/logs/$1.log" 2>&1 || { tail -n 20 "$run/logs/$1.log" >&2; exit 1; }
  "$bin/ringctl" history "$1" -o jsonl >"$run/$1.steps"
  "$bin/ringctl" history "$1" -o csv >"$run/$1.csv"
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
rows() {  # gpus | one | plan | pair-plan | live | sockets-live | recall
  local hardware="CPU ranks, short samples" rows=("$1")
  if [[ $engine == cpu ]]; then
    rows=(print "$1")
  else
    hardware=$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | sed 's/^ *//' | paste -sd, -)
  fi
  ONLY=${only#.} SHAPE=$groups HARDWARE="$hardware" python3 "$root/bench/balance_rows.py" "${rows[@]}" "$run"
  echo "balance: $SECONDS s" >&2
}

# Documents of the lengths that are read, a token a byte and one that ends each.
pack_lengths() {  # NAME
  mkdir -p "$run/text-$1"
  python3 -c '
import pathlib, random, sys
for number, tokens in enumerate(map(int, sys.stdin)):
    text = "".join(random.Random(number).choices("abcdefgh ", k=min(tokens, 4096)))  # what follows repeats it
    text = (text * (tokens // len(text) + 1))[:tokens - 1]
    (pathlib.Path(sys.argv[1]) / f"{number:05}.txt").write_text(text)' "$run/text-$1"
  "$bin/ringctl" data pack --input "$run/text-$1" --output "$run/$1" --eval-share 0 >/dev/null
}

# Documents of one length, so that every sequence holds the same ones.
pack_even() {  # NAME TOKENS COUNT
  # shellcheck disable=SC2046
  printf "$2%.0s\n" $(seq "$3") | pack_lengths "$1"
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

# Writes a job of packed sequences, one a step.
packed_job() {  # NAME TRAINERS TOKENS DATA ATTENTION PARALLELISM [TRAINING RECOMPUTE]
  cat >"$run/$1.yaml" <<END
name: $1
model: {config: ./config.json, init: random}
data: {$4, sequence_length: $3}
attention: {$5}
parallelism: {$6}
training: {steps: 1000, global_batch: 1, learning_rate: 3e-4, seed: 1${7:-}}
checkpoint: {directory: ./$1, every_steps: 0}
resources: {trainers: $2, engine: $engine, recompute: ${8:-auto}}
END
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
      packed_job "$name" 1 "$tokens" "$data" "$attention" "layout: $layout, replan: never" "$training" "$recompute"
      echo "$tokens tokens, $what" >"$run/$name.case"
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
dense, fp8 in all layers||pattern: dense|, precision: fp8_all_layers|auto
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

# The same of two ranks, each case a job of the service.
measure_pair_cases() {
  local tokens name number=0 what documents layout ring attention data
  shrink_model
  pack LongAlign-like
  pack_even eighths $((sequence / 8)) 64
  start_services --measure-seconds 5
  local slash='pattern: vertical_slash, select: top_k, density:'
  # As above, the first job of a pattern measures its latency table.
  for tokens in $((4 * sequence)) $((2 * sequence)) $sequence; do
    while IFS='|' read -ru 3 what documents layout ring attention; do
      printf -v name 'plan-%02d' "$number"
      number=$((number + 1))
      data='train: ./LongAlign-like/train, document_mask: false'
      [[ ! $documents ]] || data='train: ./eighths/train'
      packed_job "$name" 2 "$tokens" "$data" "$attention" "layout: $layout, ring: $ring, replan: never"
      measure "$name"
      echo "$tokens tokens, $what, $layout, $ring" >"$run/$name.case"
      [[ ! $documents ]] || echo "$((sequence / 8))" >"$run/$name.documents"
    done 3<<END
dense, documents of $((sequence / 8)) tokens|apart|documents|flat|pattern: dense
dense, documents of $((sequence / 8)) tokens|apart|striped|flat|pattern: dense
dense||striped|flat|pattern: dense
dense||zigzag|flat|pattern: dense
dense||striped|all_gather|pattern: dense
vertical-slash at 5 %||striped|flat|$slash 0.05
vertical-slash at 20 %||zigzag|all_gather|$slash 0.2
key groups at 10 %||striped|flat|pattern: key_groups, density: 0.1
END
  done
  "$bin/ringctl" latency -o json >"$run/measured.json"
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

# Coordinator and workers of two trainers: of one machine or, by --sockets, of what NCCL takes for two.
start_services() {  # [FLAG...] of the coordinator
  local host
  start_coordinator "$@"
  if [[ ! $sockets ]]; then
    start_worker balance --trainers "$trainers"
    await_nodes 1
    return
  fi
  export NCCL_IB_DISABLE=1
  for host in 0 1; do
    NCCL_HOSTID=host-$host CUDA_VISIBLE_DEVICES=$host start_worker "balance-$host" --trainers 1
  done
  await_nodes 2
}

# Sequences of documents of a thirty-second of their length, which come first, and of one document. Sequences of an epoch
# are shuffled by the seed, so each is put where its step finds it, as worker/data/loader.cc says; what steps report of
# their documents is compared.
pack_growing() {  # NAME TOKENS SHORT LONG
  python3 -c '
import sys
tokens, short, long = map(int, sys.argv[1:])
count, seed, epoch, low = short + long, 1, 0, 2**64 - 1
def mix(x):
    x = x + 0x9e3779b97f4a7c15 & low
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & low
    x = (x ^ x >> 27) * 0x94d049bb133111eb & low
    return x ^ x >> 31
def place(step):
    half, key = 1, mix(seed) ^ mix(~epoch & low)
    while 1 << 2 * half < count:
        half += 1
    mask, i = (1 << half) - 1, step
    while True:
        left, right = i >> half, i & mask
        for part in range(4):
            left, right = right, left ^ mix(key ^ mix(right + (part << 60))) & mask
        i = left << half | right
        if i < count:
            return i
early = {place(step) for step in range(short)}
for sequence in range(count):
    parts = 32 if sequence in early else 1
    for _ in range(parts):
        print(tokens // parts)
print(2)  # the label of the last token is the one behind it' "$2" "$3" "$4" | pack_lengths "$1"
}

# A job whose documents grow, and what became of its plan.
grow() {  # NAME DATA STEPS PARALLELISM
  local steps=$3
  packed_job "$1" 2 $((131072 / divide)) "train: ./$2/train" 'pattern: dense' "$4"
  measure "$1"
  "$bin/ringctl" get "$1" -o json >"$run/$1.job"
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
if [[ $recall ]]; then
  smoke=
  [[ $engine == cuda ]] || smoke=-smoke
  "$root/bench/quality/run.sh" --dir "$run" --plan "tuning$smoke" --engine "$engine" --bin "$bin" "${suite[@]}"
  rows recall
  exit
fi

if [[ $plan ]]; then
  cases=measure_cases
  [[ ! $pair ]] || cases=measure_pair_cases
  [[ $again ]] || $cases
  predict
  rows "${pair:+pair-}plan"
  exit
fi
if [[ $live ]]; then
  shrink_model
  few=$((steps / 5))  # fixed plans want no time to settle: a third of these warm up in each half
  # Short documents until a change is looked for, announced five seconds ahead, in force and settled.
  pack_growing growing $((131072 / divide)) $((3 * steps)) "$steps"
  pack_growing grown $((131072 / divide)) "$few" "$few"
  start_services --measure-seconds 5
  replan=auto
  [[ $engine == cuda ]] || replan=always
  # What sockets take drifts by more than what shapes differ by: what is fixed is trained before and after what lives.
  grow_fixed() {  # before | after
    for layout in striped documents zigzag; do
      grow "fixed-$layout-$1" grown $((2 * few)) "layout: $layout, ring: flat, replan: never"
    done
    grow "fixed-gathered-$1" grown $((2 * few)) 'layout: striped, ring: all_gather, replan: never'
  }
  grow_fixed before
  grow live growing $((4 * steps)) "replan: $replan"
  grow_fixed after
  rows "${sockets:+sockets-}live"
  exit
fi
start_services
cp "${config:-$root/bench/models/bytes-100m.json}" "$run/config.json"
slash='pattern: vertical_slash, vertical_mass: 0.8, slash_mass: 0.8'
for data in ChatQA2-like LongAlign-like ProLong-like; do
  pack $data
  name=${data%%-*}
  name=${name,,}
  # Its longest document is whole in one sample.
  if [[ $name == prolong ]]; then sequence=$((4 * sequence)); fi
  job "$name-order" $data "$context" $((trainers / context)) 16 'pattern: dense' '' in_order
  job "$name-dealt" $data "$context" $((trainers / context)) 16 'pattern: dense' '' by_cost
done
[[ $groups == 2x1 ]] || { rows gpus; exit; }
job prolong-documents ProLong-like 2 1 16 'pattern: dense' '' by_cost documents
sequence=$((sequence / 16))
# Patterns choose little of what a fresh model's attention is, which is flat: theirs has learned from samples of a quarter of the length.
pack ChatQA2-like quarter 0 4
last=$((15 * steps)) job learned-groups quarter 1 2 16 'pattern: dense' '' by_cost
sequence=$((4 * sequence))
pack ChatQA2-like four 0.1
# Steps of 30 to 300 ms, of which a machine's other work holds up some: each is trained twice, and the quicker one counts.
for again in '' -again; do
  for anchor in none mean; do
    balance=", balance: {anchor: $anchor, tolerance: 0.1}"
    for pattern in "$slash" 'pattern: xattention'; do
      name=${pattern#pattern: } name=${name%%,*}
      init='init: ./learned-groups/model' last=$((5 * steps)) held_out=32 \
        job "groups-${name/_/-}-$anchor$again" four 1 2 4 "$pattern" "$balance" by_cost
    done
    [[ $again ]] || job "ring-$anchor" ChatQA2-like 2 1 2 'pattern: xattention, threshold: 0.8' "$balance" by_cost
  done
done
rows gpus
