"""`ringctl bench attention --peers`: our own cells and PyTorch's in one go."""

import contextlib
import csv
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from oracle import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="it runs in small shapes on the CPU")

ROOT = pathlib.Path(__file__).parents[2]
RINGCTL = pathlib.Path(os.environ.get("RINGLEADER_BUILD", ROOT / "build")) / "bin" / "ringctl"


def bench(*arguments, **environment):
    return subprocess.run(
        [RINGCTL, "bench", "attention", "--tokens", "256", "--ranks", "2", "--repetitions", "1", "--densities", "50", "--masks",
         "causal", "--patterns", "none", *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=600)


def rows_of(table):
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


@contextlib.contextmanager
def taken(port):
    """Somebody listens there, whoever it is."""
    with socket.socket(socket.AF_INET6) as listener:
        with contextlib.suppress(OSError):
            listener.bind(("", port))
            listener.listen()
        yield


def test_all_tables(tmp_path):
    histogram = tmp_path / "short.json"
    histogram.write_text('{"[8,16)": 1}')
    with taken(29500):  # where torchrun would listen for all who do not say otherwise
        done = bench("--folder", tmp_path, "--peers", "--python", sys.executable, "--lengths", histogram, "--commit", "1234")
    assert done.returncode == 0, done.stdout + done.stderr
    tables = {name: rows_of(tmp_path / f"longca_{name}.csv") for name in ("kernels", "rings", "masks", "ring_peers")}
    for name in ("kernels", "rings", "masks"):
        for row in tables[name]:
            assert (row["mask"], row["tokens"], row["lengths"], row["commit"]) == ("causal", "256", "short", "1234"), row
    assert {"ringleader", "flex", "cudnn"} <= {row["kernel"] for row in tables["masks"]}
    assert {row["choice"] for row in tables["masks"]} == {"all", "uniform 50 %", "learned 50 %"}
    assert {row["ranks"] for row in tables["ring_peers"]} == {"2"}
    for direction in ("forward", "backward"):
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"causal, {direction}, 256 tokens, 2 ranks: "))
        assert line.endswith(" x") and "PyTorch" in line, line


def test_what_is_missing_is_said_before_anything_is_measured(tmp_path):
    without = bench("--folder", tmp_path / "without", "--peers", "--python", sys.executable, PYTHONPATH="")
    assert without.returncode == 1 and "cannot import torch and ringleader.kernels" in without.stderr
    none = bench("--folder", tmp_path / "none", "--peers", "--python", tmp_path / "python")
    assert none.returncode == 1 and f"cannot start {tmp_path / 'python'}" in none.stderr
    assert not list(tmp_path.iterdir())
    assert "--python: goes with --peers" in bench("--python", "python3").stderr
    assert f"{tmp_path / 'no.json'}" in bench("--lengths", tmp_path / "no.json", "--folder", tmp_path).stderr
