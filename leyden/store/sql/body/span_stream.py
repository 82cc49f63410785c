"""Read spans in the order of their arrival, from a cursor on.

A cursor holds a span's position as two numbers, of the transaction and of the span, that only grow. It is valid for
ever, because retention keeps the newest span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyden.errors import ConfigError
from leyden.store.sql.body.search import spans_at
from leyden.store.sql.pages import Filters, within_reach
from leyden.store.sql.rows import span_from
from leyden.store.sql.transaction import Transaction
from leyden.types import SpanPage

_FAR = 10_000
"""Beyond this many spans of other rollouts, scanning the requested rollouts by their index is cheaper."""


def new_spans(
    tx: Transaction, after: str | None, rollout_ids: Sequence[str] | None = None, limit: int = 1000
) -> SpanPage:
    """Return up to `limit` spans after a cursor, and the next cursor, for `poll_new_spans`. Raise ConfigError for a
    cursor that this store did not make.
    """
    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    tx.expect(None)  # perhaps many rows
    given = 0, 0
    if after is not None and after != "latest":
        txid, _, key = after.partition(".")
        if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in (txid, key)):
            raise _no_cursor(tx, after)
        given = int(txid), int(key)
    # Read the last visible span first: spans that become visible later belong to the next page.
    # `row[2]` is the cursor's transaction, or 0 if this server has not reached it, as after a
    # restore. A cursor whose key no span has ever had is of another store.
    row = tx.one("get_last_span", txid=given[0])
    last, since = ((0, 0), given) if row is None else ((row[0], row[1]), (row[2], given[1]))
    if after == "latest":
        since = last
    if (since > last or since != given) and since[1] > tx.all("get_highest_key")[0][0]:
        raise _no_cursor(tx, after)
    if since > last or after == "latest":
        return SpanPage(spans=[], after=_cursor(since))
    condition, parameters = _of_rollouts(rollout_ids, far=last[1] - since[1] > _FAR)
    between = {"txid": since[0], "key": since[1], "last_txid": last[0], "last_key": last[1]}
    page = f"{condition} ORDER BY 1, 2 LIMIT {within_reach(limit)}"
    found = tx.page("select_new_positions", page, between | parameters)
    end = (found[-1][0], found[-1][1]) if len(found) == limit else last  # a page that is not full has read all
    spans = [span_from(*one) for one in spans_at(tx, [row[1] for row in found])]
    return SpanPage.model_construct(spans=spans, after=_cursor(end))


def _of_rollouts(rollout_ids: Sequence[str] | None, *, far: bool) -> tuple[str, dict[str, Any]]:
    """Return a condition on the rollouts of spans, and its parameters; empty for all rollouts.

    far: use the index of the rollouts. Otherwise a `+` before the column prevents that, because scanning the few new
        spans is cheaper.
    """
    filters = Filters("and")
    filters.among("rollout_id", rollout_ids)
    if not filters.conditions:
        return "", {}
    (condition,) = filters.conditions
    return f" AND {'' if far else '+'}s.rollout IN (SELECT seq FROM rollouts WHERE {condition})", filters.parameters


def _cursor(position: tuple[int, int]) -> str:
    return "{}.{}".format(*position)


def _no_cursor(tx: Transaction, after: str | None) -> ConfigError:
    return ConfigError(
        f"after={after!r} is no cursor of {tx.store_url}; give None for the first span, 'latest', or the `after` of an earlier page"
    )
