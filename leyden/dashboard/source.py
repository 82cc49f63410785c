"""`Source`: the runs that a dashboard shows, those of a folder, of one run, or of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leyden.errors import ConfigError, LeydenError, redact
from leyden.store import LightningStore, open_store
from leyden.training.runs import RecordedRun, open_run
from leyden.training.runs.folder import CONTROL, FAILURES, MANIFEST, METRICS, RUNS, store_path
from leyden.training.runs.notes import NOTES
from leyden.training.runs.recorded_runs import find_runs, list_store_runs
from leyden.training.runs.rollouts import has_the_store_for_itself

_MAX_RUNS = 200
"""Runs of a store that are listed, the newest."""


class Source:
    """The runs in a folder, or in a store. Its methods block; each reads again, so that it sees running runs."""

    def __init__(self, place: str | Path = RUNS, *, server: Callable[[], LightningStore] | None = None) -> None:
        """place: a folder of runs, the folder of one run, or the path or URL of a store.
        server: returns a client of the server that owns the store, for the answers of reviewers.

        Raise ConfigError if it is none of these.
        """
        self.place = str(place)
        path = Path(place)
        self._store = self.place if "://" in self.place or path.is_file() else None
        if self._store is None and not path.is_dir():
            raise ConfigError(f"there is no folder {self.place!r}; give a folder of runs, a run, or a store")
        self._is_run = self._store is None and (path / MANIFEST).exists()
        self._folder = path
        self._server = server
        self._known: dict[str, Path] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The name of the place that the pages show, without secrets."""
        return redact(self.place) if self._store is not None else str(self._folder.resolve())

    def runs(self) -> tuple[list[RecordedRun], list[str]]:
        """Return the runs, the newest first, and for each run that cannot be read why."""
        if self._store is not None:
            return list(list_store_runs(self._store, limit=_MAX_RUNS)[0].values()), []
        runs, damaged = ([open_run(self._folder)], list[str]()) if self._is_run else find_runs(self._folder)
        with self._lock:
            self._known = {run.record.run_id: run.directory for run in runs if run.directory is not None}
        return runs, damaged

    def run(self, run_id: str) -> RecordedRun:
        """Return the run with this id. Raise ConfigError if there is none."""
        if self._store is not None:
            return open_run(self._store, run_id=run_id)
        for _ in range(2):
            with self._lock:
                directory = self._known.get(run_id)
            if directory is not None and (run := open_run(directory)).record.run_id == run_id:
                return run
            self.runs()
        raise ConfigError(f"there is no run {run_id!r} in {self.name}")

    def open_to_write(self, run: RecordedRun) -> LightningStore:
        """Return the store of a run, to be used in `async with`, for writing."""
        if self._server is not None:
            return self._server()
        if has_the_store_for_itself(run):
            assert run.directory is not None
            return open_store(store_path(run.directory))
        recorded = self._store or run.record.config.get("store")
        return open_store(recorded) if isinstance(recorded, str) else run.open_store()

    def state_of(self, run_id: str) -> Any:
        """Return a value that differs after anything of a run has changed; None if that cannot be told, as of a store,
        whose runs keep their record when their rollouts get feedback.
        """
        return None if self._store is not None else self.state().get(run_id)

    def state(self) -> dict[str, Any]:
        """Return a value for each run that differs after anything of the run has changed."""
        if self._store is not None:
            records = list_store_runs(self._store, limit=_MAX_RUNS)[1]
            return {each.run_id: each.model_dump(mode="json", exclude={"config"}) for each in records}
        with self._lock:
            known = dict(self._known)
        if not self._is_run and len(known) != sum((each / MANIFEST).exists() for each in self._folder.iterdir()):
            self.runs()
        return {run_id: _stamps(directory) for run_id, directory in known.items()}


def _stamps(directory: Path) -> list[Any]:
    """Return the run's state, which changes without a file if its process is killed, and the time of the last change
    and the size of each file that a run writes.
    """
    store = store_path(directory)
    stamps: list[Any] = []
    try:
        stamps.append(open_run(directory).state)
    except (LeydenError, OSError):  # it is damaged or gone, as its view will say
        stamps.append(None)
    for name in (MANIFEST, METRICS, FAILURES, CONTROL, NOTES, store.name, f"{store.name}-wal"):
        try:
            found = (directory / name).stat()
        except OSError:
            stamps.append((0, 0))
        else:
            # run.json is touched as a heartbeat, which changes nothing that is shown
            stamps.append((0 if name == MANIFEST else found.st_mtime_ns, found.st_size))
    return stamps
