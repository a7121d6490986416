"""bench/longca/masks on the CPU: which cells and figures there are, and what is wrong with them. Its times are for GPUs
alone."""

import argparse
import csv
import itertools
import json
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from oracle import CUDA

from ringleader.kernels.masks import NAMES

FOLDER = pathlib.Path(__file__).parents[2] / "bench" / "longca" / "masks"
sys.path.append(str(FOLDER))

import lengths  # noqa: E402
import main  # noqa: E402
from choices import LONGEST, choices_of  # noqa: E402
from main import CutOff, run_cells  # noqa: E402
from peers import attention_of  # noqa: E402
from tables import LENGTHS, NOT_RUN, WRONG, Table, figures  # noqa: E402

pytestmark = pytest.mark.skipif(CUDA, reason="it runs in small shapes on the CPU")


def started(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, FOLDER / "main.py", "--device", "cpu", "--folder", folder, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_in(folder):
    with open(folder / "longca_masks.csv", newline="") as file:
        return list(csv.DictReader(file))


def options_of(*masks, tokens=256):
    return argparse.Namespace(device="cpu", tokens=[tokens], masks=list(masks), choices=["all"], kernels=["ringleader"],
                              seconds=0, lengths=lengths.PROLONG_LIKE)


def test_cells(tmp_path):
    bench = started(tmp_path, "--tokens", "256", "--masks", "full", "causal_documents", "--choices", "all", "uniform:12.5", "variable:20",
                    "50",
                    "--kernels", "ringleader", "cudnn", "flex", "--seconds", "0")
    _, errors = bench.communicate(timeout=300)
    assert bench.returncode == 0, errors
    rows = rows_in(tmp_path)
    choices = ("all", "uniform 12.5 %", "variable 20 %", "uniform 50 %", "learned 50 %")
    assert [(row["mask"], row["choice"], row["kernel"], row["direction"]) for row in rows] == list(itertools.product(
        ("full", "causal_documents"), choices, ("ringleader", "cudnn", "flex"), ("forward", "backward")))
    for row in rows:
        if row["kernel"] == "ringleader" or row["kernel"] == "flex" and row["direction"] == "forward":
            assert (row["repetitions"], row["note"]) == ("3", ""), "no seconds allow the fewest repetitions"
            assert float(row["ms"]) > 0 and 0 < float(row["error"]) < 2e-2, "of the first kernel, too"
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
    assert run_cells(options_of("full", "causal"), table)
    assert [(row["mask"], row["direction"], row["note"]) for row in rows_in(tmp_path)] == [
        ("full", "forward", ""), ("full", "backward", ""), ("causal", "forward", ""), ("causal", "backward", NOT_RUN)]


def scaled(attend, chosen):
    return lambda q, k, v: attend(chosen)(q, k, v) * 1.03


def without_a_tile(attend, chosen):
    chosen = chosen.clone()
    chosen[2, 3, 1] = False
    return attend(chosen)


def without_the_gradient_of_a_tile(attend, chosen):
    def without(gradient):
        gradient = gradient.clone()
        gradient[:, 1, 128:256] = 0
        return gradient

    def attend_so(q, k, v):
        k = k.clone()
        if k.requires_grad:
            k.register_hook(without)
        return attend(chosen)(q, k, v)
    return attend_so


def not_a_number(attend, chosen):
    def attend_so(q, k, v):
        out = attend(chosen)(q, k, v)
        return torch.where(torch.arange(out.shape[2])[:, None] == 511, torch.nan, out)
    return attend_so


@pytest.mark.parametrize("fault, wrong", [(scaled, (True, True)), (without_a_tile, (True, True)),
                                          (without_the_gradient_of_a_tile, (False, True)), (not_a_number, (True, True))])
def test_a_kernel_that_is_wrong_and_alone(tmp_path, monkeypatch, fault, wrong):
    def wrong_attention(kernel, name, chosen, p):
        assert chosen is None
        every = torch.ones(p.q.shape[1], 4, 4, dtype=torch.bool)
        return fault(lambda tiles: attention_of(kernel, name, tiles, p)[0], every), 0.0

    monkeypatch.setattr(main, "attention_of", wrong_attention)
    table = Table(tmp_path / "longca_masks.csv", {})
    assert not run_cells(options_of("full", tokens=512), table)
    for row, is_wrong in zip(table.rows, wrong, strict=True):
        assert (row["error"] > 0.025, row.get("note") == WRONG, "tflops" not in row) == (is_wrong,) * 3, row

    monkeypatch.setattr(sys, "argv", ["main.py", "--folder", str(tmp_path), "--device", "cpu", "--tokens", "512", "--masks",
                                      "full", "--choices", "all", "--kernels", "ringleader", "--seconds", "0"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match=r"ringleader's backward of full \(all\) at 512 tokens is off by"):
        main.main()


@pytest.mark.parametrize("error, note", [
    (AttributeError("no plan\nfor this shape"), "unsupported: no plan"),
    (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
    (torch.OutOfMemoryError("of the GPU"), "out of memory")])
def test_a_peer_that_fails_is_unsupported_and_ours_is_not(tmp_path, monkeypatch, error, note):
    def failing(*_):
        raise error

    monkeypatch.setattr(main, "attention_of", failing)
    options = options_of("full")
    options.kernels = ["flex"]
    table = Table(tmp_path / "longca_masks.csv", {})
    assert not run_cells(options, table)
    assert [row["note"] for row in table.rows] == [note, note]
    if note != "out of memory":
        options.kernels = ["ringleader"]
        with pytest.raises(type(error)):
            run_cells(options, table)


def test_lengths_of_a_histogram(tmp_path):
    histogram = tmp_path / "mostly_short.json"
    histogram.write_text(json.dumps({"[0,4)": 0.25, "[8,16)": 0.5, "[100,200)": 0.25}))
    of_file = lengths.of_histogram(histogram)
    firsts = list(of_file.firsts(100000))
    assert firsts == list(of_file.firsts(100000)), "the seed is fixed"
    drawn = [after - first for first, after in zip(firsts, firsts[1:])]
    shares = [sum(low <= length < high for length in drawn) / len(drawn) for low, high in ((1, 4), (8, 16), (100, 200))]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03) and sum(shares) == 1
    # As bench/longca/longca_test.cc has them.
    assert list(lengths.PROLONG_LIKE.firsts(131072)) == [0, 23298, 28471, 49156, 103458, 105878, 114422]
    histogram.write_text(json.dumps({"[100,201)": 1, "[8,16)": 2}))
    assert list(lengths.of_histogram(histogram).firsts(200)) == [0, 13, 23, 36, 51, 60, 71, 84, 92, 100, 110, 123]
    histogram.write_text(json.dumps({"[0,4)": 0.25, "[8,16)": 0.5, "[100,200)": 0.25}))

    bench = started(tmp_path, "--tokens", "256", "--masks", "causal_documents", "--choices", "all", "--kernels", "ringleader",
                    "--seconds", "0", "--lengths", histogram)
    _, errors = bench.communicate(timeout=300)
    assert bench.returncode == 0, errors
    (forward, _) = rows_in(tmp_path)
    assert forward["lengths"] == "mostly_short"
    seen = [after - first for first, after in itertools.pairwise([*of_file.firsts(256), 256])]
    assert float(forward["share"]) == pytest.approx(sum(n * (n + 1) / 2 for n in seen) / 256**2, abs=1e-4)


@pytest.mark.parametrize("text, says", [("{", "no file of JSON"), ("[]", "has no bins"), ('{"[0,4)": 0}', "has no bins"),
                                        ('{"[4,4)": 1}', "no share of a bin"), ('{"0-4": 1}', "no share of a bin"),
                                        ('{"[0,4)": "1"}', "no share of a bin"), ('{"[0,4)": NaN}', "no share of a bin")])
def test_a_histogram_that_is_none(tmp_path, text, says):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(SystemExit, match=f"file.json.* {says}"):
        lengths.of_histogram(tmp_path / "file.json")


def test_another_histogram_is_not_called_a_published_one(tmp_path):
    published = lengths.PUBLISHED / "pile.json"
    assert lengths.of_histogram(published).name == "pile"
    of_a_copy = tmp_path / "pile.json"
    of_a_copy.write_text(published.read_text())
    assert lengths.of_histogram(of_a_copy).name == "pile"
    of_a_copy.write_text('{"[32,64)": 1}')
    assert lengths.of_histogram(of_a_copy).name == str(of_a_copy)


def test_blocks_of_different_sizes():
    (choice,) = choices_of("variable:25")
    assert choice.name == "variable 25 %"
    kept = choice.draw(128 * 200, 8, "cpu") & ~torch.eye(200, dtype=torch.bool)
    # Where neighbouring rows differ in any head a block ends, but for what the diagonal adds to them.
    far = torch.ones(200, 200, dtype=torch.bool).triu(20) | torch.ones(200, 200, dtype=torch.bool).tril(-20)
    ends = [row + 1 for row in range(199) if ((kept[:, row] != kept[:, row + 1]) & far[row] & far[row + 1]).any()]
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, 200])]
    assert max(sizes) <= LONGEST and len(set(sizes)) > 3
    assert 0.2 < kept.float().mean() < 0.3
    assert torch.equal(choice.draw(128 * 200, 8, "cpu") & ~torch.eye(200, dtype=torch.bool), kept)


@pytest.mark.parametrize("text", ["5:uniform", "even:5", "0", "120", "some"])
def test_a_choice_that_there_is_not(text):
    with pytest.raises(SystemExit, match=f"choice '{text}'"):
        choices_of(text)


COMMON = {"lengths": "ProLong-like", "commit": "c"}


def cell(mask, kernel, tflops, tokens=32768, choice="all", direction="forward", **more):
    speed = {} if tflops is None else {"tflops": tflops}
    return {"mask": mask, "choice": choice, "tokens": tokens, "direction": direction, "kernel": kernel, "backend": "b", **speed,
            **more}


def test_figures_of_all_masks():
    rows = [cell(mask, "ringleader", 600.0) for mask in NAMES]
    rows += [cell(mask, "cudnn", 500.0) if mask in ("full", "causal") else cell(mask, "cudnn", None, note="unsupported")
             for mask in NAMES]
    rows[1]["tflops"] = 450.0
    (figure,) = figures(rows, COMMON)
    assert figure["row"] == "12 masks at 32K, GQA 64:8, forward per visible pair, lowest ratio to cudnn"
    assert (figure["value"], figure["met"], figure["mask"], figure["commit"]) == (0.9, False, "causal", "c")
    assert (figure["peer"], figure["masks"]) == ("cudnn (b)", "2 of 12 that it can do: full, causal")
    assert figures(rows[1:], COMMON) == [], "without a mask there is no row of twelve"
    assert figures(rows[:-1], COMMON) == [], "nor without a peer's cell"
    assert figures([*rows[:-1], {**rows[-1], "note": NOT_RUN}], COMMON) == []
    del rows[0]["tflops"]
    assert figures([{**rows[0], "note": "out of memory"}, *rows[1:]], COMMON)[0]["value"] == 0
    of_magi = [cell(mask, kernel, speed) for mask in NAMES for kernel, speed in (("ringleader", 4.0), ("magi_attention", 5.0))]
    (figure,) = figures(of_magi, COMMON)
    assert (figure["value"], figure["asked"], figure["met"]) == (0.8, "reported", True)


def test_figures_at_128k():
    long = {"tokens": 131072, "direction": "backward"}
    rows = [cell("full", "ringleader", 540.0, choice="uniform 12.5 %", **long),
            cell("full", "ringleader", 530.0, choice="uniform 50 %", **long),
            cell("full", "flex", 400.0, choice="uniform 50 %", **long)]
    (figure,) = figures(rows, COMMON)
    assert (figure["value"], figure["met"], figure["peer"], figure["of_peer"]) == (530.0, True, "flex (b)", 400.0)
    assert figures(rows[:1], COMMON) == [], "one of the two densities is not the row"
    (figure,) = figures([cell("causal_documents", "ringleader", 439.0, **long)], COMMON)
    assert (figure["value"], figure["met"], figure["peer"]) == (439.0, False, "none")


def test_figures_of_documents_of_published_lengths():
    rows = [cell("causal_documents", kernel, speed, tokens=131072) for kernel, speed in (("ringleader", 561.0), ("flex", 200.0))]
    (figure,) = figures(rows, {"lengths": "pile"})
    assert figure["row"] == "causal documents at 128K, lengths of the Pile, GQA 64:8, forward, TFLOP/s"
    assert (figure["value"], figure["met"], figure["of_peer"]) == (561.0, True, 200.0)
    assert figures(rows, {"lengths": "mine"}) == [], "figures are of lengths that others can have"
    lists = [cell("full", "ringleader", 640.0, tokens=131072, choice=f"uniform {share} %") for share in ("12.5", "50")]
    assert len(figures(lists, COMMON)) == 1 and figures(lists, {"lengths": "pile"}) == [], "lists know no documents"


def test_published_lengths():
    folder = FOLDER.parent / "lengths"
    assert {path.stem for path in folder.glob("*.json")} == set(LENGTHS) - {"ProLong-like"}
    for path in folder.glob("*.json"):
        assert sum(share for _, _, share in lengths.of_histogram(path).bins) == pytest.approx(1, abs=1e-3)
