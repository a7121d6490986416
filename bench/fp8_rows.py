"""Turns what bench/fp8.sh measured into rows of bench/results/figures/fp8.json.

    fp8_rows.py speed|loss|recall|error FOLDER --output FILE --command TEXT [--gpus N] [--seeds "1 2 3"]
                [--cast-steps "1 to 900"] [--quality FILE]
"""

import argparse
import csv
import datetime
import json
import os
import pathlib
import re
import statistics

from figure_rows import write_rows


def row(name, value, asked, met, peer, line=None):
    """line: of the CSV that the value is from, which says when and by what it was measured; without one, now."""
    line = line or {"hardware": os.environ["HARDWARE"], "commit": os.environ["COMMIT"], "date": datetime.date.today().isoformat()}
    return {"row": name, "value": round(value, 5), "asked": asked, "met": met, "peer": peer,
            **{key: line[key] for key in ("hardware", "commit", "date")}, "command": flags.command}


def at_least(name, value, asked, peer, line=None):
    return row(name, value, f">= {asked}", value >= asked, peer, line)


def at_most(name, value, asked, peer, line=None):
    return row(name, value, f"<= {asked}", value <= asked, peer, line)


def cases(name):
    """{(tokens, precision): figures} of one call of training_bench."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return {}
    return {(int(line["tokens"]), line["precision"]): line for line in csv.DictReader(path.open())
            if int(line["gpus"]) == flags.gpus}


def speed_rows():
    gpus, rows = flags.gpus, []
    of_gpus = f"{gpus} GPU" + "s" * (gpus > 1)
    for name, tokens, asked in (("sparse", 131072, 1.28), ("sparse", 65536, 1.32), ("dense", 65536, 1.10)):
        found, tokens = cases(name), tokens * gpus
        if not found:
            continue  # not measured yet
        rates = {precision: float(found[tokens, precision]["tokens_per_second"]) for precision in ("bfloat16", "fp8")}
        rows.append(at_least(f"{tokens // 1024}K {name}, {of_gpus}: tokens a second, of bf16's", rates["fp8"] / rates["bfloat16"],
                             asked, rates["bfloat16"], found[tokens, "fp8"]))
    longest_step = 131072 * gpus
    figures = {precision: cases("sparse").get((longest_step, precision)) for precision in ("bfloat16", "fp8")}
    if figures["fp8"]:
        rows.append(at_least(f"{longest_step // 1024}K sparse, {of_gpus}: token-wise TFLOP/s a GPU",
                             float(figures["fp8"]["token_wise_tflops"]), 780, float(figures["bfloat16"]["token_wise_tflops"]),
                             figures["fp8"]))
    memory = {precision: line for (_, precision), line in cases("memory").items()}
    peaks = {precision: float(line["peak_gib"]) for precision, line in memory.items()}
    if peaks:
        rows.append(at_most(f"{longest_step // 1024}K sparse, {of_gpus}, recompute: full: peak memory, of bf16's",
                        peaks["fp8"] / peaks["bfloat16"], 1, peaks["bfloat16"], memory["fp8"]))
    for (tokens, precision), figures_of in cases("longest").items():
        if precision == "fp8":
            bf16 = float(cases("longest")[tokens, "bfloat16"]["step_seconds"])
            rows.append(at_most(f"{tokens // 1024}K sparse, {of_gpus}: seconds of a step",
                                float(figures_of["step_seconds"]), 42, bf16, figures_of))
    if (folder / "peer.log").exists() and figures["fp8"]:
        match = re.search(rf"S={longest_step}\b.*-> (\d+) tok/s", (folder / "peer.log").read_text())
        rows.append(at_least(f"{longest_step // 1024}K sparse, {of_gpus}: tokens a second, of the dense peer's",
                             float(figures["fp8"]["tokens_per_second"]) / float(match[1]), 9.0, float(match[1]), figures["fp8"]))
    return rows


def slope(points):
    """Of a line through the points, and its standard error."""
    xs, ys = zip(*points)
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    found = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    left = sum((y - y_mean - found * (x - x_mean)) ** 2 for x, y in points)
    return found, (left / (len(points) - 2) / spread) ** 0.5


def loss_rows():
    def heldout_losses(run):
        lines = csv.DictReader((folder / f"{run}.csv").open())
        return {int(line["step"]): float(line["heldout_loss"]) for line in lines if line["heldout_loss"]}

    shares, slopes, last = [], [], {}
    for seed in flags.seeds.split():
        heldout = {precision: heldout_losses(f"{precision}-{seed}") for precision in ("bfloat16", "fp8")}
        steps = max(heldout["fp8"])
        last[seed] = heldout["bfloat16"][steps]
        shares.append(heldout["fp8"][steps] / heldout["bfloat16"][steps] - 1)
        # From a quarter of the steps on: what comes before is the model's, not the precision's.
        differences = [(step, heldout["fp8"][step] / heldout["bfloat16"][step] - 1)
                       for step in sorted(heldout["fp8"]) if step >= steps / 4]
        slopes.append((*slope(differences), steps))
    # What the seeds' differences grow by over the run, beside the noise of that.
    drift = statistics.fmean(found * steps for found, _, steps in slopes)
    noise = sum((error * steps) ** 2 for _, error, steps in slopes) ** 0.5 / len(slopes)
    cast = f", FP8 in steps {flags.cast_steps}" if flags.cast_steps else ""
    trained = f"{slopes[0][2]:,} steps{cast}, seeds {flags.seeds}"
    first = flags.seeds.split()[0]
    rows = [at_most(f"held-out loss after {trained}: furthest from bf16's, as a share", max(map(abs, shares)), 0.0025, last),
            row(f"held-out loss after {trained}: mean of the differences from bf16's, as a share", statistics.fmean(shares),
                "reported", True, last),
            row(f"held-out loss after {trained}: bf16's highest over its lowest, as a share",
                max(last.values()) / min(last.values()) - 1, "reported", True, last),
            row(f"held-out loss over {trained}: growth of the difference from bf16's, as a share", drift,
                f"<= two standard errors ({2 * noise:.5f})", drift <= 2 * noise, None)]
    if (folder / f"again-{first}.csv").exists():
        again = heldout_losses(f"again-{first}")[steps] / last[first] - 1
        rows.append(row(f"held-out loss after {steps:,} steps, seed {first}: bf16 once more from bf16, as a share", again, "reported",
                        True, last[first]))
    return rows


def recall_rows():
    """Of a model that was trained dense in bf16, and went on as long in either precision."""
    quality = json.loads(flags.quality.read_text())
    jobs = {job["pattern"]: job for job in quality["patterns"]}
    os.environ.update(HARDWARE=f"1 x {quality['hardware']}", COMMIT=quality["commit"])  # those of the run that asked
    rows = []
    for when, evaluation in (("at once", "first_evaluation"), (f"after {quality['more_steps']} steps", "last_evaluation")):
        bf16, fp8 = (jobs[name][evaluation]["answers"] for name in ("dense", "dense in FP8"))
        points = {task: 100 * (fp8[task]["right"] - found["right"]) / found["asked"]
                  for task, found in bf16.items() if found["asked"] and task != "text"}
        furthest = max(points.values(), key=abs)
        rows.append(row(f"answers of the recall tasks, {when}: furthest from bf16's of any task, in points", furthest, "within 1",
                        abs(furthest) <= 1, points))
    return rows


def error_rows():
    errors = {}
    for line in (folder / "error.txt").read_text().splitlines():
        match = re.match(r"(?:model\.)?(layers\.\d+|embed_tokens|norm|logits)\S*\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)$", line)
        if match and "k_proj.bias" not in line:
            errors.setdefault(match[1], []).append((float(match[2]), float(match[4])))
    return [row(f"{'logits' if place == 'logits' else 'gradients of ' + place}: relative L2 from fp64, the mean over tensors",
                statistics.fmean(fp8 for _, fp8 in found), "reported", True, statistics.fmean(bf16 for bf16, _ in found))
            for place, found in errors.items()]


parser = argparse.ArgumentParser()
parser.add_argument("what", choices=("speed", "loss", "recall", "error"))
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--output", type=pathlib.Path, required=True)
parser.add_argument("--command", required=True)
parser.add_argument("--gpus", type=int, default=1)
parser.add_argument("--seeds", default="1")
parser.add_argument("--cast-steps", default="", help="of loss: those that were trained in FP8, where not all were")
parser.add_argument("--quality", type=pathlib.Path)
flags = parser.parse_args()
folder = flags.folder
measured = {"speed": speed_rows, "loss": loss_rows, "recall": recall_rows, "error": error_rows}[flags.what]()
write_rows(measured, flags.output)
print(flags.output.read_text(), end="")
