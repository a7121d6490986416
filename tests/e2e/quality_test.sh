#!/usr/bin/env bash
# The quality suite, small: its parts, one plan from end to end that is broken off and goes on, and a model that answers
# recall with dense attention and cannot within a narrow window.
set -euo pipefail
# shellcheck source=tests/e2e/scratch.sh
source "$(dirname "$0")/scratch.sh"
trap 'stop_services 2>/dev/null || true; rm -rf "$work"' EXIT

python3 "$root/bench/figure_rows_test.py" >"$work/figure_rows.log" 2>&1 || fail figure_rows
for part in tasks suite report; do
  python3 "$root/bench/quality/${part}_test.py" >"$work/$part.log" 2>&1 || fail "$part"
done

suite=("$root/bench/quality/run.sh" --dir "$work/suite" --plan smoke --engine cpu --at-once 2 --text "$root/base" --output "$work/results")
code=0 began=$SECONDS
"${suite[@]}" --seconds 1 >"$work/first.log" 2>&1 || code=$?
((code == 75)) || fail "a call with no time left ended with $code"
"${suite[@]}" >"$work/second.log" 2>&1 || fail "the suite ended with $?"
took=$((SECONDS - began))
grep -q "quality: dense attention has not learned recall-near (" "$work/second.log" ||
  fail "an untrained model has learned"
grep -q '"trainers": 2' "$work"/suite/jobs/dense-512-64-1.yaml || fail "no two trainers shared a sequence"
cp "$work/results/quality.json" "$work/second.json"
rm -rf "$work/suite/data"  # what is done needs no data: nothing is trained again
"${suite[@]}" >"$work/third.log" 2>&1 || fail "the finished suite ended with $?"
[[ ! -e $work/suite/data ]] || fail "a finished suite made data again"
python3 - "$work/results" "$work/second.json" "$took" <<'END' || fail "its results"
import json, sys
results, second, took = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
quality = json.load(open(f"{results}/quality.json"))
# All jobs fit into the whole time, two at once; a call that finds all done adds nothing.
worked = sum(job["wall_seconds"] for part in ("curriculum", "patterns", "repeats", "texts") for job in quality[part])
assert worked / 2 < quality["wall_seconds"] <= took + 1, (worked, quality["wall_seconds"], took)
assert abs(quality["wall_seconds"] - second["wall_seconds"]) < 1, (quality["wall_seconds"], second["wall_seconds"])
assert set(quality["dense"]) == {"recall-near", "recall-far", "needles"}, quality["dense"]
assert not any(of["learned"] for of in quality["dense"].values()), quality["dense"]
patterns = {job["pattern"]: job for job in quality["patterns"]}
dense = {"dense", "dense in FP8"}
assert set(patterns) == dense | {"window", "vertical-slash", "vertical-slash, spread", "xattention",
                         "xattention, stride 32", "xattention, stride 64", "adaspa", "moba", "key-groups", "key-groups of 16 queries", "key-groups of pairs of heads",
                         "key-groups, by probe",
                         "fixed-blocks", "block-topk", "block-topk, causal", "vertical-slash, top-p", "xattention, threshold", "the default"}, patterns.keys()
for name, job in patterns.items():
    first = job["first_evaluation"]
    asked = {task: answers["asked"] for task, answers in first["answers"].items() if answers["asked"]}
    assert set(asked) == {"recall-near", "recall-far", "needles", "text"}, asked
    assert asked["needles"] == 16, asked  # two documents of 512 tokens
    assert asked["text"] == 510, asked  # one, of which the last of eight tiles is followed by the separator
    assert first["text_by_place"]["text-63"]["asked"] == 7, first["text_by_place"]
    assert ("dense" in first) == (name not in dense), name
    # All start from one model, and see the same when they see everything; what FP8 rounds is seen.
    differs = abs(first.get("dense", first)["loss"] - patterns["dense"]["first_evaluation"]["loss"])
    assert 1e-6 < differs < 0.05 if name == "dense in FP8" else differs < 1e-4, (name, differs)
    # Untrained attention is flat: by default, which keeps a share of its mass, all may be visited.
    assert 0 < job["density"] <= 1, name
    # Queries that choose apart may choose every block together.
    visits_all = {"vertical-slash, top-p", "xattention, threshold", "the default", "moba"}  # the CPU engine's default is top-p
    assert name in visits_all or (job["density"] == 1) == (name in dense), (name, job["density"])
assert patterns["the default"]["attention"] == {}, patterns["the default"]["attention"]
# What is trained again starts alike, sees other data, and ends elsewhere.
repeats = quality["repeats"]
assert [(job["pattern"], job["seed"]) for job in repeats] == [("dense", 101), ("key-groups", 101)], repeats
for job in repeats:
    first = patterns[job["pattern"]]
    assert job["first_evaluation"]["loss"] == first["first_evaluation"]["loss"], job["pattern"]
    assert job["last_evaluation"]["loss"] != first["last_evaluation"]["loss"], job["pattern"]
# Text alone, in longer sequences: both ways from the same model.
texts = quality["texts"]
assert [(job["pattern"], job["tokens"], job["apart"]) for job in texts] == [("dense", 1024, False), ("the default", 1024, False)], texts
dense, default = (job["first_evaluation"] for job in texts)
assert set(task for task, answers in dense["answers"].items() if answers["asked"]) == {"text"}, dense
assert abs(default["dense"]["loss"] - dense["loss"]) < 1e-4, (default, dense)
rows = json.load(open(f"{results}/figures/patterns.json"))
text, = [row for row in rows if row["row"].startswith("text alone, the default, sparse-trained over dense, 1024 tokens")]
assert text["value"] == round(texts[1]["last_evaluation"]["loss"] / texts[0]["last_evaluation"]["loss"], 4), text
keys = {"row", "value", "asked", "met", "peer", "hardware", "commit", "date", "command"}
assert rows and all(keys <= set(row) for row in rows), rows
table = open(f"{results}/quality.md").read()
for part in ("| window |", "| block-topk, causal |", "What later queries of a tile tell"):
    assert part in table, part
# Causally chosen blocks are as many, and others: the first query of a tile chooses alone.
default, causal = patterns["block-topk"], patterns["block-topk, causal"]
assert causal["attention"] == {**default["attention"], "selection": "causal"}, causal["attention"]
assert causal["density"] == default["density"], (causal["density"], default["density"])
assert causal["first_evaluation"]["loss"] != default["first_evaluation"]["loss"]
names = {row["row"]: row for row in rows}
whole = names["quality suite, whole, minutes"]
assert whole["value"] == round(quality["wall_seconds"] / 60, 1) and whole["asked"] == "<= 25", whole
assert names["text, all queries of a tile choose over its first alone, block-topk of 50%, at once"]["value"] > 0
for pattern in ("key-groups of 50%", "block-topk, causal of 50%",
                "the default, text alone, 1024 tokens, documents of 128 not kept apart"):
    assert f"text, what later queries of a tile save of the dense loss, {pattern}, at once" in names, names.keys()
assert any("of what dense answers" in name for name in names), names.keys()
dense = names["answers of the dense model that patterns go on from, of the task that it answers least of"]
assert dense["value"] == round(min(of["share"] for of in quality["dense"].values()), 4) and not dense["met"], dense
END

# With fixed budgets and with tuned ones, by two groups, which the samples leave apart.
"$root/bench/balance.sh" --cpus --recall --bin "$bin" --text "$root/base" >"$work/recall.json" 2>"$work/recall.log" ||
  fail "the suite with tuning"
for seed in 100 101; do
  grep -q "key-groups, seed $seed: [1-9][0-9]*% of the choices moved" "$work/recall.log" || fail "nothing was tuned"
done
python3 - "$work" <<'END' || fail "what tuning moves is not the mean over seeds"
import json, re, sys
work = sys.argv[1]
told = open(f"{work}/recall.json").read()  # what the suite says, then the rows
worst, lost, mean = (row for row in json.loads(told[told.index("[\n"):]) if row["row"].startswith("answers of the recall tasks"))
points = {}  # by pattern and task
for line in open(f"{work}/recall.log"):
    if of_seed := re.match(r"(.*), seed \d+, (.*): .* ([+-][\d.]+) points tuned", line):
        points.setdefault(of_seed.group(1, 2), []).append(float(of_seed[3]))
assert points and all(len(of_seeds) == 2 for of_seeds in points.values()), points
means = {key: sum(of_seeds) / 2 for key, of_seeds in points.items()}
assert abs(worst["value"] - max(map(abs, means.values()))) < 0.02, (worst, means)
assert abs(lost["value"] - max(0, -min(means.values()))) < 0.02, (lost, means)
for row in (worst, lost):
    assert row["points_by_seed"] == points[row["pattern"], row["task"]], (row, points)
assert abs(mean["value"] - sum(means.values()) / len(means)) < 0.02, (mean, means)
END

# Answers of several seeds: the mean, with its standard error. Rows that were made once, and no more, are gone.
python3 - "$work" <<'END' || fail "figures of several seeds"
import json, sys
work = sys.argv[1]
quality = json.load(open(f"{work}/results/quality.json"))
def set_right(job, needles):
    for evaluation in ("first_evaluation", "last_evaluation"):
        for task, answers in job[evaluation]["answers"].items():
            answers["right"] = answers["asked"] if task != "needles" else needles
of = lambda jobs, pattern: next(job for job in jobs if job["pattern"] == pattern)
for job in quality["patterns"] + quality["repeats"]:
    set_right(job, 0)
set_right(of(quality["patterns"], "dense"), 10)
set_right(of(quality["repeats"], "dense"), 16)
first, again = of(quality["patterns"], "key-groups"), of(quality["repeats"], "key-groups")
set_right(first, 9)  # 0.9 of 10
set_right(again, 16)  # all
for job in (first, again):
    job["density"] = 0.05
json.dump(quality, open(f"{work}/seeds.json", "w"))
row = {"met": False, "asked": "", "command": "bench/quality/run.sh --dir x"}
json.dump([{**row, "row": "gone"}, {**row, "row": "stays", "command": "bench/other.sh"}], open(f"{work}/figures.json", "w"))
END
mkdir -p "$work/seeds/figures"
mv "$work/figures.json" "$work/seeds/figures/patterns.json"
python3 "$root/bench/quality/report.py" "$work/seeds.json" --output "$work/seeds" >"$work/seeds.log" 2>&1 || fail "the report of seeds"
grep -q '95.0 ± 5.0 % of needles, the least, of which 16' "$work/seeds/quality.md" || fail "the table does not say how far seeds differ"
python3 - "$work/seeds/figures/patterns.json" <<'END' || fail "rows of several seeds"
import json, sys
rows = {row["row"]: row for row in json.load(open(sys.argv[1]))}
assert "stays" in rows and "gone" not in rows, rows.keys()
at_once = next(row for name, row in rows.items() if name.startswith("every recall task") and name.endswith("5% visited, of what dense answers, at once"))
after = next(row for name, row in rows.items() if name.startswith("every recall task") and name.endswith("5% visited, of what dense answers, after 4 steps"))
assert (at_once["value"], at_once["seeds"], at_once["answers"]) == (0.9, 1, 16), at_once
assert abs(at_once["standard_error"] - 0.9 * (1 / 9 + 1 / 10 - 2 / 16) ** 0.5) < 1e-4, at_once
assert (after["value"], after["seeds"], after["standard_error"], after["task"]) == (0.95, 2, 0.05, "needles"), after
END
# Sequences of 131,072 tokens have files and rows of their own, beside those of the other plan.
python3 - "$work" "$root/bench/quality" <<'END' || fail "the long plan"
import json, sys
work, suite = sys.argv[1:]
sys.path.insert(0, suite)
import argparse, tasks
from suite import PLANS, Suite, attentions
for plan in (PLANS["4096"], PLANS["8192"], PLANS["65536"], PLANS["long"]):
    for stage in (*plan.curriculum, plan.more):
        symbols, tokens = stage.symbols or plan.symbols, stage.tokens or plan.tokens
        assert symbols >= tasks.least_symbols(stage.length) and tokens % stage.length == 0, stage
flags = dict.fromkeys(("commit", "engine", "hardware", "text"), "")
flags |= {"plan": "long", "dir": f"{work}/long", "seconds": 1, "began_before": 0}
config = json.load(open(Suite(argparse.Namespace(**flags)).config()))
assert (config["max_position_embeddings"], config["vocab_size"]) == (131072, tasks.vocabulary(4096)), config
assert set(PLANS["long"].patterns) < set(attentions(0.05, PLANS["long"].tokens))
quality = json.load(open(f"{work}/results/quality.json"))
quality["plan"], quality["command"], quality["curriculum"][-1]["tokens"] = "long", "bench/quality/run.sh --plan long", 131072
json.dump(quality, open(f"{work}/long.json", "w"))
END
python3 "$root/bench/quality/report.py" "$work/long.json" --output "$work/results" >"$work/long.log" 2>&1 || fail "the long report"
python3 "$root/bench/quality/report.py" "$work/results/quality.json" --output "$work/results" >"$work/both.log" 2>&1 || fail "the report beside it"
python3 - "$work/results" <<'END' || fail "rows of both plans"
import json, os, sys
names = [row["row"] for row in json.load(open(f"{sys.argv[1]}/figures/patterns.json"))]
assert len(names) == len(set(names)) > 0, names
alike = lambda name: name.removeprefix("131,072 tokens: ").replace(" 131072 tokens", " 512 tokens")
long = [name for name in names if name.startswith("131,072 tokens: ")]
assert sorted(map(alike, long)) == sorted(set(names) - set(long)) != [], names
assert {"quality.md", "quality_long.md", "quality_long.json"} <= set(os.listdir(sys.argv[1]))
for name, tokens in (("quality", "512"), ("quality_long", "131,072")):
    table = open(f"{sys.argv[1]}/{name}.md").read()
    assert "| pattern | visited |" in table and f"\n{tokens} tokens, " in table, table
END
"$root/bench/fp8.sh" recall --quality "$work/results/quality.json" --output "$work/fp8.json" >"$work/fp8.log" 2>&1 || fail "FP8's rows"
[[ $(grep -c '"row": "answers of the recall tasks' "$work/fp8.json") == 2 ]] || fail "FP8 has not two rows"
# Debian's own Python has Debian's matplotlib, whatever python3 is in the PATH.
/usr/bin/python3 "$root/bench/quality/report.py" "$work/results/quality.json" --output "$work/again" >"$work/again.log" 2>&1 ||
  fail "the report"
grep -q '</svg>' "$work/again/quality.svg" || fail "the picture"
cmp "$work/results/quality.md" "$work/again/quality.md" || fail "the same results make another table"

# shellcheck source=deploy/gpu_libraries.sh
source "$root/deploy/gpu_libraries.sh"
use_gpu_libraries
# shellcheck source=deploy/loopback_services.sh
source "$root/deploy/loopback_services.sh"
run=$work/run
mkdir -p "$run/logs"
python3 "$root/tests/e2e/recall_model.py" "$run/model" 512
python3 "$root/bench/quality/generate.py" --output "$run/made" --documents 5 --length 2048 --symbols 512 --kinds recall
read -ra options <"$run/made.options"
"$bin/ringctl" data pack --input "$run/made" --output "$run/tokens" --eval-share 0 --format uint16 "${options[@]}" \
  >"$work/pack.log"
cat >"$run/window.yaml" <<END
name: window
model: {init: ./model}
data: {train: ./tokens/train, eval: ./tokens/train, sequence_length: 2048}
attention: {pattern: sliding_window, window: 64}
training: {steps: 1, learning_rate: 1e-6, eval_sequences: 4, eval_attention: both}
checkpoint: {directory: ./window}
resources: {trainers: 1}
END
start_coordinator
start_worker a --trainers 1
await_nodes 1
"$bin/ringctl" submit "$run/window.yaml" --follow >"$work/window.log" 2>&1 || fail "the window's job"
"$bin/ringctl" report window -o json >"$work/window.json"
python3 - "$work/window.json" <<'END' || fail "the window's answers: $(grep held-out "$work/window.log")"
import json, sys
window = json.load(open(sys.argv[1]))["first_evaluation"]
share = lambda evaluation, task: evaluation["answers"][task]["right"] / evaluation["answers"][task]["asked"]
print({task: (share(window, task), share(window["dense"], task)) for task in ("recall-near", "recall-far")})
assert window["answers"]["recall-far"]["asked"] > 1000
for task in ("recall-near", "recall-far"):
    assert share(window["dense"], task) >= 0.99, task
assert share(window, "recall-far") < 0.02 < 0.2 < share(window, "recall-near")
END
echo "PASSED"
