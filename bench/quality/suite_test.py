#!/usr/bin/env python3
"""What the suite makes of evaluations, how it counts its time, and what it asks of patterns."""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import unittest
from unittest import mock

import suite
import tasks


def answers(**rights):
    """Of 1,000 asked of each."""
    return {task: {"asked": 1000, "right": right, "loss": 1.0} for task, right in rights.items()}


def suite_in(folder, began_before=0):
    flags = dict.fromkeys(("commit", "engine", "hardware", "text", "command"), "")
    return suite.Suite(argparse.Namespace(**flags, plan="smoke", dir=folder, seconds=1, began_before=began_before, at_once=1, ring=1))


class SuiteTest(unittest.TestCase):
    def test_a_task_is_learned_from_enough_answers_on(self):
        found = suite.learned({"answers": answers(needles=950, variables=949, text=500)})
        self.assertEqual(found, {"needles": {"share": 0.95, "learned": True},
                                 "variables": {"share": 0.949, "learned": False}})

    def test_no_attempt_at_a_stage_has_the_documents_of_another(self):
        with tempfile.TemporaryDirectory() as folder:
            one, stage = suite_in(folder), suite.PLANS["smoke"].more
            with mock.patch.object(one, "data") as data:
                for attempt in range(3):
                    one.training(stage, attempt)
                one.held_out(stage)
            seeds = [call.args[2] for call in data.call_args_list]
            self.assertEqual(len(set(seeds)), 4, seeds)

    def test_text_becomes_one_task_and_keeps_its_parts(self):
        def by_place(loss_of_last):
            parts = {task: {"asked": 10, "right": 4, "loss": 2.0} for task in tasks.TEXT}
            parts["text"]["asked"], parts["text-63"]["loss"] = 20, loss_of_last
            return {"answers": {**answers(needles=1), **parts}}
        evaluation = by_place(3.1) | {"dense": by_place(2.0)}
        suite.join_text(evaluation)
        for found, loss in ((evaluation, 2.1), (evaluation["dense"], 2.0)):
            self.assertEqual(set(found["answers"]), {"needles", "text"})
            self.assertEqual((found["answers"]["text"]["asked"], found["answers"]["text"]["right"]), (110, 40))
            self.assertAlmostEqual(found["answers"]["text"]["loss"], loss)
            self.assertEqual(list(found["text_by_place"]), tasks.TEXT)
        self.assertEqual(evaluation["text_by_place"]["text-63"]["loss"], 3.1)

    def test_no_text_has_no_loss(self):
        evaluation = {"answers": {task: {"asked": 0, "right": 0, "loss": 0.0} for task in tasks.TASKS}}
        suite.join_text(evaluation)
        self.assertEqual(evaluation["answers"]["text"], {"asked": 0, "right": 0, "loss": 0.0})

    def test_time_is_that_of_all_calls_that_worked(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(suite.time, "monotonic", return_value=7.0):
            def call(began_before, has_worked):
                found = suite_in(folder, began_before=began_before)
                found.has_worked = has_worked
                return found.wall_seconds()
            self.assertEqual(call(0, has_worked=False), 0)
            self.assertEqual(call(100, has_worked=True), 100)
            self.assertEqual(call(50, has_worked=True), 150)
            self.assertEqual(call(1000, has_worked=False), 150)
            self.assertEqual(float(pathlib.Path(folder, "seconds").read_text()), 150)

    def test_a_plan_without_texts_tells_of_its_jobs(self):
        evaluation = {"answers": answers(needles=900), "loss": 1.0}

        def job(*_, **__):
            return {"wall_seconds": 1.0, "density": 0.5, "first_evaluation": evaluation, "last_evaluation": evaluation}
        plan = dataclasses.replace(suite.PLANS["smoke"], texts=[], repeats=[])
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(suite.PLANS, smoke=plan):
            found, told = suite_in(folder), []
            found.job, found.say = job, told.append
            found.go_on([{"last_evaluation": evaluation}], "of the curriculum")
            written = json.loads(pathlib.Path(folder, "quality.json").read_text())
        self.assertEqual(told[0], "dense-100: 1 s, 50.0% visited, answers 90.0% at once, 90.0% after 4 steps")
        self.assertEqual((len(told), written["jobs_left"], written["texts"]), (len(written["patterns"]), 0, []))

    def test_causal_choice_has_the_budget_of_the_default(self):
        for plan in suite.PLANS.values():
            for density in plan.densities:
                found = suite.attentions(density, plan.tokens)
                self.assertEqual(found["block-topk, causal"], {**found["block-topk"], "selection": "causal"})
        self.assertLess({"block-topk", "block-topk, causal"}, set(suite.PLANS["long"].patterns))
        self.assertFalse(suite.PLANS["gpu"].patterns, "all patterns go on in the default plan")

    def test_documents_begin_with_a_tile(self):
        for plan in suite.PLANS.values():
            for stage in (*plan.curriculum, plan.more, *plan.texts):
                self.assertEqual(stage.length % tasks.TILE, 0, stage)

    def test_patterns_go_on_at_the_length_that_dense_attention_was_last_trained_at(self):
        for name, plan in suite.PLANS.items():
            last = plan.curriculum[-1]
            self.assertEqual((last.length, last.tokens or plan.tokens), (plan.more.length, plan.tokens), name)

    def test_every_length_has_as_many_steps_and_as_many_tokens_asked(self):
        first, *others = (suite.PLANS[name] for name in ("4096", "8192", "65536"))
        for plan in others:
            for of in (first, plan):
                self.assertEqual(of.more.batch * of.tokens, 65536)
                self.assertEqual(of.eval_documents * of.tokens, 131072)
            self.assertEqual((plan.more.steps, plan.more.rate, plan.more.weights, plan.densities),
                             (first.more.steps, first.more.rate, first.more.weights, first.densities))

    def test_short_lengths_ask_all_but_the_strides_that_save_time_at_long_ones(self):
        every = set(suite.attentions(0.1, 4096))
        for name in ("4096", "8192"):
            left = every - set(suite.PLANS[name].patterns)
            self.assertEqual(left, {"xattention, stride 32", "xattention, stride 64"}, name)
        self.assertFalse(suite.PLANS["65536"].patterns, "all of them")


if __name__ == "__main__":
    unittest.main()
