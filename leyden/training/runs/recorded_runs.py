"""Open a run that was recorded: from its folder, by its name or id, or from a store.

A reader changes nothing, so a run can be read while it is running. Each method reads the files or the store again. A
half-written last line, which a kill may leave, is skipped.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from leyden.errors import ConfigError, redact
from leyden.store import LightningStore, open_store
from leyden.training import MetricsRow, Stage
from leyden.training.metrics import ROW_FIELDS
from leyden.training.runs.folder import (
    FAILURES,
    LOG,
    MANIFEST,
    METRICS,
    RUNS,
    Manifest,
    RunState,
    read_manifest,
    store_path,
)
from leyden.training.runs.notes import NOTES, Note, RunNotes, notes_of
from leyden.training.runs.run_metrics import RunMetrics, in_order, metrics_of
from leyden.types import AttemptedRollout, Rollout, failure_reason
from leyden.types.run_record import RunRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OFFERED = 5
"""How many runs an error message names."""


@dataclass(frozen=True, slots=True)
class FailedRollout:
    """A rollout that failed: which one, when and why."""

    rollout_id: str
    attempt_id: str | None
    """The attempt's id; None if the rollout ended before its first attempt."""
    reason_kind: str | None
    """The kind of failure as the runner names it; None if it named none."""
    reason: str
    time: float
    """The time of its end, in Unix seconds."""
    mode: str | None = None
    """`train`, `val` or `test`; None if unknown."""
    iteration: int | None = None
    """The training iteration that the rollout was for, counted from 1 as in the metrics; None if unknown."""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not isinstance(self.time, int | float):
            raise TypeError("FailedRollout() reason or time has a wrong type")


class RecordedRun(ABC):
    """A recorded run. `open_run` and `list_runs` return it."""

    @property
    @abstractmethod
    def directory(self) -> Path | None:
        """The run's folder; None for a run that was read from a store."""

    @property
    @abstractmethod
    def record(self) -> RunRecord: ...

    @property
    @abstractmethod
    def state(self) -> RunState:
        """The run's status; `crashed` if it is recorded as running and its process is gone."""

    @property
    def notes(self) -> RunNotes:
        """What people have said about the run: its tags, its notes, and a name if it was given another one."""
        return RunNotes()

    @property
    def log_path(self) -> Path | None:
        """The run's log file; None if there is none."""
        path = None if self.directory is None else self.directory / LOG
        return path if path is not None and path.is_file() else None

    @abstractmethod
    def metrics(self, stage: Stage | None = None) -> list[MetricsRow]:
        """Return the rows of all stages, or of one, in order of iterations.

        Within an iteration, `train` comes first: the order is val 0, train 1, val 1.
        """

    @abstractmethod
    def failures(self) -> list[FailedRollout]:
        """Return the failed rollouts in the order in which they were recorded."""

    @abstractmethod
    def open_store(self, *, read_only: bool = True) -> LightningStore:
        """Return the run's store, to be used in `async with`.

        read_only: open a file without owning it. False raises StoreError while another process owns it.
        Raise ConfigError if the run does not say where its store is.
        """

    def read_store(self, query: Callable[[LightningStore], Awaitable[T]]) -> T:
        """Open the run's store, await one query of it, and return the result.

        For synchronous code: the query runs in its own thread, so that it works in notebooks, where an event loop
        runs already.
        """
        return _in_thread(self.open_store, query)

    def summary_metrics(self) -> RunMetrics:
        return metrics_of(self.metrics())


class _FolderRun(RecordedRun):
    """A run that is read from its folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        _ = self.record  # raises ConfigError if the folder holds no readable run

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def record(self) -> RunRecord:
        record, name = read_manifest(self.directory).record, self.notes.name
        return record if name is None else record.model_copy(update={"name": name})

    @property
    def notes(self) -> RunNotes:
        return notes_of(_read_objects(self.directory / NOTES, Note))

    @property
    def state(self) -> RunState:
        return read_manifest(self.directory).state

    def metrics(self, stage: Stage | None = None) -> list[MetricsRow]:
        return [row for row in read_rows(self.directory / METRICS) if stage in (None, row.stage)]

    def failures(self) -> list[FailedRollout]:
        return read_failures(self.directory / FAILURES)

    def open_store(self, *, read_only: bool = True) -> LightningStore:
        """Return the store in the run's folder, else the store that `run.json` names."""
        recorded = self.record.config.get("store")
        path = store_path(self.directory)
        if path.exists():
            return open_store(path, read_only=read_only)
        if not isinstance(recorded, str) or recorded.startswith("memory:"):
            raise ConfigError(
                f"{self.directory} has no {path.name}, and its {MANIFEST} names no other store; its rollouts cannot be read"
            )
        return _open(recorded, read_only)


class _StoreRun(RecordedRun):
    """A run that is read from its store, which is opened for each read."""

    def __init__(self, store: str | Path, run_id: str) -> None:
        self._store, self._run_id = store, run_id

    @property
    def directory(self) -> None:
        return None

    @property
    def record(self) -> RunRecord:
        return _read(self._store, lambda store: store.get_run_by_id(self._run_id))

    @property
    def state(self) -> RunState:
        return Manifest(self.record).state

    def metrics(self, stage: Stage | None = None) -> list[MetricsRow]:
        record = self.record
        rows: dict[tuple[int, str], MetricsRow] = {}
        for point in _read(self._store, lambda store: store.query_metrics(self._run_id, stage=stage)):
            new = MetricsRow(point.iteration, cast(Stage, point.stage), point.time - record.start_time, {})
            row = rows.setdefault((point.iteration, point.stage), new)
            row.metrics[point.name] = math.nan if point.value is None else point.value
        return in_order(rows.values())

    def failures(self) -> list[FailedRollout]:
        failed = _read(
            self._store,
            lambda store: store.query_rollouts(run_id=self._run_id, status_in=["failed"], sort_by="end_time"),
        )
        return [failure_of(rollout) for rollout in failed]

    def open_store(self, *, read_only: bool = True) -> LightningStore:
        return _open(self._store, read_only)


def iteration_of(rollout: Rollout) -> int | None:
    """Return the iteration that a rollout was for, counted as in the metrics; None if unknown.

    A rollout's `step` is the number of iterations that had finished when it was requested. A training rollout belongs
    to the next iteration; a validation measures the finished one.
    """
    step = rollout.metadata.get("step")
    return step + (1 if rollout.mode == "train" else 0) if isinstance(step, int) else None


def failure_of(rollout: Rollout) -> FailedRollout:
    """Return a failed rollout with its reason, which its latest attempt records."""
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    return FailedRollout(
        rollout_id=rollout.rollout_id,
        attempt_id=None if attempt is None else attempt.attempt_id,
        reason_kind=None if attempt is None else attempt.metadata.get("reason_kind", attempt.status),
        reason=failure_reason(rollout),
        time=rollout.end_time or time.time(),
        mode=rollout.mode,
        iteration=iteration_of(rollout),
    )


def open_run(source: str | Path, *, run_id: str | None = None) -> RecordedRun:
    """Open a run that is running, finished or crashed.

    source: a run's folder; the folder's name, name or id of a run under `.leyden/`, or a unique beginning of one;
        "latest" for the run under `.leyden/` that was started last; or the path or URL of a store.
    run_id: the run's id, for a store that holds several runs.
    Raise ConfigError if there is no such run, or if several match.
    """
    path, name = Path(source), str(source).rstrip("/") or str(source)
    if "://" in name or os.path.isfile(path):  # noqa: PTH113 -- False for a name that no file can have
        return _run_of_a_store(source, run_id)
    if run_id is not None:
        raise ConfigError(f"run_id={run_id!r} is for a store, and {str(source)!r} is none; leave run_id out")
    if _holds_run(path):
        return _FolderRun(path)
    if name and path.name == name and _holds_run(RUNS / name):  # no two folders have one name
        return _FolderRun(RUNS / name)
    if name == "latest":
        runs = list_runs()
        if not runs:
            raise ConfigError(f"there is no run in {RUNS.resolve()}; start one, or give a run's folder")
        return runs[0]
    runs, damaged = find_runs()
    found = [run for run in runs if name in (run.record.name, run.record.run_id)]
    if not found and os.path.isdir(path):  # noqa: PTH112
        raise ConfigError(f"{path} holds no run ({MANIFEST} is missing){_offer(list_runs(path))}")
    if name and not found:
        found = [run for run in runs if any(each.startswith(name) for each in names_of(run))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{name!r} fits {len(found)} runs{_offer(found)}; give the name of one folder")
    left_out = "".join(f"; {trouble}" for trouble in damaged[:_OFFERED])
    offer = _offer(runs) or "; start one, or give a run's folder"
    raise ConfigError(f"there is no run {name!r} in {RUNS.resolve()}{offer}{left_out}")


def _run_of_a_store(source: str | Path, run_id: str | None) -> RecordedRun:
    """Return the run with this id, or the only run of a store. Raise ConfigError otherwise."""
    if run_id is not None:
        _read(source, lambda store: store.get_run_by_id(run_id))  # raises UnknownRun if it is missing
        return _StoreRun(source, run_id)
    runs = list(_read(source, lambda store: store.query_runs()))
    if len(runs) != 1:
        names = ", ".join(f"{run.run_id} ({run.name})" for run in runs[:5])
        there_are = f"holds {len(runs)} runs; give run_id=, one of {names}" if runs else "holds no run"
        raise ConfigError(f"the store {redact(str(source))} {there_are}")
    return _StoreRun(source, runs[0].run_id)


def _open(source: str | Path, read_only: bool) -> LightningStore:
    in_a_file = "://" not in str(source) or str(source).startswith("sqlite:")
    return open_store(source, read_only=read_only and in_a_file)


def _read(source: str | Path, query: Callable[[LightningStore], Awaitable[T]]) -> T:
    return _in_thread(lambda: _open(source, True), query)


def _in_thread(open_it: Callable[[], LightningStore], query: Callable[[LightningStore], Awaitable[T]]) -> T:
    """Run a query on the event loop of a new thread, because this one may have a running loop."""

    async def work() -> T:
        async with open_it() as store:
            return await query(store)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work()).result()


def list_runs(root: Path = RUNS) -> list[RecordedRun]:
    """Return the runs in the folders of `root`, the last started first.

    A folder whose `run.json` cannot be read is left out, with a warning. A run that is not directly under `root` is not
    found. Raise ConfigError if `root` cannot be read.
    """
    runs, damaged = find_runs(root)
    for trouble in damaged:
        logger.warning("a run is left out: %s", trouble)
    return runs


def list_store_runs(source: str | Path, *, limit: int) -> tuple[dict[str, RecordedRun], list[RunRecord], int]:
    """Return up to `limit` runs of a store by their ids, the newest first, their records, and the number of all its
    runs. One query reads them.
    """
    page = _read(source, lambda store: store.query_runs(limit=limit))
    return {record.run_id: _StoreRun(source, record.run_id) for record in page}, list(page), page.total


def find_runs(root: Path = RUNS) -> tuple[list[RecordedRun], list[str]]:
    """Return what `list_runs` returns, and for each run that is left out why, without a warning."""
    runs: list[RecordedRun] = []
    damaged: list[str] = []
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise ConfigError(f"the runs in {root} cannot be listed: {error.strerror}") from error
    for folder in filter(_holds_run, folders):
        try:
            runs.append(_FolderRun(folder))
        except ConfigError as error:
            damaged.append(str(error))
    return sorted(runs, key=lambda run: run.record.start_time, reverse=True), damaged


def require_free_name(run: RecordedRun, name: str) -> None:
    """Raise ConfigError if a name would not find this run: it means something else, or another run beside it has it."""
    assert run.directory is not None
    if "/" in name or name in (".", "..") or name.startswith("-"):
        raise ConfigError(f"the name {name!r} looks like a path or an option; give one without slashes, such as first")
    others = [each for each in find_runs(run.directory.parent)[0] if each.record.run_id != run.record.run_id]
    if name == "latest" or any(name in names_of(each) for each in others):
        taken = "means the newest run" if name == "latest" else "is another run's"
        raise ConfigError(f"the name {name!r} {taken}; choose another one")


def _holds_run(folder: Path) -> bool:
    """Return whether a folder has a `run.json`, readable or not."""
    try:
        (folder / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def names_of(run: RecordedRun) -> list[str]:
    """Return the names by which `open_run` finds a run: its folder's, its own and its id."""
    folder = [] if run.directory is None else [run.directory.name]
    return [*folder, run.record.name, run.record.run_id]


def _offer(runs: Iterable[RecordedRun]) -> str:
    names = [names_of(run)[0] for run in runs]
    return f"; there are: {', '.join(names[:_OFFERED])}{', ...' * (len(names) > _OFFERED)}" if names else ""


# ---- lines of JSON -------------------------------------------------------------------------------


def read_rows(path: Path, *, last_bytes: int | None = None) -> list[MetricsRow]:
    """Return the rows of a `metrics.jsonl` in order of iterations; none if the file is missing.

    Rows of one stage and iteration are joined, as `in_order` says. Raise ConfigError for a damaged line.
    last_bytes: read only the whole lines in so many bytes at the file's end; None: read all.
    """
    rows: list[MetricsRow] = []
    for number, line in _lines(path, last_bytes):
        try:
            iteration, stage, seconds = (line.pop(name) for name in ROW_FIELDS)
        except KeyError as error:
            raise _damaged(path, number, f"{error} is missing") from None
        if type(iteration) is not int or stage not in get_args(Stage) or type(seconds) not in (int, float):
            raise _damaged(
                path, number, f"iteration, stage or seconds has a wrong type: {iteration!r}, {stage!r}, {seconds!r}"
            )
        if any(isinstance(value, int) and abs(value) > sys.float_info.max for value in (seconds, *line.values())):
            raise _damaged(path, number, "a number is more than a float can hold")
        metrics = {name: float("nan") if value is None else value for name, value in line.items()}
        rows.append(MetricsRow(iteration, stage, seconds, metrics))
    return in_order(rows)


def read_failures(path: Path, *, last_bytes: int | None = None) -> list[FailedRollout]:
    """Return the failures in a `failures.jsonl`; none if the file is missing.

    Fields that a later version may have added are left out. Raise ConfigError for a damaged line.
    last_bytes: read only the whole lines in so many bytes at the file's end; None: read all.
    """
    return list(_read_objects(path, FailedRollout, last_bytes))


def _read_objects(path: Path, kind: type[T], last_bytes: int | None = None) -> Iterator[T]:
    """Yield the object of each line. Raise ConfigError for a line that lacks a field."""
    known = {field.name for field in fields(cast(Any, kind))}
    for number, line in _lines(path, last_bytes):
        try:
            yield kind(**{name: value for name, value in line.items() if name in known})
        except TypeError as error:
            # "FailedRollout.__init__() missing 1 required ...": without the name of the function
            raise _damaged(path, number, str(error).partition("() ")[2]) from None


def _lines(path: Path, last_bytes: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON object of each line that is not empty, and the line's number. Raise ConfigError for others.

    last_bytes: yield only the whole lines in so many bytes at the file's end, whose numbers begin there.
    """
    try:
        with path.open("rb") as file:
            if last_bytes is not None and (start := path.stat().st_size - last_bytes) > 0:
                file.seek(start)
                file.readline()
            text = file.read().decode("utf-8-sig", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    lines = text.split("\n")
    if lines[-1] and not lines[-1].startswith("{"):
        raise _damaged(path, len(lines), "it is not the beginning of a JSON object")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is not written yet
        if not line.strip():
            continue
        try:
            read: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, error) from error
        if not isinstance(read, dict):
            raise _damaged(path, number, "it is no JSON object")
        yield number, cast(dict[str, Any], read)


def _damaged(path: Path, number: int, why: object) -> ConfigError:
    return ConfigError(f"line {number} of {path} is damaged: {why}; remove the line")
