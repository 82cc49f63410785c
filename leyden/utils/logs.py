"""Leyden's log lines, shown to a person.

Levels: WARNING for problems that need attention, INFO for the outcome of a run, DEBUG for each
event of each rollout: enqueued, claimed, attempt begun, spans and model calls, attempt ended and
why, resources, stages of the loop, triplets made. Each DEBUG line begins with its subject's id, so
`grep <rollout id>` follows one rollout. Tasks and messages are shown as a `Preview`.
"""

from __future__ import annotations

import logging
import reprlib

__all__ = ["Preview", "configure_logger", "setup_logging"]

_PREVIEW_CHARACTERS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _PREVIEW_CHARACTERS
_short.maxlevel = 4


class Preview:
    """A value as at most 200 characters of one line, with passwords of addresses hidden.

    The text is made only when a line is written.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        from leyden.utils.text import storable

        text = self._value if isinstance(self._value, str) else _short.repr(self._value)
        text = " ".join(storable(text[: 20 * _PREVIEW_CHARACTERS]).split())
        return text if len(text) <= _PREVIEW_CHARACTERS else f"{text[: _PREVIEW_CHARACTERS - 3]}..."


def setup_logging(level: int | str = "INFO") -> None:
    """Show what `leyden` logs on standard error, one readable line each. For scripts and the command line; safe to repeat."""
    from rich.console import Console
    from rich.logging import RichHandler

    logger = logging.getLogger("leyden")
    logger.setLevel(level)
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def configure_logger(level: int | str = logging.INFO, name: str = "leyden") -> logging.Logger:
    """Show Leyden's log lines from `level` on, and return the logger of this name at that level.

    Agent Lightning has this function; new code calls `setup_logging`.
    """
    setup_logging(level)
    logger = logging.getLogger(name)
    logger.setLevel(level)
    return logger
