"""Look up rows by their ids, and raise the error for an id that is not in the store."""

from __future__ import annotations

from leyden.errors import UnknownAttempt, UnknownResources, UnknownRollout, UnknownRun
from leyden.store.sql.rows import ATTEMPT
from leyden.store.sql.transaction import Row, Transaction


def rollout_key(tx: Transaction, rollout_id: str) -> Row:
    """Return a rollout's key, its number of attempts and its status. Raise UnknownRollout."""
    key = tx.one("get_rollout_key", rollout_id=rollout_id)
    if key is None:
        raise unknown_rollout(tx, rollout_id)
    return key


def rollout_row(tx: Transaction, rollout_id: str) -> Row:
    """Return the row of `get_rollout`. Raise UnknownRollout."""
    row = tx.one("get_rollout", rollout_id=rollout_id)
    if row is None:
        raise unknown_rollout(tx, rollout_id)
    return row


def attempt_row(tx: Transaction, rollout_id: str, attempt_id: str) -> Row:
    """Return the row of an attempt, by its id or "latest".

    Raise UnknownRollout or UnknownAttempt.
    """
    if attempt_id == "latest":
        row = rollout_row(tx, rollout_id)
    else:
        row = tx.one("get_rollout_with_attempt", rollout_id=rollout_id, attempt_id=attempt_id)
    if row is None:
        raise unknown_rollout(tx, rollout_id)
    if row[ATTEMPT] is None:
        raise unknown_attempt(tx, rollout_id, attempt_id)
    return row


def known_version(tx: Transaction, resources_id: str | None) -> tuple[str | None, int | None]:
    """Return the id and the newest version of resources. For None, return those written last, or a pair of None if
    there are none.

    Raise UnknownResources for an id that is not in the store.
    """
    if resources_id is None:
        latest = tx.one("get_latest_resources_version")
        return (None, None) if latest is None else (latest[0], latest[1])
    newest = tx.one("get_newest_version", resources_id=resources_id)
    if newest is None:
        raise UnknownResources(
            f"resources {resources_id!r} are not in {tx.store_url}; write them with add_resources first, "
            "or leave resources_id out for the latest"
        )
    return resources_id, newest[0]


def run_key(tx: Transaction, run_id: str) -> int:
    """Return the key of a run in rollouts and metrics. Raise UnknownRun."""
    key = tx.one("get_run_key", run_id=run_id)
    if key is None:
        raise unknown_run(tx, run_id)
    return key[0]


def unknown_run(tx: Transaction, run_id: str) -> UnknownRun:
    """Return the error for a run that is not in the store."""
    return UnknownRun(f"run {run_id!r} is not in {tx.store_url}; add it with start_run first, or see query_runs")


def unknown_rollout(tx: Transaction, rollout_id: str) -> UnknownRollout:
    """Return the error for a rollout that is not in the store."""
    return UnknownRollout(
        f"rollout {rollout_id!r} is not in {tx.store_url}; was it enqueued in another store, or pruned (see Retention)?"
    )


def unknown_attempt(tx: Transaction, rollout_id: str, attempt_id: str) -> UnknownAttempt:
    """Return the error for an attempt that its rollout does not have."""
    if attempt_id == "latest":
        return UnknownAttempt(f"rollout {rollout_id!r} in {tx.store_url} has no attempt yet; claim it first")
    return UnknownAttempt(f"rollout {rollout_id!r} in {tx.store_url} has no attempt {attempt_id!r}; see query_attempts")
