"""Ranks of unbounded values, such as cost and latency, as numbers in [0, 1].

The rank of a value among *earlier* values of both arms is an increasing function of it, fixed before the value is seen.
So if the treated arm's distribution is stochastically no larger than the control's, its mean rank is no larger either,
and `difference` tests that. No limit, unit or moment has to be known, and a single extreme value counts as one large
rank.

Source: a witness function that depends on the past alone, Shekhar and Ramdas, arXiv:2112.09162. Here it is the
empirical distribution function.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from leyden.errors import ConfigError

_KEPT = 500
"""How many values a history keeps."""


@dataclass(frozen=True, slots=True)
class RankHistory:
    """The latest values of both arms."""

    latest: tuple[float, ...] = ()
    """The latest values in order of arrival, at most 500."""
    ordered: tuple[float, ...] = ()
    """The values of `latest` in ascending order."""


def observe_rank(history: RankHistory, value: float) -> tuple[float, RankHistory]:
    """Return the mid-rank of a value among earlier values, in [0, 1], and the history with the value, of which the
    oldest is dropped beyond 500.

    The mid-rank is (values below + half of the equal ones) / values; 0.5 without a history. Infinity is a value: a
    request that timed out took longer than all others.
    Raise ConfigError for NaN.
    """
    if math.isnan(value):
        raise ConfigError("value is NaN, which has no rank")
    low, high = bisect_left(history.ordered, value), bisect_right(history.ordered, value)
    count = len(history.ordered)
    rank = (low + high) / (2 * count) if count else 0.5
    ordered = (*history.ordered[:high], value, *history.ordered[high:])
    latest = (*history.latest, value)
    if count == _KEPT:
        gone = bisect_left(ordered, latest[0])
        ordered, latest = (*ordered[:gone], *ordered[gone + 1 :]), latest[1:]
    return rank, RankHistory(latest, ordered)
