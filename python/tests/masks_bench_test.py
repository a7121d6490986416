"""bench/longca/masks on the CPU: which cells and figures there are. Its times are for GPUs alone."""

import argparse
import csv
import itertools
import pathlib
import signal
import subprocess
import sys

import pytest
from oracle import CUDA

from ringleader.kernels.masks import NAMES

FOLDER = pathlib.Path(__file__).parents[2] / "bench" / "longca" / "masks"
sys.path.append(str(FOLDER))

from choices import choices_of  # noqa: E402
from main import CutOff, run_cells  # noqa: E402
from tables import NOT_RUN, Table, figures  # noqa: E402

pytestmark = pytest.mark.skipif(CUDA, reason="it runs in small shapes on the CPU")


def started(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, FOLDER / "main.py", "--device", "cpu", "--folder", folder, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_in(folder):
    with open(folder / "longca_masks.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_cells(tmp_path):
    bench = started(tmp_path, "--tokens", "256", "--masks", "full", "causal_documents", "--choices", "all", "uniform:12.5", "50",
                    "--kernels", "ringleader", "cudnn", "flex", "--seconds", "0")
    _, errors = bench.communicate(timeout=300)
    assert bench.returncode == 0, errors
    rows = rows_in(tmp_path)
    choices = ("all", "uniform 12.5 %", "uniform 50 %", "learned 50 %")
    assert [(row["mask"], row["choice"], row["kernel"], row["direction"]) for row in rows] == list(itertools.product(
        ("full", "causal_documents"), choices, ("ringleader", "cudnn", "flex"), ("forward", "backward")))
    for row in rows:
        if row["kernel"] == "ringleader" or row["kernel"] == "flex" and row["direction"] == "forward":
            assert (row["repetitions"], row["note"]) == ("3", ""), "no seconds allow the fewest repetitions"
            assert float(row["ms"]) > 0 and float(row["error"]) < 2e-2
        else:
            assert (row["ms"], row["note"]) == ("", "unsupported")
    assert (tmp_path / "longca_masks.svg").exists()


def test_cut_off(tmp_path):
    # What it prints of three lengths is more than a pipe holds: it cannot come to its end before somebody reads.
    tokens = ("256", "257", "258")
    bench = started(tmp_path, "--kernels", "ringleader", "flash", "--tokens", *tokens)
    first = bench.stdout.readline()
    bench.send_signal(signal.SIGTERM)
    _, errors = bench.communicate(timeout=300)
    assert first.startswith("full, all, tokens 256, forward, ringleader")
    assert bench.returncode == 1 and "cut off" in errors
    rows = rows_in(tmp_path)
    choices = ("all", *(f"{kind} {share} %" for share in (5, 20, 50) for kind in ("uniform", "learned")))
    cells = [tuple(row[name] for name in ("tokens", "mask", "choice", "kernel", "direction")) for row in rows]
    assert sorted(cells) == sorted(itertools.product(tokens, NAMES, choices, ("ringleader", "flash"), ("forward", "backward")))
    assert float(rows[0]["ms"]) > 0 and rows[-1]["note"] == NOT_RUN
    assert (tmp_path / "longca_masks.svg").exists()


@pytest.mark.parametrize("written", [False, True])
def test_cut_off_while_a_row_is_added(tmp_path, written):
    class CutTable(Table):
        def _write(self, row):
            now = len(self.rows) == 3 and not self.was_cut
            if written or not now:
                super()._write(row)
            if now:
                self.was_cut = True
                raise CutOff

    table = CutTable(tmp_path / "longca_masks.csv", {})
    table.was_cut = False
    options = argparse.Namespace(device="cpu", tokens=[256], masks=["full", "causal"], choices=["all"], kernels=["ringleader"],
                                 seconds=0)
    assert run_cells(options, table)
    assert [(row["mask"], row["direction"], row["note"]) for row in rows_in(tmp_path)] == [
        ("full", "forward", ""), ("full", "backward", ""), ("causal", "forward", ""), ("causal", "backward", NOT_RUN)]


@pytest.mark.parametrize("text", ["5:uniform", "even:5", "0", "120", "some"])
def test_a_choice_that_there_is_not(text):
    with pytest.raises(SystemExit, match=f"choice '{text}'"):
        choices_of(text)


def cell(mask, kernel, tflops, tokens=32768, choice="all", direction="forward", **more):
    speed = {} if tflops is None else {"tflops": tflops}
    return {"mask": mask, "choice": choice, "tokens": tokens, "direction": direction, "kernel": kernel, "backend": "b", **speed,
            **more}


def test_figures_of_all_masks():
    rows = [cell(mask, "ringleader", 600.0) for mask in NAMES]
    rows += [cell(mask, "cudnn", 500.0) if mask in ("full", "causal") else cell(mask, "cudnn", None, note="unsupported")
             for mask in NAMES]
    rows[1]["tflops"] = 450.0
    (figure,) = figures(rows, {"commit": "c"})
    assert figure["row"] == "12 masks at 32K, GQA 64:8, forward per visible pair, lowest ratio to cudnn"
    assert (figure["value"], figure["met"], figure["mask"], figure["commit"]) == (0.9, False, "causal", "c")
    assert figures(rows[1:], {}) == [], "without a mask there is no row of twelve"
    assert figures(rows[:-1], {}) == [], "nor without a peer's cell"
    assert figures([*rows[:-1], {**rows[-1], "note": NOT_RUN}], {}) == []
    del rows[0]["tflops"]
    assert figures([{**rows[0], "note": "out of memory"}, *rows[1:]], {})[0]["value"] == 0


def test_figures_at_128k():
    long = {"tokens": 131072, "direction": "backward"}
    rows = [cell("full", "ringleader", 540.0, choice="uniform 12.5 %", **long),
            cell("full", "ringleader", 530.0, choice="uniform 50 %", **long),
            cell("full", "flex", 400.0, choice="uniform 50 %", **long)]
    (figure,) = figures(rows, {})
    assert (figure["value"], figure["met"], figure["peer"], figure["of_peer"]) == (530.0, True, "flex (b)", 400.0)
    assert figures(rows[:1], {}) == [], "one of the two densities is not the row"
    (figure,) = figures([cell("causal_documents", "ringleader", 439.0, **long)], {})
    assert (figure["value"], figure["met"], figure["peer"]) == (439.0, False, "none")
