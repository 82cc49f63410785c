"""Releases of resources: label moves, the audit log, and the states of a release.

A store keeps these and knows no policy. The process that advances the release decides which states there are, and when
one follows another.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

VersionKey: TypeAlias = tuple[str, int]
"""A resources id and a version."""

AuditAction: TypeAlias = Literal["set_label", "remove_label", "freeze", "unfreeze", "release"]


class LabelMove(BaseModel):
    """One move of a label by compare-and-set."""

    model_config = ConfigDict(extra="forbid")

    label: str
    to: VersionKey | None
    """The version that the label goes to; None removes the label."""
    expected: VersionKey | None
    """The version that the label must be on now; None if there must be no such label."""


class AuditRecord(BaseModel):
    """One change of a label, of a version's freeze or of a release's state, written in the same transaction."""

    sequence_id: int
    """The order of the changes."""
    action: AuditAction
    time: float
    """Unix seconds, by the store's clock."""
    label: str | None = None
    before: VersionKey | None = None
    """The version that the label was on."""
    after: VersionKey | None = None
    """The version that the label is on after the change, or that was frozen or unfrozen."""
    release_id: str | None = None
    """The release whose transition made the change."""
    state: str | None = None
    """The state that the release got, for the action `release`."""
    who: str | None = None
    why: str | None = None


class Release(BaseModel):
    """A version of resources on its way into production, and the state of that release."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    release_id: str
    state: str
    from_version: VersionKey | None = None
    """The version in production when the release began; None for the first release."""
    canary_version: VersionKey
    """The version that is released."""
    details: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Data that a resumed process needs: counts, thresholds, the outcome."""
    deadline: float | None = None
    """Unix seconds; None for no deadline. The store does not act on it."""
    create_time: float
    update_time: float
