"""Sizes, seeds, figures and progress of the attack's tests, which run small in `GROUP=faults` and large in `GROUP=long`.

A test takes its sizes from `sizes` and its randomness from the `attack` fixture (`conftest.py`), counts what it does with
`Attack.count`, and leaves one line of figures in the file that `LEYDEN_ATTACK_FIGURES` names. It knows nothing of Leyden.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

EVERY = {"kills": 100, "conversations": 1000, "requests": 1000}
"""How many of what are worth a line of progress."""


def sizes(
    names: str, *, faults: tuple[Any, ...], long: tuple[Any, ...], merge: bool = True, minutes: float = 50
) -> pytest.MarkDecorator:
    """Run a test once in each group, with the group's own arguments.

    merge: whether the small size runs before a merge; not if it takes a minute.
    minutes: the limit of the large size. The small one has six minutes, for machines that do other work too.
    """
    small = [pytest.mark.faults, pytest.mark.timeout(360), *([pytest.mark.merge] if merge else [])]
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*faults, marks=small, id="small"),
            pytest.param(*long, marks=[pytest.mark.long, pytest.mark.timeout(minutes * 60)], id="large"),
        ],
    )


@dataclass
class Attack:
    """One test's seed and figures."""

    name: str
    seed: int
    say: Callable[[str], None]
    """Show a line at once, also while pytest captures output."""
    figures: Counter[str] = field(default_factory=Counter[str])
    started: float = field(default_factory=time.monotonic)

    @property
    def chance(self) -> random.Random:
        """A new generator with the test's seed."""
        return random.Random(self.seed)

    def count(self, **figures: int) -> None:
        """Add to the figures, and report progress at every hundredth kill and every thousandth conversation or request."""
        for name, number in figures.items():
            before = self.figures[name]
            self.figures[name] += number
            if (every := EVERY.get(name)) and before // every != self.figures[name] // every:
                seconds = time.monotonic() - self.started
                self.say(f"{self.name}: {self.figures[name]:,} {name} after {seconds:.0f} s")

    def write(self, path: Path, outcome: str) -> dict[str, Any]:
        """Append this test's figures to the file, one JSON object in a line."""
        line: dict[str, Any] = {"at": round(time.time(), 1), "test": self.name, "outcome": outcome, "seed": self.seed}
        line |= {"seconds": round(time.monotonic() - self.started, 1), **self.figures}
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)
        return line


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The figures as a Markdown table, as `docs/attack.md` quotes it."""
    rows = ["| test | outcome | s | done | seed |", "|---|---|---|---|---|"]
    for line in lines:
        done = ", ".join(
            f"{number:,} {name.replace('_', ' ')}"
            for name, number in line.items()
            if name not in ("at", "test", "outcome", "seed", "seconds")
        )
        rows.append(f"| `{line['test']}` | {line['outcome']} | {line['seconds']:.0f} | {done} | {line['seed']} |")
    return rows
