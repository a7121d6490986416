"""Turns what bench/pattern_speed.sh measured into rows of bench/results/figures/patterns.json. Rows that it does not measure stay.

    pattern_rows.py --index CSV [--steps CSV --gpus N --layers N --tokens N]

--index: of index_bench; --steps: of training_bench, a line for each pattern, and for those that were trained by their
defaults one whose mode ends in _by_default.
"""

import argparse
import csv
import pathlib

from figure_rows import write_rows

FIGURES = pathlib.Path(__file__).resolve().parent / "results/figures/patterns.json"
# attention.probe_every is 16 by default.
PROBE_EVERY = 16


def row(name, value, asked, met, peer, line, command):
    return {"row": name, "value": value, "asked": asked, "met": met, "peer": peer, "hardware": line["hardware"],
            "commit": line["commit"], "date": line["date"], "command": command}


def index_rows(lines):
    command = "bench/pattern_speed.sh index"
    rows = []
    for name, parts, asked in (("vertical-slash, spread queries", ["all_spread"], 0.3),
                               ("xattention", ["antidiagonals_16", "antidiagonal_lists_16"], 1.5),
                               ("moba", ["query_gate_1024", "query_gate_lists_1024"], 0.5)):
        measured = [lines[part, "1", "16"] for part in parts]
        ms = round(sum(float(line["ms"]) for line in measured), 3)
        rows.append(row(f"index of {name}, 131,072 tokens a rank, 16 heads: ms a layer", ms, f"<= {asked}", ms <= asked, None,
                        measured[0], command))
    return rows


def step_rows(steps, index, gpus, layers, tokens):
    command = "bench/pattern_speed.sh"
    base = steps["vertical_slash"]
    peer = float(base["tokens_per_second"])
    length = f"{tokens // 1024}K, {gpus} GPU{'s' * (gpus > 1)}" + (f", {layers} layers" if layers != 36 else "")
    rows = []
    for mode, line in steps.items():
        ratio, visited = round(float(line["tokens_per_second"]) / peer, 3), f"here {float(line['density']):.1%}"
        of = f"{peer:.0f} tokens/s"
        if mode.endswith("_by_default"):
            name = mode.removesuffix("_by_default") + " by default"
            rows.append(row(f"tokens/s of {name}, {length}, of vertical-slash's where 5% are asked for", ratio, "reported", True,
                            f"{of}; {visited} visited", line, command))
        elif mode != "vertical_slash":
            rows.append(row(f"tokens/s of {mode} where 5% are asked for, {length}, of vertical-slash's", ratio, ">= 0.85",
                            ratio >= 0.85, f"{of}, {float(base['density']):.1%} visited; {visited}", line, command))
    probe = float(index["probe", "1", "16"]["ms"]) / 1000 * layers / PROBE_EVERY
    share = round(probe / float(base["step_seconds"]), 5)
    rows.append(row(f"probe at its default rate, share of a step of vertical-slash, {length}", share, "<= 0.01", share <= 0.01, None,
                    base, command))
    return rows


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--index", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=pathlib.Path)
parser.add_argument("--gpus", type=int, default=2)
parser.add_argument("--layers", type=int, default=36)
parser.add_argument("--tokens", type=int, default=262144)
flags = parser.parse_args()
index = {(line["step"], line["ranks"], line["heads"]): line for line in csv.DictReader(flags.index.open())}
rows = index_rows(index)
if flags.steps:
    steps = {line["mode"]: line for line in csv.DictReader(flags.steps.open())}
    rows += step_rows(steps, index, flags.gpus, flags.layers, flags.tokens)
for new in rows:
    print(f"{'met    ' if new['met'] else 'NOT MET'} {new['row']}: {new['value']} (asked {new['asked']})")
write_rows(rows, FIGURES)
