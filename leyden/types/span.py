"""Spans: recorded steps inside an attempt (OpenTelemetry's meaning), and the rewards in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from leyden._lib.numbers import finite_number
from leyden.types import semconv
from leyden.types.tokens import TokenRecord


class _TextFirst:
    """A schema of attribute values that tries text first.

    Nearly all values are text, and for JSON pydantic would try every kind of a union. A value of no kind gives one
    error here; pydantic gives one for each kind and element, so that a small body of nonsense would make gigabytes of
    errors.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds: Any = handler(source)
        for kind in kinds["choices"]:
            if kind["type"] == "list":
                kind["fail_fast"] = True  # report a list's first fault only
        text, *others = kinds["choices"]
        either = core_schema.union_schema([text, kinds | {"choices": others}], mode="left_to_right")
        message = "Input should be a string, a boolean, a number, or a list of one of these"
        return core_schema.custom_error_schema(either, "attribute_value", custom_error_message=message)


AttributeValue = Annotated[str | bool | int | float | list[str] | list[bool] | list[int] | list[float], _TextFirst()]
Attributes = dict[str, AttributeValue]
SpanKind = Literal["INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"]
"""OpenTelemetry's kinds: which side of which call the step is."""


_ENUM_NAMES = frozenset((*get_args(SpanKind), "UNSET", "OK", "ERROR"))


def enum_name(value: object) -> object:
    """Return the name of a span's kind or status code as Leyden writes it, such as "CLIENT", from OpenTelemetry's other
    spellings: its enum, "SpanKind.CLIENT", "SPAN_KIND_CLIENT" and lower case. Any other value is returned as it is:
    numbers mean different kinds in OTLP and in Python.
    """
    if type(value) is str and value in _ENUM_NAMES:
        return value
    if isinstance(value, Enum):
        value = value.name
    if not isinstance(value, str):
        return value
    return value.rpartition(".")[2].upper().removeprefix("SPAN_KIND_").removeprefix("STATUS_CODE_")


def _existing_parent(span_id: str | None) -> str | None:
    return None if span_id in ("", "0" * 16) else span_id


class SpanStatus(BaseModel):
    """The status with which the step ended. It never changes, so that spans may share one."""

    model_config = ConfigDict(frozen=True)

    status_code: Annotated[Literal["UNSET", "OK", "ERROR"], BeforeValidator(enum_name)] = "UNSET"
    description: str | None = None


class SpanEvent(BaseModel):
    """Something that happened at one moment of a span."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    name: str
    timestamp: float | None = None
    attributes: Attributes = Field(default_factory=dict[str, AttributeValue])


class Span(BaseModel):
    """One recorded step of an attempt. Times are Unix seconds."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(ge=0)
    """The span's number within its attempt, from the store's counter, which only increases. 0: the
    store assigns one."""
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits, unique within the attempt."""
    parent_id: Annotated[str | None, AfterValidator(_existing_parent)] = None
    """The parent's span id; None for a root. Some exporters write zeros, which name no span."""
    name: str
    kind: Annotated[SpanKind, BeforeValidator(enum_name)] = "INTERNAL"
    status: SpanStatus = Field(default_factory=SpanStatus)
    attributes: Attributes = Field(default_factory=dict[str, AttributeValue])
    events: list[SpanEvent] = Field(default_factory=list[SpanEvent], fail_fast=True)
    start_time: float | None = None
    end_time: float | None = None
    resource: Attributes = Field(default_factory=dict[str, AttributeValue])
    """Attributes of the process that recorded the span."""
    tokens: TokenRecord | None = None
    """The exact tokens of a model call; kept apart from the attributes."""


def reward_attributes(rewards: Mapping[str, float]) -> Attributes:
    """Return the attributes that record `rewards`, whose first entry is the primary one.

    Raise ValueError for an empty mapping and for a value that is not a finite number.
    """
    if not rewards:
        raise ValueError("a reward needs at least one dimension")
    attributes: Attributes = {}
    for index, (name, value) in enumerate(rewards.items()):
        try:
            number = finite_number(value)
        except ValueError as error:
            raise ValueError(f"reward {name!r} {error}") from error
        attributes[f"{semconv.REWARD_PREFIX}.{index}.name"] = name
        attributes[f"{semconv.REWARD_PREFIX}.{index}.value"] = number
    return attributes


def get_rewards_from_span(span: Span) -> dict[str, float]:
    """Return the rewards of a span by dimension, the primary one first; empty without any.

    Agent Lightning's forms are read, too: `agentlightning.reward.*`, the annotation of its version 0.2, and the
    attributes that its `@reward` left for AgentOps. A value that is no finite number is no reward.
    """
    for prefix in (semconv.REWARD_PREFIX, semconv.AGL_REWARD):
        if f"{prefix}.0.value" in span.attributes:
            return _dimensions(span.attributes, prefix)
    value = _legacy_reward(span)
    return {} if value is None else {semconv.PRIMARY_REWARD: value}


def get_reward_value(span: Span) -> float | None:
    """Return the primary reward of a span, in Leyden's form or one of Agent Lightning's; None without a reward."""
    attributes = span.attributes
    value = attributes.get(_REWARD)
    if value is None:
        value = attributes.get(_AGL_REWARD)
    if value is not None:
        return _number(value)
    if span.name == semconv.AGL_ANNOTATION or _AGENTOPS_TASK in attributes or _AGENTOPS_ENTITY in attributes:
        return _legacy_reward(span)
    return None  # the common case, because the store calls this for each span


def get_known_prefix(span: Span) -> tuple[str, int] | None:
    """Return the span id of the earlier call that a prompt continues, and for how many ids.

    The gateway found the pair, or another recorder claims it: compare the ids before you use it. None if the span names
    no call, or the number is not a positive integer.
    """
    span_id, n_ids = span.attributes.get(semconv.GOES_ON_FROM), span.attributes.get(semconv.KNOWN_PREFIX)
    if not isinstance(span_id, str) or not isinstance(n_ids, int) or isinstance(n_ids, bool) or n_ids < 1:
        return None
    return span_id, n_ids


def _dimensions(attributes: Attributes, prefix: str) -> dict[str, float]:
    """Return the finite rewards below `prefix`, by name. A reward without a name is the primary one."""
    rewards: dict[str, float] = {}
    index = 0
    while (value := attributes.get(f"{prefix}.{index}.value")) is not None:
        name = attributes.get(f"{prefix}.{index}.name", semconv.PRIMARY_REWARD)
        if (number := _number(value)) is not None:
            rewards[str(name)] = number
        index += 1
    return rewards


def _legacy_reward(span: Span) -> float | None:
    """Return the reward in a span of Agent Lightning or AgentOps, None if it holds none."""
    if span.name == semconv.AGL_ANNOTATION:
        return _number(span.attributes.get("reward"))
    for key in (_AGENTOPS_TASK, _AGENTOPS_ENTITY):
        output = span.attributes.get(key)
        if isinstance(output, str) and '"reward"' in output:
            try:
                parsed = json.loads(output)
            except ValueError:
                continue
            if isinstance(parsed, dict) and cast(dict[str, Any], parsed).get("type") == "reward":
                return _number(cast(dict[str, Any], parsed).get("value"))
    return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


_REWARD, _AGL_REWARD = f"{semconv.REWARD_PREFIX}.0.value", f"{semconv.AGL_REWARD}.0.value"
_AGENTOPS_TASK, _AGENTOPS_ENTITY = "agentops.task.output", "agentops.entity.output"


def is_reward_span(span: Span) -> bool:
    """Return whether the span carries a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that carry a reward, in the given order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the reward of the last reward span; None if there is none."""
    for span in reversed(spans):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None
