"""Resources: named, versioned, immutable once written; and the addresses of their models. Labels are in `labels.py`."""

from __future__ import annotations

import logging

from leyden._lib import ids
from leyden.errors import ConfigError, UnknownResources
from leyden.store.sql.pages import Filters, order_and_limit
from leyden.store.sql.rows import resources_from
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import (
    GATEWAY_SCHEME,
    LLM,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    SortOrder,
)
from leyden.types.checks import check_id, json_text

logger = logging.getLogger(__name__)

_SORTABLE = {name: f"s.{name}" for name in ("resources_id", "version", "create_time", "update_time")}
_VERSION, _CREATE_TIME, _TEXT = 1, 2, 4
"""The indices of three columns in `resources_columns`."""
HIGHEST_VERSION = 2**53
"""No store has a version this high, and every database takes the number."""


# ---- versions ------------------------------------------------------------------------------------


def add_resources(
    tx: Transaction,
    resources: NamedResources,
    *,
    resources_id: str | None = None,
    parent: tuple[str, int] | None = None,
    author: str | None = None,
) -> ResourcesUpdate:
    if resources_id is None:
        return _write(tx, ids.resources_id(), 1, tx.now, resources, parent, author)
    present = tx.one("get_resources", resources_id=resources_id)
    if present is None:
        return _write(tx, resources_id, 1, tx.now, resources, parent, author)
    if present[_TEXT] != _text(resources):
        raise ConfigError(
            f"resources {resources_id!r} are already in {tx.store_url} with other content; "
            "write the next version with update_resources, or choose another id"
        )
    return resolved(tx, present)


def update_resources(
    tx: Transaction,
    resources_id: str,
    resources: NamedResources,
    *,
    parent: tuple[str, int] | None = None,
    author: str | None = None,
) -> ResourcesUpdate:
    present = tx.one("get_resources", resources_id=resources_id)
    if present is None:
        return _write(tx, resources_id, 1, tx.now, resources, parent, author)
    if present[_TEXT] == _text(resources):
        latest = tx.one("get_latest_resources")
        if latest is not None and tuple(latest[:2]) == tuple(present[:2]):
            return resolved(tx, present)
    version = present[_VERSION]
    return _write(
        tx, resources_id, version + 1, present[_CREATE_TIME], resources, parent or (resources_id, version), author
    )


def get_resources_by_id(tx: Transaction, resources_id: str, *, version: int | None = None) -> ResourcesUpdate:
    if version is None:
        row = tx.one("get_resources", resources_id=resources_id)
    else:
        row = tx.one("get_version", resources_id=resources_id, version=min(max(version, 0), HIGHEST_VERSION))
    if row is None:
        raise unknown_version(tx, resources_id, version)
    return resolved(tx, row)


def get_latest_resources(tx: Transaction) -> ResourcesUpdate | None:
    row = tx.one("get_latest_resources")
    return None if row is None else resolved(tx, row)


def query_resources(
    tx: Transaction,
    *,
    resources_id: str | None = None,
    resources_id_contains: str | None = None,
    all_versions: bool = False,
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
    where = filters.sql(*([] if all_versions else [newest]))
    tx.expect(None)  # perhaps many rows
    items = [resolved(tx, row) for row in tx.page("select_resources", where + page, filters.parameters)]
    total = tx.page("count_resources_of", where, filters.parameters)[0][0]
    return PaginatedResult(items, limit, offset, total)


def _write(
    tx: Transaction,
    resources_id: str,
    version: int,
    create_time: float,
    resources: NamedResources,
    parent: tuple[str, int] | None,
    author: str | None,
) -> ResourcesUpdate:
    """Insert one version of resources and return it. Raise UnknownResources for a parent that is not in the store."""
    check_id("resources_id", resources_id)
    check_id("author", author)
    parent_id, parent_version = parent or (None, None)
    if parent_id is not None and tx.one("has_version", resources_id=parent_id, version=parent_version) is None:
        raise unknown_version(tx, parent_id, parent_version)
    if version == 1:
        tx.tally({"resources": 1})
    row: Row = (resources_id, version, create_time, tx.now, _text(resources), parent_id, parent_version, author, 0)
    names = (
        *("resources_id", "version", "create_time", "update_time", "resources"),
        *("parent_id", "parent_version", "author"),
    )
    tx.run("insert_resources", **dict(zip(names, row[:-1], strict=True)))
    logger.debug("resources %s: version %d written, of %s", resources_id, version, ", ".join(resources))
    return resolved(tx, row)


def _text(resources: NamedResources) -> str:
    return json_text(resources, "resources")


def unknown_version(tx: Transaction, resources_id: str, version: int | None) -> UnknownResources:
    """Return the error for resources, or a version of them, that are not in the store."""
    which = f"resources {resources_id!r}" if version is None else f"version {version} of resources {resources_id!r}"
    return UnknownResources(f"{which} is not in {tx.store_url}; see query_resources(all_versions=True)")


# ---- where models listen -------------------------------------------------------------------------


def set_endpoint(tx: Transaction, name: str, base_url: str, *, api_key: str | None = None) -> None:
    check_id("name", name)
    tx.run("put_endpoint", name=name, base_url=base_url, api_key=api_key)


def resolved(tx: Transaction, row: Row) -> ResourcesUpdate:
    """Build a version from its row, with the current base URL and key in place of an address `gateway://NAME`."""
    update = resources_from(row)
    for resource in update.resources.values():
        if isinstance(resource, LLM) and resource.endpoint.startswith(GATEWAY_SCHEME):
            known = tx.one("get_endpoint", name=resource.endpoint.removeprefix(GATEWAY_SCHEME))
            if known is not None:
                resource.endpoint, resource.api_key = known
    return update
