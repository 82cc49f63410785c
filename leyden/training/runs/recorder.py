"""`RunRecorder`: writes the reports of a run to its folder and to its store.

A trainer makes one for each run, opens it when the store is open, attaches it to the `Run` that the algorithm is given,
and closes it before the store. A report never waits for the store: the row is handed to the trainer's event loop, which
writes all pending rows in one call.

A store that fails is reported once and does not end the run: the folder has everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from leyden.errors import ConfigError, LeydenError
from leyden.store.base import LightningStore
from leyden.training import Callback, LogWriter, Metrics, MetricsRow, Stage, TrainLoop, Vessel
from leyden.training.metrics import Row
from leyden.training.runs.folder import HEARTBEAT_SECONDS, METRICS, Manifest
from leyden.training.runs.recorded_runs import failure_of
from leyden.training.runs.recording import FolderRecorder, note_end
from leyden.training.runs.reported_loop import KeepsEarlierRows, ReportedLoop
from leyden.training.runs.steering import Steering, steering_callbacks
from leyden.types import Rollout
from leyden.types.run_record import MetricPoint, RunRecord, RunStatus

logger = logging.getLogger(__name__)

_FAILURES_AT_A_TIME = 100
_CHECK_SECONDS = 1.0
"""The shortest time between two queries for failed rollouts."""
_END_SECONDS = 5.0
"""Seconds that `close` waits for the store: once for the last failures, once for the run's end."""


class RunRecorder:
    """Records one run, from `open` to `close`.

    manifest: the run's, from `begin_run`.
    folder: None if the run keeps nothing beside its store.
    writers: the user's, which get every row.
    callbacks: the user's, for algorithms with a `TrainLoop`.
    bar: the callback that shows progress; None shows none.
    steering: does what people ask of the run; None: a run without a folder, which cannot be asked.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: LightningStore,
        folder: FolderRecorder | None,
        *,
        writers: Sequence[LogWriter] = (),
        callbacks: Sequence[Callback] = (),
        bar: Callback | None = None,
        steering: Steering | None = None,
    ) -> None:
        self.manifest, self._store, self._folder = manifest, store, folder
        self._writers, self._callbacks, self._bar = tuple(writers), tuple(callbacks), bar
        self._steering = steering
        self._rows: list[MetricsRow] = []
        """Rows of this process, for the summary of a run without a folder."""
        self._lock = threading.RLock()  # the bar that a report begins reads the rows
        self._reported: ReportedLoop | None = None
        self._own_loop: TrainLoop | None = None
        """The algorithm's own `TrainLoop`; None if it reports its stages itself."""
        self._cut_at_first_report = False
        """Whether the first report of a resumed algorithm is to remove the rows that follow it."""
        self._began_at = time.monotonic()
        self._mirror = _Mirror(store, manifest.record.run_id)
        self._recorded = set[str]()
        """Ids of the rollouts whose failures are recorded."""
        self._failures_until = manifest.record.start_time
        """The time of the last recorded failure; older ones are not read again."""
        self._checked_at = 0.0
        self._checking = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_prices = True
        """Whether calls of this run may have a price."""

    # ---- the run's beginning and end -------------------------------------------------------------

    async def open(self) -> None:
        """Open the folder's files, add the run to the store, and begin to send heartbeats."""
        if self._folder is not None:
            if self._steering is not None:
                self._steering.begin()
            self._folder.open()
            recorded = self._folder.failures()
            self._recorded = {failure.rollout_id for failure in recorded}
            self._failures_until = max((failure.time for failure in recorded), default=self._failures_until)
            self._rows = self._folder.rows()
        await self._mirror.start(self.manifest.record)
        self._tasks.append(asyncio.create_task(self._watch()))

    def begin_algorithm(self, *, resume: bool) -> None:
        """Prepare for the reports of an algorithm that begins, at first or after a restart.

        resume: the algorithm continues from its own checkpoint, and repeats the steps after it.
        """
        self._end_reported(None)
        if self._steering is not None:
            self._steering.restart()
        self._cut_at_first_report, self._own_loop = resume, None
        self._began_at = time.monotonic()

    async def close(self, status: RunStatus, cause: str | None = None) -> None:
        """Record how the run has ended, in the folder and then in the store.

        The folder comes first, because the store may be what failed. Errors of the store are logged, and not raised.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_reported(None if status == "succeeded" else RuntimeError(cause or status))
        with contextlib.suppress(LeydenError, TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._record_failures()
                await self._record_spending()
        note_end(self.manifest, status, cause)
        if self._folder is not None:
            self._folder.close(status, cause)
        if self._steering is not None:
            self._steering.end(status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self._mirror.end(self.manifest.record)

    async def _record_spending(self) -> None:
        """Write what the run has spent to its configuration, for readers of its folder."""
        spent = await self._store.sum_spending(self.manifest.record.run_id)
        if spent.attempts:
            self.manifest.record.config["spending"] = spent.model_dump()

    def note(self, text: str) -> None:
        if self._folder is not None:
            self._folder.note(text)

    @property
    def rows(self) -> list[MetricsRow]:
        """The rows that are recorded so far, with those of the run's earlier processes."""
        with self._lock:
            return list(self._rows)

    # ---- what the algorithm reports --------------------------------------------------------------

    def report(self, metrics: Metrics, *, stage: Stage, iteration: int | None) -> None:
        """Record the metrics of a stage.

        Raise ConfigError if the algorithm has its own `TrainLoop`, which reports them.
        """
        if self._own_loop is not None:
            raise ConfigError(
                "Run.report is for algorithms that own their loop; an IterativeAlgorithm returns its metrics from step and validate"
            )
        if self._cut_at_first_report:
            self._cut_at_first_report = False
            if iteration is not None:
                self._cut(after_iteration=iteration - (stage == "train"))
        loop = self._reporting_loop()
        loop.report(metrics, stage=stage, iteration=iteration)

    def progress(self, done: int, total: int, **counts: float) -> None:
        (self._own_loop or self._reporting_loop()).progress(done, total, **counts)

    async def costs(self) -> dict[str, float]:
        """Return metrics of what the model calls of the whole run cost so far (`total_cost`), and since the last row
        with that metric (`cost`); none without prices. With `unpriced_calls`, both are a part of the whole.
        """
        if not self._has_prices:
            return {}
        with self._mirror.reporting_errors():
            spent = await self._store.sum_spending(self.manifest.record.run_id)
            if spent.cost is not None:
                known = (row.metrics["total_cost"] for row in reversed(self.rows) if "total_cost" in row.metrics)
                before = next((float(value) for value in known), 0.0)
                unpriced = {"unpriced_calls": spent.unpriced_calls} if spent.unpriced_calls else {}
                return {"cost": max(0.0, spent.cost - before), "total_cost": spent.cost, **unpriced}
            self._has_prices = not spent.unpriced_calls  # else the calls of no later step have a price either
        return {}

    async def step_ended(self, n_finished: int, goes_on: Callable[[], bool]) -> None:
        if self._reported is not None and (costs := await self.costs()):
            self._reported.add(costs)
        if self._steering is not None and (work := self._steering.boundary(n_finished, goes_on)) is not None:
            await work

    def loop_callbacks(self) -> Sequence[Callback]:
        steering = () if self._steering is None else steering_callbacks(self._steering)
        return (_LoopObserver(self), *self._callbacks, *(() if self._bar is None else (self._bar,)), *steering)

    def loop_writers(self) -> Sequence[LogWriter]:
        return (self._row_writer(), *self._writers)

    def _row_writer(self) -> LogWriter:
        return _RowWriter(self, None if self._folder is None else self._folder.directory / METRICS)

    def _reporting_loop(self) -> ReportedLoop:
        """Return the loop through which the algorithm reports its stages; make it at the first report."""
        with self._lock:
            if self._reported is None:
                callbacks = () if self._bar is None else (self._bar,)
                self._reported = ReportedLoop(
                    started_at=self._began_at,
                    callbacks=callbacks,
                    writers=(self._row_writer(), *self._writers),
                    earlier=lambda: list(self._rows),
                )
                self._reported.begin()
            return self._reported

    def _end_reported(self, error: BaseException | None) -> None:
        with self._lock:
            loop, self._reported = self._reported, None
        if loop is not None:
            loop.end(error)

    def add_row(self, row: MetricsRow) -> None:
        with self._lock:
            is_further = any((row.iteration, row.stage) == (each.iteration, each.stage) for each in self._rows[-2:])
            self._rows.append(row)
            if self._folder is not None:
                self._folder.add_row(row)
        reward = row.metrics.get("reward")
        if not is_further:  # numbers of a hook say nothing about the stage
            self.note(f"iteration {row.iteration}: {row.stage} done" + ("" if reward is None else f", reward {reward}"))
        self._mirror.add(row)

    def follow(self, loop: TrainLoop) -> None:
        """Record the stages of the algorithm's own loop, which begins now.

        Rows after the loop's checkpoint are removed, because the loop makes them again.
        """
        self._own_loop = loop
        self._cut(after_iteration=loop.current_iter or -1)  # 0: no checkpoint, so validation 0 goes too

    def _cut(self, *, after_iteration: int) -> None:
        with self._lock:
            kept = [row for row in self._rows if row.iteration <= after_iteration]
            cut = len(kept) < len(self._rows)
            self._rows = kept
            if self._folder is not None:
                self._folder.cut_rows(after_iteration=after_iteration)
        if cut:
            self._mirror.cut(after_iteration)

    # ---- failures --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Record new failures and send the heartbeat, after each row and every ten seconds."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._mirror.news.wait()
            self._mirror.news.clear()
            with self._mirror.reporting_errors():
                await self._mirror.flush()
                if time.monotonic() - self._checked_at >= _CHECK_SECONDS:
                    await self._record_failures()
                await self._mirror.beat()

    async def _record_failures(self) -> None:
        """Record the rollouts that have failed since the last query.

        Pages are read from the newest failure back to the last recorded one, so only new failures cost anything.
        """
        async with self._checking:
            self._checked_at = time.monotonic()
            if self._folder is None:
                return
            run_id = self.manifest.record.run_id
            is_shared = self._store.capabilities["zero_copy"]
            found: list[Rollout] = []
            while True:  # a failure between two queries shifts the pages: a rollout may be on two of them
                page = await self._store.query_rollouts(
                    status_in=["failed"],
                    run_id=run_id if is_shared else None,  # elsewhere, rollouts that name no run count as this run's
                    sort_by="end_time",
                    sort_order="desc",
                    limit=_FAILURES_AT_A_TIME,
                    offset=len(found),
                )
                found += page
                if len(page) < _FAILURES_AT_A_TIME or (page[-1].end_time or 0.0) < self._failures_until:
                    break
            by_id = {rollout.rollout_id: rollout for rollout in reversed(found)}
            new = [
                rollout
                for rollout_id, rollout in by_id.items()
                if rollout_id not in self._recorded and rollout.run_id in (run_id, None)
            ]
            self._folder.add_failures(map(failure_of, new))
            self._recorded.update(rollout.rollout_id for rollout in new)
            self._failures_until = max((rollout.end_time or 0.0 for rollout in new), default=self._failures_until)


class _Mirror:
    """Writes a run, its rows and its heartbeat to the store.

    Rows may come from any thread. They wait here until the trainer's event loop writes them.
    """

    def __init__(self, store: LightningStore, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._loop = asyncio.get_running_loop()
        self._pending: list[list[MetricPoint] | int] = []
        """Changes in order: a list of points to add, or an iteration after which to remove points."""
        self._lock = threading.Lock()
        self._writing = asyncio.Lock()
        self._touched_at = time.monotonic()
        """The time of the last heartbeat."""
        self._reported_error = False
        self._refused = set[str]()
        """Names of metrics that the store refused, each of which is logged once."""
        self.news = asyncio.Event()
        """Set when there are changes to write."""

    async def start(self, record: RunRecord) -> None:
        """Add the run to the store, or mark it as running again."""
        await self._store.start_run(record)

    def add(self, row: MetricsRow) -> None:
        """Queue the row's numbers for the store. Safe in any thread."""
        now = time.time()
        points = [
            MetricPoint(
                stage=row.stage,
                iteration=row.iteration,
                name=name,
                value=value if math.isfinite(value) else None,
                time=now,
            )
            for name, value in row.metrics.items()
            if isinstance(value, (int, float))
        ]
        self._put(points)

    def cut(self, after_iteration: int) -> None:
        """Queue the removal of the points of later iterations. Safe in any thread."""
        self._put(after_iteration)

    def _put(self, change: list[MetricPoint] | int) -> None:
        with self._lock:
            self._pending.append(change)
        with contextlib.suppress(RuntimeError):  # the loop has ended: the folder has the row
            self._loop.call_soon_threadsafe(self.news.set)

    async def flush(self) -> None:
        """Write the pending changes in their order. Points are written in one call, up to the next removal of later
        iterations (`cut`).

        Changes that the store did not take, because it failed or the call was cancelled, stay pending. Writing them
        again is harmless.
        """
        async with self._writing:
            while True:
                with self._lock:
                    cut = next((index for index, change in enumerate(self._pending) if isinstance(change, int)), None)
                    taken = self._pending[: max(1, cut) if cut is not None else None]
                if not taken:
                    return
                if isinstance(taken[0], int):
                    await self._store.cut_metrics(self._run_id, after_iteration=taken[0])
                else:
                    await self._add([point for change in taken if isinstance(change, list) for point in change])
                with self._lock:
                    del self._pending[: len(taken)]

    async def _add(self, points: list[MetricPoint]) -> None:
        """Write the points. Leave out those that the store refuses, such as a name with a line break.

        The store refuses a whole call, so a refused list is halved until the point is found.
        """
        if not points:
            return
        try:
            await self._store.add_metrics(self._run_id, points)
        except ConfigError as error:
            if len(points) > 1:
                half = len(points) // 2
                await self._add(points[:half])
                await self._add(points[half:])
            elif points[0].name not in self._refused:
                self._refused.add(points[0].name)
                logger.warning("the store does not take a metric of the run (%s); its folder has it", error)

    async def beat(self) -> None:
        """Send the store a heartbeat of the run, unless the last one is younger than ten seconds."""
        if time.monotonic() - self._touched_at >= HEARTBEAT_SECONDS:
            self._touched_at = time.monotonic()
            await self._store.update_run(self._run_id)

    async def end(self, record: RunRecord) -> None:
        with self.reporting_errors():
            await self.flush()
            await self._store.update_run(self._run_id, status=record.status, cause=record.cause, config=record.config)

    @contextlib.contextmanager
    def reporting_errors(self) -> Generator[None]:
        """Suppress errors of the store, and log the first one."""
        try:
            yield
        except (LeydenError, OSError) as error:
            if not self._reported_error:
                logger.warning("the store does not take the metrics of the run now (%s); its folder has them", error)
            self._reported_error = True


class _RowWriter(LogWriter, KeepsEarlierRows):
    """Passes the rows of a loop on to the recorder."""

    def __init__(self, recorder: RunRecorder, path: Path | None) -> None:
        super().__init__()
        self._recorder = recorder
        self.path = path
        """The writer's file. A loop refuses two writers of one file."""

    def write(self, row: Row) -> None:
        assert isinstance(row, MetricsRow)
        self._recorder.add_row(row)


class _LoopObserver(Callback):
    """Notifies the recorder when the loop begins, after its counters were restored."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def on_fit_start(self, loop: TrainLoop, vessel: Vessel) -> None:
        self._recorder.follow(loop)

    async def on_train_end(self, loop: TrainLoop, vessel: Vessel) -> None:
        for name, value in (await self._recorder.costs()).items():
            loop.log(name, value)
