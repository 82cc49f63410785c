"""What the contract's tests share: small spans, claimed rollouts."""

from __future__ import annotations

from typing import Any

from leyden.store import LightningStore
from leyden.types import AttemptedRollout, Span

__all__ = ["SOON", "claimed", "ids", "span_of"]

SOON = 10.0
"""Seconds that nothing here should need; a test that waits so long has failed."""


def span_of(rollout: AttemptedRollout, span_id: str = "00000000000000aa", **fields: Any) -> Span:
    """A small span of a claimed rollout."""
    given: dict[str, Any] = {"sequence_id": 0, "trace_id": "f" * 32, "span_id": span_id, "name": "step"} | fields
    return Span(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, **given)


async def claimed(
    store: LightningStore, task: Any = "task", worker_id: str | None = None, **fields: Any
) -> AttemptedRollout:
    """A rollout that was enqueued and claimed."""
    await store.enqueue_rollout(task, **fields)
    rollout = await store.dequeue_rollout(worker_id)
    assert rollout is not None
    return rollout


def ids(rollout: AttemptedRollout) -> dict[str, str]:
    """Which attempt of which rollout, as the keywords of many methods."""
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
