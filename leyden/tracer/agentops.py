"""`AgentOpsTracer`: what AgentOps instruments, recorded here instead of at AgentOps.

AgentOps's instrumentation and decorators make OpenTelemetry spans, which are collected as
`OtelTracer` collects any. Its client, which asks for a key and sends to agentops.ai, is never
started: while a trace is open `agentops.init()` does nothing. AgentOps is looked for when a tracer
is made, and not imported otherwise (extra `agentops`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

from opentelemetry import trace as otel_trace

from leyden.extras import require_packages
from leyden.instrumentation import HTTP_CLIENTS, MODEL_HOSTS, Instrumentation
from leyden.tracer.otel import OtelTracer
from leyden.utils.patching import Patch

_LEFT_WRAPPED = (
    ("openai.resources.chat.completions", "Completions", "create"),
    ("openai.resources.chat.completions", "AsyncCompletions", "create"),
    ("openai.resources.responses", "Responses", "create"),
    ("openai.resources.responses", "AsyncResponses", "create"),
    ("anthropic.resources.messages.messages", "Messages", "stream"),
    ("anthropic.resources.messages.messages", "AsyncMessages", "stream"),
)
"""Methods that AgentOps 0.4.21 wraps and does not unwrap.

A second block would record each call twice."""


class AgentOpsTracer(OtelTracer):
    """Records what AgentOps's own instrumentation sees, and `@agentops.operation` and its like.

    No service is called, and no key is needed.
    Raise ConfigError where `agentops` is not installed.
    """

    def __init__(self, *, model_hosts: Sequence[str] = MODEL_HOSTS) -> None:
        super().__init__(instrumentation=HTTP_CLIENTS, model_hosts=model_hosts)
        require_packages("agentops", extra="agentops", needed_by="AgentOpsTracer")

    def while_open(self) -> AbstractContextManager[object]:
        """Return a context around each trace, in which AgentOps's own spans reach it too."""
        stack = ExitStack()
        stack.enter_context(super().while_open())
        stack.enter_context(_AgentOps())
        return stack


class _AgentOps(Instrumentation):
    """Record AgentOps's spans while a trace is open, unless the user has started AgentOps
    themselves.
    """

    modules: ClassVar[tuple[str, ...]] = ("agentops",)

    def __init__(self) -> None:
        self._undo = ExitStack()

    def install(self) -> None:
        """Replace AgentOps's client."""
        instrumentation: Any = importlib.import_module("agentops.instrumentation")
        client: Any = importlib.import_module("agentops.client.client")
        core: Any = instrumentation.tracer
        if not core.initialized:  # its decorators record nothing before
            core.provider, core._initialized = otel_trace.get_tracer_provider(), True
            self._undo.callback(_reset, core)
        init = Patch(client.Client, "init", _does_nothing)
        init.apply()
        self._undo.callback(init.undo)
        if not instrumentation._active_instrumentors:
            for owner, name in _left_wrapped():
                self._undo.callback(setattr, owner, name, vars(owner)[name])
            instrumentation.instrument_all()
            self._undo.callback(instrumentation.uninstrument_all)

    def remove(self) -> None:
        """Restore AgentOps's client."""
        self._undo.close()


def _left_wrapped() -> Iterator[tuple[Any, str]]:
    """Yield the classes and methods of `_LEFT_WRAPPED` that are installed here."""
    for module, owner, name in _LEFT_WRAPPED:
        try:
            yield getattr(importlib.import_module(module), owner), name
        except (ImportError, AttributeError):  # not installed, or another version
            continue


def _reset(core: Any) -> None:
    core.provider, core._initialized = None, False  # or it would shut the provider down as the process ends


def _does_nothing(original: Callable[..., Any]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        """Replace the `init` of AgentOps's client while a trace of Leyden is open."""

    return init
