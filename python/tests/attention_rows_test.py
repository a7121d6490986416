"""bench/attention_speed.sh with a program that leaves a table instead of measuring: the rows that it makes of it."""

import csv
import json
import os
import pathlib
import subprocess

import pytest
from oracle import CUDA

BENCH = pathlib.Path(__file__).parents[2] / "bench"

pytestmark = pytest.mark.skipif(CUDA, reason="it needs no GPU")

COLUMNS = ("date", "commit", "hardware", "kernel", "direction", "tokens", "density", "tile", "heads", "kv_heads", "head_dim", "ms",
           "tflops", "cudnn_tflops", "ratio")


def line(kernel, direction, density, tile, ms, ratio, heads=16, kv_heads=2):
    return dict(zip(COLUMNS, ("2026-01-02", "abc", "a GPU", kernel, direction, 131072, density, tile, heads, kv_heads, 128, ms,
                              500.0, 520.5, ratio)))


LINES = [
    line("toeplitz", "forward", "0.052", 128, 6.0, 1.1), line("toeplitz", "backward", "0.052", 128, 18.0, 0.971),
    line("toeplitz", "backward", "0.052", 64, 20.0, 0.5), line("csr", "backward", "0.051", 128, 18.5, 0.969),
    line("toeplitz", "backward", "0.102", 64, 42.0, 0.88), line("toeplitz", "backward", "0.102", 128, 33.0, 1.0),
    line("csr", "backward", "0.050", 64, 21.0, 0.879), line("csr", "backward", "0.101", 128, 33.0, 0.98),
    line("ring4", "forward", "0.050", 128, 23.5, 0.96), line("ring4", "backward", "0.050", 128, 66.1, 0.9),
    line("cudnn", "forward", "1.000", 128, 127.0, 0.98), line("cudnn", "backward", "1.000", 128, 324.0, 0.994),
    line("cudnn", "backward", "1.000", 128, 1303.0, 1.5, heads=64, kv_heads=8)]


def run(folder, lines, *arguments):
    """attention_bench copies the lines to its --csv, or nothing where there are none."""
    with open(folder / "lines.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    bench = folder / "attention_bench"
    bench.write_text(f'#!/bin/sh\necho "$@" >{folder}/arguments\n' + (f'cat {folder}/lines.csv >"$2"\n' if lines else ""))
    bench.chmod(0o755)
    return subprocess.run([BENCH / "attention_speed.sh", folder / "results", *arguments], capture_output=True, text=True,
                          timeout=60, check=False, env={**os.environ, "BIN": str(folder)})


def test_rows(tmp_path):
    figures = tmp_path / "results" / "figures" / "masks_schemes.json"
    figures.parent.mkdir(parents=True)
    ring = "ring of four at 512K, GQA 16:2, block diagonals of 128 at 5 %: a rank's four steps without links"
    figures.write_text(json.dumps([{"row": "another's", "value": 1}, {"row": f"{ring}, forward, ms a layer", "value": 99}]))
    done = run(tmp_path, LINES, "--quick")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arguments").read_text().split()[-1] == "--quick"
    assert (tmp_path / "results" / "attention_bench.csv").read_text() == (tmp_path / "lines.csv").read_text()
    other, *rows = json.loads(figures.read_text())
    assert other == {"row": "another's", "value": 1}
    cudnn = "128K, GQA 16:2, backward per visible pair, ratio to cudnn"
    assert [(row["row"], row["value"], row["asked"], row["met"]) for row in rows] == [
        (f"block diagonals of 128 at 5 %, {cudnn}", 0.971, ">= 0.97", True),
        (f"random tiles of 128 at 5 %, {cudnn}", 0.969, ">= 0.97", False),
        (f"block diagonals of 64 at 10 %, {cudnn}", 0.88, ">= 0.88", True),
        (f"random tiles of 64 at 5 %, {cudnn}", 0.879, ">= 0.88", False),
        (f"{ring}, forward, ms a layer", 23.5, "<= 23.5", True), (f"{ring}, backward, ms a layer", 66.1, "<= 66", False)]
    for row in rows:
        assert (row["hardware"], row["commit"], row["date"], row["command"]) == (
            "a GPU", "abc", "2026-01-02", "bench/attention_speed.sh bench/results --quick")
    assert (rows[0]["of_peer"], rows[0]["peer_at_the_end_to_peer"]) == (520.5, 0.994)


def test_a_line_that_is_missing(tmp_path):
    done = run(tmp_path, [line for line in LINES if line["kernel"] != "ring4"])
    assert done.returncode == 1 and "no line of ring4, forward, tile 128, 5 %" in done.stderr
    assert not (tmp_path / "results" / "figures").exists()


def test_nothing_is_made_of_a_table_that_was_there(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "attention_bench.csv").write_text("old")
    done = run(tmp_path, [])
    assert done.returncode == 1 and "found no GPU" in done.stderr
    assert (tmp_path / "results" / "attention_bench.csv").read_text() == "old"
