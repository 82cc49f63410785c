"""The limits by which a store deletes finished rollouts."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from leyden.types.named_fields import NamedFields


class Retention(NamedFields):
    """Limits of what a store keeps of finished rollouts; unfinished and pinned ones are always kept.

    A rollout is deleted, with its attempts and spans, as soon as one of the limits is exceeded; those that finished
    first go first. A deleted rollout is unknown to the store: read or pin what you need before, and expect a repeated
    enqueue under its id to make a new rollout.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rollouts: Annotated[int, Field(ge=0, strict=True)] | None = None
    """The most finished rollouts that are kept, pinned ones included."""
    max_age_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """The seconds for which a rollout is kept after it finished."""
    max_bytes: Annotated[int, Field(ge=0, strict=True)] | None = None
    """About how many bytes of the database finished rollouts may take together, with their attempts and spans."""

    @property
    def keeps_everything(self) -> bool:
        """Whether no limit is given."""
        return self.max_rollouts is None and self.max_age_seconds is None and self.max_bytes is None
