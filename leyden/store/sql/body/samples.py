"""Time series of samples, of which each call that adds some deletes the old ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from leyden.errors import ConfigError
from leyden.store.sql.pages import Filters, order_and_limit, page_of
from leyden.store.sql.rows import sample_from
from leyden.store.sql.transaction import Transaction
from leyden.types import PaginatedResult, Sample, SortOrder
from leyden.types.checks import check_id, check_time

_KEPT_SECONDS = 7 * 86_400.0
_KEPT = 1_000_000
"""The most samples that are kept."""
_PRUNED = 64
"""How many of the oldest samples a call checks, beside twice as many as it adds, so that the excess shrinks with each
call."""


def add_many_samples(tx: Transaction, samples: Sequence[Sample]) -> None:
    tx.expect(3 * len(samples))
    for sample in samples:
        check_id("the name of a sample", sample.name)
        check_id("worker_id", sample.worker_id)
        check_time("the time of a sample", sample.time)
        if not math.isfinite(sample.value):
            raise ConfigError(
                f"sample {sample.name!r} has the value {sample.value!r}; it must be finite, so leave it out"
            )
    if samples:
        tx.put_many("insert_sample", [(s.name, s.worker_id or "", s.time, s.value) for s in samples])
        tx.run("prune_samples", limit=_PRUNED + 2 * len(samples), oldest=tx.now - _KEPT_SECONDS, most=_KEPT)


def query_samples(
    tx: Transaction,
    *,
    name: str | None = None,
    worker_id: str | None = None,
    measured_from: float | None = None,
    measured_before: float | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[Sample]:
    page = order_and_limit({}, None, sort_order, limit, offset, tie=["s.time", "s.name", "s.worker_id"])
    filters = Filters("and")
    filters.equal("s.name", name)
    filters.equal("s.worker_id", worker_id)
    filters.between("s.time", measured_from, measured_before)
    where, parameters = filters.sql(), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_samples", sample_from, where, page, parameters, limit, offset)
