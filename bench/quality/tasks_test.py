#!/usr/bin/env python3
"""The tasks can be answered from the tokens alone, and not without the tokens far back; and the same seed gives the same
bytes. A solver knows what the documents' words mean, and nothing of how they were made."""

import bisect
import collections
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import generate
import tasks

LENGTHS = (64, 256, 2048, 16384, 131072)
CORPUS = random.Random(0).randbytes(1 << 18)


class Reader:
    """Answers from the tokens of a document that come before a place."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.places = collections.defaultdict(list)  # of each run of one, two and three tokens, in order
        for run in (1, 2, 3):
            for i, found in enumerate(zip(*(tokens[k:] for k in range(run)))):
                self.places[found].append(i)
        self.heard = {}  # frequent words: how often each subject says each word, by where from and where to

    def behind(self, run, start, end, offset):
        """The token `offset` behind where `run` first stands in [start, end); None if it does not, or ends there."""
        places = self.places.get(tuple(run), [])
        i = bisect.bisect_left(places, start)
        return self.tokens[places[i] + offset] if i < len(places) and places[i] + max(offset, len(run)) < end else None

    def latest(self, token, start, end):
        """The last place of `token` in [start, end), or None."""
        places = self.places.get((token,), [])
        i = bisect.bisect_left(places, end) - 1
        return places[i] if i >= 0 and places[i] >= start else None

    def words(self, start, end):
        """What each subject says between the first token in [start, end) and the questions."""
        places = self.places.get((tasks.ASK,), [])
        i = bisect.bisect_left(places, start)
        if i == len(places) or places[i] >= end:
            return {}
        if (start, places[i]) not in self.heard:
            body = self.tokens[start + 1:places[i]]
            heard = self.heard[start, places[i]] = collections.defaultdict(collections.Counter)
            for subject, word in zip(body[::2], body[1::2]):
                heard[subject][word] += 1
        return self.heard[start, places[i]]

    def solve(self, task, start, end, asked):
        """The token that follows those in [start, end), or None. `asked` answers of the question are among them."""
        last = self.tokens[end - 1]
        if task.startswith("recall"):
            shown = self.latest(last, start, end - 1)
            return None if shown is None else self.tokens[shown + 1]
        if task in ("needles", "needles-by-4"):
            return self.behind([tasks.SET, last], start, end, 2)
        if task == "variables":  # SET name source value
            return self.behind([tasks.SET, last], start, end, 3)
        if task == "frequent-words":
            heard = self.words(start, end).get(last)
            return heard.most_common(1)[0][0] if heard else None
        if task == "hashes":
            first = asked % 2 == 0
            link = self.tokens[end - 2:end] if first else self.tokens[end - 3:end - 1]
            return self.behind([tasks.LINK, *link], start, end, 3 if first else 4)
        raise AssertionError(task)


def score(document, window=None):
    """{task: (asked, right)} of a reader that sees the last `window` tokens."""
    reader = Reader(document.tokens)
    result = collections.defaultdict(lambda: [0, 0])
    asked = 0  # answers in a row
    for i, mark in enumerate(document.marks):
        if mark in (tasks.PLAIN, tasks.GIVEN):
            asked = 0
            continue
        task = tasks.TASKS[mark - 1]
        if task not in tasks.TEXT:
            start = max(0, i - window) if window else 0
            result[task][0] += 1
            result[task][1] += reader.solve(task, start, i, asked) == document.tokens[i]
        asked += 1
    return dict(result)


def symbols_of(length):
    return max(512, tasks.least_symbols(length))


def documents(length, count=4):
    for kind in tasks.KINDS:
        for number in range(count if length < 16384 else 1):
            yield kind, tasks.make_document(kind, random.Random(f"{kind}/{number}"), length, symbols_of(length), CORPUS)


class TasksTest(unittest.TestCase):
    def test_everything_asked_is_in_the_tokens(self):
        seen = set()
        for length in LENGTHS:
            for kind, document in documents(length):
                self.assertEqual(len(document.tokens), length - 1, kind)
                self.assertEqual(len(document.marks), length - 1, kind)
                self.assertLess(max(document.tokens), tasks.vocabulary(symbols_of(length)))
                self.assertNotIn(tasks.SEPARATOR, document.tokens)
                for task, (asked, right) in score(document).items():
                    self.assertEqual(right, asked, (length, kind, task))
                    seen.add(task)
        self.assertEqual(seen, set(tasks.TASKS) - set(tasks.TEXT))

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

    def test_the_last_of_a_tile_predicts_the_first_of_the_next(self):
        document = tasks.make_document("text", random.Random(1), 256, symbols_of(256), CORPUS)
        places = collections.defaultdict(list)  # of the tokens that are predicted
        for i, mark in enumerate(document.marks):
            if mark != tasks.GIVEN:
                places[tasks.TASKS[mark - 1]].append(i)
        self.assertEqual(places["text-63"], [64, 128, 192])  # the next would be the separator
        self.assertEqual(places["text-55"], [56, 120, 184, 248])
        self.assertEqual(set(places), set(tasks.TEXT))
        self.assertEqual(sorted(sum(places.values(), [])), list(range(1, 255)))

    def test_gaps_are_what_they_are_called(self):
        def gaps(kind):
            document = tasks.make_document(kind, random.Random(1), 16384, symbols_of(16384), CORPUS)
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
