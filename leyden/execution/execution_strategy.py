"""`ExecutionStrategy`, the protocols of the two bundles that it runs, and their signals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from leyden._lib.aio import Latch
from leyden._lib.options import NamedOptions
from leyden.store.base import LightningStore


class ExecutionEvent(Protocol):
    """The part of a stop signal that a bundle may use."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    async def wait_async(self) -> None: ...


ThreadingEvent = Latch
"""The signal for threads and loops of one process."""


class StopSignal(Latch):
    """The signal that stops the runners, as the algorithm's bundle gets it.

    An algorithm that has failed can end the runners before it raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.end_requested = Latch()
        """Set to ask the strategy to end the runners."""
        self.ended = Latch()
        """Set by the strategy when the runners have ended."""
        self.deserted = Latch()
        """Set when all runners have ended by themselves while the algorithm still runs."""

    async def end_runners(self) -> None:
        """Request the end of the runners, with time to drain, and wait until they have ended."""
        self.end_requested.set()
        await self.ended.wait_async()


class RunsAgain(Exception):
    """Raised by an algorithm bundle whose algorithm has failed and will be started again.

    Its `__cause__` is the failure. Another `execute` follows, so runners that were started apart are not told that the
    run has ended.
    """


class AlgorithmBundle(Protocol):
    """A function that runs the algorithm, and returns when its work is done."""

    async def __call__(self, store: LightningStore, event: Latch) -> None: ...


class RunnerBundle(Protocol):
    """A function that runs one runner, and returns soon after `event` is set."""

    async def __call__(self, store: LightningStore, worker_id: int, event: Latch) -> None: ...


class PortableRunnerBundle(RunnerBundle, Protocol):
    """A runner bundle that can be sent to another process (`payload.py`).

    The other process calls `init`, then the bundle, then `teardown`.
    """

    @property
    def worker_names(self) -> Sequence[str]:
        """The workers' names in the store, by worker id."""
        ...

    @property
    def concurrency(self) -> int | None:
        """The most attempts that each worker has in flight; None if unknown."""
        ...

    async def __call__(
        self, store: LightningStore, worker_id: int, event: Latch, *, at_most: int | None = None
    ) -> None:
        """Run one worker.

        at_most: how many attempts it may have in flight at first.
        """
        ...

    def init(self) -> None: ...
    def teardown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The address and secret of a gateway for runners that the algorithm's process did not start."""

    host: str
    """The address on which the algorithm's servers listen."""
    gateway_port: int
    secret: str | None
    """The secret that both sides know and agents are not given."""


class ExecutionStrategy(NamedOptions, ABC):
    """Runs one algorithm bundle and `n_runners` runner bundles against one store."""

    n_runners: int
    runs_algorithm: bool = True
    """Whether this process runs the algorithm. False: it runs only runners, for an algorithm that was started
    elsewhere."""

    def check(self) -> None:
        """Raise ConfigError if this process cannot start a run.

        Called before a store, a gateway or a tracer of the run is opened.
        """

    def remote_store(self) -> LightningStore | None:
        """Return the store that another process serves, or None if the run has its own store."""
        return None

    def elsewhere(self) -> Elsewhere | None:
        """Return the gateway's address and secret if runners and algorithm are started separately, else None."""
        return None

    @abstractmethod
    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """Run the bundles. Return when the algorithm is done and the runners have drained.

        ready: runners begin when it is open; None: at once. The side that first ends with an error stops the other one,
        and its error is raised. Cancelling this call (Ctrl-C) gives the runners `drain_seconds` to finish, then cancels
        them, then the algorithm. The call returns a few seconds later, even if an agent ignores its cancellation.
        """
