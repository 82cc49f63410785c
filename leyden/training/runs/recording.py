"""`FolderRecorder`: writes a run's folder while the run lives.

It needs no event loop and knows no store. Rows and failures are appended as they come, so a kill loses none that was
written. A thread touches `run.json` every ten seconds to show that the run lives, and calls `looks` every second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from leyden._lib.atomic import append_privately, open_aside
from leyden._lib.json import json_line
from leyden._lib.text import storable
from leyden.errors import ConfigError
from leyden.training import MetricsRow
from leyden.training.runs.folder import FAILURES, HEARTBEAT_SECONDS, LOG, MANIFEST, METRICS, Manifest
from leyden.training.runs.log import RunLog
from leyden.training.runs.recorded_runs import FailedRollout, read_failures, read_rows
from leyden.training.runs.run_description import git_is_dirty
from leyden.types.run_record import RunStatus

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""The longest time until a run sees that it is to stop."""


class FolderRecorder:
    """Writes `run.json`, `metrics.jsonl`, `failures.jsonl` and `run.log` of one run, from `open` to `close`.

    directory: the run's folder, which exists already.
    manifest: from `begin_run`.
    looks: called every second, in a thread of the recorder.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, looks: Sequence[Callable[[], None]] = ()) -> None:
        self._looks = looks
        self.directory = directory
        self.manifest = manifest.of_this_process()
        self._log = RunLog(directory / LOG, manifest.record.run_id)
        self._metrics: IO[str] | None = None
        self._failures: IO[str] | None = None
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="leyden-run-heartbeat", daemon=True)
        self._lock = threading.Lock()
        """Held while `run.json` is written."""

    def open(self) -> None:
        """Record in `run.json` that this process works on the run, and open the run's files.

        Rows of an earlier process stay. Starts the heartbeat.
        """
        record = self.manifest.record
        record.status, record.end_time, record.cause = "running", None, None
        self._write_manifest()
        self._metrics = _appending(self.directory / METRICS)
        self._failures = _appending(self.directory / FAILURES)
        self._log.open()
        self._heart.start()

    def close(self, status: RunStatus, cause: str | None = None) -> None:
        """Record how the run ended, and close its files. Later calls do nothing."""
        with self._lock:  # the heartbeat's thread may be writing run.json, and must not after this
            if self._ended.is_set():
                return
            self._ended.set()
            note_end(self.manifest, status, cause)
            try:
                self.manifest.write(self.directory)
            except ConfigError as error:  # a full disk, for example, must not turn a success into an error
                logger.warning("the end of the run (%s) is not recorded: %s", status, error)
        self._log.close()
        for file in (self._metrics, self._failures):
            if file is not None:
                with contextlib.suppress(OSError):  # each write is flushed, and reported its own error
                    file.close()

    def rows(self) -> list[MetricsRow]:
        return read_rows(self.directory / METRICS)

    def add_row(self, row: MetricsRow) -> None:
        """Append a row. A reader replaces an earlier row of the same stage and iteration by it.

        After `close` the file is opened for this row alone, because a policy may be tested later.
        """
        if self._ended.is_set():
            with _appending(self.directory / METRICS) as file:
                _append(file, row.flat())
        else:
            _append(self._metrics, row.flat())

    def cut_rows(self, *, after_iteration: int) -> None:
        """Remove the rows of later iterations, because the run continues from a checkpoint."""
        rows = self.rows()
        kept = [row for row in rows if row.iteration <= after_iteration]
        if len(kept) == len(rows):
            return
        if self._metrics is not None:
            self._metrics.close()
        with open_aside(self.directory / METRICS) as aside:
            aside.writelines(json_line(row.flat()) for row in kept)
        self._metrics = _appending(self.directory / METRICS)

    def note(self, text: str) -> None:
        self._log.write(text)

    def failures(self) -> list[FailedRollout]:
        return read_failures(self.directory / FAILURES)

    def add_failures(self, failures: Iterable[FailedRollout]) -> None:
        for failure in failures:
            _append(self._failures, asdict(failure))

    def _beat(self) -> None:
        """Look for requests, and touch `run.json` every HEARTBEAT_SECONDS, until the end. Runs in its own thread.

        Before that, record whether the git work tree is dirty, which may take git a while.
        """
        dirty = git_is_dirty() if self.manifest.record.config.get("git") else None
        if dirty is not None:
            self.manifest.record.config["git"]["dirty"] = dirty
            with contextlib.suppress(ConfigError):  # a detail; the next write has it
                self._write_manifest()
        beat_at = time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS):
            for look in self._looks:
                try:
                    look()
                except Exception:
                    logger.exception("%s has failed", getattr(look, "__qualname__", look))
            if time.monotonic() - beat_at >= HEARTBEAT_SECONDS:
                beat_at = time.monotonic()
                with contextlib.suppress(OSError):  # the folder was moved or removed; the run itself goes on
                    os.utime(self.directory / MANIFEST)

    def _write_manifest(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                self.manifest.write(self.directory)


def note_end(manifest: Manifest, status: RunStatus, cause: str | None) -> None:
    """Record in the manifest how the run ended. The cause becomes one line, without secrets."""
    record = manifest.record
    record.status, record.end_time = status, record.end_time or time.time()
    record.cause = None if cause is None else " ".join(storable(cause, limit=1000).split())


def _appending(path: Path) -> IO[str]:
    """Open a file of lines for appending. Remove a last line that a kill has cut in half."""
    file = append_privately(path)
    size = file.seek(0, os.SEEK_END)
    if size and (end := path.read_bytes().rfind(b"\n") + 1) < size:
        file.truncate(end)
        file.seek(0, os.SEEK_END)
    return TextIOWrapper(file, encoding="utf-8", newline="")


def _append(file: IO[str] | None, content: dict[str, Any]) -> None:
    assert file is not None, "the recorder is not open"
    file.write(json_line(content))
    try:
        file.flush()
    except OSError as error:  # a full disk: say which file
        raise OSError(error.errno, error.strerror, file.name) from error
