#!/usr/bin/env bash
# The README's first command, scaled down: real processes, real text, a few steps. Checks what a user would look at.
set -euo pipefail
# shellcheck source=tests/e2e/scratch.sh
source "$(dirname "$0")/scratch.sh"

# A folder of the user's own, whatever its files are called; the interrupt test takes the default one.
mkdir "$work/text"
for header in /usr/include/*.h; do cp "$header" "$work/text/$(basename "$header" .h).txt"; done
"$root/deploy/quickstart.sh" --dir "$work/run" --text "$work/text" --set training.steps=6 --set data.sequence_length=4096 \
  --set checkpoint.every_steps=3 --set training.eval_sequences=2 >"$work/quickstart.log" 2>&1 ||
  fail "quickstart ended with $?"

python3 - "$work/run" <<'END' || fail "summary.json"
import json, math, os, sys

run = sys.argv[1]
with open(f"{run}/summary.json") as file:
    summary = json.load(file)
for key in ("loss_first", "loss_last", "heldout_first", "heldout_last", "tokens_per_second", "density",
            "worker_imbalance", "phases"):
    assert key in summary, f"{key} is missing"
assert 5 < summary["loss_first"] < 6.5, "an untrained byte model knows nothing"
assert summary["heldout_last"] < summary["heldout_first"] * 0.9, "training did not learn"
assert summary["tokens_per_second"] > 0
layers = summary["density_per_layer"]
assert len(layers) == 4 and all(0 < d < 0.9 for d in layers), layers
assert 0 < summary["density"] < 0.9
assert 1 <= summary["worker_imbalance"] < 1.1
assert all(math.isfinite(s) and s >= 0 for s in summary["phases"].values())
assert sum(summary["phases"].values()) > 0
for name in ("config.json", "model.safetensors"):
    assert os.path.getsize(f"{run}/checkpoints/model/{name}") > 0, name
END

# A worker's witness ends a moment after the worker.
for ((i = 0; ; ++i)); do
  pgrep -f "$work/run" >/dev/null || break
  ((i < 300)) || fail "processes are left behind: $(pgrep -af "$work/run")"
  sleep 0.1
done
echo "PASSED"
