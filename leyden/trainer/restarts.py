"""Decide whether a failed algorithm is restarted: how often, after how long, and after which errors.

The module knows no strategy and no checkpoint. The trainer runs algorithm and runners again, and the algorithm resumes
as it would in a new process.
"""

from __future__ import annotations

import asyncio
import logging

from leyden.algorithm import Algorithm, FunctionalAlgorithm
from leyden.errors import ConfigError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Seconds before the first restart, which double with each restart, and their limit."""


def check_restarts(most: int, algorithm: Algorithm | None, *, keeps_checkpoints: bool) -> None:
    """Raise ConfigError if restarts are wanted and the algorithm could not continue after one.

    most: how many restarts are allowed.
    keeps_checkpoints: whether the run has a directory for them.
    """
    if most == 0:
        return
    if algorithm is None or not algorithm.resumable:
        reason = _not_resumable_reason(algorithm)
        raise ConfigError(f"max_algorithm_restarts={most}, but {reason}; or leave it out")
    if not keeps_checkpoints:
        raise ConfigError(
            f"max_algorithm_restarts={most} needs a directory for checkpoints; give run_dir= beside the store"
        )


def _not_resumable_reason(algorithm: Algorithm | None) -> str:
    """Return why an algorithm cannot be restarted, and what would make it possible."""
    if algorithm is None:
        return "there is no algorithm; give one"
    name = type(algorithm).__name__
    if isinstance(algorithm, FunctionalAlgorithm):
        return (
            f"the function {algorithm.__name__!r} would begin anew and enqueue everything twice: let it take `run`, follow "
            "run.resume, and derive the ids of its rollouts from run.run_id"
        )
    return (
        f"{name} does not say that it can continue; use an IterativeAlgorithm, or set resumable = True in an Algorithm that "
        "follows get_run().resume"
    )


class Restarts:
    """Counts the restarts of one run, whether or not there was a new checkpoint between them."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._used = 0

    def allow(self, error: Exception) -> bool:
        """Return whether to restart the algorithm after this error; never after a ConfigError, which would recur."""
        return self._used < self._max_restarts and not isinstance(error, ConfigError)

    async def pause(self, error: Exception) -> None:
        """Count a restart, log the error that caused it, and sleep before it."""
        seconds = min(_FIRST_PAUSE_SECONDS * 2**self._used, _LONGEST_PAUSE_SECONDS)
        self._used += 1
        logger.warning(
            "the algorithm failed; restart %d of %d, from its last checkpoint, in %.1f s",
            self._used,
            self._max_restarts,
            seconds,
            exc_info=error,
        )
        await asyncio.sleep(seconds)
