"""Write the filters, the order and the limit of a page as SQL to append to a named query.

The text contains column names that the body gives, and never a value: values are parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from leyden._lib.options import check_choice
from leyden.errors import ConfigError
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import FilterLogic, PaginatedResult, SortOrder

T = TypeVar("T")


@dataclass(slots=True)
class Filters:
    """Conditions joined by `logic`. A filter of None adds no condition. Two objects may share `parameters`."""

    logic: FilterLogic
    conditions: list[str] = field(default_factory=list)  # `list[str]` takes five times as long
    parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.logic not in ("and", "or"):
            raise ConfigError(f"filter_logic must be 'and' or 'or', got {self.logic!r}")

    def equal(self, column: str, value: str | int | None) -> None:
        """Require that the column has this value. None requires nothing."""
        if value is not None:
            self.conditions.append(f"{column} = :{self._parameter(value)}")

    def contains(self, column: str, part: str | None) -> None:
        """Require that the column contains this text, case-sensitively. None requires nothing."""
        if part is not None:
            self.conditions.append(f"instr({column}, :{self._parameter(part)}) > 0")

    def between(self, column: str, start: float | None, before: float | None) -> None:
        """Require `[start, before)` of the column; a missing end is open. Raise ConfigError for NaN."""
        for sign, end in ((">=", start), ("<", before)):
            if end is None:
                continue
            if math.isnan(end):
                raise ConfigError(f"a range from {start} to {before} holds nothing; give numbers, or leave an end out")
            self.conditions.append(f"{column} {sign} :{self._parameter(end)}")

    def condition(self, sql: str, *values: str | float | bytes) -> None:
        """Require the condition `sql`, in which `{}` marks each value."""
        self.conditions.append(sql.format(*(f":{self._parameter(value)}" for value in values)))

    def among(self, column: str, values: Iterable[str] | None, possible: Collection[str] | None = None) -> None:
        """Require that the column has one of these values. None requires nothing; an empty list matches no row.

        possible: the values that the column can have; None: any text.
        Raise ConfigError for an impossible value, for text in place of a list, and for more values than a statement
        takes.
        """
        if values is not None:
            if isinstance(values, str):
                raise ConfigError(f"{values!r} stands where a list of values belongs; write [{values!r}]")
            if possible is not None:
                values = list(values)
                for value in values:
                    check_choice(column.partition(".")[2], value, possible)
            names = ", ".join(f":{self._parameter(value)}" for value in values)
            if len(self.parameters) > _MAX_VALUES:
                raise ConfigError(
                    f"a query with {len(self.parameters):,} values is too long; ask for {_MAX_VALUES:,} at a time"
                )
            self.conditions.append(f"{column} IN ({names})" if names else "1 = 0")

    def sql(self, *always: str, begins: Literal["WHERE", "AND"] = "WHERE") -> str:
        """Return a WHERE clause: all of `always`, and the filters. Empty if there is neither.

        begins: AND for a query that has a WHERE clause.
        """
        parts = [*always]
        if self.conditions:
            parts.append("(" + f" {self.logic.upper()} ".join(self.conditions) + ")")
        return f" {begins} " + " AND ".join(parts) if parts else ""

    def _parameter(self, value: str | float | bytes) -> str:
        name = f"filter_{len(self.parameters)}"
        self.parameters[name] = value
        return name


def check_page(limit: int, offset: int) -> None:
    """Raise ConfigError unless `limit` is -1 (all) or at least 1, and `offset` at least 0."""
    if limit == 0 or limit < -1:
        raise ConfigError(f"limit must be -1 (all) or at least 1, got {limit}")
    if offset < 0:
        raise ConfigError(f"offset must be at least 0, got {offset}")


def within_reach(rows: int) -> int:
    """Return a limit of rows that every database takes: a number for "all" instead of a negative or very large one."""
    return min(rows, _ALL) if rows >= 0 else _ALL


def page_of(
    tx: Transaction,
    query: str,
    read: Callable[[Row], T],
    where: str,
    order: str,
    parameters: dict[str, Any],
    limit: int,
    offset: int,
) -> PaginatedResult[T]:
    """Return a page of a named query.

    read: makes an item of a row.
    where: the filters.
    order: the order and the limit.
    """
    items = [read(row) for row in tx.page(query, where + order, parameters)]
    total, exact = total_of(tx, query, where, parameters, found=len(items), limit=limit, offset=offset)
    return PaginatedResult(items, limit, offset, total, exact)


def total_of(
    tx: Transaction, query: str, where: str, parameters: dict[str, Any], *, found: int, limit: int, offset: int
) -> tuple[int, bool]:
    """Return how many items match in all, and whether that number is exact. The page has `found` of them.

    At most `COUNTED` items behind the page are counted, so that the cost of a page grows with its length. With more
    items, the total is a lower bound.
    """
    ends_here = limit == -1 or found < limit
    if ends_here and (found or not offset):
        return offset + found, True
    most = within_reach(offset + max(limit, 0) + COUNTED)
    total = tx.count(query, where, parameters, most=most)
    return total, total < most


COUNTED = 10_000
"""The most items after a page that are counted for its total."""
_ALL = 2**62
_MAX_VALUES = 10_000
"""The most values of one statement. SQLite takes 32,766, PostgreSQL 65,535."""


def order_and_limit(
    columns: Mapping[str, str],
    sort_by: str | None,
    sort_order: SortOrder,
    limit: int,
    offset: int,
    *,
    tie: Iterable[str],
    never_null: Container[str] = (),
) -> str:
    """Return the SQL of a page's order and limit: by one of `columns`, nulls last, then by `tie`.

    columns: the SQL of each column that `sort_by` may name.
    tie: columns that make the order unique, so that pages never overlap.
    never_null: the names in `columns` that have a value in every row.
    Raise ConfigError for a bad `sort_by`, `sort_order`, `limit` or `offset`.
    """
    check_page(limit, offset)
    if sort_order not in ("asc", "desc"):
        raise ConfigError(f"sort_order must be 'asc' or 'desc', got {sort_order!r}")
    if sort_by is not None and sort_by not in columns:
        raise ConfigError(f"cannot sort by {sort_by!r}; possible: {', '.join(sorted(columns))}")
    # With NULLS LAST, PostgreSQL does not read an index in its order: add it only where needed.
    nulls = "" if sort_by is None or sort_by in never_null else " NULLS LAST"
    first = [] if sort_by is None else [f"{columns[sort_by]} {sort_order}{nulls}"]
    order = " ORDER BY " + ", ".join([*first, *(f"{column} {sort_order}" for column in tie)])
    return (
        order if limit == -1 and offset == 0 else f"{order} LIMIT {within_reach(limit)} OFFSET {within_reach(offset)}"
    )
