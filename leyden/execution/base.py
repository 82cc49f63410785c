"""What a strategy is given and what it must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from leyden.store.base import LightningStore
from leyden.utils.latch import Latch

__all__ = ["AlgorithmBundle", "ExecutionStrategy", "RunnerBundle"]


class AlgorithmBundle(Protocol):
    """The algorithm with all that it needs; returns when its work is done."""

    async def __call__(self, store: LightningStore, event: Latch) -> None: ...


class RunnerBundle(Protocol):
    """One runner with all that it needs; returns soon after `event` is set."""

    async def __call__(self, store: LightningStore, worker_id: int, event: Latch) -> None: ...


class ExecutionStrategy(ABC):
    """Runs one algorithm bundle and `n_runners` runner bundles against one store."""

    n_runners: int

    @abstractmethod
    async def execute(self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore) -> None:
        """Return when the algorithm is done and the runners have drained.

        Whatever ends first with an error stops the other side and is raised. Cancelling this (Ctrl-C) gives the runners `drain_seconds`
        to finish, then cancels them, then the algorithm. It ends in a few seconds, whatever an agent does.
        """
