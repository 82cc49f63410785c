"""The messages of Agent Lightning 0.1's task protocol, with the fields and defaults of its wheels.

An unknown field is ignored, as it is there. Resources have the form of `leyden.types`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from leyden._lib.frames import users_stacklevel
from leyden._lib.numbers import as_number
from leyden.types import ResourcesUpdate


def _number(value: object) -> object:
    return value if value is None or isinstance(value, str) else as_number(value)


Reward: TypeAlias = Annotated[float | None, BeforeValidator(_number)]
"""A number of any library, or its text, as the protocol's wheels take it."""


class Task(BaseModel):
    """One task, as the server gives it to a worker."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    rollout_id: str
    input: Any
    mode: Literal["train", "val", "test"] | None = None
    resources_id: str | None = None
    """The resources to use. None: the latest."""
    create_time: float | None = None
    """When the task was queued, in Unix seconds."""
    last_claim_time: float | None = None
    """When the task was last given to a worker, in Unix seconds."""
    num_claims: int | None = None
    """How often the task was given to a worker, this time included."""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class TaskIfAny(BaseModel):
    """The reply to a worker that requests a task."""

    is_available: bool
    task: Task | None = None


class TripletLegacy(BaseModel):
    """One model call in a report; `leyden.types.Triplet` with untyped prompt and response."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="constants")

    prompt: Any
    """Usually `{"token_ids": [...]}`."""
    response: Any
    """Usually `{"token_ids": [...]}`."""
    reward: Reward = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class RolloutLegacy(BaseModel):
    """The report of a worker on one task."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    rollout_id: str
    task: Task | None = None
    final_reward: Reward = None
    triplets: list[TripletLegacy] | None = None
    trace: list[dict[str, Any]] | None = None
    """Spans, in the form of `json.loads(readable_span.to_json())` of the OpenTelemetry SDK."""
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])

    @property
    def is_empty(self) -> bool:
        """Whether the report has no reward, no triplets and no trace.

        A worker sends an empty report if the agent raised an error.
        """
        return self.final_reward is None and not self.triplets and not self.trace


class GenericResponse(BaseModel):
    """The reply to a report."""

    status: str = "success"
    message: str | None = None
    data: dict[str, Any] | None = None


def read_resources(payload: Mapping[str, Any]) -> ResourcesUpdate:
    """Return the resources in a reply.

    The protocol has no times and no version, so they are set to now and 1. Raise pydantic's ValidationError for a reply
    in another form.
    """
    now = time.time()
    return ResourcesUpdate.model_validate({"create_time": now, "update_time": now, "version": 1, **payload})


def warn_deprecated(name: str, instead: str) -> None:
    """Give a DeprecationWarning that points to the user's line.

    name: what belongs to this protocol.
    instead: what to write in new code.
    """
    warnings.warn(
        f"{name} belongs to the task protocol of Agent Lightning 0.1; write {instead}",
        DeprecationWarning,
        stacklevel=users_stacklevel(),
    )
