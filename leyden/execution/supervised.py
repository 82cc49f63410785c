"""The base of `ipc`, `cs` and `ray`: an algorithm in this process, and runners in watched
processes.

It packs the runners' payload and settles a dead runner's attempts. Each strategy says where the
processes run and how they reach the store: see `runners`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from leyden.errors import StoreError
from leyden.execution.base import AlgorithmBundle, ExecutionStrategy, PortableRunnerBundle, RunnerBundle
from leyden.execution.events import StopSignal
from leyden.execution.payload import Payload, pack
from leyden.execution.processes import Ending, WorkerProcess, WorkerSupervisor
from leyden.execution.together import run_together
from leyden.execution.worker_deaths import end_attempts
from leyden.monitor.prometheus import metrics
from leyden.options import check_number
from leyden.store.base import LightningStore
from leyden.store.server import LightningStoreServer
from leyden.utils.latch import Latch


@dataclass(frozen=True, slots=True)
class Place:
    """A way of starting the runners of a run: with which store, and how a process is launched."""

    store: Any
    """The store that runners get: the store itself, or a server of it."""
    launch: Callable[[int, bytes], WorkerProcess]
    """Starts the process of a worker with its Payload."""
    imports_main: bool = True
    """Whether the runners can import this process's main script."""
    at_once_seconds: float = 1.0
    """See `WorkerSupervisor`."""
    end_family: Callable[[int], None] = lambda _: None
    """Ends the processes that a dead worker's agents left behind, if they can be found."""


class SupervisedExecutionStrategy(ExecutionStrategy):
    """Each runner in a process of its own, started again when it dies.

    n_runners: processes.
    drain_seconds: how long runners may finish what is under way when a run is stopped from outside,
        before they are cancelled.
    """

    def __init__(self, n_runners: int = 1, *, drain_seconds: float = 2.0) -> None:
        check_number("n_runners", n_runners, at_least=1, whole=True)
        check_number("drain_seconds", drain_seconds, at_least=0)
        self.n_runners, self.drain_seconds = n_runners, drain_seconds

    @abstractmethod
    def place(self, store: LightningStore) -> AbstractAsyncContextManager[Place]:
        """Prepare the runners' place and their connection to the store; undo both on leaving."""

    async def execute(
        self, algorithm: AlgorithmBundle, runner: RunnerBundle, store: LightningStore, *, ready: Latch | None = None
    ) -> None:
        """See ExecutionStrategy.execute.

        Raise ConfigError, naming a need of the runners that no other process can be given.
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
                supervisor.abandon()  # of what is left when this was cancelled twice

    def _supervisor(
        self, bundle: PortableRunnerBundle, store: LightningStore, place: Place, ready: Latch, stop: Latch
    ) -> WorkerSupervisor:
        """Return the supervisor of the runners' processes at a place.

        When a process is lost, its attempts end. Which of them is to blame is known if it ran
        alone, or if the process named the culprit. A runner that returns gives its claims back.
        """
        packed = pack(Payload(bundle, place.store), imports_main=place.imports_main)

        async def on_loss(worker_id: int, ending: Ending, at_most: int | None) -> int:
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
    """Serve the store over HTTP, with metrics; yield the store itself if processes share it
    already.

    claims_from: see LightningStoreServer.
    remedy: goes into the StoreError that is raised if the address is taken.
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
