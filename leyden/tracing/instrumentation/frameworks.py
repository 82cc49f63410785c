"""Instrument agent frameworks that need more than a package: OpenAI's Agents SDK, Microsoft's Agent Framework, AutoGen
and CrewAI (extras `openai-agents`, `autogen`, `crewai`). Each is imported only when it is instrumented.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from leyden.tracing.instrumentation.instrumentation import Instrumentation, Patch
from leyden.tracing.instrumentation.packaged import PackagedInstrumentation

_NO_TELEMETRY = "CREWAI_DISABLE_TELEMETRY"
_FLUSH_SECONDS = 5.0
"""How long to wait for the handlers of CrewAI's events."""


class OpenAIAgentsInstrumentation(PackagedInstrumentation):
    """Instruments OpenAI's Agents SDK, `agents`: agents and tools, by OpenTelemetry's package.

    Its model calls are the OpenAI SDK's, which the instrumentation `openai` records. By default the SDK sends its own
    traces to OpenAI with the user's key; while a block is open it does not. Processors that the user has added stay.

    The SDK shares one HTTP client among all runs, whichever event loop they are in, and `Runner.run_sync` in several
    threads then fails with "bound to a different event loop". While a block is open each event loop has its own client.
    """

    modules: ClassVar[tuple[str, ...]] = ("agents", "opentelemetry.instrumentation.genai.openai_agents")
    instrumentor: ClassVar[str] = "OpenAIAgentsInstrumentor"

    def install(self) -> None:
        super().install()
        self._client = Patch(importlib.import_module("agents.models.openai_provider"), "shared_http_client", _by_loop)
        self._client.apply()
        exporter, current = _exporter(), _processors()
        self._exporting = exporter in current
        if self._exporting:
            _set_processors([processor for processor in current if processor is not exporter])

    def remove(self) -> None:
        self._client.undo()
        super().remove()
        exporter, current = _exporter(), _processors()
        if self._exporting and exporter not in current:
            _set_processors([exporter, *current])


def _by_loop(original: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replacement of the SDK's shared HTTP client, with one client for each event loop."""
    clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def shared_http_client() -> Any:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return original()
        client = clients.get(loop)
        if client is None:
            client = clients[loop] = type(original())()
        return client

    return shared_http_client


def _exporter() -> Any:
    processors: Any = importlib.import_module("agents.tracing.processors")
    return processors.default_processor()


def _processors() -> tuple[Any, ...]:
    tracing: Any = importlib.import_module("agents.tracing")
    return tracing.get_trace_provider()._multi_processor._processors  # it has no public name


def _set_processors(processors: list[Any]) -> None:
    tracing: Any = importlib.import_module("agents.tracing")
    tracing.set_trace_processors(processors)


class AgentFrameworkInstrumentation(Instrumentation):
    """Instruments Microsoft's `agent_framework` by switching on its own spans: agents, tools, workflows, and model
    calls with their messages.

    A call of `disable_instrumentation()` by the user stays in force.
    """

    modules: ClassVar[tuple[str, ...]] = ("agent_framework",)

    def install(self) -> None:
        self._observability: Any = importlib.import_module("agent_framework.observability")
        settings = self._observability.OBSERVABILITY_SETTINGS
        self._before: tuple[bool, bool] = settings.enable_instrumentation, settings.enable_sensitive_data
        self._observability.enable_instrumentation(enable_sensitive_data=True)

    def remove(self) -> None:
        settings = self._observability.OBSERVABILITY_SETTINGS
        settings.enable_instrumentation, settings.enable_sensitive_data = self._before


class AutoGenInstrumentation(PackagedInstrumentation):
    """Instruments `autogen_agentchat`, by OpenInference's package: agents, teams, tools, its OpenAI client's calls."""

    modules: ClassVar[tuple[str, ...]] = ("autogen_agentchat", "openinference.instrumentation.autogen_agentchat")
    instrumentor: ClassVar[str] = "AutogenAgentChatInstrumentor"


class CrewAIInstrumentation(PackagedInstrumentation):
    """Instruments `crewai`, by OpenInference's package: crews, tasks, agents and tools.

    The calls of its OpenAI client are the OpenAI SDK's, which the instrumentation `openai` records. CrewAI sends
    telemetry to its makers unless an environment variable forbids it. While a block is open, the variable is set.
    """

    modules: ClassVar[tuple[str, ...]] = ("crewai", "openinference.instrumentation.crewai")
    instrumentor: ClassVar[str] = "CrewAIInstrumentor"

    def install(self) -> None:
        self._telemetry = os.environ.get(_NO_TELEMETRY)
        os.environ[_NO_TELEMETRY] = "true"  # CrewAI reads it before each report
        super().install()

    def remove(self) -> None:
        super().remove()
        # Threads of CrewAI handle the block's events, the telemetry among them, after the agent has ended.
        bus: Any = importlib.import_module("crewai.events.event_bus").crewai_event_bus
        if hasattr(bus, "flush"):
            bus.flush(timeout=_FLUSH_SECONDS)
        if self._telemetry is None:
            os.environ.pop(_NO_TELEMETRY, None)
        else:
            os.environ[_NO_TELEMETRY] = self._telemetry
