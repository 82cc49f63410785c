"""The two protocols: anything to anything, and spans to anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from leyden.types import Span

__all__ = ["Adapter", "TraceAdapter"]

Source = TypeVar("Source", contravariant=True)
Target = TypeVar("Target", covariant=True)


class Adapter(ABC, Generic[Source, Target]):
    """A pure function with a name: equal input gives equal output, and nothing else happens."""

    @abstractmethod
    def adapt(self, source: Source) -> Target:
        """Convert."""


class TraceAdapter(Adapter[Sequence[Span], Target], Generic[Target]):
    """Converts the spans of one attempt, in any order."""
