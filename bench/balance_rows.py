"""Turns what bench/balance.sh measured into rows of bench/results/figures/balance.json.

    ... | balance_rows.py dealing
    balance_rows.py gpus FOLDER               with the steps of its jobs, NAME.steps
    balance_rows.py one FOLDER                with the steps of groups_bench, NAME.steps
    balance_rows.py plan|pair-plan FOLDER     with the steps of its jobs and what was predicted of each, NAME.plan
    balance_rows.py live|sockets-live FOLDER  with the steps of its jobs and what became of their plans, NAME.job
    balance_rows.py recall FOLDER             with tuning.json, which bench/quality/suite.py found
    balance_rows.py print gpus|... FOLDER     the same, of jobs that are no measurement: prints the rows alone
"""

import csv
import datetime
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURES = ROOT / "bench/results/figures/balance.json"
GPUS = "bench/balance.sh --gpus"
ATTENTION = ("attention_forward", "attention_backward")
RECALL = "answers of the recall tasks with tuning against fixed budgets, points"
LIVE = "documents that grow from 4K to 128K{}: live plans against the best fixed plan of each half"

# What docs/balance.md asks for and nobody has measured; a call that measures one replaces it.
UNMEASURED = [
    ("ChatQA2-like, two groups, 16 samples a step: batching", 1.45, "measured with one GPU that plays both groups alone"),
    ("LongAlign-like, two groups, 16 samples a step: batching", 1.30, "measured with one GPU that plays both groups alone"),
    ("ProLong-like, 16 samples a step: long documents spread, short ones whole", 1.55,
     "measured with whole samples alone, on one GPU that plays both groups"),
    ("max/mean of groups' times, ChatQA2-like, 16 samples a step, batching", 1.03,
     "measured with one GPU that plays both groups alone"),
    (RECALL, 1, "bench/balance.sh --recall was not run"),
    ("plan against measured step, 24 cases, median error", 0.03, "layouts and rings of several ranks were not run"),
    ("plan against measured step, 24 cases, worst error", 0.08, "layouts and rings of several ranks were not run"),
    ("ProLong-like in 256K sequences, two nodes through sockets: documents against stripes", 2.0,
     "bench/document_layout.sh was not run"),
    ("ProLong-like in 256K sequences, NVLink: documents against stripes", 1.03, "bench/document_layout.sh was not run"),
    (LIVE.format(""), 0.97, "no run on GPUs was made"),
]


def commit():
    bundled = ROOT / "COMMIT"
    if bundled.exists():
        return bundled.read_text().strip()
    found = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def row(name, value, asked, met, peer, command, **more):
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return {
        "row": name,
        "value": value if value is None else round(value, 4),
        "asked": asked,
        "met": met,
        "peer": peer,
        "hardware": os.environ.get("HARDWARE") or (cpu.group(1) if cpu else "unknown"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": command,
        **more,
    }


def dealing_rows():
    milliseconds = json.load(sys.stdin)["milliseconds"]
    return [row("1,024 ranks, 16,384 samples a step: dealing, milliseconds", milliseconds, 20, milliseconds <= 20, None,
                "bench/balance.sh")]


AGAIN = "-again"  # the same job once more


class Steps:
    """A job's counted steps: those after the third that warms up; of a job that was trained twice, the quicker of each.
    Jobs of one distribution train the same samples."""

    def __init__(self, folder, name):
        first, again = (pathlib.Path(folder) / f"{name}{run}.steps" for run in ("", AGAIN))
        runs = [[json.loads(line) for line in run.read_text().splitlines()]
                for run in (first, *([again] if again.exists() else []))]
        if len({len(run) for run in runs}) > 1:
            sys.exit(f"balance: {first.name} and {again.name} are of different lengths; remove {folder}, or give another --dir")
        steps = [min(same, key=lambda step: step["step_seconds"]) for same in zip(*runs)]
        self.steps = steps[len(steps) // 3:]
        self.seconds = sum(self.of("step_seconds"))

    def of(self, *path):
        values = []
        for step in self.steps:
            for key in path:
                step = step.get(key, 0)
            values.append(float(step))
        return values

    def mean(self, *path):
        return statistics.fmean(self.of(*path))


def gpu_rows(folder):
    # What SparseBalance (arXiv 2604.13847) and, of ranks of a ring, FVAttn (arXiv 2607.16190) publish: other models on other hardware.
    command = GPUS + (f" --only {os.environ['ONLY']}" if os.environ.get("ONLY") else "")
    names = sorted(path.stem for path in pathlib.Path(folder).glob("*.steps") if not path.stem.endswith(AGAIN))
    jobs = {name: Steps(folder, name) for name in names}
    for name, one in jobs.items():
        print(f"{name}: {len(one.steps)} steps, {one.seconds / len(one.steps):.4f} s each, groups dealt to "
              f"{one.mean('dealt_imbalance'):.4f}, took {one.mean('group_imbalance'):.4f}, ranks "
              f"{one.mean('worker_imbalance'):.4f}, by layer and ring step {one.mean('ring_imbalance'):.4f}",
              file=sys.stderr)
    rows = []

    def add(name, value, asked, is_met, peer):
        rows.append(row(name, value, asked, is_met, None if peer is None else f"{peer} as published", command))

    if (shape := os.environ["SHAPE"]) != "2x1":
        command += f" --groups {shape}"
        groups, gpus = shape.split("x")
        for name in ("ChatQA2", "LongAlign", "ProLong"):
            in_order, dealt = (jobs.get(f"{name.lower()}-{way}") for way in ("order", "dealt"))
            if in_order and dealt:
                what = f"{name}-like, {groups} groups of {gpus} GPU{'s' * (gpus != '1')}, 16 samples a step, batching"
                add(f"{what}: speed-up", in_order.seconds / dealt.seconds, None, None, None)
                add(f"{what}: max/mean of groups' times", dealt.mean("group_imbalance"), None, None, None)
        return rows

    at_least = lambda name, value, asked, peer=None: add(name, value, asked, value >= asked, peer)
    at_most = lambda name, value, asked, peer=None: add(name, value, asked, value <= asked, peer)
    faster = lambda slow, fast: jobs[slow].seconds / jobs[fast].seconds
    are_there = lambda *names: all(name in jobs for name in names)
    if are_there("chatqa2-order", "chatqa2-dealt"):
        at_least("ChatQA2-like, two groups, 16 samples a step: batching", faster("chatqa2-order", "chatqa2-dealt"), 1.45, 1.21)
        at_most("max/mean of groups' times, ChatQA2-like, 16 samples a step, batching",
                jobs["chatqa2-dealt"].mean("group_imbalance"), 1.03, 1.41)
    if are_there("longalign-order", "longalign-dealt"):
        at_least("LongAlign-like, two groups, 16 samples a step: batching", faster("longalign-order", "longalign-dealt"),
                 1.30, 1.33)
    if are_there("prolong-order", "prolong-documents", "prolong-dealt"):
        at_least("ProLong-like, 16 samples a step: long documents spread, short ones whole",
                 faster("prolong-order", "prolong-documents"), 1.55)
        add("ProLong-like, two groups, 16 samples a step: batching alone", faster("prolong-order", "prolong-dealt"), None, None,
            None)
    for pattern, called in (("vertical-slash", "vertical-slash"), ("xattention", "XAttention")):
        none, mean = (f"groups-{pattern}-{anchor}" for anchor in ("none", "mean"))
        if not are_there(none, mean):
            continue
        index = lambda name: sum(jobs[name].of("phases", "index"))
        cost = max(0.0, index(mean) - index(none)) / jobs[none].seconds
        fixed, tuned = (held_out_loss(folder, name) for name in (none, mean))
        print(f"held-out loss under {called}: {fixed:.5f} with fixed budgets, {tuned:.5f} tuned; attention of a step: "
              + ", ".join(f"{sum(sum(jobs[name].of('phases', phase)) for phase in ATTENTION) / jobs[name].seconds:.3f}"
                          for name in (none, mean)), file=sys.stderr)
        at_least(f"four samples a step (ChatQA2-like), two groups, {called}: tuning (mean, 0.1) on top of batching, speed-up",
                 faster(none, mean), 1.06, 1.12)
        for name, what in ((none, "batching"), (mean, "tuned")):
            add(f"max/mean of groups' times, four samples a step (ChatQA2-like), {called}, {what}",
                jobs[name].mean("group_imbalance"), None, None, None)
        at_most(f"what tuning itself costs, {called}, share of a step", cost, 0.005, 0.012)
        at_most(f"held-out loss with tuning (mean, 0.1) against fixed budgets, {called}, share", tuned / fixed - 1, 0.0025)
    if are_there("ring-none", "ring-mean"):
        at_most("ranks of a ring under XAttention by top-p, tuned: max/mean of a layer",
                jobs["ring-mean"].mean("ring_imbalance"), 1.05, 1.08)
        add("ranks of a ring under XAttention by top-p, untuned: max/mean of a layer",
            jobs["ring-none"].mean("ring_imbalance"), None, None, 1.34)
    return rows


def held_out_loss(folder, name):
    """A job's last one."""
    with open(pathlib.Path(folder) / f"{name}.csv") as lines:
        return [float(line["heldout_loss"]) for line in csv.DictReader(lines) if line["heldout_loss"]][-1]


class Ways:
    """The counted steps of groups_bench, by way: all ways have the same samples."""

    def __init__(self, folder, name):
        self.name, self.steps = name, {}
        for line in (pathlib.Path(folder) / f"{name}.steps").read_text().splitlines():
            step = json.loads(line)
            if "held_out_loss" in step:
                self.held_out_loss = step["held_out_loss"]
                continue
            self.steps.setdefault(step["way"], []).append(step)
        for way, steps in self.steps.items():
            print(f"{name}, {way}: {len(steps)} steps, {self.seconds(way) / len(steps):.4f} s each, groups dealt to "
                  f"{self.mean(way, 'dealt_imbalance'):.4f}, took {self.mean(way, 'group_imbalance'):.4f}, "
                  f"{self.mean(way, 'micro_batches'):.1f} micro-batches", file=sys.stderr)

    def seconds(self, way, key="step_seconds"):
        return sum(step[key] for step in self.steps[way])

    def mean(self, way, key):
        return statistics.fmean(step[key] for step in self.steps[way])

    def apart(self, key):
        """The largest difference of a figure of the same step between two ways, as a share of it."""
        first, second = self.steps.values()
        return max(abs(b[key] / a[key] - 1) for a, b in zip(first, second))


def one_rows(folder):
    command = "bench/balance.sh --one-gpu"
    what = "one GPU plays two groups in turn, gradients not exchanged: "
    published = lambda peer: None if peer is None else f"{peer} as published"
    at_least = lambda name, value, asked, peer: row(what + name, value, asked, value >= asked, published(peer), command)
    at_most = lambda name, value, asked, peer: row(what + name, value, asked, value <= asked, published(peer), command)
    plain = lambda name, value: row(what + name, value, None, None, None, command)
    chatqa2, longalign, prolong, four = (Ways(folder, name) for name in ("chatqa2", "longalign", "prolong", "four"))
    faster = lambda ways: ways.seconds("in_order") / ways.seconds("by_cost")
    sixteen = (chatqa2, longalign, prolong)
    names = ("ChatQA2-like", "LongAlign-like", "ProLong-like")
    cost = four.seconds("tuned", "index_seconds") - four.seconds("by_cost", "index_seconds")
    fixed, tuned = (Ways(folder, f"learn-{way}").held_out_loss for way in ("fixed", "tuned"))
    print(f"held-out loss: {fixed:.5f} with fixed budgets, {tuned:.5f} tuned", file=sys.stderr)
    both = sum(sum(step["group_seconds"]) for step in four.steps["by_cost"])
    return [
        at_least("ChatQA2-like, 16 samples a step: batching", faster(chatqa2), 1.45, 1.21),
        at_least("LongAlign-like, 16 samples a step: batching", faster(longalign), 1.30, 1.33),
        at_least("ProLong-like, 16 samples a step: batching of whole samples, none spread", faster(prolong), 1.55, None),
        *(at_most(f"max/mean of groups' times, {name}, 16 samples a step, batching", ways.mean("by_cost", "group_imbalance"),
                  1.03, 1.41) for name, ways in zip(names, sixteen)),
        *(plain(f"max/mean of groups' times, {name}, 16 samples a step, in order", ways.mean("in_order", "group_imbalance"))
          for name, ways in zip(names, sixteen)),
        at_most("loss of a step dealt by cost against in order, largest difference, share",
                max(ways.apart("loss") for ways in sixteen), 2**-8, None),
        at_most("gradient norm of a step dealt by cost against in order, largest difference, share",
                max(ways.apart("gradient_norm") for ways in sixteen), 2**-8, None),
        plain("max/mean of groups' times, ChatQA2-like, four samples a step, vertical-slash, batching",
              four.mean("by_cost", "group_imbalance")),
        plain("max/mean of groups' times, ChatQA2-like, four samples a step, vertical-slash, tuned",
              four.mean("tuned", "group_imbalance")),
        at_least("ChatQA2-like, four samples a step: tuning (mean, 0.1) on top of batching, speed-up",
                 four.seconds("by_cost") / four.seconds("tuned"), 1.06, 1.12),
        at_most("held-out loss of text (ChatQA2-like, a quarter of the length) with tuning (mean, 0.1) against fixed budgets, "
                "after some hundred steps, share", tuned / fixed - 1, 0.0025, None),
        at_most("what tuning itself costs, share of what groups compute", max(0.0, cost) / both, 0.005, 0.012),
    ]


def plan_rows(folder, name=" on one GPU (length, pattern, density, documents, precision)",
              command="bench/balance.sh --plan"):
    errors = []
    for plan in sorted(pathlib.Path(folder).glob("*.plan")):
        predicted = json.loads(plan.read_text())["prediction"]["step_seconds"]
        taken = statistics.median(Steps(folder, plan.stem).of("step_seconds"))
        errors.append(abs(predicted / taken - 1))
        case = plan.with_suffix(".case").read_text().strip()
        print(f"{case}: predicted {predicted:.4f} s, took {taken:.4f} s, {predicted / taken - 1:+.1%}", file=sys.stderr)
    name = f"plan against measured step, {len(errors)} cases{name}, "
    at_most = lambda what, value, asked: row(name + what, value, asked, value <= asked, None, command)
    return [at_most("median error", statistics.median(errors), 0.03), at_most("worst error", max(errors), 0.08)]


def pair_plan_rows(folder):
    return plan_rows(folder, "", "bench/balance.sh --plan --gpus")


class Halves:
    """A job's steps with short documents and, after them, those with one document a sequence."""

    def __init__(self, folder, name):
        steps = [json.loads(line) for line in (pathlib.Path(folder) / f"{name}.steps").read_text().splitlines()]
        self.name = name
        self.attempt = json.loads((pathlib.Path(folder) / f"{name}.job").read_text())["attempts"][-1]
        longest = [max(int(length["tokens"]) for length in step["documents"]) for step in steps]
        is_long = [tokens == max(longest) for tokens in longest]
        if is_long != sorted(is_long) or len(set(is_long)) != 2:
            sys.exit(f"{name}: short documents do not come first: has the order of the loader changed?")
        self.halves = [steps[:is_long.index(True)], steps[is_long.index(True):]]

    def seconds(self, half, left_out):
        """The mean of a half's steps less such a share of them, which come first."""
        steps = self.halves[half]
        return statistics.fmean(float(step["step_seconds"]) for step in steps[int(len(steps) * left_out):])

    def changes(self):
        return [change for change in self.attempt.get("plan_changes", []) if change["state"] == "IN_FORCE"]

    def shapes(self, half):
        """In which shapes its steps were trained, and how many in each."""
        starts = [(0, self.attempt["plan"])] + [(int(change["effective_step"]), change) for change in self.changes()]
        counts = {}
        for step in self.halves[half]:
            shape = [shape for start, shape in starts if start <= int(step["step"])][-1]
            name = f"{shape['layout'].lower()}, {shape['ring']['kind'].lower()}"
            counts[name] = counts.get(name, 0) + 1
        return "; ".join(f"{name} ({count} steps)" for name, count in counts.items())


def live_rows(folder, where="", command="bench/balance.sh --live"):
    live = Halves(folder, "live")
    fixed = [(Halves(folder, before.stem), Halves(folder, before.stem.replace("-before", "-after")))
             for before in sorted(pathlib.Path(folder).glob("fixed-*-before.steps"))]
    for change in live.attempt.get("plan_changes", []):
        print(f"live: plan {change['version']} from step {change['effective_step']}, {change['state']}: "
              f"{'; '.join(change.get('reasons', []))}", file=sys.stderr)
    ratios = {}
    for half, what in enumerate(("short documents", "long documents")):
        # What is fixed has nothing to settle but the start of a half; what lives has three quarters of it for that.
        best = min(statistics.fmean(job.seconds(half, 1 / 3) for job in pair) for pair in fixed)
        for job in itertools.chain.from_iterable(fixed):
            print(f"{job.name}, {what}: {job.seconds(half, 1 / 3):.4f} s a step, {job.shapes(half)}", file=sys.stderr)
        for way, left_out in (("settled", 3 / 4), ("every step counted", 0)):
            seconds = live.seconds(half, left_out)
            ratios.setdefault(way, []).append(best / seconds)
            print(f"live, {what}, {way}: {seconds:.4f} s a step, {best / seconds:.3f} of the best fixed plan's speed; "
                  f"{live.shapes(half)}", file=sys.stderr)
    name, value = LIVE.format(where), min(ratios["settled"])
    return [row(name, value, 0.97, value >= 0.97, None, command),
            row(f"{name}, every step counted", min(ratios["every step counted"]), None, None, None, command)]


def sockets_live_rows(folder):
    return live_rows(folder, ", two nodes through sockets", "bench/balance.sh --live --sockets")


def recall_rows(folder):
    """The task that tuning moves furthest, up or down, of all patterns, and the one that loses most, in points of answers, by
    the mean over seeds; and the mean over tasks. Where it moved no choice that says nothing."""
    jobs = {(job["pattern"], job["seed"], job["anchor"]): job
            for job in json.loads((pathlib.Path(folder) / "tuning.json").read_text())["jobs"]}
    by_seed, is_tuned = {}, True  # by pattern and task: points of each seed
    for (pattern, seed, anchor), tuned in jobs.items():
        if anchor == "none":
            continue
        fixed = jobs[pattern, seed, "none"]
        is_tuned = is_tuned and tuned["balance"]["moved"] > 0
        micro_batches = len(tuned["density_per_layer"]) * tuned["samples"]["micro_batches"]
        print(f"{pattern}, seed {seed}: {tuned['balance']['moved'] / micro_batches:.0%} of the choices moved; held-out loss "
              f"{tuned['last_evaluation']['loss'] / fixed['last_evaluation']['loss'] - 1:+.3%}", file=sys.stderr)
        for task, answers in tuned["last_evaluation"]["answers"].items():
            if task == "text" or not answers["asked"]:
                continue
            of_fixed = fixed["last_evaluation"]["answers"][task]
            moved = 100 * (answers["right"] / answers["asked"] - of_fixed["right"] / of_fixed["asked"])
            by_seed.setdefault((pattern, task), []).append(moved)
            print(f"{pattern}, seed {seed}, {task}: {of_fixed['right'] / of_fixed['asked']:.1%} with fixed budgets, "
                  f"{moved:+.2f} points tuned, of {answers['asked']} asked", file=sys.stderr)
    moved = {key: statistics.fmean(points) for key, points in by_seed.items()}
    for (pattern, task), points in moved.items():
        print(f"{pattern}, {task}: {points:+.2f} points in the mean", file=sys.stderr)
    def of_task(name, key, value, asked):
        return row(name, value, asked, None if asked is None else value <= asked and is_tuned, None, "bench/balance.sh --recall",
                   pattern=key[0], task=key[1], points_by_seed=[round(points, 2) for points in by_seed[key]])

    furthest, lost = max(moved, key=lambda key: abs(moved[key])), min(moved, key=moved.get)
    return [of_task(RECALL, furthest, abs(moved[furthest]), 1),
            of_task(f"{RECALL} that the task which loses most loses", lost, max(0.0, -moved[lost]), 1),
            row(f"{RECALL}, the mean over tasks and patterns", statistics.fmean(moved.values()), None, None, None,
                "bench/balance.sh --recall")]


ROWS = {"dealing": dealing_rows, "gpus": gpu_rows, "one": one_rows, "plan": plan_rows, "pair-plan": pair_plan_rows,
        "live": live_rows, "sockets-live": sockets_live_rows, "recall": recall_rows}


def main():
    is_printed = sys.argv[1] == "print"
    what, *folder = sys.argv[2 if is_printed else 1:]
    rows = ROWS[what](*folder)
    if is_printed:
        print(json.dumps(rows, indent=2))
        return
    if FIGURES.exists():  # what other commands measured stays, and why they did not
        commands, measured = {entry["command"] for entry in rows}, {entry["row"] for entry in rows}
        rows = [entry for entry in json.loads(FIGURES.read_text())
                if entry["value"] is not None and entry["command"] not in commands and entry["row"] not in measured] + rows
    known = {entry["row"] for entry in rows}
    rows += [row(name, None, asked, False, None, GPUS, reason=reason)
             for name, asked, reason in UNMEASURED if name not in known]
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=2) + "\n")
    print(FIGURES.read_text(), end="")


main()
