"""Vectorised environments with the interface that tianshou's collectors use: `reset(id)` returns observations, and
`step(action, id)` returns observations, rewards, dones and infos.

Each holds one of Leyden's vectorised environments, which does the work. Environments that share a `DataQueue` get its
seeds from the parent process, so that each seed begins one episode. Other environments draw their own seeds, and end
with the observation of `generate_nan_observation`. A collection ends by StopIteration, which `collector_guard` catches.
"""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, cast

import gymnasium
import numpy as np

from leyden.errors import ConfigError
from leyden.rl import DataQueue
from leyden.rl import env as native
from leyden.rl.batch import copied, select
from leyden.rl.env import EnvWrapper
from leyden.rl.env import vectorize_env as native_vectorize_env
from leyden.training import EpisodeStats, LogWriter
from leyden_compat.qlib.environment import AnyObservation, OldEnv
from leyden_compat.qlib.environment import EnvWrapper as OldEnvWrapper

FiniteEnvType: TypeAlias = Literal["dummy", "subproc", "shmem"]


class _Writers:
    """Stands for one writer, and passes its events on to a list of writers that may change."""

    def __init__(self, writers: list[Any]) -> None:
        self.all = writers

    @property
    def wants_steps(self) -> bool:
        return True

    def on_env_all_ready(self) -> None:
        for writer in self.all:
            writer.on_env_all_ready()

    def on_env_reset(self, env_id: int, obs: Any) -> None:
        if (unmarked := _unmarked(obs)) is None:
            return  # the environment has no seed left
        for writer in self.all:
            writer.on_env_reset(env_id, unmarked)

    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Mapping[str, Any]) -> None:
        for writer in self.all:
            writer.on_env_step(env_id, _unmarked(obs), reward, done, info)

    def log_episode(self, episode: EpisodeStats) -> None:
        for writer in self.all:
            writer.log_episode(episode)

    def on_env_all_done(self) -> None:
        for writer in self.all:
            writer.on_env_all_done()


def _unmarked(obs: Any) -> Any:
    """Return an observation without the mark that `OldEnv` adds."""
    return obs["obs"] if isinstance(obs, dict) and set(obs) == {"obs", "ended"} else obs  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] -- any environment's


def _as_pairs(log: Mapping[str, Any]) -> dict[str, Any]:
    """Return levels and values as arrays of objects, which tianshou stacks whatever they hold."""
    pairs: dict[str, Any] = {}
    for name, (level, value) in log.items():
        pairs[name] = np.empty(2, object)
        pairs[name][0], pairs[name][1] = int(level), value
    return pairs


class FiniteVectorEnv:
    """Environments over a finite set of seeds, for tianshou's collectors.

    logger: a writer, or a list of writers.
    env_fns: one factory for each environment.
    Its worker processes end when it is closed or garbage collected.
    """

    kind: ClassVar[FiniteEnvType] = "dummy"
    is_async: ClassVar[bool] = False

    def __init__(self, logger: Any, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        several = isinstance(logger, list | tuple)
        writers: list[Any] = list(cast("Sequence[Any]", logger)) if several else [] if logger is None else [logger]
        self._writers = _Writers(writers)
        factories = [partial(_make, factory) for factory in env_fns]
        options = {**worker_options(self.kind), **options}
        # Leyden's `subproc` shares memory too, if the observations have a fixed size, and its
        # `shmem` refuses the others
        kind = "subproc" if self.kind == "shmem" else self.kind
        self._begin(native_vectorize_env(factories, kind, logger=self._writers, **options))

    @classmethod
    def over(cls, venv: native.FiniteVectorEnv) -> FiniteVectorEnv:
        """Return a running vectorised environment of Leyden with this interface.

        Its owner closes it.
        """
        self = cls.__new__(cls)
        self._writers = _Writers([])
        self._begin(venv)
        return self

    def _begin(self, venv: native.FiniteVectorEnv) -> None:
        """Set all attributes, for Leyden's vectorised environment `venv`, which does the work."""
        self.native = venv
        self.env_num = venv.num_envs
        space: Any = venv.observation_space
        parts: dict[str, Any] = getattr(space, "spaces", {}) if type(space) is gymnasium.spaces.Dict else {}
        observed = parts.get("obs")
        self._draws_itself = isinstance(observed, AnyObservation)
        """Whether the environments draw their own seeds, so that `OldEnv` wraps them."""
        declared = observed.declared if isinstance(observed, AnyObservation) else space
        self.observation_space: list[Any] = [declared] * self.env_num
        self.action_space = [venv.action_space] * self.env_num
        self._alive: set[int] = set()
        """The environments that have a seed."""
        self._started = self._zombie = self._collector_guarded = False  # Qlib's names; a zombie has no seed left
        self._first_info: dict[str, Any] = {"log": {}, "aux_info": {}}
        """The info of an environment without a seed, which tianshou stacks with the others'."""
        self._rows: Any = None
        """The newest observations of all environments; they belong to `native`."""

    @property
    def _logger(self) -> list[Any]:
        return self._writers.all

    @_logger.setter
    def _logger(self, writers: list[Any]) -> None:
        self._writers.all = writers

    def __len__(self) -> int:
        return self.env_num

    @contextmanager
    def collector_guard(self) -> Generator[FiniteVectorEnv]:
        """Run a collection in the block. Call the writers' `on_env_all_ready` before it, and their `on_env_all_done`
        after it or after its StopIteration.
        """
        self._collector_guarded = True
        try:
            with self.native.collector_guard():
                try:
                    yield self
                except StopIteration:
                    pass
        finally:
            self._collector_guarded = False

    def reset(self, id: Any = None, **kwargs: Any) -> Any:
        """Begin an episode in each environment that has a seed left. Return their observations.

        Raise StopIteration when no environment has one.
        """
        if self._zombie:
            raise ConfigError("the environments have no seed left; make the vectorised environment anew")
        if not self._collector_guarded:
            warnings.warn(
                "the collection is not guarded, so it may raise StopIteration and lose logs; "
                "write `with venv.collector_guard(): collector.collect(...)`",
                RuntimeWarning,
                stacklevel=2,
            )
        ids = self._ids(id)
        if not self._started:
            self._started, self._alive = True, set(range(self.env_num))
        wanted = [env for env in ids if env in self._alive]
        if wanted:
            rows: Any = self.native.reset(wanted)
            self._rows = rows
            ended = rows["ended"] if self._draws_itself else None
            for env in wanted:
                if not self.native.alive[env] or (ended is not None and ended[env]):
                    self._alive.discard(env)
        if not self._alive:
            self._zombie = True
            raise StopIteration
        return self._observations(ids)

    def step(self, action: Any, id: Any = None) -> tuple[Any, Any, Any, Any]:
        """Make one step in those of the environments `id` that have a seed.

        Return observations, rewards, dones and infos of all environments in `id`. One without a seed keeps its last
        observation, and is never done.
        """
        if self._zombie:
            raise ConfigError("the environments have no seed left; make the vectorised environment anew")
        ids = self._ids(id)
        alive = [env for env in ids if env in self._alive and self.native.alive[env]]
        given = np.asarray(action)
        actions = np.zeros((self.env_num, *given.shape[1:]), given.dtype)
        actions[ids] = given
        rewards, done = np.zeros(len(ids)), np.zeros(len(ids), np.bool_)
        infos: list[dict[str, Any]] = [copy.deepcopy(self._first_info) for _ in ids]
        if alive:
            result = self.native.step(actions, alive)
            self._rows = result.obs
            for index, env in enumerate(ids):
                if env in alive:
                    rewards[index] = result.rewards[env]
                    done[index] = result.terminated[env] or result.truncated[env]
                    info = {name: value for name, value in result.infos.get(env, {}).items() if name != "episode"}
                    log = _as_pairs(info.get("log", {}))
                    infos[index] = {"aux_info": {}, **info, "log": log, "env_id": env}
            if not self._first_info["log"]:
                self._first_info = copy.deepcopy(infos[ids.index(alive[0])])
        # With the None, NumPy makes an array of objects instead of looking into them.
        return self._observations(ids), rewards, done, np.array([*infos, None], object)[:-1]

    def seed(self, seed: Any = None) -> list[Any]:
        """Do nothing: the seeds of the episodes are the data set's items."""
        return [None] * self.env_num

    def close(self) -> None:
        """End the environments, and the processes that they run in."""
        self.native.close()

    def _ids(self, id: Any) -> list[int]:
        """Return the environments that `id` means: one, several, or all for None."""
        return list(range(self.env_num)) if id is None else [int(env) for env in np.atleast_1d(id)]

    def _observations(self, ids: list[int]) -> Any:
        """Return these environments' newest observations, stacked as tianshou expects."""
        rows: Any = self._rows
        if self._draws_itself:
            given: list[Any] = [obs for obs in rows["obs"] if obs is not None]
            # tianshou needs a row for an environment without an episode, and ignores it, so any
            # will do
            chosen: list[Any] = [given[0] if (obs := rows["obs"][env]) is None else obs for env in ids]
            return cast(Any, np.stack(chosen))
        found: Any = copied(select(rows, np.asarray(ids)))
        if isinstance(found, np.ndarray):
            return cast(Any, found)
        # An array of one structure for each environment, which tianshou stacks itself. With the
        # None, NumPy makes an array of objects instead of looking into them.
        return np.array([*(select(found, index) for index in range(len(ids))), None], object)[:-1]


class FiniteDummyVectorEnv(FiniteVectorEnv):
    """Environments that are stepped one after another in this process."""

    kind = "dummy"


class FiniteSubprocVectorEnv(FiniteVectorEnv):
    """Environments in worker processes."""

    kind = "subproc"


class FiniteShmemVectorEnv(FiniteVectorEnv):
    """Environments in worker processes, whose observations are in shared memory."""

    kind = "shmem"


_KINDS = {kind.kind: kind for kind in (FiniteDummyVectorEnv, FiniteSubprocVectorEnv, FiniteShmemVectorEnv)}


def vectorize_env(
    env_factory: Callable[[], Any],
    env_type: FiniteEnvType,
    concurrency: int,
    logger: LogWriter | list[LogWriter] | None = None,
) -> FiniteVectorEnv:
    """Make `concurrency` environments of one factory.

    Environments that share a DataQueue as `seed_iterator` take each of its seeds once. Raise ConfigError for a kind
    other than "dummy", "subproc" and "shmem".
    """
    if env_type not in _KINDS:
        raise ConfigError(f"env_type is {env_type!r}; choose one of {', '.join(map(repr, _KINDS))}")
    return _KINDS[env_type](logger, [env_factory] * concurrency)


def worker_options(kind: str) -> dict[str, Any]:
    """Return the options with which worker processes start as in Qlib: by a fork, where the platform has it. A script
    then needs no `if __name__ == "__main__"`, because no worker imports it again.
    """
    forks = kind in ("subproc", "shmem") and "fork" in multiprocessing.get_all_start_methods()
    return {"start_method": "fork"} if forks else {}


def _make(factory: Callable[[], Any]) -> Any:
    """Make an environment, wrapped in `OldEnv` if it draws its own seeds."""
    env: Any = factory()
    draws_itself = not isinstance(env, EnvWrapper)
    if isinstance(env, OldEnvWrapper):
        draws_itself = not isinstance(cast(Any, env).seed_iterator, DataQueue | None)
    return OldEnv(env) if draws_itself else cast(Any, env)
