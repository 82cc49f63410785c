"""Rows, samples and paired runs: what every benchmark is written with.

A sample is one run: its value in the row's unit, and the CPU seconds it cost. Machines are noisy, so Leyden and its
peer run in turn, at least five times each, and the result is the median of the paired ratios, with the extremes
beside it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_RUNS = 5


@dataclass(frozen=True)
class Sample:
    """One run of one side."""

    value: float
    """In the row's unit."""
    cpu_s: float
    """CPU seconds that the run cost, its child processes included."""


@dataclass(frozen=True)
class Row:
    """One line of the results: medians, and how far the runs lay apart."""

    row: str
    unit: str
    leyden: float
    peer: float | None
    peer_name: str | None
    ratio: float | None
    """How many times better Leyden is: above 1 is better, whichever way the unit counts."""
    n: int
    """Runs of each side."""
    min: float
    """The smallest ratio of a pair; of Leyden's own values where no peer ran."""
    max: float
    cpu_s: float
    """CPU seconds of one of Leyden's runs, the median."""


class PeerFailed(Exception):
    """The peer's script ended badly; the message holds what it said."""


@dataclass(frozen=True)
class Peer:
    """Another project, installed in its own environment. Its scripts run there, as processes of their own."""

    name: str
    python: Path

    def run(self, script: Path, *arguments: str, timeout_seconds: float = 600) -> dict[str, object]:
        """Run a script and return the JSON object that is the last line of its output. Raises PeerFailed."""
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [self.python, script, *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired as slow:
            raise PeerFailed(f"{self.name}: {script.name} took more than {timeout_seconds:g} s") from slow
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            raise PeerFailed(f"{self.name}: {script.name} exits {done.returncode}\n{done.stderr[-2000:]}")
        try:
            return json.loads(lines[-1])
        except json.JSONDecodeError as bad:
            raise PeerFailed(f"{self.name}: {script.name} ends with {lines[-1]!r}, not with a JSON object") from bad

    def sample(self, script: Path, *arguments: str, timeout_seconds: float = 600) -> Sample:
        """One run of a script that ends with `{"value": ..., "cpu_s": ...}`."""
        answer = self.run(script, *arguments, timeout_seconds=timeout_seconds)
        return Sample(value=float(str(answer["value"])), cpu_s=float(str(answer["cpu_s"])))


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads, and its children that have ended."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in both)


def rate(work: Callable[[], float]) -> Sample:
    """Run `work`, which returns how many units it did; the sample's value is units a second."""
    cpu, began = cpu_seconds(), time.perf_counter()
    units = work()
    return Sample(value=units / (time.perf_counter() - began), cpu_s=cpu_seconds() - cpu)


def compare(
    row: str,
    unit: str,
    leyden: Callable[[], Sample],
    peer: Callable[[], Sample] | None = None,
    *,
    peer_name: str | None = None,
    higher_is_better: bool = True,
    runs: int = MINIMUM_RUNS,
) -> Row:
    """Run both sides in turn, `runs` times each, and return the medians and the ratio.

    leyden, peer: one run each. A peer that raises PeerFailed is dropped, with its reason printed: Leyden is then
    measured alone.
    Raises ValueError if `runs` is below five, too few to tell a result from noise.
    """
    if runs < MINIMUM_RUNS:
        raise ValueError(f"{row}: runs={runs}, at least {MINIMUM_RUNS} pairs are needed")
    ours: list[Sample] = []
    theirs: list[Sample] = []
    for _ in range(runs):
        ours.append(leyden())
        if peer is None:
            continue
        try:
            theirs.append(peer())
        except PeerFailed as failure:
            print(f"{row}: without {peer_name}, {failure}", flush=True)
            peer = None
    return summary(row, unit, ours, theirs if peer else [], peer_name, higher_is_better=higher_is_better)


def summary(
    row: str, unit: str, ours: list[Sample], theirs: list[Sample], peer_name: str | None, *, higher_is_better: bool
) -> Row:
    """The row that paired samples make; `theirs` is empty, or as long as `ours`."""
    values = [sample.value for sample in ours]
    ratios = [
        mine.value / other.value if higher_is_better else other.value / mine.value
        for mine, other in zip(ours, theirs, strict=bool(theirs))
    ]
    return Row(
        row=row,
        unit=unit,
        leyden=statistics.median(values),
        peer=statistics.median(sample.value for sample in theirs) if theirs else None,
        peer_name=peer_name if theirs else None,
        ratio=statistics.median(ratios) if ratios else None,
        n=len(ours),
        min=min(ratios or values),
        max=max(ratios or values),
        cpu_s=statistics.median(sample.cpu_s for sample in ours),
    )
