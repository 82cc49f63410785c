"""The loss of a critic: squared errors of value estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leyden._lib.options import check_number, named_options
from leyden.objectives.losses.loss import Loss, LossTerms, TokenBatch, register_loss

if TYPE_CHECKING:
    from torch import Tensor


@named_options
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Loss):
    """Constants of the loss `value`, which trains a critic alone. Raise ConfigError for one out of range."""

    value_coefficient: float = 0.5
    """Factor of the squared error; above 0."""
    value_clip: float | None = None
    """How far a value may move from the one before the step (`clipped_value_loss`); above 0. None: no limit."""

    def __post_init__(self) -> None:
        check_number("value_coefficient", self.value_coefficient, above=0)
        check_value_clip(self.value_clip)

    @property
    def uses_values(self) -> bool:
        return True


@register_loss("value", ValueLoss, columns=("returns", "values"))
def value(batch: TokenBatch, constants: ValueLoss) -> LossTerms:
    """Return the objective - value_coefficient * (value - return)^2 of each token, with the error clipped as in
    `clipped_value_loss` if there is a `value_clip`.

    Metric: `value_error`, the squared error.
    """
    errors_N = value_errors(batch, clip=constants.value_clip)
    return LossTerms(-constants.value_coefficient * errors_N, sums={"value_error": errors_N.detach().sum()})


def check_value_clip(value_clip: float | None) -> None:
    """Raise ConfigError unless the limit is above 0, or None."""
    check_number("value_clip", value_clip, above=0, or_none="no limit")


def value_errors(batch: TokenBatch, *, clip: float | None) -> Tensor:
    """Return the squared error of each value estimate against the column `returns`, shape (N,).

    clip: how far the estimates may move from the column `values` (`clipped_value_loss`); None: no limit.
    """
    assert batch.values_N is not None, "the engine computes them because the loss uses_values"
    returns_N = batch.columns["returns"]
    if clip is None:
        return (batch.values_N - returns_N).square()
    return clipped_value_loss(batch.values_N, returns_N, batch.columns["values"], clip=clip)


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, before_N: Tensor, *, clip: float) -> Tensor:
    """Return the squared error of each value estimate, clipped as in OpenAI's baselines and tianshou; shape (N,).

    max((v - R)^2, (before + clamp(v - before, -clip, clip) - R)^2): the larger of the error of the new value and the
    error of the new value kept within `clip` of the old one (`before_N`).
    """
    bounded_N = before_N + (values_N - before_N).clamp(-clip, clip)
    return (values_N - returns_N).square().maximum((bounded_N - returns_N).square())
