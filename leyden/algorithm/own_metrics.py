"""Numbers of an agent's own as metrics: further dimensions of its reward, and its annotations.

The module knows spans and no algorithm. An algorithm that reports the rewards of a stage's rollouts reports these
numbers with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from leyden._lib.numbers import mean_of
from leyden.types import Span, get_rewards_from_span, semconv

_RESERVED = ("agentlightning.", "leyden.")
"""Attributes that recorders add to a span themselves."""


def own_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Return the numbers of an attempt: `reward/NAME` for each dimension of its rewards except the primary one, and
    `annotation/NAME` for each number of an annotation. Of several values of one name, the last counts.
    """
    found: dict[str, float] = {}
    primary = semconv.PRIMARY_REWARD
    for span in spans:
        if rewards := get_rewards_from_span(span):
            primary = next(iter(rewards))
            found.update({f"reward/{name}": value for name, value in rewards.items()})
        elif span.name in (semconv.ANNOTATION, semconv.AGL_ANNOTATION):
            found.update(
                {
                    f"annotation/{name}": float(value)
                    for name, value in span.attributes.items()
                    if isinstance(value, int | float) and not name.startswith(_RESERVED)
                }
            )
    return {name: value for name, value in found.items() if name not in (f"reward/{primary}", "reward/primary")}


def means_of(attempts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the attempts that have it, in the order of names."""
    values: dict[str, list[float]] = {}
    for numbers in attempts:
        for name, value in numbers.items():
            values.setdefault(name, []).append(value)
    return {name: mean_of(values[name]) for name in sorted(values)}
