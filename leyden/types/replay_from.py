"""The fork of a recorded attempt, as data on a rollout.

A rollout whose metadata has `leyden.replay_from` repeats another attempt: the gateway answers its first model calls
from that attempt's record, and asks the model from there on. The module knows rollouts, and neither the gateway nor the
store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leyden._lib.text import fault_reason
from leyden.errors import ConfigError
from leyden.types import semconv


class ReplayFrom(BaseModel):
    """The attempt that a rollout repeats, and the number of its calls that are repeated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: str
    attempt_id: str
    """An id; "latest" is refused, because the record must stay the same."""
    n_calls: Annotated[int, Field(ge=0, strict=True)]
    """Calls with a `leyden.call_index` below this are answered from the record. 0: none is."""

    def as_metadata(self) -> dict[str, Any]:
        """Return the entry for a rollout's metadata."""
        return {semconv.REPLAY_FROM: self.model_dump()}


def read_replay_from(metadata: Mapping[str, Any]) -> ReplayFrom | None:
    """Return the attempt that a rollout with this metadata repeats; None if it repeats none.

    Raise ConfigError for an entry that is no `ReplayFrom`.
    """
    given = metadata.get(semconv.REPLAY_FROM)
    if given is None:
        return None
    try:
        found = ReplayFrom.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the entry"
        raise ConfigError(f"metadata[{semconv.REPLAY_FROM!r}] is {given!r}: {where}: {fault_reason(first)}") from None
    if found.attempt_id == "latest":
        raise ConfigError(f"metadata[{semconv.REPLAY_FROM!r}]: attempt_id is 'latest'; give the id of one attempt")
    return found
