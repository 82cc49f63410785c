"""Run every group of tests, in parts, and keep what came of them for each commit: `make nightly ARGS="--part 1/5"`.

A part takes at most 70 minutes. It writes `.nightly/COMMIT-1of5.json` after each group, so that a part that was stopped
keeps what it has. Without `--part` one table joins the files of a commit; those of other machines are copied beside
them. A failure is a failure: nothing runs a second time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.groups import GROUPS, QUICK, Group, Result, run, set_up  # noqa: E402 (this file is run as a script)

RESULTS = ROOT / ".nightly"
PART_MINUTES = 70
SHARDS = {"long": 2}
"""Into how many pieces a group is cut that would not fit into a part."""


@dataclass(frozen=True)
class Piece:
    """A group, or one of the pieces that it is cut into."""

    group: Group
    shard: str = "1/1"

    @property
    def name(self) -> str:
        return self.group.name if self.shard == "1/1" else f"{self.group.name} {self.shard}"

    @property
    def minutes(self) -> float:
        """The most it may take."""
        return self.group.minutes / int(self.shard.partition("/")[2])


def pieces() -> list[Piece]:
    """Return everything that is to run, the longest first."""
    found = [
        Piece(group, f"{number}/{count}")
        for group in (QUICK, *GROUPS)
        if not group.missing()
        for count in (SHARDS.get(group.name, 1),)
        for number in range(1, count + 1)
    ]
    return sorted(found, key=lambda piece: -piece.minutes)


def part(number: int, count: int) -> list[Piece]:
    """Return what part `number` of `count` runs. Exits if so few parts would take too long."""
    filled: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces():
        min(filled, key=lambda some: sum(each.minutes for each in some)).append(piece)
    longest = max(sum(piece.minutes for piece in some) for some in filled)
    if longest > PART_MINUTES:
        sys.exit(f"a part of {count} may take {longest:.0f} minutes, and {PART_MINUTES} are allowed; use more parts")
    return filled[number - 1]


def run_piece(piece: Piece) -> Result:
    """Set the piece's environment up and run its tests."""
    began = time.monotonic()
    ends = began + piece.minutes * 60
    if trouble := set_up(piece.group, ends):
        return Result(piece.name, trouble=trouble)
    return replace(run(piece.group, ends, shard=piece.shard), minutes=round((time.monotonic() - began) / 60, 1))


def results_of(commit: str) -> dict[str, Result]:
    """Return what is known of a commit, by piece; a later file of the same piece counts."""
    found: dict[str, Result] = {}
    for file in sorted(RESULTS.glob(f"{commit}-*.json"), key=lambda path: path.stat().st_mtime):
        found |= {row["piece"]: Result(**row) for row in json.loads(file.read_text())}
    return found


def table(commit: str) -> str:
    """Return one line for each piece, and a last one with what is missing."""
    known, wanted = results_of(commit), pieces()
    lines = [f"{'group':<14} {'passed':>7} {'failed':>7} {'skipped':>8} {'minutes':>8}"]
    for result in (known[piece.name] for piece in wanted if piece.name in known):
        numbers = f"{result.passed:>7,} {result.failed:>7,} {result.skipped:>8,} {result.minutes:>8.1f}"
        lines.append(f"{result.piece:<14} {numbers}  {result.trouble}".rstrip())
    good = sum(result.is_good for result in known.values())
    missing = [piece.name for piece in wanted if piece.name not in known]
    lines.append(f"{commit}: {good} of {len(wanted)} passed{'; not run: ' + ', '.join(missing) if missing else ''}")
    return "\n".join(lines)


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def newest() -> str:
    """Return the commit of the newest result; the present one if there is none."""
    files = sorted(RESULTS.glob("*-*.json"), key=lambda path: path.stat().st_mtime)
    return files[-1].name.partition("-")[0] if files else git("rev-parse", "--short=12", "HEAD").strip()


def share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/5 for the first of five")
    return int(number), int(count)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Run every group of tests in parts; without --part, show what came of them."
    )
    parser.add_argument("--part", type=share, metavar="K/N", help="run part K of N, such as 1/5")
    parser.add_argument("--commit", help="the commit of the table; that of the newest result by default")
    options = parser.parse_args(arguments)
    if options.part is None:
        commit = git("rev-parse", "--short=12", options.commit).strip() if options.commit else newest()
        print(table(commit))
        return 0
    if changed := git("status", "--porcelain"):
        sys.exit(f"commit first, because results belong to a commit; changed:\n{changed.rstrip()}")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{commit}-{options.part[0]}of{options.part[1]}.json"
    results: list[Result] = []
    for piece in part(*options.part):
        print(f"--- {piece.name}, at most {piece.minutes:g} minutes", flush=True)
        results.append(run_piece(piece))
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        aside.replace(file)
        print(f"--- {results[-1]}", flush=True)
    print(table(commit))
    return 0 if all(result.is_good or result.is_left_out for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
