"""Feedback: what users, graders and operators say about a rollout after it was served."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leyden._lib import ids
from leyden._lib.numbers import finite_number

FeedbackKind: TypeAlias = Literal["reward", "label", "correction"]
"""`reward`: a finite number. `label`: a short text, such as `thumbs_up`. `correction`: the right answer, any JSON
value."""

_LABEL_LENGTH = 200


class Feedback(BaseModel):
    """One opinion about one rollout.

    A store keeps all of them. Of several with the same rollout, source and kind, the one that arrived last counts.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    feedback_id: str = Field(default_factory=ids.feedback_id)
    """Chosen by the caller, so that a repeated request is not counted twice."""
    rollout_id: str
    source: str
    """The source of the feedback: `user`, `grader-2`, an operator's name."""
    kind: FeedbackKind = "reward"
    value: Any
    """A finite number, a text or any JSON value, as `kind` says."""
    given_time: float | None = None
    """The time at which it was given, by the caller's clock, in Unix seconds."""
    received_time: float | None = None
    """The time at which it reached the store, by the store's clock. The store sets it."""
    sequence_id: int | None = None
    """The order of arrival, from 1. The store sets it."""
    resources_id: str | None = None
    """With `version`, the resources that the rollout ran with. The store takes both and `arm` from the rollout, while
    it knows the rollout."""
    version: int | None = Field(default=None, ge=1)
    arm: str | None = None

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Feedback:
        if fault := feedback_fault(self.kind, self.value):
            raise ValueError(fault)
        if self.kind == "reward":
            self.value = finite_number(self.value)
        return self


def feedback_fault(kind: FeedbackKind, value: Any) -> str | None:
    """Return why `value` is no feedback of this kind, or None if it is."""
    if kind == "reward":
        try:
            finite_number(value)
        except ValueError as error:
            return f"the value of a reward {error}"
    elif kind == "label" and not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= _LABEL_LENGTH):
        return f"the value of a label must be 1 to {_LABEL_LENGTH} printable characters, got {value!r:.200}"
    return None
