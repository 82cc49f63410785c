"""Instrument Microsoft's Agent Framework, which makes OpenTelemetry's spans by itself: agents, tools, workflows, and
model calls with their messages.

A call of `disable_instrumentation()` by the user stays in force.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from leyden.tracing.instrumentation.instrumentation import Instrumentation


class AgentFrameworkInstrumentation(Instrumentation):
    """Instruments Microsoft's `agent_framework`, by switching on its own spans."""

    modules: ClassVar[tuple[str, ...]] = ("agent_framework",)

    def install(self) -> None:
        """Make the framework record spans, with the texts of messages."""
        self._observability: Any = importlib.import_module("agent_framework.observability")
        settings = self._observability.OBSERVABILITY_SETTINGS
        self._before: tuple[bool, bool] = settings.enable_instrumentation, settings.enable_sensitive_data
        self._observability.enable_instrumentation(enable_sensitive_data=True)

    def remove(self) -> None:
        """Restore the framework's observability settings as they were before `install`."""
        settings = self._observability.OBSERVABILITY_SETTINGS
        settings.enable_instrumentation, settings.enable_sensitive_data = self._before
