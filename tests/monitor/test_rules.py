"""When an alert is raised: the limits that are documented, and what holds for any series."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.monitor import DEFAULT_RULES, AlertRule, AnomalyRule
from leyden.monitor.rules import Point, increase

NOW = 1_000_000.0
RULES = {rule.name: rule for rule in DEFAULT_RULES}
values = st.floats(-1e6, 1e6)
counts = st.lists(st.integers(0, 1000), min_size=2, max_size=30)


def steady(value: float, count: int = 10, every: float = 5.0) -> list[Point]:
    """Return `count` points with one value up to now, `every` seconds apart."""
    return [(NOW - every * k, value) for k in reversed(range(count))]


@pytest.mark.parametrize(
    ("name", "metric", "comparison", "threshold"),
    [
        ("cpu", "cpu_percent", ">", 80.0),
        ("memory", "memory_percent", ">", 90.0),
        ("disk", "disk_free_percent", "<", 10.0),
        ("io", "io_seconds", ">", 0.1),
        ("latency", "store_latency_seconds", ">", 1.0),
    ],
)
def test_a_gauge_has_the_documented_limit_and_no_other(
    name: str, metric: str, comparison: str, threshold: float
) -> None:
    rule = RULES[name]
    beyond = math.nextafter(threshold, math.inf if comparison == ">" else -math.inf)
    assert [
        verdict.firing for value in (threshold, beyond) if (verdict := rule.judge({metric: steady(value)}, NOW))
    ] == [
        False,
        True,
    ]


def test_the_share_that_comes_to_an_end_has_the_documented_limit() -> None:
    def verdict(completed: int, ended: int) -> bool | None:
        series = {
            "attempts_completed": [(NOW - 100, 7.0), (NOW, 7.0 + completed)],
            "attempts_ended": [(NOW - 100, 9.0), (NOW, 9.0 + ended)],
        }
        found = RULES["completion"].judge(series, NOW)
        return None if found is None else found.firing

    assert verdict(95, 100) is False
    assert verdict(94, 100) is True
    assert verdict(0, 19) is None  # too few to say
    assert verdict(0, 20) is True


def test_a_lost_worker_has_missed_more_than_three_heartbeats() -> None:
    rule = RULES["worker_lost"]
    missed = [(NOW - 1, 100.0), (NOW, 3.0)]
    assert [
        v.firing for points in (missed, [*missed[:1], (NOW, 3.01)]) if (v := rule.judge({rule.metrics[0]: points}, NOW))
    ] == [
        False,
        True,
    ]


def test_nothing_is_said_of_what_is_not_known() -> None:
    for rule in DEFAULT_RULES:
        assert rule.judge({}, NOW) is None
        if not rule.reach_seconds:
            continue
        old = [(NOW - rule.reach_seconds - 1.0, 1e9), (NOW - rule.reach_seconds - 0.5, -1e9)]
        assert rule.judge(dict.fromkeys(rule.metrics, old), NOW) is None


@given(st.lists(st.tuples(st.floats(0, 120), values), max_size=30), values, st.integers(1, 10))
def test_a_limit_is_held_against_the_mean_of_the_window(
    ages: list[tuple[float, float]], threshold: float, least: int
) -> None:
    points = sorted((NOW - age, value) for age, value in ages)
    recent = [value for time, value in points if time >= NOW - 60]
    rule = AlertRule(name="x", metric="x", comparison=">", threshold=threshold, minimum_count=least)
    verdict = rule.judge({"x": points}, NOW)
    if len(recent) < least:
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.value == pytest.approx(fmean(recent))
        assert verdict.firing == (verdict.value > threshold)


@given(st.lists(values, min_size=1, max_size=20), values)
def test_below_is_above_in_a_mirror(values: list[float], threshold: float) -> None:
    def judge(sign: float, comparison: Any) -> bool:
        rule = AlertRule(name="x", metric="x", comparison=comparison, threshold=sign * threshold)
        verdict = rule.judge({"x": [(NOW - k, sign * value) for k, value in enumerate(values)]}, NOW)
        assert verdict is not None
        return verdict.firing

    assert judge(1.0, ">") == judge(-1.0, "<")


@given(counts, counts)
def test_a_counter_that_begins_again_has_lost_nothing(before: list[int], after: list[int]) -> None:
    before, after = sorted(before), sorted(after)
    grown = float(before[-1] - before[0])
    assert increase([float(n) for n in before]) == grown
    if after[0] < before[-1]:  # it can be seen that it began again
        assert increase([float(n) for n in before + after]) == grown + after[-1]


@given(st.lists(st.floats(0, 1), min_size=30, max_size=80), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_an_anomaly_is_one_in_any_unit(history: list[float], shift: float, scale: float) -> None:
    def fires(jump: float, unit: float, zero: float) -> bool:
        rule = AnomalyRule(name="x", metric="x", comparison=">", least_change=0.01 * unit)
        past = [(NOW - 61 - 5 * k, value * unit + zero) for k, value in enumerate(history)]
        verdict = rule.judge({"x": [*reversed(past), *((t, jump * unit + zero) for t, _ in steady(0.0, 5))]}, NOW)
        assert verdict is not None
        return verdict.firing

    assert fires(100.0, 1.0, 0.0)  # the whole history is within [0, 1]: its spread is at most 1.4826
    assert fires(100.0, scale, shift)
    assert not fires(sorted(history)[len(history) // 2 - 1], 1.0, 0.0)  # not above the middle of it
    assert not fires(sorted(history)[len(history) // 2 - 1] - 0.001, scale, shift)


def test_an_anomaly_is_not_hidden_by_outliers_and_not_made_by_a_flutter() -> None:
    rule = AnomalyRule(name="x", metric="x", comparison=">", least_change=0.1)
    calm = [(NOW - 61 - 5 * k, 0.002 if k % 7 else 50.0) for k in reversed(range(100))]

    def fires(value: float) -> bool:
        verdict = rule.judge({"x": [*calm, *steady(value, 5)]}, NOW)
        assert verdict is not None
        return verdict.firing

    assert fires(0.5)
    assert not fires(0.05)  # 25 times as slow, and of no importance
    assert rule.judge({"x": [*calm[-10:], *steady(0.5, 5)]}, NOW) is None  # too short a past


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": "a b"}, "letters, digits and underscores"),
        ({"comparison": "=="}, "possible: '>', '<'"),
        ({"severity": "bad"}, "possible: info, warning, critical"),
        ({"window_seconds": -1.0}, "window_seconds is -1.0"),
        ({"minimum_count": 0}, "minimum_count is 0"),
        ({"name": 5}, "letters, digits and underscores"),
        ({"metric": 5}, "5 is no name of a metric"),
        ({"threshold": "80"}, "threshold is '80'"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"window_seconds": "60"}, "window_seconds is '60'"),
        ({"minimum_count": 1.5}, "minimum_count is 1.5"),
        ({"per": "y", "window_seconds": 0.0}, "per='y' needs a window"),
    ],
)
def test_a_rule_that_is_none_is_refused(wrong: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {"name": "a", "metric": "x", "comparison": ">", "threshold": 1.0}
    with pytest.raises(ConfigError, match=told):
        AlertRule(**right | wrong)
