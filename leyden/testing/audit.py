"""Check that a store's records agree with each other, whatever happened to the processes that wrote them.

The audit knows the store's protocol and the lifecycle of rollouts, but no database. It reads every record, so it is for
tests and for a store after an accident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from leyden.store import LightningStore
from leyden.types import FINAL_RUN_STATUSES, Attempt, AttemptedRollout, Rollout, RolloutStatus, RunRecord, Span, Worker

_OPEN = ("preparing", "running")


async def audit_store(store: LightningStore) -> list[str]:
    """Return the faults of a store's records, one line each; an empty list if there are none.

    No process may write to the store meanwhile, because rows that are read first are compared with rows that are read
    last.
    """
    rollouts = await store.query_rollouts()
    attempts: dict[str, Sequence[Attempt]] = {}
    spans: dict[str, Sequence[Span]] = {}
    for rollout in rollouts:
        attempts[rollout.rollout_id] = await store.query_attempts(rollout.rollout_id)
        spans[rollout.rollout_id] = await store.query_spans(rollout.rollout_id)
    workers = await store.query_workers()
    faults: list[str] = []
    for rollout in rollouts:
        key = rollout.rollout_id
        faults += [f"rollout {key!r}: {fault}" for fault in _of_rollout(rollout, attempts[key])]
        for number, attempt in enumerate(attempts[key], 1):
            own = [span for span in spans[key] if span.attempt_id == attempt.attempt_id]
            name = f"attempt {attempt.attempt_id!r} of {key!r}"
            faults += [f"{name}: {fault}" for fault in _of_attempt(attempt, number, rollout, own)]
    by_id = {(attempt.rollout_id, attempt.attempt_id): attempt for group in attempts.values() for attempt in group}
    if len(by_id) != sum(map(len, attempts.values())):
        faults.append("two attempts of one rollout have the same id")
    for worker in workers:
        faults += [f"worker {worker.worker_id!r}: {fault}" for fault in _of_worker(worker, by_id)]
    for run in await store.query_runs():
        faults += [f"run {run.run_id!r}: {fault}" for fault in _of_run(run)]
    counted = await store.statistics()
    resources = await store.query_resources()
    for noun, found in (
        ("rollouts", len(rollouts)),
        ("attempts", len(by_id)),
        ("spans", sum(map(len, spans.values()))),
        ("resources", len(resources)),
        ("workers", len(workers)),
    ):
        if counted[f"total_{noun}"] != found:
            faults.append(f"the statistics count {counted[f'total_{noun}']} {noun}, but there are {found}")
    by_status = Counter(rollout.status for rollout in rollouts)
    if counted["rollouts_by_status"] != by_status:
        faults.append(f"the statistics count rollouts as {counted['rollouts_by_status']}, there are {dict(by_status)}")
    for status in get_args(RolloutStatus):
        page = await store.query_rollouts(status_in=[status], limit=1)
        if page.total != by_status[status] or not page.exact:
            faults.append(f"a page of {status!r} rollouts counts {page.total}, but there are {by_status[status]}")
    return faults


def _of_rollout(rollout: Rollout, attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield the faults of a rollout, whose status follows its latest attempt, unless a user set it."""
    latest = attempts[-1] if attempts else None
    given = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    if given != latest:
        yield f"it comes with the attempt {given}, but its latest attempt is {latest}"
    if rollout.finished != (rollout.end_time is not None):
        yield f"it is {rollout.status!r} and its end_time is {rollout.end_time}"
    if rollout.end_time is not None and rollout.end_time < rollout.start_time:
        yield f"it ended at {rollout.end_time}, before its start at {rollout.start_time}"
    if rollout.status == "queuing" and latest is not None:
        yield f"it is 'queuing' and has an attempt, {latest.attempt_id!r}"
    if rollout.status == "requeuing" and latest is None:
        yield "it is 'requeuing' and was never tried"
    if rollout.status in _OPEN and (latest is None or latest.finished):
        yield f"it is {rollout.status!r} and no attempt is open: {latest and latest.status!r}"
    if latest is not None and latest.status == "succeeded" and not rollout.finished:
        yield f"it is {rollout.status!r} and its latest attempt succeeded"


def _of_attempt(attempt: Attempt, number: int, rollout: Rollout, spans: Sequence[Span]) -> Iterator[str]:
    """number: of the attempt among its rollout's attempts, from 1."""
    if attempt.sequence_id != number:
        yield f"its sequence_id is {attempt.sequence_id}, but its place among the attempts is {number}"
    if attempt.rollout_id != rollout.rollout_id:
        yield f"its rollout_id is {attempt.rollout_id!r}"
    if attempt.finished != (attempt.end_time is not None):
        yield f"it is {attempt.status!r} and its end_time is {attempt.end_time}"
    if attempt.end_time is not None and attempt.end_time < attempt.start_time:
        yield f"it ended at {attempt.end_time}, before its start at {attempt.start_time}"
    if len({span.span_id for span in spans}) != len(spans):
        yield "it has a span twice"
    if any(span.sequence_id < 1 for span in spans):
        yield "it has a span without a number"
    if spans and attempt.status == "preparing":
        yield "it has spans and is 'preparing'"


def _of_run(run: RunRecord) -> Iterator[str]:
    if (run.status in FINAL_RUN_STATUSES) != (run.end_time is not None):
        yield f"it is {run.status!r} and its end_time is {run.end_time}"
    if run.end_time is not None and run.end_time < run.start_time:
        yield f"it ended at {run.end_time}, before its start at {run.start_time}"


def _of_worker(worker: Worker, attempts: dict[tuple[str, str], Attempt]) -> Iterator[str]:
    """attempts: all attempts by the ids of rollout and attempt."""
    if (worker.status == "busy") != (worker.current_attempt_id is not None):
        yield f"it is {worker.status!r} with {worker.current_attempt_id!r}"
    if worker.current_attempt_id is None or worker.current_rollout_id is None:
        return
    current = attempts.get((worker.current_rollout_id, worker.current_attempt_id))
    if current is None or current.worker_id != worker.worker_id or current.status not in _OPEN:
        yield f"it is busy with an attempt that is not its own, or has ended: {current}"
