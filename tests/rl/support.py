"""Small environments whose numbers can be worked out by hand, and a buffer filled from a written-down story."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from leyden.rl.batch import Batch
from leyden.rl.buffer import ReplayBuffer, RolloutBuffer
from leyden.rl.env import FiniteVectorEnv, vectorize_env
from leyden.rl.seed import SeedsLike


def vectorized(
    env: str | Callable[..., gymnasium.Env[Any, Any]], num_envs: int, *, seeds: SeedsLike = None, **options: Any
) -> FiniteVectorEnv:
    """Return `num_envs` environments of one kind, in this process. options: of the environment."""
    return vectorize_env(env if isinstance(env, str) else partial(env, **options), concurrency=num_envs, seeds=seeds)


class Counting(gymnasium.Env[Any, Any]):
    """Episodes of `length` steps (its seed says how many, if None); observation (seed, step); reward 1 for action 1, else 0."""

    def __init__(self, length: int | None = None, *, truncates: bool = False, nested: bool = False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        if nested:
            self.observation_space = spaces.Dict(
                {"seed": spaces.Box(-np.inf, np.inf, (1,), np.float64), "step": spaces.Discrete(100)}
            )
        self.action_space = spaces.Discrete(2)
        self._length, self._truncates, self._nested = length, truncates, nested

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.seed, self.step_number = seed or 0, 0
        self.end = self._length or self.seed % 5 + 1
        return self._see(), {}

    def step(self, action: Any):
        self.step_number += 1
        ended = self.step_number >= self.end
        return self._see(), float(action), ended and not self._truncates, ended and self._truncates, {}

    def _see(self) -> Any:
        if self._nested:
            return {"seed": np.array([self.seed], np.float64), "step": self.step_number}
        return np.array([self.seed, self.step_number], np.float32)


class Target(gymnasium.Env[Any, Any]):
    """One step: the observation is a number, the reward is minus the squared distance of the action from half of it. The optimum is 0."""

    def __init__(self):
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1)
        return np.array([self.x], np.float32), {}

    def step(self, action: Any):
        return np.array([self.x], np.float32), -float((action[0] - self.x / 2) ** 2), True, False, {}


def fill(
    buffer: RolloutBuffer | ReplayBuffer, steps: list[dict[str, Any]], *, extras: list[dict[str, Any]] | None = None
) -> None:
    """Vector steps as a collector would report them: obs, actions, rewards, terminated, truncated, next_obs, ids."""
    buffer.begin_collect()
    for at, step in enumerate(steps):
        ids = None if step.get("ids") is None else np.array(step["ids"])
        obs: Batch = np.array(step["obs"], np.float32)
        buffer.add_actions(obs, np.array(step["actions"]), {} if extras is None else extras[at], ids)
        buffer.add_outcomes(
            np.array(step["rewards"], np.float64),
            np.array(step["terminated"], bool),
            np.array(step["truncated"], bool),
            np.array(step["next_obs"], np.float32),
        )
