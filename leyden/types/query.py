"""Results of queries: pages, and counts, means and histograms of many rollouts; the mark for a missing argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, overload

from pydantic import BaseModel, Field

from leyden._lib.formatting import figure
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


Measure = Literal["reward", "tokens", "cost", "seconds"]
"""A measure of a finished rollout: the primary reward, the tokens of prompts and responses, the cost and the duration
in seconds of its latest attempt."""
Range = tuple[float | None, float | None]
"""`[start, before)` of a measure; None leaves an end open."""


class Histogram(BaseModel):
    """The number of values in each of several bins of equal width."""

    edges: list[float]
    """Length n + 1, ascending. Bin i holds `edges[i] <= value < edges[i + 1]`; the last bin holds
    its upper edge too."""
    counts: list[int]
    """The number of values in each of the n bins."""


class MeasureSummary(BaseModel):
    """One measure over the finished rollouts that have it."""

    count: int
    """The number of rollouts that have a value."""
    mean: float
    minimum: float
    maximum: float
    histogram: Histogram


class Spending(BaseModel):
    """What the model calls took that the gateway recorded for a run. See `LightningStore.sum_spending`."""

    attempts: int
    prompt_tokens: int
    response_tokens: int
    cost: float | None
    """The sum of the known costs; None if no call has one."""
    unpriced_calls: int
    """Answered calls whose cost is not known. With some, `cost` is a part of what the run cost."""

    def in_words(self, currency: str = "") -> str | None:
        """Return the cost for people, and whether it is a part of the whole: `at least 0.02 USD (3 calls have no known
        cost)`; None if no call has a known cost.
        """
        if self.cost is None:
            return None
        known, n = f"{figure(self.cost)} {currency}".rstrip(), self.unpriced_calls
        return f"at least {known} ({n:,} call{'s have' if n > 1 else ' has'} no known cost)" if n else known


class RolloutSummary(BaseModel):
    """Counts and measures of many rollouts. See `LightningStore.summarise_rollouts`."""

    finished: int
    by_status: dict[str, int] = Field(default_factory=dict[str, int])
    """Finished rollouts by status; a status without rollouts is left out."""
    by_failure: dict[str, int] = Field(default_factory=dict[str, int])
    """Failed rollouts by kind of failure (`Attempt.failure`)."""
    measures: dict[Measure, MeasureSummary] = Field(default_factory=dict[Measure, MeasureSummary])
    """The requested measures; one that no rollout has is left out."""
