#!/usr/bin/env python3
"""What bench/compare_peer.sh, document_layout.sh and pattern_speed.sh keep when a part of them fails, with programs in the place of trainers that
print what trainers would."""

import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# training_bench: a row for each length, less those of FAILS (lengths) and, on FAILS=nodes1, none on one node.
TRAINING_BENCH = """#!/usr/bin/env python3
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
fails = os.environ.get("FAILS", "").split(",")
numbers = ["density", "tokens_per_second", "data", "index", "attention_forward", "attention_backward", "linear", "exposed_communication",
           "optimizer", "peak_gib", "worker_imbalance", "step_imbalance", "exposed_share", "token_wise_tflops", "mfu"]
failed = "nodes" + given.get("--nodes", "") in fails or given["--mode"] in fails
with open(given["--csv"], "w") as file:
    print("date,commit,hardware,tokens,mode", *numbers, sep=",", file=file)
    for tokens in [] if failed else given["--tokens"].split(","):
        if tokens in fails:
            failed = True
        else:
            print("2026-01-02,abc,none", tokens, given["--mode"], *([tokens] * len(numbers)), sep=",", file=file)
sys.exit(failed)
"""
PEER = """import os, sys
for units in sys.argv[1].split(","):
    tokens = int(units) * 1024
    if str(tokens) == os.environ.get("PEER_FAILS"):
        sys.exit("out of memory")
    print(f"peer S={tokens} causal -> {tokens // 2} tok/s, peak 10.5 GiB")
"""


class Scripts(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        bin_folder = self.work / "bin"
        bin_folder.mkdir()
        for name, text in (("training_bench", TRAINING_BENCH), ("nvidia-smi", "#!/bin/sh\necho GPU\n")):
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        (self.work / "peer.py").write_text(PEER)
        launcher = self.work / "python/torch/distributed/run.py"  # torchrun --nproc-per-node N SCRIPT LENGTHS
        launcher.parent.mkdir(parents=True)
        launcher.write_text("import runpy, sys\nsys.argv = sys.argv[3:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
        for package in (launcher.parent, launcher.parent.parent):
            (package / "__init__.py").write_text("")
        self.environment = {**os.environ, "PATH": f"{bin_folder}:{os.path.dirname(sys.executable)}:/usr/bin:/bin", "BIN": str(bin_folder),
                            "PYTHONPATH": str(self.work / "python"), "RINGLEADER_TORCH_ROOT": str(self.work)}

    def call(self, *command, **environment):
        return subprocess.run(command, cwd=self.work, env={**self.environment, **environment}, capture_output=True, text=True, timeout=60)

    def compare(self, **environment):
        return self.call(ROOT / "bench/compare_peer.sh", "--peer", "peer.py", "--bin", self.environment["BIN"], "--sparse", "131072,262144", "--dense",
                         "32768", "--output", "results/peer.json", **environment)

    def rows(self):
        return {(row["mode"], row["tokens"]): row for row in json.loads((self.work / "results/peer.json").read_text())}

    def test_compare_peer(self):
        run = self.compare()
        self.assertEqual(run.returncode, 0, run.stderr)
        rows = self.rows()
        self.assertEqual(set(rows), {("sparse", 131072), ("sparse", 262144), ("dense", 32768)})
        for row in rows.values():
            self.assertEqual((row["ratio"], row["peer_peak_gib"]), (2, 10.5))
        self.assertEqual({path.name for path in (self.work / "results").iterdir()},
                         {"peer.json", "peer.sparse.csv", "peer.dense.csv", "peer.log"})

    def test_compare_peer_keeps_what_there_is_where_the_peer_fails(self):
        run = self.compare(PEER_FAILS="131072")  # neither the first nor the last
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("compare_peer: failed: the peer at 131072 tokens, exit code 1\n", run.stderr)
        rows = self.rows()
        self.assertEqual((rows["sparse", 262144]["ratio"], rows["dense", 32768]["ratio"]), (2, 2))
        row = rows["sparse", 131072]
        self.assertEqual(row["ours_tokens_per_second"], 131072)
        self.assertEqual((row["peer_tokens_per_second"], row["peer_peak_gib"], row["ratio"]), (None, None, None))

    def test_compare_peer_keeps_what_there_is_where_our_trainers_fail(self):
        run = self.compare(FAILS="262144")
        self.assertEqual(run.returncode, 1, run.stderr)
        self.assertIn("compare_peer: failed: our sparse trainers, exit code 1", run.stderr)
        self.assertEqual(set(self.rows()), {("sparse", 131072), ("dense", 32768)})

    def check_keeps_its_table(self, script, failing, **environment):
        table = self.work / "steps.csv"
        table.write_text("measured,before\n")
        run = self.call(ROOT / script, table, ENGINE="cpu", FAILS=failing, **environment)
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(table.read_text(), "measured,before\n")
        run = self.call(ROOT / script, table, ENGINE="cpu", **environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        rows = list(csv.reader(table.read_text().splitlines()))
        self.assertIn("2026-01-02", [row[0] for row in rows])
        self.assertEqual([path.name for path in self.work.glob("steps.csv*")], ["steps.csv"])
        return rows

    def test_document_layout_keeps_its_table_until_it_has_measured(self):
        rows = self.check_keeps_its_table("bench/document_layout.sh", "nodes1", TOKENS="1024")
        self.assertEqual([row[0] for row in rows], ["date", "2026-01-02"] * 2)

    def test_pattern_speed_keeps_its_table_until_it_has_measured(self):
        self.check_keeps_its_table("bench/pattern_speed.sh", "mine", TOKENS="1024", MODES="theirs", DEFAULTS="mine")


if __name__ == "__main__":
    unittest.main()
