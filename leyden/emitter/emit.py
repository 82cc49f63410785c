"""One function for each kind of thing an agent may say, and the readers of what it said."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any

from leyden import semconv
from leyden.errors import ConfigError, NoActiveTrace
from leyden.tracer import current_trace
from leyden.types import Attributes, Span, SpanStatus, reward_attributes

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "get_message_value",
    "get_object_value",
]


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Attributes | None = None,
    propagate: bool = True,
) -> None:
    """Say how well it went; the last reward of an attempt is its final one.

    reward: a finite number, or several by name.
    primary_key: which of several is the reward that algorithms use; needed with a mapping, refused without.
    propagate: raise NoActiveTrace outside a trace; False: do nothing there.
    Raises ConfigError for anything that is not a finite number, and for a missing or unknown primary_key.
    """
    if isinstance(reward, Mapping):
        if primary_key is None or primary_key not in reward:
            raise ConfigError(
                f"primary_key is {primary_key!r}; with several rewards it must be one of {sorted(reward)}"
            )
        rewards = {primary_key: reward[primary_key]} | dict(reward)
    elif primary_key is not None:
        raise ConfigError(
            f"primary_key={primary_key!r} is for several rewards by name; got the single reward {reward!r}"
        )
    else:
        rewards = {semconv.PRIMARY_REWARD: reward}
    for name, value in rewards.items():
        if not isinstance(value, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] -- agents are not type-checked
            raise ConfigError(f"reward {name!r} is {value!r}, a {type(value).__name__}; it must be a number")
    try:
        described = reward_attributes(rewards)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _emit(semconv.REWARD, described | (attributes or {}), propagate=propagate)


def emit_message(message: str, *, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Leave a line of text in the record."""
    _emit(semconv.MESSAGE, {semconv.MESSAGE_BODY: message} | (attributes or {}), propagate=propagate)


def emit_object(value: Any, *, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Leave any JSON value in the record. Raises ConfigError for what JSON cannot say."""
    described: Attributes = {semconv.OBJECT_TYPE: type(value).__qualname__}
    if isinstance(value, str | bool | int | float):
        described[semconv.OBJECT_LITERAL] = value
    else:
        try:
            described[semconv.OBJECT_JSON] = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"emit_object takes JSON values; {type(value).__name__} is none: {error}") from None
    _emit(semconv.OBJECT, described | (attributes or {}), propagate=propagate)


def emit_annotation(annotation: Attributes, *, propagate: bool = True) -> None:
    """Leave attributes of your own in the record."""
    _emit(semconv.ANNOTATION, dict(annotation), propagate=propagate)


def emit_exception(error: BaseException, *, attributes: Attributes | None = None, propagate: bool = True) -> None:
    """Leave an exception with its traceback in the record; it is not raised."""
    described: Attributes = {
        semconv.EXCEPTION_TYPE: type(error).__qualname__,
        semconv.EXCEPTION_MESSAGE: str(error),
        semconv.EXCEPTION_STACKTRACE: "".join(traceback.format_exception(error)),
    }
    status = SpanStatus(status_code="ERROR", description=f"{type(error).__name__}: {error}")
    _emit(semconv.EXCEPTION, described | (attributes or {}), propagate=propagate, status=status)


def _emit(name: str, attributes: Attributes, *, propagate: bool, status: SpanStatus | None = None) -> None:
    trace = current_trace.get()
    if trace is not None:
        trace.tracer.create_span(name, attributes, status=status)
    elif propagate:
        raise NoActiveTrace(
            f"{name} was emitted outside any trace, so there is no attempt that it could belong to; "
            "call it from an agent that a runner runs, inside tracer.trace_context(), or with propagate=False"
        )


def get_message_value(span: Span) -> str | None:
    """The text of a message span; None for any other."""
    body = span.attributes.get(semconv.MESSAGE_BODY)
    return None if body is None else str(body)


def get_object_value(span: Span) -> Any:
    """The value of an object span; None for any other."""
    if (text := span.attributes.get(semconv.OBJECT_JSON)) is not None:
        return json.loads(str(text))
    return span.attributes.get(semconv.OBJECT_LITERAL)
