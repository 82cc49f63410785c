"""Where results go: one JSON file for each benchmark, and the pages made from all of them.

`docs/benchmarks.md` has the rows that a benchmark calls its `HEADLINES` (all, if it calls none so), each beside the
peer that comes closest; README has those of them that `README_ROWS` names. The pages in `docs/benchmarks/` have
everything: the line `<!-- bench:start store store_scale -->` of a page names the benchmarks whose tables stand there. A
benchmark may also return tables of its own, for metrics that are no comparison; they are kept in `results/tables/`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Row

RESULTS = ROOT / "benchmarks" / "results"
README, SUMMARY, PAGES = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "benchmarks"
README_ROWS = {
    "fit(Baseline), 4 runners, defaults (durable)",
    "gateway, durable: calls a CPU second",
    "Leyden GEPA: rollouts to 95 % of the optimum",
    "RL step: 2 to 6 turns, 830k model",
}
MARKED = re.compile(r"<!-- bench:start((?: \w+)*) -->\n(.*?)<!-- bench:end -->", re.DOTALL)
HEADER = "| what | unit | Leyden | peer | ratio (lowest to highest) |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Table:
    """A table as a page shows it."""

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
    """Return the rows of a benchmark that has been run."""
    return [Row(**row) for row in json.loads((results / f"{name}.json").read_text())]


def load_tables(name: str, *, results: Path = RESULTS) -> list[Table]:
    """Return the tables of a benchmark that has been run."""
    path = results / "tables" / f"{name}.json"
    return [Table(**content) for content in json.loads(path.read_text())] if path.exists() else []


def rewrite_pages(
    *, readme: Path = README, summary: Path = SUMMARY, pages: Path = PAGES, results: Path = RESULTS
) -> None:
    """Replace what is between the markers of every page.

    Raises ValueError if a page has not one pair of markers, if a page names a benchmark without results, or if a
    benchmark with results is on no page.
    """
    names = sorted(path.stem for path in results.glob("*.json"))
    rows = {name: load(name, results=results) for name in names}
    headline_rows = [row for name in names for row in headlines(name, rows[name])]
    _rewrite(summary, [], table(headline_rows))
    _rewrite(readme, [], table([row for row in headline_rows if row.row in README_ROWS]))
    everything = {name: shown([*rows[name], *load_tables(name, results=results)]) for name in names}
    placed: set[str] = set()
    for path in sorted(pages.glob("*.md")):
        here = _marked(path)[1].split()
        if unknown := set(here) - everything.keys():
            raise ValueError(f"{path} names {', '.join(sorted(unknown))}, which has no results; run it, or take it out")
        placed.update(here)
        _rewrite(path, here, "\n".join(f"## {name}\n\n{everything[name]}" for name in here))
    if missing := everything.keys() - placed:
        raise ValueError(f"{', '.join(sorted(missing))}: name it in the line `bench:start` of a page in {pages}")


def headlines(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return a benchmark's rows for the summary: its `HEADLINES`, each beside the peer that comes closest."""
    if importlib.util.find_spec(f"benchmarks.{name}") is None:
        return rows
    wanted: Sequence[str] | None = getattr(importlib.import_module(f"benchmarks.{name}"), "HEADLINES", None)
    if wanted is None:
        return rows
    by_ratio = sorted(rows, key=lambda row: row.ratio or math.inf, reverse=True)
    closest = {row.row: row for row in by_ratio if row.row in wanted}
    return [row for row in rows if row is closest.get(row.row)]


def _marked(path: Path) -> re.Match[str]:
    found = list(MARKED.finditer(path.read_text()))
    if len(found) != 1:
        raise ValueError(f"{path} needs the lines '<!-- bench:start -->' and '<!-- bench:end -->', once each")
    return found[0]


def _rewrite(path: Path, names: Sequence[str], content: str) -> None:
    mark = _marked(path)
    start = " ".join(["bench:start", *names])
    path.write_text(
        f"{mark.string[: mark.start()]}<!-- {start} -->\n{content}<!-- bench:end -->{mark.string[mark.end() :]}"
    )


def shown(measured: Sequence[Row | Table]) -> str:
    """Return the Markdown of all rows in one table, followed by the tables."""
    rows = [row for row in measured if isinstance(row, Row)]
    tables = [rendered(extra) for extra in measured if isinstance(extra, Table)]
    return "\n".join([table(rows), *tables] if rows else tables)


def table(rows: list[Row]) -> str:
    return HEADER + "".join(line(row) for row in rows)


def rendered(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return f"{textwrap.fill(table.title, 100)}\n\n" + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def line(row: Row) -> str:
    peer = "" if row.peer is None else f"{number(row.peer)} ({row.peer_name})"
    ratio = "" if row.ratio is None else f"**{number(row.ratio)}x** ({number(row.min)} to {number(row.max)})"
    return f"| {row.row} | {row.unit} | {number(row.leyden)} | {peer} | {ratio} |\n"


def number(value: float) -> str:
    """Three significant digits, without an exponent: 1,234 -> '1,230', 0.04567 -> '0.0457'."""
    return f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
