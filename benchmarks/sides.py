"""A side of a benchmark as a process that stays: it takes commands, so that short slices of several sides can take turns.

It knows the line of JSON that goes in and the one that comes out, nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.harness import MINIMUM_RUNS, ROOT, PeerFailed, Row, Sample, summary

__all__ = ["Side", "alternate", "cpu_seconds_of", "row"]


class Side:
    """A script that answers commands, in the Python of its environment. To be used in `with`; the process ends with it.

    root: the clone whose Leyden it imports and in which it runs.
    """

    def __init__(self, name: str, python: Path, script: Path, *arguments: str, root: Path = ROOT) -> None:
        self.name = name
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        if name in ("leyden", "libpq"):
            environ["PYTHONPATH"] = str(root)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed with the process
        self._process = subprocess.Popen(
            [python, script, *arguments],
            cwd=root,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """The answer to one command. Raises PeerFailed, with what the process said, when there is none."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: object) -> None:
        """Give a command whose `answer` is fetched later, so that several sides work at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(do) from None

    def answer(self) -> dict[str, Any]:
        """Wait for the result of the oldest command that has none yet, and return it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("its command")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """CPU seconds that the process has used, all its threads."""
        return cpu_seconds_of(self._process.pid)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _failed(self, what: str) -> PeerFailed:
        self._process.wait(timeout=20)
        self._errors.seek(0)
        said = self._errors.read()[-2000:]
        return PeerFailed(f"{self.name} exits {self._process.returncode} instead of answering {what}\n{said}")


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds that a process has used, all its threads, and its children, those that have ended too."""
    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:4]) for one in (process, *process.children(recursive=True)))


def alternate(sides: Sequence[Callable[[], Sample]], *, pairs: int) -> list[list[Sample]]:
    """`pairs` rounds in which every side runs one short slice; the samples of each side, in the order of the rounds."""
    samples: list[list[Sample]] = [[] for _ in sides]
    for turn in range(pairs):
        order = list(zip(sides, samples, strict=True))
        for side, taken in order if turn % 2 == 0 else reversed(order):  # nobody always runs behind the same one
            taken.append(side())
    return samples


def row(
    name: str,
    unit: str,
    ours: list[Sample],
    theirs: list[Sample],
    peer_name: str | None,
    *,
    higher_is_better: bool = True,
) -> Row:
    """`harness.summary`, for at least five pairs."""
    if len(ours) < MINIMUM_RUNS:
        raise ValueError(f"{name}: {len(ours)} pairs, at least {MINIMUM_RUNS} are needed")
    return summary(name, unit, ours, theirs, peer_name, higher_is_better=higher_is_better)
