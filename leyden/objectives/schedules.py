"""`default_learning_rate`, and `learning_rate_at`: the learning rate of each step of a run, as pure functions.

The module knows no optimizer and no loop: an algorithm gets the rate of a step and passes it on in `OptimParams`. To
add a kind of schedule, add its decay to `_DECAYS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

from leyden._lib.options import check_choice, check_number
from leyden.errors import ConfigError

_DECAYS: Final[Mapping[str, Callable[[float], float]]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
"""A function of the fraction of the steps after the warm-up that are done, by kind. It returns the part of the decay
that is left, from 1 to 0."""

_RATES: Final = ((1e6, 1e-3), (1.35e8, 3e-5), (2.7e8, 1e-5), (1e9, 1e-6))
"""Numbers of weights, and the learning rate for a model of that size of which all weights are trained."""
_ADAPTER_FACTOR, _ADAPTER_MAX = 10.0, 1e-3
_UNKNOWN_RATE: Final = 1e-5
"""The learning rate for a model whose size is not known before it is loaded."""

SCHEDULES: Final = tuple(_DECAYS)
"""The kinds of schedules."""


def default_learning_rate(n_weights: int | None, *, adapter: bool) -> float:
    """Return the learning rate to start with for a model of this size.

    Between the sizes of the table it is interpolated on logarithms, and rounded to one digit. An adapter bears ten
    times the rate (LoRA Without Regret, Schulman et al., 2025). docs/how-to/choose-a-model.md has the measurements.

    n_weights: all weights of the model; None: unknown.
    adapter: whether an adapter (LoRA) is trained in place of all weights.
    """
    rate = _UNKNOWN_RATE
    if n_weights is not None:
        size = min(max(n_weights, _RATES[0][0]), _RATES[-1][0])
        (small, high), (large, low) = next(pair for pair in itertools.pairwise(_RATES) if size <= pair[1][0])
        rate = high * (low / high) ** (math.log(size / small) / math.log(large / small))
    return float(f"{min(_ADAPTER_MAX, rate * _ADAPTER_FACTOR) if adapter else rate:.0e}")


def learning_rate_at(
    step: int, total: int, base: float, *, warmup: int = 0, kind: str = "constant", final_fraction: float = 0.0
) -> float:
    """Return the learning rate of one step: a linear warm-up to `base`, then the decay of `kind`.

    step: the number of the step, from 0. A step after the last one has the last one's rate.
    total: the number of steps of the whole run, with the warm-up; at least 1.
    base: the rate after the warm-up.
    warmup: the number of steps of the warm-up. Step i of it has `base * (i + 1) / warmup`, so that no step has a rate
        of 0.
    kind: "constant", "linear" or "cosine" (half a cosine wave, SGDR, arXiv:1608.03983, eq. 5).
    final_fraction: the rate of the last step as a fraction of `base`, 0 to 1. "constant" has no decay.
    Raise ConfigError for a value out of its range.
    """
    check_learning_rate_schedule(total, base, warmup=warmup, kind=kind, final_fraction=final_fraction)
    check_number("step", step, at_least=0, whole=True)
    if step < warmup:
        return base * ((step + 1) / warmup)
    last = total - 1
    done = 1.0 if last <= warmup else min(1.0, (step - warmup) / (last - warmup))
    return base * (final_fraction + (1.0 - final_fraction) * _DECAYS[kind](done))


def check_learning_rate_schedule(
    total: int, base: float, *, warmup: int = 0, kind: str = "constant", final_fraction: float = 0.0
) -> None:
    """Raise ConfigError for constants that `learning_rate_at` refuses, before the first step."""
    check_number("total", total, at_least=1, whole=True)
    check_number("base", base, at_least=0)
    check_number("warmup", warmup, at_least=0, whole=True)
    check_choice("kind", kind, SCHEDULES)
    check_number("final_fraction", final_fraction, at_least=0, at_most=1)
    if kind != "constant" and warmup >= total:
        raise ConfigError(
            f"warmup is {warmup} of {total} steps, which leaves none for a {kind} decay; "
            'give a shorter warm-up or kind="constant"'
        )
