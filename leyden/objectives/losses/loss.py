"""Input and result of losses, and the registry of losses by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from leyden.objectives.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """Base of the constants of a registered loss. The type of the constants chooses the loss.

    Override a property if the loss needs that input for some values of the constants, for example only if the
    coefficient of a term is not 0.
    """

    @property
    def further_columns(self) -> tuple[str, ...]:
        """The names of the columns that the loss needs for these constants, beside the ones it is registered with."""
        return ()

    @property
    def uses_entropies(self) -> bool:
        """Whether the loss reads `TokenBatch.entropies_N`, with its gradient."""
        return False

    @property
    def uses_values(self) -> bool:
        """Whether the loss reads `TokenBatch.values_N`. Then it needs a backend with a value head."""
        return False


class TokenBatch(NamedTuple):
    """The input of a loss: the N trained tokens of several sequences, one sequence after the other."""

    logprobs_N: Tensor
    """Log-probabilities of the tokens under the trained policy; gradients flow through them."""
    columns: Mapping[str, Tensor]
    """Columns of the sequences by name, each of shape (N,). `logprobs`: log-probabilities under the policy that sampled
    the tokens. `advantages`: how much better than expected each token did."""
    weights_N: Tensor
    """The weight of each token in the loss; the engine applies it."""
    sequence_N: Tensor
    """The number of the sequence that each token belongs to, from 0. A sequence is never divided
    between two batches."""
    entropies_N: Tensor | None = None
    """Entropy, in nats, of the distribution that each token was drawn from, under the trained policy; None unless the
    loss `uses_entropies`."""
    values_N: Tensor | None = None
    """The value head's estimate before each token; None unless the loss `uses_values`."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The result of a loss: the objective of each of N tokens, and metrics."""

    objective_N: Tensor
    """The objective to maximise. The engine minimises - sum_t weight_t * objective_t."""
    sums: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Metrics by name, each summed over the N tokens (no dimension); reported as means over tokens."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Metrics by name, each the largest of the N tokens (no dimension); reported as maxima."""


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    """An entry of the registry of losses: name, function, the class of its constants, and columns."""

    name: str
    function: Callable[[TokenBatch, Any], LossTerms]
    """Return the terms of the loss for a batch of tokens and the loss's constants."""
    constants: type[Loss]
    columns: tuple[str, ...]
    """The columns that each sequence must have, whatever the constants."""

    def columns_of(self, loss: Loss) -> tuple[str, ...]:
        """Return the columns that each sequence must have for these constants."""
        return (*self.columns, *loss.further_columns)


LOSSES: Registry[RegisteredLoss] = Registry("loss")
"""Losses by name."""

L = TypeVar("L", bound=Loss)
LossFunction = Callable[[TokenBatch, L], LossTerms]


def register_loss(
    name: str, constants: type[L], *, columns: tuple[str, ...]
) -> Callable[[LossFunction[L]], LossFunction[L]]:
    """Return a decorator that registers a loss under a name, with the type of its constants.

    columns: names of the per-token columns that the function reads. An engine refuses sequences without one of them.
    Raise ConfigError for a name or a type that is registered already.
    """

    def register(function: LossFunction[L]) -> LossFunction[L]:
        LOSSES.add(RegisteredLoss(name, function, constants, columns))
        return function

    return register


def find_loss(loss: Loss) -> RegisteredLoss:
    """Return the registered loss that these constants belong to. Raise ConfigError for any other value."""
    return LOSSES.find(loss)


def make_loss(name: str, constants: Mapping[str, Any] | None = None) -> Loss:
    """Return the constants of the loss with this name; those left out have their defaults. Raise ConfigError for an
    unknown name or constant, and for a constant out of its range.
    """
    return cast(Loss, LOSSES.make(name, constants))
