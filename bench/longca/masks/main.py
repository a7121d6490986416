#!/usr/bin/env python3
"""Masks x choices of tiles x kernels x directions x lengths on one GPU: every mask of ringleader.kernels beside what PyTorch
has, cuDNN's attention and FlashAttention where they can do the mask and FlexAttention (compiled) everywhere. Writes a CSV
file, a picture and rows of bench/results/figures/masks_schemes.json. bench/longca/run.sh says how it is started;
`--device cpu` runs it in small shapes and without rows, to see that it runs.

A cell is the median, and the 20th and 80th percentile, of runs before each of which the L2 cache is flushed: 9 runs, or as
many as --seconds allow, but 3. What makes a mask's data (intervals, lists of tiles, FlexAttention's BlockMask) is outside of
the clock, in plan_ms, and inside in with_plan_ms; what a call makes of it is inside of both. TFLOP/s count visible pairs of
visited tiles, 4 d FLOPs each forward and 10 d backward. `error` is of the output, or the largest of the gradients', against
the first kernel's, of the norm. `peak_mib` is what a cell takes beyond the inputs. A kernel that cannot do a cell says
"unsupported" or "out of memory"; one that was not come to before SIGTERM (timeout's) says "not run", and the exit code is 1."""

import argparse
import datetime
import itertools
import math
import pathlib
import signal
import statistics
import time

import torch

from choices import Choice, choices_of, pairs_of
from peers import KERNELS, Unsupported, attention_of, backend_of, check_supported, synchronize
from problem import Problem
from ringleader.kernels.masks import NAMES
from tables import NOT_RUN, Table, figures, picture, write_figures

DIRECTIONS = ("forward", "backward")
FEWEST, MOST = 3, 9  # repetitions
WRONG = 2e-2  # of the norm


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
    """The largest of the tensors' differences, each of its norm; infinite where one is not finite. By heads, since float32
    copies of long tensors would not fit beside them."""
    errors = []
    for x, y in zip(found, expected):
        difference, norm = (sum(torch.stack(squares)) for squares in zip(*(
            ((a.float() - b.float()).square().sum(), b.float().square().sum())
            for a, b in zip(x.unbind(1), y.unbind(1)))))
        errors.append((difference / norm).sqrt().item())
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def measure(kernel, name, chosen, p, seconds, flush):
    """-> ({direction: (its times, its results)} of those that the kernel can, seconds of the plan)"""
    attend, plan_seconds = attention_of(kernel, name, chosen, p)
    q, k, v = (x.detach() for x in (p.q, p.k, p.v))
    times, out = repetitions(lambda: attend(q, k, v), p.device, seconds, flush)
    if p.device == "cpu" and kernel == "flex":  # which has no backward there
        return {"forward": (times, (out,))}, plan_seconds
    out = None
    out = attend(p.q, p.k, p.v)
    backward = repetitions(lambda: torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out, retain_graph=True), p.device, seconds,
                           flush)
    return {"forward": (times, (out.detach(),)), "backward": backward}, plan_seconds


def fill(row, times, plan_seconds, pairs, p):
    """What a row says of its times."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    row.update(ms=statistics.median(times), p20_ms=fifths[0], p80_ms=fifths[3], repetitions=len(times),
               plan_ms=plan_seconds * 1e3, share=pairs / p.tokens**2)
    row["with_plan_ms"] = row["ms"] + row["plan_ms"]
    flops = {"forward": 4, "backward": 10}[row["direction"]] * p.q.shape[3] * pairs * p.q.shape[1]
    row["tflops"] = flops / row["ms"] * 1e-9


class Cells:
    """Those of one mask and one choice of tiles, which share what is drawn, and the first kernel's results."""

    def __init__(self, problem, mask, choice, seconds, flush):
        self.problem, self.mask, self.choice, self.seconds, self.flush = problem, mask, choice, seconds, flush
        self.drawn = self.pairs = self.expected = None

    def _draw(self):
        if self.pairs is None:
            self.drawn = self.choice.draw(self.problem.tokens, self.problem.q.shape[1], self.problem.device)
            self.pairs = pairs_of(self.problem.intervals(self.mask).rows[0], self.drawn)

    def rows(self, kernel):
        """The two directions' rows."""
        p = self.problem
        rows = {d: {"mask": self.mask, "choice": self.choice.name, "tokens": p.tokens, "direction": d, "kernel": kernel,
                    "backend": backend_of(kernel, p.device)} for d in DIRECTIONS}
        try:
            check_supported(kernel, self.mask, self.choice, p.device)
            self._draw()
            if p.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            measured, plan_seconds = measure(kernel, self.mask, self.drawn, p, self.seconds, self.flush)
        except (Unsupported, RuntimeError) as error:
            unsupported = isinstance(error, Unsupported) or "No available kernel" in str(error)  # of a forced back end
            if not unsupported and not isinstance(error, torch.OutOfMemoryError):
                raise
            for row in rows.values():
                row["note"] = "unsupported" if unsupported else "out of memory"
            return list(rows.values())
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if p.device == "cuda" else None
        results = {direction: made for direction, (_, made) in measured.items()}
        self.expected = self.expected or results
        for direction, row in rows.items():
            if direction not in measured:
                row["note"] = "unsupported"
                continue
            fill(row, measured[direction][0], plan_seconds, self.pairs, p)
            if peak is not None:
                row["peak_mib"] = peak
            if direction in self.expected:
                row["error"] = error_of(results[direction], self.expected[direction])
        return list(rows.values())


def run_cells(options, table):
    """Adds a row of every cell, in each direction; once SIGTERM came of those that were not come to, too. -> whether it did"""
    on_gpu = options.device == "cuda"
    flush = torch.empty((256 if on_gpu else 1) << 20, dtype=torch.uint8, device=options.device)
    choices = [choice for text in options.choices for choice in choices_of(text)]
    try:
        for tokens in options.tokens:
            problem = Problem(options.device, tokens, *((64, 8, 128) if on_gpu else (4, 2, 64)))
            for mask, choice in itertools.product(options.masks, choices):
                cells = Cells(problem, mask, choice, options.seconds, flush)
                for row in itertools.chain.from_iterable(map(cells.rows, options.kernels)):
                    table.add(row)
                    if not row.get("error", 0) <= WRONG:  # nor NaN
                        raise SystemExit(f"longca: {row['kernel']}'s {row['direction']} of {mask} ({choice.name}) at {tokens} "
                                         f"tokens is off by {row['error']:.3f} of the norm")
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
                        help="of tiles: all, or a percentage that is drawn evenly (uniform:5), as models choose (learned:5) or "
                             "both (5)")
    parser.add_argument("--masks", nargs="+", default=list(NAMES), choices=list(NAMES), metavar="MASK", help=", ".join(NAMES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a cell's repetitions in each direction")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--command", default="unknown", help="that rows name")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    common = {"hardware": torch.cuda.get_device_name() if on_gpu else "cpu", "commit": options.commit,
              "date": datetime.date.today().isoformat(), "command": options.command}
    signal.signal(signal.SIGTERM, cut_off)
    options.folder.mkdir(parents=True, exist_ok=True)
    table = Table(options.folder / "longca_masks.csv", common)
    was_cut_off = run_cells(options, table)
    picture(table.rows, options.folder / "longca_masks.svg")
    new = figures(table.rows, common)
    if on_gpu and options.figures is not None and new:
        write_figures(new, options.figures)
    if was_cut_off:
        raise SystemExit(f"longca: cut off; the cells that ran are in {options.folder}, the others say {NOT_RUN!r}")


if __name__ == "__main__":
    main()
