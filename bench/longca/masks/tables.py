"""What masks/main.py makes of its cells: the CSV file, written cell by cell, a picture and rows of
bench/results/figures/masks_schemes.json."""

import csv
import json

from peers import KERNELS
from ringleader.kernels.masks import NAMES

COLUMNS = ("mask", "choice", "tokens", "direction", "kernel", "backend", "ms", "p20_ms", "p80_ms", "repetitions", "plan_ms",
           "with_plan_ms", "tflops", "share", "peak_mib", "error", "note")
NOT_RUN = "not run"


class Table:
    """Rows, each in the file as soon as it is known. `common`: what all rows say of the run."""

    def __init__(self, path, common):
        self.rows, self.common, self.path = [], common, path
        self._start()

    def _start(self):
        self.file = open(self.path, "w", newline="")
        self.writer = csv.DictWriter(self.file, [*COLUMNS, "hardware", "commit", "date"], extrasaction="ignore")
        self.writer.writeheader()

    def _write(self, row):
        self.writer.writerow({k: round(x, 4) if isinstance(x, float) else x for k, x in {**row, **self.common}.items()})
        self.file.flush()

    def add(self, row):
        self.rows.append(row)
        self._write(row)
        print(", ".join(x if isinstance(x, str) else f"{k} {x:.4g}" if isinstance(x, float) else f"{k} {x}"
                        for k, x in row.items()), flush=True)

    def write_again(self):
        """Makes the file hold each of the rows once, wherever a signal's exception left add()."""
        self.file.close()
        self._start()
        for row in self.rows:
            self._write(row)


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


def _of_peer(cells, mask, peer):
    """What a row says of the peer that ran the same cell, if one did."""
    row = cells.get((mask, peer), {})
    return {"peer": f"{peer} ({row['backend']})", "of_peer": round(row["tflops"], 1)} if "tflops" in row else {"peer": "none"}


def figures(rows, common):
    """Rows of the issue's figures: the lowest ratios over the masks at 32K and TFLOP/s at 128K. A row is made only where
    all of its cells ran."""
    found = []
    for direction, of_documents, of_lists in (("forward", 560, 620), ("backward", 440, 530)):
        def cells_of(tokens, choice):
            return {(row["mask"], row["kernel"]): row for row in rows if row.get("note") != NOT_RUN
                    and (row["tokens"], row["choice"], row["direction"]) == (tokens, choice, direction)}

        at_32k = cells_of(32768, "all")
        for peer, asked in (("cudnn", 0.95), ("flash", 0.95), ("flex", 1.5)):
            if any((mask, kernel) not in at_32k for mask in NAMES for kernel in ("ringleader", peer)):
                continue
            # Where ringleader has no time, out of memory, the ratio is 0.
            ratios = {mask: at_32k[mask, "ringleader"].get("tflops", 0.0) / at_32k[mask, peer]["tflops"] for mask in NAMES
                      if "tflops" in at_32k[mask, peer]}
            if ratios:
                lowest = min(ratios, key=ratios.get)
                found.append({"row": f"12 masks at 32K, GQA 64:8, {direction} per visible pair, lowest ratio to {peer}",
                              "value": round(ratios[lowest], 3), "asked": f">= {asked}", "met": ratios[lowest] >= asked,
                              "peer": peer, "mask": lowest, "ratios": {m: round(r, 3) for m, r in ratios.items()},
                              "repetitions": min(int(row.get("repetitions", 0)) for row in at_32k.values()
                                                 if "tflops" in row), **common})
        documents = [(cells_of(131072, "all"), "causal_documents")]
        lists = [(cells_of(131072, f"uniform {share} %"), "full") for share in ("12.5", "50")]
        for row, of_row, asked in ((f"causal documents at 128K, GQA 64:8, {direction}, TFLOP/s", documents, of_documents),
                                   (f"block lists of 128 at 128K, 12.5 and 50 % kept, GQA 64:8, {direction}, lowest TFLOP/s",
                                    lists, of_lists)):
            if all((mask, "ringleader") in cells for cells, mask in of_row):
                value, cells, mask = min(((cells[mask, "ringleader"].get("tflops", 0.0), cells, mask) for cells, mask in of_row),
                                         key=lambda x: x[0])
                found.append({"row": row, "value": round(value, 1), "asked": f">= {asked}", "met": value >= asked,
                              "repetitions": int(cells[mask, "ringleader"].get("repetitions", 0)),
                              **_of_peer(cells, mask, "flex"), **common})
    return found


def write_figures(new, path):
    """Rows of other names stay in the file."""
    kept = json.loads(path.read_text()) if path.exists() else []
    names = {row["row"] for row in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row for row in kept if row["row"] not in names] + new, indent=1) + "\n")
