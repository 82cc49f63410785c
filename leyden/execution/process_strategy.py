"""Runners in processes on this machine: `ipc`, which needs no port, and the base that it shares with `cs`.

The base starts the processes and hands them their payload. Each strategy says how they reach the store.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing import forkserver
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from leyden._lib.host.child import StartMethod, exit_if_starting, known_start_method, preload, require_importable_main
from leyden._lib.host.limits import CUDA_DEVICES, ResourceLimits, check_cpus, share_out_gpus
from leyden._lib.host.orphans import RUNNER_MARK, kill_marked
from leyden._lib.options import check_flag, check_number
from leyden.errors import ConfigError
from leyden.execution.child import ChildEnvironment, log_levels
from leyden.execution.processes import RunnerProcess
from leyden.execution.supervised import Place, SupervisedExecutionStrategy
from leyden.monitor.prometheus import metrics
from leyden.store.base import LightningStore
from leyden.store.server import LightningStoreServer

_NAME = "leyden-runner-{}"
_PRELOADED = ["leyden.execution.child", "leyden.execution.runner", "leyden.store.client"]
"""Modules that every child needs, loaded once in the forkserver."""


class ProcessExecutionStrategy(SupervisedExecutionStrategy):
    """Each runner in its own process on this machine.

    n_runners: the number of runners, and so of processes.
    drain_seconds: how long runners may finish attempts in flight when a run is stopped from outside, before they are
        cancelled.
    start_method: how processes start: "forkserver", "spawn" or "fork". None: `forkserver` if available, else `spawn`.
        With `fork` they inherit all that this process has loaded, and the locks that its other threads hold.
    daemon: whether the processes are daemonic, so that their agents cannot use `multiprocessing`. No process outlives
        this one either way.
    cpu_affinity: the CPUs of each runner, one list for each; None: any.
    gpus_per_runner: how many GPUs each runner sees, different ones for each runner; None: all runners see all GPUs.
    memory_bytes: how much memory each runner's process, and each process that its agents start, may allocate
        (RLIMIT_DATA): beyond it an agent gets a MemoryError, or its runner ends and is started again. None: no limit.
    lock_seconds: how long a call in a runner's process may hold Python's lock (the GIL), so that no other thread there
        runs, before the process is killed and started again. Time in which the process is stopped or gets no CPU does
        not count. None: for ever. Works on Linux only.
    """

    def __init__(
        self,
        n_runners: int = 1,
        *,
        drain_seconds: float = 2.0,
        start_method: StartMethod | None = None,
        daemon: bool = False,
        cpu_affinity: Sequence[Sequence[int]] | None = None,
        gpus_per_runner: int | None = None,
        memory_bytes: int | None = None,
        lock_seconds: float | None = 30.0,
    ) -> None:
        super().__init__(n_runners, drain_seconds=drain_seconds)
        check_flag("daemon", daemon)
        check_number("memory_bytes", memory_bytes, at_least=1, at_most=sys.maxsize, whole=True, or_none="no limit")
        check_number("lock_seconds", lock_seconds, above=0, or_none="for ever")
        self.daemon, self.lock_seconds = daemon, lock_seconds
        self.start_method: StartMethod = known_start_method(start_method)
        check_cpus(cpu_affinity, n_runners)
        self.cpu_affinity = cpu_affinity
        self._gpus = share_out_gpus(gpus_per_runner, n_runners)
        self.memory_bytes = memory_bytes
        self._mark = secrets.token_hex(8)
        """The mark of the processes that agents start, by which they are found in any process group."""
        self.left_behind: Sequence[Path] = ()
        """Files, then folders, that runners remove if this process is killed and cannot do so."""

    def check(self) -> None:
        """Raise ConfigError if this process cannot start runners' processes: it is itself starting as a child, or has a
        main script that children cannot import.

        Starts the forkserver, because that is safest before this process has threads.
        """
        exit_if_starting(_NAME.format(""))
        # A child that Leyden did not start, which imports the main script:
        if getattr(current_process(), "_inheriting", False):
            raise ConfigError(
                "a run cannot start while a new process imports the main script: put the part that runs under "
                "`if __name__ == '__main__':`"
            )
        require_importable_main(self.start_method, remedy="use strategy='shm'")
        if self.start_method == "forkserver":
            preload(_PRELOADED)
            forkserver.ensure_running()

    @abstractmethod
    def share(self, store: LightningStore) -> AbstractAsyncContextManager[Any]:
        """Return a context of the store that runners get: the store itself, or a server of it."""

    @asynccontextmanager
    async def place(self, store: LightningStore) -> AsyncGenerator[Place]:
        """Yield a place that starts processes on this machine. At the end, kill those that agents left behind."""

        def launch(worker_id: int, packed: bytes) -> RunnerProcess:
            return RunnerProcess(
                self.start_method,
                worker_id,
                packed,
                self._environment(worker_id),
                name=_NAME.format(worker_id),
                daemon=self.daemon,
                lock_seconds=self.lock_seconds,
            )

        async with self.share(store) as shared:
            try:
                yield Place(
                    shared, launch, end_family=lambda worker_id: kill_marked(RUNNER_MARK, self._mark_of(worker_id))
                )
            finally:
                kill_marked(RUNNER_MARK, self._mark, all_below=True)

    def _environment(self, worker_id: int) -> ChildEnvironment:
        """Return the environment of a runner's process: its variables, CPUs, GPUs and limits."""
        gpus = {} if self._gpus is None else {CUDA_DEVICES: self._gpus[worker_id]}
        # `multiprocessing` removes the forkserver's socket and its folder only if this process exits by itself, not if
        # it is killed.
        server: Any = forkserver
        address: str | None = getattr(server._forkserver, "_forkserver_address", None)  # it has no public name
        forkserver_files = () if address is None else (Path(address), Path(address).parent)
        return ChildEnvironment(
            variables={**os.environ, **gpus, RUNNER_MARK: self._mark_of(worker_id)},
            log_levels=log_levels(),
            left_behind=[*self.left_behind, *forkserver_files],
            limits=ResourceLimits(
                cpus=None if self.cpu_affinity is None else self.cpu_affinity[worker_id],
                memory_bytes=self.memory_bytes,
            ),
        )

    def _mark_of(self, worker_id: int) -> str:
        return f"{self._mark}.{worker_id}"


class InterProcessExecutionStrategy(ProcessExecutionStrategy):
    """Runners in processes on this machine, which reach the store over a Unix socket. It has the options of
    ProcessExecutionStrategy and no others.
    """

    @asynccontextmanager
    async def share(self, store: LightningStore) -> AsyncGenerator[Any]:
        if store.capabilities["zero_copy"]:
            yield store
            return
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            # so that runners remove both if this process is killed
            self.left_behind = (path := Path(folder) / "store.sock", Path(folder))
            async with LightningStoreServer(store, socket_path=path, views=metrics(store)) as server:
                yield server
