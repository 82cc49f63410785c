"""Write a report to a file, also at the end of a run, where nothing that goes wrong with it may hurt the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from leyden._lib.atomic import write_file
from leyden._lib.text import describe_error
from leyden.errors import ConfigError
from leyden.report.page import page
from leyden.report.run_data import report_data
from leyden.training.runs import RecordedRun, open_run
from leyden.training.runs.folder import REPORT, REPORT_MARK

logger = logging.getLogger(__name__)

_MAX_TOKENIZER_BYTES = 12_000_000
"""At the end of a run, a larger tokenizer is not loaded, because that takes more than half a second."""


def write_report(
    runs: Sequence[RecordedRun],
    path: Path,
    *,
    sources: Sequence[str] = (),
    replace: bool = True,
    max_tokenizer_bytes: int | None = None,
) -> None:
    """Write the report on some runs to a file that only this user can read. The options are those of `report_data`.

    replace: also replace a file that is no report.
    Raise ConfigError if the file cannot be written.
    """
    try:
        if not replace and path.exists() and not path.read_bytes().startswith(REPORT_MARK):
            raise ConfigError(f"{path} exists and is no report; give --output FILE")
        write_file(path, page(report_data(runs, sources=sources, max_tokenizer_bytes=max_tokenizer_bytes)))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def write_at_end(directory: Path) -> None:
    """Write the report of a run that has ended into its folder. A failure is a warning."""
    try:
        sources, size = [str(directory)], _MAX_TOKENIZER_BYTES
        runs = [open_run(directory)]
        write_report(runs, directory / REPORT, sources=sources, replace=False, max_tokenizer_bytes=size)
    except Exception as error:  # noqa: BLE001 -- a run that has ended must not fail because of a page about it
        logger.warning("no report was written (%s); `leyden report %s` tries again", describe_error(error), directory)
