"""bench/longca/rings: peers.py on two CPU ranks, its cells, what fp64 says of them, and what stands beside ours; run.sh with
programs that say how they are called; and pictures of tables."""

import csv
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest
from oracle import CUDA

LONGCA = pathlib.Path(__file__).parents[2] / "bench" / "longca"
PEERS = LONGCA / "rings" / "peers.py"

pytestmark = pytest.mark.skipif(CUDA, reason="it runs in small shapes on the CPU")


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PEERS, "--device", "cpu",
         "--head-dim", "64", "--repetitions", "2", "--tokens-per-gpu", "500", "--csv", folder / "peers.csv",
         *map(str, arguments)],
        capture_output=True, text=True, timeout=300)


def test_cells(tmp_path):
    ours = tmp_path / "ours.csv"
    ours.write_text("mask,choice,scheme,direction,tokens,ranks,note,gflops\n"
                    "causal,all,flat striped,forward,1024,2,,4e12\ncausal,all,flat zigzag,forward,1024,2,,2e12\n"
                    "causal,uniform 5 %,flat striped,forward,1024,2,,9e12\nfull,all,flat striped,forward,1024,2,unsupported,\n")
    done = run(tmp_path, "--heads", 4, 4, "--beside", ours, "--commit", "1234abcd")
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "peers.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(cell["mask"], cell["scheme"], cell["direction"]) for cell in cells] == list(itertools.product(
        ("full", "causal"), ("PyTorch all-gather flash", "PyTorch round flash"), ("forward", "backward")))
    for cell in cells:
        assert (cell["note"], cell["tokens"], cell["ranks"]) == ("", "1024", "2")  # whole tiles for every rank
        assert (cell["hardware"], cell["commit"]) == ("2 x CPU rank", "1234abcd") and cell["date"]
        # Keys and values of 512 tokens and 4 heads of 64 in fp32, and in backward twice their gradients, which come home.
        part = 2 * 512 * 4 * 64 * 4 / 2**20
        assert float(cell["mib_moved"]) == part * (1 if cell["direction"] == "forward" else 3), cell
        assert cell["imbalance"] == "1" and cell["mib_whole"] == cell["mib_moved"] and cell["backend"].startswith("PyTorch 2.")
        assert 0 < float(cell["error"]) < 1e-5 and float(cell["max_ms"]) >= float(cell["mean_ms"]) > 0
    fastest = max(float(cell["gflops"]) for cell in cells if (cell["mask"], cell["direction"]) == ("causal", "forward"))
    line, = [line for line in done.stdout.splitlines() if line.startswith("causal, forward, 1024 tokens, 2 ranks: flat striped")]
    assert float(line.split(": ")[-1].split()[0]) == pytest.approx(4e12 / fastest, rel=1e-3)
    assert "full, forward, 1024 tokens, 2 ranks: nothing of ours ran" in done.stdout
    picture = (tmp_path / "peers.svg").read_text()
    assert bars_of(picture) == len(cells) and picture.count("1024 tokens, 2 ranks, all tiles, forward: TFLOP/s") == 1


def bars_of(picture):
    """How many there are, beside the background and the legend's squares."""
    return len(re.findall(r'<rect x="\d+" y="[\d.]+" width="26"', picture))


@pytest.mark.parametrize("lengths, tokens", [(("--tokens", "1024 2048"), ["1024", "2048"]),
                                             (("--tokens-per-gpu", "1024 2048"), ["4096", "8192"]),
                                             ((), ["32768", "131072"])])
def test_lengths_of_run(tmp_path, lengths, tokens):
    for name in ("ringleader-bench", "python3"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([LONGCA / "rings" / "run.sh", "--gpus", "4", "--bin", tmp_path, "--folder", tmp_path, *lengths],
                          capture_output=True, text=True, timeout=60, check=True,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    calls = [line.split() for line in done.stdout.splitlines() if "--tokens" in line]
    assert [call[0] for call in calls] == ["ringleader-bench", "python3"]
    for call in calls:
        first = call.index("--tokens") + 1
        assert list(itertools.takewhile(str.isdigit, call[first:])) == tokens


def test_both_lengths_are_refused(tmp_path):
    done = subprocess.run([LONGCA / "rings" / "run.sh", "--tokens", "1024", "--tokens-per-gpu", "1024"], capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 2 and "--tokens and --tokens-per-gpu" in done.stderr


def test_pictures_of_tables(tmp_path):
    table = tmp_path / "shared.csv"
    table.write_text("mask,choice,scheme,direction,tokens,ranks,note,gflops\n"
                     "full,all,flat striped,forward,1024,4,,500000\nfull,all,<usp>,forward,1024,4,,250000\n"
                     "causal,all,<usp>,forward,1024,4,unsupported,\ncausal,all,<usp>,backward,2048,4,,100000\n")
    subprocess.run([sys.executable, LONGCA / "picture.py", table], timeout=60, check=True)
    picture = (tmp_path / "shared.svg").read_text()
    assert bars_of(picture) == 3 and "&lt;usp&gt;" in picture
    heights = [float(height) for height in re.findall(r'width="26" height="([\d.]+)"', picture)]
    assert heights[0] == heights[2] == 2 * heights[1], "charts have scales of their own"
    assert [f"{text}</text>" in picture for text in ("500", "250", "100")] == [True] * 3
