"""Any Gymnasium environment, by id, factory or class, as a vectorised environment over a finite set of seeds, in this process.

Each seed is one episode and is what the environment's `reset(seed=...)` is given. It is the smallest implementation of the contract of
`FiniteVectorEnv`: no workers, no writers, no logs but reward and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import gymnasium
import numpy as np

from leyden.errors import ConfigError
from leyden.loop import EpisodeStats
from leyden.rl.batch import Array, Batch, write
from leyden.rl.env.layout import layout_of
from leyden.rl.env.vector import VectorStep

__all__ = ["GymnasiumVectorEnv"]


class GymnasiumVectorEnv:
    """`num_envs` environments that take the next seed whenever one is told to begin."""

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        num_envs: int = 1,
        seeds: Iterable[int | None] | None = None,
        **kwargs: Any,
    ) -> None:
        """env: an id of Gymnasium's registry (kwargs go to `gymnasium.make`), or what makes one environment.

        seeds: one episode each; None: episodes without end, numbered from 0 by their seeds.
        """
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs}; at least 1 environment is needed")
        self._envs: list[gymnasium.Env[Any, Any]] = [
            gymnasium.make(env, **kwargs) if isinstance(env, str) else env(**kwargs) for _ in range(num_envs)
        ]
        self.num_envs = num_envs
        self.observation_space: gymnasium.Space[Any] = self._envs[0].observation_space
        self.action_space: gymnasium.Space[Any] = self._envs[0].action_space
        self.alive = np.zeros(num_envs, np.bool_)
        self.exhausted = False
        layout = layout_of(self.observation_space)
        if layout.unshared is not None:
            raise ConfigError(f"observations of {layout.unshared} are no arrays; wrap the environment")
        self._obs: Batch = layout.allocate(num_envs)
        self._plain = isinstance(self._obs, np.ndarray)
        self._rewards = np.zeros(num_envs)
        self._terminated = np.zeros(num_envs, np.bool_)
        self._truncated = np.zeros(num_envs, np.bool_)
        self._length = [0] * num_envs
        self._return = [0.0] * num_envs
        self._number = [0] * num_envs
        self._taken = 0
        self._seeds: Iterator[int | None] = iter(())
        self.use_seeds(seeds)

    def use_seeds(self, seeds: Iterable[int | None] | None) -> None:
        """Draw from these from now on; None: 0, 1, 2, ... for ever."""
        self._seeds = iter(_naturals() if seeds is None else seeds)
        self._taken = 0
        self.exhausted = False

    def reset(self, ids: Sequence[int] | None = None) -> Batch:
        """Begin an episode with the next seed in each of these (None: all that have none)."""
        for env in np.flatnonzero(~self.alive).tolist() if ids is None else ids:
            self.alive[env] = False
            if self.exhausted:
                continue
            try:
                seed = next(self._seeds)
            except StopIteration:
                self.exhausted = True
                continue
            obs, _ = self._envs[env].reset(seed=seed)
            write(self._obs, env, obs)
            self._number[env], self._taken = self._taken, self._taken + 1
            self._length[env], self._return[env] = 0, 0.0
            self.alive[env] = True
        return self._obs

    def step(self, actions: Array, ids: Sequence[int] | None = None) -> VectorStep:
        """Step those that have an episode under way (of ids)."""
        infos: dict[int, dict[str, Any]] = {}
        self._rewards[:] = 0.0
        self._terminated[:] = self._truncated[:] = False
        alive: list[bool] = self.alive.tolist()
        # one action at a time as Gymnasium's spaces give it: a NumPy scalar, or an array
        for env in range(self.num_envs) if ids is None else ids:
            if not alive[env]:
                continue
            obs, reward, terminated, truncated, _ = self._envs[env].step(actions[env])
            if self._plain:
                self._obs[env] = obs  # type: ignore[call-overload, index]
            else:
                write(self._obs, env, obs)
            self._rewards[env] = reward
            self._length[env] += 1
            self._return[env] += float(reward)
            if terminated or truncated:
                self._terminated[env], self._truncated[env] = terminated, truncated
                self.alive[env] = False
                number = self._number[env]
                stats = EpisodeStats(self._length[env], self._return[env], {}, number, number, env)
                infos[env] = {"episode": stats}
        return VectorStep(self._obs, self._rewards, self._terminated, self._truncated, infos)

    def close(self) -> None:
        """Close the environments. Safe to repeat."""
        for env in self._envs:
            env.close()
        self._envs = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _naturals() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
