"""`AgentOpsTracer`: records in Leyden what AgentOps instruments, instead of sending it to AgentOps.

AgentOps's instrumentation and decorators make OpenTelemetry spans, which `OtelTracer` collects like any others.
AgentOps's client, which needs a key and sends to agentops.ai, is never started: while a trace is open,
`agentops.init()` does nothing. AgentOps (extra `agentops`) is imported when the first trace of such a tracer opens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, ClassVar

from opentelemetry import trace as otel_trace

from leyden._lib.extras import require_packages
from leyden.tracing.instrumentation import HTTP_CLIENTS, MODEL_HOSTS, Instrumentation
from leyden.tracing.instrumentation.instrumentation import Patch
from leyden.tracing.otel_tracer import OtelTracer

_LEFT_WRAPPED = (
    ("openai.resources.chat.completions", "Completions", "create"),
    ("openai.resources.chat.completions", "AsyncCompletions", "create"),
    ("openai.resources.responses", "Responses", "create"),
    ("openai.resources.responses", "AsyncResponses", "create"),
    ("anthropic.resources.messages.messages", "Messages", "stream"),
    ("anthropic.resources.messages.messages", "AsyncMessages", "stream"),
)
"""Methods that AgentOps 0.4.21 wraps and does not unwrap. A second block would record each call twice."""


class AgentOpsTracer(OtelTracer):
    """Records the calls that AgentOps's own instrumentation sees, and functions with decorators such as
    `@agentops.operation`.

    No service is called, and no key is needed.
    Raise MissingExtra if `agentops` is not installed.
    """

    def __init__(self, *, model_hosts: Sequence[str] = MODEL_HOSTS) -> None:
        super().__init__(instrumentation=HTTP_CLIENTS, model_hosts=model_hosts)
        require_packages("agentops", extra="agentops", needed_by="AgentOpsTracer")

    def while_open(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(super().while_open())
        stack.enter_context(_AgentOps())
        return stack


class _AgentOps(Instrumentation):
    """Turns AgentOps's instrumentation on while a trace is open, and its client off. If the user has started AgentOps
    themselves, its instrumentation stays as it is.
    """

    modules: ClassVar[tuple[str, ...]] = ("agentops",)

    def __init__(self) -> None:
        self._undo = ExitStack()

    def install(self) -> None:
        instrumentation: Any = importlib.import_module("agentops.instrumentation")
        client: Any = importlib.import_module("agentops.client.client")
        core: Any = instrumentation.tracer
        if not core.initialized:  # its decorators record nothing before
            core.provider, core._initialized = otel_trace.get_tracer_provider(), True
            # so that AgentOps does not shut the provider down when the process exits
            self._undo.callback(lambda: (setattr(core, "provider", None), setattr(core, "_initialized", False)))

        def no_init(self: Any, *args: Any, **kwargs: Any) -> None:
            pass

        init = Patch(client.Client, "init", lambda original: no_init)
        init.apply()
        self._undo.callback(init.undo)
        if not instrumentation._active_instrumentors:
            for module, owner, name in _LEFT_WRAPPED:
                with suppress(ImportError, AttributeError):  # not installed, or another version
                    kind = getattr(importlib.import_module(module), owner)
                    self._undo.callback(setattr, kind, name, vars(kind)[name])
            instrumentation.instrument_all()
            self._undo.callback(instrumentation.uninstrument_all)

    def remove(self) -> None:
        self._undo.close()
