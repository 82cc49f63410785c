"""Load the named statements of `queries.sql`, and those of `queries_{dialect}.sql` that replace them for one database.

In both files, each query has a line with its name and a description, and `{other}` stands for the text of another
query. The module knows no database. A driver whose parameters are not written `:name` rewrites the text once.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

_NAME_LINE = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load_queries(dialect: str | None = None) -> Mapping[str, str]:
    """Return every query of `queries.sql` by name. A query of the same name in `queries_{dialect}.sql` replaces it."""
    shared = parse_queries(_text("queries.sql"))
    if dialect is None:
        return shared
    own = parse_queries(_text(f"queries_{dialect}.sql"), shared)
    return {**parse_queries(_text("queries.sql"), instead=own), **own}


def parse_queries(
    text: str, shared: Mapping[str, str] | None = None, *, instead: Mapping[str, str] | None = None
) -> Mapping[str, str]:
    """Return the queries of a file by name. Raise ValueError for a missing description or a repeated name.

    shared: where `{other}` is looked up; None: among the earlier queries of the same file.
    instead: where `{other}` is looked up first.
    """
    queries: dict[str, str] = {}
    parts = _NAME_LINE.split(text)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = body.strip().splitlines()
        description = [line for line in lines if line.startswith("--")]
        if not description:
            raise ValueError(f"query {name!r} has no description; say below its name what it is for")
        if name in queries:
            raise ValueError(f"query {name!r} is defined twice")
        statement = "\n".join(line for line in lines if not line.startswith("--"))
        queries[name] = statement.format_map(ChainMap(dict(instead or {}), dict(queries if shared is None else shared)))
    return queries


@cache
def migrations(dialect: str) -> Sequence[str]:
    """Return the migration scripts of a database, in order."""
    entries = files("leyden.store.sql").joinpath("migrations", dialect).iterdir()
    scripts = sorted((entry for entry in entries if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return [entry.read_text(encoding="utf-8") for entry in scripts]


@cache
def adding(totals: Sequence[str]) -> str:
    """Return the statement that adds a value to each of these columns of `totals`' one row."""
    return f"UPDATE totals SET {', '.join(f'{total} = {total} + ?' for total in totals)} WHERE shard = 0"


def counting(query: str, where: str, most: int) -> str:
    """Return the statement that counts the rows of a query with filters, up to `most`."""
    return f"SELECT count(*) FROM ({query}{where} LIMIT {most}) AS matching"


def statements_for(rows: Sequence[Sequence[Any]], insert: str) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield statements that insert these rows, each with its values. `insert` is an INSERT of one row; the statements
    insert a power of two of rows each, so that few different ones are prepared.
    """
    start = 0
    while left := len(rows) - start:
        size = 1 << min(left.bit_length() - 1, _MAX_ROWS_BITS)
        part = rows[start : start + size]
        yield (insert, part[0]) if size == 1 else (_repeated(insert, size), tuple(chain.from_iterable(part)))
        start += size


_MAX_ROWS_BITS = 6
"""The most rows of one statement are 2**6 = 64. Every database takes their values, and more would save nothing."""
_ROW = re.compile(r"(?<=\bVALUES )\([^()]*\)")


@cache
def _repeated(insert: str, rows: int) -> str:
    return _ROW.sub(lambda row: ", ".join([row[0]] * rows), insert)


def _text(name: str) -> str:
    return files("leyden.store.sql").joinpath(name).read_text(encoding="utf-8")
