"""Where results go: one JSON file for each benchmark, and the README's table, made from all of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import ROOT, Row

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
HEADER = "| what | unit | Leyden | peer | ratio (lowest to highest) |\n|---|---|---|---|---|\n"


def save(name: str, rows: list[Row], *, results: Path = RESULTS) -> Path:
    path = results / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return path


def load(*, results: Path = RESULTS) -> list[Row]:
    """The rows of every benchmark that has been run, by file name."""
    return [Row(**row) for path in sorted(results.glob("*.json")) for row in json.loads(path.read_text())]


def rewrite_table(*, readme: Path = README, results: Path = RESULTS) -> None:
    """Replace what is between the README's markers. Raises ValueError if they are not there, once each and in order."""
    text = readme.read_text()
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ValueError(f"{readme} needs the line {START!r}, and below it the line {END!r}, once each")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{START}\n{table(load(results=results))}{END}{after}")


def table(rows: list[Row]) -> str:
    return HEADER + "".join(line(row) for row in rows)


def line(row: Row) -> str:
    peer = "" if row.peer is None else f"{number(row.peer)} ({row.peer_name})"
    ratio = "" if row.ratio is None else f"**{number(row.ratio)}x** ({number(row.min)} to {number(row.max)})"
    return f"| {row.row} | {row.unit} | {number(row.leyden)} | {peer} | {ratio} |\n"


def number(value: float) -> str:
    """Three significant digits, without an exponent: 1,234 -> '1,230', 0.04567 -> '0.0457'."""
    return f"{float(f'{value:.3g}'):,.10f}".rstrip("0").rstrip(".")
