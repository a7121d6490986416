#!/usr/bin/env bash
# `ringctl bench attention` in small: tables of kernels and schemes on CPUs, and errors for what cannot run.
set -euo pipefail
# shellcheck source=tests/e2e/scratch.sh
source "$(dirname "$0")/scratch.sh"
bench() { "$bin/ringctl" bench attention "$@" >"$work/bench.log" 2>&1; }

bench --engine cpu --folder "$work/tables" --tokens 128 --ranks 2 --repetitions 1 --densities 50 --masks causal causal_documents || fail "exit code $?"
python3 - "$work/tables" <<'END' || fail "see above"
import csv, sys

rows = {name: list(csv.DictReader(open(f"{sys.argv[1]}/longca_{name}.csv"))) for name in ("kernels", "rings")}
for name, schemes in (("kernels", {"one rank"}), ("rings", {"flat striped", "ulysses", "flat contiguous with helpers"})):
    assert {row["mask"] for row in rows[name]} == {"causal", "causal_documents"}, rows[name]
    assert {row["direction"] for row in rows[name]} == {"forward", "backward"}, rows[name]
    assert schemes <= {row["scheme"] for row in rows[name]}, rows[name]
    for row in rows[name]:
        if row["scheme"] == "flat contiguous with helpers" and row["choice"] != "all":
            assert row["note"] == "unsupported", row
            continue
        assert row["note"] == "" and float(row["error"]) < 1e-4 and float(row["max_ms"]) > 0, row
        assert float(row["mib_moved"]) <= float(row["mib_whole"]), row
assert {row["choice"] for row in rows["kernels"]} == {"all", "uniform 50 %", "variable 50 %", "learned 50 %"}, rows["kernels"]
assert {row["choice"] for row in rows["rings"]} == {"all", "block_topk 50 %", "vertical_slash 50 %"}, rows["rings"]
END
[[ -s $work/tables/longca_kernels.svg && -s $work/tables/longca_rings.svg ]] || fail "no pictures"

bench --engine cpu --folder "$work/per-gpu" --tokens-per-gpu 128 256 --ranks 2 4 --repetitions 1 --patterns none --densities 50 --masks causal ||
  fail "exit code $?"
python3 - "$work/per-gpu" <<'END' || fail "see above"
import csv, sys

kernels, rings = (list(csv.DictReader(open(f"{sys.argv[1]}/longca_{name}.csv"))) for name in ("kernels", "rings"))
assert {row["tokens"] for row in kernels} == {"128", "256"}, kernels
assert {(row["ranks"], row["tokens"]) for row in rings} == {("2", "256"), ("2", "512"), ("4", "512"), ("4", "1024")}, rings
END

refused() {  # what the error says, then arguments
  local says=$1
  shift
  if bench "$@"; then fail "took $*"; fi
  grep -qF -- "$says" "$work/bench.log" || fail "of $* it does not say '$says'"
}
refused "--threads: goes with --engine cpu alone" --engine cuda --threads 2
refused "--tokens-per-gpu: does not go with --tokens" --tokens 128 --tokens-per-gpu 128
refused "none not in" --masks none
refused "dense not in" --patterns dense
touch "$work/file"
refused "cannot write into $work/file; give --folder" --folder "$work/file"
nvidia-smi -L >/dev/null 2>&1 || refused "ringleader-bench: " --engine cuda --folder "$work/tables"
echo PASSED
