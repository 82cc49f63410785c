"""Any Gymnasium environment, by id, factory or class, as a vectorised environment over a finite set of seeds, in this process.

Each seed is one episode and is what the environment's `reset(seed=...)` is given. It is the smallest implementation of the contract of
`FiniteVectorEnv`: no workers, no writers, no logs but reward and length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from leyden.errors import ConfigError
from leyden.rl.batch import Array, Batch, is_space, write

__all__ = ["GymnasiumEpisode", "GymnasiumStep", "GymnasiumVectorEnv"]


@dataclass(frozen=True, slots=True)
class GymnasiumEpisode:
    """How an episode went."""

    length: int
    reward: float
    logs: dict[str, float] = field(default_factory=dict[str, float])
    seed_index: int | None = None
    seed_number: int | None = None


class GymnasiumStep(NamedTuple):
    """What came of one step of N environments; views that the next step overwrites."""

    obs: Batch
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Mapping[int, Mapping[str, Any]]


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
        self._obs = _zeros(self.observation_space, num_envs)
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

    def step(self, actions: Array, ids: Sequence[int] | None = None) -> GymnasiumStep:
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
                stats = GymnasiumEpisode(self._length[env], self._return[env], {}, number, number)
                infos[env] = {"episode": stats}
        return GymnasiumStep(self._obs, self._rewards, self._terminated, self._truncated, infos)

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


def _zeros(space: Any, n: int) -> Batch:
    if is_space(space, gymnasium.spaces.Dict):
        return {name: _zeros(part, n) for name, part in space.spaces.items()}
    if is_space(space, gymnasium.spaces.Tuple):
        return tuple(_zeros(part, n) for part in space.spaces)
    if space.shape is None or space.dtype is None:
        raise ConfigError(f"observations of {space} are no arrays; wrap the environment")
    return np.zeros((n, *space.shape), space.dtype)
