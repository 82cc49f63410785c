"""The base classes of adapters: `Adapter`, and `TraceAdapter` for those that convert spans."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from leyden._lib.options import NamedOptions
from leyden.types import Span

logger = logging.getLogger(__name__)

Source = TypeVar("Source", contravariant=True)
Target = TypeVar("Target", covariant=True)


class Adapter(NamedOptions, ABC, Generic[Source, Target]):
    """Converts data without side effects: equal input gives equal output."""

    @abstractmethod
    def adapt(self, source: Source) -> Target:
        """Return the converted data."""


class TraceAdapter(Adapter[Sequence[Span], Target], Generic[Target]):
    """Converts the spans of one attempt, in any order."""


def log_result(
    adapter: object, source: Sequence[Span], what: str, found: Sequence[object], refused: Sequence[str] = ()
) -> None:
    """Log at DEBUG how many items an adapter made of an attempt.

    source: the attempt's spans.
    what: the items' name in the plural.
    refused: one reason for each item of `found` that cannot be trained on.
    """
    if not logger.isEnabledFor(logging.DEBUG) or not source:
        return
    reasons = "".join(f", {count} refused: {reason}" for reason, count in Counter(refused).items())
    name, first = type(adapter).__name__, source[0]
    line = "rollout %s: attempt %s, %s made %d %s of %d spans%s"
    logger.debug(line, first.rollout_id, first.attempt_id, name, len(found), what, len(source), reasons)
