"""Restore the releases and feedback of another store, with their times and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.errors import ConfigError
from leyden.store.sql.body.labels import note
from leyden.store.sql.body.releases import insert_release
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
    tx.tally({"resources": len({each.resources_id for each in restored.resources})})
    for each in restored.resources:
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
    for label in restored.labels:
        check_label(label)
        tx.run("put_label", label=label.label, resources_id=label.resources_id, version=label.version)
    for release in restored.releases:
        insert_release(tx, **release.model_dump(exclude={"details"}), details=check_release(release))
    for record in restored.audit:
        check_audit(record)
        note(tx, **record.model_dump(exclude={"sequence_id"}))
    for one in restored.feedback:
        tx.run("insert_feedback", **{**one.model_dump(exclude={"sequence_id"}), "value": check_feedback(one)})
    tx.put_many("insert_served", restored.served)
    tx.labels = True
