"""The interface of an operation to its database: named statements, the time, and fields for its news.

The module knows no database. A driver (`sqlite.py`, `postgres_transaction.py`) prepares a transaction for each
operation, and publishes the news after the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from leyden.types import AttemptStatus, Rollout, RolloutStatus

Row = Sequence[Any]
"""One row of a query's result, in the order of its columns."""


Total = Literal["enqueued", "forgotten", "succeeded", "failed", "cancelled", "attempts", "spans", "bytes", "resources"]
"""A count that the database keeps in its table `totals`. Attempts, spans and bytes are those of finished rollouts.

enqueued, forgotten: rollouts ever made in any way, and rollouts removed since."""
TOTALS: tuple[Total, ...] = get_args(Total)
"""The columns of `get_totals`."""


class Long(Exception):
    """The operation touches more rows than a short one may. The driver runs it again in a thread for long ones."""


@dataclass(slots=True)
class SpanTarget:
    """The state of an attempt and its rollout that adding spans needs: a row of `get_span_target`, which each operation
    that adds spans keeps up to date.
    """

    rollout: int
    rollout_status: RolloutStatus
    attempts: int
    """The rollout's number of attempts, which is the latest attempt's number."""
    attempt: int
    status: AttemptStatus
    last_span: int
    """The highest sequence id that the attempt's counter has given to a span or a caller."""
    worker_id: str | None
    may_have_indexes: bool
    """Whether an attribute may be indexed."""
    reward: float | None = None
    """The primary reward of the attempt's last reward span."""
    rewards: str = ""
    """All rewards of that span by name, as JSON; empty without one."""
    reward_span: int = 0
    """The sequence id of that span; 0 without one."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    cost: float | None = None
    unpriced_calls: int = 0


class Transaction(Protocol):
    """One operation's view of the database. Parameters are the `:names` of the query."""

    store_url: str
    """For error messages."""
    now: float
    """Unix seconds; one moment for the whole operation."""
    claimable: int
    """How many rollouts this operation queued. As many waiting claims are woken after the commit."""
    finished: list[str]
    """The rollouts that this operation finished. Their waiters are notified after the commit."""
    spans: bool
    """Whether this operation added spans. Waiters for spans are notified after the commit."""
    labels: bool
    """Whether this operation changed labels or releases. Waiters for labels are notified after the commit."""
    targets: dict[tuple[str, str], SpanTarget]
    """Valid span targets by rollout and attempt: those that this operation read or made, and those that earlier
    operations left if the driver knows that no other store has written since. A claim adds its attempts. Other
    operations that change an attempt, a rollout or an index elsewhere than in `body/spans.py` neither read them nor
    call `keep_targets`."""

    @property
    def clock(self) -> float | None:
        """The operation's time, for use as a statement's parameter; None if `now` was not read yet.

        For None, the statement uses the database's clock, which saves a round trip.
        """
        ...

    def date(self, rollout: Rollout, /) -> None:
        """Set the `start_time` of a new rollout to the operation's time, when it is committed at the latest."""
        ...

    def expect(self, rows: int | None, /) -> None:
        """Declare, before anything is written, how many rows the operation touches. None: unknown, perhaps many.

        Raise Long if the driver runs operations of this length elsewhere. An operation that declares nothing is short.
        """
        ...

    def known_target(self, rollout_id: str, attempt_id: str) -> SpanTarget | None:
        """Return the attempt that adding spans needs, if it is known and valid; None if it must be read."""
        ...

    def keep_targets(self) -> None:
        """Declare that `targets` is up to date with all changes of this operation, so that the next one may use them.

        Without this call, or if the operation fails, they are dropped after it.
        """
        ...

    def lock(self, rollout_ids: Iterable[str], /) -> None:
        """Lock the rollouts that this operation will change until the commit. Call it before the first of them is read,
        in an operation on several rollouts.

        They are locked in one order, so that two operations do not deadlock. An operation on one rollout need not call
        it.
        """
        ...

    def tally(self, changes: Mapping[Total, int], /) -> None:
        """Add `changes` to the totals that the database keeps.

        The driver writes all changes of an operation before the commit, in one statement.
        """
        ...

    def ahead(self, query: str, asked: Sequence[dict[str, Any]], /) -> None:
        """Announce the parameters with which `one` or `all` will be called, each for one rollout. Call it after `lock`,
        and before the first write.

        A driver whose database is remote requests all rows at once, unless a rollout is named twice, because the write
        for the first may change the row that the second reads.
        """
        ...

    def run(self, query: str, /, **parameters: Any) -> None:
        """Run a statement whose outcome is not read. Its error may be raised later, by the commit at the latest."""
        ...

    def change(self, query: str, /, **parameters: Any) -> int:
        """Run a statement. Return the number of rows that it changed."""
        ...

    def insert(self, query: str, /, **parameters: Any) -> int:
        """Run an INSERT of one row. Return its generated key."""
        ...

    def put(self, query: str, values: Sequence[Any], /) -> None:
        """Run a statement that has `?` for its parameters."""
        ...

    def put_many(self, query: str, rows: Sequence[Sequence[Any]], /) -> None:
        """Call `put` for each of these rows, in few statements.

        The query must be an INSERT of one row whose VALUES are all `?`.
        """
        ...

    def put_new(self, query: str, rows: Sequence[Sequence[Any]], /) -> int:
        """Insert rows, skip those that exist, and return how many were new. It is fastest if all are new.

        The query must be an INSERT of one row whose VALUES are all `?`.
        """
        ...

    def one(self, query: str, /, **parameters: Any) -> Row | None:
        """Return the query's first row; None if there is none."""
        ...

    def all(self, query: str, /, **parameters: Any) -> list[Row]:
        """Return all rows of the query."""
        ...

    def page(self, query: str, suffix: str, parameters: dict[str, Any], /) -> list[Row]:
        """Return all rows of a named query with filters, an order and a limit behind it (from `pages.py`)."""
        ...

    def count(self, query: str, where: str, parameters: dict[str, Any], /, *, most: int) -> int:
        """Count the rows of a named query with filters, up to `most`."""
        ...
