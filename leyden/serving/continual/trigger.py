"""Decide when to learn: after enough new rewards, after enough time, or after a drop of the reward.

Pure functions over a small state, which takes the rewards of the version in production. This module knows no store and
does not train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leyden._lib.options import check_number
from leyden.errors import ConfigError
from leyden.statistics import ArmTotals, ChangeEvidence, observe_change

_NO_REWARDS, _NO_CHANGE = ArmTotals(), ChangeEvidence()


@dataclass(frozen=True, slots=True)
class Drift:
    """The condition that the mean reward has dropped below its level after the last release.

    tolerance: how far the mean may drop, in (0, 1]. It also covers the error of the measured level.
    reference_count: how many rewards after the release give the level, as their mean.
    run_length: the least mean number of rewards between two false alarms, while the mean reward is at or above the
        level less the tolerance.
    """

    tolerance: float = 0.1
    reference_count: int = 200
    run_length: float = 10_000.0

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, above=0, at_most=1)
        check_number("reference_count", self.reference_count, at_least=1, whole=True)
        check_number("run_length", self.run_length, above=1)


@dataclass(frozen=True, slots=True)
class Trigger:
    """Conditions for learning, of which any one suffices. Raise ConfigError without any.

    count: learn after this many new rewards since the last cycle.
    seconds: learn when this many seconds have passed since the last cycle.
    drift: learn after a drop of the reward.
    """

    count: int | None = None
    seconds: float | None = None
    drift: Drift | None = None

    def __post_init__(self) -> None:
        check_number("count", self.count, at_least=1, whole=True, or_none="no number is enough")
        check_number("seconds", self.seconds, above=0, or_none="no time is enough")
        if self.count is None and self.seconds is None and self.drift is None:
            raise ConfigError(
                "a trigger needs count=, seconds= or drift=, because nothing would ever be learnt without one"
            )


@dataclass(frozen=True, slots=True)
class TriggerState:
    """The rewards since the last cycle."""

    since: float
    """When the last cycle ended, in seconds on the caller's clock."""
    level: ArmTotals = _NO_REWARDS
    """The first rewards after the last release, whose mean is the level (`Drift`)."""
    change: ChangeEvidence = _NO_CHANGE
    """Evidence of a drop, from the rewards after those."""
    count: int = 0
    """The number of rewards since the last cycle."""


def observe_reward(trigger: Trigger, state: TriggerState, reward: float) -> TriggerState:
    """Return the state after one more reward, in [0, 1], of the version in production.

    Raise ConfigError for a reward out of [0, 1].
    """
    if not 0 <= reward <= 1:
        raise ConfigError(f"reward is {reward!r}; scale rewards to the range from 0 to 1 before they are observed")
    state = replace(state, count=state.count + 1)
    drift = trigger.drift
    if drift is None:
        return state
    if state.level.count < drift.reference_count:
        return replace(state, level=state.level.plus(reward))
    reference = (state.level.mean or 0.0) - drift.tolerance
    if reference <= 0:  # the mean, which is at least 0, cannot drop below it
        return state
    return replace(state, change=observe_change(state.change, value=reward, reference=reference))


def learned(state: TriggerState, now: float) -> TriggerState:
    """Return the state after a cycle that ended at `now` and has not changed production.

    The level is kept, so that a drop that persists is found again. Count and evidence start from zero.
    """
    return TriggerState(since=now, level=state.level)


def is_drop(drift: Drift, state: TriggerState) -> bool:
    return state.change.log_e >= math.log(drift.run_length)


def drop_at(rewards: Sequence[float]) -> int:
    """Return the index of the first reward after a drop of the mean, or 0 if there was no drop.

    A split divides the rewards into two parts, each with its own mean. Among the splits whose second mean is lower, the
    one with the smallest sum of squared errors is chosen, which is the one with the largest `drop**2 * count * rest`.
    """
    total, before, index, largest = sum(rewards), 0.0, 0, 0.0
    for count in range(1, len(rewards)):
        before += rewards[count - 1]
        rest = len(rewards) - count
        drop = before / count - (total - before) / rest
        if drop > 0 and (explained := drop * drop * count * rest) > largest:
            index, largest = count, explained
    return index


def reason_to_learn(trigger: Trigger, state: TriggerState, now: float) -> str | None:
    """Return the first condition that holds, as a sentence; None if none holds.

    now: in seconds on the clock of `state.since`.
    """
    if trigger.drift is not None and is_drop(trigger.drift, state):
        return f"the reward has dropped by more than {trigger.drift.tolerance:g} from {state.level.mean or 0:.3g}"
    if trigger.count is not None and state.count >= trigger.count:
        return f"there are {state.count:,} new rewards"
    if trigger.seconds is not None and now - state.since >= trigger.seconds:
        return f"{now - state.since:,.0f} s have passed"
    return None
