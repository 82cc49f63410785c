"""A run's folder: the names of its files, and `run.json`.

`run.json` is written whole when a run begins, and again when it ends. While the run lives, its recorder only touches
the file, so that the time of its last change is the run's heartbeat.

To add a field, add it to `Manifest`, `write` and `_read_current`; older files lack it, so give it a default.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import stat
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import psutil
from pydantic import TypeAdapter, ValidationError

from leyden._lib.atomic import private_directory, write_file
from leyden._lib.formatting import one_line, size
from leyden._lib.text import fault_reason
from leyden.errors import ConfigError
from leyden.types.run_record import RunRecord

RUNS = Path(".leyden")
"""The default directory of runs, relative to the current folder."""
MANIFEST = "run.json"
METRICS = "metrics.jsonl"
FAILURES = "failures.jsonl"
LOG = "run.log"
REPORT = "report.html"
REPORT_MARK = (
    b'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="Leyden report">\n'
)
"""The beginning of every report. A file of that name without it is the user's own."""
CONTROL = "control.jsonl"
_STATES = ("checkpoints", "best")

RunState = Literal["running", "succeeded", "failed", "stopped", "crashed"]
"""`crashed`: recorded as running, but its process is gone."""

HEARTBEAT_SECONDS = 10.0
"""Seconds between two heartbeats of a run."""
_SILENCE_SECONDS = 60.0
"""A run on another machine has crashed if its last heartbeat is older than this."""
_FORMAT = 2
_MAX_TIME = 1e11
"""A time behind this, in the year 5138, is damage."""
_MAX_NAME = 200
_START_TOLERANCE_SECONDS = 2.0
"""Start times of one process differ by rounding, and by corrections of the clock."""
_PREVIOUS_CAUSE = "recorded by an earlier version of Leyden, which did not note how runs end"


def report_of(directory: Path) -> Path | None:
    """Return the report in a run's folder; None if there is none, or a file of the user's own."""
    path = directory / REPORT
    try:
        with path.open("rb") as file:
            return path if file.read(len(REPORT_MARK)) == REPORT_MARK else None
    except OSError:
        return None


def store_path(directory: Path) -> Path:
    return directory / "store.sqlite"


def folder_bytes(directory: Path) -> dict[str, int]:
    """Return the bytes of a run's folder: of its models, of its checkpoints, and of its records with the store.

    Other folders in it are not the run's, and are not looked into. A file with two names counts once.
    """
    sizes: dict[str, int] = {"model": 0, "checkpoints": 0, "records": 0}
    seen = set[tuple[int, int]]()
    for path in directory.iterdir():
        if path.is_dir() and not (path.name in _STATES or path.name.startswith("model")):
            continue
        kind = "records" if path.is_file() else "checkpoints" if path.name in _STATES else "model"
        for each in (path, *path.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # a running run replaces checkpoints
                found = each.lstat()
                if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    sizes[kind] += found.st_size
    return sizes


def size_text(directory: Path) -> str:
    """Return how large a run's folder is, and what of it each part is: `1.2 GB (model 15 MB, ...)`."""
    sizes = folder_bytes(directory)
    parts = ", ".join(f"{kind} {size(n_bytes)}" for kind, n_bytes in sizes.items() if n_bytes)
    return f"{size(sum(sizes.values()))} ({parts})"


def name_of(directory: Path) -> str:
    """Return the folder's name as every store takes it: up to 200 printable characters."""
    return one_line(directory.resolve().name)[:_MAX_NAME].strip() or "run"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `run.json`."""

    record: RunRecord
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Data of the caller that is stored with the run (`Run.options`)."""
    host: str | None = None
    """The machine that works, or has worked, on the run."""
    pid: int | None = None
    process_start_time: float | None = None
    """Unix seconds. It distinguishes the run's process from a later one with the same pid."""

    @property
    def state(self) -> RunState:
        """The recorded status; `crashed` if the run is recorded as running and its process is gone.

        A process on another machine cannot be looked for; there, the run has crashed if its last heartbeat is a minute
        old.
        """
        if self.record.status != "running":
            return self.record.status
        if self.is_of_this_host:
            return "running" if self._process_lives() else "crashed"
        silent = time.time() - (self.record.last_heartbeat_time or 0.0)
        return "running" if silent < _SILENCE_SECONDS else "crashed"

    @property
    def is_of_this_host(self) -> bool:
        return self.host == socket.gethostname()

    def _process_lives(self) -> bool:
        if self.pid is None:
            return False
        try:
            process = psutil.Process(self.pid)
            started = process.create_time()
            ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        recorded = started if self.process_start_time is None else self.process_start_time
        return not ended and abs(started - recorded) < _START_TOLERANCE_SECONDS

    def of_this_process(self) -> Manifest:
        """Return the manifest with this process as the one that works on the run."""
        pid = os.getpid()
        return replace(self, host=socket.gethostname(), pid=pid, process_start_time=_start_time_of(pid))

    def write(self, directory: Path) -> None:
        """Make the folder if it is missing and write `run.json` whole. Raise ConfigError if that is not possible."""
        content = {
            "format": _FORMAT,
            **self.record.model_dump(mode="json", exclude={"config", "last_heartbeat_time"}),
            "host": self.host,
            "pid": self.pid,
            "process_start_time": self.process_start_time,
            "options": self.options,
            "config": self.record.config,
        }
        try:
            private_directory(directory)
            write_file(directory / MANIFEST, json.dumps(content, indent=1, default=repr) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot keep a run in {directory}: {error}; choose another run_dir") from error


def remove_if_nothing_started(directory: Path) -> None:
    """Remove the files of a run that never started, and its folder if nothing else is in it.

    The caller must know that the run never started; nothing is checked here.
    """
    for path in directory.glob("*"):
        is_own = path.name in (MANIFEST, METRICS, FAILURES, LOG, CONTROL) or path == report_of(directory)
        if is_own or path.name.startswith(store_path(directory).name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: the user's own files
        (directory / "checkpoints").rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()


@cache
def _start_time_of(pid: int) -> float:
    return psutil.Process(pid).create_time()


def read_manifest(directory: Path) -> Manifest:
    """Return the content of `run.json` in this folder.

    Raise ConfigError if the file is missing or damaged, or if a newer Leyden wrote it.
    """
    path = directory / MANIFEST
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        touched = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{directory} holds no run ({MANIFEST} is missing)") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    content = cast(dict[str, Any], read) if isinstance(read, dict) else {}
    if not isinstance(content.get("run_id"), str):
        raise ConfigError(f"{path} is damaged: it names no run")
    try:
        if content.get("format") == _FORMAT:
            return _read_current(content, touched)
        if content.get("format") == 1:
            record = RunRecord(
                run_id=content["run_id"],
                name=name_of(directory),
                kind="fit",
                status="stopped",  # this format does not say how the run ended
                start_time=content["started"],
                cause=_PREVIOUS_CAUSE,
            )
            return Manifest(record, content.get("options", {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is damaged: {where}: {fault_reason(first)}") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    raise ConfigError(f"{path} has format {content.get('format')!r}; this version of Leyden reads 1 and {_FORMAT}")


@functools.cache
def _manifest_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)  # it takes longer to make than to read a run


def _read_current(content: dict[str, Any], touched: float) -> Manifest:
    fields = {name: content[name] for name in RunRecord.model_fields if name in content}
    others = {name: content[name] for name in ("options", "host", "pid", "process_start_time") if name in content}
    manifest = _manifest_adapter().validate_python({"record": fields, **others})
    record = manifest.record
    times = [each for each in (record.start_time, record.end_time) if each is not None]
    if not all(0 <= each < _MAX_TIME for each in times):  # also NaN
        raise TypeError(f"start_time or end_time is no time in Unix seconds: {times}")
    if manifest.record.status == "running":
        manifest.record.last_heartbeat_time = touched
    return manifest
