"""Rollouts, attempts and what an enqueuer may ask of them. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leyden.types.named_fields import NamedFields
from leyden.types.run_record import current_run_id

TaskInput = Any
"""The input of one piece of work: any JSON value."""

RolloutStatus = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout", "cancelled"]
RolloutMode = Literal["train", "val", "test", "live"]

OVERTAKES = 1000
"""A rollout whose priority is one higher is claimed before at most this many older rollouts, so that a low priority
waits but never starves."""
Priority = Annotated[int, Field(ge=-1000, le=1000, strict=True)]
"""The priority of a rollout, 0 by default. Claims go by priority, then age; OVERTAKES limits how far a priority
reaches."""

ROLLOUT_FINISHED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed", "cancelled"})
"""The statuses that a rollout never leaves."""
ATTEMPT_FINISHED: frozenset[AttemptStatus] = frozenset({"succeeded", "failed", "timeout", "cancelled"})
"""The statuses that an attempt never leaves. `unresponsive` is not one of them: a late span revives it."""


class RolloutConfig(NamedFields):
    """The limits of a rollout, and the conditions of its success."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """The store ends an attempt that is older than this as `timeout`. None: no limit."""
    unresponsive_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """An attempt without a heartbeat (a span is one) for this long is `unresponsive`. None: no limit."""
    max_attempts: int = Field(default=1, ge=1, strict=True)
    """The most attempts in all."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus], fail_fast=True)
    """The attempt statuses (`failed`, `timeout`, `unresponsive`) after which another attempt is made."""
    require_reward: bool = False
    """An attempt that ends without a reward has failed."""
    require_model_call: bool = False
    """An attempt that ends without a recorded model call has failed."""


class Rollout(BaseModel):
    """A task to be run once, successfully. It takes one or more attempts."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    rollout_id: str
    """`ro-` and 24 hexadecimal digits, or any id of the caller's choice."""
    input: TaskInput
    start_time: float
    """The time at which it was enqueued."""
    end_time: float | None = None
    """The time at which it reached a final status."""
    mode: RolloutMode | None = None
    resources_id: str | None = None
    resources_version: int | None = None
    """The version of the resources that was the newest when the rollout was enqueued."""
    run_id: str | None = None
    """The run that it belongs to; None if it was enqueued outside of any run."""
    group_id: str | None = None
    """The id of a group of rollouts of one task that are compared with each other. The algorithm chooses it."""
    arm: str | None = None
    """The side of an experiment that it belongs to, such as `control` or `canary`."""
    status: RolloutStatus = "queuing"
    priority: Priority = 0
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])

    @property
    def finished(self) -> bool:
        """Whether the status is final."""
        return self.status in ROLLOUT_FINISHED


class Attempt(BaseModel):
    """One try at a rollout by one worker."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    rollout_id: str
    attempt_id: str
    """`at-` and 8 hexadecimal digits, or any id of the caller's choice."""
    sequence_id: int = Field(ge=1)
    """1 for the first attempt of a rollout, 2 for the next."""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`metadata["reason"]` says why a failed attempt failed, `metadata["reason_kind"]` names the kind."""
    reward: float | None = None
    """The primary reward of the reward span with the highest sequence id, as `find_final_reward` finds it."""
    rewards: dict[str, float] = Field(default_factory=dict[str, float])
    """All rewards of that span by name, the primary one first."""
    prompt_tokens: int = 0
    """Tokens of the prompts of the model calls that the gateway recorded, as the model's servers count them."""
    response_tokens: int = 0
    cost: float | None = None
    """Cost of the recorded model calls, in the unit of `UpstreamModel.price_per_million`; None if no call has a known
    cost."""
    unpriced_calls: int = 0
    """Recorded calls whose cost is not known: their model has no price, or they were answered without a usage. With
    some, `cost` is a part of what the attempt cost."""
    failure: str | None = None
    """The kind of failure: `metadata["reason_kind"]`, or the status without one. None unless the attempt ended without
    success."""

    @property
    def finished(self) -> bool:
        """Whether the status is final."""
        return self.status in ATTEMPT_FINISHED

    @property
    def interrupted(self) -> bool:
        """Whether the attempt failed through no fault of its own (`metadata["reason_kind"]` is `interrupted`), so that
        it does not count against `max_attempts`.
        """
        return self.status == "failed" and self.metadata.get("reason_kind") == "interrupted"


class AttemptedRollout(Rollout):
    """A rollout together with one of its attempts."""

    attempt: Attempt

    @model_validator(mode="after")
    def _same_rollout(self) -> AttemptedRollout:
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(
                f"attempt {self.attempt.attempt_id!r} is of rollout {self.attempt.rollout_id!r}, not of {self.rollout_id!r}"
            )
        return self


def failure_reason(rollout: Rollout) -> str:
    """Return why a rollout did not succeed, from its newest attempt, in one line. The rollout's and the attempt's ids
    are replaced, so that equal reasons can be counted.
    """
    if not isinstance(rollout, AttemptedRollout):
        return f"{rollout.status} before its first attempt"
    attempt = rollout.attempt
    reason = str(attempt.metadata.get("reason") or f"its attempt is {attempt.status}")
    reason = reason.replace(rollout.rollout_id, "(rollout)").replace(attempt.attempt_id, "(attempt)")
    return " ".join(reason.split())


class EnqueueRolloutRequest(BaseModel):
    """A request to run a task once, as `enqueue_many_rollouts` takes it."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    priority: Priority = 0
    rollout_id: str | None = None
    """Chosen by the caller, so that a repeated request adds no second rollout. None: the store makes one."""
    pin: str | None = None
    """Keep the rollout under this name from the first, beside those that are pinned under it (`LightningStore.pin`)."""
    run_id: str | None = Field(default_factory=current_run_id.get)
    """The run that the rollout belongs to. Left out: the run whose algorithm makes this request (`current_run_id`), if
    any. For a request that a server reads from a client: no run."""
    group_id: str | None = None
    """The id of a group of rollouts of one task that an algorithm compares with each other. The caller chooses it."""
    arm: str | None = None
    """The side of an experiment, such as `control` or `canary`, by which rollouts are filtered and summarised."""


class UpdateAttemptRequest(BaseModel):
    """One change of `update_many_attempts`. Fields that are left out stay as they are."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    rollout_id: str
    attempt_id: str
    """The attempt's id, or "latest"."""
    status: AttemptStatus | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] | None = None
    """Merged into the stored metadata."""


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
