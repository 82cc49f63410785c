"""Agent Lightning's functions that set up logging, for Leyden's loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from leyden._lib.logs import configure_logger as native_configure
from leyden._lib.logs import setup_logging as native_setup

DATE_FORMAT = "%H:%M:%S"
DEFAULT_FORMAT = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"


class _ToOldNames(logging.Handler):
    """Passes records of `leyden.x` to the handlers of `agentlightning.x` and of its parents."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(f"agentlightning{record.name.removeprefix('leyden')}")
        while logger is not None and logger.parent is not None:  # the root logger's handlers have the record already
            for handler in logger.handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)
            logger = logger.parent if logger.propagate else None


_TO_OLD_NAMES = _ToOldNames()


def configure_logger(level: int = logging.INFO, name: str = "agentlightning") -> logging.Logger:
    """Show the log from a level on, and return the logger of this name."""
    native_configure(level)
    logging.getLogger("leyden").addHandler(_TO_OLD_NAMES)
    return native_configure(level, name)


def setup(
    level: int | str = "INFO",
    *,
    console: bool = True,
    color: Any = True,
    propagate: bool = False,
    disable_existing_loggers: bool = False,
    capture_warnings: bool = False,
    submodule_levels: Mapping[str, int | str] | None = None,
    extra_handlers: Any = None,
    formatter: Any = None,
    apply_to: Any = None,
    files: Any = None,
) -> None:
    """Show Leyden's log from a level on.

    console: write to standard error, in Leyden's own form.
    capture_warnings: log Python's warnings too.
    submodule_levels: levels of single loggers.
    extra_handlers: further handlers of Leyden's log.
    formatter: of the files.
    apply_to: further loggers, which get the same level.
    files: a path, or paths by logger, to which the log is written too.
    color, propagate, disable_existing_loggers: of no effect.
    """
    if console:
        native_setup(level)
    logging.getLogger("leyden").addHandler(_TO_OLD_NAMES)
    logging.captureWarnings(capture_warnings)
    for name in apply_to or ():
        logging.getLogger(name).setLevel(level)
    for name, sublevel in (submodule_levels or {}).items():
        logging.getLogger(_renamed(name)).setLevel(sublevel)
    named = {"leyden": files} if isinstance(files, str) else dict(files or {})
    handlers: list[tuple[str, logging.Handler]] = []
    for name, path in named.items():
        handler = logging.FileHandler(path)
        handler.setFormatter(formatter or logging.Formatter(DEFAULT_FORMAT))
        handlers.append((_renamed(str(name)), handler))
    handlers += [("leyden", handler) for handler in extra_handlers or ()]
    for name, handler in handlers:
        logging.getLogger(name).addHandler(handler)


def setup_module(level: int | str = "INFO", *, name: str = "agentlightning", **options: Any) -> logging.Logger:
    """Show one logger from a level on, and return it."""
    setup(level, apply_to=[name], **options)
    return logging.getLogger(name)


def _renamed(name: str) -> str:
    return "leyden" + name.removeprefix("agentlightning") if name.startswith("agentlightning") else name
