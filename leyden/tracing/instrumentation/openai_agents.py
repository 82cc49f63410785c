"""Instrument OpenAI's Agents SDK: agents and tools, by OpenTelemetry's own package (extra `openai-agents`).

Its model calls are the OpenAI SDK's, which the instrumentation `openai` records. By default the Agents SDK sends its
own traces to OpenAI with the user's key; while a block is open it does not. Processors that the user has added stay.

The SDK shares one HTTP client among all runs, whichever event loop they are in, and `Runner.run_sync` in several
threads then fails with "bound to a different event loop". While a block is open each event loop has a client of its
own.
"""

from __future__ import annotations

import asyncio
import importlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from leyden._lib.patching import Patch
from leyden.tracing.instrumentation.packaged import PackagedInstrumentation


class OpenAIAgentsInstrumentation(PackagedInstrumentation):
    """Instruments OpenAI's Agents SDK, `agents`."""

    modules: ClassVar[tuple[str, ...]] = ("agents", "opentelemetry.instrumentation.genai.openai_agents")
    instrumentor: ClassVar[str] = "OpenAIAgentsInstrumentor"

    def install(self) -> None:
        """Instrument the SDK, remove its exporter to OpenAI, and give each event loop a client."""
        super().install()
        self._client = Patch(importlib.import_module("agents.models.openai_provider"), "shared_http_client", _by_loop)
        self._client.apply()
        exporter, current = _exporter(), _processors()
        self._exporting = exporter in current
        if self._exporting:
            _set_processors([processor for processor in current if processor is not exporter])

    def remove(self) -> None:
        """Restore the SDK: its shared client, and its exporter as the first processor."""
        self._client.undo()
        super().remove()
        exporter, current = _exporter(), _processors()
        if self._exporting and exporter not in current:
            _set_processors([exporter, *current])


def _by_loop(original: Callable[[], Any]) -> Callable[[], Any]:
    """Return a replacement of the SDK's shared HTTP client, with one client for each event loop.

    A client that two loops share fails, because its connections belong to the first.
    """
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
