"""The statements of `queries.sql`, by name.

It knows the file's three rules (a name line, a description, `{other}` for another query) and no database. A driver
whose parameters are not written `:name` rewrites the text once, when it is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

__all__ = ["load_queries", "parse_queries"]

_NAME_LINE = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def load_queries() -> Mapping[str, str]:
    """Every query of `queries.sql`."""
    return parse_queries(files("leyden.store.sql").joinpath("queries.sql").read_text(encoding="utf-8"))


def parse_queries(text: str) -> Mapping[str, str]:
    """The queries of a file in the form above. Raises ValueError for a missing description or a repeated name."""
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
        queries[name] = statement.format_map(queries)
    return queries
