"""Pages of answers, and the mark for an argument that was not given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, overload

__all__ = ["UNSET", "FilterLogic", "PaginatedResult", "SortOrder", "Unset"]

T = TypeVar("T")

SortOrder = Literal["asc", "desc"]
FilterLogic = Literal["and", "or"]


class Unset:
    """The type of UNSET."""

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
    """How many items match in all."""

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
