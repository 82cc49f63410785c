"""Spans as the gateway and instrumentations write them, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leyden.types import Span, SpanStatus, TokenRecord, reward_attributes, semconv

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> list[Span]:
    lines = json.loads((RECORDED / f"{name}.json").read_text())
    return [Span(rollout_id="ro-1", attempt_id="at-1", **line) for line in lines]


def span(
    name: str,
    start: float,
    end: float | None = None,
    *,
    id: int,
    parent: int | None = None,
    error: bool = False,
    tokens: TokenRecord | None = None,
    **attributes: Any,
) -> Span:
    """A span whose id is a small number; the keyword arguments are attributes, `__` in their names is a dot."""
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=id,
        trace_id="0" * 32,
        span_id=f"{id:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        name=name,
        status=SpanStatus(status_code="ERROR" if error else "OK"),
        start_time=start,
        end_time=start if end is None else end,
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
        tokens=tokens,
    )


def say(text: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def gateway_call(
    start: float,
    end: float,
    *,
    id: int,
    prompt: list[int],
    response: list[int],
    response_id: str | None = None,
    asked: str = "?",
    answered: str = "!",
    index: int | None = None,
    **more: Any,
) -> Span:
    """As `gateway/record.py` writes it."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps(say(asked)),
        "gen_ai.output.messages": json.dumps(say(answered, "assistant")),
    }
    if response_id is not None:
        attributes["gen_ai.response.id"] = response_id
    if index is not None:
        attributes[semconv.CALL_INDEX] = index
    tokens = TokenRecord(prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))
    return span(semconv.MODEL_CALL, start, end, id=id, tokens=tokens, **attributes, **more)


def sdk_call(
    start: float,
    end: float,
    *,
    id: int,
    asked: str = "?",
    answered: str = "!",
    response_id: str | None = None,
    **more: Any,
) -> Span:
    """As OpenTelemetry's conventions have it today."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": asked}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": answered}]}]),
    }
    if response_id is not None:
        attributes["gen_ai.response.id"] = response_id
    return span("chat model", start, end, id=id, **attributes, **more)


def framework_call(start: float, end: float, *, id: int, asked: str = "?", answered: str = "!", **more: Any) -> Span:
    """As OpenInference writes it for a framework: no response id."""
    attributes: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": asked,
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": answered,
    }
    return span("ChatModel", start, end, id=id, **attributes, **more)


def agent(name: str, start: float, end: float, *, id: int, **more: Any) -> Span:
    attributes: dict[str, Any] = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return span(f"invoke_agent {name}", start, end, id=id, **attributes, **more)


def reward(value: float, at: float, *, id: int, **more: Any) -> Span:
    return span(semconv.REWARD, at, id=id, **reward_attributes({"primary": value}), **more)
