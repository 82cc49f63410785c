"""When to learn: enough new rewards, enough time, or a drop of the reward.

Pure functions over a small state, fed with the rewards of what is in production. This module knows
no store and does not train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from leyden.errors import ConfigError
from leyden.maths.sequential import ArmTotals, ChangeEvidence, observe_change
from leyden.options import check_number

_NO_REWARDS, _NO_CHANGE = ArmTotals(), ChangeEvidence()


@dataclass(frozen=True, slots=True)
class Drift:
    """A drop of the mean reward below its level after the last release.

    tolerance: how far the mean may drop, in (0, 1). It also covers the error of the measured level.
    reference_count: rewards after the release whose mean is the level.
    run_length: false alarms are this many rewards apart on average, at least, while the mean is at
        or above the level less the tolerance.
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
    """Conditions for learning; the first one that holds counts. Raise ConfigError without any.

    count: new rewards since the last learning.
    seconds: time since the last learning.
    drift: a drop of the reward.
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
    """Rewards since the last release or learning."""

    since: float
    """When the last learning ended, in seconds on the caller's clock."""
    level: ArmTotals = _NO_REWARDS
    """The rewards that make the level."""
    change: ChangeEvidence = _NO_CHANGE
    """Evidence of a drop, from the rewards behind those."""
    count: int = 0


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
    if reference <= 0:  # a mean of at least 0 cannot drop by the tolerance
        return state
    return replace(state, change=observe_change(state.change, value=reward, reference=reference))


def learned(state: TriggerState, now: float) -> TriggerState:
    """Return the state after a cycle of learning that has left production as it is.

    The level stays, so that a drop that is still there is found again. Its evidence begins anew.
    """
    return TriggerState(since=now, level=state.level)


def is_drop(drift: Drift, state: TriggerState) -> bool:
    """Return whether the evidence suffices to report that the reward has dropped."""
    return state.change.log_e >= math.log(drift.run_length)


def drop_at(rewards: Sequence[float]) -> int:
    """Return the index of the first reward after a drop of the mean, or 0 if there was no drop.

    The rewards are split into two parts with different means. The index is the split with the
    smallest sum of squared errors, among the splits whose second mean is lower.
    """
    total, before, place, most = sum(rewards), 0.0, 0, 0.0
    for count in range(1, len(rewards)):
        before += rewards[count - 1]
        rest = len(rewards) - count
        drop = before / count - (total - before) / rest
        if drop > 0 and (explained := drop * drop * count * rest) > most:
            place, most = count, explained
    return place


def reason_to_learn(trigger: Trigger, state: TriggerState, now: float) -> str | None:
    """Return the condition that holds, as a sentence; None if none holds."""
    if trigger.drift is not None and is_drop(trigger.drift, state):
        return f"the reward has dropped by more than {trigger.drift.tolerance:g} from {state.level.mean or 0:.3g}"
    if trigger.count is not None and state.count >= trigger.count:
        return f"there are {state.count:,} new rewards"
    if trigger.seconds is not None and now - state.since >= trigger.seconds:
        return f"{now - state.since:,.0f} s have passed"
    return None
