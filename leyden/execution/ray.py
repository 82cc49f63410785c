"""`ray`: the algorithm here, runners as actors on a Ray cluster, wherever it has room for them.

Ray starts the actors, on any node, and starts them again when they die. The supervisor ends the attempts of a dead
actor, as it does for the processes of `ipc` and `cs`. `actor.py` runs inside an actor; `ray_cluster.py` joins or starts
the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from leyden._lib.options import check_number, check_port
from leyden.errors import ConfigError
from leyden.execution.actor import THREADS, Actor
from leyden.execution.child import RunnerCommand, RunnerFailure, RunnerMessage, log_levels
from leyden.execution.processes import Ending
from leyden.execution.ray_cluster import Cluster, connected, import_ray, in_words, room_for
from leyden.execution.supervised import Place, SupervisedExecutionStrategy, serve
from leyden.store.base import LightningStore

logger = logging.getLogger(__name__)

_AT_ONCE_SECONDS = 10.0
"""An actor that worked for fewer seconds counts as dead at once (`WorkerSupervisor`). More than for processes, because
Ray reports the death of an actor one or two seconds late."""
_PATIENCE_SECONDS = 10.0
"""Seconds that a runner waits for its place in the cluster before a warning."""


class RayExecutionStrategy(SupervisedExecutionStrategy):
    """Runners as actors on a Ray cluster, which reach the store over HTTP.

    n_runners: the number of runners, and so of actors.
    drain_seconds: how long runners may finish attempts in flight when a run is stopped from outside, before they are
        cancelled.
    address: the cluster's address: `auto`, `host:port` or `ray://host:port`. None takes the cluster that this process
        is connected to already, else that of RAY_ADDRESS, else a new one on this machine, which ends with the run.
    num_cpus, num_gpus: how many CPUs and GPUs each runner occupies. Agents that mostly wait need less than one CPU.
    resources: custom resources of Ray that each runner occupies, by name.
    max_restarts: how often Ray starts a runner again; -1: whenever it dies. A runner that dies at once several times in
        a row ends the run anyhow.
    server_host: the host on which the store is served, an address of this machine that all nodes can reach; None takes
        the address on the route to the cluster.
    server_port: the store server's port; None takes a free one.
    placement_seconds: how long to wait while no runner at all finds a place on the cluster, before the run fails. An
        autoscaler may be adding nodes meanwhile.
    """

    def __init__(
        self,
        n_runners: int = 1,
        *,
        drain_seconds: float = 2.0,
        address: str | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        max_restarts: int = -1,
        server_host: str | None = None,
        server_port: int | None = None,
        placement_seconds: float = 300.0,
    ) -> None:
        super().__init__(n_runners, drain_seconds=drain_seconds)
        self.address, self.max_restarts = address, max_restarts
        self.num_cpus, self.num_gpus, self.resources = num_cpus, num_gpus, dict(resources or {})
        self.server_host, self.server_port, self.placement_seconds = server_host, server_port, placement_seconds
        for name in ("num_cpus", "num_gpus"):
            check_number(name, getattr(self, name), at_least=0)
        if num_gpus > 1 and num_gpus != int(num_gpus):
            raise ConfigError(f"num_gpus is {num_gpus}; above 1 it must be a whole number")
        for name, value in self.resources.items():
            if name in ("CPU", "GPU"):
                raise ConfigError(f"resources has {name!r}; say num_{name.lower()}s={value}")
            check_number(f"resources[{name!r}]", value, above=0)
        check_number("max_restarts", max_restarts, at_least=-1, whole=True)
        check_port("server_port", server_port)
        if server_host in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"server_host is {server_host!r}, which no other node can connect to; give this machine's own address"
            )
        check_number("placement_seconds", placement_seconds, above=0)

    def check(self) -> None:
        """Raise MissingExtra, a ConfigError, if Ray is not installed."""
        import_ray()

    @property
    def need(self) -> dict[str, float]:
        """The resources that each runner occupies, by Ray's names."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}

    @asynccontextmanager
    async def place(self, store: LightningStore) -> AsyncGenerator[Place]:
        """Connect to the cluster, serve the store, and yield a place whose processes are actors. Raise ConfigError if
        the runners have no room on a cluster that was started for the run; any other cluster may grow.
        """
        async with connected(self.address) as cluster:
            if (room := room_for(self.need, cluster.nodes(), self.n_runners)) < self.n_runners:
                wanted = (
                    f"{self.n_runners} runners with {in_words(self.need)} each, and the cluster has room for {room}; "
                    f"{cluster.describe()}"
                )
                if cluster.ours:
                    raise ConfigError(
                        f"wanted: {wanted}. Ask for fewer runners or for less (num_cpus=0.1 is enough for agents that wait), or give the "
                        "address of a larger cluster"
                    )
                logger.warning("wanted: %s. The others wait until nodes are added to it", wanted)
            host, token = self.server_host or cluster.host, secrets.token_urlsafe(32)
            remedy = "strategy 'ray': server_host=..., server_port=..."
            async with serve(store, host, self.server_port or 0, token=token, remedy=remedy) as shared:
                crew = _Crew(cluster, self)

                def launch(worker_id: int, packed: bytes) -> RunnerActor:
                    return RunnerActor(crew, worker_id, packed)

                yield Place(shared, launch, imports_main=False, at_once_seconds=_AT_ONCE_SECONDS)


class _Crew:
    """The actors of a run, one for each worker, and which of them have a place in the cluster."""

    def __init__(self, cluster: Cluster, strategy: RayExecutionStrategy) -> None:
        self.cluster, self.strategy = cluster, strategy
        self.placed: set[int] = set()
        """The workers whose actors have a place in the cluster."""
        self._actors: dict[int, Any] = {}
        self._names: set[str] = set()
        """The names of processes that have worked."""

    def actor(self, worker_id: int, packed: bytes) -> Any:
        """Return the handle of a worker's actor, which is created at the first call. Ray keeps it alive."""
        if worker_id not in self._actors:
            strategy = self.strategy
            make = self.cluster.ray.remote(Actor).options(
                num_cpus=strategy.num_cpus,
                num_gpus=strategy.num_gpus,
                resources=strategy.resources,
                max_restarts=strategy.max_restarts,
                max_concurrency=THREADS,
                scheduling_strategy="SPREAD",
            )
            self._actors[worker_id] = make.remote(worker_id, packed, log_levels())
        return self._actors[worker_id]

    async def fresh_process(self, actor: Any) -> None:
        """Wait until the actor runs, and restart it until its process is one in which no runner has worked, because an
        agent may have left threads or changed modules behind. Raise RayError if Ray no longer restarts the actor.
        """
        while (name := await _result_of(actor.wake.options(max_task_retries=-1).remote())) in self._names:
            with contextlib.suppress(self.died):
                await _result_of(actor.leave.remote())
        self._names.add(name)

    @property
    def died(self) -> type[Exception]:
        return self.cluster.ray.exceptions.RayError


class RunnerActor:
    """One process of a worker's actor, from its start to its end; a `WorkerProcess`."""

    def __init__(self, crew: _Crew, worker_id: int, packed: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.prepared: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ending] = loop.create_future()
        self._crew, self._worker_id = crew, worker_id
        self._actor = crew.actor(worker_id, packed)
        self._since = time.monotonic()
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(self._settle)

    def send(self, command: RunnerCommand) -> None:
        """Send a command. An actor that has no place yet is killed by "stop"."""
        if self._worker_id in self._crew.placed:
            self._actor.obey.remote(command)
        elif command == "stop":
            self.kill()  # it has no work yet

    def terminate(self) -> None:
        """Cancel the worker's task, so that it reports its end. An actor that has no place yet is killed."""
        if self._worker_id in self._crew.placed:
            self._actor.cancel.remote()
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the actor and publish its end. Ray does not start it again."""
        with contextlib.suppress(ConnectionError):  # the cluster ends the actors of a client that is gone
            self._crew.cluster.ray.kill(self._actor)
        self._life.cancel()
        self._end("was ended", finished=True)

    async def _live(self) -> None:
        """Place the actor, run its work, and publish how it ended. The end is final if Ray will not restart it."""
        try:
            await self._find_place()
        except self._crew.died as error:
            restarts = self._crew.strategy.max_restarts
            self._end(f"is not restarted by Ray (max_restarts={restarts}): {_main_sentence(error)}", final=True)
            return
        except TimeoutError as error:
            self._end(str(error), final=True)
            return
        self._crew.placed.add(self._worker_id)
        self._since = time.monotonic()
        try:
            running = _result_of(self._actor.run.remote())
            with contextlib.suppress(self._crew.died):  # `running` raises it too
                if await _result_of(self._actor.wait_prepared.remote()) and not self.prepared.done():
                    self._since = time.monotonic()
                    self.prepared.set_result(None)
            last_message: RunnerMessage | None = await running
            if last_message == "finished":
                self._crew.cluster.ray.kill(self._actor)
                self._end("has ended", finished=True)
            elif isinstance(last_message, RunnerFailure):
                self._end("failed", failure=last_message)
            else:
                self._end("was cancelled")
        except self._crew.died as error:
            self._end(f"was lost: {_main_sentence(error)}")

    async def _find_place(self) -> None:
        """Wait until the actor has a place in the cluster, and log a warning after some seconds. Raise TimeoutError if
        no actor of the crew has a place after `placement_seconds`.
        """
        strategy, cluster = self._crew.strategy, self._crew.cluster
        finding = asyncio.ensure_future(self._crew.fresh_process(self._actor))
        try:
            patience = min(_PATIENCE_SECONDS, strategy.placement_seconds)
            if await _within(patience, finding):
                return await finding
            need = f"each runner needs {in_words(strategy.need)}; {cluster.describe()}"
            logger.warning("runner %d waits for a place on the Ray cluster: %s", self._worker_id, need)
            if not await _within(strategy.placement_seconds - patience, finding) and not self._crew.placed:
                raise TimeoutError(f"found no place on the Ray cluster in {strategy.placement_seconds:g} s: {need}")
            await finding
        finally:
            finding.cancel()

    def _settle(self, life: asyncio.Task[None]) -> None:
        """Record the end of the process if Ray raises, so that no caller waits in vain. `ray://` loses its connection
        with a ConnectionError.
        """
        if not life.cancelled() and (error := life.exception()):
            self._end(f"is out of reach: {type(error).__name__}: {error}", final=True)

    def _end(
        self, how: str, *, finished: bool = False, failure: RunnerFailure | None = None, final: bool = False
    ) -> None:
        self._crew.placed.discard(self._worker_id)
        if not self.ended.done():
            worked_seconds = time.monotonic() - self._since
            self.ended.set_result(Ending(how, self.prepared.done(), finished, failure, worked_seconds, final=final))


def _result_of(ref: Any) -> asyncio.Future[Any]:
    """Return a future of an actor's call. The future may be left unread."""
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda future: future.cancelled() or future.exception())
    return future


def _main_sentence(error: Exception) -> str:
    """Return the sentence of Ray's message that describes the event, without the causes that Ray guesses."""
    *before, last_line = str(error).strip().splitlines()
    if before and "never ran" in last_line:
        last_line = f"{before[-1].strip()} {last_line}"
    return last_line.split(" Some common causes")[0].split(" The task may or may not")[0]


async def _within(seconds: float, work: asyncio.Future[Any]) -> bool:
    await asyncio.wait({work}, timeout=max(0.0, seconds))
    return work.done()
