"""Where results go: one JSON file for each benchmark, and two pages made from all of them.

The README has the rows that a benchmark calls its `HEADLINES` (all, if it calls none so), each beside the peer that
comes closest; `docs/benchmarks.md` has everything. A benchmark may also return tables of its own, for metrics that are
no comparison; they are kept in `results/tables/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Row

RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
HEADER = "| what | unit | Leyden | peer | ratio (lowest to highest) |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Table:
    """A table as it stands on the page."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def save(name: str, measured: Sequence[Row | Table], *, results: Path = RESULTS) -> Path:
    path = results / f"{name}.json"
    _write(path, [asdict(row) for row in measured if isinstance(row, Row)])
    if tables := [asdict(table) for table in measured if isinstance(table, Table)]:
        _write(results / "tables" / f"{name}.json", tables)
    return path


def _write(path: Path, content: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def load(name: str, *, results: Path = RESULTS) -> list[Row]:
    """The rows of a benchmark that has been run."""
    return [Row(**row) for row in json.loads((results / f"{name}.json").read_text())]


def load_tables(name: str, *, results: Path = RESULTS) -> list[Table]:
    """Its tables."""
    path = results / "tables" / f"{name}.json"
    return [Table(**content) for content in json.loads(path.read_text())] if path.exists() else []


def rewrite_pages(*, readme: Path = README, page: Path = PAGE, results: Path = RESULTS) -> None:
    """Replace what is between the markers of both pages. Raises ValueError if they are not there, once each and in order."""
    names = sorted(path.stem for path in results.glob("*.json"))
    rows = {name: load(name, results=results) for name in names}
    _rewrite(readme, table([row for name in names for row in headlines(name, rows[name])]))
    everything = {name: shown([*rows[name], *load_tables(name, results=results)]) for name in names}
    _rewrite(page, "\n".join(f"## {name}\n\n{measured}" for name, measured in everything.items()))


def headlines(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return a benchmark's rows for the README: its `HEADLINES`, each beside the peer that comes closest."""
    if importlib.util.find_spec(f"benchmarks.{name}") is None:
        return rows
    wanted: Sequence[str] | None = getattr(importlib.import_module(f"benchmarks.{name}"), "HEADLINES", None)
    if wanted is None:
        return rows
    by_ratio = sorted(rows, key=lambda row: row.ratio or math.inf, reverse=True)
    closest = {row.row: row for row in by_ratio if row.row in wanted}
    return [row for row in rows if row is closest.get(row.row)]


def _rewrite(path: Path, content: str) -> None:
    text = path.read_text()
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{path} needs the line {START!r}, and below it the line {END!r}, once each")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{START}\n{content}{END}{after}")


def shown(measured: Sequence[Row | Table]) -> str:
    """All rows in one table, then the tables."""
    rows = [row for row in measured if isinstance(row, Row)]
    return table(rows) + "".join(f"\n{rendered(extra)}" for extra in measured if isinstance(extra, Table))


def table(rows: list[Row]) -> str:
    return HEADER + "".join(line(row) for row in rows)


def rendered(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return f"{table.title}\n\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def line(row: Row) -> str:
    peer = "" if row.peer is None else f"{number(row.peer)} ({row.peer_name})"
    ratio = "" if row.ratio is None else f"**{number(row.ratio)}x** ({number(row.min)} to {number(row.max)})"
    return f"| {row.row} | {row.unit} | {number(row.leyden)} | {peer} | {ratio} |\n"


def number(value: float) -> str:
    """Three significant digits, without an exponent: 1,234 -> '1,230', 0.04567 -> '0.0457'."""
    return f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
