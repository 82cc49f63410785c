"""Vectorised environments in worker processes, with results in shared memory (`shmem`), or also in messages
(`subproc`).

The workers live from the making of the vectorised environment to its `close`. A worker that dies, or hangs for longer
than `step_timeout_seconds`, is replaced, and its episodes are lost; `on_worker_error` says what happens to them. A step
wakes each worker that has something to step, and this process for each reply. No process spins while it waits, because
spinning takes a core from a worker that could use it; a wake-up over a pipe costs about two microseconds of CPU.

Factories are sent by value (cloudpickle), so lambdas and closures work. Unless `start_method="fork"`, a worker imports
the main script, as `multiprocessing` does, so code at its top level must be under `if __name__ == "__main__":`. Without
that, the start raises an error that says so.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import numpy as np

from leyden._lib.host.child import (
    Child,
    ChildFailure,
    StartMethod,
    exit_if_starting,
    known_start_method,
    preload,
    require_importable_main,
)
from leyden._lib.options import check_number
from leyden._lib.pickling import pack_by_value
from leyden.errors import ConfigError, SimulatorError
from leyden.rl.batch import select, write
from leyden.rl.data_queue import ACTIVE_QUEUES
from leyden.rl.env.channel import SIGNAL, Channel, SharedMemoryFile
from leyden.rl.env.env_worker import BeginEpisodes, EnvsReady, Results, Sizes, StepEnvs, View, run_worker
from leyden.rl.env.group import (
    EnvFactory,
    EnvFailure,
    Infos,
    Start,
    cores,
    require_same_spaces,
    split,
    worker_count,
)
from leyden.rl.env.randomness import WorkerGenerators, WorkerSeeds
from leyden.rl.env.vector import FiniteVectorEnv, Mask, OnWorkerError, Writers
from leyden.rl.seed import SeedsLike
from leyden.rl.spaces import Batch, layout_of

logger = logging.getLogger(__name__)
_MAX_TRIES = 8
"""Attempts to make a worker's environments, because a worker may die while it makes them."""
_LAST_SECONDS = 2.0
"""Seconds that all workers together may take to close their environments."""


class _WorkerLost(Exception):
    """A worker has ended, failed or not replied in time."""

    def __init__(self, how: str, traceback: str = "") -> None:
        """Keep how it was lost, as the end of a sentence, and the traceback of its error, if any."""
        super().__init__(how)
        self.how, self.traceback = how, traceback


class _TimedOut(_WorkerLost):
    """A worker has not replied in time."""


class _EnvWorker:
    """One worker process, from the parent's side. `start` begins a new process after an old one."""

    def __init__(
        self,
        number: int,
        part: range,
        start_method: StartMethod,
        packed: bytes,
        file: SharedMemoryFile,
        sizes: Sizes,
        seeds: WorkerSeeds,
        *,
        wants_steps: bool,
    ) -> None:
        """Start nothing yet. `part`: the worker's environments; `packed`: their factories; `seeds`: of the worker's
        process-wide random generators.
        """
        self.number, self.part = number, part
        self.rows = slice(part.start, part.stop)
        self.everyone = list(range(len(part)))
        self._start_method: StartMethod = start_method
        self._packed, self._file = packed, file
        self._sizes, self._wants_steps = sizes, wants_steps
        self._seeds, self._starts = seeds, 0
        self.child: Child | None = None
        self._channel: Channel | None = None

    def start(self) -> None:
        generators = WorkerGenerators(self._seeds, self.number, self._starts)
        args = (self.number, self.part, self._file, self._packed, self._sizes, self._wants_steps, generators)
        self.child = Child(run_worker, args, name=f"leyden-env-{self.number}", start_method=self._start_method)
        self._channel = Channel(self.child.connection)
        self._starts += 1

    def ready(self, timeout_seconds: float | None, quiet_seconds: float) -> EnvsReady:
        """Wait until the environments are made.

        A warning is logged after `quiet_seconds`, then after twice as long, and so on. Raise _WorkerLost if the worker
        fails, and _TimedOut if it takes more than `timeout_seconds`.
        """
        began, after = time.monotonic(), quiet_seconds
        end = math.inf if timeout_seconds is None else timeout_seconds
        while True:
            left = min(after, end) - (time.monotonic() - began)
            try:
                ready = self.reply(None if left == math.inf else max(left, 0.0))
            except _TimedOut:
                if after >= end:
                    raise _TimedOut(_too_long(end)) from None
                logger.warning("worker %d takes more than %g s to make %s", self.number, after, self.described)
                after *= 2
            else:
                assert isinstance(ready, EnvsReady)
                return ready

    @property
    def described(self) -> str:
        part = self.part
        return f"environment {part.start}" if len(part) == 1 else f"environments {part.start} to {part.stop - 1}"

    def reply(self, timeout_seconds: float | None) -> Any:
        """Wait for the worker's reply and return it. Raise _WorkerLost if the worker has ended or failed, and _TimedOut
        after `timeout_seconds`.
        """
        assert self._channel is not None
        assert self.child is not None
        try:
            answer = self._channel.receive(timeout_seconds)
        except TimeoutError:
            raise _TimedOut(_too_long(timeout_seconds)) from None
        except (EOFError, OSError):
            how = self.child.describe_end(_LAST_SECONDS, remedy="choose start_method='fork'")
            raise _WorkerLost(f"its worker process {how}") from None
        if isinstance(answer, ChildFailure):
            raise _WorkerLost(f"its worker process ended: {answer.headline}", answer.traceback)
        return answer

    def send(self, command: Any) -> None:
        """Send a command, or the object SIGNAL for a step whose actions are in shared memory. If the worker has died,
        that is noticed when it does not reply.
        """
        assert self._channel is not None
        with contextlib.suppress(OSError):
            if command is SIGNAL:
                self._channel.signal()
            else:
                self._channel.send(command)

    def end(self, grace_seconds: float = 0.0) -> None:
        """End the process, which has `grace_seconds` to close its environments. Safe to repeat."""
        if self.child is not None:
            self.child.close(grace_seconds)
            self.child = None


class FiniteSubprocVectorEnv(FiniteVectorEnv):
    """Environments in worker processes.

    Observations and actions of a fixed size lie in memory that all processes share. Those of any other space are sent
    through pipes.
    """

    _needs_fixed_size: ClassVar[bool] = False

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
        start_method: StartMethod | None = None,
        step_timeout_seconds: float | None = None,
        seed: int | WorkerSeeds | None = None,
    ) -> None:
        """Start the workers, which make the environments.

        A worker that dies while it makes its environments is restarted, unless `on_worker_error` is `raise`.
        workers: the number of processes; None: one for each core, at most one for each environment.
        start_method: how processes are started; None: forkserver if it is available.
        step_timeout_seconds: the longest that a worker may take to make, reset or step all its environments; None: no
            limit.
        seed: the seed from which each worker's global generators (random, NumPy, torch) are seeded differently. None:
            drawn from this process's generators, so that a program that seeds these gets the same numbers again.
        Raise SimulatorError if environments cannot be made, and ConfigError if a factory cannot be pickled, or if the
        environments' spaces or seed iterators differ.
        """
        exit_if_starting()
        check_number("step_timeout_seconds", step_timeout_seconds, above=0, or_none="no limit")
        super().__init__(
            len(env_fns),
            logger=logger,
            seeds=seeds,
            on_worker_error=on_worker_error,
            max_retries=max_retries,
            quiet_seconds=quiet_seconds,
        )
        if not isinstance(seed, WorkerSeeds):
            seed = WorkerSeeds.draw() if seed is None else WorkerSeeds(seed, seed, seed)
        self._timeout = step_timeout_seconds
        self._awaited: _EnvWorker | None = None
        parts = split(len(env_fns), worker_count(workers, len(env_fns), cores()))
        sizes = Sizes(len(env_fns), len(parts))
        method = known_start_method(start_method)
        require_importable_main(method, remedy="choose start_method='fork' or env_type='dummy'")
        preload(["leyden.rl.env.env_worker"])
        self._file = SharedMemoryFile()
        self._workers = [
            _EnvWorker(
                number,
                part,
                method,
                _pack(env_fns[part.start : part.stop]),
                self._file,
                sizes,
                seed,
                wants_steps=self._wants_steps,
            )
            for number, part in enumerate(parts)
        ]
        # at exit, this runs before multiprocessing waits for its children, which would not end
        self._finalizer: Any = Finalize(self, _end_all, (self._workers, self._file), exitpriority=10)
        try:
            for worker in self._workers:
                worker.start()
            ready = [self._first_ready(worker) for worker in self._workers]
            self._open_memory(ready, sizes)
        except BaseException:
            self._finalizer()
            raise

    def _open_memory(self, ready: list[EnvsReady], sizes: Sizes) -> None:
        """Check that the workers' environments agree, and lay out the shared memory for them.

        ready: each worker's report of its spaces and seeds.
        Raise ConfigError if spaces or seed iterators differ, or if objects cannot be shared.
        """
        first = ready[0]
        for one in ready[1:]:
            require_same_spaces(first, one)
        if any(one.own_seeds != first.own_seeds for one in ready):
            raise ConfigError(
                "the environments in worker processes have different seed iterators; give the seeds to vectorize_env(seeds=...)"
            )
        if first.own_seeds is not None:
            if (queue := ACTIVE_QUEUES.get(first.own_seeds)) is None:
                raise ConfigError(
                    "the environments in worker processes have a seed iterator of their own, which is no active DataQueue of this "
                    "process; give the seeds to vectorize_env(seeds=...)"
                )
            self._adopt(queue)
        layout, actions = layout_of(first.observation_space), layout_of(first.action_space)
        if self._needs_fixed_size and (part := layout.unshared or actions.unshared) is not None:
            raise ConfigError(
                f"{part} is not of a fixed size and cannot lie in shared memory; choose env_type='subproc'"
            )
        self._view = View.of(self._file, sizes, layout, actions, resize=True)
        self._spaces = first
        self._open(first.observation_space, first.action_space, self._view.rows)
        for worker in self._workers:
            self._send_open(worker)

    def _send_open(self, worker: _EnvWorker) -> None:
        worker.send("open")
        try:
            worker.reply(self._timeout)
        except _WorkerLost as lost:
            raise SimulatorError(f"environments of worker {worker.number} could not be opened: {lost.how}") from None

    def _first_ready(self, worker: _EnvWorker) -> EnvsReady:
        """Wait for a new worker. Restart it if it dies, unless failures are raised."""
        for attempt in range(_MAX_TRIES):
            try:
                return worker.ready(self._timeout, self._quiet_seconds)
            except _WorkerLost as lost:
                # with a traceback, a factory has raised an error, and would again
                if lost.traceback or self._on_worker_error == "raise" or attempt == _MAX_TRIES - 1:
                    raise self._not_made(worker, lost) from None
                logger.warning("worker %d is started again: %s", worker.number, lost.how)
            worker.end()
            worker.start()
        raise AssertionError("not reached")

    def _not_made(self, worker: _EnvWorker, lost: _WorkerLost) -> SimulatorError | ConfigError:
        if "leyden.errors.ConfigError: " in lost.how:  # what every kind raises for a wrong factory
            return ConfigError(lost.how.partition("leyden.errors.ConfigError: ")[2])
        own = f"\n\nIts own traceback:\n{lost.traceback}" if lost.traceback else ""
        return SimulatorError(f"{worker.described} could not be made: {lost.how}{own}", env_id=worker.part.start)

    def _busy(self) -> int | None:
        worker = self._awaited
        return None if worker is None else worker.part.start + int(self._view.progress[worker.number])

    def _of_worker(self, env: int) -> str:
        worker = next(worker for worker in self._workers if env in worker.part)
        pid = None if worker.child is None else worker.child.pid
        return f" (worker {worker.number}, process {pid})"

    def _begin(self, starts: Sequence[Start]) -> list[EnvFailure]:
        sent: list[tuple[_EnvWorker, BeginEpisodes]] = []
        for worker in self._workers:
            mine = [(env - worker.part.start, seed) for env, seed in starts if env in worker.part]
            if mine:
                sent.append((worker, BeginEpisodes(mine)))
                worker.send(sent[-1][1])
        failures: list[EnvFailure] = []
        for worker, command in sent:
            begun = [env for env, _ in command.starts]
            _, failed = self._results_of(worker, begun, "began")
            failures += failed
        return failures

    def _step(self, mask: Mask, actions: Batch) -> tuple[Infos, list[EnvFailure]]:
        """Send the actions to the workers, then wait for all. Return infos by environment, and failures. With shared
        memory, actions and results are in it, and a command is a SIGNAL.
        """
        everyone = bool(mask.all())
        sent: list[tuple[_EnvWorker, list[int]]] = []
        if shared := self._view.rows is not None:
            write(self._view.actions, ..., actions)
            self._view.todo[...] = mask
        for worker in self._workers:
            envs = worker.everyone if everyone else np.flatnonzero(mask[worker.rows]).tolist()
            if envs:
                worker.send(SIGNAL if shared else StepEnvs(envs, select(actions, worker.rows)))
                sent.append((worker, envs))
        infos: Infos = {}
        failures: list[EnvFailure] = []
        for worker, envs in sent:
            given, failed = self._results_of(worker, envs, "stepped")
            if given:
                infos.update(given)
            failures += failed
        return infos, failures

    def _results_of(self, worker: _EnvWorker, envs: Sequence[int], doing: str) -> tuple[Infos, list[EnvFailure]]:
        """Wait for a worker's results. Return infos and failures, by the environments' numbers among all.

        If the worker is lost, replace it, and return the failures of its environments.
        envs: the environments that were commanded, by their numbers in the worker.
        doing: `began` or `stepped`, for failures.
        """
        start = worker.part.start
        self._awaited = worker
        try:
            answer = worker.reply(self._timeout)
        except _WorkerLost as lost:
            return {}, self._replace(worker, envs, doing, lost)
        if answer is SIGNAL:  # the results are in shared memory, and there are neither infos nor failures
            return {}, []
        assert isinstance(answer, Results)
        if answer.rows is not None:
            mine, rows = self._rows.part(worker.rows), answer.rows
            write(mine.obs, ..., rows.obs)
            mine.rewards[...], mine.terminated[...], mine.truncated[...] = rows.rewards, rows.terminated, rows.truncated
        if start == 0:
            return answer.infos, answer.failures
        infos = {env + start: info for env, info in answer.infos.items()}
        return infos, [replace(failure, env=failure.env + start) for failure in answer.failures]

    def _replace(self, worker: _EnvWorker, envs: Sequence[int], doing: str, lost: _WorkerLost) -> list[EnvFailure]:
        """Replace a worker that was lost. Return the failures of all its episodes.

        The environment at which the worker was is guilty of them.
        envs: the environments that were commanded, by their numbers in the worker.
        """
        at_work = int(self._view.progress[worker.number])
        for attempt in range(_MAX_TRIES):  # what killed the worker may kill the next one too
            worker.end()
            worker.start()
            try:
                try:
                    ready = worker.ready(self._timeout, self._quiet_seconds)
                except _WorkerLost as again:
                    raise self._not_made(worker, again) from None
                if ready != self._spaces:
                    raise ConfigError(
                        "the environments that a new worker made have other spaces than those before; factories must make the "
                        "same environments each time"
                    )
                self._send_open(worker)
            except SimulatorError:
                if attempt == _MAX_TRIES - 1:
                    raise
            else:
                break
        start = worker.part.start
        involved = {env + start for env in envs}
        hit = sorted(involved | {env for env in worker.part if self.alive[env]})
        guilty = at_work + start if at_work + start in involved else hit[0]
        failures: list[EnvFailure] = []
        for env in hit:
            began = doing == "began" and env in involved
            step = 0 if began else int(self._lengths[env])
            how = lost.how if env == guilty else f"its worker was running environment {guilty}: {lost.how}"
            verb = doing if env in involved else "waited"
            failures.append(EnvFailure(env, step, verb, how, lost.traceback, guilty=env == guilty))
        return failures

    def _close(self) -> None:
        self._finalizer()


class FiniteShmemVectorEnv(FiniteSubprocVectorEnv):
    """Environments in worker processes that step without messages. Raise ConfigError for spaces of varying size."""

    _needs_fixed_size = True


def _too_long(seconds: float | None) -> str:  # None waits without end, so it is never too long
    return f"it took more than {seconds:g} s and was killed"


def _pack(factories: Sequence[EnvFactory]) -> bytes:
    try:
        return pack_by_value(list(factories))
    except Exception as error:
        raise ConfigError(
            f"the environment factory cannot be sent to a worker process: {error}. Make its objects inside the function, or choose "
            "env_type='dummy'"
        ) from error


def _end_all(workers: Sequence[_EnvWorker], file: SharedMemoryFile) -> None:
    """End all workers within two seconds, and close the shared memory."""
    for worker in workers:  # first all pipes, so that the workers close their environments at once
        if worker.child is not None:
            worker.child.hang_up()
    deadline = time.monotonic() + _LAST_SECONDS
    for worker in workers:
        worker.end(deadline - time.monotonic())
    file.close()
