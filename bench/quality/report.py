#!/usr/bin/env python3
"""From quality.json (suite.py): a table (quality.md), a picture (quality.svg) and rows for figures/patterns.json.

    bench/quality/report.py DIR/quality.json --output bench/results [--readme README.md]

A row that is there already under its name is replaced; one that the suite made before and makes no more goes once all
of its jobs are done; others stay. What plans of other lengths found is apart: in files of their own, as quality_8192
and quality_long, and in rows that say how many tokens a sequence has. --readme writes the short table between README's marks
anew. Without matplotlib there is no picture.
"""

import argparse
import json
import math
import pathlib
import re
import shutil
import statistics

from attentions import CAUSAL
from suite import DEFAULT, ENOUGH, learned
from tasks import TEXT

NEEDLES = ("needles", "needles-by-4")
# The short table's rows: what it says of them, and which patterns of which share these are.
BLOCKS = ("block-topk", "xattention", "moba", "fixed-blocks", "window")
SUMMARY = (
    ("`key_groups`, the default on GPUs", [(DEFAULT, None)]),
    ("`key_groups`", [("key-groups", 0.10)]),
    ("`key_groups`", [("key-groups", 0.05)]),
    ("`key_groups` of pairs of heads, faster", [("key-groups of pairs of heads", 0.10)]),
    ("`key_groups` of 16 queries instead of 64, slower", [("key-groups of 16 queries", 0.02)]),
    ("`adaspa`, an oracle: its choice takes twice as long as `key_groups`'", [("adaspa", 0.10)]),
    ("`vertical_slash` that keeps nine tenths of the mass", [("vertical-slash, top-p", None)]),
    ("`xattention` that keeps nine tenths of the mass", [("xattention, threshold", None)]),
    ("`vertical_slash` of a fixed share, estimated at the end", [("vertical-slash", 0.05)]),
    ("`vertical_slash` of a fixed share, estimated everywhere", [("vertical-slash, spread", 0.05)]),
    ("`block_topk`, `xattention`, `moba`, `fixed_blocks`, window", [(name, 0.10) for name in BLOCKS]),
)
README_MARKS = ("<!-- made by bench/quality/report.py --readme -->", "<!-- end of what it made -->")
OTHERS = ("4096", "8192", "65536", "long")  # plans whose results stand beside the first one's
MOST_MINUTES = 25  # of a whole run on one GPU


def kept(job):
    return "kept apart" if job["apart"] else "not kept apart"


def named(job):
    if "apart" in job:  # of text alone
        return (f"{job['pattern']}, text alone, {job['tokens']} tokens, documents of {job['document_tokens']} "
                f"{kept(job)}")
    return job["pattern"] + ("" if job["asked_density"] is None else f" of {job['asked_density']:.0%}")


class Results:
    """Shares of what the dense model answers, which went on as long, by pattern, way of asking and task, in sequences of
    one length. What was trained again with other seeds is the mean of all, each beside the dense model of its seed."""

    WAYS = {  # which evaluation of a pattern's job is meant
        "at once": lambda job: job["first_evaluation"],
        "after": lambda job: job["last_evaluation"],
        "trained sparse, asked dense": lambda job: job["last_evaluation"].get("dense", job["last_evaluation"]),
    }

    def __init__(self, found):
        self.found = found
        self.plan = found["plan"]
        self.tokens = found["curriculum"][-1]["tokens"]  # of a sequence
        self.name = "quality" + (f"_{self.plan}" if self.plan in OTHERS else "")  # of its files
        patterns = found["patterns"]
        self.dense = patterns[0]
        assert self.dense["pattern"] == "dense", "the first job goes on dense"
        self.learned = learned(found["curriculum"][-1]["last_evaluation"])
        names = [job["pattern"] for job in patterns]
        self.patterns = sorted(patterns[1:], key=lambda job: (names.index(job["pattern"]), job["density"]))
        self.sparse = [job for job in self.patterns if job["attention"].get("pattern") != "dense"]
        self.tasks = [task for task, answers in self.dense["last_evaluation"]["answers"].items()
                      if answers["asked"] and task != "text"]

    def runs(self, job, way):
        """(job, dense job) of each seed; one alone before anything is trained, where all are alike."""
        repeats = [] if way == "at once" else self.found["repeats"]
        dense = {repeat["seed"]: repeat for repeat in repeats if repeat["pattern"] == "dense"}
        return [(job, self.dense)] + [(repeat, dense[repeat["seed"]]) for repeat in repeats if repeat["seed"] in dense and
                                      (repeat["pattern"], repeat["asked_density"]) == (job["pattern"], job["asked_density"])]

    def counts(self, job, way, task):
        """(right, dense attention's right, asked) of each seed."""
        of = self.WAYS[way]
        return [(of(run)["answers"][task]["right"], of(dense)["answers"][task]["right"], of(run)["answers"][task]["asked"])
                for run, dense in self.runs(job, way)]

    def dense_answers(self, way, task):
        return self.WAYS[way](self.dense)["answers"][task]

    def share(self, job, way, task):
        """Of what dense attention answers; None where it answers nothing."""
        counts = self.counts(job, way, task)
        return statistics.fmean(right / dense for right, dense, _ in counts) if all(dense for _, dense, _ in counts) else None

    def standard_error(self, job, way, task):
        """Of share: from its scatter over seeds, or, of one alone, as if the two models' answers were drawn apart, which is
        more than it is. None where there is no share."""
        counts = self.counts(job, way, task)
        if not all(dense for _, dense, _ in counts):
            return None
        shares = [right / dense for right, dense, _ in counts]
        if len(shares) > 1:
            return statistics.stdev(shares) / math.sqrt(len(shares))
        (right, dense, asked), = counts
        return shares[0] * math.sqrt(1 / right + 1 / dense - 2 / asked) if right else 0.0

    def worst_task(self, job, way, tasks=None):
        """The task of which least is kept of what dense attention answers, be that all or not; None where it answers none."""
        shares = {task: self.share(job, way, task) for task in tasks or self.tasks}
        return min((task for task, share in shares.items() if share is not None), key=shares.get, default=None)

    def worst(self, job, way, tasks=None):
        task = self.worst_task(job, way, tasks)
        return None if task is None else self.share(job, way, task)

    def text_ratios(self, job, way):
        """Of each seed; none where there was no text."""
        texts = [[self.WAYS[way](of)["answers"].get("text", {"asked": 0}) for of in run] for run in self.runs(job, way)]
        return [mine["loss"] / dense["loss"] for mine, dense in texts if dense["asked"]]

    def text_ratio(self, job, way):
        ratios = self.text_ratios(job, way)
        return statistics.fmean(ratios) if ratios else None

    def foresight(self, job, way):
        """What later queries of a tile tell earlier ones of text, as shares of the loss of the same model asked dense:
        how much further the loss falls for the eight queries before the last of a tile than for the last, behind which
        none has chosen, with its standard error from how far the eight scatter; and how much further for all before the
        last. None where text was not told apart by place."""
        evaluation = self.WAYS[way](job)
        sparse = evaluation.get("text_by_place")
        if not sparse or not sparse[TEXT[-1]]["asked"]:
            return None
        dense = evaluation["dense"]["text_by_place"]
        loss = lambda parts, places: sum(parts[place]["asked"] * parts[place]["loss"] for place in places)
        over_dense = lambda *places: loss(sparse, places) / loss(dense, places)
        *before, last = TEXT
        eight = [over_dense(place) for place in before[1:]]
        return {"eight": over_dense(last) - statistics.fmean(eight),
                "error": statistics.stdev(eight) * math.sqrt(1 + 1 / len(eight)),
                "all": over_dense(last) - over_dense(*before)}

    def seeing_ahead(self):
        """(job, foresight at once, foresight after) of those that have it."""
        jobs = [*self.sparse, *self.found["texts"][1::2]]
        found = [(job, self.foresight(job, "at once"), self.foresight(job, "after")) for job in jobs]
        return [(job, first, last) for job, first, last in found if first is not None]

    def beside_causal(self):
        """(job, text's loss over that with the causal choice of as many blocks at once, after) where queries of a tile
        choose together and there was text."""
        causal = {(job["pattern"], job["asked_density"]): job for job in self.sparse}
        found = []
        for job in self.sparse:
            other = causal.get((job["pattern"] + CAUSAL, job["asked_density"]))
            if other is not None and self.text_ratios(job, "at once"):
                loss = lambda of, way: self.WAYS[way](of)["answers"]["text"]["loss"]
                found.append((job, *(loss(job, way) / loss(other, way) for way in ("at once", "after"))))
        return found


def table(results):
    found, steps = results.found, results.found["more_steps"]
    last = found["curriculum"][-1]
    percent = lambda share: "-" if share is None else f"{100 * share:.0f}"
    missed = {task: of["share"] for task, of in results.learned.items() if not of["learned"]}
    marked = [f"{task} *" if task in missed else task for task in results.tasks]
    whole = f", the whole run {found['wall_seconds'] / 60:.1f} minutes" if "wall_seconds" in found else ""
    lines = [
        "# What each attention pattern keeps of what dense attention learns", "",
        f"{last['tokens']:,} tokens, {found['hardware']}, {found['date']}, commit {found['commit']}, made by "
        f"`{found['command']}`. The curriculum took {sum(job['wall_seconds'] for job in found['curriculum']):.0f} s"
        f"{whole}; its model answers, by task, in percent:", "",
        "| " + " | ".join(marked) + " |", "|" + "---|" * len(results.tasks),
        "| " + " | ".join(percent(a["right"] / a["asked"]) for a in
                          (results.dense_answers("at once", task) for task in results.tasks)) + " |", "",
        *([f"\\* Not learned: of {', '.join(f'{task} ({share:.1%})' for task, share in missed.items())} dense "
           f"attention answers less than {ENOUGH:.0%}. What patterns keep of these is a share of what it does answer, "
           "and says nothing of the rest.", ""] if missed else []),
        *([f"{found['jobs_left']} jobs are not done yet.", ""] if found["jobs_left"] else []),
        f"Below, percent of what dense attention answers: at once / after {steps} more steps with the pattern / then asked "
        "dense. Text is the loss over dense attention's after as many steps.", "",
        *repeated(results),
        "| pattern | visited | " + " | ".join(marked) + " | text |", "|" + "---|" * (len(results.tasks) + 3)]
    for job in results.patterns:
        cells = [" / ".join(percent(results.share(job, way, task)) for way in Results.WAYS) for task in results.tasks]
        ratio = results.text_ratio(job, "after")
        lines.append(f"| {job['pattern']} | {job['density']:.1%} | " + " | ".join(cells) +
                     f" | {'-' if ratio is None else f'{ratio:.4f}'} |")
    if found["texts"]:
        lines += ["", "Text alone, held-out loss after as many steps of the default and of dense attention:", "",
                  "| tokens | documents of | | visited | the default | dense | |", "|" + "---|" * 7]
    for dense, job in zip(found["texts"][::2], found["texts"][1::2]):
        losses = [of["last_evaluation"]["loss"] for of in (job, dense)]
        lines.append(f"| {job['tokens']:,} | {job['document_tokens']:,} | {kept(job)} | "
                     f"{job['density']:.1%} | {losses[0]:.4f} | {losses[1]:.4f} | {losses[0] / losses[1]:.4f} |")
    return "\n".join(lines + ahead(results)) + "\n"


def summary(results):
    """README's table: of each row the range over its patterns."""
    of = {(job["pattern"], job["asked_density"]): job for job in results.sparse}
    steps = results.found["more_steps"]
    lines = [f"| pattern | causal tiles visited | worst task, of what dense answers: at once, after {steps} steps | text loss over dense |",
             "|" + "---|" * 4]
    for words, keys in SUMMARY:
        def spread(value, form):
            ends = [form.format(end(value(of[key]) for key in keys)) for end in (min, max)]
            return " to ".join(dict.fromkeys(ends))
        kept = [spread(lambda job: 100 * results.worst(job, way), "{:.0f}") + " %" for way in ("at once", "after")]
        lines.append(f"| {words} | {spread(lambda job: 100 * job['density'], '{:.0f}')} % | {', '.join(kept)} | "
                     f"{spread(lambda job: results.text_ratio(job, 'after'), '{:.3f}')} |")
    return "\n".join(lines) + "\n"


def between_marks(text, table):
    """README's `text` with `table` between its marks."""
    begin, end = README_MARKS
    assert text.count(begin) == 1 and text.count(end) == 1, f"README wants {begin} and {end}, once each"
    return text[:text.index(begin)] + f"{begin}\n\n{table}\n" + text[text.index(end):]


def ahead(results):
    """What later queries tell of text, where it was told apart by place."""
    steps = results.found["more_steps"]
    seeing, beside = results.seeing_ahead(), results.beside_causal()
    lines = []
    if seeing:
        cell = lambda found: f"{100 * found['eight']:.2f} ± {100 * found['error']:.2f} / {100 * found['all']:.2f}"
        lines += ["", "What later queries of a tile tell: by how many percent of the same model's dense loss that of "
                  "text lies lower for the eight queries before a tile's last one / for all before it than for the "
                  "last one, behind which none has chosen. Under window, moba, vertical-slash and causal choice no "
                  "later query of a tile has a say: what they show is chance.", "",
                  f"| pattern | visited | at once | after {steps} steps |", "|" + "---|" * 4]
        lines += [f"| {named(job)} | {job['density']:.1%} | {cell(first)} | {cell(last)} |"
                  for job, first, last in seeing]
    if beside:
        lines += ["", "Text's loss where all queries of a tile choose, over that where its first one chooses as many "
                  "blocks (causal): both what later queries tell and how much better a choice by all serves all.", "",
                  f"| pattern | visited | at once | after {steps} steps |", "|" + "---|" * 4]
        lines += [f"| {named(job)} | {job['density']:.1%} | {first:.4f} | {last:.4f} |" for job, first, last in beside]
    return lines


def repeated(results):
    """What was trained with several seeds, and how far the task moves of which least is kept."""
    lines = []
    for job in results.sparse:
        seeds, task = len(results.runs(job, "after")), results.worst_task(job, "after")
        if seeds > 1 and task is not None:
            error = results.standard_error(job, "after", task)
            lines.append(f"{named(job)} after these steps is the mean of {seeds} seeds, each "
                         f"beside dense attention's with the same: {100 * results.share(job, 'after', task):.1f} ± "
                         f"{100 * error:.1f} % of {task}, the least, of which "
                         f"{results.dense_answers('after', task)['asked']} answers are asked each time.")
    return [" ".join(lines), ""] if lines else []


def picture(results, path):
    try:
        import matplotlib
    except ImportError:
        print("no picture: this python3 has no matplotlib; call report.py with one that has")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "quality"  # the same bytes for the same results
    from matplotlib import pyplot

    panels = results.tasks + ["loss of text, over dense", "loss of all, over dense"]
    columns = 4
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.4 * columns, 2.6 * rows), squeeze=False)
    names = list(dict.fromkeys(job["pattern"] for job in results.sparse))
    lines = dict(zip(Results.WAYS, (":", "-", "--")))
    for axis, panel in zip(axes.flat, panels):
        for number, name in enumerate(names):
            jobs = sorted((job for job in results.sparse if job["pattern"] == name), key=lambda job: job["density"])
            for way, line in lines.items():
                if panel in results.tasks:
                    values = [results.share(job, way, panel) for job in jobs]
                elif panel.startswith("loss of text"):
                    values = [results.text_ratio(job, way) for job in jobs]
                else:
                    values = [Results.WAYS[way](job)["loss"] / Results.WAYS[way](results.dense)["loss"] for job in jobs]
                axis.plot([100 * job["density"] for job in jobs], values, line, marker="os"[number // 10], markersize=3,
                          color=f"C{number}", label=name if way == "after" else None)  # there are ten colours
        of_dense = results.learned.get(panel, {"learned": True})
        axis.set_title(panel if of_dense["learned"] else f"{panel} (dense answers {of_dense['share']:.0%})", fontsize=9)
        axis.set_xscale("log")
        axis.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if panel in results.tasks:
            axis.set_ylim(-0.03, 1.08)
    for axis in list(axes.flat)[len(panels):]:
        axis.axis("off")
    figure.supxlabel("causal tiles visited, percent", fontsize=9)
    figure.supylabel("answers, of what dense attention answers", fontsize=9)
    for way, line in lines.items():
        axes.flat[0].plot([], [], line, color="black", label=way)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="upper center", ncols=7, fontsize=8)
    figure.tight_layout(rect=(0.01, 0.01, 1, 0.94))
    figure.savefig(path, metadata={"Date": None})


def figure_rows(results):
    """The figures of recall, text, the probe's recall (its mean over layers and heads) and that of queries that chose,
    what later queries tell, and the time of the whole run."""
    found, steps = results.found, results.found["more_steps"]

    tokens = f"{results.tokens:,} tokens: " if results.plan in OTHERS else ""

    def row(name, job, value, asked, met, **more):
        return {"row": tokens + name, "value": value, "asked": asked, "met": bool(met),
                "peer": "dense attention, the same model after as many steps", "pattern": job and job["pattern"],
                "visited": job and round(job["density"], 4), **more, "hardware": found["hardware"],
                "commit": found["commit"], "date": found["date"], "command": found["command"]}

    def best(limit, way, tasks):
        """The pattern that visits at most `limit`, to a hundredth of it, and keeps most of the task that it keeps least of."""
        jobs = [job for job in results.sparse
                if job["density"] <= 1.01 * limit and results.worst(job, way, tasks) is not None]
        return max(jobs, key=lambda job: results.worst(job, way, tasks), default=None)

    least_known = min(results.learned, key=lambda task: results.learned[task]["share"])
    share = results.learned[least_known]["share"]
    rows = [row("answers of the dense model that patterns go on from, of the task that it answers least of", None, round(share, 4),
                f">= {ENOUGH}", share >= ENOUGH, task=least_known, peer="none")]
    needles = [task for task in results.tasks if task in NEEDLES]
    for limit, way, tasks, least in ((0.10, "at once", None, 0.90), (0.10, "after", None, 0.97),
                                     (0.10, "at once", needles, 0.98), (0.05, "at once", None, 0.70),
                                     (0.05, "after", None, 0.90)):
        if tasks == []:
            continue
        job = best(limit, way, tasks)
        value, more = None, {}
        if job is not None:
            task = results.worst_task(job, way, tasks)
            value, error = round(results.share(job, way, task), 4), results.standard_error(job, way, task)
            more = {"task": task, "answers": results.dense_answers(way, task)["asked"],
                    "seeds": len(results.runs(job, way)), "standard_error": error and round(error, 4)}
        which = "needles asked at the end" if tasks else "every recall task"
        when = "at once" if way == "at once" else f"after {steps} steps"
        rows.append(row(f"{which}, best pattern at <= {limit:.0%} visited, of what dense answers, {when}", job, value,
                        f">= {least}", value is not None and value >= least, **more))
    for job in results.patterns:
        if job["pattern"] == DEFAULT and (ratios := results.text_ratios(job, "after")):
            value = statistics.fmean(ratios)
            error = {"standard_error": round(statistics.stdev(ratios) / math.sqrt(len(ratios)), 4)} if len(ratios) > 1 else {}
            rows.append(row(f"text, {DEFAULT}, sparse-trained over dense, {job['tokens']} tokens, after {steps} steps", job,
                            round(value, 4), "<= 1.0025", value <= 1.0025, seeds=len(ratios), **error))
    for dense, job in zip(found["texts"][::2], found["texts"][1::2]):
        value = job["last_evaluation"]["loss"] / dense["last_evaluation"]["loss"]
        rows.append(row(f"text alone, {DEFAULT}, sparse-trained over dense, {job['tokens']} tokens, documents of "
                        f"{job['document_tokens']} {kept(job)}, after {job['steps']} steps", job, round(value, 4),
                        "<= 1.0025", value <= 1.0025))
    for job in results.sparse:
        heads = [share for layer in (job.get("probed_recall_per_head") or {}).values() for share in layer]
        if not heads:
            continue
        value, name = round(sum(heads) / len(heads), 4), f"recall of sampled queries (probe), {named(job)}"
        asked, met = (">= 0.95", value >= 0.95) if job["pattern"] == DEFAULT else ("reported", True)
        rows.append(row(name, job, value, asked, met))
        if layers := job.get("recall_per_layer"):
            rows.append(row(f"recall of queries that chose, {named(job)}", job, round(statistics.fmean(layers), 4), "reported", True))
    for job, first, last in results.seeing_ahead():
        rounded = {f"{when}{what}": round(found_then[key], 5) for when, found_then in (("", first), ("after_", last))
                   for key, what in (("eight", "value"), ("error", "standard_error"), ("all", "of_all_before"))}
        rows.append(row(f"text, what later queries of a tile save of the dense loss, {named(job)}, at once", job,
                        rounded.pop("value"), "reported", True, peer="the same model asked dense", **rounded))
    for job, first, last in results.beside_causal():
        rows.append(row(f"text, all queries of a tile choose over its first alone, {named(job)}, at once", job,
                        round(first, 4), "reported", True, peer="the causal choice of as many blocks",
                        after_value=round(last, 4)))
    if "wall_seconds" in found and not found["jobs_left"]:
        minutes = round(found["wall_seconds"] / 60, 1)
        asked, met = ("reported", True) if results.plan in OTHERS else (f"<= {MOST_MINUTES}", minutes <= MOST_MINUTES)
        rows.append(row("quality suite, whole, minutes", None, minutes, asked, met, peer=None))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--output", required=True)
    parser.add_argument("--readme", help="the file whose short table is written anew")
    flags = parser.parse_args()
    found = json.loads(pathlib.Path(flags.results).read_text())
    results = Results(found)
    output = pathlib.Path(flags.output)
    (output / "figures").mkdir(parents=True, exist_ok=True)
    if pathlib.Path(flags.results).resolve() != (output / f"{results.name}.json").resolve():
        shutil.copyfile(flags.results, output / f"{results.name}.json")
    (output / f"{results.name}.md").write_text(table(results))
    print(table(results))
    if flags.readme:
        readme = pathlib.Path(flags.readme)
        readme.write_text(between_marks(readme.read_text(), summary(results)))
    path = output / "figures" / "patterns.json"
    rows = figure_rows(results)
    others = json.loads(path.read_text()) if path.exists() else []
    named = lambda row: re.search(r"--plan (\S+)|$", row["command"])[1]  # the first plan needs no name
    is_ours = lambda row: (row["command"].startswith("bench/quality/run.sh") and
                           (named(row) == results.plan or not named(row) and results.plan not in OTHERS))
    is_old = lambda row: not results.found["jobs_left"] and is_ours(row)
    others = [old for old in others if old["row"] not in {row["row"] for row in rows} and not is_old(old)]
    path.write_text(json.dumps(others + rows, indent=1) + "\n")
    for row in rows:
        print(f"{'met    ' if row['met'] else 'NOT MET'} {row['row']}: {row['value']} (asked {row['asked']})" +
              (f", standard error {row['standard_error']}" if row.get("standard_error") is not None else ""))
    picture(results, output / f"{results.name}.svg")


if __name__ == "__main__":
    main()
