"""What masks/main.py makes of its cells: the CSV file, written cell by cell, and rows of
bench/results/figures/masks_schemes.json."""

import csv

from ringleader.kernels.masks import NAMES

COLUMNS = ("mask", "choice", "tokens", "direction", "kernel", "backend", "ms", "p20_ms", "p80_ms", "repetitions", "plan_ms",
           "with_plan_ms", "tflops", "share", "peak_mib", "error", "note")
NOT_RUN, WRONG = "not run", "wrong"
# The least ratio of speeds that is asked for; 0: it is reported.
ASKED_OF_PEERS = {"cudnn": 0.95, "flash": 0.95, "flash_attn": 0.95, "flash_attn_3": 0.95, "magi_attention": 0, "flex": 1.5}


class Table:
    """Rows, each in the file as soon as it is known. `common`: what all rows say of the run."""

    def __init__(self, path, common):
        self.rows, self.common, self.path = [], common, path
        self._start()

    def _start(self):
        self.file = open(self.path, "w", newline="")
        columns = [*COLUMNS, "lengths", "hardware", "commit", "date"]
        self.writer = csv.DictWriter(self.file, columns, extrasaction="ignore")
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
        for peer, asked in ASKED_OF_PEERS.items():
            if any((mask, kernel) not in at_32k for mask in NAMES for kernel in ("ringleader", peer)):
                continue
            # Where ringleader has no time, out of memory or wrong, the ratio is 0.
            ratios = {mask: at_32k[mask, "ringleader"].get("tflops", 0.0) / at_32k[mask, peer]["tflops"] for mask in NAMES
                      if "tflops" in at_32k[mask, peer]}
            if ratios:
                lowest = min(ratios, key=ratios.get)
                backends = dict.fromkeys(at_32k[mask, peer]["backend"] for mask in ratios)
                found.append({"row": f"12 masks at 32K, GQA 64:8, {direction} per visible pair, lowest ratio to {peer}",
                              "value": round(ratios[lowest], 3), "asked": f">= {asked}" if asked else "reported",
                              "met": ratios[lowest] >= asked,
                              "peer": f"{peer} ({'; '.join(backends)})",
                              "masks": f"{len(ratios)} of {len(NAMES)} that it can do: {', '.join(ratios)}",
                              "mask": lowest, "ratios": {m: round(r, 3) for m, r in ratios.items()},
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
