"""What an operation of the store is given: statements by name, the time, and a place to say what has happened.

It knows no database. A driver (`sqlite.py`) makes one for each operation, and publishes what it says after the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from leyden.types import AttemptStatus, RolloutStatus

Row = Sequence[Any]
"""One row of an answer, in the order of the query's columns."""


Total = Literal["enqueued", "forgotten", "succeeded", "failed", "cancelled", "attempts", "spans", "bytes", "resources"]
"""A count that the database keeps in its table `totals`. Attempts, spans and bytes are those of finished rollouts.

enqueued, forgotten: rollouts ever made in any way, and rollouts removed since.
"""
TOTALS: tuple[Total, ...] = get_args(Total)
"""The columns of `get_totals`."""


class Long(Exception):
    """The operation touches more rows than it may here; the driver runs it again where it may take its time."""


@dataclass(slots=True)
class SpanTarget:
    """Where the spans of an attempt go: a row of `get_span_target`, which whoever adds spans brings up to date."""

    rollout: int
    rollout_status: RolloutStatus
    attempts: int
    """How many the rollout has: the latest one's number."""
    attempt: int
    status: AttemptStatus
    last_span: int
    """The highest number that a span of it has, or has drawn."""
    worker_id: str | None
    may_have_indexes: bool
    """Whether spans may be found by attributes."""
    reward: float | None
    """The primary reward of the attempt's last reward span."""
    rewards: str
    """All rewards of that span by name, as JSON; empty without one."""
    reward_span: int
    """The number of that span, 0 without one."""
    prompt_tokens: int
    response_tokens: int
    cost: float | None


class Transaction(Protocol):
    """One operation's view of the database. Parameters are the `:names` of the query."""

    store_url: str
    """For error messages."""
    now: float
    """Unix seconds; one moment for the whole operation."""
    claimable: int
    """How many rollouts this operation put in the queue: so many waiting claims are woken after the commit."""
    finished: list[str]
    """The rollouts that this operation finished: whoever waits for them is told after the commit."""
    spans: bool
    """Whether this operation added spans: whoever watches them is told after the commit."""
    labels: bool
    """Whether this operation changed labels or releases: those who wait for labels are told after the commit."""
    targets: dict[tuple[str, str], SpanTarget]
    """By rollout and attempt, those that still hold: what this operation read, and what operations just before it left, where
    the driver makes sure that nobody else has written since. Who changes an attempt, a rollout or an index elsewhere than in
    `body/spans.py` neither reads them nor says `keep_targets`."""

    @property
    def clock(self) -> float | None:
        """`now` as a parameter of a statement that says what None is: where nobody has read it, it need not be waited for."""
        ...

    def expect(self, rows: int | None, /) -> None:
        """Say, before anything is written, how many rows it will be about (None: nobody knows, perhaps many).

        Raises Long where the driver wants so long an operation elsewhere. An operation that says nothing is short.
        """
        ...

    def known_target(self, rollout_id: str, attempt_id: str) -> SpanTarget | None:
        """Return the one of `targets` for an attempt, None if it has to be read."""
        ...

    def keep_targets(self) -> None:
        """Say that all this operation changes is seen in `targets`, which it brings up to date: the next one may read them.

        After an operation that does not say it they are forgotten, and after one that fails.
        """
        ...

    def lock(self, rollout_ids: Iterable[str], /) -> None:
        """Say, before any of them is read, which rollouts an operation on several will change: nobody else does until the commit.

        Locked together they are locked in one order, so that two operations do not wait for each other. An operation on one
        need not say it.
        """
        ...

    def tally(self, changes: Mapping[Total, int], /) -> None:
        """Add to the kept counts.

        The driver writes all changes of an operation before the commit, in one statement.
        """
        ...

    def ahead(self, query: str, asked: Sequence[dict[str, Any]], /) -> None:
        """Say with which parameters `one` will be asked for several rollouts, after `lock` and before anything is written.

        A driver that is far from its database asks for all of them at once, unless a rollout is named twice: what is
        written for the first may change what is read for the second.
        """
        ...

    def run(self, query: str, /, **parameters: Any) -> None:
        """Run a statement whose outcome nobody reads; what it raises may be raised later, by the commit at the latest."""
        ...

    def change(self, query: str, /, **parameters: Any) -> int:
        """Run a statement; answers how many rows it changed."""
        ...

    def insert(self, query: str, /, **parameters: Any) -> int:
        """Run an INSERT of one row; answers its generated key."""
        ...

    def put(self, query: str, values: Sequence[Any], /) -> None:
        """`run` for a statement with `?` instead of names."""
        ...

    def put_many(self, query: str, rows: Sequence[Sequence[Any]], /) -> None:
        """`put` for each of these rows, in few statements: for an INSERT of one row, whose VALUES are `?` alone."""
        ...

    def put_new(self, query: str, rows: Sequence[Sequence[Any]], /) -> int:
        """`put_many` of rows that are not there as a rule; answers how many were not."""
        ...

    def one(self, query: str, /, **parameters: Any) -> Row | None:
        """The first row of an answer, None when there is none."""
        ...

    def all(self, query: str, /, **parameters: Any) -> list[Row]:
        """All rows of an answer."""
        ...

    def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        """All rows of a named query with filters, an order and a limit put behind it (`pages.py` makes them)."""
        ...

    def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
        """Count the rows of a named query with filters, up to `most`."""
        ...
