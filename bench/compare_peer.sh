#!/usr/bin/env bash
# Trains the same model shape with Ringleader and with a dense peer on the same GPUs in one go, prints the ratios, and
# writes them as JSON. What a side could not train has no row, or a row without a peer; the exit code is 1 then.
#
#   bench/compare_peer.sh --peer SCRIPT [--bin DIR] [--gpus 4] [--sparse 131072,262144,524288] [--dense 32768,131072]
#                         [--steps 3] [--commit NAME] [--output compare_peer.json]
#
# SCRIPT runs under torchrun once a length, which it takes in units of 1,024 tokens, and prints a line:
#   ... S=TOKENS ... -> RATE tok/s ... peak GIB GiB
# It gets COMPILE=1 and BE=cudnn in its environment. Our trainers run first; both sides use the Qwen2.5-3B shape. What was measured
# stays beside OUTPUT: compare_peer.sparse.csv and .dense.csv of our trainers, and compare_peer.log of the peer.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -f $root/CMakeLists.txt ]]; then bin=$root/build/bin; else bin=$root/bin; fi
gpus=4 sparse=131072,262144,524288 dense=32768,131072 steps=3 commit=unknown
output=compare_peer.json peer=
while (($#)); do
  case $1 in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
  esac
  (($# > 1)) || { echo "compare_peer: $1 needs a value, or is no option (see --help)" >&2; exit 2; }
  case $1 in
    --peer) peer=$2 ;;
    --bin) bin=$2 ;;
    --gpus) gpus=$2 ;;
    --sparse) sparse=$2 ;;
    --dense) dense=$2 ;;
    --steps) steps=$2 ;;
    --commit) commit=$2 ;;
    --output) output=$2 ;;
    *) echo "compare_peer: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
  shift 2
done
[[ -f $peer ]] || { echo "compare_peer: --peer must name the peer's script, not '$peer'" >&2; exit 2; }
[[ -x $bin/training_bench ]] || { echo "compare_peer: no training_bench in $bin; --bin names the folder" >&2; exit 2; }
# A bundle brings its binaries, and finds the rest on its machine.
# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
if [[ -f $root/CMakeLists.txt ]]; then use_gpu_libraries; else use_gpu_libraries "$root"; fi
output=$(realpath -m "$output") failed=()
mkdir -p "$(dirname "$output")"
kept=${output%.json}
rm -f "$kept".{sparse.csv,dense.csv,log}  # of an earlier call, which would be taken for this one's
hardware="$gpus x $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)"

ours() {  # MODE TOKENS
  [[ -n $2 ]] || return 0
  "$bin/training_bench" --trainer "$bin/ringleader-trainer" --config "$root/bench/models/qwen2.5-3b.json" --gpus "$gpus" \
    --mode "$1" --tokens "$2" --steps "$steps" --commit "$commit" --hardware "$hardware" --csv "$kept.$1.csv" ||
    failed+=("our $1 trainers, exit code $?")
}
ours sparse "$sparse"
ours dense "$dense"

# The libraries that our programs were pointed to are not the peer's.
for tokens in $(tr , '\n' <<<"$sparse,$dense" | sort -nu); do
  env -u LD_LIBRARY_PATH COMPILE=1 BE=cudnn python3 -m torch.distributed.run --nproc-per-node "$gpus" "$peer" \
    "$(awk "BEGIN {print $tokens / 1024}")" | tee -a "$kept.log" || failed+=("the peer at $tokens tokens, exit code ${PIPESTATUS[0]}")
done

python3 - "$kept" "$output" "${failed[@]}" <<'END'
import csv, json, os, re, sys

kept, output, *failed = sys.argv[1:]
peers = {}
for line in open(f"{kept}.log"):
    match = re.search(r"S=(\d+).*-> (\d+) tok/s.*peak ([\d.]+) GiB", line)
    if match:
        peers[int(match[1])] = (float(match[2]), float(match[3]))
PHASES = ["data", "index", "attention_forward", "attention_backward", "linear", "exposed_communication", "optimizer"]
rows = []
for mode in ("sparse", "dense"):
    path = f"{kept}.{mode}.csv"
    for row in csv.DictReader(open(path)) if os.path.exists(path) else []:
        tokens = int(row["tokens"])
        if tokens not in peers and not any(what.startswith(f"the peer at {tokens} tokens,") for what in failed):
            failed.append(f"the peer at {tokens} tokens, of which it printed no rate")
        peer_rate, peer_gib = peers.get(tokens, (None, None))
        rate = float(row["tokens_per_second"])
        rows.append({
            "date": row["date"], "commit": row["commit"], "hardware": row["hardware"], "tokens": tokens, "mode": mode,
            "density": float(row["density"]), "ours_tokens_per_second": rate,
            "peer_tokens_per_second": peer_rate, "ratio": round(rate / peer_rate, 3) if peer_rate else None,
            "phases": {phase: float(row[phase]) for phase in PHASES}, "peak_gib": float(row["peak_gib"]),
            "peer_peak_gib": peer_gib, "worker_imbalance": float(row["worker_imbalance"]),
            "step_imbalance": float(row["step_imbalance"]), "exposed_communication": float(row["exposed_share"]),
            "token_wise_tflops": float(row["token_wise_tflops"]), "mfu": float(row["mfu"])})
json.dump(rows, open(output, "w"), indent=1)
print(f"\n{'tokens':>8} {'mode':>7} {'density':>8} {'ours tok/s':>11} {'peer tok/s':>11} {'ratio':>7} {'peak GiB':>9} "
      f"{'exposed':>8} {'workers':>8} {'steps':>7}")
for row in rows:
    peer = f"{row['peer_tokens_per_second']:11.0f} {row['ratio']:7.2f}" if row["ratio"] else f"{'failed':>11} {'':7}"
    print(f"{row['tokens']:8d} {row['mode']:>7} {row['density']:8.4f} {row['ours_tokens_per_second']:11.0f} "
          f"{peer} {row['peak_gib']:9.1f} "
          f"{row['exposed_communication']:8.4f} {row['worker_imbalance']:8.4f} {row['step_imbalance']:7.4f}")
print(f"written: {output}")
if failed:
    sys.exit("compare_peer: failed: " + "; ".join(dict.fromkeys(failed)))
END
