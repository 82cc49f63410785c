"""Read the result of a replay: which calls of an attempt were answered from a record, where the attempt left the
record, and which calls a model answered.

The module knows spans. The gateway compares requests and records why they differ (`leyden.gateway.call_replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyden.types import Span, semconv


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One model call of a replay, and whether the record or the model answered it."""

    call_index: int
    """The number of the call in its attempt, from 0, as the gateway counted it."""
    state: Literal["replayed", "diverged", "live", "failed"]
    """`replayed`: answered from the record. `diverged`: the first call that differs from the record, which a model
    answered. `live`: any other call that a model answered. `failed`: not answered."""
    detail: str | None = None
    """The difference from the record, or why the call failed; None for other calls."""


def replayed_calls(spans: Sequence[Span]) -> list[ReplayedCall]:
    """Return the model calls that the gateway recorded, in the order in which they reached it."""
    calls: list[ReplayedCall] = []
    for span in spans:
        attributes = span.attributes
        if span.name != semconv.MODEL_CALL or semconv.CALL_INDEX not in attributes:
            continue
        index = attributes[semconv.CALL_INDEX]
        assert isinstance(index, int), "the gateway numbers calls"
        if (difference := attributes.get(semconv.REPLAY_DIVERGED)) is not None:
            calls.append(ReplayedCall(index, "diverged", str(difference)))
        elif span.status.status_code == "ERROR":
            calls.append(ReplayedCall(index, "failed", span.status.description))
        else:
            calls.append(ReplayedCall(index, "replayed" if attributes.get(semconv.REPLAYED) is True else "live"))
    return sorted(calls, key=lambda call: call.call_index)


def divergence(spans: Sequence[Span]) -> str | None:
    """Return one line about the first call in which an attempt differs from the record that it replays, if any."""
    found = (call for call in replayed_calls(spans) if call.state == "diverged")
    return next((f"call {call.call_index}: {call.detail}" for call in found), None)
