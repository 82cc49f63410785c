"""Collect episodes: the policy decides for all environments that have an episode under way, at once.

It knows a policy, a vectorised environment and maybe a buffer, and takes exactly as many episodes as it was asked for: no seed is begun
that is not finished. Whoever calls it opens the environment's `collector_guard`, updates the policy and keeps the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leyden.errors import ConfigError, SimulatorError
from leyden.rl.batch import Array, Batch, copied, select, write
from leyden.rl.buffer import Buffer
from leyden.rl.episode import EpisodeLost
from leyden.rl.policy.base import Policy

OnProgress = Callable[[int, int], None]


class VectorEnv(Protocol):
    """What a collector asks of a `FiniteVectorEnv`. Shapes: N environments."""

    @property
    def num_envs(self) -> int: ...
    @property
    def alive(self) -> NDArray[np.bool_]:
        """(N,): has an episode under way."""
        ...

    @property
    def lost(self) -> Sequence[EpisodeLost]:
        """Episodes that could not be finished so far, in order."""
        ...

    @property
    def skips(self) -> bool:
        """Whether the seeds of such episodes are left out."""
        ...

    def reset(self, ids: Sequence[int] | None = None) -> Batch:
        """Begin an episode with the next seed in each of these; those for which none is left stay not alive."""
        ...

    def step(self, actions: Array, ids: Sequence[int] | None = None) -> Any:
        """A `VectorStep`: obs, rewards, terminated, truncated, infos."""
        ...


@dataclass(frozen=True, slots=True)
class CollectResult:
    """What one collect came to; episodes in the order in which they ended."""

    n_episodes: int
    n_steps: int
    rewards: NDArray[np.float64]
    """(n_episodes,), the sum of each episode."""
    lengths: NDArray[np.int64]
    """(n_episodes,), steps."""
    metrics: dict[str, float]
    """Means over episodes: reward, steps_per_episode, and each logged metric over the episodes that
    logged it. If the environment skips failed episodes, `lost` counts them.
    """
    seconds: float
    lost: tuple[EpisodeLost, ...] = ()
    """Episodes that could not be finished, each with its reason, including episodes that were
    retried.
    """

    @property
    def n_lost(self) -> int:
        """Episodes that were left out of the collect."""
        return sum(not lost.again for lost in self.lost)


class Collector:
    """Runs a policy in a vectorised environment. Its own state is two counters."""

    def __init__(self, policy: Policy, venv: VectorEnv, buffer: Buffer | None = None) -> None:
        """buffer: what the policy made with `make_buffer` for as many environments; None: nothing is kept."""
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
        """Run exactly `n_episode` episodes to their ends, or fewer if the seeds run out; None: until they do.

        on_progress: called with the episodes and steps of this collect so far, whenever an episode ends.
        Raises ConfigError if an episode is under way already, SimulatorError if every episode was skipped. What was collected before an
        error is lost with it.
        """
        began = time.perf_counter()
        venv, policy, buffer = self.venv, self.policy, self.buffer
        n_envs = venv.num_envs
        if n_episode is not None and n_episode < 1:
            raise ConfigError(f"collect(n_episode={n_episode}): ask for at least 1, or None for all seeds")
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
            if not n_alive:  # all have ended, or what was left of them was lost: then its seeds are there again
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
            actions = np.asarray(output.actions)  # a list, or another library's array, is as good
            if actions.shape[:1] != (n_alive,):
                raise ConfigError(
                    f"{type(policy).__name__}.act gave actions of shape {actions.shape} for {n_alive} observations; one row is for each"
                )
            if buffer is not None:
                buffer.decided(obs, actions, output.extras, ids)
            if ids is not None:
                of_all = np.zeros((n_envs, *actions.shape[1:]), actions.dtype)
                of_all[ids] = actions
                actions = of_all
            obs, rewards, terminated, truncated, infos = venv.step(actions)
            lost = [env for env, info in infos.items() if "lost" in info] if infos else []
            if buffer is not None:
                buffer.happened(rewards, terminated, truncated, obs, lost)
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
        """The counters."""
        return {"total_episodes": self.total_episodes, "total_steps": self.total_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.total_episodes, self.total_steps = int(state["total_episodes"]), int(state["total_steps"])

    def _begin(self, obs: Batch, ids: list[int]) -> Batch:
        """Begin episodes in some environments; the others' observations are kept, for a reset may reuse their memory."""
        if len(ids) == self.venv.num_envs:
            return self.venv.reset(ids)
        kept = copied(obs)
        fresh = self.venv.reset(ids)
        write(kept, ids, select(fresh, ids))
        return kept


def _episode(infos: Mapping[int, Mapping[str, Any]], env: int) -> Any:
    """The EpisodeStats of an environment whose episode ended."""
    try:
        return infos[env]["episode"]
    except KeyError:
        raise ConfigError(f"environment {env} ended its episode without infos[{env}]['episode']") from None


def _result(
    episodes: Sequence[Any], n_steps: int, seconds: float, lost: tuple[EpisodeLost, ...], *, skips: bool
) -> CollectResult:
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
