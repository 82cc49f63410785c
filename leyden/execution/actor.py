"""An actor of a Ray cluster: one worker, from its start to its end.

Ray creates the actor, and recreates it when its process dies. The strategy (`ray.py`) calls the methods, each in a
thread of the actor. This module does not import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import signal
import threading
from collections.abc import Callable, Mapping

from leyden._lib.aio import Latch
from leyden._lib.event_loops import run_on_own_loop
from leyden._lib.logs import setup_child_logging
from leyden.execution.child import Begin, RunnerCommand, RunnerFailure, RunnerMessage, set_log_levels, work

THREADS = 4
"""The number of concurrent calls: `run`, `wait_prepared`, a command, and a spare one."""


class Actor:
    """One worker in its own process. Creating it runs no user code. Implements `Link`.

    No method is a coroutine, because Ray would call them all on one event loop, which agents could block.
    """

    def __init__(self, worker_id: int, packed: bytes, log_levels: Mapping[str, int]) -> None:
        self.begin, self.stop = Latch(), Latch()
        self.at_most: int | None = None
        self._name = secrets.token_hex(8)
        """The name of this process, which no other process of the worker has."""
        self._worker_id, self._packed, self._log_levels = worker_id, packed, log_levels
        self._settled = Latch()
        """Open when the worker is prepared, or has failed before."""
        self._prepared, self._finished = False, False
        self._cancel: Callable[[], object] = lambda: None
        threading.Thread(target=self._leave_with_its_node, name="leyden-node", daemon=True).start()

    def wake(self) -> str:
        """Return the name of this process, so that the caller recognises a process that has worked before."""
        return self._name

    def run(self) -> RunnerMessage | None:
        """Do the worker's work. Return "finished", the failure, or None if the work was cancelled."""

        async def cancellable_work() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            await work(self, self._worker_id, self._packed)

        setup_child_logging()
        set_log_levels(self._log_levels)
        try:
            run_on_own_loop(cancellable_work())
        except asyncio.CancelledError:
            return None
        except BaseException as error:  # noqa: BLE001 -- the strategy reports it
            return RunnerFailure.of(error)
        finally:
            self._settled.set()
        return "finished" if self._finished else None

    def wait_prepared(self) -> bool:
        """Wait until the worker can begin. Return False if it ended before it could."""
        self._settled.wait()
        return self._prepared

    def obey(self, command: RunnerCommand) -> None:
        """Carry out a command of the supervisor. Ray needs no "ping", so any but `Begin` is "stop"."""
        if isinstance(command, Begin):
            self.at_most = command.at_most
        else:
            self.stop.set()
        self.begin.set()

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._cancel()

    def leave(self) -> None:
        """End this process and the processes that agents started in it. Ray starts another one."""
        if os.getpgid(0) == os.getpid():  # else the group is not this process's own
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def _leave_with_its_node(self) -> None:
        """Wait until the node's own process ends, which started this one, and end this process, too. Ray itself lets
        the actors of a dead node run on for a while.
        """
        try:
            node = os.pidfd_open(os.getppid())
        except (AttributeError, OSError):  # not Linux; or the node has gone already, and Ray ends this process too
            return
        select.select([node], [], [])
        self.leave()

    def send(self, message: RunnerMessage) -> None:
        """Record that the worker is prepared, or has finished."""
        if message == "finished":
            self._finished = True
        elif message == "prepared":
            self._prepared = True
            self._settled.set()
