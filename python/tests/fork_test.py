"""A child that fork() made of a process that has used attention on the CPU."""

import subprocess
import sys

# The child has none of the threads that the process had begun. It ends as a script does, not by os._exit; so it sets no
# threads where it need not, since PyTorch then makes a pool of its own, for which the child of a child waits at its end.
PROGRAM = """
import os, sys, torch
from ringleader.kernels import sparse_attention
torch.set_num_threads({parent})
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 300, 32, requires_grad=True) for _ in range(3))
def step():
    out = sparse_attention(q, k, v)
    # Where there is a GPU, PyTorch refuses a child's backward.
    return out, *(() if torch.cuda.is_available() else torch.autograd.grad(out.sum(), (q, k, v)))
expected = step()
child = os.fork()
if child == 0:
    if {child} != {parent}:
        torch.set_num_threads({child})
    for depth in range({depth}):
        inner = os.fork()
        if inner != 0:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
    if {computes}:
        assert all(map(torch.equal, step(), expected))
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert all(map(torch.equal, step(), expected))
sys.exit(code)
"""


def run(**options):
    program = PROGRAM.format(**{"parent": 2, "child": 2, "computes": True, "depth": 0, **options})
    return subprocess.run([sys.executable, "-c", program], timeout=600, capture_output=True, text=True)


def check(**options):
    result = run(**options)
    assert result.returncode == 7, result.stderr


def test_a_child_computes_what_its_parent_does():
    check()


def test_a_child_with_other_threads():
    check(child=1)


def test_a_child_of_a_child():
    check(depth=1)


def test_a_child_that_does_not_compute_ends():
    check(computes=False)
