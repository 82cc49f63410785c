"""Learning begins after enough rewards, enough time or a drop of the reward, and not before."""

from __future__ import annotations

import random

import pytest

from leyden.errors import ConfigError
from leyden.serving.continual import Drift, Trigger, TriggerState, observe_reward, reason_to_learn


def rewards_until_due(trigger: Trigger, means: list[float], seed: int) -> int | None:
    numbers, state = random.Random(seed), TriggerState(since=0.0)
    for count, mean in enumerate(means, 1):
        state = observe_reward(trigger, state, float(numbers.random() < mean))
        if reason_to_learn(trigger, state, now=0.0):
            return count
    return None


def test_count_and_time() -> None:
    trigger = Trigger(count=3, seconds=60)
    state = TriggerState(since=100.0)
    assert reason_to_learn(trigger, state, now=159) is None
    assert reason_to_learn(trigger, state, now=160) == "60 s have passed"
    for _ in range(3):
        state = observe_reward(trigger, state, 1.0)
    assert reason_to_learn(trigger, state, now=101) == "there are 3 new rewards"


def test_a_drop_is_found_soon_and_a_level_reward_raises_no_alarm() -> None:
    trigger = Trigger(drift=Drift(tolerance=0.1, reference_count=200, run_length=2000))
    for seed in range(5):
        assert rewards_until_due(trigger, [0.8] * 1200, seed) is None
        due = rewards_until_due(trigger, [0.8] * 600 + [0.4] * 200, seed)
        assert due is not None and 600 < due <= 700


def test_a_reward_near_zero_cannot_drop() -> None:
    trigger = Trigger(drift=Drift(tolerance=0.1, reference_count=10))
    assert rewards_until_due(trigger, [0.0] * 300, 0) is None


def test_triggers_that_never_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs count="):
        Trigger()
    with pytest.raises(ConfigError, match=r"reward is 1\.5"):
        observe_reward(Trigger(count=1), TriggerState(since=0.0), 1.5)
