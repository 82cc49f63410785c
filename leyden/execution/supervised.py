"""The base of `ipc`, `cs` and `ray`: an algorithm in this process, and runners in watched processes.

It packs the runners' payload and ends a dead runner's attempts. Each strategy implements `place`: where the processes
run and how they reach the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from leyden._lib.aio import Latch
from leyden._lib.options import check_number
from leyden.errors import StoreError
from leyden.execution.execution_strategy import (
    AlgorithmBundle,
    ExecutionStrategy,
    PortableRunnerBundle,
    RunnerBundle,
    StopSignal,
)
from leyden.execution.payload import Payload, pack
from leyden.execution.processes import Ending, WorkerProcess, WorkerSupervisor
from leyden.execution.together import run_together
from leyden.execution.worker_deaths import end_attempts
from leyden.monitor.prometheus import metrics
from leyden.store.base import LightningStore
from leyden.store.server import LightningStoreServer


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a run's runners: the store that they open, and a function that launches their processes."""

    store: Any
    """The store that runners open: the store itself, or a server of it."""
    launch: Callable[[int, bytes], WorkerProcess]
    """Starts the process of a worker, given its id and its packed `Payload`."""
    imports_main: bool = True
    """Whether the runners can import this process's main script."""
    at_once_seconds: float = 1.0
    """A process that worked for fewer seconds counts as dead at once. Several such deaths in a row end the run."""
    end_family: Callable[[int], None] = lambda _: None
    """Ends the processes that a dead worker's agents left behind, if they can be found."""


class SupervisedExecutionStrategy(ExecutionStrategy):
    """Each runner in its own process, which is started again when it dies.

    n_runners: the number of runners, and so of processes.
    drain_seconds: how long runners may finish attempts in flight when a run is stopped from outside, before they are
        cancelled.
    """

    def __init__(self, n_runners: int = 1, *, drain_seconds: float = 2.0) -> None:
        check_number("n_runners", n_runners, at_least=1, whole=True)
        check_number("drain_seconds", drain_seconds, at_least=0)
        self.n_runners, self.drain_seconds = n_runners, drain_seconds

    @abstractmethod
    def place(self, store: LightningStore) -> AbstractAsyncContextManager[Place]:
        """Return a context that yields the runners' place, with its connection to the store. Leaving it undoes both."""

    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """Run the algorithm here and the runners in processes. Return when both have ended.

        ready: runners begin when it is open; None: at once. Raise ConfigError, which names the part of the runners that
        cannot be sent to another process.
        """
        stop = StopSignal()
        if ready is None:
            ready = Latch()
            ready.set()
        async with self.place(store) as place:
            supervisor = self._supervisor(cast(PortableRunnerBundle, runner), store, place, ready, stop)
            try:
                await run_together(algorithm(store, stop), supervisor, stop, drain_seconds=self.drain_seconds)
            finally:
                supervisor.abandon()  # kills the rest if this call was cancelled twice

    def _supervisor(
        self, bundle: PortableRunnerBundle, store: LightningStore, place: Place, ready: Latch, stop: Latch
    ) -> WorkerSupervisor:
        """Start the runners' processes, and return their supervisor.

        When a process dies, its attempts end. The culprit among them is known if it ran alone, or if the process
        reported it. Before a worker's next process begins, claims that the dead one left are released.
        """
        packed = pack(Payload(bundle, place.store), imports_main=place.imports_main)

        async def on_loss(worker_id: int, ending: Ending, at_most: int | None) -> int:
            """End the attempts of a dead worker. Return how many are suspected, as `WorkerSupervisor` wants it."""
            place.end_family(worker_id)
            alone = 1 in (at_most, bundle.concurrency)
            return await end_attempts(
                store,
                bundle.worker_names[worker_id],
                f"the process of runner {worker_id} {ending.headline}",
                culprit=ending.culprit,
                one_is_to_blame=alone or ending.failure is None or not ending.failure.culprit_may_be_over,
            )

        async def on_return(worker_id: int) -> None:
            await store.release_claims(worker_ids=[bundle.worker_names[worker_id]])

        return WorkerSupervisor(
            self.n_runners,
            lambda worker_id: place.launch(worker_id, packed),
            ready=ready,
            stop=stop,
            on_loss=on_loss,
            on_return=on_return,
            at_once_seconds=place.at_once_seconds,
        )


@asynccontextmanager
async def serve(
    store: LightningStore,
    host: str,
    port: int = 0,
    *,
    token: str | None,
    remedy: str,
    claims_from: Latch | None = None,
) -> AsyncGenerator[LightningStore | LightningStoreServer]:
    """Yield a server of the store over HTTP, with metrics; or the store itself if other processes can open it by its
    URL.

    port: 0: any free one.
    token: the secret that clients must send; None: none.
    claims_from: runners may claim once this is open; None: at once.
    remedy: added to the message of the StoreError that is raised if the address is taken.
    """
    if store.capabilities["zero_copy"]:
        yield store
        return
    server = LightningStoreServer(store, host, port, token=token, claims_from=claims_from, views=metrics(store))
    try:
        await server.start()
    except StoreError as error:
        raise StoreError(f"{error} ({remedy})") from error
    async with server:
        yield server
