"""The names outside `qlib.rl` that its programs use, for a machine without pyqlib."""

from __future__ import annotations

import logging.config
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

INF: Final = 10**18
EPS: Final = 1e-12
ONE_DAY: Final = timedelta(days=1)
ONE_MIN: Final = timedelta(minutes=1)

CONFIG = SimpleNamespace(
    logging_config={
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "plain": {"format": "[%(process)s:%(threadName)s](%(asctime)s) %(levelname)s - %(name)s - %(message)s"}
        },
        "handlers": {"console": {"class": "logging.StreamHandler", "level": "INFO", "formatter": "plain"}},
        "loggers": {"qlib": {"level": "DEBUG", "handlers": ["console"], "propagate": False}},
    }
)
"""Stands for `qlib.config.C`, with its `logging_config`."""


def set_log_with_config(log_config: Mapping[str, Any]) -> None:
    """Configure logging by a dictionary, as `logging.config.dictConfig` does."""
    logging.config.dictConfig(dict(log_config))
