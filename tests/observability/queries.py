"""Every PromQL expression that this project ships: of the dashboards' panels and of Prometheus' rules."""

import json
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
RULES = ROOT / "deploy/prometheus/rules.yaml"
OPERATORS_RULES = ROOT / "deploy/kubernetes/components/monitoring/prometheus-rule.yaml"
RULES_TEST = ROOT / "deploy/prometheus/rules_test.yaml"
RUNBOOK = ROOT / "docs/runbook.md"

NAME = re.compile(r"\b(up|(?:ringleader|process|DCGM)_\w+)\b\s*(\{[^}]*\})?")


def dashboards():
    for path in DASHBOARDS:
        yield path.name, json.loads(path.read_text())


def panels(dashboard):
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def selected(expression):
    """[(metric's name, names of the labels that it is selected by)] of an expression."""
    without_records = re.sub(r"\b\w+:\w+:\w+\b", "", expression)
    return [(match[1], re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"', match[2] or ""))
            for match in NAME.finditer(without_records)]
