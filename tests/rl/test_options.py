"""Numbers that simulators are trained with are checked where they are given, by the shared checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium.spaces as spaces
import numpy as np
import pytest

from leyden.errors import ConfigError
from leyden.rl import vectorize_env
from leyden.rl.buffer import ReplayBuffer, RolloutBuffer
from leyden.rl.policy import DQN

OBSERVATIONS, ACTIONS = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)


def dqn(exploration: Any) -> DQN:
    return DQN(None, OBSERVATIONS, ACTIONS, lr=1e-3, exploration=exploration)


def env(**options: Any) -> object:
    return vectorize_env("CartPole-v1", concurrency=1, **options)


CHECKED: dict[str, Callable[[Any], object]] = {
    "exploration": dqn,
    "first probability": lambda value: dqn((value, 0.1, 100)),
    "last probability": lambda value: dqn((1.0, value, 100)),
    "number of actions": lambda value: dqn((1.0, 0.1, value)),
    "size": lambda value: RolloutBuffer(value, 1),
    "num_envs": lambda value: RolloutBuffer(8, value),
    "replay size": lambda value: ReplayBuffer(value, 1),
    "replay num_envs": lambda value: ReplayBuffer(8, value),
    "quiet_seconds": lambda value: env(quiet_seconds=value),
    "max_retries": lambda value: env(max_retries=value),
    "step_timeout_seconds": lambda value: env(env_type="subproc", step_timeout_seconds=value),
}


@pytest.mark.parametrize("value", [math.nan, True, "4", -1], ids=repr)
@pytest.mark.parametrize("make", CHECKED.values(), ids=CHECKED)
def test_nan_bool_text_and_a_number_out_of_range_are_refused_alike(make: Callable[[Any], object], value: Any):
    with pytest.raises(ConfigError, match="it must be"):
        make(value)


def test_a_schedule_of_exploration_has_three_parts():
    with pytest.raises(ConfigError, match="number of actions"):
        dqn((1.0, 0.1))


def test_an_unknown_policy_for_errors_is_refused_by_name():
    with pytest.raises(ConfigError, match="on_worker_error is 'retyr'; did you mean 'retry'"):
        env(on_worker_error="retyr")


def test_infinity_switches_the_warning_of_slow_simulators_off():
    with vectorize_env("CartPole-v1", concurrency=1, quiet_seconds=math.inf) as venv:
        venv.reset()
