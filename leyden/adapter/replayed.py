"""The result of a replay: which calls of an attempt came from a record, where the attempt left the
record, and which calls are live.

It knows spans. The gateway compares requests and finds why they differ (`leyden.gateway.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyden import semconv
from leyden.types import Span


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One model call of a replay, and whether the record or the model answered it."""

    call_index: int
    state: Literal["replayed", "diverged", "live", "failed"]
    """`diverged`: the first call that differs from the record; like all later ones, the model
    answered it."""
    detail: str | None = None
    """The difference from the record, or why the call failed; None for other calls."""


def replayed_calls(spans: Sequence[Span]) -> list[ReplayedCall]:
    """Return the model calls that the gateway recorded, in the order in which they came to it."""
    calls = [_call(span) for span in spans if span.name == semconv.MODEL_CALL and semconv.CALL_INDEX in span.attributes]
    return sorted(calls, key=lambda call: call.call_index)


def divergence(spans: Sequence[Span]) -> str | None:
    """Describe, in one line, how an attempt left the record that it was to repeat; None if it did
    not.
    """
    found = (call for call in replayed_calls(spans) if call.state == "diverged")
    return next((f"call {call.call_index}: {call.detail}" for call in found), None)


def _call(span: Span) -> ReplayedCall:
    said = span.attributes
    index = said[semconv.CALL_INDEX]
    assert isinstance(index, int), "the gateway numbers calls"
    if (different := said.get(semconv.REPLAY_DIVERGED)) is not None:
        return ReplayedCall(index, "diverged", str(different))
    if span.status.status_code == "ERROR":
        return ReplayedCall(index, "failed", span.status.description)
    return ReplayedCall(index, "replayed" if said.get(semconv.REPLAYED) is True else "live")
