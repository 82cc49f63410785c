"""Emit a reward: one number, or several named ones of which one is primary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leyden._lib.numbers import finite_number
from leyden.agent.emitter.emit import emit_span, with_user_attributes
from leyden.errors import InvalidEmission
from leyden.types import Attributes, Span, SpanEvent, reward_attributes, semconv


def emit_reward(
    reward: float | Mapping[str, float],
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span:
    """Record how well the agent did, and return the span. An algorithm reads the last primary reward of an attempt.

    The span holds the reward in Leyden's attributes, and in one `gen_ai.evaluation.result` event for each name, which
    other OpenTelemetry backends read.

    reward: a finite number (a bool, a NumPy scalar, an array or tensor of one element, too), or finite numbers by name.
    primary_key: the name of the primary reward; needed if there are several names.
    propagate: False makes the span without recording it, and needs no trace.
    Raise InvalidEmission for a value that is no finite number, and for a missing or unknown primary_key. Raise
    NoActiveTrace outside a trace.
    """
    if isinstance(reward, Mapping):
        names = ", ".join(map(repr, reward)) or "none"
        if not reward:
            raise InvalidEmission("the dict of rewards is empty; a reward needs at least one named number")
        if primary_key is None and len(reward) > 1:
            raise InvalidEmission(f"of several rewards one is primary: give primary_key, one of {names}")
        primary = next(iter(reward)) if primary_key is None else primary_key
        if primary not in reward:
            raise InvalidEmission(f"primary_key={primary_key!r} is not among the rewards ({names})")
        named = {primary: reward[primary], **reward}
    elif primary_key is not None:
        raise InvalidEmission(f"primary_key={primary_key!r} is for a dict of rewards, but the reward is {reward!r}")
    else:
        named = {semconv.PRIMARY_REWARD: reward}
    checked: dict[str, float] = {}
    for name, value in named.items():
        if not isinstance(name, str):
            raise InvalidEmission(f"the reward name {name!r} is a {type(name).__name__}; names are strings")
        try:
            checked[name] = finite_number(value)
        except ValueError as error:
            raise InvalidEmission(f"reward {name!r} {error}") from error
    together = with_user_attributes(reward_attributes(checked), attributes)
    events: list[SpanEvent] = []
    for name, value in checked.items():
        score: Attributes = {semconv.GEN_AI_EVALUATION_NAME: name, semconv.GEN_AI_EVALUATION_SCORE: value}
        events.append(SpanEvent(name=semconv.GEN_AI_EVALUATION, attributes=score))
    return emit_span("emit_reward", semconv.REWARD, together, propagate=propagate, events=events)
