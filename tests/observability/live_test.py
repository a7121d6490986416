#!/usr/bin/env python3
"""Asks a Prometheus for every expression that the dashboards and rules hold while jobs run.

live_test.py PROMETHEUS-ADDRESS JOB[|JOB]. Every panel's expression returns series. A rule's expression is evaluated, and the
metrics that it selects exist with the labels that it selects them by: the alerts themselves must not fire, but for one of a driver
that the test plays."""

import json
import sys
import time
import unittest
import urllib.parse
import urllib.request

import queries

ADDRESS, JOB = sys.argv[1:3]


def query(expression):
    url = f"http://{ADDRESS}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as reply:
        answer = json.load(reply)
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def await_query(expression):
    """The series of an expression, all of them numbers, as soon as there are any: rates need two scrapes of a target. What
    Prometheus answers at last where that does not come true within 60 s."""
    deadline = time.monotonic() + 60
    while True:
        series = query(expression)
        if series and all(s["value"][1] != "NaN" for s in series) or time.monotonic() > deadline:
            return series
        time.sleep(0.5)


def filled_in(expression):
    for name, value in (("$__rate_interval", "1m"), ("$job_name", JOB), ("$job", ".+"), ("$instance", ".+")):
        expression = expression.replace(name, value)
    return expression


class Live(unittest.TestCase):

    def test_panels_return_series(self):
        for name, dashboard in queries.dashboards():
            for panel in queries.panels(dashboard):
                for target in panel["targets"]:
                    with self.subTest(dashboard=name, panel=panel["title"], expression=target["expr"]):
                        result = await_query(filled_in(target["expr"]))
                        self.assertTrue(result, "no series")
                        self.assertTrue(all(series["value"][1] != "NaN" for series in result), result)

    def test_variables_have_values(self):
        for name, dashboard in queries.dashboards():
            for variable in dashboard["templating"]["list"]:
                if variable["type"] != "query":
                    continue
                selector, label = variable["query"]["query"].removeprefix("label_values(").rstrip(")").rsplit(", ", 1)
                with self.subTest(dashboard=name, variable=variable["name"]):
                    series = await_query(filled_in(selector))
                    self.assertTrue(series, "no series")
                    self.assertTrue(all(label in s["metric"] for s in series))

    def test_rules_select_what_exists(self):
        for rule in queries.rules():
            with self.subTest(rule=rule.get("alert") or rule["record"]):
                query(rule["expr"])
                for metric, labels in queries.selected(rule["expr"]):
                    series = await_query(metric)
                    self.assertTrue(series, f"{metric} has no series")
                    self.assertTrue(all(label in s["metric"] for s in series for label in labels), (metric, labels))

    def test_no_alert_fires(self):
        """But the one on the XID 13 that the test's driver tells of, as a worker counts it."""
        expected = [("RingleaderGpuProgramFault", "13")]
        await_query('ALERTS{alertname="RingleaderGpuProgramFault",alertstate="firing"}')
        self.assertEqual([(s["metric"]["alertname"], s["metric"].get("xid")) for s in query('ALERTS{alertstate="firing"}')], expected)


def await_series():
    """Until two scrapes have seen the layers of every job: rates need two."""
    deadline = time.monotonic() + 180
    for job in JOB.split("|"):
        wanted = f'count_over_time(ringleader_job_layer_density_ratio{{job_name="{job}"}}[30s]) >= 6'
        while not query(wanted):
            if time.monotonic() > deadline:
                sys.exit(f"Prometheus saw no layers of {job} within 180 s")
            time.sleep(0.5)


if __name__ == "__main__":
    await_series()
    unittest.main(argv=sys.argv[:1])
