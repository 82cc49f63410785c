"""Runners in processes: started, watched, started again when they die, ended without a trace.

`RunnerProcess` is one process on this machine; `Supervisor` keeps one alive for each worker, here or elsewhere (`WorkerProcess`). They know
nothing of stores and agents: what a child is given is bytes, and whoever is told of a loss (`on_loss`) knows what was lost. Ends are heard
of by sentinel; nothing is polled.
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
from multiprocessing.connection import Connection
from multiprocessing.context import DefaultContext, ForkContext, ForkServerContext, SpawnContext
from typing import Any, Protocol, cast

from leyden.errors import ConfigError, RunnerDied, StoreError
from leyden.execution.child import Alive, Begin, Culprit, Failure, Order, Surroundings, Word, run_child
from leyden.execution.signs_of_life import SignsOfLife
from leyden.utils.latch import Latch

logger = logging.getLogger(__name__)

Context = DefaultContext | ForkContext | ForkServerContext | SpawnContext

GUARD_MISSING = 78
"""The exit code of a child in which the main script begins a run of its own: nothing keeps it from doing so when it is imported."""
_AT_ONCE_SECONDS = 1.0
"""A process that has worked for less time died at once."""
_CANCEL_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
"""How long a process may take to end after it reported that its work is over. Then it is killed."""
_DEATHS_IN_A_ROW = 5
_FIRST_PAUSE_SECONDS = 0.1
"""Before a runner is started again; twice as long after each death at once."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    how: str
    """In words that go on a sentence: `ended with exit code 3`."""
    prepared: bool
    finished: bool
    """It had done all its work."""
    failure: Failure | None
    worked_seconds: float
    exit_code: int | None = None
    """Negative: the signal that ended it. None: nobody knows it."""
    final: bool = False
    """There cannot be another one."""
    culprit: str | None = None
    """The attempt that ended the process; None if unknown."""

    def __str__(self) -> str:
        return f"{self.how}; its own traceback:\n{self.failure.traceback}" if self.failure else self.how

    @property
    def headline(self) -> str:
        """The same in one line."""
        return f"{self.how}: {self.failure.headline}" if self.failure else self.how


class WorkerProcess(Protocol):
    """A worker's process as its supervisor sees it. All methods are of the event loop that made it."""

    prepared: asyncio.Future[None]
    """Done when it can begin."""
    ended: asyncio.Future[Ending]

    def send(self, order: Order) -> None:
        """Give it an order; it may have ended."""
        ...

    def terminate(self) -> None:
        """Cancel what it does."""
        ...

    def kill(self) -> None:
        """End it and all that agents started in it."""
        ...


class RunnerProcess:
    """One process, from its start to its end. All methods are of the event loop that made it."""

    def __init__(
        self,
        context: Context,
        worker_id: int,
        packed: bytes,
        surroundings: Surroundings,
        *,
        name: str,
        daemon: bool,
        lock_seconds: float | None,
    ) -> None:
        """lock_seconds: how long a call may hold Python's lock; see ProcessExecutionStrategy."""
        self._loop = asyncio.get_running_loop()
        self._started = self._prepared_at = time.monotonic()
        self._finished, self._failure = False, None
        self._culprit: str | None = None
        self.prepared: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        ours, theirs = cast("tuple[Connection[Order, Word], Connection[Word, Order]]", context.Pipe())
        self._connection = ours
        inherited = (ours,) if context.get_start_method() == "fork" else ()
        self._process = context.Process(
            target=run_child,
            args=(theirs, os.getpid(), worker_id, packed, surroundings, inherited),
            name=name,
            daemon=daemon,
        )
        try:
            self._process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid or 0
        self._lock_seconds = lock_seconds
        self._signs: SignsOfLife | None = None
        self._loop.add_reader(ours.fileno(), self._hear)
        self._loop.add_reader(self._process.sentinel, self._end)

    def send(self, order: Order) -> None:
        """Give it an order; it may have ended."""
        with contextlib.suppress(OSError):
            self._connection.send(order)

    def terminate(self) -> None:
        """Cancel what it does."""
        if not self.ended.done():
            self._process.terminate()

    def kill(self) -> None:
        """End it and all that agents started in it."""
        if not self.ended.done():  # else the group has been ended, and its number may be another's
            self._process.kill()
            _end_group(self.pid)

    def _hear(self) -> bool:
        """Take in one word; False when there are no more."""
        try:
            word: Word = self._connection.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._connection.fileno())
            return False
        if isinstance(word, Alive):
            self._take_answer(word)
        elif isinstance(word, Culprit):
            self._culprit = word.attempt_id
        elif isinstance(word, Failure):
            self._failure = word
            self._loop.call_later(_LEAVE_SECONDS, self.kill)
        elif word == "finished":
            self._finished = True
            self._loop.call_later(_LEAVE_SECONDS, self.kill)
        elif not self.prepared.done():
            self._prepared_at = time.monotonic()
            self.prepared.set_result(None)
        return True

    def _take_answer(self, alive: Alive) -> None:
        if self._signs is None and self._lock_seconds is not None:
            self._signs = SignsOfLife(
                self.pid,
                self._lock_seconds,
                ask=lambda: self.send("ask"),
                hear=self._hear_all,
                on_silence=self._give_up,
            )
        if self._signs is not None:
            self._signs.answer(alive)

    def _give_up(self, headline: str, stacks: str) -> None:
        self._failure = Failure(headline, f"{stacks}{headline}", of_the_store=False, culprit_may_be_over=True)
        self.kill()

    def _hear_all(self) -> None:
        while self._connection.poll() and self._hear():
            pass

    def _end(self) -> None:
        if self._signs is not None:
            self._signs.close()
        self._loop.remove_reader(self._process.sentinel)
        self._loop.remove_reader(self._connection.fileno())
        self._hear_all()
        self._connection.close()
        self._process.join()
        exit_code = self._process.exitcode or 0
        self._process.close()
        _end_group(self.pid)
        prepared = self.prepared.done()
        worked_seconds = time.monotonic() - self._prepared_at
        self.ended.set_result(
            Ending(
                _how(exit_code),
                prepared,
                self._finished,
                self._failure,
                worked_seconds,
                exit_code,
                culprit=self._culprit,
            )
        )


class Supervisor:
    """Keep a process alive for each worker until `stop` is open. Implements `Runners`
    (`together.py`).

    launch: starts the process of a worker.
    ready: workers begin when it is open.
    on_loss: called when a worker's process died, with the worker, how it died, and how many
        attempts it could have in flight (None: any number). Returns the number of attempts one of
        which is to blame; 0 if the culprit is known or none was in flight.
    on_return: called again before the worker's next process begins, because a claim of the dead
        process may have arrived meanwhile.
    at_once_seconds: a process that worked for less time counts as dead at once. The time until its
        end is noticed is included.
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
        self._launch, self._ready, self._stop = launch, ready, stop
        self._at_once_seconds = at_once_seconds
        self._on_loss, self._on_return = on_loss, on_return
        self._processes: dict[int, WorkerProcess] = {}
        self._cancelled = False
        """What ends now was ended by us, and is let go by whoever stopped the run."""
        self._stopped = asyncio.ensure_future(stop.wait_async())
        self._stopped.add_done_callback(lambda _: self._tell_all())
        self._work = asyncio.create_task(self._keep_all(n_runners))

    async def wait(self) -> None:
        """Return when all have ended; raise what cannot be mended by another start."""
        await asyncio.shield(self._work)

    def cancel(self) -> None:
        """Cancel what runs in every process."""
        self._cancelled = True
        for process in self._processes.values():
            process.terminate()

    def abandon(self) -> None:
        """End every process now."""
        self._cancelled = True
        for process in self._processes.values():
            process.kill()

    async def _keep_all(self, n_runners: int) -> None:
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
        """Run one worker's process, and start the next one when it dies.

        When several attempts were in flight and one of them is to blame, the next process begins with half as many, and so on until
        the culprit is alone.
        """
        again, deaths_at_once = False, 0
        at_most: int | None = None
        while True:
            process = self._processes[worker_id] = self._launch(worker_id)
            if self._stop.is_set():
                process.send("stop")
            ending = await self._see_through(process, worker_id, Begin(at_most), again=again)
            if ending.finished or self._cancelled:
                return
            again = True
            suspects = await self._on_loss(worker_id, ending, at_most)
            if self._stop.is_set():
                logger.warning("the process of runner %d %s", worker_id, ending)
                return
            if suspects:
                at_most = max(1, suspects // 2)
            elif ending.worked_seconds < self._at_once_seconds:
                deaths_at_once += 1
            else:
                deaths_at_once = 0
            _check_worth_another(worker_id, ending, deaths_at_once, self._at_once_seconds)
            pause = _FIRST_PAUSE_SECONDS * 2 ** max(0, deaths_at_once - 1)
            logger.warning("the process of runner %d %s; starting another in %.1f s", worker_id, ending, pause)
            await asyncio.wait({self._stopped}, timeout=pause)
            if self._stop.is_set():
                return

    async def _see_through(self, process: WorkerProcess, worker_id: int, begin: Begin, *, again: bool) -> Ending:
        if not await _first(process.prepared, unless=process.ended):
            return process.ended.result()
        if again:
            await self._on_return(worker_id)
        if await _first(asyncio.ensure_future(self._ready.wait_async()), unless=process.ended):
            process.send(begin)
        return await process.ended

    def _tell_all(self) -> None:
        for process in self._processes.values():
            if not process.ended.done():
                process.send("stop")


async def _first(wanted: asyncio.Future[None], *, unless: asyncio.Future[Any]) -> bool:
    """Whether `wanted` came before the other; waits for either."""
    await asyncio.wait({wanted, unless}, return_when=asyncio.FIRST_COMPLETED)
    if not unless.done():
        return True
    wanted.cancel()
    return False


def _check_worth_another(worker_id: int, ending: Ending, deaths_at_once: int, at_once_seconds: float) -> None:
    """Raises what a further start would not mend."""
    if ending.exit_code == GUARD_MISSING and not ending.prepared:
        raise ConfigError(
            "the script that started this run starts it again when a runner's process imports it: put the part that runs under "
            "`if __name__ == '__main__':`, or use strategy='shm'"
        )
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


def _how(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _end_group(pid: int) -> None:
    """What agents started belongs to the group of the process that they ran in."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:
            os.killpg(pid, signal.SIGKILL)
