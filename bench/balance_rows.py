"""Turns what bench/balance.sh measured into rows of bench/results/figures/balance.json.

    ... | balance_rows.py dealing
    balance_rows.py tuning FOLDER
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURES = ROOT / "bench/results/figures/balance.json"


def row(name, value, asked, met, peer, command):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "row": name,
        "value": round(value, 4),
        "asked": asked,
        "met": met,
        "peer": peer,
        "hardware": os.environ.get("HARDWARE") or (cpu.group(1) if cpu else "unknown"),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def dealing_rows():
    result = json.load(sys.stdin)
    milliseconds = result["milliseconds"]
    return [row("1,024 ranks, 16,384 samples a step: dealing, milliseconds", milliseconds, 20, milliseconds <= 20, None,
                "bench/balance.sh")]


def tuning_rows(folder):
    report = {name: json.loads((pathlib.Path(folder) / f"{name}.json").read_text())
              for name in ("groups-none", "groups-mean", "ring-none", "ring-mean")}
    command = "bench/balance.sh --gpus"
    plain, tuned = report["groups-none"], report["groups-mean"]
    gain = tuned["tokens_per_second"] / plain["tokens_per_second"]
    cost = (tuned["phases"]["index"] - plain["phases"]["index"]) / plain["seconds"]
    ring = report["ring-mean"]["worker_imbalance"]
    print(json.dumps({name: {"balance": one.get("balance"), "worker_imbalance": one["worker_imbalance"],
                             "tokens_per_second": one["tokens_per_second"]} for name, one in report.items()}, indent=2))
    return [
        row("four samples a step (ChatQA2-like), two groups: tuning (mean, 0.1) on top of batching, speed-up", gain, 1.06,
            gain >= 1.06, 1.12, command),
        row("what tuning itself costs, share of a step", max(0.0, cost), 0.005, cost <= 0.005, 0.012, command),
        row("ranks of a ring under XAttention by top-p, tuned: max/mean of visited tiles", ring, 1.05, ring <= 1.05, 1.08,
            command),
        row("ranks of a ring under XAttention by top-p, untuned: max/mean of visited tiles",
            report["ring-none"]["worker_imbalance"], None, None, 1.34, command),
    ]


def main():
    rows = dealing_rows() if sys.argv[1] == "dealing" else tuning_rows(sys.argv[2])
    new = {entry["row"] for entry in rows}
    if FIGURES.exists():  # rows that other calls measured stay
        rows = [entry for entry in json.loads(FIGURES.read_text()) if entry["row"] not in new] + rows
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=2) + "\n")
    print(FIGURES.read_text(), end="")


main()
