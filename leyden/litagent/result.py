"""What an agent may return, written into its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan

from leyden.emitter import emit_reward
from leyden.errors import InvalidReturn
from leyden.tracer import AttemptTrace, current_trace
from leyden.tracer.otel import span_from_otel
from leyden.types import Span

__all__ = ["record_result"]

_POSSIBLE = "return None, a number, a dict of numbers, or a list of spans"


def record_result(result: Any) -> None:
    """Record an agent's return value in the current trace.

    None: the trace speaks for itself. A finite number (or bool): the reward. A dict of them: several, the first is the primary one. A
    list of Leyden's or OpenTelemetry's spans: recorded as they are. Raises InvalidReturn for anything else, and for NaN and infinity.
    """
    trace = current_trace.get()
    if result is None or trace is None:
        return
    if isinstance(result, int | float):
        emit_reward(_finite(result))
    elif isinstance(result, Mapping) and result:
        rewards = {str(name): _finite(value) for name, value in cast(Mapping[Any, Any], result).items()}
        emit_reward(rewards, primary_key=next(iter(rewards)))
    elif isinstance(result, Sequence) and not isinstance(result, str | bytes):
        for item in cast(Sequence[Any], result):
            trace.add(_span(item, trace))
    else:
        raise InvalidReturn(f"the agent returned {_shown(result)}; {_POSSIBLE}")


def _finite(value: Any) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise InvalidReturn(f"the agent returned the reward {_shown(value)}; a reward must be a finite number")


def _span(item: Any, trace: AttemptTrace) -> Span:
    if isinstance(item, ReadableSpan):
        return span_from_otel(item, trace.rollout_id, trace.attempt_id)
    if isinstance(item, Span):
        return item.model_copy(
            update={"rollout_id": trace.rollout_id, "attempt_id": trace.attempt_id, "sequence_id": 0}
        )
    raise InvalidReturn(f"the agent returned a list with {_shown(item)}; {_POSSIBLE}")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} ({type(value).__name__})"
