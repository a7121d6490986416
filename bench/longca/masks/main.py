#!/usr/bin/env python3
"""Masks x choices of tiles x kernels x directions x lengths on one GPU: every mask of ringleader.kernels beside what PyTorch
has, cuDNN's attention and FlashAttention where they can do the mask and FlexAttention (compiled) everywhere, and beside
the packages flash_attn, flash_attn_3 and magi_attention where they are installed. Writes a CSV file, a picture and rows of
bench/results/figures/masks_schemes.json. bench/longca/run.sh says how it is started; `--device cpu` runs it in small
shapes and without rows, to see that it runs.

A cell is the median, and the 20th and 80th percentile, of runs before each of which the L2 cache is flushed: 9 runs, or as
many as --seconds allow, but 3. What makes a mask's data (intervals, lists of tiles, FlexAttention's BlockMask) is outside of
the clock, in plan_ms, and inside in with_plan_ms; what a call makes of it is inside of both. TFLOP/s count visible pairs of
visited tiles, 4 d FLOPs each forward and 10 d backward. `peak_mib` is what a direction takes beyond the inputs, backward with what forward saved for it.

`error` compares every kernel with attention by its definition (exact.py), in 256 rows all over the sequence of each
head: it is of the row of the output, or of a gradient, that is off most. Beyond 2 % a cell says "wrong" and has no
TFLOP/s, and the exit code is 1. A kernel that cannot do a cell says "unsupported", and why if that is not the mask, or
"out of memory"; one that was not come to before SIGTERM (timeout's) says "not run", and the exit code is 1."""

import argparse
import datetime
import itertools
import math
import os
import pathlib
import signal
import statistics
import sys
import time

# FlexAttention's compiler starts processes to compile in, and waits minutes for them when this one ends.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

sys.path += [str(pathlib.Path(__file__).resolve().parents[up]) for up in (1, 2)]

import exact
import lengths
from choices import Choice, choices_of, pairs_of
from figure_rows import write_rows
from peers import KERNELS, attention_of, backend_of, check_supported, is_installed, synchronize
from picture import picture
from problem import Problem
from ringleader.kernels.masks import NAMES
from tables import NOT_RUN, WRONG, Table, figures

DIRECTIONS = ("forward", "backward")
FEWEST, MOST = 3, 9  # repetitions
TOLERANCE = 2e-2  # of a row: bf16 rounds q, k, v, weights and results


class CutOff(BaseException):
    """SIGTERM came."""


def repetitions(run, device, seconds, flush):
    """-> (milliseconds of each, what the last returned). Warms up by two runs, the first of which may compile."""
    for _ in range(2):
        made = run()
        synchronize(device)
    times, started = [], time.perf_counter()
    while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() - started < seconds):
        made = None  # its memory serves the next run
        flush.zero_()
        if device == "cpu":
            start = time.perf_counter()
            made = run()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times, made


def error_of(found, expected):
    """The largest error of the results, infinite where one is not finite. expected: exact.Rows of each."""
    errors = [rows.error(result) for rows, result in zip(expected, found)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def note_of(kernel, error):
    """What rows say of a kernel that raised `error`. Faults of our own kernel are raised again."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if kernel == "ringleader":
        raise error
    why = str(error).partition("\n")[0]
    return f"unsupported: {why}" if why and "No available kernel" not in why else "unsupported"  # of a forced back end


class Peak:
    """Of the memory in use on a GPU, MiB beyond what was when this was made; None on the CPU."""

    def __init__(self, device):
        self.held = 0
        if device == "cuda":
            torch.cuda.empty_cache()
            self.held = torch.cuda.memory_allocated()
        self.device = device

    def start(self):
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def take(self):
        return (torch.cuda.max_memory_allocated() - self.held) / 2**20 if self.device == "cuda" else None


def measure(kernel, name, chosen, p, seconds, flush):
    """-> ({direction: (its times, its results, its peak)} of those that the kernel can, seconds of the plan)"""
    peak = Peak(p.device)
    peak.start()
    attend, plan_seconds = attention_of(kernel, name, chosen, p)
    q, k, v = (x.detach() for x in (p.q, p.k, p.v))
    times, out = repetitions(lambda: attend(q, k, v), p.device, seconds, flush)
    of_forward = peak.take()
    if p.device == "cpu" and kernel == "flex":  # which has no backward there
        return {"forward": (times, (out,), of_forward)}, plan_seconds
    out = None
    out = attend(p.q, p.k, p.v)
    peak.start()
    of_backward, gradients = repetitions(
        lambda: torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out, retain_graph=True), p.device, seconds, flush)
    return {"forward": (times, (out.detach(),), of_forward), "backward": (of_backward, gradients, peak.take())}, plan_seconds


def fill(row, times, plan_seconds, pairs, p):
    """What a row says of its times."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    row.update(ms=statistics.median(times), p20_ms=fifths[0], p80_ms=fifths[3], repetitions=len(times),
               plan_ms=plan_seconds * 1e3, share=pairs / p.tokens**2)
    row["with_plan_ms"] = row["ms"] + row["plan_ms"]
    flops = {"forward": 4, "backward": 10}[row["direction"]] * p.q.shape[3] * pairs * p.q.shape[1]
    row["tflops"] = flops / row["ms"] * 1e-9


class Cells:
    """Those of one mask and one choice of tiles, which share what is drawn and what is expected of it."""

    def __init__(self, problem, mask, choice, seconds, flush):
        self.problem, self.mask, self.choice, self.seconds, self.flush = problem, mask, choice, seconds, flush
        self.drawn = self.pairs = self.expected = None

    def _draw(self):
        if self.pairs is None:
            self.drawn = self.choice.draw(self.problem.tokens, self.problem.q.shape[1], self.problem.device)
            self.pairs = pairs_of(self.problem.intervals(self.mask).rows[0], self.drawn)
            self.expected = exact.rows_of(self.problem, self.mask, self.drawn)

    def rows(self, kernel):
        """The two directions' rows."""
        p = self.problem
        rows = {d: {"mask": self.mask, "choice": self.choice.name, "tokens": p.tokens, "direction": d, "kernel": kernel,
                    "backend": backend_of(kernel, self.mask, p.device)} for d in DIRECTIONS}
        try:
            check_supported(kernel, self.mask, self.choice, p.device)
            self._draw()
            measured, plan_seconds = measure(kernel, self.mask, self.drawn, p, self.seconds, self.flush)
        except Exception as error:  # a peer's faults are of any kind
            note = note_of(kernel, error)
            return [{**row, "note": note} for row in rows.values()]
        for direction, row in rows.items():
            if direction not in measured:
                row["note"] = "unsupported"
                continue
            times, results, peak = measured[direction]
            fill(row, times, plan_seconds, self.pairs, p)
            if peak is not None:
                row["peak_mib"] = peak
            row["error"] = error_of(results, self.expected[direction])
            if row["error"] > TOLERANCE:
                row["note"] = WRONG
                del row["tflops"]  # a wrong result has no speed
        return list(rows.values())


def run_cells(options, table):
    """Adds a row of every cell, in each direction; once SIGTERM came of those that were not come to, too. -> whether it did"""
    on_gpu = options.device == "cuda"
    flush = torch.empty((256 if on_gpu else 1) << 20, dtype=torch.uint8, device=options.device)
    choices = [choice for text in options.choices for choice in choices_of(text)]
    try:
        for tokens in options.tokens:
            problem = Problem(options.device, tokens, *((64, 8, 128) if on_gpu else (4, 2, 64)), options.lengths)
            for mask, choice in itertools.product(options.masks, choices):
                cells = Cells(problem, mask, choice, options.seconds, flush)
                for row in itertools.chain.from_iterable(map(cells.rows, options.kernels)):
                    table.add(row)
        return False
    except CutOff:
        table.write_again()
        names = ("tokens", "mask", "choice", "kernel", "direction")
        known = {tuple(row[name] for name in names) for row in table.rows}
        for cell in itertools.product(options.tokens, options.masks, [c.name for c in choices], options.kernels, DIRECTIONS):
            if cell not in known:
                table.add({**dict(zip(names, cell)), "note": NOT_RUN})
        return True


def cut_off(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise CutOff


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of longca_masks.csv and longca_masks.svg")
    parser.add_argument("--figures", type=pathlib.Path, help="the file of rows, which other rows stay in")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--choices", nargs="+", default=["all", "5", "20", "50"], metavar="CHOICE",
                        help="of tiles: all, or a percentage that is drawn evenly (uniform:5), in blocks of different "
                             "sizes (variable:5) or as models choose (learned:5); 5 is the first and the last of these")
    parser.add_argument("--masks", nargs="+", default=list(NAMES), choices=list(NAMES), metavar="MASK", help=", ".join(NAMES))
    parser.add_argument("--kernels", nargs="+", default=list(filter(is_installed, KERNELS)), choices=KERNELS,
                        help=f"{', '.join(KERNELS)}; those that are installed where none is named")
    parser.add_argument("--lengths", type=pathlib.Path, metavar="FILE",
                        help="of documents: a histogram in the form of LongCA-bench's, as those of its data sets in "
                             "bench/longca/lengths. Where none is named, lengths are ProLong-like and scaled to --tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a cell's repetitions in each direction")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--command", default="unknown", help="that rows name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    has_figures = on_gpu and options.figures is not None
    options.lengths = lengths.of_histogram(options.lengths) if options.lengths else lengths.PROLONG_LIKE
    common = {"hardware": torch.cuda.get_device_name() if on_gpu else "cpu", "commit": options.commit,
              "date": datetime.date.today().isoformat(), "command": options.command, "lengths": options.lengths.name}
    signal.signal(signal.SIGTERM, cut_off)
    options.folder.mkdir(parents=True, exist_ok=True)
    table = Table(options.folder / "longca_masks.csv", common)
    was_cut_off = run_cells(options, table)
    picture(table.rows, options.folder / "longca_masks.svg")
    new = figures(table.rows, common)
    if has_figures and new:
        write_rows(new, options.figures)
    wrong = ["{kernel}'s {direction} of {mask} ({choice}) at {tokens} tokens is off by {error:.3f}".format(**row)
             for row in table.rows if row.get("note") == WRONG]
    if was_cut_off:
        wrong.append(f"cut off; the cells that ran are in {options.folder}, the others say {NOT_RUN!r}")
    if wrong:
        raise SystemExit("\n".join(f"longca: {line}" for line in wrong))


if __name__ == "__main__":
    main()
