"""Attempts: claiming, reporting, and ending the silent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

from leyden._lib import ids
from leyden.errors import ConfigError, IllegalTransition
from leyden.store.sql.body.lookup import attempt_row, rollout_key, rollout_row
from leyden.store.sql.body.outcomes import NO_OUTCOME, failure_of
from leyden.store.sql.body.worker_rows import follow_attempt
from leyden.store.sql.pages import order_and_limit, within_reach
from leyden.store.sql.rows import (
    ATTEMPT,
    ATTEMPT_SIZE,
    ATTEMPTS,
    CONFIG,
    DEFAULT_CONFIG,
    INPUT,
    INTERRUPTED,
    METADATA,
    ROLLOUT_ID,
    SEQ,
    START,
    STATUS,
    attempt_from,
    attempted,
    build,
    config_of,
    from_text,
    utf8_length,
)
from leyden.store.sql.transaction import Row, SpanTarget, Total, Transaction
from leyden.types import (
    ATTEMPT_FINISHED,
    ROLLOUT_FINISHED,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    PaginatedResult,
    RolloutStatus,
    SortOrder,
    Unset,
    UpdateAttemptRequest,
    check_attempt_transition,
    check_rollout_transition,
    rollout_after_attempt,
)
from leyden.types.checks import check_attempt_id, check_id, check_time, json_text

_SORTABLE = {
    name: f"a.{name}"
    for name in ("sequence_id", "attempt_id", "start_time", "end_time", "status", "worker_id", "last_heartbeat_time")
}
_ROLLOUT_BYTES = 700
"""Bytes that a rollout and an attempt take in SQLite, with their indexes, beside their texts."""
_INTERRUPTED = {"reason": "the process that owned the attempt ended", "reason_kind": "interrupted"}


# ---- claiming ------------------------------------------------------------------------------------


def claim(tx: Transaction, limit: int, worker_id: str | None, claim_id: str | None = None) -> list[AttemptedRollout]:
    """Claim up to `limit` rollouts for `dequeue_many_rollouts`, without waiting.

    A repeated `claim_id` returns the rollouts that were claimed under it. Claiming them again locks them against
    `undo_claim(unless_repeated=True)`.
    """
    tx.expect(limit)
    check_id("worker_id", worker_id)
    check_id("claim_id", claim_id)
    if claim_id is not None and _claimed(tx, claim_id) and tx.change("claim_again", claim_id=claim_id):
        return _claimed(tx, claim_id)  # read again, because some may have been given back meanwhile
    claimed: list[AttemptedRollout] = []
    for row in tx.all("next_in_queue", limit=within_reach(limit)):
        sequence_id = row[ATTEMPTS] + 1
        tx.run("begin_attempt", seq=row[SEQ], attempts=sequence_id)
        new = new_attempt(tx, row, sequence_id=sequence_id, worker_id=worker_id, claim_id=claim_id, heard="claimed")
        claimed.append(new)
        begun = (row[SEQ], "preparing", sequence_id, sequence_id, "preparing", 0, worker_id, row[-1])
        tx.targets[new.rollout_id, new.attempt.attempt_id] = SpanTarget(*begun)
    if all(rollout.attempt.sequence_id == 1 for rollout in claimed):  # no target of an earlier attempt has changed
        tx.keep_targets()
    if not claimed and worker_id is not None:
        tx.run("worker_found_nothing", worker_id=worker_id, now=tx.now)
    return claimed


def unclaim(tx: Transaction, claimed: Sequence[AttemptedRollout]) -> None:
    """Give back claimed rollouts whose reply was lost, except those that a repeated request has claimed again."""
    for rollout in claimed:
        _unclaim(tx, rollout, by_claimer=False)


def undo_claim(tx: Transaction, claim_id: str, *, unless_repeated: bool = False) -> None:
    for rollout in _claimed(tx, claim_id):
        _unclaim(tx, rollout, by_claimer=not unless_repeated)


def _unclaim(tx: Transaction, rollout: AttemptedRollout, *, by_claimer: bool) -> None:
    """Delete an attempt that no worker received, and return its rollout to the queue. Do nothing if the attempt has
    begun, or if a later attempt exists.

    by_claimer: the claimer itself undoes the claim, so also delete an attempt that was claimed again by a repeated
        request.
    """
    row = tx.one("get_rollout_with_attempt", rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
    if row is None or row[ATTEMPTS] != row[ATTEMPT]:
        return
    if not tx.change("delete_attempt", rollout=row[SEQ], sequence_id=row[ATTEMPT], by_claimer=int(by_claimer)):
        return
    back: RolloutStatus = row[STATUS]
    if back in ROLLOUT_FINISHED:
        tx.tally({"attempts": -1})  # the kept total counts attempts of finished rollouts
    else:
        back = "queuing" if row[ATTEMPTS] == 1 else "requeuing"
        tx.claimable += 1
    tx.run("unclaim_rollout", seq=row[SEQ], status=back)
    follow_attempt(tx, rollout.attempt, rollout.attempt.model_copy(update={"status": "failed"}))


def _claimed(tx: Transaction, claim_id: str) -> list[AttemptedRollout]:
    rows = tx.all("get_claim", claim_id=claim_id)
    return [attempted(row, attempt_from(row[ROLLOUT_ID], row[ATTEMPT:])) for row in rows]


def start_attempt(
    tx: Transaction, rollout_id: str, worker_id: str | None = None, *, attempt_id: str | None = None
) -> AttemptedRollout:
    row = rollout_row(tx, rollout_id)
    if attempt_id is not None and (again := started(tx, rollout_id, attempt_id)):
        return again
    check_rollout_transition(rollout_id, row[STATUS], "preparing")
    sequence_id = row[ATTEMPTS] + 1
    tx.run("begin_attempt", seq=row[SEQ], attempts=sequence_id)
    return new_attempt(tx, row, sequence_id=sequence_id, worker_id=worker_id, attempt_id=attempt_id)


def started(tx: Transaction, rollout_id: str, attempt_id: str) -> AttemptedRollout | None:
    """Return the rollout with this attempt, if the attempt is in the store; otherwise None."""
    row = tx.one("get_rollout_with_attempt", rollout_id=rollout_id, attempt_id=attempt_id)
    return None if row is None or row[ATTEMPT] is None else attempted(row, attempt_from(rollout_id, row[ATTEMPT:]))


def new_attempt(
    tx: Transaction,
    row: Row,
    *,
    sequence_id: int,
    worker_id: str | None,
    attempt_id: str | None = None,
    claim_id: str | None = None,
    heard: Literal["claimed", "busy"] = "busy",
) -> AttemptedRollout:
    """Add the next attempt of a rollout that was just moved to `preparing`.

    row: the rollout's row, with the columns of `select_rollouts` first.
    heard: what the worker's record says: it has `claimed` the attempt, or is already `busy`.
    """
    check_attempt_id(attempt_id)
    check_id("worker_id", worker_id)
    rollout_id = row[ROLLOUT_ID]
    attempt_id = attempt_id or ids.attempt_id()
    tx.run(
        "insert_attempt",
        rollout=row[SEQ],
        sequence_id=sequence_id,
        attempt_id=attempt_id,
        worker_id=worker_id,
        claim_id=claim_id,
        start_time=tx.now,
    )
    if worker_id is not None:
        tx.run(f"worker_{heard}", worker_id=worker_id, now=tx.now, rollout_id=rollout_id, attempt_id=attempt_id)
    new = (sequence_id, attempt_id, "preparing", worker_id, tx.now, None, None, "", 0, 0, *NO_OUTCOME)
    rollout = attempted(row, attempt_from(rollout_id, new))
    rollout.status = "preparing"
    return rollout


# ---- reporting -----------------------------------------------------------------------------------


def update_attempt(
    tx: Transaction,
    rollout_id: str,
    attempt_id: str | Literal["latest"],
    status: AttemptStatus | Unset = UNSET,
    worker_id: str | Unset = UNSET,
    last_heartbeat_time: float | Unset = UNSET,
    metadata: dict[str, Any] | Unset = UNSET,
) -> Attempt:
    """Update an attempt. A call that changes nothing succeeds even if the attempt is finished, so a retry is safe."""
    row = attempt_row(tx, rollout_id, attempt_id)
    before = attempt_from(rollout_id, row[ATTEMPT:])
    changes: dict[str, Any] = {}
    if not isinstance(status, Unset):
        check_attempt_transition(before.attempt_id, before.status, status)
        changes["status"] = status
    if not isinstance(worker_id, Unset):
        check_id("worker_id", worker_id)
        changes["worker_id"] = worker_id
    if not isinstance(last_heartbeat_time, Unset):
        check_time("last_heartbeat_time", last_heartbeat_time)
        changes["last_heartbeat_time"] = last_heartbeat_time
    if not isinstance(metadata, Unset):
        changes["metadata"] = before.metadata | from_text(json_text(metadata, "the metadata of an attempt"))
    changes = {name: value for name, value in changes.items() if value != getattr(before, name)}
    if not changes:
        return before
    if before.finished:
        raise IllegalTransition(
            f"attempt {before.attempt_id!r} of rollout {rollout_id!r} ended as {before.status!r} and stays so; "
            f"{', '.join(changes)} cannot change any more"
        )
    return _write(tx, row, before, build(Attempt, before.__dict__ | changes))


def update_many_attempts(tx: Transaction, updates: Sequence[UpdateAttemptRequest]) -> Sequence[Attempt]:
    """Update attempts. Rollouts are locked in one order and rows read ahead, so that a batch costs few statements."""
    tx.expect(len(updates))
    tx.lock(update.rollout_id for update in updates)
    asked = [{"rollout_id": update.rollout_id, "attempt_id": update.attempt_id} for update in updates]
    tx.ahead("get_rollout_with_attempt", asked)
    updated: dict[tuple[str, str], Attempt] = {}
    for update in updates:
        given = {name: value for name, value in update.__dict__.items() if value is not None}
        attempt = update_attempt(tx, **given)
        key = attempt.rollout_id, attempt.attempt_id
        if key in updated:  # the result has one attempt for each update, in their order
            raise ConfigError(f"attempt {key[1]!r} of rollout {key[0]!r} is in two lines; make one of them")
        updated[key] = attempt
    return list(updated.values())


def sweep(tx: Transaction, now: float | None = None) -> Sequence[Attempt]:
    """Mark attempts that ran for `timeout_seconds` as `timeout`, and those whose worker is silent as `unresponsive`."""
    if now is not None:
        tx.now = now
    tx.expect(None)  # perhaps many rows
    changed: list[Attempt] = []
    for row in tx.all("select_overdue", now=tx.now):
        before = attempt_from(row[ROLLOUT_ID], row[ATTEMPT:])
        limit = config_of(row).timeout_seconds
        changes: dict[str, Any] = {"status": "unresponsive"}  # not final, so it leaves no reason behind
        if limit is not None and before.start_time + limit <= tx.now:
            reason = f"the agent did not return within timeout_seconds={limit:g}"
            changes = {"status": "timeout", "metadata": before.metadata | {"reason": reason, "reason_kind": "timeout"}}
        changed.append(_write(tx, row, before, before.model_copy(update=changes)))
    return changed


def release_claims(tx: Transaction, *, worker_ids: Sequence[str] | None = None) -> Sequence[str]:
    tx.expect(None)  # perhaps many rows
    released: dict[str, None] = {}
    for row in tx.all("select_unfinished"):
        before = attempt_from(row[ROLLOUT_ID], row[ATTEMPT:])
        if worker_ids is not None and before.worker_id not in worker_ids:
            continue
        after = before.model_copy(update={"status": "failed", "metadata": before.metadata | _INTERRUPTED})
        _write_attempt(tx, row[SEQ], before, after)
        if row[STATUS] not in ROLLOUT_FINISHED:
            tx.run("count_interruption", seq=row[SEQ])
            tx.run("set_rollout_status", seq=row[SEQ], status="requeuing")
            released[row[ROLLOUT_ID]] = None
    tx.claimable += len(released)
    return list(released)


def next_deadline(tx: Transaction) -> float | None:
    tx.expect(None)  # perhaps many rows
    row = tx.one("next_deadlines")
    known = [time for time in row or () if time is not None]
    return min(known, default=None)


# ---- reading -------------------------------------------------------------------------------------


def query_attempts(
    tx: Transaction,
    rollout_id: str,
    *,
    sort_by: str | None = "sequence_id",
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Attempt]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["a.sequence_id"])
    key = rollout_key(tx, rollout_id)
    items = [attempt_from(rollout_id, row) for row in tx.page("select_attempts", page, {"seq": key[0]})]
    return PaginatedResult(items, limit, offset, key[1])


def get_latest_attempt(tx: Transaction, rollout_id: str) -> Attempt | None:
    row = rollout_row(tx, rollout_id)
    return None if row[ATTEMPT] is None else attempt_from(rollout_id, row[ATTEMPT:])


def get_attempt_by_id(tx: Transaction, rollout_id: str, attempt_id: str) -> Attempt:
    return attempt_from(rollout_id, attempt_row(tx, rollout_id, attempt_id)[ATTEMPT:])


# ---- shared --------------------------------------------------------------------------------------


def _write(tx: Transaction, row: Row, before: Attempt, after: Attempt) -> Attempt:
    """Write a changed attempt, its worker's record, and the status of its rollout. Return it as written."""
    after = _write_attempt(tx, row[SEQ], before, after)
    if after.status != before.status:
        is_latest = after.sequence_id == row[ATTEMPTS]
        if after.interrupted and is_latest and row[STATUS] not in ROLLOUT_FINISHED:
            tx.run("count_interruption", seq=row[SEQ])
        status = rollout_after_attempt(
            row[STATUS],
            after.status,
            attempt_sequence=after.sequence_id - row[INTERRUPTED],  # interrupted attempts do not count
            is_latest=is_latest,
            config=config_of(row) if row[CONFIG] else DEFAULT_CONFIG,
            interrupted=after.interrupted,
        )
        move_rollout(tx, row, status)
    return after


def _write_attempt(tx: Transaction, seq: int, before: Attempt, after: Attempt) -> Attempt:
    """Write a changed attempt and its worker's record. Return the attempt as written.

    An attempt that ends gets its `end_time`, and the kind of its `failure` if it did not succeed.

    seq: the database's key of the rollout.
    """
    if after.status in ATTEMPT_FINISHED and before.end_time is None:
        after.end_time = max(tx.now, before.start_time)  # the clock may have gone backwards
        if after.status != "succeeded":
            after.failure = failure_of(after)
    tx.run(
        "set_attempt",
        rollout=seq,
        sequence_id=after.sequence_id,
        status=after.status,
        worker_id=after.worker_id,
        end_time=after.end_time,
        last_heartbeat_time=after.last_heartbeat_time,
        metadata=json_text(after.metadata, "the metadata of an attempt") if after.metadata else "",
        failure=after.failure,
    )
    if (after.status, after.worker_id) != (before.status, before.worker_id):
        follow_attempt(tx, before, after)
    return after


def move_rollout(tx: Transaction, row: Row, status: RolloutStatus) -> None:
    """Write the status of a rollout, and record the change for the callers that wait for it.

    row: the rollout's row before the change. The caller has checked that `status` may follow.
    """
    if status == row[STATUS]:
        return
    if status in ROLLOUT_FINISHED:
        own_bytes = _ROLLOUT_BYTES + utf8_length(row[INPUT]) + utf8_length(row[METADATA])
        end_time = max(tx.now, row[START])
        attempt_bytes, spans = 0, 0
        if row[ATTEMPTS] > 1:
            attempt_bytes, spans = tx.all("sum_attempts", seq=row[SEQ])[0]
        elif row[ATTEMPT] is not None:
            attempt_bytes, spans = row[ATTEMPT_SIZE]
        size = own_bytes + attempt_bytes
        failed = int(status == "failed")
        tx.run("finish_rollout", seq=row[SEQ], status=status, end_time=end_time, bytes=size, failed=failed)
        tx.tally({cast(Total, status): 1, "attempts": row[ATTEMPTS], "bytes": size, "spans": spans})
        tx.finished.append(row[ROLLOUT_ID])
        return
    tx.run("set_rollout_status", seq=row[SEQ], status=status)
    if status == "requeuing":
        tx.claimable += 1
