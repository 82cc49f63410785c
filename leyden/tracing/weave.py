"""`WeaveTracer`: records in Leyden what Weave's ops and integrations trace, instead of sending it to Weights & Biases.

While a trace is open, Weave's client, which needs an account and a server, is replaced by one that makes a span of each
call. Functions that need the server (`weave.publish`, datasets, feedback) raise. Weave (extra `weave`) is imported only
if a `WeaveTracer` is made.

Weave reports to Sentry when it is imported, unless WANDB_ERROR_REPORTING is `false`. The tracer sets this variable
before it imports Weave. A program that imports Weave earlier must set it itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar, cast
from uuid import uuid4

from leyden._lib.extras import require_packages
from leyden._lib.text import as_json
from leyden.tracing.current import current_trace
from leyden.tracing.instrumentation import HTTP_CLIENTS, MODEL_HOSTS, Instrumentation
from leyden.tracing.otel_tracer import OtelTracer
from leyden.tracing.trace import OpenSpan
from leyden.types import semconv

_INTEGRATIONS = {
    "openai": ("weave.integrations.openai.openai_sdk", "get_openai_patcher"),
    "anthropic": ("weave.integrations.anthropic.anthropic_sdk", "get_anthropic_patcher"),
}
"""The module of an integration, and the function that gives its patcher."""


class WeaveTracer(OtelTracer):
    """Records calls of `@weave.op` and of Weave's integrations for openai and anthropic.

    No service is called, and no key is needed.
    Raise MissingExtra if `weave` is not installed.
    """

    def __init__(self, *, model_hosts: Sequence[str] = MODEL_HOSTS) -> None:
        super().__init__(instrumentation=HTTP_CLIENTS, model_hosts=model_hosts)
        require_packages("weave", extra="weave", needed_by="WeaveTracer")
        _import_quietly("weave")

    def while_open(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(super().while_open())
        stack.enter_context(_Weave())
        return stack


class _Weave(Instrumentation):
    """Replaces Weave's client while a trace is open, and patches its integrations. Afterwards the user's own client is
    restored. An integration that the user has patched stays patched.
    """

    modules: ClassVar[tuple[str, ...]] = ("weave",)

    def __init__(self) -> None:
        self._undo = ExitStack()

    def install(self) -> None:
        context: Any = _import_quietly("weave.trace.context.weave_client_context")
        before = context.get_weave_client()
        _set_client(context, _Client())
        self._undo.callback(_set_client, context, before)
        patched: Any = importlib.import_module("weave.integrations.patch")._PATCHED_INTEGRATIONS
        for name, (module, getter) in _INTEGRATIONS.items():
            if name not in patched:
                patcher = getattr(importlib.import_module(module), getter)()
                patcher.attempt_patch()
                self._undo.callback(patcher.undo_patch)

    def remove(self) -> None:
        self._undo.close()


def _import_quietly(module: str) -> Any:
    """Import a module of Weave without a report to Sentry."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return importlib.import_module(module)


def _set_client(context: Any, client: Any) -> None:
    context.set_weave_client_global(None)  # Weave refuses a client while it has another one
    context.set_weave_client_global(client)


class _Client:
    """Replaces Weave's client: has the methods that ops call, and records each call as a step of the current trace."""

    project_id = entity = project = "leyden"

    def __init__(self) -> None:
        self._call: Any = importlib.import_module("weave.trace.call")
        self._context: Any = importlib.import_module("weave.trace.context.call_context")
        self._open: dict[str, tuple[AbstractContextManager[OpenSpan], OpenSpan]] = {}
        """The steps of calls under way."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Weave's client has no {name!r} under a WeaveTracer: calls are recorded in the attempt, and nothing is sent to Weave"
        )

    def create_call(
        self,
        op: Any,
        inputs: Mapping[str, Any],
        parent: Any = None,
        attributes: Mapping[str, Any] | None = None,
        display_name: Any = None,
        *,
        use_stack: bool = True,
        _call_id_override: str | None = None,
        **_: Any,
    ) -> Any:
        """Begin a call of an op: open a step of the current trace, if there is one."""
        parent = parent or self._context.get_current_call()
        call_id = _call_id_override or str(uuid4())
        name = op if isinstance(op, str) else str(op.name)
        call = self._call.Call(
            _op_name=name,
            trace_id=parent.trace_id if parent else call_id,
            project_id=self.project_id,
            parent_id=parent.id if parent else None,
            id=call_id,
            inputs=dict(inputs),
            attributes=dict(attributes or {}),
        )
        trace = current_trace()
        if trace is not None:
            # without `self`, because a client's attributes may hold its API key
            given = {key: value for key, value in inputs.items() if key != "self"}
            arguments = as_json(given, default=_plain)
            step = trace.operation(name, {semconv.OPERATION_NAME: name, semconv.OPERATION_INPUT: arguments})
            self._open[call_id] = step, step.__enter__()
        if use_stack:
            self._context.push_call(call)
        return call

    def finish_call(
        self, call: Any, output: Any = None, exception: BaseException | None = None, *, op: Any = None, **_: Any
    ) -> None:
        """End a call: record it with its output or its exception."""
        call.output = output
        call.exception = None if exception is None else repr(exception)
        opened = self._open.pop(call.id, None)
        if opened is not None:
            step, span = opened
            if exception is None:
                span.set({semconv.OPERATION_OUTPUT: as_json(output, default=_plain), **_response_attributes(output)})
            else:
                span.fail(exception)
            step.__exit__(None, None, None)
        self._context.pop_call(call.id)

    def fail_call(self, call: Any, exception: BaseException) -> None:
        self.finish_call(call, exception=exception)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) and not isinstance(value, type) else repr(value)


def _response_attributes(output: Any) -> dict[str, str | int]:
    """Return the attributes that match a model's answer with the gateway's record of it; none for other outputs."""
    fields: Any = _plain(output) if hasattr(output, "model_dump") else output
    if not isinstance(fields, dict):
        return {}
    answer = cast(dict[str, Any], fields)
    usage: dict[str, Any] = answer.get("usage") or {}
    found: dict[str, Any] = {
        semconv.GEN_AI_RESPONSE_ID: answer.get("id"),
        semconv.GEN_AI_RESPONSE_MODEL: answer.get("model"),
        semconv.GEN_AI_INPUT_TOKENS: usage.get("prompt_tokens", usage.get("input_tokens")),
        semconv.GEN_AI_OUTPUT_TOKENS: usage.get("completion_tokens", usage.get("output_tokens")),
    }
    return {key: value for key, value in found.items() if isinstance(value, str | int)}
