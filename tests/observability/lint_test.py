#!/usr/bin/env python3
"""Dashboards and rules keep the conventions that Grafana's and Prometheus' users count on, and name only metrics that
docs/metrics.md describes. Needs promtool."""

import re
import subprocess
import tempfile
import unittest

import yaml

import queries


class Dashboards(unittest.TestCase):

    def test_files_are_what_the_script_writes(self):
        subprocess.run([queries.ROOT / "deploy/grafana/dashboards.py", "--check"], check=True)

    def test_uids_are_stable_and_their_own(self):
        uids = [dashboard["uid"] for _, dashboard in queries.dashboards()]
        self.assertEqual(sorted(set(uids)), sorted(uids))
        self.assertTrue(all(uid.startswith("ringleader-") and len(uid) <= 40 for uid in uids), uids)

    def test_variables(self):
        for name, dashboard in queries.dashboards():
            by_name = {v["name"]: v for v in dashboard["templating"]["list"]}
            self.assertEqual(by_name["datasource"]["label"], "Data Source", name)
            self.assertEqual(sum(v["type"] == "datasource" for v in by_name.values()), 1, name)
            for variable in ("job", "instance"):
                self.assertEqual(by_name[variable]["allValue"], ".+", name)
                self.assertEqual(by_name[variable]["refresh"], 2, name)

    def test_panels(self):
        for name, dashboard in queries.dashboards():
            self.assertFalse(dashboard["editable"], name)
            titles = [panel["title"] for panel in queries.panels(dashboard)]
            self.assertEqual(sorted(set(titles)), sorted(titles), name)
            for panel in queries.panels(dashboard):
                where = f"{name}: {panel['title']}"
                self.assertTrue(panel["description"], where)
                self.assertTrue(panel["fieldConfig"]["defaults"]["unit"], where)
                self.assertEqual(panel["datasource"]["uid"], "${datasource}", where)
                for target in panel["targets"]:
                    self.check_target(where, target["expr"])
                    # Of one that is both, Grafana makes two queries, and shows each value twice.
                    self.assertEqual([kind for kind in ("instant", "range") if target.get(kind)],
                                     ["instant" if panel["type"] == "bargauge" else "range"], where)

    def test_slots_in_use(self):
        """While nodes are drained there may be more trainers than slots of ready nodes, and no such slot at all."""
        expression, = (target["expr"] for _, dashboard in queries.dashboards() for panel in queries.panels(dashboard)
                       if panel["title"] == "Slots in use" for target in panel["targets"])
        labels = 'job="ringleader-coordinator",instance="c:7071"'
        tests = []
        for ready, in_use, shown in ((8, 6, 0.75), (4, 6, 1), (0, 6, None), (0, 0, None)):
            tests.append({
                "input_series": [{"series": f'ringleader_coordinator_trainer_slots{{{labels},kind="{kind}"}}', "values": f"{slots}x2"}
                                 for kind, slots in (("ready", ready), ("in_use", in_use))],
                "promql_expr_test": [{"expr": expression.replace("$job", ".+").replace("$instance", ".+"), "eval_time": "1m",
                                      "exp_samples": [] if shown is None else [{"labels": "{}", "value": shown}]}]})
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}, file)
            file.flush()
            run = subprocess.run(["promtool", "test", "rules", file.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(run.returncode, 0, run.stdout)

    def check_target(self, where, expression):
        for metric, labels in queries.selected(expression):
            if not metric.startswith("DCGM_"):
                self.assertLessEqual({"job", "instance"}, set(labels), f"{where}: {metric}")
        for window in re.findall(r"\brate\([^\[]*\[([^\]]+)\]", expression):
            self.assertEqual(window, "$__rate_interval", where)

    def test_panels_do_not_overlap(self):
        for name, dashboard in queries.dashboards():
            taken = set()
            for panel in dashboard["panels"]:
                place = panel["gridPos"]
                cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])}
                self.assertFalse(cells & taken, f"{name}: {panel['title']}")
                self.assertLessEqual(place["x"] + place["w"], 24, f"{name}: {panel['title']}")
                taken |= cells


class Rules(unittest.TestCase):

    def test_promtool(self):
        subprocess.run(["promtool", "check", "rules", queries.RULES], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["promtool", "check", "config", queries.RULES.parent / "prometheus.yaml"], check=True,
                       stdout=subprocess.DEVNULL)
        subprocess.run(["promtool", "test", "rules", queries.RULES_TEST], check=True, stdout=subprocess.DEVNULL)

    def test_the_operator_gets_the_same(self):
        self.assertEqual(yaml.safe_load(queries.OPERATORS_RULES.read_text())["spec"], yaml.safe_load(queries.RULES.read_text()))

    def test_every_alert_has_a_test_and_a_section_of_the_runbook(self):
        tests, runbook = queries.RULES_TEST.read_text(), queries.RUNBOOK.read_text()
        for rule in queries.rules():
            if "alert" not in rule:
                continue
            name = rule["alert"]
            self.assertIn(f'ALERTS{{alertname="{name}",alertstate="firing"}}', tests)
            self.assertEqual(rule["annotations"]["runbook"], f"docs/runbook.md#{name.lower()}")
            self.assertIn(f"\n## {name}\n", runbook)
            self.assertIn(rule["labels"]["severity"], ("info", "warning", "critical"))
            self.assertTrue(rule["annotations"]["summary"] and rule["annotations"]["description"], name)

    def test_the_runbook_has_no_other_alerts(self):
        known = {rule.get("alert") for rule in queries.rules()}
        for section in re.findall(r"\n## (Ringleader\w+)\n", queries.RUNBOOK.read_text()):
            self.assertIn(section, known)


class Metrics(unittest.TestCase):

    def test_all_are_described_and_shown(self):
        described = (queries.ROOT / "docs/metrics.md").read_text()
        expressions = [target["expr"] for _, dashboard in queries.dashboards() for panel in queries.panels(dashboard)
                       for target in panel["targets"]] + [rule["expr"] for rule in queries.rules()]
        names = {name for expression in expressions for name, _ in queries.selected(expression)}
        self.assertGreater(len(names), 30)
        shown = {re.sub("_(bucket|count|sum)$", "", name) for name in names}
        for name in re.findall(r"^\| `(ringleader_\w+)`", described, re.MULTILINE):
            self.assertIn(name, shown, "no panel and no rule shows it")
        for name in names:
            if name.startswith(("ringleader_", "process_")):
                self.assertIn(f"`{re.sub('_(bucket|count|sum)$', '', name)}", described)


if __name__ == "__main__":
    unittest.main()
