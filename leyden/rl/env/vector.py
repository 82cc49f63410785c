"""`FiniteVectorEnv`: many environments over a finite set of seeds.

The class gives each seed to one episode, knows which environments are running an episode, notifies writers, and decides
what happens to an episode that was lost. Its subclasses are the kinds of vectorised environments, which only step
environments (`_begin`, `_step`, `_close`). To add a kind, implement these methods, add a line to `ENV_KINDS` in
`factory.py`, and run `tests/rl/env/test_kinds.py` on it.

An environment keeps its number, and seeds are handed out in the order of these numbers. All requested environments make
their step before any result is read. So the lengths of the episodes alone decide which environment gets which seed, and
never the speed of a worker: the same seeds and actions give the same trajectories in every kind, with any number of
workers. Only a lost episode changes the order.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from leyden._lib.options import NamedOptions, check_choice, check_number
from leyden.errors import ConfigError, SimulatorError
from leyden.rl.env.group import EnvFailure, Infos, Rows, Start
from leyden.rl.episode import EnvWriter, EpisodeLost
from leyden.rl.seed import Seed, SeedsLike, SeedSource, as_seed_source
from leyden.rl.spaces import AnySpace, Batch, Layout, layout_of

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
OnWorkerError: TypeAlias = Literal["raise", "skip", "retry"]
Writers: TypeAlias = EnvWriter | Sequence[EnvWriter] | None
Mask: TypeAlias = NDArray[np.bool_]
_MAX_SKIPS: Final = 1000
"""The most episodes in a row that may be skipped, unless one pass over the seeds has fewer."""


class VectorStep(NamedTuple):
    """The results of one step, with a row for each of the N environments.

    The rows of environments that were not stepped are stale. The arrays belong to the vectorised environment and change
    with its next step, so copy what you keep.
    """

    obs: Batch
    """(N, ...), or a dict or tuple of such arrays, in the structure of the space."""
    rewards: NDArray[np.float64]
    """(N,): the reward of each step."""
    terminated: Mask
    """(N,): whether the task has ended."""
    truncated: Mask
    """(N,): whether a limit ended the episode, or the episode was lost."""
    infos: Mapping[int, Mapping[str, Any]]
    """The info of each environment that has one: `episode` (EpisodeStats) when an episode ended, `lost` (EpisodeLost)
    when one could not be finished, `log` if a writer wants steps, `aux_info` if there is a collector, and the info of a
    Gymnasium environment.
    """


class FiniteVectorEnv(NamedOptions, ABC):
    """N environments that run episodes over a source of seeds. Close it, or use it in `with`.

    `reset` begins episodes with the next seeds, and `step` steps the environments that are running one.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        logger: Writers = None,
        seeds: SeedsLike = None,
        on_worker_error: OnWorkerError = "raise",
        max_retries: int = 3,
        quiet_seconds: float = 60.0,
    ) -> None:
        """Set the options that all kinds share.

        logger: writers that are notified of episodes and steps.
        seeds: what episodes begin with; None: episodes have no seed and no end.
        on_worker_error: what to do with an episode whose simulator fails, or whose worker dies. `raise`: raise
            SimulatorError and give the seed back. `skip`: leave the seed out. Raise SimulatorError if too many are
            skipped in a row: as many as one pass has seeds, at most 1,000, at least `max_retries` + 1. `retry`: take
            the seed again, at most `max_retries` times, then raise SimulatorError. Every lost episode is listed in
            `lost`.
        quiet_seconds: a call of a simulator that takes longer is reported by a warning, which names the environment,
            the seed and the step. Infinity: never.
        """
        check_number("the number of environments", num_envs, at_least=1, whole=True)
        check_choice("on_worker_error", on_worker_error, get_args(OnWorkerError))
        check_number("max_retries", max_retries, at_least=0, whole=True)
        if quiet_seconds != math.inf:
            check_number("quiet_seconds", quiet_seconds, above=0)
        self.num_envs = num_envs
        self.alive: Mask = np.zeros(num_envs, np.bool_)
        """(N,): whether each environment is running an episode."""
        self.lost: list[EpisodeLost] = []
        """All episodes that were lost, in order."""
        self.skips = on_worker_error == "skip"
        """Whether the seeds of lost episodes are left out."""
        self.observation_space: AnySpace
        """The observation space of one environment."""
        self.action_space: AnySpace
        """The action space of one environment."""
        self._writers: list[EnvWriter] = (
            [] if logger is None else [*logger] if isinstance(logger, Sequence) else [logger]
        )
        self._wants_steps = any(writer.wants_steps for writer in self._writers)
        self._step_writers = [writer for writer in self._writers if writer.wants_steps]
        self._sources = 0
        """How often the seeds were replaced. It is the entropy of the new ones."""
        self._has_seeds = seeds is not None
        self._seeds: SeedSource = as_seed_source(seeds)
        self._on_worker_error: OnWorkerError = on_worker_error
        self._max_retries = max_retries
        self._losses: dict[int, int] = {}
        """How often the episode of a seed was lost, by the seed's number."""
        self._current: list[Seed[Any] | None] = [None] * num_envs
        """The seed of each environment's episode; None without an episode."""
        self._lengths = np.zeros(num_envs, np.int64)
        """(N,): the steps of each environment's episode."""
        self._unreported: Infos = {}
        """Lost episodes that the infos of the next step report."""
        self._has_logged_note = False
        """Whether a note of an environment was logged; others are dropped."""
        self._has_logged_skip = False
        """Whether a skipped episode was logged; others are only counted."""
        self._skipped: list[tuple[EnvFailure, Seed[Any]]] = []
        """The episodes that were skipped since the last one that ended."""
        self._closed = False
        self._in_call = False
        """Whether a call of the environments is running, or was interrupted."""
        self._n_calls = 0
        """The number of calls of the environments so far."""
        self._quiet_seconds = quiet_seconds
        self._watch_ended = threading.Event()

    # ---- the kinds -------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        """Begin episodes. Return the failures, in any environment: a lost worker has several."""

    @abstractmethod
    def _step(self, mask: Mask, actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        """Step some environments. Return their infos, and the failures in any environment.

        mask: (N,), which environments to step.
        actions: of all N environments.
        """

    @abstractmethod
    def _close(self) -> None:
        pass

    def _busy(self) -> int | None:
        """Return the number of the environment that is being called; None if unknown. Another thread calls this."""
        return None

    def _open(self, observation_space: AnySpace, action_space: AnySpace, rows: Rows | None = None) -> None:
        """Set the spaces and the arrays for results, and start the thread that reports long calls.

        A subclass calls this method once it knows the spaces.
        rows: the arrays for results; None: new ones.
        """
        self.observation_space, self.action_space = observation_space, action_space
        self._layout: Layout = layout_of(observation_space)
        self._action_layout: Layout = layout_of(action_space)
        self._rows = Rows.allocate(self._layout, self.num_envs) if rows is None else rows
        self._read = self._layout.reader(self._rows.obs)
        if self._quiet_seconds < threading.TIMEOUT_MAX:
            weakref.finalize(self, self._watch_ended.set)
            watch = (weakref.ref(self), self._quiet_seconds, self._watch_ended)
            threading.Thread(target=_watch, args=watch, name="leyden-env-watch", daemon=True).start()

    def _adopt(self, own_seeds: Any) -> None:
        """Take seeds from the iterator that the environments were made with; None: they have none. Raise ConfigError if
        the vectorised environment was given seeds too.
        """
        if own_seeds is not None:
            if self._has_seeds:
                raise ConfigError(
                    "seeds were given to the vectorised environment and to its environments; leave `seed_iterator` out of the EnvWrapper"
                )
            self._seeds = as_seed_source(own_seeds)

    # ---- for callers -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_envs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def exhausted(self) -> bool:
        """Whether no seed is left. A lost episode that is retried gives its seed back."""
        return self._seeds.exhausted

    def use_seeds(self, seeds: SeedsLike) -> None:
        """Take other seeds from now on. Workers keep running.

        Running episodes are abandoned, and their seeds are given back to the old source.
        """
        self._require_open()
        for env in np.flatnonzero(self.alive):
            self._abandon(int(env))
        self._sources += 1
        self._seeds = as_seed_source(seeds, entropy=self._sources)
        self._losses = {}
        self._skipped, self._has_logged_skip = [], False

    def reset(self, ids: Sequence[int] | None = None) -> Batch:
        """Begin episodes with the next seeds. Return the observations of all N environments.

        An environment for which no seed is left does not become alive. An environment that is running an episode
        abandons it and gives its seed back, so that it begins the episode again.
        ids: the environments; None: all that are not running an episode.
        Raise SimulatorError if an episode cannot begin, unless `on_worker_error` allows that.
        """
        self._require_open()
        wanted = [
            int(env) for env in (np.flatnonzero(~self.alive) if ids is None else np.unique(np.asarray(ids, np.int64)))
        ]
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.num_envs:
            raise ConfigError(f"ids={ids}; environments are numbered 0 to {self.num_envs - 1}")
        for env in wanted:
            if self.alive[env]:
                self._abandon(env)
        while starts := self._take(wanted):
            failures = self._call(self._begin, starts)
            failed = {failure.env for failure in failures}
            for env, _ in starts:
                if env not in failed:
                    self.alive[env] = True
                    self._lengths[env] = 0
                    for writer in self._writers:
                        writer.on_env_reset(env, self._read(env))
            self._record_lost(failures, {env for env, _ in starts})
            wanted = [env for env, _ in starts if env in failed]
        return self._rows.obs

    def step(self, actions: Any, ids: Sequence[int] | None = None) -> VectorStep:
        """Step environments that are alive. Afterwards `alive` is False where an episode ended.

        actions: a row for each of the N environments; rows of others than the stepped ones are ignored.
        ids: the environments; None: all.
        Raise SimulatorError if an episode is lost, unless `on_worker_error` allows that; the other environments have
        made their step then. Raise ConfigError if no environment is alive, or if `actions` has another shape or dtype
        than the space.
        """
        self._require_open()
        if ids is None:
            mask = self.alive.copy()
        else:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[np.asarray(ids, np.int64)] = True
            mask &= self.alive
        if not mask.any():
            raise ConfigError(
                "none of these environments has an episode under way; call reset(), or stop where `exhausted` is True"
            )
        batch = self._action_layout.conform(actions, self.num_envs)
        infos, failures = self._call(self._step, mask, batch)
        rows = self._rows
        self._lengths += mask
        if failures:
            mask[[failure.env for failure in failures]] = False
        for writer in self._step_writers:
            for env in np.flatnonzero(mask).tolist():
                ended = bool(rows.terminated[env] or rows.truncated[env])
                writer.on_env_step(env, self._read(env), float(rows.rewards[env]), ended, infos.get(env, {}))
        for env in np.flatnonzero((rows.terminated | rows.truncated) & mask).tolist():
            self._end(env, infos)
        if infos and not self._has_logged_note:
            for env, info in infos.items():
                if (note := info.pop("note", None)) is not None and not self._has_logged_note:
                    self._has_logged_note = True
                    logger.warning("environment %d: %s (logged once)", env, note)
        if failures:
            self._record_lost(failures, set())
        if self._unreported:
            for env, loss in self._unreported.items():
                infos[env] = {**infos.get(env, {}), **loss}
            self._unreported = {}
        return VectorStep(rows.obs, rows.rewards, rows.terminated, rows.truncated, infos)

    @contextmanager
    def collector_guard(self) -> Generator[None]:
        """Call the writers' `on_env_all_ready` before the block, and `on_env_all_done` after it.

        After an error in the block, `on_env_all_done` is not called.
        """
        for writer in self._writers:
            writer.on_env_all_ready()
        yield
        for writer in self._writers:
            writer.on_env_all_done()

    def close(self) -> None:
        """End everything, and give running episodes' seeds back. Safe to repeat. Returned arrays stay readable."""
        if not self._closed:
            self._closed = True
            self._watch_ended.set()
            for env in np.flatnonzero(self.alive):
                self._abandon(int(env))
            self._close()

    # ---- episodes --------------------------------------------------------------------------------

    def _take(self, wanted: Sequence[int]) -> list[Start]:
        """Take a seed for each wanted environment, until none is left. Return the starts. If the data set raises an
        error, the seeds that were taken before it are given back.
        """
        starts: list[Start] = []
        try:
            for env in wanted:
                if (seed := self._seeds.take()) is None:
                    break
                self._current[env] = seed
                starts.append((env, seed))
        except BaseException:
            for env, seed in starts:
                self._current[env] = None
                self._seeds.give_back(seed)
            raise
        return starts

    def _end(self, env: int, infos: Infos) -> None:
        """Finish the seed of an episode that has ended, and notify the writers of its statistics."""
        self.alive[env] = False
        self._skipped.clear()  # only skips in a row count
        if (seed := self._current[env]) is not None:
            self._seeds.finish(seed)
            self._losses.pop(seed.number, None)
            self._current[env] = None
        info = infos[env]
        episode = info["episode"] = replace(info["episode"], env_id=env)
        for writer in self._writers:
            writer.log_episode(episode)

    def _abandon(self, env: int) -> None:
        """End an episode without a result, and give its seed back."""
        self.alive[env] = False
        if (seed := self._current[env]) is not None:
            self._seeds.give_back(seed)
            self._current[env] = None

    def _record_lost(self, failures: Sequence[EnvFailure], beginning: set[int]) -> None:
        """Record lost episodes, and skip or give back the seed of each.

        Raise SimulatorError for the first one that `on_worker_error` does not allow.
        beginning: environments in which the caller begins another episode. The losses of all others are reported in the
            infos of the next step.
        """
        fatal: tuple[EnvFailure, Seed[Any]] | None = None
        for failure in sorted(failures, key=lambda one: (not one.guilty, one.env)):
            env, seed = failure.env, self._current[failure.env]
            self.alive[env], self._current[env] = False, None
            if seed is None:
                continue
            losses = self._losses[seed.number] = self._losses.get(seed.number, 0) + 1
            skipped = self.skips and (failure.guilty or losses > self._max_retries)
            lost = EpisodeLost(env, seed.index, seed.number, failure.step, failure.headline, again=not skipped)
            if skipped:
                self._seeds.finish(seed)
                self._skip(failure, seed)
            else:
                self._seeds.give_back(seed)
                if self._on_worker_error == "raise" or losses > self._max_retries:
                    fatal = fatal or (failure, seed)
            self.lost.append(lost)
            if env not in beginning:
                self._rows.truncated[env] = True
                self._unreported[env] = {"lost": lost}
        if fatal is not None:
            raise self._error(*fatal) from fatal[0].error
        size = getattr(self._seeds, "__len__", None)
        one_pass = _MAX_SKIPS if size is None else min(size(), _MAX_SKIPS)
        if len(self._skipped) >= max(one_pass, self._max_retries + 1):
            failure, seed = self._skipped[0]
            n, self._skipped = len(self._skipped), []
            raise self._error(
                failure, seed, f"{n} episodes in a row failed and were skipped; the first: "
            ) from failure.error

    def _skip(self, failure: EnvFailure, seed: Seed[Any]) -> None:
        """Count a skipped episode. Only the first one is logged."""
        if not self._has_logged_skip:
            self._has_logged_skip = True
            logger.warning(
                "on_worker_error='skip' leaves out the episode of seed %s: environment %d failed at step %d: %s. "
                "Others that fail are counted as `lost`",
                seed.index,
                failure.env,
                failure.step,
                failure.headline,
            )
        self._skipped.append((failure, seed))

    def _error(self, failure: EnvFailure, seed: Seed[Any], first: str = "") -> SimulatorError:
        """Return the error for a failed environment, which names the remedy.

        first: text that stands before the message.
        """
        times = self._losses.get(seed.number, 1)
        again = f" ({times} times now)" if times > 1 else ""
        own = f"\n\nIts own traceback:\n{failure.traceback}" if failure.traceback and failure.error is None else ""
        remedy = {
            "raise": " With on_worker_error='retry' or 'skip' the others go on.",
            "retry": " It was tried as often as `max_retries` allows; with on_worker_error='skip' the others go on.",
            "skip": "",
        }[self._on_worker_error]
        return SimulatorError(
            f"{first}environment {failure.env} failed{again} when it {failure.doing}, at step {failure.step} of the episode of seed "
            f"{seed.index}: {failure.headline}.{remedy}{own}",
            env_id=failure.env,
            seed_index=seed.index,
            step=failure.step,
        )

    # ---- work ------------------------------------------------------------------------------------

    def where(self) -> tuple[int, str] | None:
        """Return the number of the running call, and the beginning of a sentence about it.

        Such a sentence is "environment 3, at step 5 of the episode of seed 7, has" (not returned yet). Return None if
        no call is running. Another thread calls this method; it may see a call that has just ended, which does no harm.
        """
        if not self._in_call:
            return None
        number, env = self._n_calls, self._busy()
        if env is None:
            return number, "the environments have"
        seed = self._current[env]
        of_seed = "" if seed is None else f" of the episode of seed {seed.index}"
        return number, f"environment {env}{self._of_worker(env)}, at step {int(self._lengths[env])}{of_seed}, has"

    def _of_worker(self, env: int) -> str:
        """Return which worker runs an environment, in words; empty if none does."""
        return ""

    def _call(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._n_calls += 1
        self._in_call = True
        result = work(*args, **kwargs)
        self._in_call = False
        return result

    def _require_open(self) -> None:
        """Raise ConfigError if the environment is closed, or was interrupted in a call."""
        if self._closed:
            raise ConfigError("this vectorised environment was closed; make another one")
        if self._in_call:
            raise ConfigError(
                "this vectorised environment was interrupted in the midst of a step; close it and make another one"
            )


def _watch(of: weakref.ref[FiniteVectorEnv], quiet_seconds: float, ended: threading.Event) -> None:
    """Warn of a call that takes longer than `quiet_seconds`, without ending it. Runs in a thread until `ended`."""
    before, checks = None, 1
    while not ended.wait(quiet_seconds):
        venv = of()
        where = None if venv is None else venv.where()
        del venv  # a reference would keep the environment alive during the wait
        checks = checks + 1 if where is not None and where == before else 1
        before = where
        waits = checks - 1
        if where is not None and waits and waits & (waits - 1) == 0:  # after 1, 2, 4, 8, ... waits
            logger.warning(
                "%s not returned for %g s. It continues; step_timeout_seconds (of 'subproc' and 'shmem') ends a simulator that hangs",
                where[1],
                quiet_seconds * waits,
            )
