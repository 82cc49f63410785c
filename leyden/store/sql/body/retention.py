"""Choose and delete the rollouts that retention does not keep.

Pruning takes two operations. One chooses the rollouts, while others write. The other deletes a few of them, and checks
again what may have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from itertools import islice

from leyden.store.sql.body.lookup import unknown_rollout
from leyden.store.sql.body.statistics import FINAL_STATUSES, kept_totals
from leyden.store.sql.pages import within_reach
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import Retention
from leyden.types.checks import check_id
from leyden.types.run_record import algorithm_group

_STEP_ROWS = 128
"""About how many rows one step deletes, and at least one rollout's. A step takes a few milliseconds, which delay a
writer."""


def pin(tx: Transaction, name: str, rollout_ids: Sequence[str]) -> None:
    tx.expect(len(rollout_ids))
    check_id("name", name)
    tx.lock(rollout_ids)
    tx.run("unpin", name=name)
    for rollout_id in rollout_ids:
        if not tx.change("pin_rollout", name=name, rollout_id=rollout_id):
            raise unknown_rollout(tx, rollout_id)


def prunable(tx: Transaction, retention: Retention, limit: int) -> list[list[int]]:
    """Return the `seq` of up to `limit` rollouts that `retention` does not keep, the oldest first.

    Each inner list is meant for one short transaction of `prune_step`, which deletes about _STEP_ROWS rows.
    """
    tx.expect(None)  # perhaps many rows
    kept, kept_bytes = 0, 0
    if retention.max_rollouts is not None or retention.max_bytes is not None:
        totals = kept_totals(tx)
        kept, kept_bytes = sum(totals[status] for status in FINAL_STATUSES), totals["bytes"]
    stay = _must_stay(tx)
    reach = within_reach(limit + len(stay))
    by_status = [tx.all("select_prunable", status=status, limit=reach) for status in FINAL_STATUSES]
    oldest_first = merge(*by_status, key=lambda row: (row[1], row[0]))
    rows = [row for row in islice(oldest_first, reach) if row[0] not in stay]
    steps: list[list[int]] = []
    room = 0
    for seq, _, _, size in beyond(retention, rows[:limit], kept=kept, kept_bytes=kept_bytes, now=tx.now):
        if size > room:
            steps.append([])
            room = _STEP_ROWS
        steps[-1].append(seq)
        room -= size
    return steps


def beyond(retention: Retention, rows: Sequence[Row], *, kept: int, kept_bytes: int, now: float) -> Sequence[Row]:
    """Return the rollouts at the beginning of `rows` that `retention` does not keep.

    rows: finished rollouts, the oldest first: `seq`, end time, bytes, and further columns.
    kept, kept_bytes: the number and the bytes of all finished rollouts in the store.
    now: Unix seconds.
    """
    for index, (_, end_time, size, *_) in enumerate(rows):
        too_many = retention.max_rollouts is not None and kept > retention.max_rollouts
        too_old = retention.max_age_seconds is not None and end_time <= now - retention.max_age_seconds
        too_large = retention.max_bytes is not None and kept_bytes > retention.max_bytes
        if not (too_many or too_old or too_large):
            return rows[:index]
        kept -= 1
        kept_bytes -= size
    return rows


def prune_step(tx: Transaction, seqs: Sequence[int]) -> int:
    """Delete these rollouts, except those pinned meanwhile. Return how many were deleted."""
    tx.expect(None)  # perhaps many rows
    stay = _must_stay(tx)
    gone = 0
    used: set[str] = set()
    for seq in seqs:
        if seq in stay:
            continue
        for rollout_id, resources_id, status, size, mode, version, arm, run, group in tx.all("prune_rollout", seq=seq):
            if run is not None or (group or "").endswith(algorithm_group("")):
                run_id = None if run is not None else group.removesuffix(algorithm_group(""))
                tx.run("keep_spending", run=run, run_id=run_id, seq=seq)
            if mode == "live" and version is not None:  # its feedback may be months late
                tx.put_many("insert_served", [(rollout_id, resources_id, version, arm)])
            attempts = tx.all("prune_attempts", seq=seq)
            for attempt_id, worker_id, end_time in attempts:
                if end_time is None and worker_id is not None:  # its rollout was cancelled while it worked
                    ids = {"worker_id": worker_id, "rollout_id": rollout_id, "attempt_id": attempt_id}
                    tx.run("worker_freed", status="idle", now=tx.now, **ids)
            n_spans = tx.change("prune_spans", seq=seq)
            tx.tally({"forgotten": 1, status: -1, "attempts": -len(attempts), "spans": -n_spans, "bytes": -size})
            used.add(resources_id)
            gone += 1
    for resources_id in used - {None}:
        tx.run("prune_resources", resources_id=resources_id)
    return gone


def _must_stay(tx: Transaction) -> set[int]:
    """Return the `seq` of the rollouts that must be kept: the newest one, and the one with the newest span, because new
    numbers and cursors continue from theirs.
    """
    newest = (tx.one("newest_rollout"), tx.one("rollout_of_newest_span"))
    return {row[0] for row in newest if row is not None}
