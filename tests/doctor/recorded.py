"""Write the folder of a run with given rows, log lines and failures, through the recorder that real runs have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from leyden.training import MetricsRow
from leyden.training.runs.opening import begin_run
from leyden.training.runs.recorded_runs import FailedRollout
from leyden.training.runs.recording import FolderRecorder
from leyden.types.run_record import RunStatus


def record(
    directory: Path,
    rows: Iterable[MetricsRow] = (),
    *,
    config: Mapping[str, Any] | None = None,
    failures: Iterable[FailedRollout] = (),
    warnings: Iterable[str] = (),
    status: RunStatus = "succeeded",
    cause: str | None = None,
) -> Path:
    """Record a run that has ended."""
    folder, manifest = begin_run(directory, config=dict(config or {}))
    recorder = FolderRecorder(folder, manifest)
    recorder.open()
    try:
        for row in rows:
            recorder.add_row(row)
        recorder.add_failures(failures)
        for warning in warnings:
            logging.getLogger("leyden").warning("%s", warning)
    finally:
        recorder.close(status, cause)
    return folder


def steps(**columns: Iterable[float]) -> list[MetricsRow]:
    """Return a training row for each place of the columns."""
    places = zip(*columns.values(), strict=True)
    return [
        MetricsRow(n, "train", float(n), dict(zip(columns, values, strict=True)))
        for n, values in enumerate(places, start=1)
    ]
