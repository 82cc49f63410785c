"""Runs of a few attempts whose calls are written down by hand, recorded by the real recorder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.training.runs import RecordedRun, open_run
from leyden.types import Span, SpanStatus, TokenRecord, reward_attributes, semconv

USER = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {}}}}}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(city: str, id: str = "c1") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def result(text: str, id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


@dataclass
class Call:
    """A model call: its prompt, its answers, further attributes of its span."""

    prompt: list[Any]
    answers: list[Any]
    tools: Sequence[Any] = (TOOL,)
    tokens: TokenRecord | None = None
    parent: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class Played:
    """A rollout: its task, the calls of its attempt, its rewards by dimension."""

    task: Any
    calls: list[Call]
    reward: float | None = None
    others: dict[str, float] = field(default_factory=dict[str, float])
    group: str | None = None
    mode: Any = "train"
    status: Any = "succeeded"
    spans: list[Span] = field(default_factory=list[Span])


async def play(store: ly.LightningStore, number: int, one: Played) -> None:
    """Write a rollout named `ro-NUMBER` to the store."""
    rollout_id, attempt_id = f"ro-{number}", f"at-{number}"
    await store.start_rollout(
        one.task,
        one.mode,
        metadata={"step": 1},
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        group_id=one.group,
    )
    made: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": attempt_id, "trace_id": "1" * 32}
    spans = [each.model_copy(update=made) for each in one.spans]
    for index, call in enumerate(one.calls):
        attributes: dict[str, Any] = {
            semconv.GEN_AI_OPERATION: "chat",
            semconv.GEN_AI_REQUEST_MODEL: "policy",
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(call.prompt),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps(call.answers),
            semconv.CALL_INDEX: index,
            **({semconv.GEN_AI_TOOL_DEFINITIONS: json.dumps(call.tools)} if call.tools else {}),
            **call.attributes,
        }
        spans.append(
            Span(
                **made,
                sequence_id=0,
                span_id=f"{index + 1:016x}",
                parent_id=call.parent,
                name=semconv.MODEL_CALL,
                status=SpanStatus(status_code="OK"),
                attributes=attributes,
                start_time=10.0 + index,
                end_time=10.5 + index,
                tokens=call.tokens,
            )
        )
    if one.reward is not None:
        rewards = reward_attributes({semconv.PRIMARY_REWARD: one.reward, **one.others})
        end = {"start_time": 100.0, "end_time": 100.0}
        spans.append(Span(**made, sequence_id=0, span_id="f" * 16, name=semconv.REWARD, attributes=rewards, **end))
    if spans:
        await store.add_many_spans(spans)
    if one.status != "running":
        await store.update_attempt(rollout_id, attempt_id, status=one.status)


def record(folder: Path, played: Sequence[Played]) -> RecordedRun:
    """Record a run of these rollouts."""

    @ly.algo
    async def writes(*, store: ly.LightningStore) -> None:
        for number, one in enumerate(played):
            await play(store, number, one)

    @ly.rollout
    async def unused(task: Any) -> float:
        return 0.0

    ly.Trainer(algorithm=writes, run_dir=folder, progress=False).fit(unused)
    return open_run(folder)
