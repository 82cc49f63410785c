"""Instrument AutoGen and CrewAI by OpenInference's packages (extras `autogen` and `crewai`).

CrewAI sends telemetry to its makers unless an environment variable forbids it. While a block is open, the variable is
set.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from leyden.tracing.instrumentation.packaged import PackagedInstrumentation


class AutoGenInstrumentation(PackagedInstrumentation):
    """Instruments `autogen_agentchat`: agents, teams, tools, and the calls of its OpenAI client."""

    modules: ClassVar[tuple[str, ...]] = ("autogen_agentchat", "openinference.instrumentation.autogen_agentchat")
    instrumentor: ClassVar[str] = "AutogenAgentChatInstrumentor"


class CrewAIInstrumentation(PackagedInstrumentation):
    """Instruments `crewai`: crews, tasks, agents and tools.

    The calls of its OpenAI client are the OpenAI SDK's, which the instrumentation `openai` records.
    """

    modules: ClassVar[tuple[str, ...]] = ("crewai", "openinference.instrumentation.crewai")
    instrumentor: ClassVar[str] = "CrewAIInstrumentor"

    def install(self) -> None:
        """Instrument the library, and stop CrewAI from sending telemetry of its own."""
        self._telemetry = os.environ.get(_NO_TELEMETRY)
        os.environ[_NO_TELEMETRY] = "true"  # CrewAI reads it before each report
        super().install()

    def remove(self) -> None:
        """Restore CrewAI and the user's telemetry setting, after CrewAI has handled the block's events.

        Threads of CrewAI handle these events, the telemetry among them, after the agent has ended.
        """
        super().remove()
        bus: Any = importlib.import_module("crewai.events.event_bus").crewai_event_bus
        if hasattr(bus, "flush"):
            bus.flush(timeout=_FLUSH_SECONDS)
        if self._telemetry is None:
            os.environ.pop(_NO_TELEMETRY, None)
        else:
            os.environ[_NO_TELEMETRY] = self._telemetry


_NO_TELEMETRY = "CREWAI_DISABLE_TELEMETRY"
_FLUSH_SECONDS = 5.0
"""How long to wait for the handlers of CrewAI's events."""
