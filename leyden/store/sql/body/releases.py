"""Releases: one row for each, and transitions by compare-and-set that may move labels in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyden.errors import ConfigError, ReleaseAdvanced, UnknownRelease
from leyden.store.sql.body.labels import move_labels, note
from leyden.store.sql.body.resource_versions import unknown_version
from leyden.store.sql.pages import Filters, order_and_limit, page_of
from leyden.store.sql.rows import release_from
from leyden.store.sql.transaction import Transaction
from leyden.types import UNSET, LabelMove, PaginatedResult, Release, SortOrder, Unset, VersionKey
from leyden.types.checks import check_deadline, check_id, json_text

_SORTABLE = {name: f"e.{name}" for name in ("create_time", "update_time")}


def create_release(
    tx: Transaction,
    release_id: str,
    canary_version: tuple[str, int],
    *,
    state: str,
    from_version: tuple[str, int] | None = None,
    details: dict[str, Any] | None = None,
    deadline: float | None = None,
    labels: Sequence[LabelMove] = (),
    who: str | None = None,
    why: str | None = None,
) -> Release:
    check_id("release_id", release_id)
    check_id("state", state)
    check_deadline(deadline)
    created = insert_release(
        tx,
        release_id=release_id,
        state=state,
        from_version=from_version,
        canary_version=canary_version,
        details=_text(details),
        deadline=deadline,
        create_time=tx.now,
        update_time=tx.now,
    )
    if not created:
        present = get_release(tx, release_id)
        if present.canary_version != tuple(canary_version):
            raise ConfigError(
                f"release {release_id!r} in {tx.store_url} is of version {present.canary_version}, not of {tuple(canary_version)}; "
                "give the new release an id of its own"
            )
        return present
    for resources_id, version in [canary_version, *([from_version] if from_version else [])]:
        if tx.one("has_version", resources_id=resources_id, version=version) is None:
            raise unknown_version(tx, resources_id, version)
    move_labels(tx, labels, who=who, why=why, release_id=release_id)
    note(tx, "release", after=canary_version, release_id=release_id, state=state, who=who, why=why)
    return get_release(tx, release_id)


def insert_release(
    tx: Transaction, *, from_version: VersionKey | None, canary_version: VersionKey, **columns: Any
) -> int:
    """Insert the row of a release, unless there is one with its id, and return the number of new rows.

    columns: the other fields of `Release`, with the details as JSON.
    """
    (from_id, from_number), (canary_id, canary_number) = from_version or (None, None), canary_version
    versions = {
        "from_id": from_id,
        "from_version": from_number,
        "canary_id": canary_id,
        "canary_version": canary_number,
    }
    return tx.change("insert_release", **columns, **versions)


def advance_release(
    tx: Transaction,
    release_id: str,
    *,
    expected_state: str,
    state: str,
    details: dict[str, Any] | None = None,
    deadline: float | Unset | None = UNSET,
    labels: Sequence[LabelMove] = (),
    freeze: Sequence[tuple[str, int]] = (),
    who: str | None = None,
    why: str | None = None,
) -> Release:
    check_id("state", state)
    check_deadline(None if isinstance(deadline, Unset) else deadline)
    advanced = tx.change(
        "advance_release", release_id=release_id, state=state, expected_state=expected_state, now=tx.now
    )
    release = get_release(tx, release_id)
    if not advanced:
        if release.state == state:  # a repeated call finds it there
            return release
        raise ReleaseAdvanced(
            f"release {release_id!r} in {tx.store_url} is {release.state!r}, not {expected_state!r}, so it did not become "
            f"{state!r}; read it again and decide anew"
        )
    tx.labels = True  # sessions read the share of a canary from its release
    tx.run(
        "set_release",
        release_id=release_id,
        details=_text({**release.details, **(details or {})}),
        deadline=release.deadline if isinstance(deadline, Unset) else deadline,
    )
    move_labels(tx, labels, freeze=freeze, who=who, why=why, release_id=release_id)
    if state != expected_state:
        note(tx, "release", after=release.canary_version, release_id=release_id, state=state, who=who, why=why)
    return get_release(tx, release_id)


def get_release(tx: Transaction, release_id: str) -> Release:
    row = tx.one("get_release", release_id=release_id)
    if row is None:
        raise UnknownRelease(f"release {release_id!r} is not in {tx.store_url}; see query_releases")
    return release_from(row)


def query_releases(
    tx: Transaction,
    *,
    state_in: Sequence[str] | None = None,
    limit: int = -1,
    offset: int = 0,
    sort_by: str | None = "create_time",
    sort_order: SortOrder = "desc",
) -> PaginatedResult[Release]:
    page = order_and_limit(_SORTABLE, sort_by, sort_order, limit, offset, tie=["e.key"], never_null=_SORTABLE)
    filters = Filters("and")
    filters.among("e.state", state_in)
    where, parameters = filters.sql(), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_releases", release_from, where, page, parameters, limit, offset)


def _text(details: dict[str, Any] | None) -> str:
    return json_text(details, "the details of a release") if details else ""
