"""Restore the releases and feedback of another store, with their times and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.errors import ConfigError
from leyden.store.sql.rows import utf8_text
from leyden.store.sql.transaction import Transaction
from leyden.types import AuditRecord, Feedback, Label, Release, ResourcesUpdate
from leyden.types.checks import check_audit, check_feedback, check_label, check_release, check_version


@dataclass(frozen=True)
class Restored:
    """The records that `restore` adds, in the order of the other store."""

    resources: Sequence[ResourcesUpdate]
    labels: Sequence[Label]
    releases: Sequence[Release]
    audit: Sequence[AuditRecord]
    feedback: Sequence[Feedback]
    served: Sequence[tuple[str, str, int, str | None]]
    """The id of each live rollout, and the resources id, version and arm that it ran with, for late feedback."""


def restore(tx: Transaction, restored: Restored) -> None:
    """Insert the resources, labels, releases, audit log and feedback of another store, unchanged.

    Raise ConfigError if this store has any of them already, because their order is meaningful.
    """
    tx.expect(None)  # perhaps many rows
    if tx.one("has_released") is not None:
        raise ConfigError(
            f"{tx.store_url} has resources, feedback, releases or an audit log already; import into a new store"
        )
    _add_versions(tx, restored.resources)
    for label in restored.labels:
        check_label(label)
        tx.run("put_label", label=label.label, resources_id=label.resources_id, version=label.version)
    for release in restored.releases:
        _add_release(tx, release)
    for record in restored.audit:
        _add_record(tx, record)
    for one in restored.feedback:
        fields = one.model_dump(exclude={"sequence_id"})
        tx.run("insert_feedback", **{**fields, "value": check_feedback(one)})
    for row in restored.served:
        tx.put_many("insert_served", [row])
    tx.labels = True


def _add_versions(tx: Transaction, versions: Sequence[ResourcesUpdate]) -> None:
    """Insert versions of resources, with their times and whether they are frozen."""
    tx.tally({"resources": len({each.resources_id for each in versions})})
    for each in versions:
        parent_id, parent_version = each.parent or (None, None)
        tx.run(
            "insert_resources",
            resources_id=each.resources_id,
            version=each.version,
            create_time=each.create_time,
            update_time=each.update_time,
            resources=check_version(each),
            parent_id=parent_id,
            parent_version=parent_version,
            author=each.author,
        )
        if each.frozen:
            tx.run("set_frozen", frozen=1, resources_id=each.resources_id, version=each.version)


def _add_release(tx: Transaction, release: Release) -> None:
    """Insert a release with its times, without moving labels or writing audit records."""
    from_id, from_number = release.from_version or (None, None)
    canary_id, canary_number = release.canary_version
    tx.run(
        "restore_release",
        release_id=release.release_id,
        state=release.state,
        from_id=from_id,
        from_version=from_number,
        canary_id=canary_id,
        canary_version=canary_number,
        details=check_release(release),
        deadline=release.deadline,
        create_time=release.create_time,
        update_time=release.update_time,
    )


def _add_record(tx: Transaction, record: AuditRecord) -> None:
    """Append one record to the audit log with its original time."""
    check_audit(record)
    (from_id, from_version), (to_id, to_version) = record.before or (None, None), record.after or (None, None)
    tx.run(
        "insert_audit",
        action=record.action,
        time=record.time,
        label=record.label,
        from_id=from_id,
        from_version=from_version,
        to_id=to_id,
        to_version=to_version,
        release_id=record.release_id,
        state=record.state,
        who=record.who,
        why=utf8_text(record.why),
    )
