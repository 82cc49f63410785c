"""`RunLog`: writes the lines of the `leyden` logger to the run's folder. What the user sees does not change.

Records from INFO on go to the file. If the user's level is higher, the logger is set to INFO while the run lasts, and a
filter keeps the lower records from all handlers that were there before. In a program without any handler, Python itself
shows warnings on standard error; the file's handler ends that, so a handler for warnings is added while the run lasts.
A logger whose name ends in `.details` keeps the user's level: its records are too many for a file that every run
writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

from leyden._lib.atomic import append_privately
from leyden._lib.logs import line_formatter, stderr_handler
from leyden.types.run_record import current_run_id

_ROOT = "leyden"


class RunLog:
    """Appends the records of one run to a file, from `open` to `close`."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._handler: logging.FileHandler | None = None

    def open(self) -> None:
        """Begin to write. Raise OSError if the file cannot be opened."""
        handler = _FileHandler(self._path, encoding="utf-8")
        handler.setLevel(logging.INFO)
        handler.setFormatter(line_formatter())
        handler.addFilter(lambda record: current_run_id.get() in (None, self._run_id))
        _Lowered.hold()
        logging.getLogger(_ROOT).addHandler(handler)
        self._handler = handler

    def write(self, text: str) -> None:
        """Add a record to the file alone; other handlers do not get it."""
        if self._handler is not None:
            self._handler.emit(logging.LogRecord(__name__, logging.INFO, __file__, 0, "%s", (text,), None))

    def close(self) -> None:
        """Restore the logger and close the file. Safe to repeat."""
        handler, self._handler = self._handler, None
        if handler is not None:
            logging.getLogger(_ROOT).removeHandler(handler)
            handler.close()
            _Lowered.release()


class _FileHandler(WatchedFileHandler):
    """Appends to a file that only this user may read. It follows a log rotation, which renames the file or cuts it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened again; the program goes on
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(append_privately(Path(self.baseFilename)), encoding=self.encoding, line_buffering=True)


class _Lowered:
    """The `leyden` logger, set to INFO. Its other handlers get only the records that they got before.

    The runs of a process share one: each calls `hold`, then `release`.
    """

    _lock = threading.Lock()
    _holders = 0
    _held: _Lowered | None = None
    """The changes to the loggers; None if the user's level is INFO or lower, or no run lasts."""
    _warnings: logging.Handler | None = None
    """Shows warnings while a run lasts, in a program that has no handler."""

    @classmethod
    def hold(cls) -> None:
        """Lower the logger to INFO. Do nothing if it is already, by the user or by another run."""
        with cls._lock:
            cls._holders += 1
            logger = logging.getLogger(_ROOT)
            if cls._holders == 1 and not logger.hasHandlers():
                cls._warnings = stderr_handler()
                cls._warnings.setLevel(logging.WARNING)
                logger.addHandler(cls._warnings)
            if cls._held is None and logger.getEffectiveLevel() > logging.INFO:
                cls._held = cls(logger)

    @classmethod
    def release(cls) -> None:
        """End one `hold`. The last release restores levels and handlers as they were."""
        with cls._lock:
            cls._holders -= 1
            if cls._holders == 0 and cls._held is not None:
                cls._held.restore()
                cls._held = None
            if cls._holders == 0 and cls._warnings is not None:
                logging.getLogger(_ROOT).removeHandler(cls._warnings)
                cls._warnings = None

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._level = logger.getEffectiveLevel()
        self._handlers = list(_handlers(logger))
        for handler in self._handlers:
            handler.addFilter(self._shown_before)
        self._details = [(child, child.level) for child in _loggers() if child.name.endswith(".details")]
        for child, _ in self._details:
            child.setLevel(max(child.level, self._level))
        self._own_level = logger.level
        logger.setLevel(logging.INFO)

    def restore(self) -> None:
        if self._logger.level == logging.INFO:  # the user has not set another one meanwhile
            self._logger.setLevel(self._own_level)
        for child, level in self._details:
            child.setLevel(level)
        for handler in self._handlers:
            handler.removeFilter(self._shown_before)

    def _shown_before(self, record: logging.LogRecord) -> bool:
        ours = record.name == _ROOT or record.name.startswith(f"{_ROOT}.")
        lowered = self._logger.level == logging.INFO
        return not (ours and lowered) or record.levelno >= self._level


def _loggers() -> Iterator[logging.Logger]:
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == _ROOT or name.startswith(f"{_ROOT}.")):
            yield logger


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield each handler that records of `leyden` loggers reach, also those of the loggers above."""
    seen: set[int] = set()
    ancestors: list[logging.Logger] = []
    above: logging.Logger | None = logger
    while above is not None:
        ancestors.append(above)
        above = above.parent if above.propagate else None
    for each in [*ancestors, *_loggers()]:
        for handler in each.handlers:
            if id(handler) not in seen:
                seen.add(id(handler))
                yield handler
