"""Vectorised environments over a simulator that steps many trajectories at once, as arrays.

A simulator of one trajectory is limited by the cost of Python's calls; a simulator over rows of arrays needs one call
for all of them. All N rows are stepped each time; the results of rows without an episode are ignored.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leyden.errors import ConfigError
from leyden.rl.batch import write
from leyden.rl.env.group import EnvFailure, Infos, Start
from leyden.rl.env.vector import FiniteVectorEnv, Mask, Writers
from leyden.rl.seed import SeedsLike
from leyden.rl.spaces import AnySpace, Batch
from leyden.training import EpisodeStats


class BatchSimulator(Protocol):
    """A simulator of N episodes that are stepped together, with interpreters and reward inside."""

    num_envs: int
    observation_space: AnySpace
    """The observation space of one trajectory."""
    action_space: AnySpace
    """The action space of one trajectory."""

    def reset(self, indices: NDArray[np.int64], items: Sequence[Any]) -> Batch:
        """Begin a trajectory in k rows. Return their observations, (k, ...).

        indices: (k,), the rows.
        items: k items of the data set, one for each row; NO_ITEM if no seeds were given.
        """
        ...

    def step(self, actions: Batch) -> tuple[Batch, NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Step all N rows. Rows without a trajectory must not fail. Return observations (N, ...), and rewards,
        terminated and truncated, each (N,).
        """
        ...


class FiniteBatchVectorEnv(FiniteVectorEnv):
    """The rows of a BatchSimulator as environments."""

    def __init__(self, simulator: BatchSimulator, logger: Writers = None, *, seeds: SeedsLike = None) -> None:
        super().__init__(simulator.num_envs, logger=logger, seeds=seeds)
        self._simulator = simulator
        self._open(simulator.observation_space, simulator.action_space)
        self._write = self._layout.writer(self._rows.obs)
        self._totals = np.zeros(self.num_envs)

    def _begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        """If the simulator raises, all of the episodes fail."""
        rows = np.array([env for env, _ in starts], np.int64)
        try:
            obs = self._layout.conform(self._simulator.reset(rows, [seed.item for _, seed in starts]), len(rows))
            self._layout.check_rows(obs, np.ones(len(rows), np.bool_))
        except Exception as error:  # noqa: BLE001 -- user code may raise anything; it is returned
            return [self._failure(env, 0, "began", error) for env, _ in starts]
        read = self._layout.reader(obs)
        for index, (env, _) in enumerate(starts):
            self._write(env, read(index))
        self._totals[rows] = 0.0
        self._rows.rewards[rows] = 0.0
        self._rows.terminated[rows] = self._rows.truncated[rows] = False
        return []

    def _step(self, mask: Mask, actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        """If the simulator raises, or a reward is not finite, the episodes of all rows fail. `mask` must be the rows
        with a running episode.
        """
        if not np.array_equal(mask, self.alive):
            raise ConfigError("a BatchSimulator is stepped whole; leave `ids` out")
        rows = self._rows
        try:
            obs, rewards, terminated, truncated = self._simulator.step(actions)
            obs = self._layout.conform(obs, self.num_envs)
            self._layout.check_rows(obs, mask)
            if not np.isfinite(np.dot(rewards, mask)):  # one quick call; other rows may make it NaN too
                for row in np.flatnonzero(~np.isfinite(rewards) & mask)[:1]:
                    raise ValueError(f"the reward of row {row} is {rewards[row]}, which is no finite number")
        except Exception as error:  # noqa: BLE001 -- user code may raise anything; it is returned
            envs = np.flatnonzero(mask)
            return {}, [self._failure(int(env), int(self._lengths[env]), "stepped", error) for env in envs]
        write(rows.obs, ..., obs)
        rows.rewards[...], rows.terminated[...], rows.truncated[...] = rewards, terminated, truncated
        self._totals += rows.rewards
        infos: Infos = {}
        for env in np.flatnonzero((rows.terminated | rows.truncated) & mask).tolist():
            seed = self._current[env]
            stats = EpisodeStats(
                int(self._lengths[env]) + 1,
                float(self._totals[env]),
                {},
                None if seed is None else seed.index,
                None if seed is None else seed.number,
            )
            infos[env] = {"episode": stats}
        return infos, []

    def _close(self) -> None:
        close = getattr(self._simulator, "close", None)
        if callable(close):
            close()

    def _failure(self, env: int, step: int, doing: str, error: Exception) -> EnvFailure:
        headline = traceback.format_exception_only(error)[-1].strip()
        return EnvFailure(env, step, doing, headline, "".join(traceback.format_exception(error)), error)
