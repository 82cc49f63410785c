"""Collect episodes: one call of the policy acts for all environments that are running an episode.

A collector knows a policy, a vectorised environment and possibly a buffer. It runs exactly the requested number of
episodes to their ends. Its caller opens the environment's `collector_guard`, updates the policy and keeps the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leyden._lib.options import check_number
from leyden.errors import ConfigError, SimulatorError
from leyden.rl.batch import Array, Batch, copied, select, write
from leyden.rl.buffer import Buffer
from leyden.rl.episode import EpisodeLost
from leyden.rl.policy.policies import Policy

OnProgress = Callable[[int, int], None]


class VectorEnv(Protocol):
    """The part of `FiniteVectorEnv` that a collector uses. Shapes: N environments."""

    @property
    def num_envs(self) -> int: ...
    @property
    def alive(self) -> NDArray[np.bool_]:
        """(N,): whether each environment is running an episode."""
        ...

    @property
    def lost(self) -> Sequence[EpisodeLost]:
        """The episodes that failed so far, in order."""
        ...

    @property
    def skips(self) -> bool:
        """Whether the seeds of lost episodes are left out."""
        ...

    def reset(self, ids: Sequence[int] | None = None) -> Batch:
        """Begin an episode with the next seed in each environment of `ids`. Return all observations.

        An environment for which no seed is left does not become alive.

        ids: None: all.
        """
        ...

    def step(self, actions: Array, ids: Sequence[int] | None = None) -> Any:
        """Make a step in each environment of `ids` (None: all). Return a `VectorStep`.

        A VectorStep is a tuple of obs, rewards, terminated, truncated and infos.
        """
        ...


@dataclass(frozen=True, slots=True)
class CollectResult:
    """The episodes of one collect, in the order in which they ended."""

    n_episodes: int
    n_steps: int
    rewards: NDArray[np.float64]
    """(n_episodes,): the sum of each episode's rewards."""
    lengths: NDArray[np.int64]
    """(n_episodes,): the number of each episode's steps."""
    metrics: dict[str, float]
    """Means over episodes: reward, steps_per_episode, and each logged metric over the episodes that logged it. If the
    environment skips failed episodes, `lost` counts them.
    """
    seconds: float
    """The wall time of the collect."""
    lost: tuple[EpisodeLost, ...] = ()
    """Episodes that could not be finished, each with its reason, including retried ones."""

    @property
    def n_lost(self) -> int:
        """The number of episodes that were left out of the collect."""
        return sum(not lost.again for lost in self.lost)


class Collector:
    """Runs a policy in a vectorised environment. The collector's own state is two counters."""

    def __init__(self, policy: Policy, venv: VectorEnv, buffer: Buffer | None = None) -> None:
        """buffer: from the policy's `make_buffer`; None: no transition is kept. Raise ConfigError if it was made for
        another number of environments.
        """
        self.policy = policy
        self.venv = venv
        self.buffer = buffer
        self.total_episodes = 0
        self.total_steps = 0
        expected = getattr(buffer, "num_envs", venv.num_envs)
        if expected != venv.num_envs:
            raise ConfigError(
                f"the buffer is made for {expected} environments, the vector environment has {venv.num_envs}"
            )

    def collect(
        self, *, n_episode: int | None = None, explore: bool = True, on_progress: OnProgress | None = None
    ) -> CollectResult:
        """Run exactly `n_episode` episodes to their ends, or fewer if the seeds run out.

        n_episode: the number of episodes; None: until the seeds run out.
        explore: whether the policy is to explore.
        on_progress: called with the episodes and steps of this collect so far, whenever an episode ends.
        Raise ConfigError if an environment is running an episode already or the policy returns a wrong number of
        actions, SimulatorError if all episodes were lost. An error loses the episodes that were collected before it.
        """
        began = time.perf_counter()
        venv, policy, buffer = self.venv, self.policy, self.buffer
        n_envs = venv.num_envs
        check_number("n_episode", n_episode, at_least=1, whole=True, or_none="all seeds")
        if venv.alive.any():
            raise ConfigError(
                f"environments {np.flatnonzero(venv.alive).tolist()} have episodes under way, left by a collect that failed; "
                "collect begins with idle ones: make the vector environment anew"
            )
        if buffer is not None:
            buffer.begin_collect()
        ended: list[Any] = []
        lost_before = len(venv.lost)
        n_steps = 0
        wanted = n_envs if n_episode is None else min(n_envs, n_episode)
        obs = venv.reset(list(range(wanted)))
        alive = venv.alive.copy()
        n_begun = int(alive.sum())
        while True:
            n_alive = int(np.count_nonzero(alive))
            if not n_alive:  # all have ended; seeds of lost episodes may be there again
                missing = n_envs if n_episode is None else min(n_envs, n_episode - len(ended))
                if not missing:
                    break
                obs = venv.reset(list(range(missing)))
                alive = venv.alive.copy()
                if not alive.any():
                    break
                n_begun = len(ended) + int(alive.sum())
                continue
            ids = None if n_alive == n_envs else np.flatnonzero(alive)
            output = policy.act(obs if ids is None else select(obs, ids), explore=explore)
            actions = np.asarray(output.actions)  # may be a list, or another library's array
            if actions.shape[:1] != (n_alive,):
                raise ConfigError(
                    f"{type(policy).__name__}.act returned actions of shape {actions.shape} for {n_alive} observations; return one "
                    "row for each observation"
                )
            if buffer is not None:
                buffer.add_actions(obs, actions, output.extras, ids)
            if ids is not None:  # `step` takes a row for each environment, also for idle ones
                of_all = np.zeros((n_envs, *actions.shape[1:]), actions.dtype)
                of_all[ids] = actions
                actions = of_all
            obs, rewards, terminated, truncated, infos = venv.step(actions)
            lost = [env for env, info in infos.items() if "lost" in info] if infos else []
            if buffer is not None:
                buffer.add_outcomes(rewards, terminated, truncated, obs, lost)
            n_steps += n_alive - int(np.count_nonzero(alive[lost]))
            now = venv.alive
            if np.array_equal(now, alive):
                continue
            finished: list[int] = np.flatnonzero(alive & ~now).tolist()
            ended += (_episode(infos, env) for env in finished if env not in lost)
            n_begun -= len(lost)
            if on_progress is not None:
                on_progress(len(ended), n_steps)
            again = finished if n_episode is None else finished[: max(0, n_episode - n_begun)]
            if again:
                obs = self._begin(obs, again)
                n_begun += int(np.count_nonzero(venv.alive[again]))
            alive = venv.alive.copy()
        self.total_episodes += len(ended)
        self.total_steps += n_steps
        all_lost = tuple(venv.lost[lost_before:])
        if not ended and all_lost:
            first = all_lost[0]
            raise SimulatorError(
                f"no episode of this collect could be finished, {len(all_lost)} were lost; the first, of seed {first.seed_index} in "
                f"environment {first.env_id}, at step {first.step}: {first.reason}",
                env_id=first.env_id,
                seed_index=first.seed_index,
                step=first.step,
            )
        return _result(ended, n_steps, time.perf_counter() - began, all_lost, skips=venv.skips)

    def state_dict(self) -> dict[str, int]:
        return {"total_episodes": self.total_episodes, "total_steps": self.total_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total_episodes, self.total_steps = int(state["total_episodes"]), int(state["total_steps"])

    def _begin(self, obs: Batch, ids: list[int]) -> Batch:
        """Begin episodes in some environments. Return the observations of all. The current ones, `obs`, are copied,
        because a reset may reuse their memory.
        """
        if len(ids) == self.venv.num_envs:
            return self.venv.reset(ids)
        kept = copied(obs)
        fresh = self.venv.reset(ids)
        write(kept, ids, select(fresh, ids))
        return kept


def _episode(infos: Mapping[int, Mapping[str, Any]], env: int) -> Any:
    """Return the EpisodeStats of an environment whose episode ended. Raise ConfigError if it is missing."""
    try:
        return infos[env]["episode"]
    except KeyError:
        raise ConfigError(
            f"environment {env} ended its episode without infos[{env}]['episode']; its step must return the EpisodeStats there"
        ) from None


def _result(
    episodes: Sequence[Any], n_steps: int, seconds: float, lost: tuple[EpisodeLost, ...], *, skips: bool
) -> CollectResult:
    """Return the result of collected episodes. With `skips`, the number of lost ones is a metric, too."""
    rewards = np.array([episode.reward for episode in episodes], np.float64)
    lengths = np.array([episode.length for episode in episodes], np.int64)
    logged: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.logs.items():
            logged.setdefault(name, []).append(value)
    metrics = {name: float(np.mean(values)) for name, values in logged.items()}
    if episodes:
        metrics |= {"reward": float(rewards.mean()), "steps_per_episode": float(lengths.mean())}
    result = CollectResult(len(episodes), n_steps, rewards, lengths, metrics, seconds, lost)
    if skips:
        metrics["lost"] = float(result.n_lost)
    return result
