"""`LogWriter`: the protocol of writers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from leyden.loop.metrics import MetricsRow

__all__ = ["LogWriter"]


class LogWriter(ABC):
    """Takes the rows of one run: [load_state_dict], open, write ..., close; then it may serve another run in the same way."""

    @property
    def state_key(self) -> str:
        """The name of this writer's state in a checkpoint."""
        return type(self).__name__.lower()

    def open(self) -> None:
        """Begin a new record, or go on from the state that was loaded since the last `open`."""

    @abstractmethod
    def write(self, row: MetricsRow) -> None:
        """Take a row. Raises OSError if it cannot be kept."""

    def close(self) -> None:
        """Give everything back. Calling it again does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """How much was written, as JSON. All of it is durable when this returns. Also answered after `close`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `open` keep what `state` covers and cut what came after it."""
