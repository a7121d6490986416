#!/usr/bin/env python3
"""The tasks can be answered from the tokens alone, and not without the tokens far back; and the same seed gives the same
bytes. A solver knows what the documents' words mean, and nothing of how they were made."""

import collections
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import generate
import tasks

SYMBOLS = 512
LENGTHS = (64, 256, 2048, 16384)
CORPUS = random.Random(0).randbytes(1 << 16)


def find(tokens, wanted):
    """Where `wanted` first stands in `tokens`; -1 if it does not."""
    for i in range(len(tokens) - len(wanted)):
        if tokens[i:i + len(wanted)] == wanted:
            return i
    return -1


def solve(task, seen, asked):
    """The token that follows `seen`, or None. Of the question itself, `asked` answers stand in `seen` already."""
    if task.startswith("recall"):
        before = seen[-2::-1]  # the latest first
        return before[before.index(seen[-1]) - 1] if seen[-1] in before else None
    if task == "needles":
        at = find(seen, [tasks.SET, seen[-1]])
        return None if at < 0 else seen[at + 2]
    if task == "needles-by-4":
        at = find(seen, [tasks.SET, seen[-5]])  # ASK, four keys, ANSWER, and the values so far
        return None if at < 0 else seen[at + 2]
    if task == "variables":
        at = find(seen, [tasks.SET, seen[-1]])  # SET name source value
        return None if at < 0 else seen[at + 3]
    if task == "frequent-words":
        body = seen[1:seen.index(tasks.ASK)] if tasks.ASK in seen else []
        heard = collections.Counter(w for subject, w in zip(body[::2], body[1::2]) if subject == seen[-1])
        return heard.most_common(1)[0][0] if heard else None
    if task == "hashes":
        first = asked % 2 == 0
        at = find(seen, [tasks.LINK, *(seen[-2:] if first else seen[-3:-1])])
        return None if at < 0 else seen[at + (3 if first else 4)]
    raise AssertionError(task)


def score(document, window=None):
    """{task: (asked, right)} of a solver that sees the last `window` tokens."""
    result = collections.defaultdict(lambda: [0, 0])
    asked = 0  # answers in a row
    for i, mark in enumerate(document.marks):
        if mark in (tasks.PLAIN, tasks.GIVEN):
            asked = 0
            continue
        task = tasks.TASKS[mark - 1]
        if task != "text":
            seen = document.tokens[max(0, i - window):i] if window else document.tokens[:i]
            result[task][0] += 1
            result[task][1] += solve(task, seen, asked) == document.tokens[i]
        asked += 1
    return dict(result)


def documents(length, count=4):
    for kind in tasks.KINDS:
        for number in range(count if length < 16384 else 1):
            yield kind, tasks.make_document(kind, random.Random(f"{kind}/{number}"), length, SYMBOLS, CORPUS)


class TasksTest(unittest.TestCase):
    def test_everything_asked_is_in_the_tokens(self):
        seen = set()
        for length in LENGTHS:
            for kind, document in documents(length):
                self.assertEqual(len(document.tokens), length - 1, kind)
                self.assertEqual(len(document.marks), length - 1, kind)
                self.assertLess(max(document.tokens), tasks.vocabulary(SYMBOLS))
                self.assertNotIn(tasks.SEPARATOR, document.tokens)
                for task, (asked, right) in score(document).items():
                    self.assertEqual(right, asked, (length, kind, task))
                    seen.add(task)
        self.assertEqual(seen, set(tasks.TASKS) - {"text"})

    def test_nothing_far_is_left_without_the_evidence(self):
        """With the last sixteenth of the document alone, and the key and value that `near` reaches back to."""
        total = collections.Counter()
        right = collections.Counter()
        for _, document in documents(2048):
            for task, (asked, found) in score(document, window=2048 // 16 + 2).items():
                total[task] += asked
                right[task] += found
        self.assertEqual(right["recall-far"] + right["recall-power-far"], 0)
        self.assertEqual(right["recall-near"], total["recall-near"])
        for task in ("needles", "needles-by-4", "frequent-words"):
            self.assertLess(right[task], 0.2 * total[task], task)
        for task in ("variables", "hashes"):  # one of several hops may lie near
            self.assertLess(right[task], 0.5 * total[task], task)

    def test_gaps_are_what_they_are_called(self):
        def gaps(kind):
            document = tasks.make_document(kind, random.Random(1), 16384, SYMBOLS, CORPUS)
            last, found = {}, []
            for i in range(1, len(document.tokens) - 1, 2):
                if document.tokens[i] in last:
                    found.append((i - last[document.tokens[i]]) // 2)
                last[document.tokens[i]] = i
            return sorted(found)
        uniform, power = gaps("recall"), gaps("recall-power")
        self.assertLess(power[len(power) // 2] * 5, uniform[len(uniform) // 2])
        self.assertGreater(power[-1], uniform[len(uniform) // 2] * 3)

    def test_same_seed_same_bytes(self):
        with tempfile.TemporaryDirectory() as folder:
            def make(name, seed):
                generate.generate(f"{folder}/{name}", 40, 128, 64, seed, {kind: 1 for kind in tasks.KINDS}, CORPUS)
                return {path.name: path.read_bytes() for path in pathlib.Path(folder, name).iterdir()}
            first = make("a", "x")
            self.assertEqual(first, make("b", "x"))
            self.assertNotEqual(first, make("c", "y"))
            # Tokens are two bytes; documents are `length` long with their separators, the last one's apart.
            tokens = sum(len(content) for name, content in first.items() if name.endswith(".marks"))
            self.assertEqual(tokens, 40 * 128 - len(first) // 2)
            self.assertEqual(sum(map(len, first.values())), 3 * tokens)

    def test_what_does_not_fit_is_named(self):
        for arguments, named in (({"length": 129}, "even"), ({"length": 4096, "symbols": 64}, "at least 128"),
                                 ({"weights": {"text": 1}}, "too few")):
            with self.assertRaisesRegex(ValueError, named):
                generate.generate("/nonexistent/x", **{"documents": 1, "length": 128, "symbols": 64, "seed": "1",
                                                       "weights": {"recall": 1}, **arguments})
        script = pathlib.Path(__file__).with_name("generate.py")
        refused = subprocess.run([sys.executable, script, "--output", "/nonexistent/x", "--documents", "1", "--kinds", "x"],
                                 capture_output=True, text=True, check=False)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("no such kind: x", refused.stderr)


if __name__ == "__main__":
    unittest.main()
