"""How much is in a store: counts, each by the scan of one index."""

from __future__ import annotations

from leyden.store.sql.transaction import Transaction

__all__ = ["counts"]


def counts(tx: Transaction) -> tuple[dict[str, int], dict[str, int]]:
    """How many of each noun, and how many rollouts of each status."""
    tx.expect(None)
    nouns = ("attempts", "spans", "resources", "workers")
    totals = {noun: tx.all(f"count_{noun}")[0][0] for noun in nouns}
    by_status = {row[0]: row[1] for row in tx.all("count_rollouts_by_status")}
    return totals | {"rollouts": sum(by_status.values())}, by_status
