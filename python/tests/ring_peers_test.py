"""bench/longca/rings/peers.py on two CPU ranks: its cells, what fp64 says of them, and what stands beside ours."""

import csv
import itertools
import pathlib
import subprocess
import sys

import pytest
from oracle import CUDA

PEERS = pathlib.Path(__file__).parents[2] / "bench" / "longca" / "rings" / "peers.py"

pytestmark = pytest.mark.skipif(CUDA, reason="it runs in small shapes on the CPU")


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PEERS, "--device", "cpu",
         "--head-dim", "64", "--repetitions", "2", "--tokens", "1000", "--csv", folder / "peers.csv", *map(str, arguments)],
        capture_output=True, text=True, timeout=300)


def test_cells(tmp_path):
    ours = tmp_path / "ours.csv"
    ours.write_text("mask,choice,scheme,direction,tokens,ranks,note,gflops\n"
                    "causal,all,flat striped,forward,1024,2,,4e12\ncausal,all,flat zigzag,forward,1024,2,,2e12\n"
                    "causal,uniform 5 %,flat striped,forward,1024,2,,9e12\nfull,all,flat striped,forward,1024,2,unsupported,\n")
    done = run(tmp_path, "--heads", 4, 4, "--beside", ours)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "peers.csv", newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(cell["mask"], cell["scheme"], cell["direction"]) for cell in cells] == list(itertools.product(
        ("full", "causal"), ("PyTorch all-gather flash", "PyTorch round flash"), ("forward", "backward")))
    for cell in cells:
        assert (cell["note"], cell["tokens"], cell["ranks"]) == ("", "1024", "2")  # whole tiles for every rank
        assert 0 < float(cell["error"]) < 1e-5 and float(cell["max_ms"]) >= float(cell["mean_ms"]) > 0
    fastest = max(float(cell["gflops"]) for cell in cells if (cell["mask"], cell["direction"]) == ("causal", "forward"))
    line, = [line for line in done.stdout.splitlines() if line.startswith("causal, forward, 1024 tokens, 2 ranks: flat striped")]
    assert float(line.split(": ")[-1].split()[0]) == pytest.approx(4e12 / fastest, rel=1e-3)
    assert "full, forward, 1024 tokens, 2 ranks: nothing of ours ran" in done.stdout
