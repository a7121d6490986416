#!/usr/bin/env python3
"""traces_test.py FILE JOB: what otlp_collector.py wrote of a job that one attempt trained, was cancelled, and whose coordinator
was killed meanwhile, with spans that its collector had not taken."""

import json
import pathlib
import sys
import unittest

PATH, JOB = sys.argv[1:3]
# Spans of other jobs still come: the last line may not be whole yet.
LINES = pathlib.Path(PATH).read_text().rpartition("\n")[0].splitlines()
CAME = [span for span in map(json.loads, LINES) if span["attributes"]["ringleader.job"] == JOB]
# What was under way when the coordinator was killed may come again.
SPANS = list({span["id"]: span for span in CAME}.values())


class Trace(unittest.TestCase):

    def names(self):
        return [span["name"] for span in SPANS]

    def test_every_kind_is_there(self):
        for name in ("queue", "place", "start", "load", "attempt"):
            self.assertEqual(self.names().count(name), 1, name)
        for name in ("step", "checkpoint"):
            self.assertGreater(self.names().count(name), 1, name)

    def test_it_is_one_trace_under_one_root(self):
        root, = (span for span in SPANS if span["name"] == "attempt")
        self.assertEqual(root["parent"], "")
        self.assertEqual(root["attributes"]["ringleader.outcome"], "CANCELLED")
        self.assertEqual(root["service"], "ringleader-coordinator")
        for span in SPANS:
            self.assertEqual(span["trace"], root["trace"], span)
            if span is not root:
                self.assertEqual(span["parent"], root["id"], span)

    def test_what_comes_twice_is_the_same(self):
        last = {span["id"]: span for span in SPANS}
        for span in CAME:
            self.assertEqual(span, last[span["id"]])

    def test_no_checkpoint_is_missing(self):
        steps = sorted({int(span["attributes"]["ringleader.step"]) for span in SPANS if span["name"] == "checkpoint"})
        self.assertEqual(steps[:-1], list(range(2, steps[-1], 2)))

    def test_phases_follow_each_other(self):
        root, = (span for span in SPANS if span["name"] == "attempt")
        time = root["begin"]
        for name in ("queue", "place", "start", "load"):
            span, = (span for span in SPANS if span["name"] == name)
            self.assertGreaterEqual(int(span["begin"]), int(time), name)
            self.assertGreaterEqual(int(span["end"]), int(span["begin"]), name)
            time = span["end"]
        steps = sorted((span for span in SPANS if span["name"] == "step"), key=lambda span: int(span["begin"]))
        self.assertGreaterEqual(int(steps[0]["begin"]), int(time))
        numbers = [int(span["attributes"]["ringleader.step"]) for span in steps]
        self.assertEqual(numbers, sorted(set(numbers)))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
