"""The state machine of rollouts and attempts, as tables and pure functions.

It knows no store, no clock and no worker: a store calls it for the next status and writes that down. Two rules hold
everywhere: a final status is never left, and only the latest attempt of a rollout moves the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping

from leyden.errors import IllegalTransition
from leyden.types.rollout import ATTEMPT_FINISHED, ROLLOUT_FINISHED, AttemptStatus, RolloutConfig, RolloutStatus

ATTEMPT_TRANSITIONS: Mapping[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "timeout", "cancelled", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "cancelled", "unresponsive"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
    "cancelled": frozenset(),
}
"""The statuses that may follow each status. Keeping the status is always allowed."""

ROLLOUT_TRANSITIONS: Mapping[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "cancelled", "failed"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"preparing", "succeeded", "failed", "requeuing", "cancelled"}),
    "requeuing": frozenset({"preparing", "running", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}
"""`running -> preparing` is a new attempt started by hand; `requeuing -> running` is a late span of
the latest attempt."""

_AFTER_UNFINISHED: Mapping[AttemptStatus, RolloutStatus] = {"preparing": "preparing", "running": "running"}


def check_attempt_transition(attempt_id: str, current: AttemptStatus, wanted: AttemptStatus) -> None:
    """Raise IllegalTransition if `wanted` may not follow `current`."""
    if wanted != current and wanted not in ATTEMPT_TRANSITIONS[current]:
        raise IllegalTransition(_refusal("attempt", attempt_id, current, wanted, ATTEMPT_TRANSITIONS[current]))


def check_rollout_transition(rollout_id: str, current: RolloutStatus, wanted: RolloutStatus) -> None:
    """Raise IllegalTransition if `wanted` may not follow `current`."""
    if wanted != current and wanted not in ROLLOUT_TRANSITIONS[current]:
        raise IllegalTransition(_refusal("rollout", rollout_id, current, wanted, ROLLOUT_TRANSITIONS[current]))


def attempt_after_span(status: AttemptStatus) -> AttemptStatus:
    """Return the attempt's status after one of its spans, which is a heartbeat. Finished attempts stay finished."""
    return "running" if status in ("preparing", "unresponsive") else status


def rollout_after_attempt(
    rollout: RolloutStatus,
    attempt: AttemptStatus,
    *,
    attempt_sequence: int,
    is_latest: bool,
    config: RolloutConfig,
    interrupted: bool = False,
) -> RolloutStatus:
    """Return the rollout's status after one of its attempts became `attempt`.

    A finished rollout keeps its status, and so does one whose later attempt is already under way (`is_latest` false).
    An interrupted attempt (`Attempt.interrupted`) always requeues the rollout. A cancelled attempt cancels it. An
    attempt that failed, timed out or fell silent requeues the rollout if `config` allows another attempt, and fails it
    otherwise. A requeued rollout leaves the queue if the attempt shows a sign of life or succeeds; its failure changes
    nothing more.

    attempt_sequence: the attempt's number among those that were not interrupted.
    """
    if rollout in ROLLOUT_FINISHED or not is_latest:
        return rollout
    if attempt == "succeeded":
        return "succeeded"
    if attempt in _AFTER_UNFINISHED:
        return _AFTER_UNFINISHED[attempt]
    if attempt == "cancelled":
        return "requeuing" if rollout == "requeuing" else "cancelled"
    retry = attempt in config.retry_condition and attempt_sequence < config.max_attempts
    return "requeuing" if interrupted or retry or rollout == "requeuing" else "failed"


def _refusal(noun: str, name: str, current: str, wanted: str, allowed: frozenset[str]) -> str:
    finished = current in ROLLOUT_FINISHED or current in ATTEMPT_FINISHED
    possible = "it is final" if finished else f"possible: {', '.join(sorted(allowed))}"
    return f"{noun} {name!r} is {current!r} and cannot become {wanted!r} ({possible})"
