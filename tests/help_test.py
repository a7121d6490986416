#!/usr/bin/env python3
"""What scripts do before they start anything: `--help` prints the head of the file, and an option that is none, or lacks its value, is refused.
Nothing is built, installed, downloaded or written for that."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("deploy", "bench", "tests", "python")
SOURCED = {"deploy/gpu_libraries.sh", "deploy/loopback_services.sh", "tests/e2e/scratch.sh"}
# Their arguments are those of another program: ctest, ringleader-worker.
PASS_ON = {"tests/run.sh", "deploy/slurm/workers.sbatch"}
# Programs that would change something, or find something to do.
FORBIDDEN = ("apt-get", "buildah", "cmake", "cpack", "ctest", "curl", "dpkg-query", "git", "kubectl", "make", "ninja", "nvidia-smi", "pip", "pip3",
             "podman", "python3", "sbatch", "scancel", "scontrol", "srun", "torchrun", "wget", "clang-format", "clang-tidy")


def scripts():
    """Relative paths of what users call; the tests that ctest starts take no arguments."""
    found = {str(path.relative_to(ROOT)) for folder in FOLDERS for pattern in ("*.sh", "*.sbatch") for path in (ROOT / folder).rglob(pattern)}
    return sorted(path for path in found - SOURCED if not (path.startswith("tests/") and path.endswith("_test.sh")))


def head(path):
    lines = path.read_text().splitlines()[1:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("#") or line.startswith("#SBATCH"))
    return [re.sub("^# ?", "", line) for line in lines[:end]]


def options_with_values(path):
    """As its own `case` takes them: `--name) name=$2 ;;`, and `-b) …`."""
    for arm in re.findall(r"^\s*((?:--?[\w-]+)(?: \| --?[\w-]+)*)\)[^;\n]*\$\{?2\b", path.read_text(), re.MULTILINE):
        yield from arm.split(" | ")


class Help(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        self.tree, self.elsewhere = self.work / "tree", self.work / "elsewhere"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "results", "golden"))
        shutil.copy(ROOT / "CMakeLists.txt", self.tree)
        self.called, programs = self.work / "called", self.work / "programs"
        for path in (self.elsewhere, programs, self.work / "home", self.work / "tmp"):
            path.mkdir()
        for name in FORBIDDEN:
            (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{self.called}\nexit 86\n')
            (programs / name).chmod(0o755)
        self.environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(self.work / "home"), "TMPDIR": str(self.work / "tmp")}
        self.before = self.state()

    def state(self):
        return {str(path.relative_to(self.work)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
                for path in self.work.rglob("*") if path != self.called}

    def call(self, *command, folder):
        run = subprocess.run(command, cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        called = self.called.read_text() if self.called.exists() else ""
        self.called.unlink(missing_ok=True)
        self.assertEqual(called, "")
        self.assertEqual(self.state(), self.before, "changed something")
        return run

    def test_all_are_found_and_can_be_called(self):
        self.assertGreaterEqual(len(scripts()), 25)
        for path in scripts():
            self.assertTrue(os.access(ROOT / path, os.X_OK), f"{path}: not executable, or to be sourced")
        for path in SOURCED:
            self.assertFalse(os.access(ROOT / path, os.X_OK), path)

    def test_help(self):
        for path in scripts():
            for option, command, folder in (("--help", self.tree / path, self.elsewhere), ("-h", path, self.tree)):
                with self.subTest(script=path, option=option):
                    run = self.call(command, option, folder=folder)
                    self.assertEqual((run.returncode, run.stderr), (0, ""))
                    self.assertEqual(run.stdout.splitlines(), head(ROOT / path))

    def test_help_of_generators(self):
        for path in ("deploy/grafana/dashboards.py", "deploy/kubernetes/gang.py", "bench/longca/picture.py"):
            with self.subTest(script=path):
                run = self.call(sys.executable, self.tree / path, "--help", folder=self.elsewhere)
                self.assertEqual(run.returncode, 0, run.stderr)
                self.assertIn("usage: ", run.stdout)
                self.assertEqual(self.call(sys.executable, self.tree / path, "--no-such-option", folder=self.elsewhere).returncode, 2)

    def test_unknown_options_are_refused(self):
        for path in sorted(set(scripts()) - PASS_ON):
            with self.subTest(script=path):
                run = self.call(self.tree / path, "--no-such-option", folder=self.elsewhere)
                self.assertEqual((run.returncode, run.stdout), (2, ""), run.stderr)
                self.assertIn("(see --help)", run.stderr)

    def test_options_without_their_values_are_refused(self):
        first = {"tests/run_gpu.sh": ["."], "bench/fp8.sh": ["speed"], "deploy/kubernetes/certificates.sh": ["tls"]}
        asked = 0
        for path in scripts():
            for option in options_with_values(ROOT / path):
                asked += 1
                with self.subTest(script=path, option=option):
                    run = self.call(self.tree / path, *first.get(path, []), option, folder=self.elsewhere)
                    self.assertIn(run.returncode, (1, 2), run.stderr)
                    self.assertRegex(run.stderr, rf"{option} needs ")
                    self.assertNotIn("unbound variable", run.stderr)
        self.assertGreater(asked, 60)


if __name__ == "__main__":
    unittest.main()
