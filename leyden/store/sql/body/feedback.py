"""Feedback: append-only opinions about rollouts, which stay when retention deletes the rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.errors import ConfigError
from leyden.store.sql.body.lookup import unknown_rollout
from leyden.store.sql.pages import Filters, order_and_limit, page_of
from leyden.store.sql.rows import feedback_from
from leyden.store.sql.transaction import Transaction
from leyden.types import Feedback, FeedbackKind, PaginatedResult, SortOrder
from leyden.types.checks import check_feedback

_COUNTED = (
    "NOT EXISTS (SELECT 1 FROM feedback g WHERE g.rollout_id = f.rollout_id AND g.source = f.source AND g.kind = f.kind "
    "AND g.key > f.key)"
)
"""The condition for feedback that counts: its source has sent no later one of its kind about the rollout."""


def add_many_feedback(tx: Transaction, feedback: Sequence[Feedback]) -> Sequence[Feedback]:
    tx.expect(len(feedback))
    values = [check_feedback(one) for one in feedback]
    return [_add(tx, one, value) for one, value in zip(feedback, values, strict=True)]


def query_feedback(
    tx: Transaction,
    *,
    rollout_id: str | None = None,
    resources_id: str | None = None,
    version: int | None = None,
    arm: str | None = None,
    source: str | None = None,
    kind: FeedbackKind | None = None,
    received_from: float | None = None,
    received_before: float | None = None,
    after: int | None = None,
    counted: bool = False,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Feedback]:
    page = order_and_limit({}, None, sort_order, limit, offset, tie=["f.key"])
    filters = Filters("and")
    filters.equal("f.rollout_id", rollout_id)
    filters.equal("f.resources_id", resources_id)
    filters.equal("f.version", version)
    filters.equal("f.arm", arm)
    filters.equal("f.source", source)
    filters.equal("f.kind", kind)
    filters.between("f.received_time", received_from, received_before)
    if after is not None:
        filters.condition("f.key > {}", after)
    where, parameters = filters.sql(*([_COUNTED] if counted else [])), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_feedback", feedback_from, where, page, parameters, limit, offset)


def _add(tx: Transaction, one: Feedback, value: str) -> Feedback:
    """Store one piece of feedback with the version that its rollout ran with, and return it.

    Feedback with a known id is returned as stored, so that a retry is safe. Raise ConfigError if that id is of other
    feedback, UnknownRollout if neither the store nor the feedback knows the version.

    value: the feedback's value as JSON.
    """
    row = tx.one("get_feedback", feedback_id=one.feedback_id)
    if row is not None:
        present = feedback_from(row)
        if (present.rollout_id, present.source, present.kind) != (one.rollout_id, one.source, one.kind):
            raise ConfigError(
                f"feedback {one.feedback_id!r} is already in {tx.store_url}, about rollout {present.rollout_id!r} from "
                f"{present.source!r}; leave the id out, or choose another"
            )
        return present
    ran_with = tx.one("get_served", rollout_id=one.rollout_id)
    if ran_with is None:
        if one.resources_id is None or one.version is None:
            raise unknown_rollout(tx, one.rollout_id)
        ran_with = (one.resources_id, one.version, one.arm)
    stored = {
        "feedback_id": one.feedback_id,
        "rollout_id": one.rollout_id,
        "source": one.source,
        "kind": one.kind,
        "value": value,
        "given_time": one.given_time,
        "received_time": tx.now,
        **dict(zip(("resources_id", "version", "arm"), ran_with, strict=True)),
    }
    key = tx.insert("insert_feedback", **stored)
    return feedback_from((key, *stored.values()))
