"""The page on monitoring names every rule with its limits, and every metric."""

import re

from leyden.monitor import DEFAULT_RULES, AlertRule
from leyden.monitor.metric_names import STORE_METRICS, SYSTEM_METRICS, UPSTREAM_METRICS, WORKER_METRICS
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "monitoring.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins like this."""
    text = PAGE.split(f"\n{head}", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_the_rules_are_those_in_the_code():
    said = [
        [
            f"`{rule.name}`",
            " per ".join(f"`{metric}`" for metric in rule.metrics)
            + (
                f" {rule.comparison} {rule.threshold:g}"
                if isinstance(rule, AlertRule)
                else " is far above its earlier values"
            ),
            f"{rule.window_seconds:g} s",
            str(rule.minimum_count),
            rule.severity,
        ]
        for rule in DEFAULT_RULES
    ]
    assert rows("| rule |") == said


def test_every_metric_is_explained():
    named = [name for row in rows("| metric |") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted({**SYSTEM_METRICS, **WORKER_METRICS, **STORE_METRICS, **UPSTREAM_METRICS})
