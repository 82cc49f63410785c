"""Instrument OpenAI's and Anthropic's SDKs and LangChain by OpenTelemetry's own packages: a call is a span with
messages, usage and response id.

The extras `openai-instrumentation`, `anthropic-instrumentation` and `langchain` bring the packages.
"""

from __future__ import annotations

from typing import ClassVar

from leyden.tracing.instrumentation.packaged import PackagedInstrumentation


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
