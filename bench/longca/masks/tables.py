"""What masks/main.py makes of its cells: the CSV file, written cell by cell, and rows of
bench/results/figures/masks_schemes.json."""

import csv

from ringleader.kernels.masks import NAMES

COLUMNS = ("mask", "choice", "tokens", "direction", "kernel", "backend", "ms", "p20_ms", "p80_ms", "repetitions", "plan_ms",
           "with_plan_ms", "tflops", "share", "peak_mib", "error", "note")
NOT_RUN, WRONG = "not run", "wrong"
# Lengths of documents, by how they are called in rows of documents at 128K; of others there are no rows. All other rows are of the
# first of these.
LENGTHS = {"ProLong-like": "", "pile": ", lengths of the Pile", "prolong64k": ", lengths of ProLong 64K",
           "prolong512k": ", lengths of ProLong 512K"}
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


def _cells_of(rows, tokens, choice, direction):
    """{(mask, kernel): row} of the cells that ran."""
    return {(row["mask"], row["kernel"]): row for row in rows if row.get("note") != NOT_RUN
            and (row["tokens"], row["choice"], row["direction"]) == (tokens, choice, direction)}


def _speed(cells, mask):
    """Where ringleader has none, out of memory or wrong, it is 0."""
    return cells[mask, "ringleader"].get("tflops", 0.0)


def _figure_of_speed(name, cells, mask, asked, common):
    """Ringleader's TFLOP/s of a cell, beside FlexAttention's."""
    speed = _speed(cells, mask)
    return {"row": name, "value": round(speed, 1), "asked": f">= {asked}", "met": speed >= asked,
            "repetitions": int(cells[mask, "ringleader"].get("repetitions", 0)), **_of_peer(cells, mask, "flex"), **common}


def _figures_of_documents(rows, common):
    for direction, asked in (("forward", 560), ("backward", 440)):
        cells = _cells_of(rows, 131072, "all", direction)
        if ("causal_documents", "ringleader") in cells:
            yield _figure_of_speed(f"causal documents at 128K{LENGTHS[common['lengths']]}, GQA 64:8, {direction}, TFLOP/s", cells,
                                   "causal_documents", asked, common)


def figures(rows, common):
    """Rows of figures: TFLOP/s of documents and lists at 128K, and the lowest ratios over the masks at 32K. A row is made only
    where all of its cells ran."""
    if common["lengths"] not in LENGTHS:
        return []
    found = list(_figures_of_documents(rows, common))
    if LENGTHS[common["lengths"]]:
        return found
    for direction, asked_of_lists in (("forward", 620), ("backward", 530)):
        at_32k = _cells_of(rows, 32768, "all", direction)
        for peer, asked in ASKED_OF_PEERS.items():
            if any((mask, kernel) not in at_32k for mask in NAMES for kernel in ("ringleader", peer)):
                continue
            ratios = {mask: _speed(at_32k, mask) / at_32k[mask, peer]["tflops"] for mask in NAMES
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
        lists = [_cells_of(rows, 131072, f"uniform {share} %", direction) for share in ("12.5", "50")]
        if all(("full", "ringleader") in cells for cells in lists):
            found.append(_figure_of_speed(f"block lists of 128 at 128K, 12.5 and 50 % kept, GQA 64:8, {direction}, lowest TFLOP/s",
                                          min(lists, key=lambda cells: _speed(cells, "full")), "full", asked_of_lists, common))
    return found
