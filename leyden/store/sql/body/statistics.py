"""Count the contents of a store from the counts that its database keeps (`tx.tally`).

A rollout is counted when it is enqueued and when it finishes. Only claimed, unfinished rollouts are read; the waiting
ones are the remainder. So the cost does not grow with the history or the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leyden.store.sql.transaction import TOTALS, Total, Transaction
from leyden.types import RolloutStatus

FINAL_STATUSES: Sequence[Total] = ("succeeded", "failed", "cancelled")
"""The statuses of finished rollouts, each of which is a kept count."""


def counts(tx: Transaction) -> tuple[float, dict[str, int], dict[str, int]]:
    """Return the time of the count, the number of rows of each kind, and the number of rollouts of each status."""
    tx.expect(None)  # perhaps many rows
    totals, under_way = kept_totals(tx), tx.all("count_under_way")
    nouns = {
        "rollouts": totals["enqueued"] - totals["forgotten"],
        "attempts": totals["attempts"] + sum(row[2] for row in under_way),
        "spans": totals["spans"] + sum(row[3] for row in under_way),
        "resources": totals["resources"],
        "workers": tx.all("count_workers")[0][0],
    }
    by_status = _by_status(totals, {row[0]: row[1] for row in under_way})
    return tx.now, nouns, {status: count for status, count in by_status.items() if count}


def count_by_status(tx: Transaction) -> Mapping[str, int]:
    """Return how many rollouts each status has."""
    return _by_status(kept_totals(tx), {row[0]: row[1] for row in tx.all("count_under_way")})


def count_rollouts(tx: Transaction) -> int:
    """Return the number of rollouts."""
    totals = kept_totals(tx)
    return totals["enqueued"] - totals["forgotten"]


def count_spans(tx: Transaction) -> int:
    """Return the number of spans."""
    return kept_totals(tx)["spans"] + sum(row[3] for row in tx.all("count_under_way"))


def kept_totals(tx: Transaction) -> dict[Total, int]:
    """Return the counts that the database keeps."""
    return dict(zip(TOTALS, tx.all("get_totals")[0], strict=True))


def _by_status(totals: Mapping[Total, int], under_way: Mapping[RolloutStatus, int]) -> Mapping[str, int]:
    finished = {status: totals[status] for status in FINAL_STATUSES}
    waiting = totals["enqueued"] - totals["forgotten"] - sum(finished.values()) - sum(under_way.values())
    return {"queuing": waiting, **under_way, **finished}
