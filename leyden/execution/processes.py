"""Start runners in processes, watch them, and start them again when they die.

`RunnerProcess` is one process on this machine. `WorkerSupervisor` keeps one process alive for each worker, on this
machine or elsewhere (`WorkerProcess`). They know neither stores nor agents: a child is given bytes, and the caller's
`on_loss` ends the attempts of a dead worker. The end of a process is notified by an event, not polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from leyden._lib.aio import Latch
from leyden._lib.host.child import GUARD_MISSING, Backoff, Child, StartMethod, describe_exit, missing_guard
from leyden.errors import RunnerDied, StoreError
from leyden.execution.child import (
    Alive,
    Begin,
    ChildEnvironment,
    Culprit,
    RunnerCommand,
    RunnerFailure,
    RunnerMessage,
    run_child,
)
from leyden.execution.liveness import LivenessProbe

logger = logging.getLogger(__name__)

_AT_ONCE_SECONDS = 1.0
"""A process that worked for less than this time counts as dead at once."""
_CANCEL_SECONDS = 1.0
"""The seconds that cancelled processes may take to end. Then they are killed."""
_LEAVE_SECONDS = 5.0
"""The seconds that a process may take to end after it reported that its work is over. Then it is killed."""
_SUSPENDED_SECONDS = 10.0
"""The seconds that a process may be suspended after the command to stop. Then it is killed."""
_CHECK_SECONDS = 1.0
"""Seconds between two checks whether a process is suspended."""
_DEATHS_IN_A_ROW = 5
"""A worker that dies at once this many times in a row ends the run."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a runner's process."""

    how: str
    """A verb phrase: `ended with exit code 3`."""
    prepared: bool
    """Whether the process had reported that it can begin."""
    finished: bool
    """Whether the process had finished all its work."""
    failure: RunnerFailure | None
    """The error that the process reported; None if it reported none."""
    worked_seconds: float
    """Seconds since the process was prepared; since its start if it never was."""
    exit_code: int | None = None
    """Negative: the signal that killed it. None: unknown."""
    final: bool = False
    """Whether the process cannot be started again."""
    culprit: str | None = None
    """The id of the attempt that ended the process; None if unknown."""

    def __str__(self) -> str:
        return f"{self.how}; its own traceback:\n{self.failure.traceback}" if self.failure else self.how

    @property
    def headline(self) -> str:
        """How the process ended and why, in one line."""
        return f"{self.how}: {self.failure.headline}" if self.failure else self.how


class WorkerProcess(Protocol):
    """A worker's process as its supervisor sees it. Call its methods only in the event loop in which it was created."""

    prepared: asyncio.Future[None]
    """A future that is done when the process can begin its work."""
    ended: asyncio.Future[Ending]
    """A future that is done when the process has ended."""

    def send(self, command: RunnerCommand) -> None:
        """Send a command. Do nothing if the process has ended."""
        ...

    def terminate(self) -> None:
        """Request that the process cancels its work and ends."""
        ...

    def kill(self) -> None:
        """Kill the process and all processes that agents started in it."""
        ...


class RunnerProcess:
    """One process on this machine, from its start to its end. Implements `WorkerProcess`."""

    def __init__(
        self,
        start_method: StartMethod,
        worker_id: int,
        packed: bytes,
        environment: ChildEnvironment,
        *,
        name: str,
        daemon: bool,
        lock_seconds: float | None,
    ) -> None:
        """Start the process.

        packed: a pickled `Payload`.
        name: the process's name in the system's lists.
        daemon: whether it is a daemonic process of `multiprocessing`.
        lock_seconds: how long a call may hold Python's lock before the process is killed;
        None: for ever.
        """
        self._loop = asyncio.get_running_loop()
        self._prepared_at = time.monotonic()
        self._finished, self._failure = False, None
        self._culprit: str | None = None
        self._lock_seconds = lock_seconds
        self._probe: LivenessProbe | None = None
        self.prepared: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        args = (worker_id, packed, environment)
        self._child = Child(run_child, args, name=name, start_method=start_method, daemon=daemon)
        self.pid = self._child.pid
        self._child.attend(self._take).add_done_callback(self._end)

    def send(self, command: RunnerCommand) -> None:
        """Send a command. Do nothing if the process has ended. A process that is suspended and so cannot obey "stop" is
        killed after some seconds.
        """
        self._child.send(command)
        if command == "stop":
            self._kill_if_suspended()

    def _kill_if_suspended(self, seconds: float = 0.0) -> None:
        """Check each second whether the process is suspended, until it has ended. Kill it if it stays suspended. Checks
        are counted, because this process may be suspended too.
        """
        if self.ended.done():
            return
        if not _is_suspended(self.pid):
            seconds = 0.0
        elif seconds >= _SUSPENDED_SECONDS:
            headline = f"it was suspended (SIGSTOP) for {seconds:g} s while it should end"
            self._failure = RunnerFailure(headline, headline, culprit_may_be_over=True)
            self.kill()
            return
        self._loop.call_later(_CHECK_SECONDS, self._kill_if_suspended, seconds + _CHECK_SECONDS)

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        if not self.ended.done():  # else the group has been ended, and its id may belong to another one by now
            self._child.kill()
            _end_group(self.pid)

    def _take(self, message: RunnerMessage) -> None:
        """Handle one message of the process. A process that reports its end is killed if it runs on for seconds."""
        if isinstance(message, Alive):
            self._take_reply(message)
        elif isinstance(message, Culprit):
            self._culprit = message.attempt_id
        elif isinstance(message, RunnerFailure):
            self._failure = message
            self._loop.call_later(_LEAVE_SECONDS, self.kill)
        elif message == "finished":
            self._finished = True
            self._loop.call_later(_LEAVE_SECONDS, self.kill)
        elif not self.prepared.done():
            self._prepared_at = time.monotonic()
            self.prepared.set_result(None)

    def _take_reply(self, alive: Alive) -> None:
        """Start the liveness probe at the first reply, if there is a limit. Pass the reply on."""

        def give_up(headline: str, stacks: str) -> None:
            self._failure = RunnerFailure(headline, f"{stacks}{headline}", culprit_may_be_over=True)
            self.kill()

        if self._probe is None and self._lock_seconds is not None:
            self._probe = LivenessProbe(
                self.pid,
                self._lock_seconds,
                ping=lambda: self.send("ping"),
                receive=self._child.deliver,
                on_silence=give_up,
            )
        if self._probe is not None:
            self._probe.take_reply(alive)

    def _end(self, exit_code: asyncio.Future[int]) -> None:
        """End the rest of the process group, and publish how the process ended."""
        if self._probe is not None:
            self._probe.close()
        _end_group(self.pid)
        code = exit_code.result()
        self.ended.set_result(
            Ending(
                describe_exit(code),
                self.prepared.done(),
                self._finished,
                self._failure,
                time.monotonic() - self._prepared_at,
                code,
                culprit=self._culprit,
            )
        )


class WorkerSupervisor:
    """Keeps a process alive for each worker until `stop` is open.

    Creating it, in a running event loop, starts the processes. Implements `Runners` (`together.py`).

    n_runners: the number of workers.
    launch: starts the process of a worker, by its id.
    ready: workers begin when it is open.
    stop: opened by the caller when the algorithm is done, or here when a worker is lost for good.
    on_loss: called when a worker's process died, with the worker's id, how the process died, and how many attempts it
        could have in flight at first (None: any number). Returns how many attempts are suspected of having ended the
        process; 0 if the culprit is known or no attempt was in flight.
    on_return: called before the worker's next process begins, with the worker's id, because a claim that the dead
        process had sent may have arrived after `on_loss`.
    at_once_seconds: a process that worked for less time counts as dead at once. The time until its end is noticed is
        included.
    """

    def __init__(
        self,
        n_runners: int,
        launch: Callable[[int], WorkerProcess],
        *,
        ready: Latch,
        stop: Latch,
        on_loss: Callable[[int, Ending, int | None], Awaitable[int]],
        on_return: Callable[[int], Awaitable[None]],
        at_once_seconds: float = _AT_ONCE_SECONDS,
    ) -> None:
        def stop_all(stopped: asyncio.Future[None]) -> None:
            for process in self._processes.values():
                if not process.ended.done():
                    process.send("stop")

        self._launch, self._ready, self._stop = launch, ready, stop
        self._at_once_seconds = at_once_seconds
        self._on_loss, self._on_return = on_loss, on_return
        self._processes: dict[int, WorkerProcess] = {}
        self._cancelled = False
        """Whether shutdown has begun, so that the end of a process is expected."""
        self._stopped = asyncio.ensure_future(stop.wait_async())
        self._stopped.add_done_callback(stop_all)
        self._work = asyncio.create_task(self._keep_all(n_runners))

    async def wait(self) -> None:
        """Return when all processes have ended. Raise the error if a worker died and a restart would not cure that."""
        await asyncio.shield(self._work)

    def cancel(self) -> None:
        """Cancel the work of every process."""
        self._cancelled = True
        for process in self._processes.values():
            process.terminate()

    def abandon(self) -> None:
        """Kill every process."""
        self._cancelled = True
        for process in self._processes.values():
            process.kill()

    async def _keep_all(self, n_runners: int) -> None:
        """Keep every worker alive until the stop, or until one is lost for good, which ends the others."""
        tasks = [asyncio.create_task(self._keep(worker_id)) for worker_id in range(n_runners)]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stop.set()
            self.cancel()
            _, late = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            if late:
                self.abandon()
                await asyncio.wait(late)
            self._stopped.cancel()

    async def _keep(self, worker_id: int) -> None:
        """Run one worker's process, and start the next one when it dies. If several attempts were in flight and one of
        them is to blame, the next process begins with half as many, and so on until the culprit is alone.
        """
        again, backoff = False, Backoff(max_seconds=float("inf"), quick_seconds=self._at_once_seconds)
        at_most: int | None = None
        while True:
            process = self._processes[worker_id] = self._launch(worker_id)
            if self._stop.is_set():
                process.send("stop")
            ending = await self._examine(process, worker_id, Begin(at_most), again=again)
            if ending.finished or self._cancelled:
                return
            again = True
            suspects = await self._on_loss(worker_id, ending, at_most)
            if self._stop.is_set():
                logger.warning("the process of runner %d %s", worker_id, ending)
                return
            if suspects:
                at_most = max(1, suspects // 2)
            pause = backoff.pause_after(ending.worked_seconds, excused=bool(suspects))
            _check_worth_another(worker_id, ending, backoff.quick_deaths, self._at_once_seconds)
            logger.warning("the process of runner %d %s; starting another in %.1f s", worker_id, ending, pause)
            await asyncio.wait({self._stopped}, timeout=pause)
            if self._stop.is_set():
                return

    async def _examine(self, process: WorkerProcess, worker_id: int, begin: Begin, *, again: bool) -> Ending:
        """Let a process begin once it and the algorithm are ready, and wait for its end.

        again: whether the worker had a process before, whose late claims are to be released.
        """
        if not await _first(process.prepared, unless=process.ended):
            return process.ended.result()
        if again:
            await self._on_return(worker_id)
        if await _first(asyncio.ensure_future(self._ready.wait_async()), unless=process.ended):
            process.send(begin)
        return await process.ended


async def _first(wanted: asyncio.Future[None], *, unless: asyncio.Future[Any]) -> bool:
    await asyncio.wait({wanted, unless}, return_when=asyncio.FIRST_COMPLETED)
    if not unless.done():
        return True
    wanted.cancel()
    return False


def _check_worth_another(worker_id: int, ending: Ending, deaths_at_once: int, at_once_seconds: float) -> None:
    """Raise RunnerDied or StoreError if another process would end in the same way.

    deaths_at_once: how many times in a row the worker's process died within `at_once_seconds`.
    """
    if ending.exit_code == GUARD_MISSING and not ending.prepared:
        raise missing_guard("use strategy='shm'")
    if ending.failure is not None and ending.failure.of_the_store:
        raise StoreError(f"the process of runner {worker_id} {ending}")
    if ending.final:
        raise RunnerDied(f"the process of runner {worker_id} {ending}")
    if not ending.prepared and (ending.failure is not None or (ending.exit_code or 0) > 0):
        where = "" if ending.failure else "; what it wrote to standard error says why: it imports the main script first"
        raise RunnerDied(f"the process of runner {worker_id} could not start: it {ending}{where}")
    if deaths_at_once >= _DEATHS_IN_A_ROW:
        raise RunnerDied(
            f"the process of runner {worker_id} died {deaths_at_once} times in a row, each time within {at_once_seconds:g} s of its "
            f"beginning: it {ending}"
        )


def _is_suspended(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _end_group(pid: int) -> None:
    """Kill the process group of a runner, which the processes that its agents started belong to.

    pid: of the runner, and so the group's id.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:  # 0 would be this process's own group
            os.killpg(pid, signal.SIGKILL)
