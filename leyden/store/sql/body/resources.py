"""Resources: named, versioned, immutable once written. The latest is the last one written."""

from __future__ import annotations

import logging

from leyden.errors import ConfigError, UnknownResources
from leyden.store.sql.body.checks import check_id
from leyden.store.sql.pages import Filters, order_and_limit
from leyden.store.sql.rows import resources_from, text_of
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import NamedResources, PaginatedResult, ResourcesUpdate, SortOrder
from leyden.utils import ids

logger = logging.getLogger(__name__)

_SORTABLE = {name: f"s.{name}" for name in ("resources_id", "version", "create_time", "update_time")}


def add_resources(tx: Transaction, resources: NamedResources, *, resources_id: str | None = None) -> ResourcesUpdate:
    if resources_id is None:
        return _write(tx, ids.resources_id(), 1, tx.now, resources)
    present = tx.one("get_resources", resources_id=resources_id)
    if present is None:
        return _write(tx, resources_id, 1, tx.now, resources)
    if present[4] != _text(resources):
        raise ConfigError(
            f"resources {resources_id!r} are already in {tx.store_url} with other content; "
            "write the next version with update_resources, or choose another id"
        )
    return resources_from(present)


def update_resources(tx: Transaction, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
    present = tx.one("get_resources", resources_id=resources_id)
    if present is not None and present[4] == _text(resources):
        latest = tx.one("get_latest_resources")
        if latest is not None and tuple(latest[:2]) == tuple(present[:2]):
            return resources_from(present)
    version, create_time = (1, tx.now) if present is None else (present[1] + 1, present[2])
    return _write(tx, resources_id, version, create_time, resources)


def get_resources_by_id(tx: Transaction, resources_id: str) -> ResourcesUpdate:
    row = tx.one("get_resources", resources_id=resources_id)
    if row is None:
        raise UnknownResources(f"resources {resources_id!r} are not in {tx.store_url}; see query_resources")
    return resources_from(row)


def get_latest_resources(tx: Transaction) -> ResourcesUpdate | None:
    row = tx.one("get_latest_resources")
    return None if row is None else resources_from(row)


def query_resources(
    tx: Transaction,
    *,
    resources_id: str | None = None,
    resources_id_contains: str | None = None,
    sort_by: str | None = None,
    sort_order: SortOrder = "asc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[ResourcesUpdate]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["s.key"])
    filters = Filters("and")
    filters.equal("s.resources_id", resources_id)
    filters.contains("s.resources_id", resources_id_contains)
    newest = "s.version = (SELECT max(t.version) FROM resources t WHERE t.resources_id = s.resources_id)"
    where = filters.sql(newest)
    tx.expect(None)
    items = [resources_from(row) for row in tx.page("select_resources", where + page, filters.parameters)]
    total = tx.page("count_resources_of", where, filters.parameters)[0][0]
    return PaginatedResult(items, limit, offset, total)


def _write(
    tx: Transaction, resources_id: str, version: int, create_time: float, resources: NamedResources
) -> ResourcesUpdate:
    check_id("resources_id", resources_id)
    if version == 1:
        tx.tally({"resources": 1})
    row: Row = (resources_id, version, create_time, tx.now, _text(resources))
    names = ("resources_id", "version", "create_time", "update_time", "resources")
    tx.run("insert_resources", **dict(zip(names, row, strict=True)))
    logger.debug("resources %s: version %d written, of %s", resources_id, version, ", ".join(resources))
    return resources_from(row)


def _text(resources: NamedResources) -> str:
    return text_of(resources, "resources")
