#!/usr/bin/env python3
"""What table and rows say of results that were put together: tasks that dense attention has not learned, the time of a
whole run, and what later queries of a tile tell; README's table, which is of the committed results."""

import json
import pathlib
import unittest

import report
import tasks

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEARNED, MISSED = "needles", "frequent-words"
ASKED = 1000


def evaluation(text_loss, saved=0.0, scatter=0.0):
    """Of text's tokens all queries of a tile but the last save a share of the loss; those before it scatter around that."""
    by_place = {}
    for i, task in enumerate(tasks.TEXT):
        loss = text_loss if task == tasks.TEXT[-1] else text_loss * (1 - saved + scatter * (-1) ** i * (task != "text"))
        by_place[task] = {"asked": 55 * ASKED if task == "text" else ASKED, "loss": loss}
    mean = sum(part["asked"] * part["loss"] for part in by_place.values()) / (64 * ASKED)
    return {"loss": mean, "text_by_place": by_place, "answers": {
        LEARNED: {"asked": ASKED, "right": 990}, MISSED: {"asked": ASKED, "right": 902},
        "text": {"asked": 64 * ASKED, "right": 0, "loss": mean}}}


def job(pattern, density, **saved):
    if density is not None and pattern != "dense":
        both = {**evaluation(1.6, **saved), "dense": evaluation(1.5)}
    else:
        both = evaluation(1.5)
    return {"pattern": pattern, "asked_density": density, "density": density, "tokens": 16384, "seed": 100,
            "attention": {"pattern": pattern}, "first_evaluation": both, "last_evaluation": both, "wall_seconds": 8.0}


def results(**more):
    last = {**job("dense", 1.0), "document_tokens": 16384}
    return report.Results({
        "plan": "gpu", "hardware": "a GPU", "commit": "c", "date": "d", "command": "bench/quality/run.sh", "more_steps": 60,
        "jobs_left": 0, "wall_seconds": 630.0, "curriculum": [last],
        "patterns": [job("dense", 1.0), job("window", 0.1, scatter=0.001), job("key-groups", 0.1, saved=0.01, scatter=0.001),
                     job("block-topk", 0.1, saved=0.02), job("block-topk, causal", 0.1)],
        "repeats": [], "texts": [], **more})


def row(found, start):
    matching = [one for one in report.figure_rows(found) if one["row"].startswith(start)]
    assert len(matching) == 1, [one["row"] for one in matching]
    return matching[0]


class ReportTest(unittest.TestCase):
    def test_what_dense_attention_has_not_learned_is_marked(self):
        table = report.table(results())
        self.assertIn("| needles | frequent-words * |\n|---|---|\n| 99 | 90 |", table)
        self.assertIn("| pattern | visited | needles | frequent-words * | text |", table)
        self.assertIn("\\* Not learned: of frequent-words (90.2%) dense attention answers less than 95%.", table)

    def test_recall_is_of_queries_apart_from_the_choice_and_of_those_that_chose(self):
        probed = {**job(report.DEFAULT, 0.2), "asked_density": None, "recall_per_layer": [0.98, 0.9],
                  "probed_recall_per_head": {"0": [0.99, 0.97], "1": [0.9, 0.88]}}
        found = results(patterns=[job("dense", 1.0), probed])
        apart = row(found, "recall of sampled queries (probe)")
        self.assertEqual((apart["value"], apart["asked"], apart["met"]), (0.935, ">= 0.95", False))
        chose = row(found, "recall of queries that chose")
        self.assertEqual((chose["value"], chose["asked"]), (0.94, "reported"))

    def test_a_task_counts_whether_dense_attention_has_learned_it_or_not(self):
        name = "every recall task, best pattern at <= 10% visited, of what dense answers, at once"
        found = results()
        self.assertEqual((row(found, name)["task"], row(found, name)["value"]), (LEARNED, 1.0))
        for one in found.sparse:
            one["first_evaluation"]["answers"][MISSED]["right"] = 451
        self.assertEqual((row(found, name)["task"], row(found, name)["value"]), (MISSED, 0.5))
        self.assertFalse(row(found, name)["met"])

    def test_what_the_dense_model_answers_has_a_row(self):
        found = results()
        one = row(found, "answers of the dense model that patterns go on from")
        self.assertEqual((one["task"], one["value"], one["asked"], one["met"]), (MISSED, 0.902, ">= 0.95", False))
        found.found["curriculum"][-1]["last_evaluation"]["answers"][MISSED]["right"] = 950
        self.assertTrue(row(report.Results(found.found), "answers of the dense model that patterns go on from")["met"])

    def test_where_all_is_learned_nothing_is_marked(self):
        found = results()
        found.found["curriculum"][-1]["last_evaluation"]["answers"][MISSED]["right"] = 950
        found = report.Results(found.found)
        self.assertNotIn("*", report.table(found).replace("**", ""))

    def test_the_whole_run_has_a_row_once_it_is_done(self):
        name = "quality suite, whole, minutes"
        one = row(results(), name)
        self.assertEqual((one["value"], one["asked"], one["met"], one["hardware"]), (10.5, "<= 25", True, "a GPU"))
        self.assertFalse(row(results(wall_seconds=1510.0), name)["met"])
        self.assertEqual(row(results(plan="long"), f"16,384 tokens: {name}")["asked"], "reported")
        self.assertNotIn(name, [one["row"] for one in report.figure_rows(results(jobs_left=1))])
        self.assertIn("The curriculum took 8 s, the whole run 10.5 minutes;", report.table(results()))

    def test_what_later_queries_save_is_told_beside_what_chance_does(self):
        start = "text, what later queries of a tile save of the dense loss, "
        groups, window = (row(results(), f"{start}{pattern}") for pattern in ("key-groups of 10%", "window of 10%"))
        over = 1.6 / 1.5
        self.assertAlmostEqual(groups["value"], 0.01 * over, 4)
        self.assertAlmostEqual(groups["of_all_before"], 0.01 * over, 4)
        self.assertAlmostEqual(groups["after_value"], 0.01 * over, 4)
        # The eight scatter by 0.001 to either side: their deviation is that times (8/7)^0.5, the last one's as much.
        self.assertAlmostEqual(groups["standard_error"], over * 0.001 * (8 / 7) ** 0.5 * (1 + 1 / 8) ** 0.5, 5)
        self.assertAlmostEqual(window["value"], 0, 5)
        self.assertEqual((groups["asked"], groups["met"]), ("reported", True))
        self.assertIn("| key-groups of 10% | 10.0% | 1.07 ± 0.12 / 1.07 | 1.07 ± 0.12 / 1.07 |", report.table(results()))

    def test_block_topk_stands_beside_its_causal_choice(self):
        one = row(results(), "text, all queries of a tile choose over its first alone, ")
        self.assertEqual(one["row"], "text, all queries of a tile choose over its first alone, block-topk of 10%, at once")
        self.assertAlmostEqual(one["value"], 1 - 0.02 * 63 / 64, 4)
        self.assertAlmostEqual(one["after_value"], 1 - 0.02 * 63 / 64, 4)
        self.assertIn("| block-topk of 10% | 10.0% | 0.9803 | 0.9803 |", report.table(results()))

    def test_text_that_was_not_told_apart_has_no_such_rows(self):
        found = results().found
        for one in found["patterns"]:
            for evaluation_of in (one["first_evaluation"], one["first_evaluation"].get("dense", {})):
                evaluation_of.pop("text_by_place", None)
        names = [one["row"] for one in report.figure_rows(report.Results(found))]
        self.assertFalse([name for name in names if "later queries" in name])
        self.assertNotIn("What later queries of a tile tell", report.table(report.Results(found)))

    def test_readme_has_the_table_of_the_committed_results(self):
        readme = (ROOT / "README.md").read_text()
        found = report.Results(json.loads((ROOT / "bench/results/quality.json").read_text()))
        self.assertEqual(readme, report.between_marks(readme, report.summary(found)),
                         "bench/quality/report.py bench/results/quality.json --output bench/results --readme README.md")


if __name__ == "__main__":
    unittest.main()
