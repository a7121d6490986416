#!/usr/bin/env bash
# training_bench on the CPU engine: a row for each case, whose figures hold together, a trace of each rank, and an error
# for what cannot run. What it measures on GPUs it measures the same way.
set -euo pipefail
# shellcheck source=tests/e2e/scratch.sh
source "$(dirname "$0")/scratch.sh"

cat >"$work/config.json" <<'END'
{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256,
 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-6,
 "rope_theta": 1000000.0, "max_position_embeddings": 8192, "tie_word_embeddings": true, "hidden_act": "silu"}
END
bench=("$bin/training_bench" --config "$work/config.json" --engine cpu --steps 1 --timeout 120)

"${bench[@]}" --tokens 2048 --gpus 1,2 --mode dense,sparse --verticals 64 --slash-share 0.2 --csv "$work/rows.csv" \
  --profile "$work/traces" --commit abc --hardware cpu >"$work/bench.log" 2>&1 || fail "exit code $?"

python3 - "$work" <<'END' || fail "see above"
import csv, glob, json, sys

work = sys.argv[1]
rows = list(csv.DictReader(open(work + "/rows.csv")))
assert [(r["gpus"], r["mode"]) for r in rows] == [("1", "dense"), ("1", "sparse"), ("2", "dense"), ("2", "sparse")], rows
for r in rows:
    seconds = float(r["step_seconds"])
    phases = [float(r[p]) for p in ("data", "index", "attention_forward", "attention_backward", "linear",
                                    "exposed_communication", "exposed_offload", "optimizer")]
    assert r["commit"] == "abc" and r["hardware"] == "cpu" and r["tokens"] == "2048", r
    assert abs(float(r["tokens_per_second"]) * seconds / 2048 - 1) < 0.01, r
    assert 0 < max(phases) <= seconds, r  # each the slowest rank's
    assert (float(r["density"]) == 1) == (r["mode"] == "dense"), r
    assert 6 < float(r["loss"]) < 7, r  # ln 512 = 6.24: random weights, random tokens
    traces = sorted(glob.glob(f"{work}/traces/{r['gpus']}-gpus-2048-tokens-{r['mode']}-auto-striped-{r['precision']}/*.json"))
    assert len(traces) == int(r["gpus"]), traces
    for trace in traces:
        assert any(e.get("name", "").startswith("aten::") for e in json.load(open(trace))["traceEvents"]), trace
END

# Heads that are shared out travel among those that share them, and keys in the ring that is left.
"${bench[@]}" --tokens 2048 --gpus 2 --mode dense --heads 1,2 --ring flat,all_gather --csv "$work/heads.csv" >"$work/heads.log" 2>&1 ||
  fail "heads: exit code $?"
python3 - "$work/heads.csv" <<'END' || fail "see above"
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))
assert [(r["heads"], r["ring"]) for r in rows] == [("1", "flat"), ("1", "all_gather"), ("2", "flat"), ("2", "all_gather")], rows
for r in rows:
    assert (float(r["head_gib"]) > 0) == (r["heads"] == "2") and (float(r["ring_gib"]) > 0) == (r["heads"] == "1"), r
assert len({r["loss"][:5] for r in rows}) == 1, rows
END

patterns=vertical_slash,sliding_window,block_topk,moba,xattention,key_groups,adaspa,fixed_blocks
"${bench[@]}" --tokens 4096 --gpus 1 --mode $patterns --density 0.3 --csv "$work/patterns.csv" >"$work/patterns.log" 2>&1 ||
  fail "patterns: exit code $?"
python3 - "$work/patterns.csv" $patterns <<'END' || fail "see above"
import csv, sys
rows = {r["mode"]: float(r["density"]) for r in csv.DictReader(open(sys.argv[1]))}
assert list(rows) == sys.argv[2].split(","), rows
for mode, density in rows.items():
    # Tiles are visited whole, and moba's queries choose apart.
    assert 0.2 < density < (1 if mode == "moba" else 0.45), (mode, density)
END

# With --density 0 a pattern is as jobs get it that name nothing else.
"${bench[@]}" --tokens 4096 --gpus 1 --mode vertical_slash,key_groups --density 0 --csv "$work/defaults.csv" >"$work/defaults.log" 2>&1 ||
  fail "defaults: exit code $?"
python3 - "$work/defaults.csv" <<'END' || fail "see above"
import csv, sys
rows = {r["mode"]: float(r["density"]) for r in csv.DictReader(open(sys.argv[1]))}
assert 0.27 < rows["key_groups"] < 0.29, rows
assert 0.21 < rows["vertical_slash"], rows  # untrained attention is flat
END

if "${bench[@]}" --tokens 2049 --gpus 2 --mode dense >"$work/odd.log" 2>&1; then fail "2,049 tokens on two ranks ran"; fi
grep -q 2049 "$work/odd.log" || fail "the error does not name the length"
echo "PASSED"
