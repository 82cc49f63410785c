"""Verdicts on a canary: metrics, missing values, several metrics at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from leyden.errors import ConfigError
from leyden.serving.continual import (
    FAILURE,
    LATENCY,
    REWARD,
    Bounded,
    Exceeds,
    GuardSettings,
    Metric,
    RequestOutcome,
    Verdict,
    decide,
    observe,
    start,
)
from leyden.statistics import RankHistory

Values = Callable[[bool, random.Random], dict[str, float | None]]


def verdict_on(
    settings: GuardSettings, values: Values, *, share: float = 0.5, requests: int = 1500, seed: int = 0
) -> Verdict:
    """The first verdict that is not *continue*, or the last one."""
    numbers, state = random.Random(seed), start(settings)
    for _ in range(requests):
        canary = numbers.random() < share
        state = observe(settings, state, RequestOutcome(canary, share, values(canary, numbers)))
        verdict = decide(settings, state)
        if verdict.decision != "continue":
            return verdict
    return decide(settings, state)


def rewards(canary_mean: float, control_mean: float) -> Values:
    return lambda canary, numbers: {"reward": float(numbers.random() < (canary_mean if canary else control_mean))}


ONLY_REWARD = GuardSettings(metrics=(REWARD,))


def test_a_better_canary_is_promoted_and_a_worse_one_rolled_back_soon() -> None:
    better = verdict_on(ONLY_REWARD, rewards(0.9, 0.6))
    assert better.decision == "promote" and better.reason == "reward is better, at an error of 0.05"
    assert (better.metrics[0].required_p or 1) <= 0.05
    worse = verdict_on(ONLY_REWARD, rewards(0.4, 0.7))
    assert worse.decision == "roll_back" and worse.canary_requests <= 60
    assert worse.reason == "reward is worse in the canary, at an error of 0.2"


@pytest.mark.parametrize(("share", "requests"), [(0.5, 400), (0.1, 2000)])
def test_the_share_of_the_traffic_does_not_change_how_many_canary_requests_a_rollback_takes(
    share: float, requests: int
) -> None:
    verdicts = [
        verdict_on(ONLY_REWARD, rewards(0.4, 0.7), share=share, requests=requests, seed=seed) for seed in range(7)
    ]
    assert sorted(verdict.canary_requests for verdict in verdicts)[3] <= 35


def test_a_slower_canary_is_rolled_back_by_ranks_and_by_a_limit() -> None:
    def slower(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        return {"reward": 1.0, "latency": numbers.lognormvariate(1.0 if canary else 0.0, 1.0)}

    for latency in (LATENCY, Metric("latency", better="lower", scale=Exceeds(2.0))):
        verdict = verdict_on(GuardSettings(metrics=(REWARD, latency)), slower)
        assert verdict.decision == "roll_back" and verdict.reason.startswith("latency is worse")


def test_a_promotion_needs_every_required_metric() -> None:
    not_slower = Metric("latency", better="lower", scale=Exceeds(2.0), promotion="not_worse", tolerance=0.05)
    settings = GuardSettings(metrics=(REWARD, not_slower))

    def slightly_slower(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        return {
            "reward": float(numbers.random() < (0.9 if canary else 0.5)),
            "latency": 3.0 if numbers.random() < (0.09 if canary else 0.05) else 1.0,
        }

    assert verdict_on(GuardSettings(metrics=(REWARD,)), slightly_slower, requests=600).decision == "promote"
    assert verdict_on(settings, slightly_slower, requests=600).reason == "no decision yet on latency"

    def as_fast(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        return {"reward": float(numbers.random() < (0.9 if canary else 0.5)), "latency": 1.0}

    assert verdict_on(settings, as_fast).reason == "reward is better, latency is not worse, at an error of 0.05"


def test_values_that_are_missing_in_one_arm_raise_an_alarm_that_blocks_promotion() -> None:
    """The canary's users give feedback only when they are content, which makes it look better."""

    def silent_when_bad(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        good = numbers.random() < 0.6
        return {"reward": None if canary and not good else float(good)}

    verdict = verdict_on(ONLY_REWARD, silent_when_bad)
    assert verdict.decision == "continue" and verdict.missing_alarm
    assert verdict.reason == "values are missing more often in one arm than in the other, so nothing is promoted"
    assert (verdict.metrics[0].canary_missing or 0) > 0.3 and verdict.metrics[0].control_missing == 0


def test_values_that_are_missing_alike_raise_no_alarm_and_are_left_out() -> None:
    def half_silent(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        return {"reward": None if numbers.random() < 0.5 else float(numbers.random() < (0.9 if canary else 0.5))}

    alarms = 0
    for seed in range(10):
        verdict = verdict_on(ONLY_REWARD, half_silent, seed=seed)
        alarms += verdict.missing_alarm
        assert verdict.decision == "promote" or verdict.missing_alarm
    assert alarms <= 3


def test_another_share_than_assumed_raises_an_alarm_that_blocks_promotion() -> None:
    """Every second user gets the canary, but the test assumes every fifth."""
    numbers, state = random.Random(2), start(ONLY_REWARD)
    for _ in range(400):
        canary = numbers.random() < 0.5
        reward = float(numbers.random() < (0.95 if canary else 0.3))
        state = observe(ONLY_REWARD, state, RequestOutcome(canary, 0.2, {"reward": reward}))
    verdict = decide(ONLY_REWARD, state)
    assert verdict.share_alarm
    assert verdict.reason == "the canary has another share of the requests than assumed, so nothing is promoted"


@pytest.mark.parametrize("settings", [ONLY_REWARD, GuardSettings(metrics=(REWARD, FAILURE, LATENCY))])
def test_equal_versions_are_rolled_back_and_promoted_within_the_errors(settings: GuardSettings) -> None:
    def equal(canary: bool, numbers: random.Random) -> dict[str, float | None]:
        return {
            "reward": float(numbers.random() < 0.7),
            "failure": float(numbers.random() < 0.05),
            "latency": numbers.paretovariate(1.2),
        }

    runs = 24 if len(settings.metrics) == 1 else 10
    decisions = [verdict_on(settings, equal, requests=200, seed=seed).decision for seed in range(runs)]
    assert decisions.count("promote") <= 0.05 * runs + 4
    assert decisions.count("roll_back") <= 0.2 * runs + 3 * math.sqrt(0.16 * runs)


def test_a_metric_scales_its_values() -> None:
    ranks = RankHistory()
    assert Metric("reward", scale=Bounded(-1, 1)).scaled(0.5, ranks)[0] == 0.75
    assert Metric("reward", scale=Bounded(-1, 1)).scaled(7, ranks)[0] == 1.0
    assert Metric("cost", better="lower", scale=Exceeds(2)).scaled(3, ranks)[0] == 0.0
    with pytest.raises(ConfigError, match="metric 'reward' is NaN"):
        REWARD.scaled(math.nan, ranks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GuardSettings(metrics=(REWARD, REWARD)), "same name"),
        (lambda: GuardSettings(metrics=(FAILURE,)), "could never be promoted"),
        (lambda: GuardSettings(promotion_error=0.0), "promotion_error"),
        (lambda: Metric("x", promotion="not_worse"), "needs tolerance"),
        (lambda: Metric("x", tolerance=0.1), "has a tolerance"),
        (lambda: Metric("x", promotion="not_worse", tolerance=1.0), "tolerance is 1.0"),
        (lambda: Metric("x", better="more"), "better"),  # type: ignore[arg-type]
        (lambda: Bounded(1, 1), "high"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
