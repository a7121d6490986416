#!/usr/bin/env python3
"""Masks x choices of tiles x kernels x directions x lengths on one GPU: every mask of ringleader.kernels beside what PyTorch
has, cuDNN's attention and FlashAttention where they can do the mask and FlexAttention (compiled) everywhere. Writes a CSV file, a picture and rows of
bench/results/figures/masks_schemes.json. bench/longca/run.sh says how it is started; `--device cpu` runs it in small
shapes and without rows, to see that it runs.

A cell is the median, and the 20th and 80th percentile, of runs before each of which the L2 cache is flushed. What makes a
mask's data (intervals, lists of tiles, FlexAttention's BlockMask) is outside of the clock, in plan_ms, and inside in
with_plan_ms; what a call makes of it is inside of both. TFLOP/s count visible pairs of visited tiles, 4 d FLOPs
each forward and 10 d backward. `error` is of the output, or the largest of the gradients', against the first kernel's, of
the norm. A kernel that cannot do a cell says "unsupported" or "out of memory"."""

import argparse
import csv
import datetime
import itertools
import json
import math
import pathlib
import random
import statistics
import time

import torch

from choices import Choice, pairs_of
from peers import KERNELS, Unsupported, attention_of, backend_of
from ringleader.kernels import documents_from_ids, key_intervals
from ringleader.kernels.masks import NAMES

COMMAND = "bench/longca/run.sh build/wheels"
COLUMNS = ("mask", "choice", "tokens", "direction", "kernel", "backend", "ms", "p20_ms", "p80_ms", "plan_ms", "with_plan_ms",
           "tflops", "share", "peak_mib", "error", "note")
LONGEST_DENSE = 131072  # tokens; of longer ones choices of at most a fifth of the tiles alone


class Problem:
    """A length's tensors, documents and masks."""

    def __init__(self, device, tokens, heads, kv_heads, head_dim):
        generator = torch.Generator(device).manual_seed(0)
        self.device, self.tokens = device, tokens
        self.q, self.k, self.v = (
            torch.randn(1, tokens, h, head_dim, device=device, dtype=torch.bfloat16, generator=generator).transpose(1, 2)
            .requires_grad_() for h in (heads, kv_heads, kv_heads))
        self.d_out = torch.randn_like(self.q)
        # As ProLong has them at 131,072 tokens, scaled (bench/length_distributions.h): mostly of 1K to 64K, one in eighteen
        # of 64K to 256K.
        ids, drawn, first = torch.zeros(1, tokens, dtype=torch.int64), random.Random(20251123), 0
        while first < tokens:
            ids[:, first:] += 1
            low, high = (65536, 262144) if drawn.random() < 0.055 else (1024, 65536)
            first += max(1, int(low * (high / low) ** drawn.random() * tokens / 131072))
        self.documents = documents_from_ids(ids.to(device))
        self.window, self.block = min(1024, tokens // 4), min(1024, tokens // 4)
        self.global_window, self.prefix = max(tokens // 12, 1), tokens // 3

    def intervals(self, name):
        of_documents = "documents" in name or name in ("shared_question", "causal_blockwise")
        return key_intervals(
            name, self.tokens, documents=self.documents if of_documents else None, prefix=self.prefix, block=self.block,
            window=self.global_window if name == "global_sliding" else self.window, device=self.device)

    def mask_mod(self, name):
        """FlexAttention's function of the same mask."""
        start, window, block = self.documents.starts[0], self.window, self.block
        prefix, first, last = self.prefix, self.global_window, start[-1]
        second = torch.where(start > 0, start, self.tokens).min()
        return {
            "full": lambda b, h, i, j: i >= 0,
            "causal": lambda b, h, i, j: j <= i,
            "full_window": lambda b, h, i, j: (i - j < window) & (j - i < window),
            "causal_window": lambda b, h, i, j: (j <= i) & (i - j < window),
            "full_documents": lambda b, h, i, j: start[i] == start[j],
            "causal_documents": lambda b, h, i, j: (start[i] == start[j]) & (j <= i),
            "shared_question": lambda b, h, i, j: (j <= i) & (
                (start[i] == start[j]) | (start[j] == 0) | ((start[i] == second) & (start[j] <= second))),
            "causal_blockwise": lambda b, h, i, j: (j <= i) & ((start[i] == start[j]) | (start[i] == last)),
            "global_sliding": lambda b, h, i, j: (i < first) | (j < first) | ((i - j < first) & (j - i < first)),
            "prefix_causal": lambda b, h, i, j: (j <= i) | (j < prefix),
            "prefix_documents": lambda b, h, i, j: (start[i] == start[j]) & ((j <= i) | (j < start[i] + prefix)),
            "block_causal_documents": lambda b, h, i, j: (start[i] == start[j]) & (
                (j - start[i]) // block <= (i - start[i]) // block),
        }[name]


def milliseconds(run, device, repeats, flush):
    """Of each of `repeats` runs."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def error_of(found, expected):
    """The largest of the tensors' differences, each of its norm; infinite where one is not finite."""
    errors = [((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(found, expected)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def measure(kernel, name, choice, p, repeats, flush, expected):
    """-> (rows by direction, output or None)"""
    directions = ("forward", "backward")
    rows = {d: {"mask": name, "choice": choice.name, "tokens": p.tokens, "direction": d, "kernel": kernel,
                "backend": backend_of(kernel, p.device)} for d in directions}
    chosen = choice.draw(p.tokens, p.q.shape[1], p.device)
    if p.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        attend, seconds = attention_of(kernel, name, chosen, p)
        q, k, v = (x.detach() for x in (p.q, p.k, p.v))
        forward = milliseconds(lambda: attend(q, k, v), p.device, repeats, flush)
        backward, gradients = None, ()
        if p.device == "cpu" and kernel == "flex":  # which has none there
            out = attend(q, k, v)
        else:
            out = attend(p.q, p.k, p.v)
            gradients = torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out, retain_graph=True)
            backward = milliseconds(lambda: torch.autograd.grad(out, (p.q, p.k, p.v), p.d_out, retain_graph=True),
                                    p.device, repeats, flush)
    except (Unsupported, torch.OutOfMemoryError) as error:
        for row in rows.values():
            row["note"] = "unsupported" if isinstance(error, Unsupported) else "out of memory"
        return rows, None
    except RuntimeError as error:
        if "No available kernel" not in str(error):  # what PyTorch says where a forced back end cannot
            raise
        for row in rows.values():
            row["note"] = "unsupported"
        return rows, None
    found = {"forward": (out.detach(),), "backward": gradients}
    expected = expected or found
    pairs = pairs_of(p.intervals(name).rows[0], chosen)
    for direction, times, flops in zip(directions, (forward, backward), (4, 10)):
        row = rows[direction]
        if times is None:
            row["note"] = "unsupported"
            continue
        fifths = statistics.quantiles(times, n=5)
        error = error_of(found[direction], expected[direction] or found[direction])
        row.update(ms=statistics.median(times), p20_ms=fifths[0], p80_ms=fifths[3], plan_ms=seconds * 1e3, error=error,
                   share=pairs / p.tokens**2)
        row["with_plan_ms"] = row["ms"] + row["plan_ms"]
        row["tflops"] = flops * p.q.shape[3] * pairs * p.q.shape[1] / row["ms"] * 1e-9
        if p.device == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return rows, found


def picture(rows, path):
    """Bars of TFLOP/s, a row of charts for each length, choice and direction."""
    charts = sorted({(row["tokens"], row["choice"], row["direction"]) for row in rows},
                    key=lambda c: (c[0], c[1] != "all", c[1], c[2] != "forward"))
    colors, step, height = dict(zip(KERNELS, ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e"))), 96, 190
    width = step * len(NAMES) + 60
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(charts) + 30}" '
             'font-family="sans-serif" font-size="10">', '<rect width="100%" height="100%" fill="white"/>']
    for i, kernel in enumerate(KERNELS):
        parts.append(f'<rect x="{60 + 110 * i}" y="8" width="10" height="10" fill="{colors[kernel]}"/>'
                     f'<text x="{75 + 110 * i}" y="17">{kernel}</text>')
    for c, chart in enumerate(charts):
        here = [row for row in rows if (row["tokens"], row["choice"], row["direction"]) == chart]
        top = max((row.get("tflops", 0) for row in here), default=0) or 1
        base = 30 + height * (c + 1) - 45
        parts.append(f'<text x="8" y="{base - height + 62}">{chart[0]} tokens, {chart[1]} tiles, {chart[2]}: TFLOP/s</text>')
        for m, mask in enumerate(NAMES):
            parts.append(f'<text x="{60 + step * m}" y="{base + 12 + 11 * (m % 2)}">{mask}</text>')
            for row in (row for row in here if row["mask"] == mask and "tflops" in row):
                bar = row["tflops"] / top * (height - 85)
                x = 60 + step * m + 20 * KERNELS.index(row["kernel"])
                parts.append(f'<rect x="{x}" y="{base - bar:.1f}" width="18" height="{bar:.1f}" '
                             f'fill="{colors[row["kernel"]]}"/><text x="{x}" y="{base - bar - 2:.1f}">{row["tflops"]:.0f}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def figures(rows, common):
    """The lowest ratios over masks at 32K, and TFLOP/s at 128K."""
    found = []
    for direction, of_documents, of_lists in (("forward", 560, 620), ("backward", 440, 530)):
        def tflops(tokens, choice):
            return {(row["mask"], row["kernel"]): row["tflops"] for row in rows if "tflops" in row
                    and (row["tokens"], row["choice"], row["direction"]) == (tokens, choice, direction)}

        at_32k = tflops(32768, "all")
        for peer, asked in (("cudnn", 0.95), ("flash", 0.95), ("flex", 1.5)):
            ratios = {mask: at_32k[mask, "ringleader"] / at_32k[mask, peer] for mask in NAMES
                      if (mask, peer) in at_32k and (mask, "ringleader") in at_32k}
            if ratios:
                lowest = min(ratios, key=ratios.get)
                found.append({"row": f"12 masks at 32K, GQA 64:8, {direction} per visible pair, lowest ratio to {peer}",
                              "value": round(ratios[lowest], 3), "asked": f">= {asked}", "met": ratios[lowest] >= asked,
                              "peer": peer, "mask": lowest, "ratios": {m: round(r, 3) for m, r in ratios.items()}, **common})
        documents = tflops(131072, "all").get(("causal_documents", "ringleader"))
        lists = [of[mask, "ringleader"] for of in (tflops(131072, f"uniform {share} %") for share in ("12.5", "50"))
                 for mask in ("full",) if (mask, "ringleader") in of]
        for row, value, asked in ((f"causal documents at 128K, GQA 64:8, {direction}, TFLOP/s", documents, of_documents),
                                  (f"block lists of 128 at 128K, 12.5 and 50 % kept, GQA 64:8, {direction}, lowest TFLOP/s",
                                   min(lists, default=None), of_lists)):
            if value is not None:
                found.append({"row": row, "value": round(value, 1), "asked": f">= {asked}", "met": value >= asked,
                              "peer": "none", **common})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of longca_masks.csv and longca_masks.svg")
    parser.add_argument("--figures", type=pathlib.Path, help="the file of rows, which other rows stay in")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--densities", type=float, nargs="*", default=[5, 20, 50],
                        help="of choices of tiles, percent, drawn evenly and as models choose")
    parser.add_argument("--masks", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else "cpu"
    common = {"hardware": hardware, "commit": options.commit, "date": datetime.date.today().isoformat(), "command": COMMAND}
    flush = torch.empty((256 if on_gpu else 1) << 20, dtype=torch.uint8, device=options.device)
    choices = [Choice()] + [Choice(kind, share / 100) for share in options.densities for kind in ("uniform", "learned")]
    rows = []
    options.folder.mkdir(parents=True, exist_ok=True)
    with open(options.folder / "longca_masks.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "hardware", "commit", "date"], extrasaction="ignore")
        writer.writeheader()
        for tokens in options.tokens:
            problem = Problem(options.device, tokens, *((64, 8, 128) if on_gpu else (4, 2, 64)))
            for mask, choice in itertools.product(options.masks, choices):
                if tokens > LONGEST_DENSE and choice.density > 0.2:
                    continue
                expected = None
                for kernel in KERNELS:
                    cells, found = measure(kernel, mask, choice, problem, 9 if on_gpu else 3, flush, expected)
                    expected = found if expected is None else expected
                    for row in cells.values():
                        rows.append(row)
                        writer.writerow({k: round(x, 4) if isinstance(x, float) else x for k, x in {**row, **common}.items()})
                        file.flush()
                        print(", ".join(f"{k} {x:.3f}" if isinstance(x, float) else f"{x}" for k, x in row.items()), flush=True)
                    for direction, row in cells.items():
                        if not row.get("error", 0) <= 2e-2:  # nor NaN
                            raise SystemExit(f"longca: {kernel}'s {direction} of {mask} ({choice.name}) at {tokens} tokens is off "
                                             f"by {row['error']:.3f} of the norm")
    picture(rows, options.folder / "longca_masks.svg")
    new = figures(rows, common)
    if not on_gpu or options.figures is None or not new:
        return
    kept = json.loads(options.figures.read_text()) if options.figures.exists() else []
    kept = [row for row in kept if row["row"] not in {row["row"] for row in new}]
    options.figures.parent.mkdir(parents=True, exist_ok=True)
    options.figures.write_text(json.dumps(kept + new, indent=1) + "\n")


if __name__ == "__main__":
    main()
