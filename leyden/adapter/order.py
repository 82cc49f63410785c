"""Sort the spans of one attempt by the start of their steps, although two machines timed them.

The agent's process times its own spans. The gateway times the model calls that it records, with a clock that may be
seconds off. Rewards and other steps are compared with calls by time, so the gateway's times are first converted to the
agent's clock:

1. An instrumented HTTP client records when it sent a call (`leyden.sent_time`, by the agent's
clock). The start that the gateway recorded is later by the offset of the two clocks plus the time
on the network, so the smallest difference of the attempt comes closest to the offset.
2. Other clients record no time. Their calls keep the gateway's times, unless the order in which the
store received the spans (`sequence_id`) contradicts them: a call reaches the store within moments
of its end. Then each call is placed between the spans that arrived before it and after it.

Spans of other processes and machines keep their own times, because nothing says what their clocks showed. So do all
spans of a trace that no store has numbered (`sequence_id` 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from leyden.types import Span, semconv

_DELIVERY_SECONDS = 0.5
"""A span reaches the store within this time after its end. Runners deliver after 0.2 s, the gateway after 0.01 s."""


def in_order(spans: Sequence[Span]) -> list[Span]:
    """Return the spans sorted by their start on the agent's clock, the earliest of each span id."""
    first: dict[str, Span] = {}
    for span in sorted(on_agents_clock(spans), key=moment):
        first.setdefault(span.span_id, span)
    return list(first.values())


def moment(span: Span) -> tuple[float, int, str]:
    """Return the key that sorts spans by their start; equal starts by sequence id, then by span id."""
    return (span.start_time or 0.0, span.sequence_id, span.span_id)


def on_agents_clock(spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans with the gateway's times converted to the agent's clock. Spans that change are copied."""
    recorded = [span for span in spans if span.name == semconv.MODEL_CALL]
    if not recorded:
        return spans
    offsets = [
        span.start_time - sent
        for span in recorded
        if isinstance(sent := span.attributes.get(semconv.SENT_TIME), int | float) and span.start_time is not None
    ]
    late = dict.fromkeys((id(span) for span in recorded), min(offsets)) if offsets else _contradicted(spans)
    if not late:
        return spans
    converted: list[Span] = []
    for span in spans:
        if seconds := late.get(id(span)):
            times = {"start_time": span.start_time, "end_time": span.end_time}
            span = span.model_copy(update={name: None if at is None else at - seconds for name, at in times.items()})
        converted.append(span)
    return converted


def _contradicted(spans: Sequence[Span]) -> dict[int, float]:
    """Return by how many seconds each of the gateway's spans is too late, by `id()` of the span. Return an empty dict
    if the clocks agree.

    The gateway's spans are numbered when they have ended. Other spans may have been numbered at any time from their
    start. If no single offset explains a contradiction, the numbers are wrong (a trace that was put together later),
    not the clocks.
    """
    if any(span.sequence_id == 0 for span in spans):
        return {}
    arrived = sorted((span for span in spans if span.start_time is not None), key=lambda span: span.sequence_id)
    after_start, before_end = list[float](), list[float]()
    latest_start, earliest_end = -math.inf, math.inf
    # For each span: the latest start of the agent's spans that arrived before it, and the earliest
    # end of those that arrived after it.
    for span in arrived:
        after_start.append(latest_start)
        if span.name != semconv.MODEL_CALL:
            latest_start = max(latest_start, span.start_time or 0.0)
    for span in reversed(arrived):
        before_end.append(earliest_end)
        if span.name != semconv.MODEL_CALL:
            earliest_end = min(earliest_end, _end(span))
    late: dict[int, float] = {}
    at_least, at_most = -math.inf, math.inf  # of the offset between the clocks
    for span, low, high in zip(arrived, after_start, reversed(before_end), strict=True):
        if span.name == semconv.MODEL_CALL:
            end = _end(span)
            at_least = max(at_least, end - high - _DELIVERY_SECONDS)
            at_most = min(at_most, end - low + _DELIVERY_SECONDS)
            late[id(span)] = end - _between(end, low, high)
    agree, explained = at_least <= 0 <= at_most, at_least <= at_most
    return late if explained and not agree else {}


def _between(end: float, low: float, high: float) -> float:
    """Return `end` if it is after `low` and not after `high`, else a time that is: the middle, or a moment after `low`
    if nothing limits it above.
    """
    if low < end <= high:
        return end
    if math.isinf(low):
        return high
    return (low + high) / 2 if high < math.inf else low + _DELIVERY_SECONDS


def _end(span: Span) -> float:
    return (span.start_time or 0.0) if span.end_time is None else span.end_time
