"""Labels on versions of resources, frozen versions, and the audit log of both.

Every change writes its audit record in its own transaction. A call that changes nothing writes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyden.errors import ConfigError, LabelMoved, VersionFrozen
from leyden.store.sql.body.resource_versions import HIGHEST_VERSION, resolved, unknown_version
from leyden.store.sql.pages import Filters, order_and_limit, page_of
from leyden.store.sql.rows import audit_from, utf8_text
from leyden.store.sql.transaction import Transaction
from leyden.types import (
    UNSET,
    AuditAction,
    AuditRecord,
    Label,
    LabelMove,
    PaginatedResult,
    ResourcesUpdate,
    SortOrder,
    Unset,
    VersionKey,
)
from leyden.types.checks import check_id, check_who

_FROZEN = 8
"""The index of the column `frozen` in `resources_columns`."""


def set_label(
    tx: Transaction,
    label: str,
    resources_id: str,
    version: int,
    *,
    expected: tuple[str, int] | Unset | None = UNSET,
    who: str | None = None,
    why: str | None = None,
) -> None:
    _move(tx, label, (resources_id, version), expected, who=who, why=why)


def remove_label(
    tx: Transaction,
    label: str,
    *,
    expected: tuple[str, int] | Unset | None = UNSET,
    who: str | None = None,
    why: str | None = None,
) -> None:
    _move(tx, label, None, expected, who=who, why=why)


def move_labels(
    tx: Transaction,
    moves: Sequence[LabelMove],
    *,
    freeze: Sequence[tuple[str, int]] = (),
    who: str | None = None,
    why: str | None = None,
    release_id: str | None = None,
) -> None:
    for move in moves:
        _move(tx, move.label, move.to, move.expected, who=who, why=why, release_id=release_id)
    for resources_id, version in freeze:
        freeze_resources(tx, resources_id, version, who=who, why=why, release_id=release_id)


def freeze_resources(
    tx: Transaction,
    resources_id: str,
    version: int,
    *,
    frozen: bool = True,
    who: str | None = None,
    why: str | None = None,
    release_id: str | None = None,
) -> None:
    check_who(who, why)
    is_frozen = _is_frozen(tx, resources_id, version)
    if is_frozen == frozen:
        return
    of_version = {"resources_id": resources_id, "version": version}
    if frozen and (labels := [row[0] for row in tx.all("select_labels_on", **of_version)]):
        raise ConfigError(
            f"version {version} of {resources_id!r} in {tx.store_url} has the label {labels[0]!r}; move the label to another "
            "version first, and freeze then"
        )
    tx.run("set_frozen", frozen=int(frozen), **of_version)
    note(tx, "freeze" if frozen else "unfreeze", after=(resources_id, version), who=who, why=why, release_id=release_id)


def get_labelled_resources(tx: Transaction, label: str) -> ResourcesUpdate | None:
    row = tx.one("get_labelled", label=label)
    return None if row is None else resolved(tx, row)


def get_labels(tx: Transaction) -> Sequence[Label]:
    rows = tx.all("select_labels")
    return [Label(label=label, resources_id=resources_id, version=version) for label, resources_id, version in rows]


def query_audit(
    tx: Transaction,
    *,
    label: str | None = None,
    resources_id: str | None = None,
    release_id: str | None = None,
    sort_order: SortOrder = "desc",
    limit: int = -1,
    offset: int = 0,
) -> PaginatedResult[AuditRecord]:
    page = order_and_limit({}, None, sort_order, limit, offset, tie=["d.key"])
    filters = Filters("and")
    filters.equal("d.label", label)
    filters.equal("d.release_id", release_id)
    if resources_id is not None:
        filters.condition("(d.from_id = {} OR d.to_id = {})", resources_id, resources_id)
    where, parameters = filters.sql(), filters.parameters
    tx.expect(None)  # perhaps many rows
    return page_of(tx, "select_audit", audit_from, where, page, parameters, limit, offset)


def note(
    tx: Transaction,
    action: AuditAction,
    *,
    label: str | None = None,
    before: VersionKey | None = None,
    after: VersionKey | None = None,
    release_id: str | None = None,
    state: str | None = None,
    who: str | None,
    why: str | None,
    time: float | None = None,
) -> None:
    """Write one record of the audit log, and notify the callers that wait for labels.

    time: None for now.
    """
    tx.labels = True
    (from_id, from_version), (to_id, to_version) = before or (None, None), after or (None, None)
    tx.run(
        "insert_audit",
        action=action,
        time=tx.now if time is None else time,
        label=label,
        from_id=from_id,
        from_version=from_version,
        to_id=to_id,
        to_version=to_version,
        release_id=release_id,
        state=state,
        who=who,
        why=utf8_text(why),
    )


def _move(
    tx: Transaction,
    label: str,
    to: VersionKey | None,
    expected: VersionKey | Unset | None,
    *,
    who: str | None,
    why: str | None,
    release_id: str | None = None,
) -> None:
    """Put one label on a version, or remove it if `to` is None, and record it in the audit log.

    expected: the version that the label must be on now; None for no version, UNSET for any.
    Raise LabelMoved if the label is elsewhere, VersionFrozen if `to` is frozen, UnknownResources if `to` is not in the
    store.
    """
    check_id("label", label)
    check_who(who, why)
    frozen = to is not None and _is_frozen(tx, *to)
    row = tx.one("get_label", label=label)
    present = None if row is None else (row[0], row[1])
    if present == to:  # a repeated call finds it there
        return
    if not isinstance(expected, Unset) and present != (None if expected is None else tuple(expected)):
        raise LabelMoved(
            f"label {label!r} in {tx.store_url} is on {_shown_version(present)}, not on {_shown_version(expected)}, so it was not moved; "
            "read it again and decide anew"
        )
    if to is None:
        tx.run("delete_label", label=label)
    elif frozen:
        raise VersionFrozen(
            f"version {to[1]} of {to[0]!r} in {tx.store_url} is frozen, so label {label!r} cannot be put on it; "
            "choose another version, or unfreeze it with `leyden resources freeze ID VERSION --undo` "
            "(`leyden resources list --audit` says who froze it, and why)"
        )
    else:
        tx.run("put_label", label=label, resources_id=to[0], version=to[1])
    action: AuditAction = "remove_label" if to is None else "set_label"
    note(tx, action, label=label, before=present, after=to, release_id=release_id, who=who, why=why)


def _is_frozen(tx: Transaction, resources_id: str, version: int) -> bool:
    """Lock the store's labels until the commit, and return whether a version is frozen. Raise UnknownResources if it is
    not in the store.

    Reading by `has_version` takes the lock (`_LOCKS` of the PostgreSQL transaction); the row is read after it.
    """
    within = min(max(version, 0), HIGHEST_VERSION)  # PostgreSQL refuses a number beyond its column's type
    if tx.one("has_version", resources_id=resources_id, version=within) is None:
        raise unknown_version(tx, resources_id, version)
    row = tx.one("get_version", resources_id=resources_id, version=within)
    assert row is not None
    return bool(row[_FROZEN])


def _shown_version(of: tuple[str, int] | None) -> str:
    return "no version" if of is None else f"version {of[1]} of {of[0]!r}"
