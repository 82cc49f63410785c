"""Leyden's log: its levels, its lines and where they are shown.

Levels: WARNING for problems that need attention, INFO for the outcome of a run, DEBUG for each event of each rollout:
enqueued, claimed, attempt begun, spans and model calls, attempt ended and why, resources, stages of the loop, triplets
made. Each DEBUG line begins with its subject's id, so `grep <rollout id>` follows one rollout. Tasks and messages are
shown as a `Preview`.

A record is one line with date, time and level in a file or a pipe. A terminal shows it with colours and wraps it at the
terminal's width.
"""

from __future__ import annotations

import logging
import os
import reprlib
import sys
from typing import TextIO

from leyden._lib.formatting import harmless, printable_on

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_POSSIBLE = ", ".join(_LEVELS)
_LEVEL_VARIABLE = "LEYDEN_LOG"
_HANDLER_NAME = "leyden-stderr"
_INDENT = "    "
_FOR_FILES = "leyden_for_files"
"""The attribute that marks a record which the handler for standard error leaves out."""

_PREVIEW_CHARACTERS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _PREVIEW_CHARACTERS
_short.maxlevel = 4


class Preview:
    """A value shown as one line of at most 200 characters, without passwords.

    The text is made only when a line is written.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        from leyden._lib.text import storable

        text = self._value if isinstance(self._value, str) else _short.repr(self._value)
        # Cut early, because cleaning a text of megabytes takes long; white space shrinks afterwards.
        text = " ".join(harmless(storable(text[: 20 * _PREVIEW_CHARACTERS])).split())
        return text if len(text) <= _PREVIEW_CHARACTERS else f"{text[: _PREVIEW_CHARACTERS - 3]}..."


def line_formatter(*, source: bool = False) -> logging.Formatter:
    """Return a formatter for files and pipes: `2026-03-01 12:00:00.123 WARNING message`, unwrapped.

    Later lines of a message, and its traceback, are indented under the first one.
    source: also name the process and the logger, for a stream that several processes write to.
    """
    return _LineFormatter(f"%(asctime)s %(levelname)s {'%(processName)s %(name)s: ' if source else ''}%(message)s")


def setup_logging(level: int | str = "INFO") -> None:
    """Write the records of the `leyden` loggers to standard error, for scripts and the command line.

    A file or a pipe gets one line for each record, as `line_formatter` makes it. Safe to repeat.

    level: a number or a name in any case. The environment variable LEYDEN_LOG, if it is set, overrides it:
        `LEYDEN_LOG=debug python train.py`. A variable that names no level is reported and ignored.
    Raise ValueError for an unknown level.
    """
    variable = os.environ.get(_LEVEL_VARIABLE, "")
    from_variable = _number_of(variable) if variable else None
    logger = logging.getLogger("leyden")
    logger.setLevel(_checked(level) if from_variable is None else from_variable)
    if not any(handler.name == _HANDLER_NAME for handler in logger.handlers):
        logger.addHandler(stderr_handler())
        logger.propagate = False
    if variable and from_variable is None:
        logger.warning("%s is %r, which is no level; possible: %s", _LEVEL_VARIABLE, variable, _POSSIBLE)


def stderr_handler() -> logging.Handler:
    """Return a handler that writes records to standard error, in colours on a terminal and as lines elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(
            console=Console(stderr=True), show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
        handler.setFormatter(_HarmlessFormatter("%(message)s"))
    else:
        handler = _LineHandler()
    handler.name = _HANDLER_NAME
    handler.addFilter(lambda record: not hasattr(record, _FOR_FILES))
    return handler


def setup_logging_if_asked() -> None:
    """Call `setup_logging` if LEYDEN_LOG is set, for programs that do not call it themselves."""
    if os.environ.get(_LEVEL_VARIABLE):
        setup_logging()


def setup_child_logging() -> None:
    """Write all log records of a child process to standard error, with the names of the process and the logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(line_formatter(source=True))
    logging.basicConfig(handlers=[handler])


def setup_relayed_logging() -> None:
    """Write the records of a child process to standard error, for a parent that passes each line to `relay_line`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def relay_line(logger: logging.Logger, source: str, line: str) -> None:
    """Log a line of a child's standard error, at the level with which the line begins.

    `setup_relayed_logging` puts it there. A line without a level, such as a library's output, is logged at INFO.
    """
    level, _, message = line.partition(" ")
    if level.lower() in _LEVELS and level.isupper():
        logger.log(_LEVELS[level.lower()], "%s: %s", source, message)
    else:
        logger.info("%s: %s", source, line)


def configure_logger(level: int | str = logging.INFO, name: str = "leyden") -> logging.Logger:
    """Call `setup_logging`, and return the logger of this name at that level.

    Agent Lightning has this function; new code calls `setup_logging`.
    """
    setup_logging(level)
    logger = logging.getLogger(name)
    if name != "leyden":
        logger.setLevel(_checked(level))
    return logger


def log_for_files(logger: logging.Logger, message: str, *args: object, error: BaseException) -> None:
    """Log a message with the traceback of `error`, at INFO, for all handlers but the one of `setup_logging`.

    A run's log file then has the traceback, and the terminal does not.
    """
    logger.info(message, *args, exc_info=error, extra={_FOR_FILES: True})


def notice(logger: logging.Logger, message: str, *args: object) -> None:
    """Log at INFO, and write the message to standard error if no handler shows INFO there.

    For the few messages that a user needs without having set up logging, such as what a process waits for.
    """
    logger.info(message, *args)
    if not _is_shown(logger):
        sys.stderr.write(f"{printable_on(sys.stderr, message % args)}\n")
        sys.stderr.flush()


def _is_shown(logger: logging.Logger) -> bool:
    """Return whether a handler that is not a file's takes the logger's INFO records."""
    if not logger.isEnabledFor(logging.INFO):
        return False
    place: logging.Logger | None = logger
    while place is not None:
        if any(each.level <= logging.INFO and not isinstance(each, logging.FileHandler) for each in place.handlers):
            return True
        place = place.parent if place.propagate else None
    return False


class _HarmlessFormatter(logging.Formatter):
    """A formatter that removes control characters, since messages may hold texts of models and agents."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


class _LineFormatter(_HarmlessFormatter):
    """A formatter that indents all lines of a record but the first."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        first, *later = super().format(record).splitlines()
        return "\n".join([first, *(f"{_INDENT}{line}".rstrip() for line in later)])


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes to the `sys.stderr` of the moment, which a progress bar or a notebook may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(line_formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _checked(level: int | str) -> int:
    if (number := _number_of(level)) is None:
        raise ValueError(f"level is {level!r}; possible: {_POSSIBLE}")
    return number


def _number_of(level: int | str) -> int | None:
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    return _LEVELS.get(level.strip().lower()) if isinstance(level, str) else None
