"""The examples run."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("arguments, lines, says", [
    (["attention.py"], 5, "differs from dense by"),
    (["packed.py"], 3, "differ from alone by 0.00"),
    (["train_transformers.py", "--steps", "3"], 3, "loss"),
    (["train_transformers.py", "--steps", "3", "--documents", "--tokens", "8192"], 3, "loss"),
])
def test_example(arguments, lines, says):
    done = subprocess.run([sys.executable, EXAMPLES / arguments[0], *arguments[1:]], capture_output=True, text=True,
                          timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert [says in line for line in done.stdout.splitlines()] == [True] * lines
