"""Vectorised environments without processes: stepped one after another (`dummy`), or in threads.

They step the environments of an `EnvGroup`, and know nothing of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from leyden.rl.batch import select
from leyden.rl.env.group import (
    EnvFactory,
    EnvFailure,
    EnvGroup,
    Infos,
    Start,
    common_seeds,
    require_distinct,
    require_same_spaces,
    split,
    worker_count,
)
from leyden.rl.env.vector import FiniteVectorEnv, Mask, OnWorkerError, Writers
from leyden.rl.seed import SeedsLike
from leyden.rl.spaces import Batch


class FiniteDummyVectorEnv(FiniteVectorEnv):
    """Environments that are stepped one after another, in the caller's thread.

    This is the fastest kind for simulators that take less than about 50 microseconds per step.
    """

    def __init__(
        self,
        logger: Writers,
        env_fns: Sequence[EnvFactory],
        *,
        seeds: SeedsLike = None,
        on_worker_error: OnWorkerError = "raise",
        max_retries: int = 3,
        quiet_seconds: float = 60.0,
    ) -> None:
        super().__init__(
            len(env_fns),
            logger=logger,
            seeds=seeds,
            on_worker_error=on_worker_error,
            max_retries=max_retries,
            quiet_seconds=quiet_seconds,
        )
        self._group = EnvGroup(env_fns, wants_steps=self._wants_steps)
        self._adopt(self._group.own_seeds)
        self._open(self._group.observation_space, self._group.action_space)
        self._group.open(self._layout, self._action_layout, self._rows)

    def _begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        return self._group.begin(starts)

    def _step(self, mask: Mask, actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        return self._group.step(np.flatnonzero(mask).tolist(), actions)

    def _busy(self) -> int | None:
        return self._group.at_work

    def _close(self) -> None:
        self._group.close()


class FiniteThreadVectorEnv(FiniteVectorEnv):
    """Environments in threads, for simulators that wait or release the interpreter lock, as NumPy does."""

    def __init__(
        self,
        logger: Writers,
        env_fns: Sequence[EnvFactory],
        *,
        seeds: SeedsLike = None,
        on_worker_error: OnWorkerError = "raise",
        max_retries: int = 3,
        quiet_seconds: float = 60.0,
        workers: int | None = None,
    ) -> None:
        """workers: the number of threads; None: one for each environment, because they mostly wait.
        Raise ConfigError if the environments' spaces or seed iterators differ.
        """
        super().__init__(
            len(env_fns),
            logger=logger,
            seeds=seeds,
            on_worker_error=on_worker_error,
            max_retries=max_retries,
            quiet_seconds=quiet_seconds,
        )
        self._parts = split(len(env_fns), worker_count(workers, len(env_fns), len(env_fns)))
        self._threads = [ThreadPoolExecutor(1, f"leyden-env-{part.start}") for part in self._parts]
        self._groups: list[EnvGroup] = []
        self._doing: list[Future[Any]] = []
        try:
            making = [
                thread.submit(EnvGroup, env_fns[part.start : part.stop], wants_steps=self._wants_steps)
                for thread, part in zip(self._threads, self._parts, strict=True)
            ]
            self._groups = [made.result() for made in making]
            require_distinct([env for group in self._groups for env in group.envs])
            first = self._groups[0]
            for group in self._groups[1:]:
                require_same_spaces(first, group)
            self._adopt(common_seeds([group.own_seeds for group in self._groups]))
            self._open(first.observation_space, first.action_space)
        except BaseException:
            self._close()
            raise
        for group, part in zip(self._groups, self._parts, strict=True):
            rows = self._rows.part(slice(part.start, part.stop))
            group.open(self._layout, self._action_layout, rows)

    def _begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        def begin(group: EnvGroup, part: range) -> list[EnvFailure]:
            return group.begin([(env - part.start, seed) for env, seed in starts if env in part])

        return [
            replace(failure, env=failure.env + part.start)
            for part, failures in self._each(begin)
            for failure in failures
        ]

    def _step(self, mask: Mask, actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        def step(group: EnvGroup, part: range) -> tuple[Infos, list[EnvFailure]]:
            rows = slice(part.start, part.stop)
            return group.step(np.flatnonzero(mask[rows]).tolist(), select(actions, rows))

        infos: Infos = {}
        failures: list[EnvFailure] = []
        for part, (given, failed) in self._each(step):
            infos.update({env + part.start: info for env, info in given.items()})
            failures += [replace(failure, env=failure.env + part.start) for failure in failed]
        return infos, failures

    def _each(self, work: Any) -> list[tuple[range, Any]]:
        """Call `work(group, part)` in each group's thread, and wait. Return the results by part."""
        self._doing = [
            thread.submit(work, group, part)
            for thread, group, part in zip(self._threads, self._groups, self._parts, strict=True)
        ]
        return [(part, done.result()) for part, done in zip(self._parts, self._doing, strict=True)]

    def _busy(self) -> int | None:
        for doing, group, part in zip(self._doing, self._groups, self._parts, strict=False):
            if not doing.done():
                return part.start + group.at_work
        return None

    def _close(self) -> None:
        for thread, group in zip(self._threads, self._groups, strict=False):
            thread.submit(group.close).result()
        for thread in self._threads:
            thread.shutdown()
