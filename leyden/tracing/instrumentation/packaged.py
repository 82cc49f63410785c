"""Use the instrumentations that others maintain: OpenTelemetry's GenAI packages and OpenInference's, which share one
interface. OpenAI's and Anthropic's SDKs and LangChain need nothing else (extras `openai-instrumentation`,
`anthropic-instrumentation` and `langchain`); `frameworks.py` has those that do.

The messages are recorded in the span unless OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says otherwise. A
library that the user has already instrumented with its package is left as it is.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from leyden.tracing.instrumentation.instrumentation import Instrumentation

_WANTED = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
}
"""Environment variables with which the packages record messages in spans, unless the user has set them."""


class PackagedInstrumentation(Instrumentation):
    """An instrumentation by a class that is OpenTelemetry's `BaseInstrumentor`.

    The last of `modules` has the class; the first is the library itself.
    """

    instrumentor: ClassVar[str]
    """The name of the class."""

    def __init__(self) -> None:
        self._ours: Any = None

    def install(self) -> None:
        instrumentor: Any = getattr(importlib.import_module(self.modules[-1]), self.instrumentor)()
        if not instrumentor.is_instrumented_by_opentelemetry:
            added = {name: value for name, value in _WANTED.items() if name not in os.environ}
            os.environ.update(added)
            try:
                instrumentor.instrument()  # reads the variables
            finally:
                for name in added:
                    os.environ.pop(name, None)
            self._ours = instrumentor

    def remove(self) -> None:
        instrumentor, self._ours = self._ours, None
        if instrumentor is not None:
            instrumentor.uninstrument()


class OpenAIInstrumentation(PackagedInstrumentation):
    """Instruments OpenAI's SDK, `openai`."""

    modules: ClassVar[tuple[str, ...]] = ("openai", "opentelemetry.instrumentation.genai.openai")
    instrumentor: ClassVar[str] = "OpenAIInstrumentor"


class AnthropicInstrumentation(PackagedInstrumentation):
    """Instruments Anthropic's SDK, `anthropic`."""

    modules: ClassVar[tuple[str, ...]] = ("anthropic", "opentelemetry.instrumentation.genai.anthropic")
    instrumentor: ClassVar[str] = "AnthropicInstrumentor"


class LangChainInstrumentation(PackagedInstrumentation):
    """Instruments LangChain and LangGraph: agents, tools and the calls of chat models."""

    modules: ClassVar[tuple[str, ...]] = ("langchain_core", "opentelemetry.instrumentation.genai.langchain")
    instrumentor: ClassVar[str] = "LangChainInstrumentor"
