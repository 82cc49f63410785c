"""The trace of one attempt, and the contextvar that says which one is current."""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING

from leyden.types import Span

if TYPE_CHECKING:
    from leyden.tracer.base import Tracer
    from leyden.tracer.delivery import Delivery

__all__ = ["AttemptTrace", "current_trace", "last_trace"]

LOCAL = "local"
"""The ids of spans that belong to no attempt."""


class AttemptTrace:
    """The spans recorded in one `trace_context`, in the order in which they ended. Any thread may add."""

    def __init__(self, tracer: Tracer, name: str | None, rollout_id: str, attempt_id: str) -> None:
        self.tracer, self.name = tracer, name
        self.rollout_id, self.attempt_id = rollout_id, attempt_id
        self.spans: list[Span] = []
        self.delivery: Delivery | None = None
        """Brings the spans to a store; None: they stay here."""
        self._undelivered: list[Span] = []
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Take a finished span; it is delivered soon, and before the context ends at the latest."""
        with self._lock:
            self.spans.append(span)
            self._undelivered.append(span)
        if self.delivery is not None:
            self.delivery.notice(self)

    def take_undelivered(self) -> list[Span]:
        """The spans that nobody has taken yet; the caller must deliver them or put them back."""
        with self._lock:
            taken, self._undelivered = self._undelivered, []
        return taken

    def put_back(self, spans: list[Span]) -> None:
        """Return spans that could not be delivered."""
        with self._lock:
            self._undelivered[:0] = spans


current_trace: contextvars.ContextVar[AttemptTrace | None] = contextvars.ContextVar(
    "leyden_current_trace", default=None
)
"""The trace that code running now belongs to."""
last_trace: contextvars.ContextVar[AttemptTrace | None] = contextvars.ContextVar("leyden_last_trace", default=None)
"""The trace that ended last in this context."""
