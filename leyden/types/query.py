"""Pages of answers, and the mark for an argument that was not given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, overload

from pydantic import BaseModel, Field

from leyden.types.span import Span

T = TypeVar("T")

SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]


class Unset:
    """The type of `UNSET`, which stands for an argument that was not given where None has a meaning."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset()
"""An argument that was not given, where None means "set it to null"."""


@dataclass(frozen=True, slots=True)
class PaginatedResult(Sequence[T]):
    """One page of a query; a sequence of its items."""

    items: Sequence[T]
    limit: int
    """The page size asked for; -1 for all."""
    offset: int
    total: int
    """The number of matching items; a lower bound unless `exact`."""
    exact: bool = True
    """Whether `total` is exact. A store counts at most 10,000 matching items behind the page, unless it knows their
    number."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]


class SpanPage(BaseModel):
    """Spans in the order of their arrival, and the cursor to read on."""

    spans: list[Span]
    after: str
    """The opaque cursor after the last span. It stays valid for ever."""


class News(BaseModel):
    """Commits since a moment: hints to look again, never the truth itself."""

    after: str
    """An opaque cursor: the commits before it are included. It is valid while the store is open."""
    claimable: int = 0
    """The number of rollouts that were put in the queue."""
    finished: list[str] = Field(default_factory=list[str])
    """The ids of the rollouts that finished."""
    spans: bool = False
    """Whether spans were added."""
    labels: bool = False
    """Whether labels, frozen versions or releases changed. Only callers that ask for labels are notified."""
    gap: bool = False
    """Whether news may be missing, because the cursor is too old or from an earlier opening of the store. If so, read
    again everything that matters."""
