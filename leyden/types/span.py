"""Spans: recorded steps inside an attempt, in OpenTelemetry's meaning, and the rewards written in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from leyden import semconv
from leyden.types.tokens import TokenRecord

__all__ = [
    "AttributeValue",
    "Attributes",
    "Span",
    "SpanEvent",
    "SpanStatus",
    "find_final_reward",
    "find_reward_spans",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "reward_attributes",
]

AttributeValue = str | bool | int | float | list[str] | list[bool] | list[int] | list[float]
Attributes = dict[str, AttributeValue]


class SpanStatus(BaseModel):
    """How the step ended."""

    status_code: Literal["UNSET", "OK", "ERROR"] = "UNSET"
    description: str | None = None


class SpanEvent(BaseModel):
    """Something that happened at one moment of a span."""

    name: str
    timestamp: float | None = None
    attributes: Attributes = Field(default_factory=dict[str, AttributeValue])


class Span(BaseModel):
    """One recorded step of an attempt. Times are Unix seconds."""

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(ge=0)
    """The order in which the store's counter was drawn: strictly increasing within an attempt. 0: the store draws it."""
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits, unique within the attempt."""
    parent_id: str | None = None
    name: str
    status: SpanStatus = Field(default_factory=SpanStatus)
    attributes: Attributes = Field(default_factory=dict[str, AttributeValue])
    events: list[SpanEvent] = Field(default_factory=list[SpanEvent])
    start_time: float | None = None
    end_time: float | None = None
    resource: Attributes = Field(default_factory=dict[str, AttributeValue])
    """Attributes of the process that recorded the span."""
    tokens: TokenRecord | None = None
    """The exact tokens of a model call; kept apart from the attributes."""


def reward_attributes(rewards: Mapping[str, float]) -> Attributes:
    """The attributes that say `rewards`, whose first entry is the primary one.

    Raises ValueError for an empty mapping and for a value that is not a finite number.
    """
    if not rewards:
        raise ValueError("a reward needs at least one dimension")
    attributes: Attributes = {}
    for index, (name, value) in enumerate(rewards.items()):
        if not math.isfinite(value):
            raise ValueError(f"reward {name!r} is {value!r}; a reward must be a finite number")
        attributes[f"{semconv.REWARD_PREFIX}.{index}.name"] = name
        attributes[f"{semconv.REWARD_PREFIX}.{index}.value"] = float(value)
    return attributes


def get_rewards_from_span(span: Span) -> dict[str, float]:
    """All reward dimensions of a span by name, the primary one first; empty when it is not a reward span."""
    rewards: dict[str, float] = {}
    index = 0
    while (value := span.attributes.get(f"{semconv.REWARD_PREFIX}.{index}.value")) is not None:
        name = span.attributes.get(f"{semconv.REWARD_PREFIX}.{index}.name", semconv.PRIMARY_REWARD)
        if isinstance(value, int | float):
            rewards[str(name)] = float(value)
        index += 1
    return rewards


def get_reward_value(span: Span) -> float | None:
    """The primary reward of a span, None when it is not a reward span."""
    value: Any = span.attributes.get(f"{semconv.REWARD_PREFIX}.0.value")
    return None if value is None else float(value)


def is_reward_span(span: Span) -> bool:
    """Whether the span carries a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that carry a reward, in the order given."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """The reward of the last reward span, None when there is none."""
    for span in reversed(spans):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None
