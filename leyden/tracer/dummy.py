"""`DummyTracer`: records what the agent's code emits, and nothing else."""

from __future__ import annotations

from leyden.tracer.base import Tracer


class DummyTracer(Tracer):
    """Notices no instrumentation and touches no global state: for tests, and for agents whose calls
    the gateway records anyway.
    """

    def prepare(self) -> None:
        """Nothing to prepare."""
