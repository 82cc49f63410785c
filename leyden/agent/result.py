"""Record the value that an agent returns.

| returned | recorded |
|---|---|
| None | nothing more |
| a finite number, a bool, an array or tensor of one element | the final reward |
| a dict of finite numbers by name | the final rewards; `primary`, or the only one, comes first |
| a Span or a list, of this attempt or made with `propagate=False` | those spans, once each |
| an ended OpenTelemetry span, or a list | those spans, unless they were collected before |

Any other value raises InvalidReturn. The module knows traces and the store's protocol. To allow another kind of value,
add a case to `result_spans`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan

from leyden._lib.numbers import as_number, finite_number
from leyden._lib.text import shown
from leyden.errors import InvalidReturn
from leyden.store.base import LightningStore
from leyden.tracing import LOCAL, Trace, current_trace, from_readable_span
from leyden.types import AttemptedRollout, Span, reward_attributes, semconv

_POSSIBLE = "possible: None, a finite number, a dict of finite numbers by name, a Span, a list of Spans"


async def record_result(result: Any, *, rollout: AttemptedRollout, store: LightningStore) -> list[Span]:
    """Record the value that an agent returned for this attempt, and return the spans that hold it.

    Within the attempt's trace, the spans are added to the trace, which stores them with its others; elsewhere they go
    to the store at once. Raise InvalidReturn for a value that is no result.
    """
    spans = result_spans(result, rollout)
    trace = current_trace()
    if trace is not None and (trace.rollout_id, trace.attempt_id) == (rollout.rollout_id, rollout.attempt.attempt_id):
        there = {span.span_id for span in trace.spans}
        for span in spans:
            if span.span_id not in there:
                trace.add(span)
    elif spans:
        await store.add_many_spans(spans)
    return spans


def result_spans(result: object, rollout: AttemptedRollout) -> list[Span]:
    """Return the spans that record an agent's result. Raise InvalidReturn for other values."""
    if result is None:
        return []
    if isinstance(result, Mapping):
        rewards = cast(Mapping[Any, Any], result)
        if not rewards:
            raise InvalidReturn(f"the agent returned an empty dict; {_POSSIBLE}")
        if len(rewards) > 1 and semconv.PRIMARY_REWARD not in rewards:
            raise InvalidReturn(
                f"the agent returned several rewards ({', '.join(map(repr, rewards))}) and none is called {semconv.PRIMARY_REWARD!r}; "
                "name one so, or call emit_reward(rewards, primary_key=...)"
            )
        primary = semconv.PRIMARY_REWARD if len(rewards) > 1 else next(iter(rewards))
        return [_reward_span({primary: rewards[primary], **rewards}, rollout)]
    if isinstance(result, Span | ReadableSpan):
        return [_own_span(result, rollout)]
    if isinstance(result, list | tuple):
        spans = [_own_span(item, rollout) for item in cast(Sequence[object], result)]
        return list({span.span_id: span for span in spans}.values())
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidReturn("the agent returned a coroutine that was never awaited; define the agent with `async def`")
    try:
        as_number(result)
    except ValueError as error:
        raise InvalidReturn(f"what the agent returned {error}; {_POSSIBLE}") from error
    return [_reward_span({semconv.PRIMARY_REWARD: result}, rollout)]


def _reward_span(rewards: Mapping[Any, Any], rollout: AttemptedRollout) -> Span:
    numbers: dict[str, float] = {}
    for name, value in rewards.items():
        if not isinstance(name, str):
            raise InvalidReturn(f"the agent returned rewards with the name {shown(name)}; names are strings")
        try:
            numbers[name] = finite_number(value)
        except ValueError as error:
            raise InvalidReturn(f"reward {name!r} of the agent {error}") from error
    attributes = reward_attributes(numbers)
    trace = Trace(semconv.REWARD, rollout.rollout_id, rollout.attempt.attempt_id, None)
    span = trace.create_span(semconv.REWARD, attributes)
    span.sequence_id = 0  # the store assigns the next number of the attempt
    return span


def _own_span(span: object, rollout: AttemptedRollout) -> Span:
    """Return a span that an agent returned as a span of its attempt. A span that belongs to no attempt yet gets the
    attempt's ids. Raise InvalidReturn for a span of another attempt, and for a value that is no span.
    """
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    if isinstance(span, ReadableSpan):
        return from_readable_span(span, rollout_id, attempt_id)
    if not isinstance(span, Span):
        raise InvalidReturn(f"the agent returned a list with {shown(span)}; {_POSSIBLE}")
    if span.rollout_id == span.attempt_id == LOCAL:  # made with propagate=False: it belongs to no attempt yet
        return span.model_copy(update={"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": 0})
    if (span.rollout_id, span.attempt_id) != (rollout_id, attempt_id):
        raise InvalidReturn(
            f"the agent returned span {span.name!r} of attempt {span.attempt_id!r} of rollout {span.rollout_id!r}, but this is "
            f"attempt {attempt_id!r} of rollout {rollout_id!r}; return spans of this attempt only"
        )
    return span
