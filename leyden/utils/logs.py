"""Leyden's log lines, shown to a person."""

from __future__ import annotations

import logging

__all__ = ["setup_logging"]


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
